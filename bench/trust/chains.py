"""A random chain of products and what lies between them, on matrices anywhere, against NumPy."""

from __future__ import annotations

from random import Random

import rma_mm
from bench.trust.programs import by_numpy, drawn, is_right
from bench.trust.wrong import Wrong
from rma_mm import DistMatrix, Mesh

PLACES = (
    *("P('i', 'j')", "P(('i', 'j'), None)", "P(None, ('i', 'j'))", "P('j', 'i')", "P(None, None)"),
    *("P('i:cyclic(2)', 'j')", "P(None, None, i=0)"),
)


def run(mesh: Mesh, rng: Random) -> None:
    """Twice, into matrices of the caller too. Collective; raises Wrong where a result is not NumPy's."""
    program = drawn(rng.getrandbits(32))
    made = [step.split(" =")[0] for step in program.steps]
    free = {name for name in program.inputs if rng.random() < 0.4}
    options = {"joint": rng.random() < 0.8, "algorithm": rng.choice(["auto", "stationary_c", "stationary_a"])}
    options |= rng.choice([{}, {"only": rng.sample(made, 1)}, {"outputs": rng.sample(made, 1)}])
    options |= rng.choice([{}, {}, {"layouts": {rng.choice(made): rng.choice(PLACES[:5])}}])
    given = {
        name: (x.shape, x.dtype) if name in free else DistMatrix.from_numpy(x, mesh, rng.choice(PLACES))
        for name, x in program.inputs.items()
    }
    with rma_mm.plan_chain(program.steps, mesh, **options, **given) as chain:
        for name in sorted(free & chain.layouts.keys()):
            given[name] = DistMatrix.from_numpy(program.inputs[name], mesh, chain.layouts[name])
        given = {name: x for name, x in given.items() if isinstance(x, DistMatrix)}
        wanted = by_numpy(program.steps, program.inputs)
        for names in ([], [name for name in chain.outputs if rng.random() < 0.5]):
            out = {x: DistMatrix.empty(chain.outputs[x].shape, mesh, chain.layouts[x], chain.outputs[x].dtype)
                   for x in names}
            for name, x in chain.execute(out=out, **given).items():
                if (name in out and x is not out[name]) or not is_right(x.to_numpy(), wanted[name], program):
                    raise Wrong(f"{name} of {program.steps} with {options}: {x.to_numpy()}, and not {wanted[name]}")
