"""The two halves of a method: how a silo trains, and what the server does with the sums.

A method with one exchange a round is two values::

    LocalRule    objective  what a silo minimises: terms of the loss, corrections of the gradient
                 start      from which model; the one received unless the method says otherwise
                 finish     what it sends beside its update (``fields``), and the state that it keeps
    ServerRule   update     the next state from the opened sums; ``averaging()`` is FedAvg's mean
                 initial, broadcast   what the server keeps and sends beside the model

``composed_method`` makes a ``phases.Method`` of them: state before round 1, schema, broadcast, local
training, and the silo's personal model. ``scheduled_method`` does where they change from round to round.
FedProx and MOON change the silo's half only, FedNova and FedOpt the server's, SCAFFOLD both, and
``methods.combine`` pairs them freely. A method writes ``init_server`` and ``plan`` itself only where it
has no such form: without a global model (FedProto, local-only), or with gradients in two exchanges a round
(FedILC).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tightframe.learning import model_update
from tightframe.learning.model_update import BUFFER, UPDATE
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import (
    FitReport,
    GradientCorrection,
    ParameterTerm,
    Stage,
    Term,
    cross_entropy,
    every_parameter,
)
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Method,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)

NORMALISER = "normaliser"
"""Name of the field of a silo's ``gradient_weight``, which its records give without any training."""


@dataclass(frozen=True)
class Objective:
    """A silo's objective in one round.

    Attributes:
        terms, parameter_terms, corrections, trainable: of the ``Stage``.
        before: the stages before that one.
        optimizer: its settings; None takes the job's.
        beside: modules that train beside the model, by name. They are part of it meanwhile only, so that
            nothing of them is sent.
        gathered: what terms gather while they run, for ``finish``.
    """

    terms: Sequence[Term]
    parameter_terms: Sequence[ParameterTerm] = ()
    corrections: Sequence[GradientCorrection] = ()
    trainable: Callable[[str], bool] = every_parameter
    before: Sequence[Stage] = ()
    optimizer: OptimizerSettings | None = None
    beside: Mapping[str, nn.Module] = field(default_factory=dict)
    gathered: Any = None


@dataclass(frozen=True)
class Trained:
    """A silo after its local training.

    Attributes:
        broadcast: what it received.
        state: what it had kept, {} before its first term was summed.
        model: trained, in evaluation mode.
        objective: by which it was trained.
        report: what the training did.
        terms: ``model_update.model_terms`` of it: ``update/<name>`` = w_k - w, and ``buffer/<name>``.
    """

    silo: SiloView
    broadcast: Tensors
    state: Tensors
    model: nn.Module
    objective: Objective
    report: FitReport
    terms: Tensors


def _no_fields(_setting: Setting) -> tuple[Field, ...]:
    return ()


def _nothing_to_add(_trained: Trained) -> Contribution:
    return Contribution({})


def _as_received(received: Tensors, _state: Tensors) -> Tensors:
    return received


def _no_tensors(_: Any) -> dict[str, torch.Tensor]:
    return {}


@dataclass(frozen=True)
class LocalRule:
    """The silo's half.

    Attributes:
        names: the terms that are reported.
        objective: (silo, broadcast, silo state) -> what is minimised in this round.
        fields: what is sent beside the update and the report.
        finish: tensors for these fields, and the silo's proposed state.
        start: (the model received, silo state) -> the model that training starts from.
        pull: factor by which a step at rate 1 draws weights back to where training began.
    """

    names: tuple[str, ...]
    objective: Callable[[SiloView, Tensors, Tensors], Objective]
    fields: Callable[[Setting], tuple[Field, ...]] = _no_fields
    finish: Callable[[Trained], Contribution] = _nothing_to_add
    start: Callable[[Tensors, Tensors], Tensors] = _as_received
    pull: float = 0.0


@dataclass(frozen=True)
class ServerRule:
    """The server's half, and the form in which it wants the silos' updates.

    Attributes:
        update: the next state from the opened sums.
        terms: a silo's tensors for ``fields``.
        initial: what the server keeps beside the model, before round 1.
        broadcast: what silos receive beside the model.
    """

    fields: Callable[[Setting], tuple[Field, ...]]
    update: Callable[[ServerState, Totals, Cohort], ServerState]
    terms: Callable[[Trained], Tensors] = field(default=lambda trained: trained.terms)
    initial: Callable[[Setting], Tensors] = _no_tensors
    broadcast: Callable[[ServerState], Tensors] = _no_tensors


Parts = Callable[[Setting], tuple[LocalRule, ServerRule]]
"""The halves that a method's options choose; ValueError where the job's training does not suit them."""
ScheduledParts = Callable[[Setting, int, int], tuple[LocalRule, ServerRule]]
"""Those of one round: (setting, round from 1, number of rounds)."""


def plain_training() -> LocalRule:
    """Return the cross-entropy, nothing else."""
    return LocalRule(("cross_entropy",), lambda silo, broadcast, state: Objective((cross_entropy(),)))


