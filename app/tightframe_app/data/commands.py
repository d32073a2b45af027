"""``tightframe data``: a site's own tables, and preparation of downloaded data sets for the readers."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from tightframe.files import quoted
from tightframe_app.data import contracts as tables
from tightframe_app.data import described
from tightframe_app.screens import Terminal, lines, shown

if TYPE_CHECKING:
    from tightframe.data.isic.prepare import Report

INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True)
prepare = typer.Typer(
    help="Convert a download into the form that a data set's reader expects, checked by counts and hashes.",
    no_args_is_help=True,
)
app.add_typer(prepare, name="prepare")
out = lines()
err = lines(stderr=True)


app.command("init")(tables.init)
app.command("check")(tables.check)
app.command("describe")(described.describe)


@prepare.command("isic2019")
def prepare_isic2019(
    images: Annotated[
        Path,
        typer.Option(
            "--images", "-i", help="The originals: ISIC_2019_Training_Input, or the folder that contains it."
        ),
    ],
    split: Annotated[
        Path,
        typer.Option(
            help="FLamby's train_test_split (flamby/datasets/fed_isic2019/dataset_creation_scripts)."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write: the `root` of fed_isic2019 at a site.")
    ],
    center: Annotated[
        int | None, typer.Option(min=0, max=5, help="Prepare only this centre's images; all six by default.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="Number of processes; one per core by default."),
    ] = None,
) -> None:
    """Preprocess the images of ISIC 2019 as FLamby does, and compare them with its split.

    The shorter side becomes 224 pixels; colours are normalised by shades of grey, and clipped where
    FLamby's wrap around; the names stay. The originals are only read. If the command is interrupted, run
    it again: it continues where it stopped, and verifies finished images by their hashes.

    Exit code 0: complete. 1: images are missing or broken, or counts differ from FLamby's split; all of
    these are listed, and all other images are done. 2: nothing could be done. 130: interrupted.
    """
    from tightframe.data.isic.prepare import prepare as prepare_isic

    with _resumable(), _bar("images") as advance:
        report = prepare_isic(
            images, split, output, center=center, workers=workers or os.cpu_count() or 1, advance=advance
        )
    _summary(report)
    for name, why in sorted(report.broken.items()):
        err.print(f"{name}: {why}")
    if report.problems:
        for problem in report.problems:
            err.print(Text.assemble(("incomplete:", "bold red"), " ", problem))
        raise typer.Exit(1)
    site = {"data": {"fed_isic2019": {"root": str(output.resolve()), "center": center or 0}}}
    out.print(f"complete; for a site's configuration (with its own centre): {json.dumps(site)}")


@prepare.command("eicu")
def prepare_eicu(
    tables: Annotated[
        Path,
        typer.Option(
            "--tables",
            "-t",
            help="Folder with PhysioNet's tables patient, hospital and medication (.csv or .csv.gz).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write: the `root` of eicu at a site.")
    ],
    window: Annotated[
        str, typer.Option(help="Drugs of the first 48 hours (48h), of the whole stay (stay), or both.")
    ] = "both",
) -> None:
    """Convert eICU's tables, demo or full release, into stay x drug matrices.

    The tables are only read. If the command is interrupted, run it again: it keeps finished matrices that
    were made from the same tables, by their SHA-256.

    Exit code 0: complete. 2: tables are missing, truncated or malformed; no partial file is written.
    130: interrupted.
    """
    from tightframe.data.base import count_table
    from tightframe.data.eicu import WINDOWS
    from tightframe.data.eicu.prepare import prepare as prepare_tables

    if window not in (*WINDOWS, "both"):
        raise typer.BadParameter(
            f"expected one of {[*WINDOWS, 'both']}, got {window!r}", param_hint="--window"
        )
    with _resumable(), _spinner("tables") as report:
        done = prepare_tables(
            tables, output, window=cast(Literal["48h", "stay", "both"], window), progress=report
        )
    for item in done:
        how = "written" if item.made else "existed, verified"
        out.print(f"{item.window}: {how}; {count_table(item.counts)}")
        out.print(f"{item.window}: SHA-256 of the drug vocabulary {item.vocabulary}")
    site = {"data": {"eicu": {"root": str(output.resolve()), "region": "Midwest"}}}
    out.print(f"complete; for a site's configuration (with its own region): {json.dumps(site)}")


def _summary(report: Report) -> None:
    """Print the images by centre, fold and class, marked where FLamby's number differs, and the totals."""
    from tightframe.data.isic import CLASS_NAMES
    from tightframe.data.isic.prepare import REPORT, expected_counts
    from tightframe.data.manifest import sha256

    expected = expected_counts(report.centers)
    table = Table("centre", "fold", *CLASS_NAMES, "total", box=None, pad_edge=False)
    for center in report.centers:
        for fold, name in enumerate(("train", "test")):
            counts, wanted = report.prepared[fold, center], expected[fold, center]
            cells = [_cell(*pair) for pair in zip(counts, wanted, strict=True)]
            table.add_row(str(center), name, *cells, f"{counts.sum()}/{wanted.sum()}")
    Terminal().print(table)
    if (report.prepared != expected).any():
        out.print("* differs from FLamby's number")
    done = int(report.prepared.sum())
    out.print(
        f"images: {done} of {expected.sum()} (written now {report.made}, done before {report.kept}, "
        f"missing {len(report.missing)}, broken {len(report.broken)})"
    )
    out.print(f"originals outside the split: {len(report.ignored)}")
    out.print(f"images clipped where FLamby's cast would wrap: {report.wrapped}")
    out.print(f"all file names: {report.manifest.with_name(REPORT)}")
    out.print(f"manifest: {report.manifest}  SHA-256 {sha256(report.manifest.read_bytes())}")


