"""Plan and conclusions of `soak.py`: faults by seed, growth, leaks, the table and the curves. No engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

Sample = Mapping[str, Any]
Series = Mapping[str, Sequence[Sample]]
"""Process -> its samples in order; each names the round after which it was taken."""

COUNTED = ("files", "sockets", "others", "ports", "threads", "pools", "overdue", "children", "written")
"""Counts that must not grow; ``others`` are pipes and event queues, ``overdue`` timers that should have
ended, ``written`` the files in the process's folder."""
BOUNDED = ("timers", "workers")
"""Counts that rise and fall, or rise to a limit of the engine; shown but not judged."""
CODES = {"raise": "TF-503", "nan": "TF-301", "lost": "TF-503", "late": "TF-502", "freeze": "TF-502"}
"""Kind of fault -> code with which the silo is left out; a pause within the timeout leaves none out."""

_QUICK = ("raise", "nan", "lost", "pause")
DECK = (*_QUICK, "late", *_QUICK, "freeze")
"""Kinds of faults in the order in which a plan takes them, before it shuffles."""
WINDOW = 3
"""Number of rounds compared at either end."""


@dataclass(frozen=True)
class Fault:
    """One silo's fault in one task of a round.

    ``raise``: its records cannot be read. ``nan``: they are not numbers. ``lost``: it does its task, but
    its answer is empty. ``late``: it sleeps. ``pause``, ``freeze``: its process is stopped by SIGSTOP and
    continued, within the server's timeout or after it.
    """

    round: int
    site: str
    task: str
    kind: str
    seconds: float

    @property
    def dropped(self) -> dict[str, str]:
        """Silo that the round loses -> its code. A silo whose term has arrived already stays in."""
        if self.task != "contribute" or self.kind not in CODES:
            return {}
        return {self.site: CODES[self.kind]}


def plan(seed: int, rounds: int, sites: Sequence[str], share: float, patience: float) -> list[Fault]:
    """Return a run's faults: at most one per round, because six silos with a threshold of five survive one.

    Faults that cost the server its whole timeout are half as frequent as others. Round 1 has none, so that
    every silo has trained once before its first fault.

    >>> [fault.round for fault in plan(1, 5, ["a", "b"], 1.0, 40)]
    [2, 3, 4, 5]
    """
    draw = random.Random(seed)  # noqa: S311 - a plan, not a secret
    chosen = sorted(draw.sample(range(2, rounds + 1), round(share * (rounds - 1))))
    kinds = list(islice(cycle(DECK), len(chosen)))
    draw.shuffle(kinds)
    faults = []
    for number, kind in zip(chosen, kinds, strict=True):
        # Faults of training belong to its task; the others may also hit the release of shares.
        task = "contribute" if kind in ("raise", "nan") else draw.choice(["contribute", "reveal"])
        seconds = {"pause": draw.uniform(1, 4), "late": patience + 2, "freeze": patience + 2}.get(kind, 0.0)
        faults.append(Fault(number, draw.choice(list(sites)), task, kind, round(seconds, 1)))
    return faults


@dataclass(frozen=True)
class Finding:
    """Result of one check; ``passed`` is None if it could not be measured, which does not count as a pass."""

    what: str
    passed: bool | None
    told: str

    def __str__(self) -> str:
        verdict = {True: "passed", False: "FAILED", None: "NOT MEASURED"}[self.passed]
        return f"{verdict:<13} {self.what}: {self.told}"


def at(samples: Sequence[Sample], after: int) -> Sample | None:
    """Return a process's sample after a round; None if there is none."""
    return next((sample for sample in samples if sample["after"] == after), None)


def growth(samples: Sequence[Sample], first: int, last: int, key: str = "rss") -> float | None:
    """Return the relative growth of a number between two rounds; None if either was not measured.

    Compares the medians of three rounds at either end: a process's resident memory jumps by some percent
    from round to round while its allocations stay the same.

    >>> growth([{"after": 5, "rss": 100}, {"after": 49, "rss": 109}, {"after": 50, "rss": 99}], 5, 50)
    0.04
    """
    ends = windows(samples, first, last)
    if ends is None:
        return None
    begin, end = (median([sample[key] for sample in window]) for window in ends)
    return (end - begin) / begin


def leaks(samples: Sequence[Sample], first: int, last: int) -> dict[str, tuple[int, int]] | None:
    """Return the counts of a process that grew from the first three rounds to the last; None if not measured.

    To ignore fluctuation, the minimum at the end is compared with the maximum at the beginning.
    """
    ends = windows(samples, first, last)
    if ends is None:
        return None
    counts = {
        key: (max(sample[key] for sample in ends[0]), min(sample[key] for sample in ends[1]))
        for key in COUNTED
    }
    return {key: (begin, end) for key, (begin, end) in counts.items() if end > begin}


def windows(
    samples: Sequence[Sample], first: int, last: int
) -> tuple[Sequence[Sample], Sequence[Sample]] | None:
    """Return the samples of the first three judged rounds and of the last three; None if any is missing."""
    if at(samples, first) is None or at(samples, last) is None:
        return None
    return (
        [sample for sample in samples if first <= sample["after"] < first + WINDOW],
        [sample for sample in samples if last - WINDOW < sample["after"] <= last],
    )