def averaging() -> ServerRule:
    """Return FedAvg's weighted mean of the silos' models."""

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        return state.evolve(model=model_update.apply_mean(state.model, totals, cohort))

    return ServerRule(fields=model_update.model_fields, update=update)


def averaged(local: Callable[[Any], LocalRule]) -> Parts:
    """Return the halves of training by ``local``, of the method's options, and FedAvg's mean."""
    return lambda setting: (local(setting.config), averaging())


KEPT = "server/"
"""Start of the names under which a server that steps by itself keeps its state."""


def stepping(step: Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]) -> ServerRule:
    """Return a server that steps by the weighted mean update; running statistics are averaged.

    Args:
        step: (parameters w that train, the mean of ``w_k - w`` by the same names in float64, what the
            server kept of its last step, {} at first) -> (the next parameters, what it keeps).
    """

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        means = mean_updates(totals, cohort.total_weight)
        before = {name: state.model[name] for name in means}
        parameters, keeps = step(before, means, model_update.named(state.extra, KEPT))
        model = next_model(state.model, parameters, totals, cohort.total_weight)
        extra = {**state.extra, **{KEPT + name: value for name, value in keeps.items()}}
        return state.evolve(model=model, extra=extra)

    return ServerRule(fields=model_update.model_fields, update=update)


def scheduled_method(*, parts: ScheduledParts, **attributes: Any) -> Method:
    """Make a method of one phase a round from the two halves of each round.

    A silo's personal model is the final one after one more round, in which it hears of the server what it
    heard in the last.

    Args:
        parts: the halves, from the setting, the round and the number of rounds.
        **attributes: of ``phases.Method``: ``name``, ``title``, ``paper`` and ``config``, and whatever is
            to stand in place of what is made here.
    """

    def init_server(setting: Setting, seed: int) -> ServerState:
        _, server = parts(setting, 1, 1)
        return ServerState(model_update.initial_model(setting, seed), server.initial(setting))

    def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
        return (train_phase(setting, *parts(setting, round, rounds)),)

    def pull(setting: Setting) -> float:
        return parts(setting, 1, 1)[0].pull

    return Method(**{"init_server": init_server, "plan": plan, "pull": pull, **attributes})


def composed_method(*, parts: Parts, **attributes: Any) -> Method:
    """Make a method of one phase a round from the two halves that its options choose.

    A silo's personal model is the final one after one more round of the silo's half, which then hears
    nothing of the server but the model.

    Args:
        parts: the halves, from the setting.
        **attributes: as of ``scheduled_method``. ``personalise=None`` lets the personal model's round hear
            what the server broadcasts, for an objective that needs it.
    """

    def personalise(silo: SiloView, tensors: Tensors, state: Tensors) -> nn.Module:
        local, _ = parts(silo.setting)
        return train(silo, model_update.broadcast_model(tensors), state, local).model

    return scheduled_method(
        parts=lambda setting, round, rounds: parts(setting),
        **{"personalise": personalise, "counts_rounds": False, **attributes},
    )


def train_phase(setting: Setting, local: LocalRule, server: ServerRule) -> Phase:
    """Return one round: broadcast the model, train by ``local``, sum what ``server`` wants, update by it."""
    if getattr(setting.local, "loop", None) is not None:
        local = replace(local, names=())  # of an own loop the mean loss alone is known
    losses = model_update.training_fields(local.names)
    schema = Schema((*server.fields(setting), *losses, *local.fields(setting)))

    def broadcast(state: ServerState) -> Tensors:
        return {**model_update.broadcast_model(state.model), **server.broadcast(state)}

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        trained = train(silo, broadcast, state, local)
        added = local.finish(trained)
        reported = model_update.training_terms(trained.report, local.names)
        return Contribution({**server.terms(trained), **reported, **added.tensors}, added.proposed_state)

    return Phase("train", schema, broadcast, contribute, server.update)


def train(
    silo: SiloView, broadcast: Tensors, state: Tensors, local: LocalRule, *, epochs: int | None = None
) -> Trained:
    """Train by the rule's objective from the global model, by the job's optimiser and for its epochs.

    Args:
        silo: whose records are used.
        broadcast: what it received.
        state: what it has kept.
        local: the silo's half.
        epochs: None takes the job's.
    """
    received = model_update.received_model(broadcast)
    model = silo.load(local.start(received, state))
    objective = local.objective(silo, broadcast, state)
    settings = silo.setting.local
    stage = Stage(
        terms=objective.terms,
        optimizer=objective.optimizer or OptimizerSettings.of(settings),
        epochs=settings.epochs if epochs is None else epochs,
        trainable=objective.trainable,
        parameter_terms=objective.parameter_terms,
        corrections=objective.corrections,
    )
    for name, module in objective.beside.items():
        model.add_module(name, module)
    try:
        if getattr(settings, "loop", None) is None:
            report = silo.fit(model, [*objective.before, stage])
        else:
            report = silo.fit_by_own_loop(model)
    finally:
        for name in objective.beside:
            delattr(model, name)
    return Trained(
        silo, broadcast, state, model, objective, report, model_update.model_terms(received, model)
    )


