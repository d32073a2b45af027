"""The closing exchange: every silo evaluates the last model, keeps it and begins its own report."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from tightframe.learning.model_update import broadcast_model
from tightframe.phases import Contribution, Field, Phase, Schema, ServerState, SiloView, Tensors
from tightframe.rounds.riders import evaluation

if TYPE_CHECKING:
    from tightframe.rounds.silo.view import LocalSilo

PRESENT = Field("closing/present", (), bound=1.0, mechanism="constant")
"""One from each silo, whatever its records."""


def phase(evaluated: Schema | None, term: evaluation.Term) -> Phase:
    """The closing as a phase.

    Args:
        evaluated: the evaluation's fields; None where the evaluation stays at the silos, whose term then
            says no more than that they were there.
        term: makes those fields of a silo's exact counts.
    """

    def broadcast(state: ServerState) -> Tensors:
        return broadcast_model(state.model)

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = cast("LocalSilo", silo)
        final, counted = evaluation.counted_model(view, received, state)
        try:
            if evaluated is None:
                tensors: Tensors = {PRESENT.name: torch.ones((), dtype=torch.float64)}
            else:
                tensors = term(view, evaluation.without(counted, view.left_out))
        finally:
            # Whatever the budget says, a silo keeps the model and its own, exact report.
            view.keep_model(final, counted)
        return Contribution(tensors, None)

    schema = Schema((PRESENT,)) if evaluated is None else evaluated
    return evaluation.reading(Phase("closing", schema, broadcast, contribute, lambda state, *_: state))