def findings(series: Series, processes: Sequence[str], first: int, last: int, limit: float) -> list[Finding]:
    """Judge memory and counts of every expected process."""
    grown = {name: growth(series.get(name, []), first, last) for name in processes}
    known = {name: value for name, value in grown.items() if value is not None}
    missing = sorted(grown.keys() - known.keys())
    result = f"not measured: {', '.join(missing)}" if missing else ""
    if known:
        worst = max(known, key=known.__getitem__)
        result = f"at most {known[worst]:+.1%} ({worst})" + (f"; {result}" if result else "")
    too_much = any(value > limit for value in known.values())
    results = [
        Finding(
            f"memory after a forced collection, round {first} to {last}, at most {limit:+.0%}",
            False if too_much else None if missing else True,
            result,
        )
    ]
    more = {name: leaks(series.get(name, []), first, last) for name in processes}
    leaked = [
        f"{name} {key} {begin} to {end}"
        for name, keys in more.items()
        for key, (begin, end) in (keys or {}).items()
    ]
    results.append(
        Finding(
            "files, sockets, ports, threads, child processes, files written",
            False if leaked else None if missing else True,
            "; ".join(leaked) or (f"not measured: {', '.join(missing)}" if missing else "none more"),
        )
    )
    pids = {name: {sample["pid"] for sample in series.get(name, [])} for name in processes}
    changed = [name for name, seen in pids.items() if len(seen) > 1]
    results.append(
        Finding(
            "every process is the same from the first round to the last",
            False if changed else None if missing else True,
            f"changed: {', '.join(changed)}" if changed else f"{len(pids) - len(missing)} of {len(pids)}",
        )
    )
    return results


def as_planned(rows: Sequence[Mapping[str, Any]], faults: Sequence[Fault], rounds: int) -> Finding:
    """Check that every round left out exactly the planned silo."""
    expected: dict[int, dict[str, str]] = {number: {} for number in range(1, rounds + 1)}
    expected |= {fault.round: fault.dropped for fault in faults}
    dropped = {row["round"]: row["dropped"] for row in rows if row["kind"] == "train"}
    wrong = [
        f"round {number}: {dropped.get(number, 'missing')}, planned {drop or 'nobody'}"
        for number, drop in expected.items()
        if dropped.get(number) != drop
    ]
    left_out = sum(bool(drop) for drop in expected.values())
    return Finding(
        f"{rounds} rounds, {left_out} of them without one silo, as planned",
        not wrong,
        "; ".join(wrong) or f"{len(faults)} faults",
    )


def left_behind(processes: Sequence[str], temporary: Sequence[str]) -> list[Finding]:
    """Check that a finished run left no process and no temporary file."""
    return [
        Finding("no process left, and so no port", not processes, ", ".join(processes) or "none"),
        Finding("no temporary file left", not temporary, ", ".join(temporary) or "none"),
    ]


def table(series: Series, first: int, last: int) -> str:
    """Return a table of each process's numbers after the first and the last round."""
    names = ("rss MB", "grown", "greatest", "private MB", "in use MB", "objects", *BOUNDED, *COUNTED)
    lines = [f"{'process':<8} " + " ".join(f"{name:>15}" for name in names)]
    for name, samples in series.items():
        begin, end = at(samples, first), at(samples, last)
        if begin is None or end is None:
            lines.append(f"{name:<8} not measured after round {first if begin is None else last}")
            continue
        greatest = max(sample["rss"] for sample in samples if sample["after"] >= first)
        cells = [
            f"{begin['rss'] / 1e6:.1f} {end['rss'] / 1e6:.1f}",
            f"{growth(samples, first, last):+.1%}",
            f"{greatest / 1e6:.1f}",
            *(f"{begin[key] / 1e6:.1f} {end[key] / 1e6:.1f}" for key in ("private", "in_use")),
            *(f"{begin[key]} {end[key]}" for key in ("objects", *BOUNDED, *COUNTED)),
        ]
        lines.append(f"{name:<8} " + " ".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def plot(series: Series, faults: Sequence[Fault], first: int, limit: float, path: Path) -> None:
    """Plot each process's memory over the rounds, relative to that after the first, with marks for faults."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    for number, (name, samples) in enumerate(series.items()):
        begin = at(samples, first)
        if begin is None:
            continue
        rounds = [sample["after"] for sample in samples]
        values = [100 * (sample["rss"] / begin["rss"] - 1) for sample in samples]
        axes.plot(rounds, values, color=f"C{number}", label=f"{name}, {begin['rss'] / 1e6:.0f} MB")
    axes.axhline(100 * limit, color="black", linestyle="--", linewidth=0.8)
    bottom = -100 * limit
    axes.plot([fault.round for fault in faults], [bottom] * len(faults), "|", color="grey", label="a fault")
    axes.set_ylim(1.2 * bottom, None)
    axes.set_xlabel("round")
    axes.set_ylabel(f"resident memory against round {first}, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
