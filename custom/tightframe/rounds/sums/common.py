"""Code that both ends of a secure sum share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tightframe.config.job import JobConfig
from tightframe.errors import SecureSumError
from tightframe.securesum import rules
from tightframe.securesum.errors import ProtocolError

SECURE = "secure"
"""Key of the protocol message within a message."""
SEAL = "seal"
"""Kind, and schema, of the sum without fields in which an epoch's last total is verified."""
SEALS = 2
"""Slots of an epoch that are kept for seals: the second one is for silos that drop out during the first."""


ADVICE = {
    "TF-617": (
        " Two such totals can reveal one silo's own term. Export the job with the earlier settings, or let a "
        "person at this site decide: `tightframe site release accept` says what both reveal."
    ),
}
"""Advice by code, added where the protocol's own message has none."""


@contextmanager
def package_errors() -> Iterator[None]:
    """Turn the protocol's errors into those of the package, naming the silo to blame.

    Raises:
        SecureSumError: with the code of the ``ProtocolError``.
    """
    try:
        yield
    except ProtocolError as error:
        blame = f" To blame: {error.blamed}." if error.blamed else ""
        advice = ADVICE.get(error.code, "")
        raise SecureSumError(f"{error}{blame}{advice}", code=error.code, blamed=error.blamed) from None


def minimum(job: JobConfig, sites: int) -> int:
    """Return the smallest number of silos in a sum, by the threshold, c, and the job's own minimum.

    Where sums open whole only (``whole_sums``) it is the roster that enrolled. For fewer silos than any
    secure sum can have it is the least number of a secure sum.
    """
    if sites < rules.MIN_SITES:
        return rules.MIN_SITES
    colluders = job.assumed_colluders(sites)
    needed = rules.threshold(sites, colluders, job.server_trust)
    least = rules.smallest_set(needed, colluders, job.min_sites)
    return max(least, sites) if job.whole_sums else least
