"""``tightframe report`` and ``tightframe compare``: pages of results folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tightframe.files import write_atomically
from tightframe.results.words import metric, one_answer
from tightframe_app import formats
from tightframe_app.screens import console, shown

if TYPE_CHECKING:
    from tightframe.report.reading import ServerResults, SiloResults

WIDTH = 100


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="A results folder of a run's server or of a silo, or a workspace with one run.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", dir_okay=False, help="Page to write; DIR/report.html by default."),
    ] = None,
    specificity: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Specificity at which to show sensitivity.")
    ] = 0.9,
    sensitivity: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sensitivity at which to show specificity.")
    ] = 0.9,
    prevalence: Annotated[
        list[str] | None,
        typer.Option(
            help="Prevalence for PPV and NPV: 0.02 for every class, MEL=0.02 for one (again for "
            "others); by default that of the test records."
        ),
    ] = None,
    form: formats.Form = "text",
) -> None:
    """Write report.html of a run's results: one file that opens offline.

    Also prints how the run ended, and its main result.

    A run writes the page itself at its end. DIR may be the server's folder or a silo's; its files show
    which. A silo's page has that silo's own results: it is for the silo alone, and only its owner can
    read it.
    """
    from tightframe.report.pages.clinical import Wanted
    from tightframe.report.reading import ServerResults, only_run, read
    from tightframe.report.writing import write

    wanted = Wanted(specificity, sensitivity, dict(map(_prevalence, prevalence or ())))
    folder = only_run(folder)
    page, results = write(folder, out, wanted), read(folder)
    if form == "json":
        _show_json(page, results)
        return
    lines = []
    if isinstance(results, ServerResults):
        outcome = results.outcome
        test = None if outcome.evaluation is None else outcome.evaluation.test
        lines = [outcome.ended.upper(), *outcome.notes]
        if test is not None:
            noisy = "noisy " if test.noisy else ""
            lines.append(
                f"{noisy}balanced accuracy on the silos' test records: {metric(test, 'balanced_accuracy')}"
            )
            lines += [answer] if (answer := one_answer(test.one_answer)) else []
    for line in lines:
        typer.echo(shown(line), err=True)  # for people; programs read the page's path on the other stream
    console(WIDTH).print(shown(str(page)), soft_wrap=True)


def _show_json(page: Path, results: ServerResults | SiloResults) -> None:
    from tightframe.report.reading import ServerResults
    from tightframe_app.outputs import Reported

    if not isinstance(results, ServerResults):
        formats.show(Reported(page=str(page), of="silo"))
        return
    outcome = results.outcome
    test = None if outcome.evaluation is None else outcome.evaluation.test
    scores = ("noisy", "balanced_accuracy", "accuracy", "auroc")
    formats.show(
        Reported(
            page=str(page),
            of="server",
            ended=outcome.ended,
            trained=outcome.trained,
            measured=outcome.measured,
            notes=tuple(outcome.notes),
            **({} if test is None else {name: getattr(test, name) for name in scores}),
        )
    )


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", exists=True, file_okay=False, help="Results folders of servers, or workspaces."
        ),
    ],
    form: Annotated[
        Literal["table", "json"], typer.Option("--format", help="Format of the output: table or json.")
    ] = "table",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="Also write a page, here.")
    ] = None,
) -> None:
    """Compare runs of the same data: last values, curves, paired differences, and where their jobs differ.

    Settings that repeat with the seeds of the first run's setting get paired differences from it. Runs of
    different data sets, classes or test records are refused.
    """
    from rich.table import Table

    from tightframe.report import comparing
    from tightframe.report.pages import comparison

    if len(folders) < 2:
        raise typer.BadParameter("expected at least two runs, got one", param_hint="RUN...")
    runs = comparing.read_runs(folders)
    if out is not None:
        write_atomically(out, comparison.page(runs).encode())
    if form == "json":
        from tightframe_app.outputs import Compared

        formats.show(Compared.model_validate(comparing.as_json(runs)))
        return
    screen = console(120)
    shown_table = Table("run", "balanced accuracy", "AUROC", "epsilon", "ended", box=None)
    for row in comparison.lines(runs):
        shown_table.add_row(*map(shown, row))
    screen.print(shown_table)
    if len({run.found.outcome.job_name for run in runs}) < len(runs):
        for run in runs:
            screen.print(shown(f"{run.name}: {run.folder}"), soft_wrap=True)
    if by_finding := comparison.findings(runs):
        table = Table("sensitivity, AUROC", "positives", *(shown(run.name) for run in runs), box=None)
        for row in by_finding:
            table.add_row(*map(shown, row))
        screen.print(table)
    for note in filter(None, (comparing.few_positives(runs), comparing.unopened(runs))):
        screen.print(shown(note), soft_wrap=True)
    for line in (*comparing.absent_classes(runs), *comparing.one_answers(runs)):
        screen.print(shown(line), soft_wrap=True)
    if not (pairs := comparing.paired(runs)):
        screen.print("no two settings have two or more seeds in common: one seed says little")
    for item in pairs:
        low, high = item.limits
        screen.print(
            shown(
                f"{' / '.join(item.names)} less {' / '.join(item.base)}: balanced accuracy {item.mean:+.3f} "
                f"[{low:+.3f}, {high:+.3f}] over {len(item.seeds)} seeds"
            )
        )
    for key, values in comparing.differing(runs).items():
        screen.print(shown(f"{key}: {' | '.join('-' if value is None else str(value) for value in values)}"))
    if out is not None:
        screen.print(shown(str(out)), soft_wrap=True)


def _prevalence(typed: str) -> tuple[str | None, float]:
    """Parse ``0.02`` (for every class) or ``MEL=0.02``."""
    name, _, number = typed.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise typer.BadParameter(
            f"expected a share above 0 and below 1, or CLASS=SHARE, got {typed!r}", param_hint="--prevalence"
        )
    return name or None, value
