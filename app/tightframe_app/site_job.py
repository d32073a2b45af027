"""What a site will refuse of a job: by its policy, and by what it remembers of the jobs before.

Both by the code that decides when the site enrols. Ledger and journal are read, and nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe_app.site_findings import Asked, Finding, area_of

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe.config.policy import Policy
    from tightframe.config.site import SiteEntry
    from tightframe.privacy.ledger.entries import Entry
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.setup import JobSetup

ACCEPT = (
    " Whether the new cohort's counts may be opened, too, this site decides: `tightframe site cohort accept` "
    "says what that gives away."
)


def look(
    job: JobConfig, name: str | None, entry: SiteEntry, policy: Policy, asked: Asked
) -> Iterator[Finding]:
    """What the site's policy refuses of a job: what the lead would be told, and the reason."""
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
    looks: tuple[Callable[[], None], ...] = (
        lambda: policy.check(job, submitter=submitter),
        lambda: check_record_options(job, entry, policy),
        lambda: policy.check_method(prepare(job).setting.config, job),
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


def look_back(
    job: JobConfig, name: str, entry: SiteEntry, entries: Sequence[Entry] | None, asked: Asked
) -> Iterator[Finding]:
    """What the jobs before leave to this one: cohorts, and the privacy budget.

    Args:
        job: for this site, or nothing is told.
        name: of the site.
        entry: the site's only one.
        entries: of its ledger; None where that cannot be told.
        asked: what to look at.
    """
    from tightframe.errors import JobError
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.foreseen import UNKNOWN
    from tightframe.rounds.setup import prepare

    if name not in job.sites:
        return
    try:
        setup = prepare(job)
    except JobError:
        return  # told by ``look``
    area = area_of("job", name)
    with tempfile.TemporaryDirectory() as folder:
        context = SiloContext(name, job, entry, Path(folder), job_id=UNKNOWN, production=asked.production)
        if job.summation == "secure":
            yield _cohort(context, setup, area)
        if job.privacy is not None:
            yield _budget(context, setup, entries, area)


def _cohort(context: SiloContext, setup: JobSetup, area: str) -> Finding:
    """Whether this site takes part in the sums of these silos."""
    from tightframe.errors import SecureSumError
    from tightframe.rounds.context import JOURNAL, lasting_journal
    from tightframe.rounds.foreseen import check_sums
    from tightframe.rounds.secure.common import named
    from tightframe.rounds.secure.vault import look_at_journal

    state_dir, job = context.site.state_dir, context.job
    try:
        with named():
            kept = []
            if state_dir is not None:
                kept = look_at_journal(lasting_journal(Path(state_dir), context.name) / JOURNAL)
        check_sums(context, setup, kept)
    except OSError as error:
        return Finding(area, "problem", f"the journal of its cohorts cannot be read: {error}")
    except SecureSumError as error:
        hint = ACCEPT if error.code == "TF-612" else ""
        return Finding(area, "problem", f"{error}{hint}", of_job=error.code in ("TF-601", "TF-612"))
    which = "" if state_dir is not None else "; for whom its counts are open it knows itself"
    return Finding(
        area, "ok", f"{job.job_name}: this site takes part in sums over {', '.join(job.roster)}{which}"
    )


def _budget(context: SiloContext, setup: JobSetup, entries: Sequence[Entry] | None, area: str) -> Finding:
    """Whether what the job plans to charge fits into what is left."""
    from tightframe.errors import TightframeError
    from tightframe.rounds.foreseen import check_budget

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
