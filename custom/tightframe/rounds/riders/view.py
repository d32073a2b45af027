"""A silo as riders and the run's own phases see it: more than a method may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, cast

import torch

from tightframe.phases import SiloView, Tensors

if TYPE_CHECKING:
    from tightframe.privacy.events import Event
    from tightframe.results.local_report import SiloPersonal
    from tightframe.results.parts.dropouts import Lost
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.setup import JobSetup
    from tightframe.rounds.unproven import Needs


class RiderView(SiloView, Protocol):
    """The part of ``rounds.silo.view.LocalSilo`` that a method's view does not have.

    Attributes:
        context: job, policy, records, folders, log.
        cohort: the silos enrolled, in order.
        honest: s - c, the least number of honest silos in a sum that can be opened.
        left_out: parts that this silo's evaluation leaves out: folds, and findings of a fold (``test/2``).
        lost: silos that dropped out, as reported by the server.
        needs: what proves the state that the sum rests on.
        pooled: moments of inputs in that state; None if it has none.
    """

    context: SiloContext
    setup: JobSetup
    cohort: Sequence[str]
    honest: int
    left_out: Sequence[str]
    lost: Mapping[str, Lost]
    needs: Needs
    pooled: torch.Tensor | None

    @property
    def offers_prototypes(self) -> bool:
        """Check that neither the job's list nor the site's configuration withholds the silo's prototypes."""

    def finding_counts(self) -> torch.Tensor:
        """Count distinct training records with each finding, and without it: int64 (K, 2)."""

    def times_in_moments(self, admitted: torch.Tensor | None) -> torch.Tensor:
        """Return how often each training record counts in moments of the inputs, float64 (n,).

        Args:
            admitted: the classes in them, bool (C,); None for all that count in public.
        """

    @property
    def sums_columns(self) -> bool:
        """Check whether the job sums a table's columns themselves, by class or as products."""

    def enough_of_class(self) -> torch.Tensor:
        """Return the classes of which this silo's records have enough values for a job's sums, bool (C,)."""

    def charge(self, purpose: str, events: Sequence[Event], *, alone: Event | None = None) -> None:
        """Charge a release to the site's ledger, before its noise is drawn."""

    def spent(self) -> float:
        """Return the epsilon that the job has cost this silo's records so far, by its ledger."""

    def memory_named(self, key: str, size: int) -> AbstractContextManager[None]:
        """Turn running out of memory into TF-302, naming the job's value ``key`` to lower from ``size``."""

    def without_training(self) -> AbstractContextManager[None]:
        """Let nothing train for a block."""

    def keep_model(self, final: Tensors, counted: Tensors) -> None:
        """Store the last model at this silo, and begin the silo's own report."""

    def add_to_report(self, *, personal: SiloPersonal) -> None:
        """Add the personal model to this silo's own report, if it has one."""


def rider_view(silo: SiloView) -> RiderView:
    """Return a silo's view as a rider's: a phase receives a method's view, which is the same object."""
    return cast(RiderView, silo)
