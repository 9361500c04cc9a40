"""Products of PyTorch tensors on the CPU, with their gradients. Imported by name: `import rma_mm.torch`.

Each rank holds one dense tensor, its tile of a matrix that a layout places. Every call, a backward pass too, is
collective: all ranks make the same ones in the same order.
"""

from rma_mm.torch.dtensors import device_mesh, from_dtensor, to_dtensor
from rma_mm.torch.linear import Linear
from rma_mm.torch.products import empty, matrix_of, mm
from rma_mm.torch.state import full_state_dict, load_safetensors

__all__ = [
    "Linear",
    "device_mesh",
    "empty",
    "from_dtensor",
    "full_state_dict",
    "load_safetensors",
    "matrix_of",
    "mm",
    "to_dtensor",
]
