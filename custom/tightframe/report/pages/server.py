"""The server's report: from totals and public facts only, as all of its result files are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import Markup, Part, facts, section, table, tag
from tightframe.report.pages import participation, record, results
from tightframe.report.reading import ServerResults
from tightframe.report.values import Evaluation, FoldMetrics, Outcome
from tightframe.report.words import plural, sentence, shown


def page(found: ServerResults) -> str:
    """The whole page."""
    outcome = found.outcome
    final = outcome.evaluation
    parts: list[Part] = [*_notices(found), tag("p", in_words(found)), _tiles(found)]
    if final is not None:
        parts.append(_metrics(found, final))
    if outcome.personal is not None:
        parts.append(_personal(found))
    own, whose = outcome.own_models, _whose(found)
    parts.append(results.curves(found.rows, outcome.roster, outcome.rounds_done, own_models=own))
    if final is not None and (final.test.records or final.test.noisy):
        model, finds = ("the silos' own models", "find") if own else ("the final model", "finds")
        parts.append(results.recall(final.test, whose, f"{model} {finds}"))
        if final.test.confusion is not None:
            parts.append(results.confusion(list(final.test.recall), final.test.confusion, whose, model))
    parts += [
        participation.silos(found),
        participation.sums(found),
        record.privacy(found),
        record.traffic(found),
        record.configuration(found),
        record.proof(found),
        tag(
            "footer",
            tag(
                "p",
                "Made from the result files beside it: totals over silos and what the protocol makes public. "
                "No silo's own results are in it.",
            ),
        ),
    ]
    return layout.page(outcome.job_name, "Tightframe report of a run, at the server", *parts)


def in_words(found: ServerResults) -> str:
    """What the run was, how it ended and how good the model is, in one paragraph."""
    outcome = found.outcome
    data = outcome.data or str(outcome.job.get("dataset", "unnamed records"))
    done = f"{outcome.rounds_done} of {plural(outcome.rounds, 'round')}"
    what = _models(outcome.job)
    verb = "trained" if outcome.trained else "was to train"
    said = [
        f"The method {outcome.method} {verb} {what} over {plural(len(outcome.roster), 'silo')} with "
        f"{outcome.summation} sums. Data: {data}.",
    ]
    if outcome.trained and outcome.reason is None:
        said.append(f"The run ended as planned, with {done}, after {outcome.seconds:.0f} s.")
    elif outcome.trained:
        said.append(f"The model is trained ({done}) and kept, but the run then ended with an error.")
    else:
        said.append(f"The run ended early: {done} were finished after {outcome.seconds:.0f} s.")
    final = outcome.evaluation
    if final is not None and (final.test.records or final.test.noisy):
        test, validation = final.test, final.validation
        noisy = "noisy " if test.noisy else ""
        said.append(
            f"On {_records(found)} of {_whose(found)} {model_named(outcome)} {noisy}balanced accuracy "
            f"{shown(test.balanced_accuracy)} and AUROC {shown(test.auroc)}"
            + (
                f"; on the {plural(validation.records, 'validation record')}, "
                f"{shown(validation.balanced_accuracy)} "
                f"and {shown(validation.auroc)}."
                if validation.records or validation.noisy
                else "; no validation records could be counted."
            )
        )
    else:
        said.append(f"Its test metrics are missing: {why_missing(found)}.")
    return " ".join(said)


def _models(job: Mapping[str, Any]) -> str:
    """What was trained: the job's model, and those of silos that have others."""
    model, others = job.get("model"), job.get("site_models")
    if not isinstance(others, Mapping) or not others:
        return f"the model {model}" if model else "a model"
    own = {site: values.get("model") for site, values in others.items() if isinstance(values, Mapping)}
    told = ", ".join(f"{name} at {site}" for site, name in sorted(own.items()))
    return f"the silos' own models ({model}; others are {told})"


def model_named(outcome: Outcome) -> str:
    """What the metrics are of, and its verb."""
    if outcome.own_models:
        return "the silos' own models, each on its silo's records, have (there is no global model)"
    return "the final model has"


def why_missing(found: ServerResults) -> str:
    """Why the server has no evaluation of the final model."""
    outcome = found.outcome
    if not outcome.trained:
        return "training did not end" if outcome.own_models else "there is no final model"
    if outcome.privacy is not None:
        return "under differential privacy they stay at the silos, each in its own report"
    if any(row.kind == "closing" and not row.static_opened for row in found.rows):
        return "counts stay shut after a drop-out"
    if outcome.evaluation is not None:
        return "there are no test records"
    model = "the silos' own models were" if outcome.own_models else "the final model was"
    return f"{model} not evaluated"


def _notices(found: ServerResults) -> list[Part]:
    outcome = found.outcome
    notices: list[Part] = []
    if outcome.trained and outcome.reason is None:
        notices.append(layout.notice("good", tag("b", "Trained.")))
    else:
        verdict = "Trained, but not evaluated." if outcome.trained else "Not trained."
        lines = (outcome.reason or "The results do not say why.").split("\n")
        notices.append(layout.notice("bad", tag("b", verdict), *lines))
    if outcome.synthetic:
        notices.append(
            layout.notice(
                "warn",
                tag("b", "Synthetic records."),
                "The silos trained and tested on generated stand-ins, not on patients' "
                "records. The numbers show "
                "that the software works; they say nothing about medicine or about a method.",
            )
        )
    if found.simulated:
        notices.append(
            layout.notice("warn", "A simulation: the silos' identities are made up and prove nothing.")
        )
    told = next((row.evaluation.test for row in found.rows if row.evaluation), None)
    if outcome.evaluation is not None:
        told = outcome.evaluation.test
    if told is not None and told.noisy:
        notices.append(layout.notice("warn", tag("b", "Noisy metrics."), _noise(told)))
    if outcome.privacy is not None and not any(row.evaluation for row in found.rows):
        notices.append(
            layout.notice(
                "warn",
                "Differential privacy with local evaluation: losses and test results "
                "stay at the silos, so this "
                "page has none. Each silo's own report has its own.",
            )
        )
    return notices


