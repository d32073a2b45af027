"""Pooled statistics: their names in sums, how records count in moments of inputs, each silo's own check.

Moments count no silo for much more than its public weight: a silo that counted for millions would set mean
and deviation, and so the model's front end. A silo counts at most ``WEIGHED`` records for one of its weight
(which is rounded down, and has no repeats). Where it has more, each of its records counts for the same power
of two: if some counted and others not, sums by class less moments would be of the others, down to one, as a
job's cap on weights chooses. With uniform weights all of a silo's count for one record, each in whole steps
of 1 / ``UNIFORM``: the same at all silos, so that a total of zeros and ones does not tell how many stand
behind each term.

Each silo holds the pooled moments against its own: false ones stand in its log. Another's term is masked,
but the total less this silo's own moments is of the others' values: at least none, and in each column with
squares that their sum allows (Cauchy-Schwarz). With the others' number bounded by public weights, no silo can
make the pooled deviation much smaller than this silo's own spread about the pooled mean unseen. The silo
continues: if a false total removed its terms, their difference to another total would disclose them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import safetensors.torch
import torch

from tightframe.files import write_atomically
from tightframe.phases import RIDERS, Field, Tensors
from tightframe.rounds import codec
from tightframe.rounds.checkpoint import tensor_bytes
from tightframe.rounds.order import STATISTICS, place_of

if TYPE_CHECKING:
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.riders.view import RiderView
    from tightframe.securesum.messages import Total

PREFIX = "statistics/"
"""Prefix of the names of pooled statistics, which depend on the records alone, in sums and broadcasts."""
COUNTS = "statistics/counts"
VALUES, SUMS, SQUARES = "statistics/values", "statistics/sums", "statistics/squares"
MOMENT_BOUND = 2.0**30
SMALLEST_STD = 1e-6
POOLED = RIDERS + "moments"
"""Key in the server's state of the opened moments, see ``packed``: a silo compares them with its own."""
UNIFORM = 2**10
"""Inverse of the step in which a record counts with uniform weights; all of a silo's count for one."""
WEIGHED = 2
"""Most records that count for one of a silo's applied weight."""
OWN_MOMENTS, OWN = "moments.safetensors", "own"
ROUNDING = 1e-11
"""Relative tolerance of the squares: above float64 rounding, too little to move a deviation."""


def times_in_moments(records: int, counted: int, least: int = 1) -> torch.Tensor:
    """Return how often each record counts in a silo's moments, int64 (n,): evenly, ``counted`` in total.

    Records that count once more than others are none or at least ``least``, and so are the others: fewer
    are left out of ``counted``.

    >>> times_in_moments(3, 3).tolist(), times_in_moments(3, 2).tolist(), times_in_moments(3, 7).tolist()
    ([1, 1, 1], [0, 1, 1], [2, 2, 3])
    >>> times_in_moments(3, 7, least=2).tolist(), times_in_moments(9, 8, least=2).sum()
    ([2, 2, 2], tensor(7))
    """
    more = counted % records if records else 0
    if 0 < records - more < least <= more:
        counted -= least - (records - more)
    elif 0 < more < least or 0 < records - more < least:
        counted -= more
    ends = torch.arange(records + 1, dtype=torch.int64) * counted // max(records, 1)
    return ends.diff()


def packed(values: torch.Tensor, sums: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Return moments as one tensor, (1 + 2 D,) float64."""
    return torch.cat([item.detach().cpu().double().reshape(-1) for item in (values, sums, squares)])


def mean_and_deviation(pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the deviation, each (D,) float64, by which a model standardises.

    Args:
        pooled: see ``packed``.
    """
    values, (sums, squares) = max(float(pooled[0]), 1.0), pooled[1:].reshape(2, -1)
    mean = sums / values
    deviation = (squares / values - mean.square()).clamp_min(0).sqrt()
    # A constant column, in which a later record may differ, is shifted and not scaled.
    return mean, torch.where(deviation > SMALLEST_STD, deviation, 1.0)


def note_moments(silo: RiderView, contribution: Tensors) -> None:
    """Keep this silo's term of pooled moments, if this sum is of them."""
    if VALUES in contribution:
        own = packed(contribution[VALUES], contribution[SUMS], contribution[SQUARES])
        write_atomically(silo.context.state_folder / OWN_MOMENTS, tensor_bytes({OWN: own}), mode=0o600)


def settle_moments(context: SiloContext, total: Total | None) -> None:
    """Delete that term if the server's total is of moments, and does not include this silo."""
    if total is not None and place_of(total.sum_id)[0] == STATISTICS and context.name not in total.survivors:
        (context.state_folder / OWN_MOMENTS).unlink(missing_ok=True)


def check_moments(silo: RiderView) -> None:
    """Warn in this silo's own log (TF-527), once in a run, of pooled moments that contradict its own."""
    context, pooled = silo.context, silo.pooled
    path = context.state_folder / OWN_MOMENTS  # perhaps left by a job that this one continues
    if pooled is None or not path.is_file() or not path.stat().st_size:
        return
    own = safetensors.torch.load(path.read_bytes())[OWN]
    parties = len(silo.cohort)
    step = 2.0 ** -codec.bits_of(Field(SUMS, (), bound=MOMENT_BOUND), parties)
    if columns := contradicted(pooled, own, parties * step):
        context.log.warning(
            f"{context.name}: TF-527: expected pooled moments of inputs that this silo's own records fit "
            f"into, but in columns {columns[:5]} the other silos' would have a negative number or variance: "
            "another silo sent false ones, to make the model show records. Stop the site (tightframe site "
            "stop) and find out which."
        )
        write_atomically(path, b"", mode=0o600)  # logged; a job that continues this one does not log it again


def contradicted(pooled: torch.Tensor, own: torch.Tensor, error: float) -> list[int]:
    """Return the columns in which no values of others add up to the pooled moments with a silo's own.

    Args:
        pooled, own: number of values, sums and sums of squares, (1 + 2 D,) float64.
        error: of a sum, by the silos' fixed point.

    >>> own = torch.tensor([2.0, 4.0, 10.0])  # 1 and 3
    >>> contradicted(torch.tensor([3.0, 6.0, 14.0]), own, 1e-6)  # another 2
    []
    >>> contradicted(torch.tensor([3.0, 9.0, 34.0]), own, 1e-6)  # 5, with a square of 24
    [0]
    """
    others = pooled - own
    number, (sums, squares) = others[0], others[1:].reshape(2, -1)
    total, most = pooled[0].abs(), pooled[1:].reshape(2, -1).abs()
    slack = ROUNDING * total * most[1] + 2 * error * (total + 2 * most[0] + error)
    wrong = (number * squares - sums.square() < -slack) | (squares < -slack) | (number < -1e-6)
    return torch.nonzero(wrong).flatten().tolist()
