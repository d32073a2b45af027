"""Bits that exact evaluations disclose of this silo's own records, and smaller evaluations that would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.learning.few_records.record_values import NUMBER_BITS
from tightframe.phases import Fold
from tightframe.rounds import evaluation_bits
from tightframe.rounds.context import SiloContext
from tightframe.rounds.evaluation_bits import Evaluations
from tightframe.rounds.riders import evaluation
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo.private_view import coarse_count
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.errors import EvaluationsError
from tightframe.securesum.site.journal import Entry, Evaluated, History, Most, opened

BINS = (32, 16, 8, 4, 2)
"""Score bins that are tried for a job that does not fit."""
WITHHELD: tuple[tuple[Fold, ...], ...] = ((), ("validation",), ("test",), ("validation", "test"))
"""Folds to leave out of a withdrawal's evaluation, tried in order; without both it discloses nothing."""


def of_silo(
    context: SiloContext,
    setup: JobSetup,
    device: torch.device | None = None,
    entries: Sequence[Entry] | None = None,
) -> Evaluations:
    """Return a job's exact evaluations at a silo.

    A withdrawal is never refused for its evaluations: it no longer evaluates folds for which the limits leave
    no room, and neither do jobs that continue it. Its first sum says so, so that a resumed one is counted.

    A table's training records are read, to count their varying values; pictures are not. The bits of a table
    are bounded by its possible rows, too (``column_bits``): numeric columns beside short columns hide these
    only as far as the model uses the numbers. All these counts are rounded down, see ``_coarse``.
    """
    values = None
    if context.has_rows:
        silo = LocalSilo(context, setup, device or torch.device("cpu"), 0)
        most = sum(silo.column_bits(evaluated=True)) / NUMBER_BITS
        part, power = np.frexp(silo.record_values(evaluated=True).clamp(max=most).numpy())
        values = np.ldexp(np.floor(part * 16) / 16, power)  # as ``_coarse``
    labels = {fold: _coarse(context.data.labels(fold)) for fold in evaluation.FOLDS}

    def planned(at: JobSetup, withheld: tuple[Fold, ...] = ()) -> Evaluations:
        untold = (*context.untold(), *withheld)
        evaluations = evaluation_bits.of_job(at, context.policy, labels, values, untold)
        opened = {} if withheld and {*evaluation.FOLDS} <= {*untold} else evaluations.told
        return replace(evaluations, told=opened, withheld=withheld)

    if context.job.withdraw is not None and context.job.resume is None:
        journaled = read_journal(context.ledger_paths, check=None) if entries is None else entries
        # This run's own entries are not earlier jobs' entries.
        before = [
            each for each in journaled if not (isinstance(each, Evaluated) and each.job == context.job_id)
        ]
        history, dataset = History(before), context.site.records_id(context.job.dataset)
        tried = (planned(setup, withheld) for withheld in WITHHELD)
        return next(each for each in tried if _allowed(each, dataset, context.job_id, history))
    return replace(planned(setup), smaller=lambda left: _smaller(setup, planned, left))


def _coarse(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the labels of as many records of each class as ``coarse_count`` says, for findings in total.

    A job's models and bins set the threshold at which it is refused, which would show whether one record is
    present. Of fewer records evaluations disclose a larger share.

    >>> np.bincount(_coarse(np.array([0] * 31 + [1] * 35))).tolist()
    [30, 32]
    """
    if labels.ndim == 2:
        return labels[: coarse_count(len(labels))]
    counts = np.array([coarse_count(number) for number in np.bincount(labels).tolist()], dtype=np.int64)
    return np.repeat(np.arange(len(counts)), counts)


def _allowed(planned: Evaluations, dataset: str, job: str, history: History) -> bool:
    try:
        history.check_evaluations(planned.entry(dataset, job), planned.most)
    except EvaluationsError:
        return False
    return True


def _smaller(setup: JobSetup, planned: Callable[[JobSetup], Evaluations], left: Most) -> str:
    """Describe the `evaluation` with which a job would fit: with the most bins, and of the most models."""
    own, fits = setup.job.evaluation, list[tuple[int, int]]()

    def at(models: int, bins: int) -> Evaluations:
        changed = own.model_copy(update={"models": models, "score_bins": bins})
        return planned(replace(setup, job=setup.job.model_copy(update={"evaluation": changed})))

    def words(models: int, bins: int) -> str:
        return f'{{"models": {models}, "score_bins": {bins}}}'

    for bins in dict.fromkeys((own.score_bins, *(each for each in BINS if each < own.score_bins))):
        for models in (own.models, 6, 3, 2, 1):
            if models <= own.models and at(models, bins).fits(left):
                fits.append((models, bins))
                break
    if not fits:
        none = "no smaller `evaluation` would fit, and no job can leave it out"
        smallest = (1, BINS[-1])
        if smallest == (own.models, own.score_bins):
            return none
        least = ", ".join(each for each in opened(at(*smallest).wanted)[1:] if each is not None)
        return f"{none}; {words(*smallest)} would disclose least, {least}"
    both = fits[:1] + [each for each in fits[-1:] if each[0] > fits[0][0]]
    options = [words(*each) for each in both]
    if len(both) > 1:
        options[-1] += f" ({words(*min(both, key=lambda each: at(*each).wanted[1:]))} discloses less)"
    other = any(bins != own.score_bins for _, bins in both)
    consent = " (other `score_bins` than in earlier jobs need consent too, TF-617)" if other else ""
    models, bins = both[0]
    how = f"--set evaluation.models={models}" + (
        f" --set evaluation.score_bins={bins}" if bins != own.score_bins else ""
    )
    return f'"evaluation": {" or ".join(options)} would fit: export the job with it ({how}){consent}'
