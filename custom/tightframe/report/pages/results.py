"""Metrics of models (curves, recall, confusion) for pages of the server and of a silo."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from itertools import product

from tightframe.report.drawing import matrix, plots
from tightframe.report.drawing.markup import Markup, Part, figure, folded, section, table, tag, without
from tightframe.report.drawing.plots import Series
from tightframe.results.outcome import TOO_FEW
from tightframe.results.parts.evaluation import Evaluation, FoldMetrics
from tightframe.results.rows import Row
from tightframe.results.words import metric, shown, with_interval

MISSING = without("No value: it was not measured, or too few silos could report it.")
UNTRAINED = without("Nothing was trained in it, or training losses stay at the silos.", "-")
UNPLANNED = without("The job evaluates fewer models (evaluation.models), silos' own ones the last.", "-")
NOISY = " that have enough noisy records to show"
LONG = 24
"""Rows from which a table is folded."""
_PAIRS = 30


def value(number: float | None, digits: int = 3) -> Part:
    """Return a number for a table; None is marked as missing."""
    return MISSING if number is None else shown(number, digits)


def _limited(number: float | None, limits: tuple[float, float] | None) -> Part:
    return MISSING if number is None else with_interval(number, limits)


def metric_cell(fold: FoldMetrics | None, name: str) -> Part:
    """Return a fold's metric for a table; a noisy one with its interval and its number of classes."""
    value = None if fold is None else getattr(fold, name, None)
    return MISSING if value is None or fold is None else metric(fold, name)


def kept(rows: int, summary: str, content: Markup) -> Markup:
    """Return a table, folded if it is long."""
    return content if rows <= LONG else folded(summary, content)


def curves(
    rows: Sequence[Row],
    roster: Sequence[str],
    done: int,
    *,
    own_models: bool = False,
    planned: Container[int] | None = None,
) -> Markup:
    """Show loss and balanced accuracy of each round's model, and the training loss, of ``done`` rounds.

    With ``own_models`` (one per silo) there is an evaluation after the last round only.

    Args:
        planned: rounds whose models were to be evaluated; None if unknown.
    """
    models: dict[int, Evaluation | None] = {}
    judges: dict[int, list[str]] = {}
    losses: dict[int, float] = {}
    for row in (row for row in rows if row.kind in ("start", "train") and row.round <= done):
        models[row.round] = row.evaluation or models.get(row.round)
        judges[row.round] = row.evaluated_by or judges.get(row.round, [])
        if "loss" in row.training:
            losses[row.round] = row.training["loss"]
    if not any(models.values()) and not losses:
        return section("Course of training", tag("p", "No numbers of single rounds are in the results."))
    if own_models:
        planned = (done,)
    xs = sorted(models)
    skipped = [models[x] is None and planned is not None and x not in planned for x in xs]
    counted = [sorted(judges[x]) if models[x] else [] for x in xs]
    partly = [bool(silos) and silos != sorted(roster) for silos in counted]

    def of(fold: str, name: str) -> list[float | None]:
        evaluations = [models[x] for x in xs]
        return [None if item is None else getattr(getattr(item, fold), name) for item in evaluations]

    loss = [
        Series("test", of("test", "loss"), 0, partly, skipped=skipped),
        Series("validation", of("validation", "loss"), 1, partly, skipped=skipped),
    ]
    if losses:
        loss.append(Series("training", [losses.get(x) for x in xs], 2))
    good = [
        Series("test", of("test", "balanced_accuracy"), 0, partly, skipped=skipped),
        Series("validation", of("validation", "balanced_accuracy"), 1, partly, skipped=skipped),
    ]
    noisy = any(item.test.noisy for item in models.values() if item is not None)
    if noisy:
        # Without validation: there is no room for its limits, which the table has.
        good = [good[0], *_ends([models[x] for x in xs])]
    findings = any(item.test.findings is not None for item in models.values() if item is not None)
    what = f"mean recall of the classes{NOISY if noisy else ''}"
    what = "mean of sensitivity and specificity over the findings" if findings else what
    hollow = " Hollow points were counted by some of the silos only." if any(partly) else ""
    start = " Round 0 is the model before training." if 0 in models else ""
    whose = "the silos' own models" if own_models else "each round's model"
    when = ", which are evaluated after the last round only." if own_models else f".{start}"
    by = [
        "-" if skipped[i] else ", ".join(silos) if partly[i] else ("all silos" if silos else None)
        for i, silos in enumerate(counted)
    ]
    return section(
        "Course of training",
        figure(
            partial(plots.lines, "Balanced accuracy by round", xs, good, x_name="round", low=0.0, high=1.0),
            f"Balanced accuracy ({what}) of {whose}{when}{hollow}",
        )
        if any(point is not None for series in good for point in series.values)
        else None,
        figure(
            partial(plots.lines, "Loss by round", xs, loss, x_name="round"),
            f"Cross-entropy a record of {whose}; the training loss is the method's own, while it trains.",
        )
        if any(point is not None for series in loss for point in series.values)
        else None,
        _in_numbers(models, losses, by),
    )


