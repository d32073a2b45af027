"""A silo's own report, ``local_report.json``: exact results on its own records, which stay with it."""

from __future__ import annotations

import json
from typing import Any

from tightframe.files import write_json
from tightframe.phases import Tensors
from tightframe.report import writing
from tightframe.report.reading import LOCAL
from tightframe.rounding import rounded_up
from tightframe.rounds import evaluation
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.context import SiloContext
from tightframe.rounds.local_silo import LocalSilo
from tightframe.rounds.private.plan import PrivacyPlan
from tightframe.rounds.setup import JobSetup


def close(context: SiloContext, setup: JobSetup, silo: LocalSilo, final: Tensors, counted: Tensors) -> None:
    """Keep the final model and begin the report.

    Args:
        context: of the silo.
        setup: of the job.
        silo: this silo's view.
        final: the last model: the global one, or the silo's own where there is none.
        counted: its evaluation on this silo's records, as ``evaluation.count`` has it.
    """
    run_dir, names = context.run_dir, setup.dataset.class_names
    sha256 = save_tensors(run_dir / "model.safetensors", final, mode=0o600)
    _keep(
        context,
        {
            "silo": silo.name,
            "data": context.data.source,
            "synthetic": context.data.synthetic,
            "records": {
                fold: dict(zip(names, silo.class_counts(fold).tolist(), strict=True))
                for fold in ("train", "validation", "test")
            },
            "model_sha256": sha256,
            "global": evaluation.local_metrics(counted, names),
            "own_model": setup.method.own_model is not None,
            "model": context.job.model_at(silo.name).model_dump(mode="json"),
            "local_only": None,
            "personal": None,
            "privacy": None if setup.privacy is None else _spent(context, setup.privacy),
        },
    )
    context.log.info("%s: final model and report (this silo's own): %s", silo.name, run_dir / LOCAL)


def begun(context: SiloContext) -> bool:
    """Whether there is a report; a silo that missed the closing has none."""
    return (context.run_dir / LOCAL).is_file()


def add(context: SiloContext, part: str, values: dict[str, Any]) -> None:
    """Put another part into the report that ``close`` began."""
    report = json.loads((context.run_dir / LOCAL).read_text(encoding="utf-8"))
    _keep(context, report | {part: values})


def _keep(context: SiloContext, report: dict[str, Any]) -> None:
    """Write the report, for programs and for people."""
    write_json(context.run_dir / LOCAL, report, mode=0o600)
    writing.leave(context.run_dir, context.log)


def _spent(context: SiloContext, plan: PrivacyPlan) -> dict[str, Any]:
    """What this job has cost the silo's records, exactly."""
    from tightframe.rounds.private.budget import Budget

    spent = Budget(context, plan, (context.name,)).spent_by_job()
    context.log.info(
        "%s: this job cost epsilon %s of the %g that it promised, at delta %g (this silo's own number)",
        context.name,
        rounded_up(spent.guaranteed),
        plan.privacy.epsilon,
        plan.privacy.delta,
    )
    return {
        "epsilon": spent.guaranteed,
        "rdp": spent.rdp,
        "prv": spent.prv,
        "exact": spent.exact,
        "delta": plan.privacy.delta,
        "promised": plan.privacy.epsilon,
    }
