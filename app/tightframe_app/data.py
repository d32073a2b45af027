"""``tightframe data``: turn what a user has downloaded into what the readers want."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console
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

from tightframe_app.screens import lines

if TYPE_CHECKING:
    from tightframe.data.isic.prepare import Report

INTERRUPTED = 130

app = typer.Typer(help="Prepare data sets.", no_args_is_help=True)
prepare = typer.Typer(
    help="From a download to what the reader of a data set wants, checked by counts and hashes.",
    no_args_is_help=True,
)
app.add_typer(prepare, name="prepare")
out = lines()
err = lines(stderr=True)


@app.callback()
def _group() -> None:
    """Keep ``prepare`` a command of its own name although it is the only one."""


@prepare.command("isic2019")
def prepare_isic2019(
    images: Annotated[
        Path,
        typer.Option(
            "--images", "-i", help="The originals: ISIC_2019_Training_Input, or the folder that holds it."
        ),
    ],
    split: Annotated[
        Path,
        typer.Option(
            help="FLamby's train_test_split (flamby/datasets/fed_isic2019/dataset_creation_scripts)."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write; a site's `root` of fed_isic2019.")
    ],
    center: Annotated[
        int | None, typer.Option(min=0, max=5, help="Only this centre's images; all six by default.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", min=1, help="Processes; one a core by default.")
    ] = None,
) -> None:
    """Preprocess the images of ISIC 2019 as FLamby does, and compare them with its split.

    The shorter side becomes 224 pixels; colours are made constant by shades of grey, clipped where
    FLamby's wrap round; the names stay. The originals are only read. May be interrupted: the same
    command goes on where it stopped, and verifies what is there by its hashes.

    Exit code 0: complete. 1: images are missing or broken, or counts are not those of FLamby's split;
    all are named, and all others are done. 2: nothing could be done. 130: interrupted.
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
            help="Folder of patient, hospital and medication (.csv or .csv.gz) of PhysioNet.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; a site's `root` of eicu.")],
    window: Annotated[
        str, typer.Option(help="Drugs of the first 48 hours (48h), of the whole stay (stay), or both.")
    ] = "both",
) -> None:
    """Turn eICU's tables, demo or full release, into stay x drug matrices.

    The tables are only read. May be interrupted: the same command goes on, and keeps what is there
    if it was made from the same tables, by their SHA-256.

    Exit code 0: complete. 2: tables are missing, cut off or malformed, and nothing is half written.
    130: interrupted.
    """
    from tightframe.data.base import count_table
    from tightframe.data.eicu import WINDOWS
    from tightframe.data.eicu.prepare import prepare as prepare_tables

    if window not in (*WINDOWS, "both"):
        raise typer.BadParameter(
            f"expected one of {[*WINDOWS, 'both']}, got {window!r}", param_hint="--window"
        )
    with _resumable(), _spinner("tables") as tell:
        done = prepare_tables(
            tables, output, window=cast(Literal["48h", "stay", "both"], window), progress=tell
        )
    for item in done:
        how = "made" if item.made else "was there, verified"
        out.print(f"{item.window}: {how}; {count_table(item.counts)}")
        out.print(f"{item.window}: SHA-256 of the drug vocabulary {item.vocabulary}")
    site = {"data": {"eicu": {"root": str(output.resolve()), "region": "Midwest"}}}
    out.print(f"complete; for a site's configuration (with its own region): {json.dumps(site)}")


def _summary(report: Report) -> None:
    """Images by centre, fold and class, marked where FLamby's number is another, and what was done."""
    from tightframe.data.isic import CLASS_NAMES
    from tightframe.data.isic.prepare import REPORT, expected_counts
    from tightframe.data.manifest import sha256

    expected = expected_counts(report.centers)
    table = Table("centre", "fold", *CLASS_NAMES, "total", box=None, pad_edge=False)
    for center in report.centers:
        for fold, name in enumerate(("train", "test")):
            found, wanted = report.prepared[fold, center], expected[fold, center]
            cells = [_cell(*pair) for pair in zip(found, wanted, strict=True)]
            table.add_row(str(center), name, *cells, f"{found.sum()}/{wanted.sum()}")
    Console(highlight=False, markup=False, emoji=False).print(table)
    if (report.prepared != expected).any():
        out.print("* not FLamby's number")
    done = int(report.prepared.sum())
    out.print(
        f"images: {done} of {expected.sum()} (made now {report.made}, done before {report.kept}, "
        f"missing {len(report.missing)}, broken {len(report.broken)})"
    )
    out.print(f"originals that are not asked for: {len(report.ignored)}")
    out.print(f"images clipped where FLamby's cast would wrap: {report.wrapped}")
    out.print(f"all names: {report.manifest.with_name(REPORT)}")
    out.print(f"manifest: {report.manifest}  SHA-256 {sha256(report.manifest.read_bytes())}")


def _cell(found: int, wanted: int) -> Text:
    return Text(f"{found}") if found == wanted else Text(f"{found}*", style="red")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, gone at the end; yields what moves it: (done, of how many).

    Where nobody watches a terminal it is a line for every tenth.
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
    """What is being done, beside a spinner on the error stream, gone at the end; yields what says it.

    Where nobody watches a terminal it is a line each.
    """
    if not err.is_terminal:
        yield lambda text: err.print(text)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda text: progress.update(task, description=text)


def _tenths(what: str) -> Callable[[int, int], None]:
    told = -1

    def advance(done: int, total: int) -> None:
        nonlocal told
        if total and (tenth := 10 * done // total) > told:
            told = tenth
            err.print(f"{what}: {done} of {total}")

    return advance


@contextmanager
def _resumable() -> Iterator[None]:
    """Say, where a run is interrupted, that it can go on."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted: what is finished is kept; the same command goes on with the rest")
        raise typer.Exit(INTERRUPTED) from None