def _ends(models: Sequence[Evaluation | None]) -> list[Series]:
    """Return both ends of the interval of each model's balanced accuracy."""
    ends = [None if item is None else item.test.balanced_accuracy_interval for item in models]
    return [
        Series(f"{which} end of the interval, test", [None if end is None else end[i] for end in ends], 2 + i)
        for i, which in enumerate(("lower", "upper"))
    ]


def _in_numbers(
    models: Mapping[int, Evaluation | None], losses: Mapping[int, float], by: Sequence[str | None]
) -> Markup:
    """List each round's metrics and losses, and the silos that evaluated (None: no silo)."""
    body: list[list[Part]] = []
    for (x, evaluation), judges in zip(sorted(models.items()), by, strict=True):
        folds = [None, None] if evaluation is None else [evaluation.validation, evaluation.test]
        body.append(
            [
                str(x),
                value(losses.get(x)) if x and losses else UNTRAINED,
                *(
                    UNPLANNED if judges == "-" else metric_cell(fold, name)
                    for name, fold in (*product(("loss", "balanced_accuracy"), folds), ("auroc", folds[1]))
                ),
                MISSING if judges is None else judges,
            ]
        )
    head = ["after round", "training loss", "validation loss", "test loss", "validation balanced accuracy"]
    head += ["test balanced accuracy", "test AUROC", "counted by"]
    return kept(len(body), "All rounds in numbers", table(head, body))


def recall(fold: FoldMetrics, whose: str, finds: str = "the final model finds") -> Markup:
    """Show recall by class, with the number of records."""
    classes = list(fold.recall)
    counts = [fold.class_records.get(name) for name in classes]
    limits = {name: f" [{low}, {high}]" for name, (low, high) in fold.class_records_interval.items()}
    # Limits of noisy recall are bars in the picture; those of noisy records are in the table only.
    notes = ["" if count is None or fold.noisy else f"n = {count}" for count in counts]
    bars = [("recall", [fold.recall[name] for name in classes])]
    if fold.noisy:
        ends = [fold.recall_interval.get(name) for name in classes]
        bars += [
            (f"{which} end of its interval", [None if end is None else end[i] for end in ends])
            for i, which in enumerate(("lower", "upper"))
        ]
    rows: list[list[Part]] = [
        [
            name,
            _recalled(fold, name, count),
            MISSING if count is None else f"{count}{limits.get(name, '')}",
        ]
        for name, count in zip(classes, counts, strict=True)
    ]
    head = "test records (noisy)" if fold.noisy else "test records"
    title, one = recall_title(fold), "finding" if fold.findings is not None else "class"
    dash = "no records, or too few silos could report" if None in counts else "no records"
    return section(
        title,
        figure(
            partial(
                plots.bars,
                title,
                list(zip(classes, notes, strict=True)),
                bars,
            ),
            f"Share of each {one}'s test records that {finds}, {whose}; a dash: "
            f"{'too few noisy records to show' if fold.noisy else dash}.",
        ),
        kept(len(rows), "All classes in numbers", table([one, "recall", head], rows)),
    )


