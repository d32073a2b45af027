"""A model as fields of a sum: shared by all methods, which never import each other.

Fields: ``update/<parameter>`` for what trains (as a difference, so that clipping and noise have
one scale), ``buffer/<name>`` for running statistics, which hardly depend on the training and so are
static, ``training/<term>`` for what the silo saw.
Rescaling to a norm, weighting and encoding happen elsewhere, once for every method.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tightframe.learning.stages import FitReport
from tightframe.models.frozen import HEAD, is_frozen
from tightframe.models.heads import feature_width
from tightframe.phases import Cohort, Field, ServerState, Setting, Tensors, Totals

BROADCAST = "model/"
UPDATE = "update/"
BUFFER = "buffer/"
TRAINING = "training/"

# Running variances above 30 occur, so buffers get a wide range and the 64-bit ring.
BUFFER_BOUND = 1e6
TRAINING_BOUND = 1e9


def build_template(setting: Setting) -> nn.Module:
    """Return an untrained model of the caller's own, for names and shapes only.

    It is a copy: ResNet18 takes a third of the time to copy that it takes to build, VGG11 a tenth.
    """
    return copy.deepcopy(shared_template(setting))


def shared_template(setting: Setting) -> nn.Module:
    """Return an untrained model for names and shapes, built once for equal jobs and never to be changed."""
    return template_of(setting.build_model)


@functools.lru_cache(maxsize=4)
def template_of(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of ``shared_template``, by what builds it."""
    with torch.random.fork_rng(devices=[]):
        return build_model()


def shared_width(setting: Setting) -> int:
    """Return d, the width of the features of the model."""
    return feature_width(shared_template(setting))