def _noise(test: FoldMetrics) -> str:
    """What noisy numbers are worth."""
    spread = test.balanced_accuracy_deviation
    moved = (
        ""
        if spread is None
        else f" Noise alone moves the balanced accuracy of the test records by about {spread:.3f} (standard "
        f"deviation); it is the mean over {test.classes_told} of {len(test.recall)} classes."
    )
    return (
        "Under differential privacy all numbers of records, recall and accuracy on this page come from "
        f"totals with noise: {shown(test.noise_deviation, 1)} records (standard deviation) in each cell of "
        f"the confusion matrix. A class with fewer than {shown(test.class_floor, 0)} noisy records has too "
        f"few to tell.{moved} Exact numbers stay at the silos, each in its own report."
    )


def _tiles(found: ServerResults) -> Markup:
    outcome = found.outcome
    values: list[tuple[str, str]] = []
    if outcome.evaluation is not None:
        test = outcome.evaluation.test
        noisy = "noisy " if test.noisy else ""
        again = f", {len(outcome.evaluated_by)} times the same {same}" if (same := _same(outcome)) else ""
        counted = "test records, with noise" if test.noisy else f"test records counted{again}"
        values += [
            (shown(test.balanced_accuracy), f"{noisy}balanced accuracy, test"),
            (shown(test.auroc), f"{noisy}AUROC, test"),
            (str(test.records), counted),
        ]
    values.append((f"{outcome.rounds_done} of {outcome.rounds}", "rounds"))
    # Where enrolment itself failed, no results say who was enrolled; the reason does, in words.
    if found.rows:
        joined = len(outcome.roster) - len(outcome.not_enrolled)
        values.append((f"{joined} of {len(outcome.roster)}", "silos enrolled"))
    values.append((f"{outcome.seconds:.0f} s", "whole run"))
    return layout.tiles(values)


def _metrics(found: ServerResults, final: Evaluation) -> Markup:
    own = found.outcome.own_models
    by = ", each by the model of its own silo" if own else ""
    folds = (("validation", final.validation), ("test", final.test))
    rows: list[list[Part]] = [
        [
            name,
            str(fold.records),
            *(
                results.value(getattr(fold, key))
                for key in ("balanced_accuracy", "accuracy", "auroc", "average_precision", "loss")
            ),
        ]
        for name, fold in folds
    ]
    head = ["records", "number", "balanced accuracy", "accuracy", "AUROC", "average precision", "loss"]
    return section(
        "The silos' own models" if own else "The final model",
        table(head, rows),
        tag(
            "p",
            f"Counted on the records of {_whose(found)}{by}. "
            "AUROC and average precision are means over classes: chance is 0.5, and the mean of the classes' "
            "shares.",
        ),
    )


def _personal(found: ServerResults) -> Markup:
    personal = found.outcome.personal
    if personal is None:
        return section("Personal models")
    return section(
        "Personal models",
        facts(
            [
                ("silos in the means", str(personal.silos)),
                ("accuracy", shown(personal.accuracy)),
                ("PM(V)", _or_missing(personal.valid_classes)),
                ("PM(L)", _or_missing(personal.label_share)),
            ]
        ),
        tag(
            "p",
            "Means over silos, each counting once. PM(V) is the accuracy on the classes "
            "that a silo trained on, "
            "PM(L) the same with each class at its share of the silo's training records. "
            "The models stay there.",
        ),
        tag(
            "p",
            "They are the silos' own models of the first table. The numbers differ because here each silo "
            "counts once, and there each record.",
        )
        if found.outcome.own_models
        else None,
    )


def _or_missing(found: float | None) -> Part:
    return results.MISSING if found is None else shown(found)


def _whose(found: ServerResults) -> str:
    by, same = found.outcome.evaluated_by, _same(found.outcome)
    again = f" (the same {plural(same, 'test record')} at each of {len(by)} silos)" if same else ""
    if sorted(by) == sorted(found.outcome.roster):
        return f"all silos{again}"
    return f"{sentence(by)} only{again}"


def _same(outcome: Outcome) -> int:
    """Test records that several silos have in common and count each for itself; 0 where each has its own."""
    silos = len(outcome.evaluated_by)
    if outcome.evaluation is None or outcome.evaluation.test.noisy or not outcome.test_shared or silos < 2:
        return 0
    return outcome.evaluation.test.records // silos


def _records(found: ServerResults) -> str:
    outcome = found.outcome
    records = outcome.evaluation.test.records if outcome.evaluation else 0
    if outcome.evaluation is not None and outcome.evaluation.test.noisy:
        return f"about {records} (noisy) test records"
    return f"the {plural(records, 'test record')}"
