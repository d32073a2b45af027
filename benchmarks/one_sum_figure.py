"""Figure of ``one_sum.py``'s rows, as SVG: accuracy by epsilon, or by partition where nothing is private."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "fed3r": "#0072b2",
    "fedcgs": "#56b4e9",
    "fedncm": "#009e73",
    "fedsgd": "#cc79a7",
    "fedavg": "#000000",
    "fedetf": "#d55e00",
    "fedmr": "#e69f00",
}
"""Okabe and Ito's, which colour-blind readers tell apart."""
STYLES = {None: "o-", "shared": "o-", "own": "s--"}


def series(reports: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, list[dict[str, Any] | None]]]:
    """Return the places of the horizontal axis, and each line's rows there, None where there is none.

    Places are epsilons, in falling order, if any row is private; then all reports must be of one partition.
    Otherwise each report is a place.
    """
    rows = [(report, row) for report in reports for row in report["rows"]]
    epsilons = {row["epsilon"] for _, row in rows}
    if epsilons == {None}:
        places = [f"{report['data']}, {report['partition']}" for report in reports]
        keys = [(f"{report['data']}, {report['partition']}", row["method"]) for report, row in rows]
    else:
        if len({(report["data"], report["partition"]) for report in reports}) > 1:
            raise SystemExit("expected private results of one data set and partition in one figure")
        values = sorted(epsilons, key=lambda value: -1 if value is None else 1 / value)
        places = ["none" if value is None else f"{value:g}" for value in values]
        keys = []
        for _, row in rows:
            noise = f", {row['noise']} noise" if row["method"] == "fedsgd" and row["noise"] else ""
            keys.append(("none" if row["epsilon"] is None else f"{row['epsilon']:g}", row["method"] + noise))
    lines: dict[str, list[dict[str, Any] | None]] = {}
    for (place, name), (_, row) in zip(keys, rows, strict=True):
        lines.setdefault(name, [None] * len(places))[places.index(place)] = row
    return places, lines


def draw(files: Sequence[Path], out: Path) -> None:
    """Draw result files into one SVG; bars are standard deviations over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "one-sum", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    reports = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    places, lines = series(reports)
    private = any(row["epsilon"] is not None for report in reports for row in report["rows"])
    figure, axes = pyplot.subplots(figsize=(8.0, 3.6))
    order = [name for name in COLOURS if any(key.partition(",")[0] == name for key in lines)]
    for name in sorted(lines, key=lambda key: (order.index(key.partition(",")[0]), key)):
        rows, method = lines[name], name.partition(",")[0]
        shift = 0.0 if private else (order.index(method) - (len(order) - 1) / 2) * 0.09
        held = [
            (place + shift, row) for place, row in enumerate(rows) if row and row["accuracy_mean"] is not None
        ]
        style = STYLES["own" if "own" in name else None] if private else "o"
        axes.errorbar(
            [place for place, _ in held],
            [row["accuracy_mean"] for _, row in held],
            yerr=[row["accuracy_sd"] or 0.0 for _, row in held],
            fmt=style,
            color=COLOURS[method],
            markersize=4,
            linewidth=1,
            capsize=2,
            label=name,
        )
    axes.set_xticks(range(len(places)), places)
    axes.set_xlabel(f"epsilon ({reports[0]['data']}, {reports[0]['partition']})" if private else "")
    axes.set_ylabel("accuracy on all test records")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
