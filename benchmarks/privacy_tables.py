"""Tables of the parts of ``privacy.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Report = Mapping[str, Any]


def named(epsilon: float | None) -> str:
    """Format an epsilon.

    >>> named(None), named(8.0)
    ('inf', '8')
    """
    return "inf" if epsilon is None else f"{epsilon:g}"


def spread(values: Sequence[float]) -> str:
    """Format the mean, with the standard deviation if there are several values.

    >>> spread([0.5]), spread([0.4, 0.6])
    ('0.500', '0.500 ± 0.141')
    """
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def utility(report: Report, console: Console) -> None:
    """Print the learning rates that were tried, then the methods at every epsilon."""
    settings = report["settings"]
    if report["grid"]:
        table = _table(
            f"learning rates: FedAvg's validation {settings['measure'].replace('_', ' ')}, "
            f"seeds {report['grid_seeds']}, all values",
            ("epsilon", *(f"{point['learning_rate']:g}" for point in report["grid"][0]["points"]), "chosen"),
        )
        for row in report["grid"]:
            cells = [spread(point["scores"]) for point in row["points"]]
            table.add_row(named(row["epsilon"]), *cells, f"{row['chosen']:g}")
        console.print(table)
    methods = list(dict.fromkeys(run["method"] for run in report["runs"]))
    table = _table(
        f"{report['data']}, {settings['rounds']} rounds of {settings['epochs']} epochs, batch "
        f"{settings['batch_size']}, delta {settings['delta']:g}, pooled test folds, mean ± sd over seeds "
        f"{report['seeds']}",
        ("epsilon", *(f"{name}: {kind}" for name in methods for kind in ("accuracy", "balanced")), "spent"),
    )
    for epsilon in dict.fromkeys(run["epsilon"] for run in report["runs"]):
        cells, own = [], [run for run in report["runs"] if run["epsilon"] == epsilon]
        for method in methods:
            runs = [run for run in own if run["method"] == method]
            cells += [_values(runs, kind) for kind in ("accuracy", "balanced_accuracy")]
        spent = max((run.get("spent") or 0.0 for run in own), default=0.0)
        table.add_row(named(epsilon), *cells, "" if epsilon is None else f"{spent:.3f}")
    console.print(table)


def _values(runs: Sequence[Report], kind: str) -> str:
    """Format the runs' mean and spread, with the number of failed runs."""
    failed = [run["error"] for run in runs if "error" in run]
    whole = [run["test"][kind] for run in runs if "error" not in run]
    lost = f" ({len(failed)} of {len(runs)} failed: {', '.join(sorted(set(failed)))})" if failed else ""
    return (spread(whole) if whole else "-") + lost


def cost(report: Report, console: Console) -> None:
    """Print a row for each kind of step."""
    for case in report["cases"]:
        table = _table(
            f"{case['model']}, {case['size']} px, batch {case['batch']}, {case['turns']} turns",
            ("step", "seconds, median", "times plain, median", "least to greatest"),
        )
        for row in case["rows"]:
            if "failed" in row:
                table.add_row(row["step"], f"cannot: {row['failed']}", "", "")
                continue
            low, high = row["ratios"]
            table.add_row(
                row["step"], f"{row['median_seconds']:.4f}", f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}"
            )
        console.print(table)


def inversion(report: Report, console: Console) -> None:
    """Print a row for each epsilon and number of records, averaged over seeds."""
    table = _table(
        f"class mean against its nearest record, width {report['width']}; null: 5, 50 and 95 % quantiles",
        (
            "epsilon",
            "noise z",
            "records",
            "cosine",
            "null",
            "beyond",
            "centred",
            "null",
            "beyond",
            "top",
            "chance",
        ),
    )
    keys = dict.fromkeys((row["epsilon"], row["records"]) for row in report["rows"])
    for epsilon, records in keys:
        rows = [row for row in report["rows"] if (row["epsilon"], row["records"]) == (epsilon, records)]
        cells = []
        for kind in ("cosine", "centred"):
            cells += [_mean(row[kind]["score"] for row in rows), _null(row[kind]["null"] for row in rows)]
            cells.append(_mean(row[kind]["beyond"] for row in rows))
        cells += [_mean(row["centred"]["top"] for row in rows), _mean(row["top_chance"] for row in rows)]
        noise = rows[0]["noise_multiplier"]
        table.add_row(named(epsilon), "" if noise is None else f"{noise:.2f}", str(records), *cells)
    console.print(table)


def inference(report: Report, console: Console) -> None:
    """Print a row for each attack and seed."""
    table = _table(
        "was the canary there? null: 5, 50 and 95 % quantiles of permuted coins",
        ("epsilon", "from", "attacker", "seed", "canaries", "AUC", "null", "p", "at most"),
    )
    for row in report["rows"]:
        table.add_row(
            named(row["epsilon"]), row["from"], row["attacker"], str(row["seed"]), str(row["canaries"]),
            f"{row['auc']:.3f}", _null([row["null"]]), f"{row['p']:.3f}", f"{row['at_most']:.3f}",
        )  # fmt: skip
    console.print(table)


def _mean(values: Any) -> str:
    return f"{statistics.fmean(values):.3f}"


def _null(parts: Any) -> str:
    return " ".join(_mean(item) for item in zip(*parts, strict=True))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


SHOW: dict[str, Callable[[Report, Console], None]] = {
    "utility": utility,
    "cost": cost,
    "inversion": inversion,
    "inference": inference,
}
