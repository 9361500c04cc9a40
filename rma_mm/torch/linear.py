"""A linear layer whose weight lies over a mesh, bias and activation in the epilogue of its product."""

from __future__ import annotations

from dataclasses import replace
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch.nn.init import calculate_gain

from rma_mm.elements.pointwise import ACTIVATIONS
from rma_mm.errors import DtypeError, LayoutError, OptionError, quoted
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.torch import operation
from rma_mm.torch.derivatives import KEEPS_SUMS
from rma_mm.torch.products import KeptProducts, empty, multiplied, request_of
from rma_mm.torch.tensors import TYPES, check_mesh

NAMED = ("column", "row")  # placements that have a name
TRAINED = tuple(dtype for dtype in TYPES if dtype.is_floating_point or dtype.is_complex)
"""Element types that weights may have."""
DRAWN = 2**22  # random numbers that are drawn at a time


class LinearLayouts(NamedTuple):
    x: Layout  # of (rows, in_features)
    weight: Layout  # of (out_features, in_features)
    y: Layout | None  # of (rows, out_features); None as the plan chooses

    @property
    def bias(self) -> Layout:
        """Layout of the bias as a matrix of one row, which every rank with these columns of y holds."""
        if self.y is None or self.y.partial:
            raise LayoutError(
                f"layout: got {self.y} with a bias, whose parts are those of y's columns; name y's layout, without sum"
            )
        return replace(self.y, splits=((), self.y.splits[1]))


