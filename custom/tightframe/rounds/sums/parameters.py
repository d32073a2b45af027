"""The protocol parameters that a server proposes to the silos, derived from the job alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tightframe import __version__
from tightframe.rounds import codec
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.common import SEAL, SEALS
from tightframe.securesum import messages, rules
from tightframe.securesum.primitives import digest

RETRIES = 2
"""Number of spare slots, beyond those that a run needs when nothing fails."""


def epoch_params(
    setup: JobSetup, job_id: str, roster: Sequence[str], *, epoch: int, static_open: bool
) -> messages.Params:
    """Return the parameters of one epoch.

    Args:
        roster: the silos, in order.
        epoch: number of setups before this one in the run.
        static_open: whether counts, class sums and evaluation may be opened for this roster.
    """
    job = setup.job
    sites, colluders = len(roster), job.assumed_colluders(len(roster))
    schemas: dict[str, tuple[messages.FieldSpec, ...]] = {SEAL: ()}
    # A withdrawal's numbers and classes are each verified before the next request.
    needed = RETRIES + SEALS + (2 if job.withdraw is not None and job.resume is None else 0)
    for exchange in setup.plan:
        needed += 1
        for phase in exchange.phases:
            fields = codec.specs(phase.schema, sites)
            schemas[schema_name(f"{exchange.kind}-{exchange.index}", fields)] = fields
    return messages.Params(
        job=job_id,
        lineage=job.lineage(job_id),
        epoch=epoch,
        roster=tuple(roster),
        threshold=rules.threshold(sites, colluders, job.server_trust),
        colluders=colluders,
        slots=min(needed, rules.MAX_SLOTS),
        schemas=schemas,
        weights=job.weights,
        trust=job.server_trust,
        min_sites=job.smallest_sum(sites),
        static_open=static_open,
        config_sha256=bytes.fromhex(job.sha256()),
        version=__version__,
    )


@functools.lru_cache(maxsize=1024)
def schema_name(phase: str, fields: tuple[messages.FieldSpec, ...]) -> str:
    """Return a schema's name in the parameters: its phase and the start of its hash."""
    sha256 = digest("schema", [item.as_value() for item in fields])
    return f"{phase}/{sha256.hex()[:16]}"
