"""What the rounds say: a record for each case, a table for the terminal or a README, a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import measure
from bench.peers.cases import CASES, Case
from bench.peers.contest import Outcome
from bench.peers.registry import NUMPY, PEERS, RMA_MM

LEGEND = (
    "Times are medians, on the slowest rank, barrier to barrier. `/ best` is rma_mm's time over that of the best peer "
    "(below 1: rma_mm is faster), a peer's column rma_mm's time over its time, `of NumPy` rma_mm's speed as a share "
    "of NumPy's in one process with all cores."
)


def record(case: Case, ranks: int, outcomes: Sequence[Outcome], skipped: Mapping[str, str]) -> dict[str, Any]:
    """All that is known of one case on so many ranks. Ratios are taken within a batch."""
    ours = {x.batch: median(x.seconds) for x in outcomes if x.peer == RMA_MM and x.seconds}
    peers: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(outcome.peer for outcome in outcomes):
        peers[name] = entry(case, [outcome for outcome in outcomes if outcome.peer == name], ours)
    ratios = {name: found["ratio"] for name, found in peers.items() if name not in (RMA_MM, NUMPY) and found["ratio"]}
    best = max(ratios, key=lambda name: ratios[name], default=None)
    ratio = ratios[best] if best is not None else None
    share = inverse(peers.get(NUMPY, {}).get("ratio"))
    return {
        "case": case.name, "shape": [case.m, case.n, case.k], "dtype": case.dtype, "ranks": ranks,
        "peers": peers, "skipped": dict(skipped), "best": best, "ratio": ratio, "share": share,
        "bars": {"ratio": case.ratio, "share": case.share},
        "met": met(ratio, share, case),
    }


def entry(case: Case, outcomes: Sequence[Outcome], ours: Mapping[int, float]) -> dict[str, Any]:
    """One peer's record: it was in one batch, or in all of them; an error in any of them counts."""
    samples = [took for outcome in outcomes for took in outcome.seconds]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    seconds = median(samples) if samples and not errors else None
    pairs = [ours[outcome.batch] / median(outcome.seconds) for outcome in outcomes if outcome.seconds and ours]
    return {
        "seconds": seconds, "samples": samples, "products": outcomes[0].products, "batches": len(outcomes),
        "gflops": 1e-9 * case.flops / seconds if seconds else None,
        "ratio": median(pairs) if pairs and seconds else None,
        "error": errors[0] if errors else None, "facts": outcomes[0].facts,
    }


def inverse(x: float | None) -> float | None:
    """1 / x where there is one."""
    return 1 / x if x else None


def met(ratio: float | None, share: float | None, case: Case) -> bool | None:
    """Whether the bars of the case are met; None where nothing could be compared."""
    verdicts = [ratio <= case.ratio] if ratio else []
    if share and case.share:
        verdicts.append(share >= case.share)
    return all(verdicts) if verdicts else None


def columns(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the peers that were measured anywhere, in the order of the registry."""
    found = dict.fromkeys(name for result in results for name in result["peers"])
    known = [name for name in PEERS if name in found]
    return [name for name in [*known, *(name for name in found if name not in known)] if name not in (RMA_MM, NUMPY)]


def rows(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Head and rows of the table of ratios."""
    names = columns(results)
    head = ["case (M×N×K)", "ranks", "ms", "GF/s", "of NumPy", "best peer", "/ best", "bars met", *names]
    body: list[list[object]] = []
    for result in results:
        ours = result["peers"].get(RMA_MM, {})
        shape = "×".join(map(str, result["shape"])) + ("" if result["dtype"] == "float32" else f" {result['dtype']}")
        milliseconds = 1e3 * ours["seconds"] if ours.get("seconds") else None
        facts = [milliseconds, ours.get("gflops"), ratio_text(result["share"])]
        verdict = "-" if result["met"] is None else measure.text(result["met"])
        best = [result["best"] or "-", ratio_text(result["ratio"]), verdict]
        body.append([shape, result["ranks"], *facts, *best, *(cell(result, name) for name in names)])
    return head, body


def cell(result: Mapping[str, Any], name: str) -> str:
    """A peer's ratio, or why there is none, in a word."""
    found = result["peers"].get(name)
    if found is None:
        return "-"
    if found["error"]:
        return "failed"
    return ratio_text(found["ratio"]) if found["ratio"] else f"{1e3 * found['seconds']:.4g} ms"


def ratio_text(ratio: float | None) -> str:
    """A ratio to three places."""
    return "-" if ratio is None else f"{ratio:.3f}"


def remarks(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was skipped, what failed, what was timed together: each thing once."""
    lines: dict[str, list[str]] = {}
    for result in results:
        place = f"{result['case']} on {result['ranks']}"
        for name, why in result["skipped"].items():
            lines.setdefault(f"{name} skipped, {why}", []).append(place)
        for name, found in result["peers"].items():
            if found["error"]:
                lines.setdefault(f"{name} FAILED: {found['error']}", []).append(place)
        products = max((found["products"] for found in result["peers"].values()), default=1)
        if products > 1:
            lines.setdefault("several products in a sample", []).append(f"{place}: {products}")
    return [f"{line} ({', '.join(places)})" for line, places in lines.items()]


def text_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines for a terminal."""
    return ["", *measure.table(*rows(results)), "", *remarks(results)]


def markdown(results: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> str:
    """The table for a README, with the machine and the date."""
    head, body = rows(results)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    table = ["| " + " | ".join(measure.text(x) for x in line) + " |" for line in lines]
    facts = ("cpu", "cores", "date", "python", "numpy", "blas", "mpi", "rma_mm")
    machine = ", ".join(f"{name} {where[name]}" for name in facts if where.get(name))
    told = [f"- {line}" for line in remarks(results)]
    return "\n".join([*table, "", LEGEND, "", f"Measured on: {machine}.", "", *told]) + "\n"


def plot(results: Sequence[Mapping[str, Any]], file: Path) -> str | None:
    """Draw each peer's speed as a share of rma_mm's; what stood in the way, if anything did."""
    if reason := measure.no_plot(file):
        return reason
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.34 * len(results)), layout="constrained")
    places = range(len(results))
    markers = "os^vD<>pPXh*"
    for name, marker in zip([NUMPY, *columns(results)], markers * 3, strict=False):
        points = [(result["peers"].get(name, {}).get("ratio"), place) for place, result in enumerate(results)]
        shown = [(ratio, place) for ratio, place in points if ratio]
        if shown:
            axes.scatter(*zip(*shown, strict=True), marker=marker, label=name, s=28, alpha=0.8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(list(places), [f"{label(result)}, {result['ranks']} ranks" for result in results])
    axes.invert_yaxis()
    figure.supxlabel("time of rma_mm / time of the peer (left of the line: rma_mm is faster)", fontsize="medium")
    axes.grid(visible=True, axis="x", which="both", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=5, fontsize="small")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return None


def label(result: Mapping[str, Any]) -> str:
    """A case as the plot names it."""
    name = str(result["case"])
    return f"{name} ({'×'.join(map(str, result['shape']))})" if name in CASES and "x" not in name else name


def machine(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine, with the MPI that rma_mm ran on."""
    where = measure.machine()
    found = [result["peers"].get(RMA_MM, {}).get("facts", {}).get("mpi") for result in results]
    return where | {"mpi": next(filter(None, found), None)}
