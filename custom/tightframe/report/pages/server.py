"""The server's report, made only from totals and public facts, like all of its result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import Markup, Part, facts, section, table, tag
from tightframe.report.pages import clinical, participation, record, results, statistics
from tightframe.report.reading import ServerResults
from tightframe.results.outcome import OpenedSum, Outcome
from tightframe.results.parts.evaluation import Evaluation, FoldMetrics
from tightframe.results.words import count_in_words, metric, one_answer, plural, sentence, shown, untested


def page(run: ServerResults, wanted: clinical.Wanted = clinical.DEFAULT) -> str:
    """Return the whole page.

    Args:
        wanted: operating points and prevalences of the clinical reading.
    """
    outcome = run.outcome
    final = outcome.evaluation
    parts: list[Part] = [*_notices(run), tag("p", in_words(run)), _tiles(run)]
    if run.statistics is not None:
        parts += statistics.sections(run.statistics)
    if outcome.one_sum is not None and outcome.trained:
        parts.append(_one_sum(outcome.one_sum))
    if final is not None and (final.test.noisy or final.test.records or final.validation.records):
        parts.append(_metrics(run, final))
    if outcome.personal is not None:
        parts.append(_personal(run))
    own, whose = outcome.own_models, _whose(run)
    if not outcome.evaluates_only and not outcome.statistics_only:
        parts.append(
            results.curves(
                run.rows,
                outcome.roster,
                outcome.rounds_done,
                own_models=own,
                planned=outcome.exactly_evaluated,
            )
        )
    if final is not None and (final.test.records or final.test.noisy):
        model, finds = ("the silos' own models", "find") if own else ("the final model", "finds")
        parts.append(results.recall(final.test, whose, f"{model} {finds}"))
        if final.test.confusion is not None:
            parts.append(results.confusion(list(final.test.recall), final.test.confusion, whose, model))
        if final.test.findings is not None:
            parts.append(results.findings(final.test, whose, model))
        copies = len(outcome.evaluated_by) if _same(outcome) else 1
        parts.append(clinical.reading(final.test, f"the test records of {whose}", wanted, copies))
    parts += [
        participation.silos(run),
        participation.norms(run),
        participation.sums(run),
        record.withdrawal(run),
        record.privacy(run),
        record.traffic(run),
        record.configuration(run),
        record.proof(run),
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


def in_words(run: ServerResults) -> str:
    """Describe the run, its end and its model in one paragraph."""
    outcome = run.outcome
    if outcome.statistics_only:
        return _statistics_in_words(run)
    data = outcome.data or str(outcome.job.get("dataset", "unnamed records"))
    done = outcome.length
    what = _models(outcome.job)
    verb = "trained" if outcome.trained else "was to train"
    if outcome.evaluates_only:
        verb = "had trained"
        what = f"{what}, which was evaluated"
    elif outcome.one_sum is not None:
        verb = "gave" if outcome.trained else "was to give"
        what += " its head from one sum, without training,"
    sentences = [
        f"The method {outcome.method} {verb} {what} over {plural(len(outcome.roster), 'silo')} with "
        f"{outcome.summation} sums. Data: {data}.",
    ]
    if outcome.evaluates_only:
        how = "ended as planned" if outcome.ended == "evaluated" else "did not evaluate the model"
        sentences.append(
            f"The run {how}{_without(outcome)} after {outcome.seconds:.0f} s; nothing was trained."
        )
    elif outcome.trained and outcome.reason is None:
        planned = "ended as planned, with" if outcome.ended == "trained" and not outcome.lost else "finished"
        sentences.append(f"The run {planned} {done}{_without(outcome)} after {outcome.seconds:.0f} s.")
    elif outcome.trained:
        sentences.append(f"The model is trained ({done}) and kept, but the run then ended with an error.")
    else:
        sentences.append(f"The run ended early: {done} were finished after {outcome.seconds:.0f} s.")
    final = outcome.evaluation
    if final is not None and (final.test.records or final.test.noisy):
        test, validation = final.test, final.validation
        noisy = "noisy " if test.noisy else ""
        sentences.append(
            f"On {_records(run)} of {_whose(run)} {model_named(outcome)} {noisy}balanced accuracy "
            f"{metric(test, 'balanced_accuracy')} and AUROC {metric(test, 'auroc')}"
            + (
                f"; on {_number(validation, 'validation record')}, "
                f"{metric(validation, 'balanced_accuracy')} "
                f"and {metric(validation, 'auroc')}."
                if validation.records or validation.noisy
                else "; no validation records could be counted."
            )
        )
        if (answer := one_answer(test.one_answer)) is not None:
            sentences.append(f"On the test records {answer}.")
        if not test.noisy and test.findings is None and (missing := untested(test.recall)) is not None:
            sentences.append(f"{missing[0].upper()}{missing[1:]}.")
    else:
        sentences.append(f"Its test metrics are missing: {why_missing(run)}.")
    return " ".join(sentences)


def _statistics_in_words(run: ServerResults) -> str:
    """Describe in one paragraph a run that summed statistics."""
    outcome = run.outcome
    how = "ended as planned" if outcome.ended == "counted" else "opened no statistics"
    text = (
        f"Statistics of the tables of {plural(len(outcome.roster), 'silo')}, before any training, with "
        f"{outcome.summation} sums. Data: {outcome.data}. The run {how} after {outcome.seconds:.0f} s."
    )
    if run.statistics is not None and run.statistics.failed:
        text += f" {plural(run.statistics.failed, 'silo')} could not count, and is in no number."
    return text


def _without(outcome: Outcome) -> str:
    """Name the silos that had dropped out by the end of the run."""
    if not outcome.lost:
        return ","
    return f", the last of them without {sentence(sorted(outcome.lost))},"


def _models(job: Mapping[str, Any]) -> str:
    """Name the trained models: the job's, and those of silos that have others."""
    model, others = job.get("model"), job.get("site_models")
    if not isinstance(others, Mapping) or not others:
        return f"the model {model}" if model else "a model"
    by_site = {site: values.get("model") for site, values in others.items() if isinstance(values, Mapping)}
    listed = ", ".join(f"{name} at {site}" for site, name in sorted(by_site.items()))
    return f"the silos' own models ({model}; others are {listed})"


