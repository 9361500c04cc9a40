"""What goes wrong between the input files and the output file is found by `--verify`, and never published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from tests.processes import mpirun

PRODUCTS = {
    "plain": "A.npy B.npy",
    "all": "At.npy B.npy --transpose-a --alpha 2 --beta -0.5 --c C0.npy --bias b.npy --bias-per column --mesh 3 "
    "--activation relu --result-dtype float64 --layout-c None,i",
    "made": "--shape 31,41,59 --dtype int32",
    "empty": "Z.npy Zt.npy",
}
FAULTS = {
    "none": 0, "a rank skips its part": 4, "a bit of the file flips": 4, "a part lands elsewhere": 4,
    "C changes once it is written": 4, "A is read wrongly": 4, "C0 is read wrongly": 4, "the bias is read wrongly": 4,
    "A changes unnoticed": 4, "A changes": 1, "A is cut short": 1, "A is replaced": 1, "the bias changes": 1,
    "the output is replaced": 1,
}

JOB = """
import contextlib, io, json, os, sys
import numpy as np
from rma_mm import run
from rma_mm.command.jobs import bias, checking, job
from rma_mm.runtime.files.npy import NpyFile, NpySink
cases = json.loads(sys.argv[1])

def after(owner, name, ranks, act):
    original = getattr(owner, name)
    def changed(*arguments, **options):
        from mpi4py import MPI
        result = original(*arguments, **options)
        MPI.COMM_WORLD.barrier()
        if MPI.COMM_WORLD.rank in ranks:
            found = act(*arguments, result)
            result = result if found is None else found
        MPI.COMM_WORLD.barrier()
        return result
    setattr(owner, name, changed)
    return lambda: setattr(owner, name, original)

def instead(owner, name, act):
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: act(original, *arguments))
    return lambda: setattr(owner, name, original)

def flip(path):
    with open(path, "r+b") as file:
        file.seek(-9, 2)
        byte = file.read(1)[0] ^ 1
        file.seek(-1, 1)
        file.write(bytes([byte]))

def skip(original, self, region, tile):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank != 1:
        original(self, region, tile)

def elsewhere(original, self, region, tile):
    original(self, region, tile[::-1])

def misread(original, self, region, out):
    original(self, region, out)
    if self.path == wrong and out.size:
        out[0, 0] += 100

def spoil(self, c, result):
    c.tile[...] += 1

def double(*arguments):
    x = np.load(mine())
    before = os.stat(mine())
    with open(mine(), "r+b") as file:
        file.seek(-x.nbytes, 2)
        file.write((x * 2).tobytes(order="A"))
    return before

def unnoticed(*arguments):
    before = double()
    os.utime(mine(), ns=(before.st_atime_ns, before.st_mtime_ns))

def replaced(path):
    with open(path, "rb") as file, open(path + "~", "wb") as other:
        other.write(file.read())
    os.replace(path + "~", path)

mine = lambda: line.split()[0]
execute = job.Job, "_execute"
PLANT = {
    "none": lambda: lambda: None,
    "a rank skips its part": lambda: instead(NpySink, "write", skip),
    "a bit of the file flips": lambda: after(job.Job, "_write", [0], lambda self, *_: flip(self.output.temporary)),
    "a part lands elsewhere": lambda: instead(NpySink, "write", elsewhere),
    "C changes once it is written": lambda: after(job.Job, "_write", [1], spoil),
    "A is read wrongly": lambda: instead(NpyFile, "read", misread),
    "C0 is read wrongly": lambda: instead(NpyFile, "read", misread),
    "the bias is read wrongly": lambda: instead(bias, "_vector", lambda original, *given: original(*given) + 1),
    "A changes unnoticed": lambda: after(*execute, [0], unnoticed),
    "A changes": lambda: after(*execute, [0], lambda *_: [double()] and None),
    "A is cut short": lambda: after(*execute, [0], lambda *_: os.truncate(mine(), 200)),
    "A is replaced": lambda: after(*execute, [0], lambda *_: replaced(mine())),
    "the bias changes": lambda: after(*execute, [0], lambda *_: replaced("b.npy")),
    "the output is replaced": lambda: after(job.Job, "require_unchanged", [0], lambda self, _:
        replaced(self.output.temporary)),
}
found = {}
for line, fault in cases:
    from mpi4py import MPI
    if not MPI.Is_initialized():
        MPI.Init_thread()
    comm = MPI.COMM_WORLD
    wrong = "C0.npy" if "C0" in fault else mine()
    keep = {name: (open(name, "rb").read(), os.stat(name)) for name in os.listdir()} if comm.rank == 0 else {}
    comm.barrier()
    undo = PLANT[fault]()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run.main([*line.split(), "--verify", "--quiet", "-o", "C.npy"])
    undo()
    comm.barrier()
    if comm.rank == 0:
        found[f"{line}: {fault}"] = code, sorted(set(os.listdir()) - set(keep)), said.getvalue()
        for name in os.listdir():
            os.unlink(name)
        for name, (content, at) in keep.items():
            open(name, "wb").write(content)
            os.utime(name, ns=(at.st_atime_ns, at.st_mtime_ns))
    comm.barrier()
if found:
    with open("found.json", "w") as file:
        json.dump(found, file)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A (31 × 59), its transpose in columns, B (59 × 41), C0, b, and operands of a product without elements."""
    rng = np.random.default_rng(0)
    a, b, c0 = (rng.standard_normal(shape).astype(np.float32) for shape in ((31, 59), (59, 41), (31, 41)))
    arrays = {"A": a, "At": np.asfortranarray(a.T), "B": np.asfortranarray(b), "C0": c0, "b": b[0]}
    for name, x in (arrays | {"Z": a[:0], "Zt": b[:, :0]}).items():
        np.save(tmp_path / f"{name}.npy", x)
    return tmp_path


def fits(product: str, fault: str) -> bool:
    """Whether a fault can be planted in a product."""
    return product == "all" or fault == "none" or (product == "made" and fault == "a rank skips its part")


def test_planted_faults(here: Path) -> None:
    """None of them ends in 0, nor leaves anything behind; without one the product is right."""
    cases = [(PRODUCTS[product], fault) for product in PRODUCTS for fault in FAULTS if fits(product, fault)]
    done = mpirun(3, ["-c", JOB, json.dumps(cases)], cwd=here)
    assert done.returncode == 0, done.stderr
    found = json.loads((here / "found.json").read_text())
    assert len(found) == len(cases) == len(FAULTS) + 4
    for line, fault in cases:
        code, left, said = found[f"{line}: {fault}"]
        assert code == FAULTS[fault], (line, fault, said)
        assert left == (["C.npy"] if code == 0 else []), (line, fault)
        assert (said == "") is (code == 0)
        assert len(said) < 1000
        assert "Traceback" not in said
