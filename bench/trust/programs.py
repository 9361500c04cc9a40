"""Random chains of products and what lies between them, and what NumPy makes of the same text. No MPI."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import erf
from random import Random
from typing import Any

import numpy as np

EXTENTS = (1, 2, 3, 5, 7, 8)


class Dense(np.ndarray):
    """An array that also reads .H."""

    @property
    def H(self) -> Dense:
        return self.conj().T


def _phi(x: Any) -> Any:
    return (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2))) / 2


def _batches(multiply: Any, a: Any, b: Any, groups: int) -> Any:
    parts = (x.reshape(groups, len(x) // groups, x.shape[1]) for x in (a, b))
    made = np.asarray(multiply(*parts))
    return made.reshape(-1, made.shape[-1]).view(Dense)


FUNCTIONS = {
    "gelu": lambda x: (x * _phi(x)).astype(x.dtype),
    "gelu_slope": lambda x: (_phi(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)).astype(x.dtype),
    "relu": lambda x: np.maximum(x, 0),
    "relu_slope": lambda x: (x > 0).astype(x.dtype),
    "sum": lambda x, axis=None: np.sum(x, axis=axis, keepdims=True, dtype=x.dtype),
    "broadcast_to": lambda x, shape: np.broadcast_to(x, shape).view(Dense),
    "max": lambda x, axis=None: np.max(x, axis=axis, keepdims=True),
    "bound": lambda x, axis=None: np.max(x, axis=axis, keepdims=True),
    "sigmoid": lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype),
    "where": lambda c, x, y: np.where(c, x, y).view(Dense),
    "softmax": lambda x, axis=1: np.exp(x - x.max(axis, keepdims=True))
    / np.exp(x - x.max(axis, keepdims=True)).sum(axis, keepdims=True),
    "layer_norm": lambda x, axis=1: (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-5),
    "bmm": lambda a, b, groups: _batches(np.matmul, a, b, groups),
    "bmm_nt": lambda a, b, groups: _batches(lambda x, y: x @ y.swapaxes(1, 2), a, b, groups),
    "bmm_tn": lambda a, b, groups: _batches(lambda x, y: x.swapaxes(1, 2) @ y, a, b, groups),
    "split_heads": lambda x, groups, heads: np.concatenate(
        [part for group in np.split(x, groups) for part in np.split(group, heads, axis=1)]).view(Dense),
    "merge_heads": lambda x, groups, heads: np.concatenate(
        [np.concatenate(np.split(group, heads), axis=1) for group in np.split(x, groups)]).view(Dense),
    **{name: getattr(np, name) for name in ("exp", "log", "sqrt", "tanh")},
}


def by_numpy(steps: list[str], inputs: dict[str, Any]) -> dict[str, Any]:
    """All results of the steps, by NumPy."""
    known = {name: np.asarray(x).view(Dense) if np.ndim(x) else x for name, x in inputs.items()}
    for step in steps:
        name, text = (part.strip() for part in step.split("=", 1))
        with np.errstate(all="ignore"):
            known[name] = eval(re.sub(r"(\w)'", r"\1_slope", text), dict(FUNCTIONS), known)
    return {name: np.asarray(x) for name, x in known.items() if name not in inputs}


@dataclass
class Program:
    """Steps, and the inputs that they read."""

    steps: list[str] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of all matrices."""
    is_exact: bool = True
    """Whether all numbers are whole, and small enough that nothing is rounded unless they overflow."""


