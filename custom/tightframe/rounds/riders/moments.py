"""Pooled moments of inputs, held against this silo's own: a false total of them stands in its log.

Another silo's term is masked. But the total less this silo's own moments is of the others' values: at least
none, and in each column with squares that their sum allows (Cauchy-Schwarz). With the others' number bounded
by public weights (``phases.statistics``), no silo can make the pooled deviation much smaller than this silo's
own spread about the pooled mean unseen. The silo goes on: whoever could make its terms vanish by a false
total would have them as the difference of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import safetensors.torch
import torch

from tightframe.files import write_atomically
from tightframe.phases import Field, Tensors
from tightframe.rounds import codec
from tightframe.rounds.checkpoint import tensor_bytes
from tightframe.rounds.order import STATISTICS, place_of
from tightframe.rounds.phases.statistics import MOMENT_BOUND, SQUARES, SUMS, VALUES, packed
from tightframe.rounds.riders.view import RiderView

if TYPE_CHECKING:
    from tightframe.rounds.context import SiloContext
    from tightframe.securesum.messages import Total

FILE, OWN = "moments.safetensors", "own"
ROUNDING = 1e-11
"""Of the squares: more than float64 leaves, less than moves a deviation."""


def note(silo: RiderView, made: Tensors) -> None:
    """Keep what this silo adds to pooled moments, if this sum is of them."""
    if VALUES in made:
        own = packed(made[VALUES], made[SUMS], made[SQUARES])
        write_atomically(silo.context.state_folder / FILE, tensor_bytes({OWN: own}), mode=0o600)


def settle(context: SiloContext, total: Total | None) -> None:
    """Drop the note if the total told is of moments, and has no term of this silo."""
    if total is not None and place_of(total.sum_id)[0] == STATISTICS and context.name not in total.survivors:
        (context.state_folder / FILE).unlink(missing_ok=True)


def check(silo: RiderView) -> None:
    """Warn in this silo's own log (TF-527) of pooled moments that contradict its own: once in a run."""
    context, pooled = silo.context, silo.pooled
    path = context.state_folder / FILE  # a job that this one continues may have left it
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
        write_atomically(path, b"", mode=0o600)  # said; a job that continues this one does not say it again


def contradicted(pooled: torch.Tensor, own: torch.Tensor, error: float) -> list[int]:
    """Return the columns in which no others' values can make these pooled moments of a silo's own.

    Args:
        pooled, own: number of values, sums and sums of squares, (1 + 2 D,) float64.
        error: that the silos' fixed point leaves in a sum.

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
