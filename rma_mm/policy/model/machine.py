"""Figures of a machine, in seconds: calibration measures them, a file describes them, and prices use them.

The laws behind the figures, which calibration inverts and every price obeys:

- On a link of class `own` or `node` the ranks' processors move the bytes. A transfer of w bytes takes alpha + beta · w
  seconds of a processor of who starts it; what a group moves takes that of the sender and of the receiver. Ranks share
  the processors of their host: together they are ready after the longest rank's own seconds, or after all their seconds
  divided by the host's slots (cores / threads of a rank), whichever is later. beta is that of a loaded host, on which
  all ranks move at once.
- On a link of class `between` the wire of a node moves the bytes, in and out at once: alpha + beta · w, where w is what
  all ranks of the node send, or receive, whichever is more. A share `hidden` of it goes on behind a multiply; the rest
  is time that processors spend on it. What does not lie together at its owner has costs of its own, as MPI packs it.
- A local product of m × n × k takes call + point · m·n·k + a · m·k + b · k·n + c · m·n seconds: a and b for reading
  and packing the operands, c for reading and writing C. Where rows of C lie a multiple of a page apart, all of them
  fall into the same few lines of the cache, and each element takes `aliased` more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, field, replace
from functools import lru_cache
from math import copysign, isfinite, log2
from typing import Any

from rma_mm.classes import dataclass
from rma_mm.errors import MachineError, quoted
from rma_mm.flavours import DEFAULT, FLAVOURS, Flavour, find_flavour
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.shares import relative, speeds_problem

LINKS = ("own", "node", "between")
"""Classes of links: a rank's own memory, another rank's on its node, a rank's on another node."""
ONE_SIDED = ("get", "put", "accumulate", "fetch_add")
"""Movements that have a cost for every flavour of windows, with the target idle and busy."""
COLLECTIVES = ("broadcast", "all-gather", "reduce", "reduce-scatter", "shift")  # movements of groups
MULTIPLIES = "multiplies"  # the correction of local products, whatever moves their operands
SUMS = ("reduce", "reduce-scatter")  # movements of groups that add contiguous data
FIGURES = ("operation", "meeting", "piece", "packed", "crowding", "scatter")
"""Fields of a machine that are one figure each."""
FACTORS = {"speeds": "rank", "wires": "node", "rooms": "rank"}  # fields that are factors, and of what each has one
SCATTERED = 0.2  # the share by which rounds may differ on a machine that is quiet
PACKED = " packed"  # behind the name of a movement between nodes whose bytes do not lie together at their owner
COPY = "copy"  # the one movement within a rank's own memory
PAGE = 4096  # bytes after which addresses share lines of a first-level cache


@dataclass(frozen=True)
class Cost:
    """Cost of transfers of one kind."""

    alpha: float  # seconds of one transfer, whatever its size
    beta: float  # seconds a byte
    hidden: float = 1.0  # the share of them, 0 to 1, that a multiply goes on beside; of transfers between nodes

    def seconds(self, nbytes: float, transfers: float = 1.0) -> float:
        return self.alpha * transfers + self.beta * nbytes


@dataclass(frozen=True)
class Kernel:
    """Cost of local products of one element type by one kernel."""

    call: float  # seconds of one product, whatever its size
    point: float  # seconds of one multiply-add
    a: float = 0.0  # seconds of an element of A that is read
    b: float = 0.0  # seconds of an element of B that is read
    c: float = 0.0  # seconds of an element of C that is added to
    aliased: float = 0.0  # seconds more of such an element, where rows of C lie a multiple of `PAGE` apart

    def seconds(self, m: float, n: float, k: float, stride: float = 1) -> float:
        """Return seconds of one product of m × n × k into rows of C that lie `stride` bytes apart."""
        added = self.c + self.aliased * (stride % PAGE == 0)
        return self.call + self.point * m * n * k + self.a * m * k + self.b * k * n + added * m * n


