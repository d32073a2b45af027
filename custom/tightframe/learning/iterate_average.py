"""The mean of the models after the last rounds, which is kept in place of the last one.

With noise, or steps that do not shrink, models of the last rounds lie around a point that their mean is
closer to. Every silo knows every round's model, so the mean opens nothing more and costs no privacy. Silos
train from each round's own model as ever; the mean replaces the last round's::

    w = (1 / K) sum_(r = R - K + 1 .. R) w_r

Sources: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM Journal on Control
and Optimization 30, 1992; Rakhlin, Shamir and Sridharan, Making Gradient Descent Optimal for Strongly Convex
Stochastic Optimization, ICML 2012 (of the last ones); De et al., Unlocking High-Accuracy Differentially
Private Image Classification through Scale, 2022, section 3 (for DP-SGD).

Averaged is what silos send: parameters that train, and running statistics of normalisation, which belong to
them. Everything else (fixed heads, counters, a frozen encoder) stays the last round's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from tightframe.learning import model_update
from tightframe.phases import Cohort, Phase, ServerState, Setting, Tensors, Totals

SUM, COUNT = "iterates/sum/", "iterates/count"
"""In ``ServerState.extra`` during these rounds: sums of their models' tensors, float64, and their number."""


def averaged_names(setting: Setting) -> frozenset[str]:
    """Return the names of the model's tensors of which the mean is taken: those that silos send."""
    prefixes = (model_update.UPDATE, model_update.BUFFER)
    return frozenset(
        item.name.split("/", 1)[1]
        for item in model_update.model_fields(setting)
        if item.name.startswith(prefixes)
    )


def attach(
    phases: Sequence[Phase], names: Collection[str], *, number: int, rounds: int, last: int
) -> tuple[Phase, ...]:
    """Return a round's phases with the mean taken after them, if the round is among the last ones.

    Args:
        phases: of the method, before riders.
        names: of the tensors that are averaged.
        number: of the round, from 1.
        rounds: R, of the job.
        last: K.
    """
    if number <= rounds - last:
        return tuple(phases)
    end = len(phases) - 1
    return tuple(
        _averaging(phase, names, counts=index == end, ends=index == end and number == rounds)
        for index, phase in enumerate(phases)
    )


def _averaging(phase: Phase, names: Collection[str], *, counts: bool, ends: bool) -> Phase:
    """Return a phase that keeps the sums; it adds its model if it ``counts``, and ``ends`` with the mean."""

    def broadcast(state: ServerState) -> Tensors:
        return phase.broadcast(_split(state)[0])

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        own, kept = _split(state)
        after = phase.update(own, totals, cohort)
        if counts:
            kept = add(kept, after.model, names)
        if ends:
            return after.evolve(model=mean(kept, after.model))
        return after.evolve(extra={**after.extra, **kept})

    return replace(phase, broadcast=broadcast, update=update)


def _split(state: ServerState) -> tuple[ServerState, dict[str, torch.Tensor]]:
    """Return the state as the method knows it, and the sums beside it."""
    kept = {name: item for name, item in state.extra.items() if name == COUNT or name.startswith(SUM)}
    return state.evolve(extra={name: item for name, item in state.extra.items() if name not in kept}), kept


def add(kept: Tensors, model: Tensors, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the sums with one more model.

    Args:
        kept: so far, {} at first.
        model: of a round.
        names: of its tensors that are averaged.
    """
    chosen = {name: item.detach().to("cpu", torch.float64) for name, item in model.items() if name in names}
    sums = {SUM + name: kept[SUM + name] + item if kept else item.clone() for name, item in chosen.items()}
    before = kept.get(COUNT, torch.zeros((), dtype=torch.int64))
    return {**sums, COUNT: before + 1}


def mean(kept: Mapping[str, torch.Tensor], model: Tensors) -> dict[str, torch.Tensor]:
    """Return the model with the mean in place of each tensor that was summed, in its own type.

    >>> first, second = ({"w": torch.tensor([value])} for value in (1.0, 4.0))
    >>> mean(add(add({}, first, {"w"}), second, {"w"}), second)["w"]
    tensor([2.5000])
    """
    return {
        name: (kept[SUM + name] / kept[COUNT]).to(item.dtype) if SUM + name in kept else item
        for name, item in model.items()
    }
