"""Gradient sharing: a round is one sum of the silos' gradients and one step of the server.

The exchange of FedSGD, and the form in which gradients enter a sum for any method that shares them. Without
differential privacy a silo sends the mean gradient of its records, with it the sum of its records' clipped
gradients, and how many they are, with noise (``phases.SiloView.private_gradient_sum``); the server's reading
(``rounds.riders.noisy_sums``) makes the same mean of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tightframe.learning import model_update
from tightframe.learning.gradients.fold import by_name, fold_gradients
from tightframe.learning.model_update import BUFFER, trained_parameters
from tightframe.learning.server_optimizers import GradientDescent
from tightframe.learning.stages import FitReport, cross_entropy
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)

GRADIENT = "gradient/"
RECORDS = "gradient_records"
"""Field for the noisy number of records, or of patients, in a noisy sum of gradients."""
TERMS = ("cross_entropy",)

# A gradient's coordinates span many orders of magnitude, and Adam divides each by its own size. In the
# 64-bit ring with its 24 fraction bits, this factor gives a resolution of 2^-36 = 1.5e-11 and a range of
# 2^19 = 524,288, which 250 silos cannot make wrap. Being a power of two, it changes no digit.
SCALE = 2.0**12
BOUND = 2.0**19
NOISY_BOUND = 2.0**28
"""Bound of a noisy sum, in clipping norms: 2^24 records and noise; 250 silos cannot make it wrap."""


def gradient_fields(setting: Setting, template: nn.Module, *, weighted: bool = False) -> tuple[Field, ...]:
    """Return fields of the gradient, ``gradient/<parameter>``, in units of ``1 / SCALE``.

    Args:
        setting: gives the norm.
        template: the model, for names and shapes.
        weighted: by the silos' public weights.
    """
    norm = None if setting.update_norm is None else setting.update_norm * SCALE
    return tuple(
        Field(GRADIENT + name, tuple(item.shape), ring=64, bound=BOUND * SCALE, norm=norm, weighted=weighted)
        for name, item in trained_parameters(template).items()
    )


def noisy_gradient_fields(template: nn.Module) -> tuple[Field, ...]:
    """Return fields of ``SiloView.private_gradient_sum``: ``gradient/<parameter>`` and ``RECORDS``.

    There is no norm: what shortened a noisy sum would shorten the noise that other silos rely on.
    """
    shapes = {GRADIENT + name: tuple(item.shape) for name, item in trained_parameters(template).items()}
    return tuple(
        Field(name, shape, ring=64, bound=NOISY_BOUND, mechanism="gradient_sum")
        for name, shape in {**shapes, RECORDS: ()}.items()
    )


def gradient_terms(model: nn.Module, vector: torch.Tensor, factor: float = SCALE) -> dict[str, torch.Tensor]:
    """Return a silo's tensors for the fields of its gradient (P,), times ``factor``."""
    shapes = {name: item.shape for name, item in trained_parameters(model).items()}
    return by_name(shapes, GRADIENT, factor * vector)


def gradient_phase(
    setting: Setting, optimizer: GradientDescent, *, weighted: bool, share: float = 1.0
) -> Phase:
    """Return one round: each silo's mean gradient of the cross-entropy, and one step down their mean.

    Args:
        weighted: the mean is weighted by the silos' public weights: with numbers of records as weights it is
            the gradient over all silos' records.
        share: the part of its records that a silo draws; under privacy the job's plan has it.
    """
    template = model_update.shared_template(setting)
    private = setting.privacy is not None
    fields = noisy_gradient_fields(template) if private else ()
    models = model_update.model_fields(setting, template)
    schema = Schema(
        (
            *(fields or gradient_fields(setting, template, weighted=weighted)),
            *(item for item in models if item.name.startswith(BUFFER)),
            *model_update.training_fields(TERMS),
        )
    )

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        received = model_update.received_model(broadcast)
        model = silo.load(received)
        buffers, report = _buffers(received, model), FitReport(0, 0)
        if private:
            noisy, records = silo.private_gradient_sum(model, (cross_entropy(),))
            sums = gradient_terms(model, noisy, 1.0) | {RECORDS: records}
        else:
            fold = fold_gradients(silo, model, share=share)
            sums, buffers = gradient_terms(model, fold.gradient), _buffers(received, model)
            report = FitReport(
                fold.batches, fold.records, dict.fromkeys(("loss", *TERMS), fold.cross_entropy)
            )
        return Contribution({**sums, **buffers, **model_update.training_terms(report, TERMS)})

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        divisor = cohort.total_weight if weighted and not private else float(cohort.size)
        scale = 1.0 if private else SCALE
        return descend(optimizer, state, mean_gradients(totals, divisor, scale), totals, cohort)

    return Phase("gradient", schema, model_update.broadcast_of, contribute, update)


def mean_gradients(totals: Totals, divisor: float, scale: float = SCALE) -> dict[str, torch.Tensor]:
    """Return the silos' mean gradient by parameter name, float64."""
    return {
        name.removeprefix(GRADIENT): torch.as_tensor(total, dtype=torch.float64) / (scale * divisor)
        for name, total in totals.items()
        if name.startswith(GRADIENT)
    }


def descend(
    optimizer: GradientDescent, state: ServerState, directions: Tensors, totals: Totals, cohort: Cohort
) -> ServerState:
    """Return the state after one step; running statistics are averaged.

    Args:
        state: before it.
        directions: by the names of the parameters that train.
        totals: with the fields of the model's buffers.
    """
    stepped, kept = optimizer.step(state.model, directions, state.extra)
    model = model_update.apply_mean(state.model, totals, cohort) | stepped
    return state.evolve(model=model, extra={**state.extra, **kept})


def _buffers(received: Tensors, model: nn.Module) -> dict[str, Any]:
    terms = model_update.model_terms(received, model)
    return {name: item for name, item in terms.items() if name.startswith(BUFFER)}


def check_one_step(setting: Setting, *, digits: str) -> list[str]:
    """Return what of a job's training has no meaning where a round is one step, in words.

    Args:
        digits: why gradients are not computed in reduced precision.
    """
    problems = []
    if setting.local.epochs != 1:
        problems.append(f"training.epochs to be 1, for a round is one step, but got {setting.local.epochs}")
    if setting.local.amp:
        problems.append(f"training.amp to be false, because {digits}")
    return problems