def require_sgd(setting: Setting, what: str) -> None:
    """Refuse a job whose local optimiser is not SGD.

    Raises:
        ValueError: saying for what SGD is needed.
    """
    if (name := setting.local.optimizer) != "sgd":
        raise ValueError(
            f"Expected `training.optimizer` to be 'sgd', because {what} is defined for SGD only, but got "
            f"{name!r}."
        )


def require_no_momentum(setting: Setting, what: str) -> None:
    """Refuse a job whose SGD has momentum, for a method with an option that allows for it.

    Raises:
        ValueError: saying what assumes plain SGD.
    """
    if momentum := setting.local.momentum:
        raise ValueError(
            f"Expected `training.momentum` to be 0, because {what} assume plain SGD, but "
            f"got {momentum:g}: set it to 0, or the method's option `momentum` to 'normalise'."
        )


def gradient_weight(steps: int, *, momentum: float = 0.0, proximal: float = 0.0) -> float:
    """Return the number of gradients in a silo's update: FedNova's normaliser ``a``.

    SGD moves by ``w - w_k = eta * sum_t a_t g_t``, where the weights ``a_t`` of the gradients depend
    on momentum and proximal term only; this is their sum, so that ``(w - w_k) / (eta * a)`` is a
    weighted mean of the gradients on the way. It follows the optimiser, with b in the momentum
    buffer and s in the displacement: ``b <- rho b + 1 - proximal s``, ``s <- s + b``::

        steps                                                plain SGD
        (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)    momentum rho
        (1 - (1 - proximal)^tau) / proximal                  proximal term without momentum

    Source: Wang, Liu, Liang, Joshi and Poor, Tackling the Objective Inconsistency Problem in
    Heterogeneous Federated Optimization, NeurIPS 2020, section 4.

    Args:
        steps: tau, the optimiser's steps.
        momentum: rho of heavy-ball SGD without dampening, fresh in this round.
        proximal: learning rate times the weight mu of ``(mu / 2) |v - w|^2``; from 0 to below 1.

    Raises:
        ValueError: if an argument is out of range.

    >>> gradient_weight(3), gradient_weight(3, momentum=0.5), gradient_weight(3, proximal=0.5)
    (3.0, 4.25, 1.75)
    """
    if steps < 0 or not 0 <= momentum < 1 or not 0 <= proximal < 1:
        raise ValueError(
            "Expected `steps` >= 0, and `momentum` and `proximal` (learning rate times mu) in [0, 1), "
            f"but got {steps}, {momentum} and {proximal}."
        )
    if not proximal and not momentum:
        return float(steps)
    buffer = weight = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1.0 - proximal * weight
        weight += buffer
    return weight


def update_fields(setting: Setting, *, weighted: bool) -> tuple[Field, ...]:
    """Return the fields of the model's update, weighted by the silos' public weights or not at all."""
    return tuple(replace(item, weighted=weighted) for item in model_update.model_fields(setting))


def trained_parameters(setting: Setting) -> dict[str, nn.Parameter]:
    """Return the template's trainable parameters by name; for names and shapes only."""
    return model_update.trained_parameters(model_update.shared_template(setting))


def mean_updates(totals: Totals, divisor: float) -> dict[str, torch.Tensor]:
    """Return the mean of the silos' ``w_k - w`` by parameter name, float64; FedOpt's pseudo-gradient."""
    return {
        name.removeprefix(UPDATE): torch.as_tensor(total, dtype=torch.float64) / divisor
        for name, total in totals.items()
        if name.startswith(UPDATE)
    }


def plus(model: Tensors, steps: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``w + step`` for each parameter that has a step, in float64."""
    return {name: model[name].detach().to("cpu", torch.float64) + step for name, step in steps.items()}


def next_model(
    model: Tensors, parameters: Tensors, totals: Totals, divisor: float
) -> dict[str, torch.Tensor]:
    """Return the next global model: new parameters, means of the buffers, and all the rest as it was.

    Whatever a server does with the parameters, running statistics are averaged: they are no gradients.

    Args:
        model: w, that was broadcast.
        parameters: new values by name.
        totals: opened sums, with ``buffer/<name>``.

    Returns:
        The model's tensors, each in its own type.
    """
    updated = {}
    for name, tensor in model.items():
        if name in parameters:
            updated[name] = parameters[name].to(tensor.dtype)
        elif BUFFER + name in totals:
            mean = torch.as_tensor(totals[BUFFER + name], dtype=torch.float64) / divisor
            updated[name] = mean.to(tensor.dtype)
        else:
            updated[name] = tensor
    return updated
