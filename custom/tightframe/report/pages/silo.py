"""A silo's own report, which stays there: its records, a comparison of models, its privacy spending."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import Markup, Part, facts, section, table, tag, without
from tightframe.report.pages import clinical, results
from tightframe.report.reading import SiloResults
from tightframe.results.files import MODEL
from tightframe.results.files import PERSONAL as PERSONAL_MODEL
from tightframe.results.local_report import SiloModel, SiloPersonal, SiloReport
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.results.words import (
    NOT_COUNTED,
    SUMS,
    described,
    one_answer,
    plural,
    rounded_up,
    shown,
    without_others,
)

GLOBAL, OWN, LOCAL, PERSONAL = "global", "own", "local-only", "personal"


def page(silo_results: SiloResults, wanted: clinical.Wanted = clinical.DEFAULT) -> str:
    """Return the whole page.

    Args:
        wanted: operating points and prevalences of the clinical reading.
    """
    report = silo_results.report
    test = report.final.test
    parts: list[Part] = [
        layout.notice(
            "bad",
            tag("b", "Private to this silo."),
            "This page has exact results on this silo's own records. Nothing of it is "
            "sent anywhere; do not pass "
            "it on.",
        ),
    ]
    if report.synthetic:
        parts.append(
            layout.notice(
                "warn",
                tag("b", "Synthetic records."),
                "This silo trained and tested on generated stand-ins. The numbers say "
                "nothing about medicine.",
            )
        )
    if answers := _one_answers(report):
        parts.append(layout.notice("warn", tag("b", "One answer."), *answers))
    if report.notes:
        parts.append(layout.notice("warn", tag("b", "According to the server:"), *report.notes))
    parts += [tag("p", in_words(report)), _tiles(report), _models(report)]
    if test.records:
        by_class = recalls(report)
        models = {_final(report): test, LOCAL: report.local_only.test if report.local_only else None}
        parts.append(section(results.recall_title(test), results.side_by_side(models, by_class)))
        if test.confusion is not None:
            model = _final_model(report)
            parts.append(results.confusion(list(test.recall), test.confusion, "this silo's own", model))
        if test.findings is not None:
            parts.append(results.findings(test, "this silo's own", _final_model(report)))
        parts.append(clinical.reading(test, "this silo's own test records", wanted))
    parts += [_disclosed(report), _privacy(report), _records(report), _hashes(report)]
    title = f"{report.silo}: its own report"
    return layout.page(title, "Tightframe report of a silo, private to it", *parts)


def _one_answers(report: SiloReport) -> list[str]:
    """Return a sentence for each model that always gives one answer."""
    answers = {_final_model(report): report.final.test.one_answer}
    if report.local_only is not None:
        answers["the local-only model"] = report.local_only.test.one_answer
    if report.personal is not None and report.personal.one_answer is not None:
        answers["the personal model"] = report.personal.one_answer
    return [
        f"On this silo's test records {answer.replace('the model', name, 1)}."
        for name, values in answers.items()
        if (answer := one_answer(values)) is not None
    ]


def in_words(report: SiloReport) -> str:
    """Compare in one paragraph the models on the silo's own test records."""
    test = report.final.test
    sentences = [
        f"{report.silo} has {plural(report.records.together('train'), 'training record')} "
        f"and {plural(report.records.together('test'), 'test record')}. Data: {report.data}."
    ]
    if not test.records:
        sentences.append("Without test records there is nothing to compare.")
        return " ".join(sentences)
    sentences.append(
        f"On them {_final_model(report)} has balanced accuracy {shown(test.balanced_accuracy)} and accuracy "
        f"{shown(test.accuracy)}."
    )
    if report.local_only is None:
        sentences.append("No model was trained on this silo's records alone (local_baseline_epochs).")
    else:
        alone = report.local_only.test
        sentences.append(
            "A model trained on this silo's records alone for "
            f"{plural(report.local_only.epochs, 'epoch')} has "
            f"{shown(alone.balanced_accuracy)} and {shown(alone.accuracy)}."
        )
    if report.personal is None:
        sentences.append("No personal model was made (personalise).")
    elif report.personal.silos:
        personal = report.personal.balanced_accuracy
        sentences.append(f"The personal model has {shown(personal)} and {shown(report.personal.accuracy)}.")
    return " ".join(sentences)


