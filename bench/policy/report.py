"""What the cases say: a table of them, regrets against their bars, and where predictions are off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median, quantiles
from typing import Any

from bench import measure

BAR, RANDOM_BAR = 1.05, 1.08
"""The geometric mean of regrets at most, of the fixed table and of drawn cases."""
WORST = 1.25
"""No regret of the fixed table is above this."""
WITHIN = (0.8, 1.25)
"""Predicted over measured seconds of a good prediction."""
SHARE = 0.9
"""The share of good predictions at least."""
DIRECT = 1.02
"""`matmul` that chooses over `matmul` that is told, at most."""
CLEARLY = 0.95
"""Seconds over seconds: below this the one is faster, and not by noise."""
SHOWN = 12
"""Lines of a list of the worst."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Prediction:
    """One candidate that was predicted and measured."""

    result: Record
    contender: Record

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return float(self.contender["predicted"] / self.contender["seconds"])

    @property
    def is_good(self) -> bool:
        """Whether it is near enough."""
        return WITHIN[0] <= self.ratio <= WITHIN[1]

    @property
    def movement(self) -> str:
        """All ways in which A, B and C move."""
        ways = {way for x in self.contender["movement"].values() for way in x.split("+")}
        return "+".join(sorted(ways - {"here"})) or "nothing moves"


def predictions(results: Iterable[Record]) -> list[Prediction]:
    """Every candidate with a prediction and a time."""
    return [
        Prediction(result, x)
        for result in results
        for x in result.get("contenders", ())
        if x["predicted"] and x["seconds"]
    ]


def decided(results: Iterable[Record]) -> list[Record]:
    """The cases that have a regret."""
    return [result for result in results if result.get("regret") is not None]


def geometric_mean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return exp(sum(map(log, values)) / len(values)) if values else None


# -- figures --------------------------------------------------------------------------------------


def groups(results: Iterable[Record]) -> dict[str, list[Record]]:
    """The fixed table's cases and the drawn ones, as far as there are any: their bars differ."""
    found: dict[str, list[Record]] = {}
    for result in decided(results):
        found.setdefault("random" if result["kind"] == "random" else "table", []).append(result)
    return found


def summary(results: Sequence[Record]) -> dict[str, Any]:
    """The figures of a group that have bars, and whether they are met; None where nothing says."""
    is_random = any(result["kind"] == "random" for result in results)
    regrets = [result["regret"] for result in results]
    found = predictions(results)
    figures = {
        "regret": (geometric_mean(regrets), RANDOM_BAR if is_random else BAR),
        "worst": (max(regrets), None if is_random else WORST),
        "direct": (max((r["direct"]["ratio"] for r in results if r.get("direct")), default=None), DIRECT),
    }
    share = sum(x.is_good for x in found) / len(found) if found else None
    return {
        "cases": len(regrets), "predictions": len(found),
        **{name: {"found": value, "bar": bar, "met": value <= bar if value and bar else None}
           for name, (value, bar) in figures.items()},
        "planning": median(r["planning"] for r in results), "took": sum(r["took"] for r in results),
        "share": {"found": share, "bar": SHARE, "met": None if share is None else share >= SHARE},
        "paths": {path: reached(results, path) for path in sorted({r["path"] for r in results if r["path"]})},
    }


def reached(results: Iterable[Record], path: str) -> dict[str, int]:
    """Of how many cases memory is reached so by the chosen plan, and in how many it should have been."""
    wanted = [result for result in results if result["path"] == path]
    kept = sum(result["kept"] for result in wanted)
    return {"cases": len(wanted), "kept": kept, "missed": sum(is_missed(result) for result in wanted)}


def is_missed(result: Record) -> bool:
    """Whether a candidate that reaches memory as wanted is faster than the chosen one, which does not."""
    return result["faster"] is not None and result["faster"] < CLEARLY


# -- in lines -------------------------------------------------------------------------------------


def lines(results: Sequence[Record]) -> list[str]:
    """Everything, for a terminal."""
    told = [case_table(results), regret_lines(results), prediction_lines(results)]
    told += [summary_lines(name, summary(group)) for name, group in groups(results).items()]
    return [line for part in [*told, remarks(results)] for line in (["", *part] if part else [])]


