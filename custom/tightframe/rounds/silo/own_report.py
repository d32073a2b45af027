"""A silo's own report, ``local_report.json``: exact results on its own records, which stay with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightframe.data.base import FOLDS, unknown_counts
from tightframe.files import write_json
from tightframe.phases import Schema, Tensors
from tightframe.results.files import LOCAL, MODEL
from tightframe.results.local_report import (
    Baseline,
    Disclosure,
    SentTerms,
    SiloModel,
    SiloPersonal,
    SiloPrivacy,
    SiloRecords,
    SiloReport,
)
from tightframe.results.parts.dropouts import Lost, rule
from tightframe.results.words import rounded_up
from tightframe.rounds import unproven
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.context import SiloContext
from tightframe.rounds.privacy_plan import PrivacyPlan
from tightframe.rounds.riders import evaluation
from tightframe.rounds.silo.own_state import damaged
from tightframe.rounds.sums.common import Encoded

if TYPE_CHECKING:
    from tightframe.rounds.silo.view import LocalSilo

SENT = "sent_terms.json"
"""File of the terms that this silo has made so far, in its state folder."""


@dataclass(frozen=True)
class Missing:
    """Silos missing at the end of a run, as the server says, which this silo cannot check.

    Attributes:
        lost: silo -> since when.
        enrolled: silos that the run began with.
        shut: whether counts stay shut because of it, by this silo's own policy.
    """

    lost: Mapping[str, Lost]
    enrolled: int
    shut: bool

    def notes(self) -> list[str]:
        """Return sentences on the missing silos and the consequences for the final model's metrics."""
        lines = [f"The server says: {item.words(silo)}" for silo, item in sorted(self.lost.items())]
        if lines and self.shut:
            lines.append(
                f"So the final model is not measured over all silos: {rule(self.enrolled)}. What this report "
                "has are its results on this silo's own records."
            )
        return lines


def close(
    silo: LocalSilo,
    final: Tensors,
    counted: Tensors,
) -> None:
    """Keep the final model and begin the report.

    Args:
        silo: this silo's view.
        final: the last model: the global one, or the silo's own where there is none.
        counted: its evaluation on this silo's records, as ``evaluation.count`` has it.
    """
    context, setup, missing = silo.context, silo.setup, missing_at(silo)
    folder, names = unproven.begin(context, silo.needs), setup.dataset.class_names
    records = {fold: dict(zip(names, silo.class_counts(fold).tolist(), strict=True)) for fold in FOLDS}
    labels = {fold: context.data.labels(fold) for fold in FOLDS}
    sizes: dict[str, int] = {fold: len(of) for fold, of in labels.items()}
    unknown: dict[str, dict[str, int]] = {fold: unknown_counts(of, names) for fold, of in labels.items()}
    report = SiloReport(
        silo=silo.name,
        data=context.data.source,
        synthetic=context.data.synthetic,
        records=SiloRecords(
            **records,
            folds=sizes if setup.dataset.multi_label else None,
            unknown=unknown if any(any(of.values()) for of in unknown.values()) else None,
        ),
        model_sha256=save_tensors(folder / MODEL, final, mode=0o600),
        final=evaluation.local_metrics(counted, names),
        own_model=setup.method.own_model is not None,
        model=SiloModel(**context.job.model_at(silo.name).model_dump(mode="json")),
        lost=dict(missing.lost),
        notes=tuple(missing.notes()),
        privacy=None if setup.privacy is None else _spent(context, setup.privacy),
        disclosed=Disclosure(
            masked=context.job.summation == "secure",
            silos=tuple(silo.cohort),
            policy=context.policy.describe(),
            weights=context.job.weights,
            sent=_sent_terms(context),
        ),
        job=context.job.model_dump(mode="json"),
        classes=list(names),
    )
    report.write(folder, mode=0o600)  # the page follows once the closing's own term is noted
    if folder == context.run_dir:
        context.log.info("%s: final model and report (this silo's own): %s", silo.name, folder / LOCAL)
    else:
        context.log.info("%s: made the final model; it counts once its last total is proven", silo.name)


def missing_at(silo: LocalSilo) -> Missing:
    """Return the silos missing at the end, and whether the final model can be measured without them."""
    job = silo.setup.job
    shut = job.summation == "secure" and job.privacy is None and silo.context.policy.static_cohort != "any"
    return Missing(silo.lost, len(silo.cohort), shut)