def _cell(count: int, wanted: int) -> Text:
    return Text(f"{count}") if count == wanted else Text(f"{count}*", style="red")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a temporary progress bar on the error stream; yield the function that moves it, (done, total).

    Without a terminal, print a line for every tenth instead.
    """
    if not err.is_terminal:
        yield _tenths(what)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Show a temporary spinner on the error stream; yield the function that sets its text.

    Without a terminal, print each text as a line instead.
    """
    if not err.is_terminal:
        yield lambda text: err.print(text)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda text: progress.update(task, description=text)


def _tenths(what: str) -> Callable[[int, int], None]:
    printed = -1

    def advance(done: int, total: int) -> None:
        nonlocal printed
        if total and (tenth := 10 * done // total) > printed:
            printed = tenth
            err.print(f"{what}: {done} of {total}")

    return advance


@contextmanager
def _resumable() -> Iterator[None]:
    """If the command is interrupted, print that it can be continued."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted: finished files are kept; the same command continues with the rest")
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def split(
    file: Annotated[Path, typer.Argument(help="A text table with a header: .csv, .tsv, .txt (also .gz).")],
    by: Annotated[str, typer.Option("--by", help="The column of the hospital.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder.")],
) -> None:
    """Write a table for each value of a column, without that column, and a simulation's sites.json.

    Exit code 0: written. 2: the file cannot be read, or the column does not tell 2 to 100 sites.
    """
    from tightframe.data.table import splitting

    parts = splitting.split(file, by, output)
    for site, part in parts.items():
        out.print(shown(f"{site}: {part.value}, {part.rows} rows in {part.entry['file']}"))
    config = output / "sites.json"
    sites = {
        site: {"dataset_id": shown(part.value)[:200], "data": {"table": part.entry}}
        for site, part in parts.items()
    }
    config.write_text(json.dumps({"sites": sites}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    out.print(f"{config}: where they lie, for --site-config; `dataset_id` is the column's value")
    source = f"{quoted(file)} --ignore {shlex.quote(by)}"
    out.print("a contract needs the classes and ranges of all sites, so propose it from the whole table:")
    out.print(shown(f"  tightframe data init {source} --label COLUMN --title NAME"))
