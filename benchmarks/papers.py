"""The papers' tables: our numbers beside the printed ones.

The scale ``cpu`` uses small networks and available data in place of the papers' (always the digits;
Fashion-MNIST and others if their files are given): its numbers come from other data of another size, and
cannot be compared with the printed ones. ``paper`` uses the papers' data and schedules, for a GPU. Every
run is written to a file as soon as it is done and not repeated, so that several calls can fill a table;
a changed setting is another run. A table shows the runs that are done.

    python benchmarks/papers.py --table mr1
    python benchmarks/papers.py --table etf1 --seeds 3 --rows FedAvg FedETF --columns "CIFAR-10 a=0.1 General"
    python benchmarks/papers.py --table mr8 --root fashion_mnist=/data/fashion --markdown
    python benchmarks/papers.py --table ilc1 --root mnist=/data/mnist --root eicu=/data
    python benchmarks/papers.py --table gmv4 --scale paper --root cifar10=/data --root cifar100=/data
    python benchmarks/papers.py --table mr1 --show           # what is done so far
    python benchmarks/papers.py --all --hours 8 --root fashion_mnist=/data/fashion  # the most telling first
"""

from __future__ import annotations

import argparse
import io
import math
import os
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comparison
from paper_effects import EFFECTS, QUEUE
from paper_layout import TITLES, Size, Table
from paper_runs import PERCENT, Cell, Log, Store, cells_of, fill, key_of, value_of
from paper_tables import TABLES as PRINTED
from rich.console import Console
from rich.table import Table as Shown

from methods import FIRST_GRID_SEED, RESULTS, ROOTS, parse_method
from tightframe.data.image_sets import DERIVED
from tightframe.files import write_json

TABLES = {**PRINTED, **EFFECTS}
CPU = (
    "CPU SCALE: small networks, and other data where noted, replace the paper's. Our numbers come from "
    "other data of another size, and cannot be compared with the printed ones."
)


def ours(cell: Cell, store: Store, refused: Mapping[str, str]) -> str:
    """Return a cell's text for our runs: mean and spread over the finished seeds, or why there is none."""
    if cell.reason:
        return "not run"
    measure = cell.column.measure
    values, failed, pending = [], [], 0
    for seed, runs in cell.runs.items():
        if any(key_of(run) in refused for run in runs):
            return "not run"
        results = [store.runs.get(key_of(run)) for run in runs]
        if None in results:
            pending += 1
            continue
        done = [item for item in results if item is not None]
        codes = [item["error"] for item in done if "error" in item]
        bases = [store.runs.get(key_of(run), {}) for run in cell.base.get(seed, ())] or [{}] * len(runs)
        each = [
            value_of(item, measure, run.last, other)
            for item, run, other in zip(done, runs, bases, strict=True)
        ]
        known = [value for value in each if value is not None]
        if codes or len(known) < len(each):
            failed.append(codes[0] if codes else "none")
        else:
            values.append(statistics.fmean(known))
    if not values:
        return ", ".join(sorted(set(failed))) if failed else "…"
    form = "{:.1f}" if measure in (*PERCENT, "reached") else "{:.2f}" if measure == "spread" else "{:.3f}"
    shown = form.format(statistics.fmean(values))
    if len(values) > 1:
        shown += " ± " + form.format(statistics.stdev(values))
    if failed:
        shown += f" ({len(failed)} of {len(cell.runs)} failed: {', '.join(sorted(set(failed)))})"
    return shown + (f" ({len(values)} seeds of {len(cell.runs)})" if pending else "")


