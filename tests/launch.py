"""`@parallel`: a pytest test whose body runs on real ranks.

    @parallel(ranks=(1, 2, 4), env=("node", "cliques"), timeout=60)
    @pytest.mark.parametrize("n", [1, 7])
    def test_sum(comm, n):
        assert comm.allreduce(n) == n * comm.size

makes test_sum[4-cliques-7] and so on. The body runs on every rank of `comm`, which has the first four of a job that may
have more: COMM_WORLD is not the test's. Fixtures and parameters are pickled to the ranks. Methods of test classes work
alike, inherited ones too.
"""

from __future__ import annotations

import base64
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.jobs import Kind, Pool
from tests.processes import can_pretend_nodes, has_ucx

RANKS = (1, 2, 3, 4, 6)
"""Numbers of ranks a test runs on unless it names others."""

ENVS: dict[str, dict[str, str]] = {
    "node": {},
    "cliques": {"MPIR_CVAR_NUM_CLIQUES": "2"},
    "nolocal": {"MPIR_CVAR_NOLOCAL": "1"},
    "allocated": {"RMA_MM_WINDOW": "allocated"},
    "created": {"RMA_MM_WINDOW": "created"},
    "ucx": {"RMA_MM_WINDOW": "ucx"},
    "ucx_tcp": {"RMA_MM_WINDOW": "ucx", "UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"},
    "tcp": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}
"""Environments: one node; two pretended nodes; every rank a node of its own; the other windows within a node; every
rank a node of its own, and the transfers of UCX, or MPICH's messages, over TCP as between hosts.

`tests.processes` translates MPICH's variables into what Open MPI's launcher takes.
"""

VARIANTS = ("node", "cliques", "nolocal", "allocated", "created", "ucx")
"""The default of `parallel`."""

USUAL = {
    "node": (1, 4), "cliques": (3,), "nolocal": (3,), "allocated": (2,), "created": (3,), "ucx": (4,), "ucx_tcp": (2,),
    "tcp": (4,),
}
"""Ranks that stand for all in an environment: of those a test names, the nearest to each of these."""

MORE = {
    "cliques": (6,), "nolocal": (6,), "allocated": (6,), "created": (1,), "ucx": (6,), "ucx_tcp": (3,), "tcp": (2,),
}
"""Ranks that nights add in an environment: more, or one by itself."""

SEVERAL_RANKS = {"cliques", "nolocal", "ucx_tcp", "tcp"}
"""Environments that say nothing about a single rank: no such test is made."""

POOL = Pool(ENVS)
"""The one job that the tests of this session share."""


def parallel(
    ranks: Sequence[int] = RANKS, env: Sequence[str] = VARIANTS, timeout: float = 60, usual: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on all `ranks` in the first of `env`, and on one or two of them in each other.

    The kinds that `is_usual` tells, of a long test only those in the environment `usual`, are run by pytest alone; of
    the others `-m thorough` runs those with the ranks of USUAL, and `-m nightly` the rest. `timeout` is the limit of
    each, in seconds at rest.
    """
    if unknown := set(env) - set(ENVS):
        raise ValueError(f"unknown environments {sorted(unknown)}: choose from {list(ENVS)}")
    every = [Kind(count, name) for name in env for count in ranks if count > 1 or name not in SEVERAL_RANKS]
    kinds = [kind for kind in every if kind.env == every[0].env or is_nearest(kind, every, (USUAL, MORE))]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*instance: object, **arguments: Any) -> None:
            kind = arguments.pop("parallel_kind")
            if kind.env in SEVERAL_RANKS and not can_pretend_nodes():
                pytest.skip(f"{kind.env}: with Open MPI it needs `unshare --uts`, as root or in a user namespace")
            if kind.env.startswith("ucx") and not has_ucx():
                pytest.skip(f"{kind.env}: there is no library of UCX here")
            module, name = _address(body, *instance)
            POOL.run(kind, module, name, pickled(arguments), timeout)

        test.__signature__ = _signature(body)  # type: ignore[attr-defined]
        test.parallel_body = body  # type: ignore[attr-defined]
        ids = [f"{kind.ranks}-{kind.env}" for kind in kinds]
        values = [pytest.param(kind, marks=length(kind, kinds, usual)) for kind in kinds]
        mark = pytest.mark.parametrize("parallel_kind", values, ids=ids).mark
        test.pytestmark = [mark, *getattr(body, "pytestmark", [])]  # type: ignore[attr-defined]  # first in the test's id
        return test

    return decorate


def length(kind: Kind, kinds: Sequence[Kind], usual: str) -> Sequence[pytest.MarkDecorator]:
    """The mark of the tests of that kind, where it is not always run."""
    if is_usual(kind, kinds) and usual in ("", kind.env):
        return ()
    return (pytest.mark.thorough if is_nearest(kind, kinds, (USUAL,)) else pytest.mark.nightly,)


def is_usual(kind: Kind, kinds: Sequence[Kind]) -> bool:
    """Whether one of a test's kinds is run each time: some numbers of ranks; of several environments two or three."""
    envs = list(dict.fromkeys(other.env for other in kinds))
    if kind.env not in (envs[0], envs[-1], *envs[1 : 2 * (len(envs) >= len(VARIANTS))]):
        return False
    return is_nearest(kind, kinds, (USUAL,))


def is_nearest(kind: Kind, kinds: Sequence[Kind], tables: Sequence[dict[str, tuple[int, ...]]]) -> bool:
    """Whether no other of `kinds` in its environment is nearer to some number of ranks that the tables want there."""
    beside = [other.ranks for other in kinds if other.env == kind.env]
    wanted = [ranks for table in tables for ranks in table.get(kind.env, ())]
    return any(kind.ranks == min(beside, key=lambda ranks: (abs(ranks - want), ranks)) for want in wanted)


def pickled(arguments: dict[str, Any]) -> str:
    """`arguments` as text for the way to the ranks."""
    return base64.b64encode(pickle.dumps(arguments)).decode()


def _signature(body: Callable[..., None]) -> inspect.Signature:
    """What pytest must pass: `parallel_kind` in place of `comm`, the rest as it stands."""
    parameters = inspect.signature(body).parameters
    if "comm" not in parameters:
        raise TypeError(f"{body.__qualname__} must take comm as its first parameter (after self)")
    kind = inspect.Parameter("parallel_kind", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature([kind if name == "comm" else old for name, old in parameters.items()])


def _address(body: Callable[..., None], *instance: object) -> tuple[str, str]:
    """Module and dotted name under which a rank finds the test: that of the class that inherits it."""
    if not instance:
        return body.__module__, body.__qualname__
    owner = type(instance[0])
    return owner.__module__, f"{owner.__qualname__}.{body.__name__}"


def kind_of(item: pytest.Item | None) -> Kind | None:
    """The kind of job that `item` wants; None for a test without ranks."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("parallel_kind") if callspec else None


def make_room(items: Iterable[pytest.Item]) -> None:
    """Let each job have the most ranks that any test of its scope wants, so that one serves them all."""
    for kind in filter(None, map(kind_of, items)):
        POOL.most[kind.scope] = max(kind.ranks, POOL.most.get(kind.scope, 0))


def order(item: pytest.Item) -> tuple[int, int, int]:
    """Sort key: tests without ranks first, then job by job, so that each job starts once; few ranks first."""
    kind = kind_of(item)
    return (1, list(ENVS).index(kind.env), kind.ranks) if kind else (0, 0, 0)
