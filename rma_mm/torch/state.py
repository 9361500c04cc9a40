"""Parameters of layers as whole tensors: gathered, and read from safetensors files, each rank its own part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rma_mm.errors import FileFormatError, OptionError, display_path
from rma_mm.runtime.files.containers.safetensors import file_in, read_header, read_index
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.torch.linear import Linear
from rma_mm.torch.tensors import array_of, tensor_of

PathLike = str | os.PathLike[str]


def layers_of(module: torch.nn.Module) -> dict[str, Linear]:
    """The layers over a mesh in a module, by the names of their parameters. Raises OptionError if there is none."""
    found = {
        f"{prefix}{'.' * bool(prefix)}{name}": layer
        for prefix, layer in module.named_modules()
        if isinstance(layer, Linear)
        for name in layer.whole_shapes
    }
    if not found:
        raise OptionError(f"module: got {type(module).__name__}, which has no rma_mm.torch.Linear; use its own methods")
    return found


def full_state_dict(module: torch.nn.Module, root: int | None = None) -> dict[str, Any]:
    """Return the module's state_dict with whole tensors, as the same module of torch.nn.Linear would have.

    Collective. Other layers' tensors are this rank's.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    root : int, optional
        The only rank that gets them; the others get an empty dict. By default every rank gets them.

    Returns
    -------
    dict
        Tensors by name.

    Raises
    ------
    OptionError, MeshError
        If the arguments do not fit.
    """
    layers = layers_of(module)
    state: dict[str, Any] = dict(module.state_dict())
    for name, layer in layers.items():
        whole = _whole(layer, name.rpartition(".")[2], root)
        if whole is not None:
            state[name] = whole
    is_wanted = root is None or next(iter(layers.values())).mesh.rank == root
    return state if is_wanted else {}


def _whole(layer: Linear, name: str, root: int | None) -> torch.Tensor | None:
    """Return a parameter of all ranks. Collective."""
    tile = layer.get_parameter(name).detach().contiguous()
    shape, layout = (layer.out_features, layer.in_features), layer.layouts.weight
    if name == "bias":
        tile, shape, layout = tile[None], (1, layer.out_features), layer.layouts.bias
    with DistMatrix.from_local(array_of(tile), shape, layer.mesh, layout) as matrix:
        array = matrix.to_numpy(root)
    return None if array is None else tensor_of(array).reshape(layer.whole_shapes[name])


@torch.no_grad()
def load_safetensors(module: torch.nn.Module, path: PathLike, prefix: str = "") -> None:
    """Fill the module's parameters and buffers from whole tensors in a safetensors file.

    Collective. Each rank reads only its own part of distributed tensors.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    path : path-like
        A file, or an index of several, as model.safetensors.index.json.
    prefix : str
        Prefix of the names in the file, as "model.". Tensors that the module does not have are ignored.

    Raises
    ------
    FileFormatError, OptionError
        If the file does not fit.
    """
    layers = layers_of(module)
    mesh = next(iter(layers.values())).mesh
    with agreed(mesh.comm, "load_safetensors", path=str(path), prefix=prefix), ExitStack() as files:
        slice_of = _slices(Path(path), files)
        for name, tensor in module.state_dict().items():
            stored = slice_of(prefix + name)
            layer = layers.get(name)
            own = tuple(tensor.shape) if layer is None else layer.whole_shapes[name.rpartition(".")[2]]
            if tuple(stored.get_shape()) != own:
                raise FileFormatError(
                    f"{display_path(path)}: {prefix + name} has shape {tuple(stored.get_shape())}; "
                    f"the module's is {own}"
                )
            for at, part in _parts(layer, name):
                tensor[at] = stored[part]


def _parts(layer: Linear | None, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield the slices of this rank's tensor and the slices of the whole tensor that belong to them."""
    if layer is None:
        yield ..., slice(None)
        return
    region = layer.regions[name.rpartition(".")[2]]
    for box in region.run_boxes() if region else ():
        yield region.locate(box).selector(), box.selector()


def _slices(path: Path, files: ExitStack) -> Callable[[str], Any]:
    """Return a function that finds a stored tensor by its name, without reading it. Raises FileFormatError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise OptionError("load_safetensors: safetensors is not installed: pip install safetensors") from None
    weights = read_index(str(path))[0] if path.suffix == ".json" else {}
    opened: dict[str, Any] = {}

    def of(name: str) -> Any:
        try:
            file = file_in(str(path), weights[name]) if path.suffix == ".json" else str(path)
            if file not in opened:
                read_header(file)  # refuses what is no regular file, or too large a header
                opened[file] = files.enter_context(safe_open(file, "pt"))
            return opened[file].get_slice(name)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise FileFormatError(f"{display_path(path)}: has no tensor {name} that can be read: {error}") from None

    return of