@dataclass(frozen=True)
class Machine:
    """The figures of one machine, for one number of ranks per node and threads of a rank."""

    name: str
    costs: Mapping[str, Mapping[str, Cost]]
    """Class of link → movement → cost. A movement is "copy", one of `COLLECTIVES`, or one of `ONE_SIDED` behind its
    flavour, as "shared.get", or with " busy" behind it where its target is inside a multiply, or `PACKED`."""
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    """Element type and kernel, as "float32 blas" → its cost."""
    cores: int = 1  # processors of a host
    threads: int = 1  # processors that a rank's local products use
    nodes_per_host: int = 1  # nodes that share the processors of one host: more than one where nodes are pretended
    operation: float = 5e-6  # seconds that the runtime itself takes for one operation of a schedule
    meeting: float = 5e-6  # seconds in which all ranks meet, for each doubling of their number
    piece: float = 30e-9  # seconds of a processor for each piece of what does not lie together, beside its bytes
    packed: float = 100e-9  # the same where MPI packs and unpacks it: what groups move, or windows out of reach
    crowding: float = 1.0  # slowdown of ranks that share processors, relative to processors that are never idle
    scatter: float = 0.0  # the share by which rounds of the calibration differed: much, where others were at work
    memory: int | None = None  # bytes of a rank; None if they are unknown
    measured: bool = False  # true if the figures were measured here, so that seconds mean this machine's seconds
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Measured time over predicted time of recent products, by kind of movement; scales later predictions."""
    speeds: tuple[float, ...] = ()
    """Speed of each rank while all multiply, relative to `kernels`; empty if all are alike."""
    wires: tuple[float, ...] = ()
    """The bandwidth of each node's wire, over what `costs` tells; empty if all are alike."""
    delays: tuple[float, ...] = ()
    """Seconds that a transfer from or to each node takes more than `costs` tells, of two nodes the more; as wires."""
    rooms: tuple[float, ...] = ()  # the memory of each rank, over `memory`; empty if all have that
    groups: tuple[int, ...] = ()
    """The group of each node, where something narrower joins groups than nodes; empty if nothing does."""
    joint: Cost = Cost(0.0, 0.0)
    """Seconds more of a transfer between groups, and a byte of all that goes into a group, or out of it, at once."""

    @property
    def is_scattered(self) -> bool:
        return self.scatter > SCATTERED

    def __hash__(self) -> int:
        figures = (self.name, self.cores, self.threads, self.operation, self.meeting)
        return hash((*figures, self.speeds, self.wires, self.delays, self.groups, self.joint))

    def speeds_of(self, ranks: int) -> tuple[float, ...]:
        return _first(self.speeds, ranks)

    @property
    def slots(self) -> int:
        return max(1, self.cores // max(1, self.threads))

    def cost(
        self, link: str, movement: str, flavour: str = DEFAULT.name, busy: bool = False, packed: bool = False
    ) -> Cost:
        """Return the cost of a movement on a class of link; of one that was not measured, that of its nearest kin."""
        found = self.costs[link]
        kept = [name for name in _packed(find_flavour(flavour), movement) if name in found] if packed else []
        if kept:
            return found[kept[0]]
        if movement in ONE_SIDED:
            names = _one_sided(find_flavour(flavour), movement, busy)
        else:
            near = "all-gather" if movement == "reduce-scatter" else "broadcast"
            names = (movement, near, f"{DEFAULT.name}.get")
        kin = (name for name in (*names, COPY, *found) if name in found)
        return found[next(kin)]

    def kernel(self, dtype: str, kernel: str = "blas") -> Kernel:
        """Return the cost of local products; of a type that was not measured, that of one which was, by its size."""
        found = self.kernels.get(f"{dtype} {kernel}")
        return found if found is not None else next(iter(self.kernels.values()))

    def has(self, dtype: str, kernel: str) -> bool:
        return f"{dtype} {kernel}" in self.kernels

    def meet(self, ranks: int) -> float:
        return self.meeting * max(1.0, log2(max(1, ranks)))

    # -- as text ----------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        figures = {x: {name: list(astuple(cost)) for name, cost in costs.items()} for x, costs in self.costs.items()}
        return {
            "name": self.name,
            "cores": self.cores, "threads": self.threads, "nodes_per_host": self.nodes_per_host,
            **{name: getattr(self, name) for name in FIGURES}, "memory": self.memory, "measured": self.measured,
            "links": figures,
            "kernels": {name: [k.call, k.point, k.a, k.b, k.c, k.aliased] for name, k in self.kernels.items()},
            "corrections": dict(self.corrections),
            **{name: list(getattr(self, name)) for name in FACTORS},
            "delays": list(self.delays), "groups": list(self.groups), "joint": [self.joint.alpha, self.joint.beta],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Machine:
        """The machine that `as_json` gave. Raises MachineError naming the figure that is missing or impossible."""
        table = _at(given, "links", dict)
        costs = {
            link: {move: _cost(found, f"links.{link}.{move}", given) for move, found in _items(table, link)}
            for link in LINKS
        }
        kernels = {name: Kernel(*_figures(v, f"kernels.{name}", 6)) for name, v in _items(given, "kernels")}
        if not kernels or any(not moves for moves in costs.values()):
            raise MachineError("machine: its figures for links or kernels are missing; each needs one at least")
        corrections = {name: _figures([v], f"corrections.{name}", 1)[0] for name, v in _items(given, "corrections")}
        for name, correction in corrections.items():
            if not correction:
                raise MachineError(f"machine: corrections.{name} is {correction!r}; a factor is above 0")
        memory, factors = given.get("memory"), {name: given.get(name, []) for name in FACTORS}
        for name, what in factors.items():
            if what != [] and (problem := speeds_problem(what, each=FACTORS[name])):
                raise MachineError(f"machine: {name} is {quoted(what)}; {problem}")
        delays, groups = (_at({name: [], **given}, name, list) for name in ("delays", "groups"))
        cores, threads, nodes = (_count(given.get(name, 1), name) for name in ("cores", "threads", "nodes_per_host"))
        figures: dict[str, Any] = {name: _number({"scatter": 0.0, **given}, name) for name in FIGURES}
        figures |= {name: tuple(map(float, what)) for name, what in factors.items()}
        return cls(
            str(given.get("name", "")), costs, kernels, cores, threads, nodes,
            memory=None if memory is None else _count(memory, "memory"), measured=bool(given.get("measured")),
            corrections=corrections, **figures,
            delays=tuple(_figures(delays, "delays", len(delays))),
            groups=tuple(map(int, _figures(groups, "groups", len(groups)))),
            joint=Cost(*_figures(given.get("joint", [0, 0]), "joint", 2)),
        )


@lru_cache
def _first(speeds: tuple[float, ...], ranks: int) -> tuple[float, ...]:
    return relative(speeds[:ranks]) if len(speeds) >= ranks else ()


@lru_cache(maxsize=64)
def by_group(mesh: MeshShape, groups: tuple[int, ...]) -> MeshShape:
    return replace(
        mesh, node_of_rank=tuple(groups[min(node, len(groups) - 1)] if groups else 0 for node in mesh.node_of_rank)
    )


@lru_cache
def _one_sided(flavour: Flavour, movement: str, busy: bool) -> tuple[str, ...]:
    """Under which names the cost of a one-sided movement may be found, the nearest first.

    What a target that multiplies does to a flavour says nothing of one that needs no progress, and the other way.
    """
    alike = [each for each in flavour.kin if busy and each.needs_progress == flavour.needs_progress]
    found = [f"{each.name}.{movement} busy" for each in alike]
    return (*found, *(f"{each.name}.{move}" for move in (movement, "get") for each in flavour.kin))


@lru_cache
def _packed(flavour: Flavour, movement: str) -> tuple[str, ...]:
    """Return the names under which the cost of a movement that MPI packs may be found, the nearest first."""
    if movement in ONE_SIDED:
        return tuple(f"{each.name}.{movement}{PACKED}" for each in flavour.kin)
    return () if movement in SUMS else (f"{movement}{PACKED}", f"shift{PACKED}")


def _cost(found: Any, name: str, given: Mapping[str, Any]) -> Cost:
    """Return a cost of two or three figures; the third, where it is missing, is the machine's. Raises MachineError."""
    figures = [*found, given.get("hidden", 1.0)] if isinstance(found, list) and len(found) == 2 else found
    cost = Cost(*_figures(figures, name, 3))
    if cost.hidden > 1:
        raise MachineError(f"machine: {name} is {found!r}; the share that is hidden is from 0 to 1")
    return cost


def _at(given: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return an entry of the given kind. Raises MachineError."""
    found = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(found, kind):
        raise MachineError(f"machine: {name} is {found!r}; a {kind.__name__} is needed there")
    return found


def _items(given: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return list(_at(given, name, dict).items())


def _number(given: Mapping[str, Any], name: str) -> float:
    return _figures([given.get(name)], name, 1)[0]


def _count(value: Any, name: str) -> int:
    """Return a whole number of at least 1. Raises MachineError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MachineError(f"machine: {name} is {value!r}; it is a whole number of at least 1")
    return value


def _figures(values: Any, name: str, count: int) -> list[float]:
    """So many finite figures of at least 0. Raises MachineError naming the one that is not."""
    if not isinstance(values, list) or len(values) != count:
        raise MachineError(f"machine: {name} is {values!r}; it takes {count} figures")
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value) or copysign(1.0, value) < 0:  # -0.0 was never measured either
            raise MachineError(f"machine: {name} is {value!r}; it is a finite figure of at least 0")
    return [float(value) for value in values]


def described(
    name: str, *, cores: int, gflops: float, memory_rate: float, latency: float, bandwidth: float,
    memory: int | None = None, threads: int = 1, itemsize: int = 4, node_latency: float = 1e-6,
    node_rate: float | None = None, hidden: float = 1.0,
) -> Machine:
    """Return a machine of a few figures, the same for all movements.

    gflops: 10⁹ operations a second of one rank, of elements of `itemsize` bytes. memory_rate, node_rate, bandwidth:
    bytes a second of one processor in its own memory, between ranks of a node, and of a node's wire. latency: seconds
    between nodes.
    """
    own, node = Cost(0.2e-6, 1 / memory_rate), Cost(node_latency, 1 / (node_rate or memory_rate))
    wire = Cost(latency, 1 / bandwidth, hidden)
    moves = [*(f"{flavour}.{move}" for flavour in FLAVOURS for move in ONE_SIDED), *COLLECTIVES]
    costs = {"own": {COPY: own}, "node": dict.fromkeys(moves, node), "between": dict.fromkeys(moves, wire)}
    touch = 0.5 * itemsize / memory_rate
    parts = {"float32": 4, "float64": 8, "complex64": 4, "complex128": 8, "float16": 2, "bfloat16": 2}
    kernels = {}
    for dtype, size in parts.items():
        point = 2e-9 / gflops * max(1.0, size / itemsize) * (4 if dtype.startswith("complex") else 1)
        kernels[f"{dtype} blas"] = Kernel(1e-6, point, touch, touch, touch)
    return Machine(name, costs, kernels, cores, threads, memory=memory)


TYPICAL = described(
    "typical", cores=64, gflops=100, memory_rate=10e9, latency=3e-6, bandwidth=5e9, node_latency=1e-6, hidden=0.9
)
"""A node of today and its network, for choices where nothing was measured."""

__all__ = ["COLLECTIVES", "LINKS", "ONE_SIDED", "TYPICAL", "Cost", "Kernel", "Machine", "by_group", "described"]
