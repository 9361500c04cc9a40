"""The cells of `bench.question`, and its experiments: what is measured, who won, and whether it was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from bench.policy.cases import BLOCKS, Case

SHAPES: dict[str, tuple[int, int, int]] = {
    "small 256": (256, 256, 256), "small 512": (512, 512, 512), "square 1024": (1024, 1024, 1024),
    "square 2048": (2048, 2048, 2048), "tall": (8192, 256, 512), "wide": (256, 8192, 512), "outer": (3072, 2048, 64),
    "k-dominant": (256, 384, 16384), "long k": (512, 512, 8192), "mlp up": (1024, 3072, 768),
    "mlp down": (1024, 768, 3072), "uneven": (1111, 777, 1333),
}
"""m, n, k."""
SETTINGS: dict[str, Case] = {
    "one node, 4 ranks": Case("", "", (0, 0, 0), 4, further="2x1x2"),
    "2 hosts at 5 Gbit/s": Case("", "", (0, 0, 0), 2, 2, rate="5gbit", further="1x1x2"),
    "2 hosts at 1 Gbit/s": Case("", "", (0, 0, 0), 2, 2, rate="1gbit", further="1x1x2"),
    "4 pretended nodes": Case("", "", (0, 0, 0), 4, 4, further="2x1x2"),
    "3 ranks on 2 cores": Case("", "", (0, 0, 0), 3, cores=(0, 1, 1), further="1x1x3"),
    "callers' arrays, MPI": Case("", "", (0, 0, 0), 4, mesh="2x2", layouts=BLOCKS, window="created"),
    "callers' arrays, UCX": Case("", "", (0, 0, 0), 4, mesh="2x2", layouts=BLOCKS, own="AB"),
}
SURVEY = (11520, 12288, 7680)
"""m, n, k of the experiments that surveys of these algorithms repeat."""
FFN = (512, 11008, 4096)
"""Rows, features inside, features outside: a block of LLaMA 7B on 512 tokens."""
EXPERIMENTS: dict[str, list[Case]] = {
    "survey": [Case("survey", "survey", SURVEY, ranks) for ranks in (8, 9, 18)],
    "depth": [Case("depth", "depth", (4096, 4096, 4096), 16)],
    "ffn": [Case("ffn", "ffn", FFN, 3, cores=(0, 1, 1))],
}
FAMILIES: dict[str, tuple[str, ...]] = {
    "SUMMA": ("summa_c", "summa_a", "summa_b", "pumma", "pblas"),
    "Cannon": ("cannon",),
    "2.5-D, 3-D": ("solomonik_25d", "tesseract", "agarwal_3d", "johnson_3d", "nus_3d"),
    "T10": ("t10_rotate",),
    "1-D": ("data_parallel", "column_parallel", "row_parallel", "gather_gemm", "gemm_scatter"),
    "other": ("mixed_2d", "row_column_2d", "cosma"),
}
"""Group algorithms in their two-sided form, by family."""
PULL, PUSH, AUTO = "pull", "push", "auto"
COLUMNS = (PULL, PUSH, *FAMILIES)
NEAR = 1.05
"""Times the winner: who is predicted to win and comes so near is as good."""
BAR, SHARE = 1.05, 0.9
Record = Mapping[str, Any]


def cases() -> Iterator[Case]:
    """The cells, setting by setting."""
    for setting, case in SETTINGS.items():
        for name, shape in SHAPES.items():
            yield replace(case, name=name, kind=setting, shape=shape)


def family(contender: Record) -> str:
    """One-sided algorithms push if they accumulate, else pull; the others are of the family of their name."""
    name, _, form = contender["algorithm"].partition(":")
    if form == "pull" or not any(name in names for names in FAMILIES.values()):
        ways = {way for how in (contender.get("movement") or {}).values() for way in how.split("+")}
        return PUSH if "accumulate" in ways else PULL
    return next(each for each, names in FAMILIES.items() if name in names)


class Cell:
    """One shape in one setting, as it was measured."""

    def __init__(self, record: Record) -> None:
        self.record, self.shape, self.setting = record, record["case"].partition(" on ")[0], record["kind"]
        every = record.get("contenders", ())
        self.timed = [x for x in every if x["seconds"] is not None]
        twins = [x | {"seconds": every[x["same_as"]]["seconds"]} for x in every if x["same_as"] is not None]
        self.best: dict[str, Record] = {}
        for x in sorted([*self.timed, *twins], key=lambda x: float(x["seconds"])):
            self.best.setdefault(family(x), x)

    @property
    def is_measured(self) -> bool:
        return bool(self.timed) and "regret" in self.record

    @property
    def chosen(self) -> Record:
        found: Record = self.record["contenders"][self.record["chosen"]]
        return found

    @property
    def winner(self) -> str:
        """The family of the fastest."""
        return min(self.best, key=lambda each: float(self.best[each]["seconds"]))

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long as the fastest the best of each family took."""
        least = float(self.best[self.winner]["seconds"])
        return {each: float(found["seconds"]) / least for each, found in self.best.items()}

    @property
    def regret(self) -> float:
        """Of what was chosen, head to head with the best other one."""
        return float(self.record["regret"])

    @property
    def is_near(self) -> bool:
        """Whether what was predicted to be fastest is within `NEAR` of the fastest."""
        return self.regret <= NEAR

    @property
    def is_predicted(self) -> bool:
        """Whether it is that near, or of the family that wins."""
        return self.is_near or family(self.chosen) == family(self.record["contenders"][self.record["best"]])

    @property
    def wrong_words(self) -> list[str]:
        """Candidates whose transports counted other words than their closed form has, a queue's apart."""
        found = []
        for x in self.timed:
            counted = sum((x.get("words") or {"": 0}).values())
            if not x["algorithm"].startswith("queue") and abs(counted - x["priced_words"]) > 0.5:
                found.append(f"{x['algorithm']}: {counted} and {x['priced_words']:.0f}")
        return found