def texts(
    rows: Sequence[Sequence[Cell]], store: Store, refused: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Return the columns' titles, and every cell as ``printed/ours``.

    A cell with the same runs as one of an earlier column refers to it; if all cells have, the title does.
    """
    lines = [[cells[0].row.title] for cells in rows]
    titles: list[str] = []
    earlier = dict[Any, str]()
    seen = [dict[Any, str]() for _ in rows]
    for column in zip(*rows, strict=True):
        runs = [(cell.keys, cell.column.measure) for cell in column]
        title = column[0].column.title
        twin = earlier.setdefault(tuple(runs), title) if any(keys for keys, _ in runs) else title
        titles.append(title if twin == title else f"{title} (ours: {twin})")
        for line, known, cell, same in zip(lines, seen, column, runs, strict=True):
            first = known.setdefault(same, title) if cell.keys else title
            printed = cell.printed or "-"
            if twin != title:
                line.append(printed)
            elif first != title:
                line.append(f"{printed}/as {first}")
            else:
                line.append(f"{printed}/{ours(cell, store, refused)}")
    return titles, lines


def remarks(
    table: Table, rows: Sequence[Sequence[Cell]], refused: Mapping[str, str], size: Size, seeds: int
) -> list[str]:
    """Return the notes below a table."""
    if table.baseline:
        first = f"seeds {table.first_seed} to {table.first_seed + seeds - 1}"
        return [f"Mean ± sd over {first}; paired differences with their 95 % t interval.", *table.notes]
    lines = [CPU] if size == "cpu" else []
    spread = "one seed" if seeds == 1 else f"mean ± sd, up to {seeds} seeds"
    lines.append(f"Cells are printed/ours; - is not printed, … not run yet; ours: {spread}.")
    lines += table.notes
    reasons: dict[str, list[str]] = {}
    for cells in rows:
        for cell in cells:
            texts = (
                [cell.reason]
                if cell.reason
                else sorted({refused[key] for key in cell.keys if key in refused})
            )
            if size == "cpu" and cell.here:
                texts.append(f"ours: {cell.here}")
            for text in texts:
                reasons.setdefault(text, [])
                if cell.column.title not in reasons[text]:
                    reasons[text].append(cell.column.title)
    return lines + [f"{', '.join(titles)}: {text}" for text, titles in reasons.items()]


def show(
    title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[str], wide: int
) -> str:
    """Return the table for a terminal, at most ``wide`` columns side by side."""
    shown = io.StringIO()
    console = Console(file=shown, width=40 + 32 * min(wide, len(columns)))
    for start in range(0, len(columns), wide):
        block = Shown("", *columns[start : start + wide], title=title, show_lines=False)
        for line in lines:
            block.add_row(line[0], *line[1 + start : 1 + start + wide])
        console.print(block)
    for text in notes:
        console.print(text, highlight=False)
    return shown.getvalue()


def markdown(
    title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[str], wide: int
) -> str:
    """Return the table in Markdown, at most ``wide`` columns side by side."""
    shown = [f"**{title}**", ""]
    for start in range(0, len(columns), wide):
        block = ("method", *columns[start : start + wide])
        shown += ["| " + " | ".join(block) + " |", "|---" * len(block) + "|"]
        shown += ["| " + " | ".join((line[0], *line[1 + start : 1 + start + wide])) + " |" for line in lines]
        shown.append("")
    return "\n".join([*shown, *(f"- {text}" for text in notes), ""])


def chosen(table: Table, rows: Sequence[str] | None, columns: Sequence[str] | None) -> Table:
    """Return the table with these rows and columns only, and the row with which it compares.

    Raises:
        SystemExit: if it does not have one of them.
    """
    for what, wanted, known in (
        ("rows", rows, [row.title for row in table.rows]),
        ("columns", columns, [column.title for column in table.columns]),
    ):
        if strange := [title for title in wanted or () if title not in known]:
            raise SystemExit(f"expected {what} of {table.name}, {known}, got {strange}")
    places = [place for place, column in enumerate(table.columns) if not columns or column.title in columns]
    kept = [
        replace(row, printed=tuple(row.printed[place] for place in places))
        for row in table.rows
        if not rows or row.title in (*rows, table.baseline)
    ]
    return replace(table, rows=tuple(kept), columns=tuple(table.columns[place] for place in places))


def parse_root(text: str) -> tuple[str, Path]:
    """``fashion_mnist=/data/fashion``."""
    name, equals, folder = text.partition("=")
    known = sorted({DERIVED.get(title, title) for title in TITLES} - {"digits", "tiny_imagenet"})
    if not equals or name not in known:
        raise argparse.ArgumentTypeError(f"expected SET=FOLDER with SET of {known}, got {text!r}")
    if not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that exists, got {folder!r}")
    return name, Path(folder)


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", choices=list(TABLES))
    what.add_argument("--all", action="store_true", help="the queue of all tables, at the least priority")
    what.add_argument("--effects", type=Path, metavar="FILE", help="write all measured comparisons as JSON")
    command.add_argument("--hours", type=float, help="with --all: begin no run after that time")
    command.add_argument("--scale", choices=("cpu", "paper"), default="cpu")
    command.add_argument(
        "--seeds", type=positive, help="number of seeds; default: the table's, or 1 at cpu, 3 at paper"
    )
    command.add_argument("--root", type=parse_root, action="append", default=[], metavar="SET=FOLDER")
    command.add_argument("--rows", nargs="+", help="only these rows, by title")
    command.add_argument("--columns", nargs="+", help="only these columns, by title")
    command.add_argument(
        "--out", type=Path, help="file of the runs; default: benchmarks/results/papers-SCALE.json"
    )
    command.add_argument("--show", action="store_true", help="run nothing; show the finished runs")
    command.add_argument("--retry", action="store_true", help="repeat the runs that failed")
    command.add_argument("--workers", type=positive, help="processes; default: 2 at cpu, 1 at paper")
    command.add_argument("--markdown", action="store_true")
    command.add_argument("--wide", type=positive, default=5, help="number of columns side by side")
    for name in ("rounds", "epochs", "subset"):
        command.add_argument(f"--{name}", type=positive, help="in place of the scale's value")
    return command


def seeds_of(table: Table, size: Size, given: int | None) -> range:
    """Return a table's seeds."""
    number = given or table.seeds or (1 if size == "cpu" else 3)
    return range(table.first_seed, table.first_seed + number)


def queue(
    size: Size,
    roots: Mapping[str, Path],
    changes: Mapping[str, Any],
    store: Store,
    arguments: argparse.Namespace,
    log: Log,
) -> None:
    """Make the runs of all tables in the queue's order, those that are missing, until the time is up."""
    os.nice(19)
    until = math.inf if arguments.hours is None else time.monotonic() + 3600 * arguments.hours
    for number, step in enumerate(QUEUE[size], 1):
        table = chosen(TABLES[step.table](), step.rows, step.columns)
        rows = cells_of(table, size, roots, seeds_of(table, size, step.seeds), changes)
        cells = [cell for cells in rows for cell in cells]
        log(f"step {number} of {len(QUEUE[size])}: {table.title}")
        for reason in sorted({cell.reason for cell in cells if cell.reason}):
            log(f"  {reason}")
        fill(cells, store, retry=arguments.retry, log=log, workers=arguments.workers or 1, until=until)
        if time.monotonic() >= until:
            log(f"time is up; the same command goes on here. Runs are in {store.path}")
            return


def compared(table: Table, rows: Sequence[Sequence[Cell]], store: Store) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of a table with a baseline: mean ± sd, and the paired difference with 95 %."""
    (base,) = [cells for cells in rows if cells[0].row.title == table.baseline]
    titles, lines = [], [[cells[0].row.title] for cells in rows]
    for place, column in enumerate(table.columns):
        known = by_seed(base[place], store)
        titles += [column.title, f"less {table.baseline}'s [95 %], seeds"]
        digits = 1 if column.measure in PERCENT else 3
        for cells, line in zip(rows, lines, strict=True):
            cell = cells[place]
            values = by_seed(cell, store)
            pairs = [value - known[seed] for seed, value in values.items() if seed in known]
            line.append(ours(cell, store, {}))
            if cells is base or not pairs:
                line.append("")
            else:
                mean, low, high = comparison.interval(pairs)
                line.append(f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}], {len(pairs)}")
    return titles, lines


def measured(store: Store, roots: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the comparisons with a baseline, of at least three seeds, as ``presets.Effect`` has them."""
    found = []
    for name, make in EFFECTS.items():
        table = make()
        if table.first_seed >= FIRST_GRID_SEED:
            continue
        rows = cells_of(table, "cpu", roots, seeds_of(table, "cpu", None), {})
        for place, column in enumerate(table.columns):
            known = by_seed(rows[0][place], store)
            for cells in rows[1:]:
                values = by_seed(cells[place], store)
                pairs = [value - known[seed] for seed, value in values.items() if seed in known]
                if len(pairs) < 3:
                    continue
                title = cells[0].row.title
                method, options = parse_method(cells[0].row.methods[""])
                found.append(
                    {
                        "method": method,
                        "setting": table.title,
                        "measure": column.title,
                        "baseline": table.baseline,
                        **comparison.effect(options, pairs),
                        "command": f"python benchmarks/papers.py --table {name}"
                        + (" --root mnist=FOLDER" if name == "fx_ilc" else "")
                        + f" --rows {shlex.join([table.baseline, title])}",
                    }
                )
    return found


def by_seed(cell: Cell, store: Store) -> dict[int, float]:
    """Return a cell's values of the seeds that are done."""
    found = {}
    for seed, runs in cell.runs.items():
        results = [store.runs.get(key_of(run), {}) for run in runs]
        values = [
            value_of(result, cell.column.measure, run.last) for result, run in zip(results, runs, strict=True)
        ]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            found[seed] = statistics.fmean(known)
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Train the missing runs, print the table, and return the exit code."""
    arguments = parser().parse_args(given)
    progress = partial(Console(stderr=True).print, highlight=False, soft_wrap=True)
    size: Size = arguments.scale
    here = {name: folder for name, folder in ROOTS.items() if name == "fashion_mnist" and folder.is_dir()}
    changes = {
        name: value
        for name in ("rounds", "epochs", "subset")
        if (value := getattr(arguments, name)) is not None
    }
    store = Store(arguments.out or RESULTS / f"papers-{size}.json")
    roots = {**here, **dict(arguments.root)}
    if arguments.effects:
        write_json(arguments.effects, measured(store, roots))
        return 0
    if arguments.all:
        queue(size, roots, changes, store, arguments, progress)
        return 0
    table = chosen(TABLES[arguments.table](), arguments.rows, arguments.columns)
    seeds = seeds_of(table, size, arguments.seeds)
    rows = cells_of(table, size, roots, seeds, changes)
    refused: dict[str, str] = {}
    if not arguments.show:
        cells = [cell for cells in rows for cell in cells]
        workers = arguments.workers or (2 if size == "cpu" else 1)
        refused = fill(cells, store, retry=arguments.retry, log=progress, workers=workers)
        progress(f"runs are in {store.path}")
    columns, lines = texts(rows, store, refused) if not table.baseline else compared(table, rows, store)
    notes = remarks(table, rows, refused, size, len(seeds))
    lay_out = markdown if arguments.markdown else show
    print(lay_out(table.title, columns, lines, notes, arguments.wide))
    return 0


if __name__ == "__main__":
    comparison.end(main)