def model_named(outcome: Outcome) -> str:
    """Name the evaluated model, with its verb."""
    if outcome.own_models:
        return "the silos' own models, each on its silo's records, have (there is no global model)"
    return "the final model has"


def why_missing(run: ServerResults) -> str:
    """Say why the server has no evaluation of the final model."""
    outcome = run.outcome
    if not outcome.trained:
        return "training did not end" if outcome.own_models else "there is no final model"
    if outcome.privacy is not None:
        return "under differential privacy they stay at the silos, each in its own report"
    if any(row.kind == "closing" and not row.static_opened for row in run.rows):
        return "counts stay shut after a drop-out"
    if outcome.evaluation is not None:
        at_silos = "they stay at the silos, each in its own report"
        return at_silos if outcome.own_models else "too few test records could be counted"
    model = "the silos' own models were" if outcome.own_models else "the final model was"
    return f"{model} not evaluated"


def _notices(run: ServerResults) -> list[Part]:
    outcome = run.outcome
    notices: list[Part] = []
    verdict = tag("b", f"{outcome.ended.capitalize()}.")
    if outcome.trained and outcome.reason is None:
        kind = (
            "good" if outcome.ended in ("trained", "evaluated", "counted") and not outcome.notes else "warn"
        )
        notices.append(layout.notice(kind, verdict, *outcome.notes))
    else:
        lines = (outcome.reason or "The results do not say why.").split("\n")
        notices.append(layout.notice("bad", verdict, *lines, *outcome.notes))
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
    if run.simulated:
        notices.append(
            layout.notice("warn", "A simulation: the silos' identities are made up and prove nothing.")
        )
    test = next((row.evaluation.test for row in run.rows if row.evaluation), None)
    if outcome.evaluation is not None:
        test = outcome.evaluation.test
    if test is not None and test.noisy:
        notices.append(layout.notice("warn", tag("b", "Noisy metrics."), _noise(test)))
    if test is not None and outcome.evaluation is not None:
        answer = one_answer(test.one_answer)
        if answer is not None and test.one_answer is not None:
            title = "One answer." if test.one_answer.certain else "Perhaps one answer only."
            notices.append(layout.notice("warn", tag("b", title), f"On the test records {answer}."))
    if outcome.statistics_only:
        return notices
    if outcome.privacy is not None and not any(row.evaluation for row in run.rows):
        notices.append(
            layout.notice(
                "warn",
                "Differential privacy with local evaluation: losses and test results stay at the silos, so "
                "this page has none, and cannot say what privacy cost in accuracy. Each silo's own report "
                "has its own results. Noisy ones of this model, which are charged: ",
                tag("code", "tightframe jobs export --evaluate FOLDER --set privacy.epsilon=EPSILON"),
                ", with the folder of this page.",
            )
        )
    return notices


def _noise(test: FoldMetrics) -> str:
    """Describe the noise of the metrics."""
    limits = (
        ""
        if test.level is None
        else " In brackets behind each of them: where the exact number for these records lies, as far as "
        f"the noise goes, at {test.level:.0%}."
    )
    return (
        "Under differential privacy all numbers of records, recall and accuracy on this page come from "
        f"totals with noise: {shown(test.noise_deviation, 1)} records (standard deviation) in each cell of "
        f"the confusion matrix.{limits} A class with fewer than {shown(test.class_floor, 0)} noisy records "
        "has too few to show and is not counted. Exact numbers stay at the silos, each in its own report."
    )