def case_table(results: Sequence[Record]) -> list[str]:
    """A line for each case."""
    head = [
        "case", "shape", "A, B, C placed", "timed", "chosen", "ms", "best", "regret", "chosen / other", "pred / meas",
        "A, B, C move", "path",
    ]
    return measure.table(head, map(case_line, decided(results))) if decided(results) else []


def case_line(result: Record) -> list[object]:
    """Its line."""
    chosen, best = (result["contenders"][result[x]] for x in ("chosen", "best"))
    timed = sum(bool(x["samples"]) for x in result["contenders"])
    predicted = chosen["predicted"] / chosen["seconds"] if chosen["predicted"] else None
    shape = "×".join(map(str, result["shape"])) + (" f64" if result["dtype"] == "float64" else "")
    return [
        result["case"], shape, ", ".join(briefly(text) for text in result["layouts"].values()), timed, label(chosen),
        f"{1e3 * chosen['seconds']:.2f}", "" if best is chosen else label(best), to_places(result["regret"]),
        to_places(result["ratio"]), to_places(predicted), ", ".join(chosen["movement"].values()), path_text(result),
    ]


def briefly(text: str) -> str:
    """A placement without its quotes."""
    short = text.removeprefix("P").replace("'", "").replace(" ", "").replace("None", "*")
    return short or "free"


def label(contender: Record) -> str:
    """A candidate by its mesh and name."""
    return f"{contender['mesh']} {contender['algorithm']}"


def to_places(ratio: float | None) -> str:
    """A ratio to three places."""
    return "-" if ratio is None else f"{ratio:.3f}"


def path_text(result: Record) -> str:
    """Whether memory was reached as wanted; if not, what the fastest that does so takes, as a share of the time."""
    if result["path"] is None:
        return "-"
    if result["kept"]:
        return "yes"
    word = "NO" if is_missed(result) else "no"
    return f"{word}, none does" if result["faster"] is None else f"{word}, {result['faster']:.2f} with"


def regret_lines(results: Sequence[Record]) -> list[str]:
    """Regrets by setting and kind, and the worst of them."""
    known = decided(results)
    if not known:
        return []
    head = ["regrets", "cases", "geometric mean", "above 1.05", "worst"]
    rows = [
        regret_row(name, [result for result in known if key in (result["setting"], result["kind"])])
        for name, key in names_of(known)
    ]
    worst = sorted((r for r in known if r["regret"] > 1), key=lambda r: -r["regret"])[:SHOWN]
    table = measure.table(["the worst regrets", "chosen", "ms", "best", "ms", "regret"], map(worst_row, worst))
    return [*measure.table(head, rows), *(["", *table] if worst else [])]


