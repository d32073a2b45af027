"""Statistics of the runs of ``methods.py``, with their table, grid and curves; how a benchmark ends."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tightframe.errors import TightframeError
from tightframe.methods import get as method_named

BASELINE = "FedAvg"
Run = Mapping[str, Any]


def score(run: Run, last: int) -> float | None:
    """Return the mean of the measure over the last rounds of a run; None if the run failed."""
    course = [value for value in run.get("course", [])[-run.get("last", last) :] if value is not None]
    return statistics.fmean(course) if course else None


def rounds_that_count(method: str, last: int) -> int:
    """Return the number of a run's last models over which its score is averaged.

    It is one if a method changes the model once more after the rounds: earlier models are not its result.

    >>> rounds_that_count("fedavg", 5), rounds_that_count("ccvr", 5)
    (5, 1)
    """
    return last if method_named(method).after is None else 1


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences with its 95 % t interval (unbounded for a single one).

    >>> interval([0.0])
    (0.0, -inf, inf)
    """
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, -math.inf, math.inf
    from scipy.stats import t

    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = float(t.ppf(0.975, len(differences) - 1)) * error
    return mean, mean - half, mean + half


def effect(options: Mapping[str, Any], differences: Sequence[float]) -> dict[str, Any]:
    """Return options and numbers of a comparison, as ``tightframe_app.jobs.presets.Effect`` has them."""
    mean, low, high = (round(value, 4) for value in interval(differences))
    told = described(options) if options else ""
    return {"options": told, "mean": mean, "low": low, "high": high, "seeds": len(differences)}


def rounds_to(course: Sequence[float | None], target: float) -> int | None:
    """Return the first round after which the measure is at least ``target``; None if that never happens.

    Args:
        course: the measure after round 0 (the untrained model), 1, 2, ...
        target: value to reach.

    >>> rounds_to([0.9, 0.2, 0.5, 0.6], 0.5)
    2
    """
    reached = (
        number for number, value in enumerate(course) if number and value is not None and value >= target
    )
    return next(reached, None)


def paired(runs: Iterable[Run], base: Iterable[Run], last: int) -> list[float]:
    """Return the differences of the scores to the baseline's, for each seed with both scores.

    Silos' own models, each evaluated on its silo's records, are not compared with a global model on all.
    """
    differences = []
    by_seed = {run["seed"]: score(run, last) for run in base}
    for run in runs:
        value, other = score(run, last), by_seed.get(run["seed"])
        if value is not None and other is not None and not run.get("own_models"):
            differences.append(value - other)
    return differences


def reached(runs: Iterable[Run], base: Iterable[Run]) -> list[int | None]:
    """Return the round in which each run with a global model reaches the baseline's best, by seed."""
    best = {
        run["seed"]: max(value for value in run["course"][1:] if value is not None)
        for run in base
        if run.get("course")
    }
    return [
        rounds_to(run["course"], best[run["seed"]])
        for run in runs
        if run.get("course") and run["seed"] in best and not run.get("own_models")
    ]


