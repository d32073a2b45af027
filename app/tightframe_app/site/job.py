"""Refusals that a job will meet at a site: by its policy, and by what it remembers of the jobs before.

Both by the code that decides when the site enrols. Ledger and journal are read, and nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe_app.site.findings import Asked, Finding, State, area_of

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe.config.policy import Policy
    from tightframe.config.site import SiteEntry
    from tightframe.privacy.ledger.entries import Entry
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.setup import JobSetup

ACCEPT = {
    "TF-612": (
        " Whether the new cohort's counts may be opened, too, this site decides: `tightframe site cohort "
        "accept` says what that gives away."
    ),
}
NEWCOMER = (
    "{job}: this is the first job in which counts of {dataset} are opened at this site. If the others "
    "({others}) have run jobs without this site before, totals without it exist: subtracted from this job's, "
    "they give exactly what this site has (records of each class, class sums, test results), to whoever has "
    "both. The others are asked for their consent to the larger cohort (`tightframe site cohort accept`); "
    "this site is not, so ask them before you take part. Only noise (differential privacy) prevents it"
)
"""Note for a site before its first job, as those are told who were there before it."""


def look(
    job: JobConfig, name: str | None, entry: SiteEntry, policy: Policy, asked: Asked
) -> Iterator[Finding]:
    """Yield the refusals of a job by the site's policy: what the lead would be told, and the reason."""
    from tightframe.config.refusals import BelowPolicyError
    from tightframe.config.site import check_record_options
    from tightframe.errors import JobError
    from tightframe.rounds.setup import prepare

    area = area_of("job", name or "")
    refused = False
    if name is not None and name not in job.sites:
        text = f"the job is for {', '.join(job.roster)}, and not for {name}: ask the lead"
        yield Finding(area, "problem", text, of_job=True)
    if policy.allowed_submitters is not None and asked.submitter is None:
        yield Finding(area, "note", "allowed_submitters: say with --submitter who would submit the job")
    submitter = asked.submitter or next(iter(policy.allowed_submitters or ()), None)

    def check_built() -> None:
        with policy.refuse_oversized():
            setup = prepare(job, policy.ceilings)
        policy.check_method(setup.setting.config, job)

    looks: tuple[Callable[[], None], ...] = (
        lambda: policy.check(job, submitter=submitter),
        lambda: check_record_options(job, entry, policy),
        check_built,
    )
    for one in looks:
        try:
            one()
        except BelowPolicyError as error:
            refused = True
            for refusal in error.refusals:
                yield Finding(area, "problem", f"TF-614: {refusal}", of_job=True)
        except JobError as error:
            refused = True
            for problem in error.problems:
                yield Finding(area, "problem", f"TF-101: {problem}", of_job=True)
    if not refused:
        yield Finding(area, "ok", f"{job.job_name}: the policy accepts it")


def signature(job: JobConfig, name: str, policy: Policy, asked: Asked) -> Iterator[Finding]:
    """Tell whether the job's folder is signed as this site asks for, and until when."""
    from tightframe.config import job_manifest
    from tightframe.errors import ManifestError, SiteConfigError
    from tightframe.flare.identity import site_identity

    area = area_of("job", name)
    if asked.folder is None or asked.startup is None:
        return
    app, central = asked.folder / "app", policy.central_provisioning
    try:
        _, anchor = site_identity(asked.startup, name, production=asked.production, missing_role=central)
        made = job_manifest.verify(app, job, name, anchor, now=datetime.now(UTC))
    except SiteConfigError:
        return  # told by the identity
    except ManifestError as error:
        if error.code != "TF-633":
            yield Finding(area, "problem", str(error), of_job=True)
        elif policy.signed_jobs:
            text = "not signed yet, and this site takes part in signed jobs only: the lead signs it at last"
            yield Finding(area, "note", text)
        return
    state: State = "ok" if datetime.now(UTC) < made.until else "problem"
    text = f"signed by {made.signer}, to be taken up from {made.created} until {made.expires}"
    yield Finding(area, state, text, of_job=True)