class Linear(torch.nn.Module):
    """Linear layer y = activation(x @ weight.T + bias), of which each rank has its tiles.

    Collective to make and to call.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the whole layer.
    mesh : Mesh
        The ranks.
    bias : bool
        True for a bias (default).
    activation : {None, "relu", "gelu"}
        "gelu" is the exact form.
    placement : {"column", "row"} or Layout
        "column" (default) cuts out_features over the last axis of the mesh, and so y's columns. "row" cuts in_features,
        and so x's columns, and sums y; it takes what a "column" layer gives. Other axes cut the rows of x and y. Or the
        layout of the weight.
    x_layout, layout : str or Layout, optional
        Placements of x and y, if `placement` is a layout; the plan chooses y's by default.
    dtype : torch.dtype, optional
        Element type of the parameters.

    Attributes
    ----------
    weight : Parameter
        This rank's tile of (out_features, in_features), in memory of the mesh.
    bias : Parameter or None
        The part of out_features that belongs to this rank's columns of y.

    Raises
    ------
    LayoutError, OptionError, ShapeError, DtypeError, MeshError
        If the arguments do not fit.

    Notes
    -----
    Parameters begin as those of torch.nn.Linear, with rank 0's random numbers. A state_dict has each rank's shards. It
    can be loaded from such shards, or from whole tensors (see `full_state_dict`, `load_safetensors`).
    """

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, bias: bool = True, activation: str | None = None,
        placement: str | Layout = "column", x_layout: str | Layout | None = None, layout: str | Layout | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_mesh(mesh)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        given = {"placement": placement, "x_layout": x_layout, "layout": layout}
        with agreed(mesh.comm, "Linear", activation=activation, bias=bias, **given):
            if not (activation is None or (isinstance(activation, str) and activation in ACTIVATIONS)):
                raise OptionError(f"activation: got {quoted(activation)}; use {', '.join(ACTIVATIONS)} or None")
            if dtype not in TRAINED:
                raise DtypeError(f"dtype: got {quoted(dtype)}; use {', '.join(map(str, TRAINED))}")
            places = layouts_of(mesh.grid, placement, x_layout, layout)
            if bias:
                places.bias.check((1, out_features), mesh.grid)
        self.in_features, self.out_features = in_features, out_features
        self.mesh, self.activation, self.layouts = mesh, activation, places
        self.weight = torch.nn.Parameter(empty((out_features, in_features), mesh, places.weight, dtype))
        self.regions = {"weight": places.weight.region((out_features, in_features), mesh.grid, mesh.rank)}
        """The part of each whole tensor that this rank holds."""
        if bias:
            self.regions["bias"] = Region(places.bias.region((1, out_features), mesh.grid, mesh.rank)[1:])
            self.bias = torch.nn.Parameter(torch.empty(self.regions["bias"].shape, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._number()
        self.reset_parameters()

    def _number(self) -> None:
        """Give the layer's products numbers, by which compiled code calls them: without gradients, and with. Local."""
        kept, places = KeptProducts.of(self.mesh), self.layouts
        self._numbers = [
            operation.number_of(kept, request_of(
                self.mesh.grid, places.x, places.weight, places.y, True, self.bias is not None, self.activation,
                is_trained and self.activation in KEEPS_SUMS,
            ))
            for is_trained in (False, True)
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin anew, by random numbers of rank 0's generator: as torch.nn.Linear would there. Collective.

        Afterwards the generators of all ranks are alike: what they draw later is equal, too.
        """
        comm, random = self.mesh.comm, torch.Generator()
        first = torch.from_numpy(comm.bcast(torch.get_rng_state().numpy() if comm.rank == 0 else None))
        random.set_state(first)
        fan = max(1, self.in_features)
        gain = calculate_gain("leaky_relu", sqrt(5))
        bounds = {"weight": sqrt(3.0) * (gain / sqrt(fan)), "bias": 1 / sqrt(fan)}
        for name, whole in self.whole_shapes.items():
            own, region = self.get_parameter(name), self.regions[name]
            step = max(1, DRAWN // max(1, prod(whole[1:])))
            for start in range(0, whole[0], step):  # the same numbers as at once, in less memory
                rows = Span.range(start, min(start + step, whole[0]))
                block = Region((rows, *Region.whole(whole[1:])))
                drawn = torch.empty(block.shape, dtype=own.dtype)
                drawn.uniform_(-bounds[name], bounds[name], generator=random)
                mine = region & block
                own[region.locate(mine).selector()] = drawn[block.locate(mine).selector()]
        torch.set_rng_state(random.get_state())

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of all ranks together."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes | ({} if self.bias is None else {"bias": (self.out_features,)})

    def rows(self, n: int) -> slice:
        """Return this rank's rows of a batch of n rows, as `layer(x[layer.rows(n)])` takes them.

        Local.

        Parameters
        ----------
        n : int
            Rows of the whole batch.

        Returns
        -------
        slice
            The rows.

        Raises
        ------
        LayoutError
            If they are not contiguous in the layout of x.
        """
        found = self.layouts.x.region((n, self.in_features), self.mesh.grid, self.mesh.rank)[0]
        if not found.is_contiguous:
            raise LayoutError(f"rows: x is placed as {self.layouts.x}, which gives a rank rows that are not contiguous")
        return found.as_slice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tile of y, for its tile of x; dimensions before the last fold into rows. Collective."""
        rows = x.flatten(0, -2) if isinstance(x, torch.Tensor) and x.dim() > 2 else x
        number = self._numbers[torch.is_grad_enabled()] if torch.compiler.is_compiling() else None
        if number is not None:
            y = operation.multiply(rows, self.weight, self.bias, number)[0]
        else:
            y = multiplied(
                self.mesh, rows, self.weight, self.bias, self.layouts.x, self.layouts.weight, self.layouts.y, True,
                self.activation,
            )
        return y if rows is x else y.reshape(*x.shape[:-1], y.shape[-1])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, shape in self.whole_shapes.items():
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and tuple(given.shape) == shape:
                state_dict[prefix + name] = given[self.regions[name].selector()]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Return the text that torch prints of it."""
        what = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{what}, activation={self.activation!r}, weight={self.layouts.weight}"


def layouts_of(
    mesh: MeshShape, placement: str | Layout, x_layout: str | Layout | None, layout: str | Layout | None
) -> LinearLayouts:
    """Return the layouts of x, weight and y. Raises LayoutError."""
    given = [parse_layout(each, mesh) if isinstance(each, str) else each for each in (x_layout, layout)]
    if placement in NAMED:
        over, rest = (Level((mesh.names[-1],)),), tuple(Level((name,)) for name in mesh.names[:-1])
        whole, cut = Layout((rest, ())), Layout((rest, over))
        if placement == "column":
            places = LinearLayouts(whole, Layout((over, ())), cut)
        else:
            places = LinearLayouts(cut, Layout(((), over)), whole)
        return LinearLayouts(given[0] or places.x, places.weight, given[1] or places.y)
    weight = parse_layout(placement, mesh) if isinstance(placement, str) else placement
    if not isinstance(weight, Layout) or given[0] is None:
        raise LayoutError(
            f"placement: got {quoted(placement)}; must be {' or '.join(map(repr, NAMED))}, or the weight's layout with "
            f"x_layout, the layout of x"
        )
    return LinearLayouts(given[0], weight, given[1])