def recalls(report: SiloReport) -> dict[str, Mapping[str, float | None]]:
    """Return each model's recall by class."""
    by_model: dict[str, Mapping[str, float | None]] = {_final(report): report.final.test.recall}
    if report.local_only is not None:
        by_model[LOCAL] = report.local_only.test.recall
    if report.personal is not None:
        by_model[PERSONAL] = dict(zip(report.final.test.recall, report.personal.recalls, strict=False))
    return by_model


def _final(report: SiloReport) -> str:
    """Name the last round's model at this silo."""
    return OWN if report.own_model else GLOBAL


def _final_model(report: SiloReport) -> str:
    return "this silo's own model (there is no global one)" if report.own_model else "the global model"


def _tiles(report: SiloReport) -> Markup:
    alone, personal = report.local_only, report.personal
    values = [(shown(report.final.test.balanced_accuracy), f"balanced accuracy, {_final(report)}")]
    if alone is not None:
        values.append((shown(alone.test.balanced_accuracy), "balanced accuracy, local-only"))
    if personal is not None:
        values.append((shown(personal.balanced_accuracy), "balanced accuracy, personal"))
    values.append((str(report.final.test.records), "test records"))
    if report.privacy is not None:
        values.append((rounded_up(report.privacy.epsilon), f"epsilon spent of {report.privacy.promised:g}"))
    return layout.tiles(values)


def _models(report: SiloReport) -> Markup:
    rows: list[list[Part]] = []
    for name, evaluation in ((_final(report), report.final), (LOCAL, report.local_only)):
        if evaluation is not None:
            rows += [_row(f"{name}, {fold}", getattr(evaluation, fold)) for fold in ("validation", "test")]
    if report.personal is not None:
        rows.append(_own_row(report.personal, report.final.test.records))
    head = [
        "model and records",
        "number",
        "balanced accuracy",
        "accuracy",
        "AUROC",
        "average precision",
        "loss",
    ]
    parts: list[Part] = [table(head, rows)]
    if report.personal is not None and report.personal.judged:
        parts.append(
            facts(
                [
                    ("personal, PM(V)", shown(report.personal.valid_classes)),
                    ("personal, PM(L)", shown(report.personal.label_share)),
                ]
            )
        )
        parts.append(
            tag(
                "p",
                "PM(V) is the accuracy on the classes that this silo trained on, PM(L) "
                "the same with each class at "
                "its share of the silo's training records.",
            )
        )
    return section("Global, local-only and personal model", *parts)


def _row(name: str, fold: FoldMetrics) -> list[Part]:
    keys = ("balanced_accuracy", "accuracy", "auroc", "average_precision", "loss")
    return [name, str(fold.records), *(results.value(getattr(fold, key)) for key in keys)]


def _own_row(personal: SiloPersonal, test: int) -> list[Part]:
    records = test if personal.confusion is None else sum(map(sum, personal.confusion))
    accuracy = results.value(personal.accuracy if personal.silos else None)
    # Only counts of hits are kept, which give no other metric.
    return [
        f"{PERSONAL}, test",
        str(records),
        results.value(personal.balanced_accuracy),
        accuracy,
        *[without("Of a personal model only counts of hits are kept.", "-")] * 3,
    ]


def _disclosed(report: SiloReport) -> Markup:
    """Show what left the silo, the recipients, and the policy."""
    title = "What left this silo"
    sent = report.disclosed
    if sent is None:
        return section(title, tag("p", "Not recorded: the version that wrote this report did not count it."))
    how = (
        "Each term was masked: the server could open only totals over several silos."
        if sent.masked
        else "Each term was sent as it is: the server saw this silo's own numbers."
    )
    exact = (
        "No noise was added: without differential privacy totals are exact, and show whoever reads them what "
        "an average over hospitals shows."
        if report.privacy is None
        else "Noise was added before, as the privacy budget below says."
    )
    rows: list[list[Part]] = [
        [
            SUMS.get(item.kind, item.kind),
            str(item.times),
            described(item.numbers, item.times, item.terms_with),
            f"{item.bytes / 1e6:,.2f}",
        ]
        for item in sent.sent
    ]
    return section(
        title,
        tag(
            "p",
            f"Terms of sums over {plural(len(sent.silos), 'silo')} ({', '.join(sent.silos)}), sent to the "
            f"federation's server. {how} {exact} The server gets the totals, all silos "
            "what it makes of them. At enrolment the silo also declared its public weight "
            f"(rule: {sent.weights}) and its rules. "
            "Records never leave.",
        ),
        table(["sums", "terms", "what (numbers in a term)", "MB"], rows, wrapped=[2]),
        facts([("under the policy", sent.policy)]),
    )