def lines(cells: Sequence[Cell]) -> list[str]:
    """A table for each setting, then what they come to."""
    found = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        group = [cell for cell in cells if cell.setting == setting and cell.is_measured]
        found += ["", f"### {setting}", "", *table(group), "", summary(group)]
    every = [cell for cell in cells if cell.is_measured]
    return [*found, "", f"All settings: {summary(every)}"] if every else []


def table(cells: Sequence[Cell]) -> list[str]:
    """Milliseconds of auto, and times as long as the fastest by the best of each family."""
    names = ["shape", "M×N×K", "auto chose", "ms", "regret", *COLUMNS]
    rows = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for cell in cells:
        found = {each: f"{ratio:.2f}" for each, ratio in cell.ratios.items()}
        found[cell.winner] = f"**{found[cell.winner]}**"
        ratios = [found.get(each, "–") for each in COLUMNS]
        extents = "×".join(map(str, cell.record["shape"]))
        chosen = f"{cell.chosen['algorithm']} ({family(cell.chosen)})"
        figures = [cell.shape, extents, chosen, f"{1e3 * cell.chosen['seconds']:.3g}", f"{cell.regret:.2f}", *ratios]
        rows.append(f"| {' | '.join(figures)} |")
    return rows


def summary(cells: Sequence[Cell]) -> str:
    """In a sentence."""
    if not cells:
        return "nothing was measured"
    regrets = [cell.regret for cell in cells]
    mean = geometric_mean(regrets)
    share, near = (sum(found) / len(cells) for found in zip(*((x.is_predicted, x.is_near) for x in cells), strict=True))
    off = sum(bool(cell.wrong_words) for cell in cells)
    timed = sum(len(cell.timed) for cell in cells)
    count = len(cells)
    return (
        f"winning family predicted in {share:.0%} of {count} cells, a plan within 5 % of the fastest in {near:.0%}; "
        f"regret {mean:.3f} on average and {max(regrets):.2f} at most; "
        f"words equal their closed form in {count - off} of {count} cells ({timed} candidates timed)"
    )


def failure(record: Record) -> str:
    """What went wrong in a cell; empty if nothing did."""
    wrong = [x["algorithm"] for x in record.get("contenders", ()) if x["right"] is False]
    return f"wrong: {', '.join(wrong)}" if wrong else str(record.get("error") or record.get("skipped") or "")


def code_of(cells: Sequence[Cell], faults: Iterable[str]) -> int:
    """Whether the bars are met."""
    if not cells or list(faults):
        return 1
    mean = geometric_mean([cell.regret for cell in cells])
    return int(mean > BAR or sum(cell.is_near for cell in cells) < SHARE * len(cells))