def names_of(results: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """Settings and kinds that occur."""
    for what in ("setting", "kind"):
        for key in dict.fromkeys(result[what] for result in results):
            yield f"{what} {key}", key


def regret_row(name: str, group: Sequence[Record]) -> list[object]:
    """One line of the regrets."""
    regrets = [result["regret"] for result in group]
    return [
        name, len(group), to_places(geometric_mean(regrets)), sum(x > BAR for x in regrets), to_places(max(regrets)),
    ]


def worst_row(result: Record) -> list[object]:
    """One line of the worst, with the times of the head-to-head."""
    chosen, best = (result["contenders"][result[x]] for x in ("chosen", "best"))
    times = [f"{1e3 * median(result['duel'][x]):.2f}" for x in ("chosen", "other")]
    return [result["case"], label(chosen), times[0], label(best), times[1], to_places(result["regret"])]


def prediction_lines(results: Sequence[Record]) -> list[str]:
    """How predictions compare with what was measured: by algorithm, by setting and so on, and the worst of them."""
    found = predictions(results)
    if not found:
        return ["no candidate was predicted in seconds"] if decided(results) else []
    keys: dict[str, Callable[[Prediction], str]] = {
        "setting": lambda x: x.result["setting"],
        "kind": lambda x: x.result["kind"],
        "type": lambda x: x.result["dtype"],
        "movement": lambda x: x.movement,
        "algorithm": lambda x: family(x.contender["algorithm"]),
    }
    told: list[str] = []
    for name, key in keys.items():
        told += [*breakdown(name, found, key), ""]
    worst = sorted(found, key=lambda x: -abs(log(x.ratio)))[:SHOWN]
    head = ["the worst predictions", "candidate", "measured ms", "predicted ms", "pred / meas"]
    return [*told, *measure.table(head, map(prediction_row, worst))]


def family(algorithm: str) -> str:
    """The name of a row, with its form where that is one of a few."""
    name, _, form = algorithm.partition(":")
    return algorithm if form.isalpha() else name


def breakdown(name: str, found: Sequence[Prediction], key: Callable[[Prediction], str]) -> list[str]:
    """Predicted over measured for each group of candidates, and what the predictions are made of."""
    groups: dict[str, list[Prediction]] = {}
    for x in found:
        groups.setdefault(key(x), []).append(x)
    head = [
        f"predictions by {name}", "candidates", "within 0.8-1.25", "pred / meas: median", "10 %", "90 %",
        "% multiplying", "% moving", "% meeting",
    ]
    rows = [[group, *spread(members)] for group, members in sorted(groups.items())]
    return measure.table(head, [*rows, ["all", *spread(found)]] if len(rows) > 1 else rows)


def spread(found: Sequence[Prediction]) -> list[object]:
    """Number, share within, median and deciles of predicted over measured; median shares of the bill."""
    ratios = sorted(x.ratio for x in found)
    tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    share = sum(x.is_good for x in found) / len(found)
    return [len(found), f"{share:.0%}", *(f"{x:.2f}" for x in (median(ratios), tenths[0], tenths[-1])), *parts(found)]


def parts(found: Sequence[Prediction]) -> list[str]:
    """Of what predictions consist, as medians of percentages."""
    bills = [bill for x in found if (bill := x.contender.get("bill")) and sum(bill.values())]
    names = ("multiplying", "moving", "meeting")
    if not bills:
        return ["-"] * len(names)
    return [f"{100 * median(bill[name] / sum(bill.values()) for bill in bills):.0f}" for name in names]


def prediction_row(x: Prediction) -> list[object]:
    """One line of the worst predictions."""
    times = [f"{1e3 * x.contender[name]:.2f}" for name in ("seconds", "predicted")]
    return [x.result["case"], label(x.contender), *times, f"{x.ratio:.2f}"]


def summary_lines(name: str, found: Record) -> list[str]:
    """Every figure of a group that has a bar, beside it."""
    what = {
        "regret": f"geometric mean of {found['cases']} regrets",
        "worst": "worst regret",
        "share": f"share of {found['predictions']} predictions within 0.8-1.25",
        "direct": "matmul that chooses / that is told",
    }
    rows: list[list[object]] = []
    for key, words in what.items():
        value, bar, met = (found[key][x] for x in ("found", "bar", "met"))
        if value is not None:
            rows.append([words, to_places(value), "-" if bar is None else f"{bar:g}", met])
    rows.append(["planning, median ms", f"{1e3 * found['planning']:.1f}", "-", None])
    rows.append(["seconds that all took", f"{found['took']:.0f}", "-", None])
    for path, counts in found["paths"].items():
        rows.append([f"memory reached: {path}", f"{counts['kept']} of {counts['cases']}", "-", None])
        rows.append(["  and not, where that is faster", counts["missed"], "0", not counts["missed"]])
    return measure.table([f"summary of the {name} cases", "found", "bar", "met"], rows)


def remarks(results: Sequence[Record]) -> list[str]:
    """What went wrong, and what was left out: each thing once."""
    told = [f"{r['case']}: {'FAILED: ' + r['error'] if 'error' in r else r['skipped']}" for r in results if unlike(r)]
    for result in results:
        for x in result.get("contenders", ()):
            if x["error"] or x["right"] is False:
                fault = x["error"] or "WRONG RESULT"
                told.append(f"{result['case']}, {label(x)}: {fault}")
    return told


def unlike(result: Record) -> bool:
    """Whether a case has no regret because of an error, or was skipped."""
    return "error" in result or "skipped" in result
