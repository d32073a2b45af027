"""What both ends of a secure sum share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tightframe.config.job import JobConfig
from tightframe.errors import SecureSumError
from tightframe.securesum import rules
from tightframe.securesum.errors import ProtocolError

SECURE = "secure"
"""Key of a protocol message in what travels."""


ADVICE = {
    "TF-617": (
        " Two such totals can tell one silo's own term. Export the job with the earlier settings, or let a "
        "person decide at this site: `tightframe site release accept` says what both give away."
    ),
}
"""What a person can do, where the protocol's own words do not say it."""


@contextmanager
def named() -> Iterator[None]:
    """Turn the protocol's refusals into named errors of the package, with who is to blame."""
    try:
        yield
    except ProtocolError as error:
        blame = f" To blame: {error.blamed}." if error.blamed else ""
        advice = ADVICE.get(error.code, "")
        raise SecureSumError(f"{error}{blame}{advice}", code=error.code, blamed=error.blamed) from None


def minimum(job: JobConfig, sites: int) -> int:
    """The smallest number of silos in a sum: the threshold, the job's minimum, and what c asks for.

    Of fewer silos than a secure sum can have, that number.
    """
    if sites < rules.MIN_SITES:
        return rules.MIN_SITES
    colluders = job.assumed_colluders(sites)
    needed = rules.threshold(sites, colluders, job.server_trust)
    return rules.smallest_set(needed, colluders, job.min_sites)