def look_back(
    job: JobConfig, name: str, entry: SiteEntry, entries: Sequence[Entry] | None, asked: Asked
) -> Iterator[Finding]:
    """Yield the limits that earlier jobs leave to this one: cohorts, and the privacy budget.

    Args:
        job: for this site, or nothing is told.
        name: of the site.
        entry: the site's only one.
        entries: of its ledger; None where that cannot be told.
        asked: what to look at.
    """
    from tightframe.errors import JobError
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.setup import prepare
    from tightframe.rounds.silo.enrolment_check import UNKNOWN

    if name not in job.sites:
        return
    try:
        setup = prepare(job, entry.policy.resolve(production=asked.production).ceilings)
    except JobError:
        return  # told by ``look``
    area = area_of("job", name)
    with tempfile.TemporaryDirectory() as folder:
        context = SiloContext(name, job, entry, Path(folder), job_id=UNKNOWN, production=asked.production)
        if job.summation == "secure":
            yield from _cohort(context, setup, area, asked)
        if job.privacy is not None:
            yield _budget(context, setup, entries, area)


def _cohort(context: SiloContext, setup: JobSetup, area: str, asked: Asked) -> Iterator[Finding]:
    """Tell whether this site takes part in the sums of these silos, formed as this job forms them."""
    from tightframe.errors import SecureSumError, TightframeError
    from tightframe.privacy.ledger.entries import LedgerError, TamperError
    from tightframe.rounds.silo.enrolment_check import check_sums
    from tightframe.rounds.site_ledger import LedgerPaths
    from tightframe.rounds.sums.common import package_errors
    from tightframe.rounds.sums.vault import read_journal
    from tightframe.securesum.journal import CohortAccepted, StaticMasked, StaticOpened

    state_dir, job = context.site.state_dir, context.job
    try:
        with package_errors():
            kept = []
            if state_dir is not None:
                places = LedgerPaths.of_site(Path(state_dir), context.name, asked.kit_root)
                kept = read_journal(places, check=None)
        check_sums(context, setup, kept)
    except SecureSumError as error:
        hint = ACCEPT.get(error.code, "")
        yield Finding(area, "problem", f"{error}{hint}", of_job=error.code in ("TF-601", "TF-612", "TF-617"))
        return
    except (LedgerError, TamperError):
        yield Finding(area, "note", f"{job.job_name}: not held against its cohorts, for which see the ledger")
        return
    except (OSError, TightframeError) as error:
        yield Finding(area, "problem", f"the journal of its cohorts cannot be read: {error}")
        return
    which = "" if state_dir is not None else "; for whom its counts are open it knows itself"
    yield Finding(
        area, "ok", f"{job.job_name}: this site takes part in sums over {', '.join(job.roster)}{which}"
    )
    dataset = context.site.records_id(job.dataset)
    known = any(
        isinstance(entry, StaticMasked | StaticOpened | CohortAccepted) and entry.dataset == dataset
        for entry in kept
    )
    if state_dir is not None and job.privacy is None and not known:
        others = ", ".join(site for site in job.roster if site != context.name)
        yield Finding(area, "note", NEWCOMER.format(job=job.job_name, dataset=dataset, others=others))


def _budget(context: SiloContext, setup: JobSetup, entries: Sequence[Entry] | None, area: str) -> Finding:
    """Check that the charges planned by the job fit into the budget left."""
    from tightframe.errors import TightframeError
    from tightframe.rounds.silo.enrolment_check import check_budget

    name = context.job.job_name
    if entries is None or not context.site.data:
        what = "its ledger" if entries is None else "its records"
        text = (
            f"{name}: not held against what is left of the privacy budget, which needs this site and {what}"
        )
        return Finding(area, "note", text)
    try:
        looked = check_budget(context, setup, entries)
    except TightframeError as error:
        return Finding(area, "problem", str(error), of_job=error.code in ("TF-701", "TF-706"))
    if not looked:
        text = (
            f"{name}: it goes on with a run that was charged here: each charge is held against what is left"
        )
        return Finding(area, "note", text)
    return Finding(area, "ok", f"{name}: what it plans to charge fits into the privacy budget")
