"""The papers' figures, from runs that are there: each draws one of ``papers.py``'s tables.

    python benchmarks/paper_figures.py collapse --table fx_mlp -o collapse.png
    python benchmarks/paper_figures.py curves --table fx_nh --rows FedAvg FedNH -o curves.png
    python benchmarks/paper_figures.py sensitivity --table fx_mr -o sensitivity.png
    python benchmarks/paper_figures.py cosines --table fx_mlp --rows FedAvg FedETF -o cosines.png
    python benchmarks/paper_figures.py embedding --table fx_mlp --rows FedAvg FedMR -o tsne.png
    python benchmarks/paper_figures.py embedding --table fx_toy -o toy.png

``collapse``: NC1, NC2 and the mean cosine of class means by round (FedAvg_ETF, FedETF). ``curves``: test
accuracy and loss by round. ``sensitivity``: the measure of each row, which are values of an option.
``cosines``: between the class means of the last model (FedNH). ``embedding``: test features of the last model
in the plane, by t-SNE, or as they are where there are two (FedMR's toy figure). Lines are means over seeds,
bands one standard deviation; pictures of one model are of the first seed that has them. A row without runs is
left out, and named on the standard error stream.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_runs import Cell, Store, cells_of, key_of
from papers import TABLES, by_seed, chosen, parse_root, seeds_of

from methods import RESULTS, ROOTS

Runs = dict[str, list[dict[str, Any]]]
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999933", "#882255")
"""Okabe and Ito's, and two of Tol's, which colour-blind readers tell apart."""
PANELS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "collapse": (
        ("nc1", "NC1: within over between classes"),
        ("nc2", "NC2: distance from a simplex"),
        ("cosine", "mean cosine of class means"),
    ),
    "curves": (("course", "test accuracy"), ("losses", "test loss")),
}


def runs_of(cells: Sequence[Cell], store: Store) -> Runs:
    """Return the finished runs of each row, those of the first seed first; rows without any are named."""
    found: Runs = {}
    for cell in cells:
        runs = [store.runs.get(key_of(run), {}) for runs in cell.runs.values() for run in runs[:1]]
        done = [run for run in runs if run.get("course")]
        if done:
            found[cell.row.title] = done
        else:
            print(f"no finished run of {cell.row.title}: left out", file=sys.stderr)
    if not found:
        raise SystemExit("expected finished runs: fill the table with papers.py first")
    return found


def by_round(run: Mapping[str, Any], what: str) -> dict[int, float]:
    """Return a measure by round, without those that do not exist."""
    if what in ("course", "losses"):
        return {place: value for place, value in enumerate(run.get(what) or []) if value is not None}
    return {item["round"]: item[what] for item in run.get("shapes") or [] if item[what] is not None}


def lines(pyplot: Any, runs: Runs, kind: str) -> Any:
    """Draw measures by round, a panel each."""
    panels = PANELS[kind]
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2))
    for axes, (what, title) in zip(all_axes, panels, strict=True):
        for colour, (row, items) in zip(COLOURS, runs.items(), strict=False):
            each = [values for run in items if (values := by_round(run, what))]
            if not each:
                continue
            rounds = sorted(set.intersection(*(set(values) for values in each)))
            points = [[values[place] for values in each] for place in rounds]
            means = [statistics.fmean(values) for values in points]
            spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in points]
            axes.plot(rounds, means, color=colour, linewidth=1.4, label=f"{row} ({len(each)})")
            low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
            axes.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
    all_axes[0].legend(frameon=False, fontsize=7)
    return figure


def sensitivity(pyplot: Any, cells: Sequence[Cell], store: Store) -> Any:
    """Draw the measure of each row, mean and standard deviation over seeds."""
    values = {cell.row.title: list(by_seed(cell, store).values()) for cell in cells}
    shown = {title: each for title, each in values.items() if each}
    if not shown:
        raise SystemExit("expected finished runs: fill the table with papers.py first")
    figure, axes = pyplot.subplots(figsize=(5.6, 0.36 * len(shown) + 1.0))
    places = range(len(shown))
    means = [statistics.fmean(each) for each in shown.values()]
    spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in shown.values()]
    axes.errorbar(means, places, xerr=spreads, fmt="o", color=COLOURS[2], capsize=3)
    axes.set_yticks(places, [f"{title} ({len(each)})" for title, each in shown.items()])
    axes.invert_yaxis()
    axes.set_xlabel(cells[0].column.title)
    axes.grid(axis="x", alpha=0.3)
    return figure


def pictures(pyplot: Any, runs: Runs, key: str, draw: Callable[[Any, Any, Any], Any]) -> Any:
    """Draw a picture of each row's first model that has one."""
    held = {
        title: [run["drawn"] for run in items if key in (run.get("drawn") or {})]
        for title, items in runs.items()
    }
    shown = {title: each[0] for title, each in held.items() if each}
    if not shown:
        raise SystemExit(
            f"expected runs with {key}: points are kept of seeds 0, 10, 20, ... and of two features"
        )
    wide = min(4, len(shown))
    high = -(-len(shown) // wide)
    figure, grid = pyplot.subplots(high, wide, figsize=(2.9 * wide, 2.8 * high), squeeze=False)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_axis_off()
    made: Any = None
    for axes, (title, drawn) in zip(grid.flat, shown.items(), strict=False):
        made = draw(pyplot, axes, drawn)
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    if key == "cosines":
        figure.colorbar(made, ax=grid.ravel().tolist(), shrink=0.8)
    return figure


def matrix(pyplot: Any, axes: Any, drawn: Mapping[str, Any]) -> Any:
    """Draw the cosines between class means."""
    return axes.imshow(drawn["cosines"], vmin=-1, vmax=1, cmap="RdBu_r")


def scatter(pyplot: Any, axes: Any, drawn: Mapping[str, Any]) -> Any:
    """Draw features by class."""
    across, up = zip(*drawn["points"], strict=True)
    return axes.scatter(across, up, c=drawn["labels"], cmap="tab10", vmin=-0.5, vmax=9.5, s=6)


def main(given: Sequence[str] | None = None) -> int:
    """Draw a figure, and return the exit code."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("figure", choices=("collapse", "curves", "sensitivity", "cosines", "embedding"))
    command.add_argument("--table", choices=list(TABLES), required=True)
    command.add_argument("--rows", nargs="+")
    command.add_argument("--column", help="by title; the first by default")
    command.add_argument("--seeds", type=int, help="the table's number by default")
    command.add_argument("--root", type=parse_root, action="append", default=[], metavar="SET=FOLDER")
    command.add_argument("--runs", type=Path, default=RESULTS / "papers-cpu.json", help="file of papers.py")
    command.add_argument("--out", "-o", type=Path, required=True, help="picture, .png or .svg")
    arguments = command.parse_args(given)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = None if arguments.column is None else [arguments.column]
    table = chosen(TABLES[arguments.table](), arguments.rows, columns)
    here = {name: folder for name, folder in ROOTS.items() if name == "fashion_mnist" and folder.is_dir()}
    store = Store(arguments.runs)
    rows = cells_of(
        table, "cpu", {**here, **dict(arguments.root)}, seeds_of(table, "cpu", arguments.seeds), {}
    )
    cells = [row[0] for row in rows]
    if arguments.figure == "sensitivity":
        figure = sensitivity(pyplot, cells, store)
    elif arguments.figure in PANELS:
        figure = lines(pyplot, runs_of(cells, store), arguments.figure)
    elif arguments.figure == "cosines":
        figure = pictures(pyplot, runs_of(cells, store), "cosines", matrix)
    else:
        figure = pictures(pyplot, runs_of(cells, store), "points", scatter)
    if arguments.figure != "cosines":
        figure.tight_layout()
    figure.savefig(arguments.out, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