def copied(tensors: Tensors, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return copies on the CPU of tensors that go on to change, by their names after ``prefix``."""
    return {prefix + name: item.detach().cpu().clone() for name, item in tensors.items()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name, in order."""
    return {name: item for name, item in model.named_parameters() if item.requires_grad}


def initial_model(setting: Setting, seed: int) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of the model that ``seed`` gives; other streams are left untouched."""
    with torch.random.fork_rng(devices=[]):
        # On a machine without a GPU, torch.manual_seed takes three tracebacks.
        torch.default_generator.manual_seed(seed)
        model = setting.build_model()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def broadcast_model(model: Tensors) -> dict[str, torch.Tensor]:
    """Return the model's tensors as a broadcast names them: ``model/<name>``."""
    return {BROADCAST + name: tensor for name, tensor in model.items()}


def broadcast_of(state: ServerState) -> dict[str, torch.Tensor]:
    """Return the broadcast of a phase whose silos need the model, and nothing else of the state."""
    return broadcast_model(state.model)


def received_model(broadcast: Tensors) -> dict[str, torch.Tensor]:
    """Return the model's tensors of a broadcast, by their own names."""
    return named(broadcast, BROADCAST)


def named(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """Select the tensors whose names begin with a prefix, by what stands behind it."""
    return {name.removeprefix(prefix): item for name, item in tensors.items() if name.startswith(prefix)}


def model_fields(setting: Setting, template: nn.Module | None = None) -> tuple[Field, ...]:
    """Return the fields of a model's update: trainable parameters, then floating buffers.

    Integer buffers (BatchNorm's step counter) stay at home, and so do parameters that do not
    train and all of a frozen encoder, because everybody has them already.

    Args:
        setting: gives the norm, the bound and, if there is no template, the model.
        template: a model already built, to save building another.
    """
    model = shared_template(setting) if template is None else template
    updates = [
        Field(
            UPDATE + name,
            tuple(parameter.shape),
            ring=32,
            bound=setting.update_bound,
            norm=setting.update_norm,
            weighted=True,
            mechanism="training",
        )
        for name, parameter in trained_parameters(model).items()
    ]
    buffers = [
        Field(BUFFER + name, tuple(buffer.shape), ring=64, bound=BUFFER_BOUND, weighted=True, static=True)
        for name, buffer in _float_buffers(model).items()
    ]
    return (*updates, *buffers)


def training_fields(term_names: Iterable[str]) -> tuple[Field, ...]:
    """Return scalar fields for the loss and each named term: weighted means over silos."""
    names = ["loss", *(name for name in term_names if name != "loss")]
    return tuple(
        Field(TRAINING + name, (), ring=64, bound=TRAINING_BOUND, weighted=True, static=True)
        for name in names
    )


def model_terms(received: Tensors, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a silo's tensors for ``model_fields`` after training.

    Args:
        received: the model as it was broadcast, by its own names.
        model: the same, trained in place.

    Returns:
        ``update/<parameter>``: trained minus received, computed in float64, kept in float32;
        ``buffer/<name>``: the buffers as they are. On the CPU.

    Raises:
        KeyError: if the broadcast lacks a trainable parameter.
    """
    terms = {}
    for name, parameter in trained_parameters(model).items():
        after = parameter.detach().to("cpu", torch.float64)
        before = received[name].detach().to("cpu", torch.float64)
        terms[UPDATE + name] = (after - before).float()
    for name, buffer in _float_buffers(model).items():
        terms[BUFFER + name] = buffer.detach().to("cpu", torch.float32).clone()
    return terms


def training_terms(report: FitReport, term_names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Return a silo's tensors for ``training_fields(term_names)``: means over its steps, float64 scalars.

    Without ``term_names`` these are the terms of the report. A named term that no step computed
    (a stage without a batch) counts as zero.
    """
    term_names = report.terms if term_names is None else term_names
    return {
        field.name: torch.tensor(
            report.terms.get(field.name.removeprefix(TRAINING), 0.0), dtype=torch.float64
        )
        for field in training_fields(term_names)
    }


def apply_mean(state_model: Tensors, totals: Totals, cohort: Cohort) -> dict[str, torch.Tensor]:
    """Return the next global model: FedAvg's weighted mean, from sums.

    ``w <- w + sum_k p_k (w_k - w)`` with ``p_k = n_k / sum_j n_j`` over the cohort; buffers are the
    weighted mean of the silos' buffers; what no silo sends (integer buffers, frozen parameters) stays,
    and so do buffers after a drop-out, when their sum is not opened.
    Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
    Data, AISTATS 2017, algorithm 1.

    Args:
        state_model: the model that was broadcast.
        totals: opened sums of ``model_fields``, float64.
        cohort: whose terms they are.

    Returns:
        The model's tensors, each in its own type.

    Raises:
        ValueError: if the cohort has no weight.
    """
    weight = cohort.total_weight
    if weight <= 0:
        raise ValueError(f"Expected a cohort with a positive weight, but got {dict(cohort.weights)}.")
    updated = {}
    for name, tensor in state_model.items():
        if UPDATE + name in totals:
            mean = _mean(totals[UPDATE + name], weight)
            updated[name] = (tensor.detach().to("cpu", torch.float64) + mean).to(tensor.dtype)
        elif BUFFER + name in totals:
            updated[name] = _mean(totals[BUFFER + name], weight).to(tensor.dtype)
        else:
            updated[name] = tensor
    return updated


def _mean(total: NDArray[np.float64], weight: float) -> torch.Tensor:
    return torch.as_tensor(np.asarray(total, dtype=np.float64) / weight)


def _float_buffers(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return floating buffers that are part of the model's state, in order; of a frozen encoder none."""
    state = model.state_dict()
    moving = HEAD if is_frozen(model) else ""
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in state and buffer.is_floating_point() and name.startswith(moving)
    }


def mean_losses(totals: Totals, cohort: Cohort) -> dict[str, float]:
    """Return the mean of each loss term over the silos in a sum, by its name.

    Args:
        totals: of a training phase; fields that are no losses are left alone.
        cohort: the silos in the sum.
    """
    return {
        name.removeprefix(TRAINING): float(value) / cohort.total_weight
        for name, value in totals.items()
        if name.startswith(TRAINING)
    }