def summarise(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row of numbers for each method and each setting of the class rules.

    Keys: ``method``, ``class_rules``, ``mean``, ``spread`` (standard deviation over seeds), ``runs`` and
    ``failed`` (numbers of them), ``difference`` (mean, low, high, the latter None
    for a single seed; None for the baseline),
    ``rounds_to_baseline_best`` (mean over the runs that get there; how many do), ``seconds``, ``bytes``
    (both per round, all silos together), ``personal`` (mean accuracy of personal models, or None),
    ``own_models`` (true if silos' own models are measured, because there is no global one).
    """
    last, rows = report["settings"]["last"], []
    for rules, methods in report["results"].items():
        base = methods[BASELINE]
        for title, runs in methods.items():
            scores = [value for run in runs if (value := score(run, last)) is not None]
            whole = [run for run in runs if run.get("course")]
            differences = paired(runs, base, last) if title != BASELINE else []
            counts = reached(runs, base)
            arrived = [count for count in counts if count is not None]
            personal = [run["personal"] for run in whole if run.get("personal") is not None]
            rows.append(
                {
                    "method": title,
                    "class_rules": rules,
                    "mean": statistics.fmean(scores) if scores else None,
                    "spread": statistics.stdev(scores) if len(scores) > 1 else None,
                    "runs": len(runs),
                    "failed": sorted(run["error"] for run in runs if "error" in run),
                    "difference": _finite(interval(differences)) if differences else None,
                    "rounds_to_baseline_best": {
                        "mean": statistics.fmean(arrived) if arrived else None,
                        "arrived": len(arrived),
                        "of": len(counts),
                    },
                    "seconds": statistics.fmean(run["seconds_a_round"] for run in whole) if whole else None,
                    "bytes": statistics.fmean(run["bytes_a_round"] for run in whole) if whole else None,
                    "personal": statistics.fmean(personal) if personal else None,
                    "own_models": any(run.get("own_models") for run in runs),
                }
            )
    return rows


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the searched grids, and the table."""
    settings = report["settings"]
    for method, grid in report["grids"].items():
        _show_grid(method, grid, console)
    rules = list(report["results"])
    title = (
        f"{report['data']}; {settings['measure'].replace('_', ' ')}, mean of the last "
        f"{settings['last']} of {settings['rounds']} rounds, mean ± sd over {report['seeds']} seeds; "
        f"{settings['summation']} sums; {report['device']}"
    )
    table = Table(title=title)
    columns = ["method", *(f"class rules {name}" for name in rules)]
    columns += [f"against {BASELINE} [95 %]", f"rounds to {BASELINE}'s best", "s a round", "bytes a round"]
    rows = summarise(report)
    personal = any(row["personal"] is not None for row in rows)
    for column in [*columns, "personal"] if personal else columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    by_place = {(row["method"], row["class_rules"]): row for row in rows}
    for method in report["results"][rules[0]]:
        first = by_place[method, rules[0]]
        cells = [method, *(_mean(by_place[method, name]) for name in rules), _difference(first)]
        cells += [_rounds(first), _number(first["seconds"], "{:.2f}"), _number(first["bytes"], "{:,.0f}")]
        table.add_row(*cells, *([_number(first["personal"], "{:.3f}")] if personal else []))
    console.print(table)
    if len(rules) > 1:
        console.print(f"All columns except the second are of the runs with class rules {rules[0]}.")


def _show_grid(method: str, grid: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{method}: grid, validation folds, seeds {grid['seeds']}, all values")
    table.add_column("options")
    table.add_column("validation", justify="right")
    table.add_column("of each seed", justify="right")
    for point in grid["points"]:
        chosen = " (chosen)" if point["options"] == grid["chosen"] else ""
        each = " ".join(_number(value, "{:.3f}") for value in point["scores"])
        table.add_row(described(point["options"]) + chosen, _number(point["mean"], "{:.4f}"), each)
    console.print(table)


def described(options: Mapping[str, Any]) -> str:
    """Format options as ``mu_intra=1e-05, mu_inter=0.01``; ``defaults`` for none."""
    if not options:
        return "defaults"
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in options.items()
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw curves over rounds as PNG: mean over seeds, and the range from the lowest to the highest.

    Solid lines show the first setting of the class rules, dashed ones the second.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    for style, (rules, methods) in zip(("-", "--"), report["results"].items(), strict=False):
        for number, (title, runs) in enumerate(methods.items()):
            courses = [run["course"] for run in runs if run.get("course")]
            if not courses:
                continue
            by_round = [[v for v in values if v is not None] for values in zip(*courses, strict=True)]
            rounds = [place for place, values in enumerate(by_round) if values]
            spread = [by_round[place] for place in rounds]
            color = f"C{number % 10}"
            label = title if len(report["results"]) == 1 else f"{title}, class rules {rules}"
            axes.plot(rounds, [statistics.fmean(v) for v in spread], style, color=color, label=label)
            low, high = [min(v) for v in spread], [max(v) for v in spread]
            axes.fill_between(rounds, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("round")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"{report['settings']['measure'].replace('_', ' ')} on the test set")
    axes.set_title(f"{report['data']}, {report['seeds']} seeds", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _finite(values: Iterable[float]) -> list[float | None]:
    """Return None in place of infinities, which JSON does not have."""
    return [None if math.isinf(value) else value for value in values]


def _mean(row: Mapping[str, Any]) -> str:
    if row["mean"] is None:
        return f"failed ({', '.join(sorted(set(row['failed'])))})"
    spread = "" if row["spread"] is None else f" ± {row['spread']:.3f}"
    lost = f" ({len(row['failed'])} of {row['runs']} failed)" if row["failed"] else ""
    return f"{'own models: ' if row['own_models'] else ''}{row['mean']:.3f}{spread}{lost}"


def _difference(row: Mapping[str, Any]) -> str:
    if row["difference"] is None:
        return ""
    mean, low, high = row["difference"]
    return f"{mean:+.3f}" if low is None else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def _rounds(row: Mapping[str, Any]) -> str:
    rounds = row["rounds_to_baseline_best"]
    if rounds["mean"] is None:
        return "never" if rounds["of"] else ""
    return f"{rounds['mean']:.1f} ({rounds['arrived']} of {rounds['of']})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def end(main: Callable[[], int]) -> None:
    """Run a benchmark, and end its process: with code 2 and the reason, if it cannot be run."""
    try:
        code = main()
    except TightframeError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
