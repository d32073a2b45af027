"""Page of a comparison: curves over rounds, last metrics, paired differences, differing job values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tightframe.report.comparing import (
    MEASURES,
    Run,
    absent_classes,
    differing,
    few_positives,
    one_answers,
    paired,
    positives,
    settings,
)
from tightframe.report.drawing import layout, plots
from tightframe.report.drawing.frame import SERIES
from tightframe.report.drawing.markup import Markup, Part, figure, section, table, tag
from tightframe.report.drawing.plots import Series
from tightframe.report.pages.results import MISSING
from tightframe.results.words import shown, with_interval


def page(runs: Sequence[Run]) -> str:
    """Return the whole page."""
    parts: list[Part] = []
    if runs[0].found.outcome.synthetic:
        parts.append(
            layout.notice("warn", "Synthetic records: the numbers say nothing about medicine or a method.")
        )
    parts += [layout.notice("warn", line) for line in (*absent_classes(runs), *one_answers(runs))]
    parts += [_last(runs), *_findings(runs), _curves(runs), _paired(runs), _differing(runs)]
    return layout.page(f"{len(runs)} runs", "Tightframe comparison of runs", *parts)


def measured(run: Run, name: str) -> Part:
    """Return a measure of a run's last model, with its interval if it has one."""
    value = None if run.test is None else getattr(run.test, name)
    return MISSING if value is None else with_interval(value, run.interval(name))


def _last(runs: Sequence[Run]) -> Markup:
    rows: list[list[Part]] = [
        [
            run.name,
            run.found.outcome.ended,
            *(measured(run, name) for name in MEASURES),
            run.epsilon,
            f"{run.found.outcome.rounds_done} of {run.found.outcome.rounds}",
        ]
        for run in runs
    ]
    head = [
        "run",
        "ended",
        "balanced accuracy",
        "accuracy",
        "AUROC",
        "average precision",
        "epsilon",
        "rounds",
    ]
    return section(
        "Last models, on the test records",
        table(head, rows),
        tag(
            "p",
            "Brackets are at 95 %: for few test records where counts are exact (Wilson; of their mean, "
            "MOVER), else for the noise alone. Runs on the same test records are not independent: that "
            "intervals overlap does not say that there is no difference.",
        ),
    )


def _curves(runs: Sequence[Run]) -> Markup:
    xs = sorted({row.round for run in runs for row in run.found.rows if row.test is not None})
    pictures: list[Part] = []
    groups = settings(runs)
    # At most as many settings in one picture as the style has series; seeds of one share its colour.
    for start in range(0, len(groups), SERIES):
        series = []
        for kind, (setting, repeats) in enumerate(groups[start : start + SERIES]):
            name = f"{setting} ({len(repeats)} seeds)" if len(repeats) > 1 else setting
            for run in repeats:
                by_round = {
                    row.round: row.test.balanced_accuracy for row in run.found.rows if row.test is not None
                }
                planned = run.found.outcome.exactly_evaluated
                skipped = [planned is not None and x not in planned for x in xs]
                values = [by_round.get(x) for x in xs]
                series.append(Series(name, values, kind, label=run.name, skipped=skipped))
        title = "Balanced accuracy by round" + (f", from setting {start + 1}" if start else "")
        pictures.append(
            figure(
                partial(plots.lines, title, xs, series, x_name="round", low=0.0, high=1.0),
                "Balanced accuracy on the test records of each round's model; a line is a run.",
            )
        )
    return section("Course of training", *(pictures if xs else [tag("p", "No round was evaluated.")]))


def _paired(runs: Sequence[Run]) -> Markup:
    title, comparisons = "Paired differences", paired(runs)
    if not comparisons:
        return section(
            title, tag("p", "None: no two settings have two or more seeds in common. One seed says little.")
        )
    names = {run.name: name for name, group in settings(runs) for run in group}
    rows = [(names[item.names[0]], item.mean, item.limits, item.differences) for item in comparisons]
    body: list[list[Part]] = [
        [
            name,
            f"{item.mean:+.3f} [{item.limits[0]:+.3f}, {item.limits[1]:+.3f}]",
            names[item.base[0]],
            ", ".join(f"{value:+.3f}" for value in item.differences),
            ", ".join(map(str, item.seeds)),
        ]
        for (name, *_), item in zip(rows, comparisons, strict=True)
    ]
    return section(
        title,
        figure(
            partial(
                plots.forest, "Paired differences", rows, "difference in balanced accuracy, seed by seed"
            ),
            "Each setting less that of the first run: hollow marks are single seeds, the filled one "
            "their mean with its 95 % interval (Student's t over seeds).",
        ),
        table(["setting", "mean [95 %]", "against", "differences", "seeds"], body, wrapped=[3]),
    )


def _differing(runs: Sequence[Run]) -> Markup:
    by_key = differing(runs)
    if not by_key:
        return section("What the jobs differ in", tag("p", "Nothing."))
    rows: list[list[Part]] = [
        [key, *("-" if value is None else str(value) for value in values)] for key, values in by_key.items()
    ]
    return section("What the jobs differ in", table(["value", *(run.name for run in runs)], rows))


def findings(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each finding: its name, its positive records, each run's sensitivity and AUROC."""
    rows = []
    for name, count in positives(runs).items():
        row = [name, "-" if count is None else str(count)]
        for run in runs:
            finding = None if run.test is None else (run.test.findings or {}).get(name)
            row.append("-" if finding is None else f"{shown(finding.sensitivity)}, {shown(finding.auroc)}")
        rows.append(row)
    return rows


def _findings(runs: Sequence[Run]) -> list[Part]:
    rows: list[list[Part]] = [[*row] for row in findings(runs)]
    head = ["finding", "positives", *(run.name for run in runs)]
    note = few_positives(runs)
    notes = [tag("p", f"{note}.")] if note else []
    return [section("Findings: sensitivity, AUROC", table(head, rows), *notes)] if rows else []


def lines(runs: Sequence[Run]) -> list[list[str]]:
    """Return the table for a terminal: a row a run, then one a paired difference."""
    return [
        [
            run.name,
            *(
                "-" if run.test is None else with_interval(getattr(run.test, name), run.interval(name))
                for name in MEASURES[:1]
            ),
            "-" if run.test is None else shown(run.test.auroc),
            run.epsilon,
            run.found.outcome.ended,
        ]
        for run in runs
    ]