def recall_title(fold: FoldMetrics) -> str:
    """Return the title of recall by class, or of sensitivity by finding."""
    return "Recall by class" if fold.findings is None else "Sensitivity by finding"


def _recalled(fold: FoldMetrics, name: str, count: int | None) -> Part:
    """Return a class's recall; a noisy count of 0 does not mean no records."""
    if fold.noisy:
        share = fold.recall[name]
        return TOO_FEW if share is None else with_interval(share, fold.recall_interval.get(name))
    return "no records" if count == 0 else value(fold.recall[name])


def confusion(
    classes: Sequence[str], counts: Sequence[Sequence[int]], whose: str, model: str = "the final model"
) -> Markup:
    """Show the confusion matrix and the most frequent mistakes."""
    if len(counts) != len(classes) or any(len(row) != len(classes) for row in counts):
        return section("Confusion matrix", tag("p", "The matrix in the results does not fit its classes."))
    wrong = sorted(
        (
            (-count, sum(row), classes[i], classes[j])
            for i, row in enumerate(counts)
            for j, count in enumerate(row)
            if i != j and count
        ),
    )
    mistakes = [
        [truth, guess, str(-count), f"{-count / of:.1%}"] for count, of, truth, guess in wrong[:_PAIRS]
    ]
    summary = (
        f"The {len(mistakes)} most frequent mistakes" if len(wrong) > _PAIRS else "All mistakes in numbers"
    )
    named = len(classes) <= matrix.MOST_NAMED
    legend = "" if named else " Classes are in the order of the table above; point at a cell to read it."
    return section(
        "Confusion matrix",
        figure(
            partial(matrix.confusion, "Confusion matrix", classes, counts),
            f"Test records of {model}, {whose}: rows are true classes, columns what the model said; "
            f"the larger a cell's share of its row, the stronger its colour.{legend}",
        ),
        folded(summary, table(["true class", "taken for", "records", "of its class"], mistakes))
        if mistakes
        else None,
    )


def findings(fold: FoldMetrics, whose: str, model: str = "the final model") -> Markup:
    """Show the counts and metrics of each finding of a multi-label task."""
    rows: list[list[Part]] = []
    for name, finding in (fold.findings or {}).items():
        numbers = (finding.sensitivity, finding.specificity, finding.auroc, finding.average_precision)
        counts: tuple[Part, ...] = (MISSING,) * 4
        if finding.confusion is not None:
            (absent, false), (missed, hits) = finding.confusion
            counts = (str(hits), str(missed), str(false), str(absent))
        limits = (finding.sensitivity_interval, finding.specificity_interval, None, None)
        rows.append([name, *counts, *map(_limited, numbers, limits)])
    head = ["finding", "found", "missed", "false alarms", "rightly absent", "sensitivity", "specificity"]
    return section(
        "Findings",
        tag(
            "p",
            f"Test records of {model}, {whose}, in which a finding is known; present from 0.5 on."
            + (" All numbers are noisy." if fold.noisy else ""),
        ),
        table([*head, "AUROC", "average precision"], rows),
    )


def side_by_side(
    models: Mapping[str, FoldMetrics | None], by_class: Mapping[str, Mapping[str, float | None]]
) -> Markup:
    """Compare models on the same records: recall by class.

    Args:
        models: name -> metrics; None if the model has only recall.
        by_class: model name -> recall by class.
    """
    classes = list(next(iter(by_class.values())))
    counts = next(item for item in models.values() if item is not None).class_records
    notes = [f"n = {counts[name]}" if name in counts else "" for name in classes]
    rows: list[list[Part]] = [
        [name, *(value(recalls.get(name)) for recalls in by_class.values()), str(counts.get(name, "-"))]
        for name in classes
    ]
    return tag(
        "div",
        figure(
            partial(
                plots.bars,
                "Recall by class, model by model",
                list(zip(classes, notes, strict=True)),
                [(name, [recalls.get(item) for item in classes]) for name, recalls in by_class.items()],
            ),
            "Share of each class's own test records that each model finds; a dash: no records.",
        ),
        kept(len(rows), "All classes in numbers", table(["class", *by_class, "test records"], rows)),
    )
