"""``tightframe report``: write the report page of a results folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tightframe_app.screens import console, shown

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
    from tightframe.results.words import metric, one_answer

    wanted = Wanted(specificity, sensitivity, dict(map(_prevalence, prevalence or ())))
    folder = only_run(folder)
    page, results = write(folder, out, wanted), read(folder)
    lines = []
    if isinstance(results, ServerResults):
        outcome = results.outcome
        test = None if outcome.evaluation is None else outcome.evaluation.test
        lines = [outcome.ended.upper(), *outcome.notes]
        if test is not None:
            noisy = "noisy " if test.noisy else ""
            lines.append(f"{noisy}balanced accuracy on the test records: {metric(test, 'balanced_accuracy')}")
            lines += [answer] if (answer := one_answer(test.one_answer)) else []
    for line in lines:
        typer.echo(shown(line), err=True)  # for people; programs read the page's path on the other stream
    console(WIDTH).print(shown(str(page)), soft_wrap=True)


def _prevalence(typed: str) -> tuple[str | None, float]:
    """Read ``0.02`` (of every class) or ``MEL=0.02``."""
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