def _tiles(run: ServerResults) -> Markup:
    outcome = run.outcome
    values: list[tuple[str, str]] = []
    if outcome.evaluation is not None:
        test = outcome.evaluation.test
        noisy = "noisy " if test.noisy else ""
        repeats = f", {len(outcome.evaluated_by)} times the same {same}" if (same := _same(outcome)) else ""
        counted = "test records, with noise" if test.noisy else f"test records counted{repeats}"
        records = "" if test.records_interval is None else _brackets(test.records_interval)
        values += [
            (
                shown(test.balanced_accuracy),
                f"{noisy}balanced accuracy, test{_limits(test, 'balanced_accuracy')}",
            ),
            (shown(test.auroc), f"{noisy}AUROC, test{_limits(test, 'auroc')}"),
            (str(test.records), f"{counted}{records}"),
        ]
    if run.statistics is not None:
        for name, count in run.statistics.records.items():
            values.append((count_in_words(count), f"records, {name}"))
    if not outcome.evaluates_only and not outcome.statistics_only:
        values.append((f"{outcome.rounds_done} of {outcome.rounds}", "rounds"))
    # If enrolment failed, only the reason says who was enrolled.
    if run.rows:
        joined = len(outcome.roster) - len(outcome.not_enrolled)
        values.append((f"{joined} of {len(outcome.roster)}", "silos enrolled"))
        if outcome.lost:
            values.append((f"{joined - len(outcome.lost)} of {joined}", "silos there at the end"))
    values.append((f"{outcome.seconds:.0f} s", "whole run"))
    return layout.tiles(values)


def _limits(test: FoldMetrics, name: str) -> str:
    """Return a noisy metric's interval, and the number of classes that it covers."""
    text, value = metric(test, name), shown(getattr(test, name))
    return f": {text.removeprefix(value).lstrip(', ')}" if text != value else ""


def _brackets(limits: Sequence[int]) -> str:
    return f" [{limits[0]}, {limits[1]}]"


def _number(fold: FoldMetrics, noun: str) -> str:
    """Return the number of records, with its noise limits."""
    if not fold.noisy:
        return f"the {plural(fold.records, noun)}"
    limits = "" if fold.records_interval is None else _brackets(fold.records_interval)
    return f"about {fold.records}{limits} (noisy) {noun}s"


def _metrics(run: ServerResults, final: Evaluation) -> Markup:
    own = run.outcome.own_models
    by = ", each by the model of its own silo" if own else ""
    whose = f"Counted on the records of {_whose(run)}{by}. " if run.outcome.evaluated_by else ""
    folds = (("validation", final.validation), ("test", final.test))
    rows: list[list[Part]] = [
        [
            name,
            str(fold.records) + ("" if fold.records_interval is None else _brackets(fold.records_interval)),
            *(
                results.metric_cell(fold, key)
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
            f"{whose}AUROC and average precision are means over classes: chance is 0.5, and the mean of the "
            "classes' shares.",
        ),
    )


def _one_sum(opened: OpenedSum) -> Markup:
    total = sum(opened.numbers.values())
    noise = "with the noise of differential privacy" if opened.noisy else "exact"
    return section(
        "The sum that the model is made of",
        table(["opened", "numbers"], [[what, f"{count:,}"] for what, count in opened.numbers.items()]),
        tag(
            "p",
            f"Nothing was trained: one exchange opened these {total:,} numbers, {noise}, as a sum over the "
            "silos' training records. d is the width of the frozen features, C the number of classes. "
            f"{opened.follows}",
        ),
    )


def _personal(run: ServerResults) -> Markup:
    personal = run.outcome.personal
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
        if run.outcome.own_models and run.outcome.evaluated_by
        else None,
    )


def _or_missing(value: float | None) -> Part:
    return results.MISSING if value is None else shown(value)


def _whose(run: ServerResults) -> str:
    by, same = run.outcome.evaluated_by, _same(run.outcome)
    repeats = f" (the same {plural(same, 'test record')} at each of {len(by)} silos)" if same else ""
    if sorted(by) == sorted(run.outcome.roster):
        return f"all silos{repeats}"
    return f"{sentence(by)} only{repeats}"


def _same(outcome: Outcome) -> int:
    """Count the test records that several silos share; 0 if each has its own."""
    silos = len(outcome.evaluated_by)
    if outcome.evaluation is None or outcome.evaluation.test.noisy or not outcome.test_shared or silos < 2:
        return 0
    return outcome.evaluation.test.records // silos


def _records(run: ServerResults) -> str:
    evaluation = run.outcome.evaluation
    return "the 0 test records" if evaluation is None else _number(evaluation.test, "test record")