class Drawing:
    """Draws a program, step by step."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.dtype = rng.choice(["int64", "float64", "float64", "float32", "complex128"])
        self.is_smooth = self.dtype[0] == "f" and rng.random() < 0.6
        self.extents = rng.sample(EXTENTS, 3)
        self.program = Program(is_exact=not self.is_smooth and self.dtype != "float32")
        for number in range(rng.randint(1, 6)):
            text, shape = self.expression(rng.randint(1, 3))
            name = f"R{number}"
            if re.fullmatch(r"[\d.()+*-]+", text):
                continue
            self.program.steps.append(f"{name} = {text}")
            self.program.shapes[name] = shape

    def expression(self, depth: int, shape: tuple[int, int] | None = None) -> tuple[str, tuple[int, int]]:
        """Some expression of a shape; of any where none is said."""
        rng = self.rng
        m, n = shape = shape or (rng.choice(self.extents), rng.choice(self.extents))
        kind = rng.choice(["@", "@", "+", "-", "*", "number", "f", "sum", "T", "bias"]) if depth else "leaf"
        if kind == "@":
            k = rng.choice(self.extents)
            return f"({self.expression(depth - 1, (m, k))[0]} @ {self.expression(depth - 1, (k, n))[0]})", shape
        if kind in ("+", "-", "*"):
            return f"({self.expression(depth - 1, shape)[0]} {kind} {self.expression(depth - 1, shape)[0]})", shape
        if kind == "number":
            number = rng.choice(["2", "-1", "3"]) if self.program.is_exact else rng.choice(["0.5", "2", "-1.25"])
            return f"({number} * {self.expression(depth - 1, shape)[0]})", shape
        if kind == "f" and self.dtype[0] != "c":
            smooth = ["gelu", "gelu'", "relu", "tanh", "sigmoid", "softmax", "layer_norm"]
            name = rng.choice(smooth if self.is_smooth else ["relu", "relu'"])
            name = "relu" if self.dtype == "float32" and not self.is_smooth else name
            return f"{name}({self.expression(depth - 1, shape)[0]})", shape
        if kind == "sum":
            k = rng.choice(self.extents)
            axis = rng.randrange(2)
            inner = self.expression(depth - 1, (k, n) if axis == 0 else (m, k))[0]
            text = f"sum({inner}, {axis})"
            return (text, shape) if shape[axis] == 1 else (f"broadcast_to({text}, {shape})", shape)
        if kind == "bias":
            row = rng.choice([(1, n), (m, 1), (1, 1)])
            return f"({self.expression(depth - 1, shape)[0]} + {self.expression(0, row)[0]})", shape
        if kind == "T":
            turn = rng.choice([".T", ".H", ".T"])
            return f"{self.expression(depth - 1, (n, m))[0]}{turn}", shape
        return self.leaf(shape), shape

    def leaf(self, shape: tuple[int, int]) -> str:
        """A matrix of a shape: one that is there, perhaps turned, or another input."""
        there = [name for name, own in self.program.shapes.items() if own == shape]
        there += [f"{name}.T" for name, own in self.program.shapes.items() if own == shape[::-1]]
        there += [f"{name}.conj()" for name in there if "." not in name and self.dtype[0] == "c"]
        if there and self.rng.random() < 0.8:
            return self.rng.choice(there)
        name = f"X{len(self.program.inputs)}"
        self.program.inputs[name] = self.numbers(shape)
        self.program.shapes[name] = shape
        return name

    def numbers(self, shape: tuple[int, int]) -> Any:
        """The elements of an input."""
        rng = np.random.default_rng(self.rng.getrandbits(32))
        if not self.program.is_exact:
            return (rng.random(shape) - 0.5).astype(self.dtype)
        whole = rng.integers(-2, 3, shape)
        return (whole + 1j * rng.integers(-2, 3, shape) if self.dtype[0] == "c" else whole).astype(self.dtype)


def drawn(seed: int) -> Program:
    """The program of a seed; it has a step at least."""
    while not (found := Drawing(seed).program).steps:
        seed += 10**6
    return found


def is_right(found: Any, wanted: Any, program: Program) -> bool:
    """Whether a result is NumPy's: exactly where numbers are whole and not too large, else to rounding."""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    largest = float(abs(wanted).max(initial=0))
    if wanted.dtype.kind == "i" or (program.is_exact and largest < 2**30):
        return bool(np.array_equal(found, wanted))
    close = 1e-4 if wanted.dtype == np.float32 else 1e-10
    return bool(np.all(abs(found - wanted) <= close * max(1.0, largest)))
