"""The closing exchange: every silo evaluates the last model, stores it and begins its own report."""

from __future__ import annotations

import torch

from tightframe.learning.model_update import broadcast_of
from tightframe.phases import Contribution, Field, Phase, Schema, SiloView, Tensors
from tightframe.rounds.riders import evaluation
from tightframe.rounds.riders.view import rider_view

PRESENT = Field("closing/present", (), bound=1.0, mechanism="constant")
"""Constant 1 from each silo, whatever its records."""


def phase(evaluated: Schema | None, term: evaluation.Term) -> Phase:
    """Return the closing phase.

    Args:
        evaluated: the evaluation's fields; None where the evaluation stays at the silos, whose term is then
            ``PRESENT`` alone.
        term: computes those fields from a silo's exact counts.
    """

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = rider_view(silo)
        final, counted = evaluation.evaluate_received(view, received, state)
        try:
            if evaluated is None:
                tensors: Tensors = {PRESENT.name: torch.ones((), dtype=torch.float64)}
            else:
                tensors = term(view, evaluation.told(counted, view.left_out))
        finally:
            # Even if the budget refuses the noisy term, the silo keeps the model and its own, exact report.
            view.keep_model(final, counted)
        return Contribution(tensors, None)

    schema = Schema((PRESENT,)) if evaluated is None else evaluated
    return evaluation.with_note(Phase("closing", schema, broadcast_of, contribute, lambda state, *_: state))
