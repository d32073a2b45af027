"""What a site will refuse of a job when it enrols, from what it remembers: asked before there is a run.

By the very code of the enrolment. Ledger and journal are read by the caller, and nothing is written to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.parameters import epoch_params
from tightframe.rounds.sums.secure_silo import SecureSite
from tightframe.securesum import journal

if TYPE_CHECKING:
    from tightframe.privacy.ledger.entries import Entry

UNKNOWN = "not-submitted-yet"
"""Id of a job that no engine has given one."""


def check_sums(context: SiloContext, setup: JobSetup, entries: Sequence[journal.Entry]) -> None:
    """Hold the secure sums of all of a job's silos against this site's rules and its journal.

    Args:
        context: of the silo, with ``UNKNOWN`` as the job's id.
        setup: of the job.
        entries: of the site's journal.

    Raises:
        SecureSumError: TF-601 below the site's rules; TF-612 for a cohort that its counts are not open for.
    """
    params = epoch_params(
        setup,
        context.job_id,
        context.job.roster,
        epoch=0,
        # Where a job goes on, counts that are open for other silos stay shut, and nobody is refused for it.
        static_open=context.job.resume is None,
    )
    SecureSite(context).foresee(params, setup, entries)


def check_budget(context: SiloContext, setup: JobSetup, entries: Sequence[Entry]) -> bool:
    """Hold all that a job with privacy may charge against what is left at this site.

    Args:
        context: of the silo; its records are opened, and what is solved is kept in its folder.
        setup: of the job.
        entries: of the site's ledger.

    Returns:
        Whether it was; not where the job goes on, which is held with each charge.

    Raises:
        TightframeError: as ``PrivateSilo.hold_budget``; TF-701 if it does not fit.
    """
    import torch

    from tightframe.rounds.silo.private_view import PrivateSilo

    silo = PrivateSilo(context, setup, torch.device("cpu"), 0, cohort=(context.name,), honest=1)
    return silo.hold_budget(entries)