def _privacy(report: SiloReport) -> Markup:
    spent = report.privacy
    if spent is None:
        text = "The job had no differential privacy: no epsilon was spent."
        if report.disclosed is not None and report.disclosed.evaluated:
            text += f" Its exact evaluations disclosed {'; '.join(report.disclosed.evaluated)}."
            text += " Rounds over all jobs, and what is left: tightframe site release show"
            text += " -c local/tightframe.json."
        return section("Privacy spent", tag("p", text))
    whole = spent.epsilon > 0.995 * spent.promised
    rest = "" if whole else " The rest was for spare rounds and releases, or for some that this silo missed."
    return section(
        "Privacy spent",
        tag(
            "p",
            f"This job has cost this silo's records epsilon {rounded_up(spent.epsilon)} of the "
            f"{spent.promised:g} that it promised, at delta {spent.delta:g}. This is the silo's own exact "
            f"number, rounded up.{rest}" + ("" if spent.alone is None else f" {without_others(spent.alone)}"),
        ),
        facts(
            [
                (
                    "epsilon, guaranteed" if spent.alone is None else "epsilon if the others add their noise",
                    rounded_up(spent.epsilon),
                ),
                ("epsilon if no other silo added noise", _cost(spent.alone)),
                ("promised", f"{spent.promised:g}"),
                ("delta", f"{spent.delta:g}"),
                ("by the exact Gaussian curve", _cost(spent.exact)),
                ("by privacy-loss distributions", _cost(spent.pld)),
                ("by RDP (Opacus)", _cost(spent.rdp)),
                ("by PRV (Opacus)", _cost(spent.prv)),
            ]
        ),
        tag("p", NOT_COUNTED.format(plural(spent.exact_jobs, "job"))) if spent.exact_jobs else None,
        tag(
            "p",
            "Left of the budget over all jobs: tightframe ledger explain -c local/tightframe.json.",
        ),
    )


def _cost(value: float | None) -> Part:
    return None if value is None else rounded_up(value)


def _records(report: SiloReport) -> Markup:
    records = report.records
    classes = list(dict.fromkeys([*records.train, *records.validation, *records.test]))
    unknown = records.unknown or {}

    def cell(name: str, fold: str) -> str:
        of_fold: dict[str, int] = getattr(records, fold)
        more = unknown.get(fold, {}).get(name, 0)
        return str(of_fold.get(name, 0)) + (f", {more} unknown" if more else "")

    rows: list[list[Part]] = [
        [name, *(cell(name, fold) for fold in ("train", "validation", "test"))] for name in classes
    ]
    all_of = "together" if records.folds is None else "records, with several findings or none"
    rows.append([all_of, *(str(records.together(fold)) for fold in ("train", "validation", "test"))])
    return section(
        "This silo's records",
        results.kept(
            len(rows), "All classes in numbers", table(["class", "training", "validation", "test"], rows)
        ),
    )


def _hashes(report: SiloReport) -> Markup:
    personal = report.personal
    shared = "the first is the same at every silo and at the server"
    whose = "each silo has models of its own" if report.own_model else shared
    return section(
        "Models",
        facts(
            [
                ("architecture", _architecture(report.model) if report.model else None),
                (MODEL, tag("code", report.model_sha256)),
                (PERSONAL_MODEL, tag("code", personal.model_sha256) if personal else None),
            ]
        ),
        tag("p", f"Hashes are SHA-256; {whose}."),
    )


def _architecture(model: SiloModel) -> str:
    """Describe a backbone and its options, as the job has them.

    >>> _architecture(SiloModel(model="mlp", model_options={"widths": [32, 8]}))
    'mlp (widths: [32, 8])'
    """
    options = "; ".join(f"{name}: {json.dumps(value)}" for name, value in model.model_options.items())
    return f"{model.model} ({options})" if options else model.model