def note_sent(
    context: SiloContext, schema: Schema, encoded: Encoded, *, at_end: bool, evaluated: tuple[str, ...] = ()
) -> None:
    """Record that this silo made a term of a sum, for the report's list of what left the silo.

    Args:
        at_end: whether it belongs to the closing or comes after it, so that the report has begun.
        evaluated: the job's exact evaluations, in words.

    Raises:
        RunError: TF-522 if the record of the earlier terms is damaged.
    """
    numbers: Counter[str] = Counter()
    for item in schema.fields:
        numbers[item.name.split("/")[0]] += item.size
    kind = encoded.sum_id.phase.rpartition("-")[0]
    by_kind = {item.kind: item for item in _sent_terms(context)}
    earlier = by_kind.get(kind)
    by_kind[kind] = SentTerms(
        kind=kind,
        times=1 if earlier is None else earlier.times + 1,
        # A run's first sum may have fewer fields than later ones.
        numbers=dict(numbers | Counter({} if earlier is None else earlier.numbers)),
        bytes=sum(map(len, encoded.term.values())) + (0 if earlier is None else earlier.bytes),
        terms_with=dict(Counter(numbers.keys()) + Counter({} if earlier is None else earlier.terms_with)),
    )
    sent = tuple(by_kind.values())
    write_json(context.state_folder / SENT, [item.as_json() for item in sent], mode=0o600)
    if at_end and begun(context):
        add(context, sent=sent, evaluated=evaluated)


def _sent_terms(context: SiloContext) -> tuple[SentTerms, ...]:
    """Return the terms that this silo has made so far.

    Raises:
        RunError: TF-522 if their file is damaged.
    """
    path = context.state_folder / SENT
    if not path.is_file():
        return ()
    try:
        return tuple(SentTerms.model_validate(item) for item in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise damaged(path, error) from None


def begun(context: SiloContext) -> bool:
    """Check whether this silo has a report, proven or not; a silo that missed the closing has none."""
    return unproven.reported(context) is not None


def add(
    context: SiloContext,
    *,
    local_only: Baseline | None = None,
    personal: SiloPersonal | None = None,
    sent: tuple[SentTerms, ...] | None = None,
    evaluated: tuple[str, ...] = (),
) -> None:
    """Add another model's results, or all terms sent so far, to the report that ``close`` began."""
    report = SiloReport.read(unproven.reported(context) or context.run_dir)
    disclosed = report.disclosed
    if disclosed is not None and sent is not None:
        disclosed = disclosed.model_copy(update={"sent": sent, "evaluated": evaluated})
    added = {"local_only": local_only, "personal": personal, "disclosed": disclosed}
    _keep(context, report.model_copy(update={key: item for key, item in added.items() if item is not None}))


def _keep(context: SiloContext, report: SiloReport) -> None:
    """Write the report, for programs and for people."""
    report.write(folder := unproven.current(context), mode=0o600)
    if context.write_page is not None and folder == context.run_dir:
        context.write_page(context.run_dir, context.log)


def _spent(context: SiloContext, plan: PrivacyPlan) -> SiloPrivacy:
    """Return the exact cost of this job to the silo's records."""
    from tightframe.privacy.accounting import counts_on_others
    from tightframe.privacy.ledger.summary import exact_jobs
    from tightframe.rounds.silo.budget import Budget

    budget = Budget(context, plan, (context.name,))
    spent, alone = budget.spent_by_job(), budget.spent_by_job(prv=False, alone=True).guaranteed
    shared = counts_on_others(spent.guaranteed, alone)
    context.log.info(
        "%s: this job cost epsilon %s of the %g that it promised, at delta %g (this silo's own number%s)",
        context.name,
        rounded_up(spent.guaranteed),
        plan.privacy.epsilon,
        plan.privacy.delta,
        f"; {rounded_up(alone)} if no other silo added noise" if shared else "",
    )
    with context.budget_ledger.open() as ledger:
        exact = exact_jobs(ledger.entries())
    return SiloPrivacy(
        epsilon=spent.guaranteed,
        rdp=spent.rdp,
        pld=spent.pld,
        prv=spent.prv,
        exact=spent.exact,
        delta=plan.privacy.delta,
        promised=plan.privacy.epsilon,
        alone=alone if shared else None,
        exact_jobs=len(exact),
    )
