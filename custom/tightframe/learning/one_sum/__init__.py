"""A method whose model is a function of one sum: the exchanges that all of its kind share.

::

    holders   who holds which class (the class rules)
    counts    how many records of each class will be summed (``learning.few_records.products``)
    sums      G, B and n of the frozen features (``feature_sums``) -> the head, in closed form
    scale     losses of validation records at a grid of temperatures (``temperature``)

All but the last come before round 1, where a sum that cannot be opened ends the run and nothing is lost; the
last is the method's one round, which an evaluation rides on as on any other. As ``start`` of another method
all come before round 1. Backbone and running statistics stay as they were broadcast, in every exchange.

Under differential privacy there is one exchange, the method's round (or the start)::

    release   G, B and n with noise (``noisy_sums``) -> the head, and its temperature from them alone

No class rule holds there, so that nobody needs to tell what it has, and no exact loss is told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tightframe.errors import RunError
from tightframe.learning import model_update
from tightframe.learning.class_sums import holders_phase
from tightframe.learning.few_records.distinct_rows import counts_phase
from tightframe.learning.halves import plain_training, train
from tightframe.learning.one_sum import temperature, withdrawal
from tightframe.learning.one_sum.closed_form import ABSENT, Priors, centred
from tightframe.learning.one_sum.feature_sums import (
    FrozenSums,
    admitted_classes,
    contribute_sums,
    counts_field,
    frozen,
    pooled,
    sum_fields,
)
from tightframe.learning.one_sum.noisy_sums import PREFIX, noisy_fields, read
from tightframe.learning.one_sum.temperature import BIAS, KNOWN, WEIGHT
from tightframe.learning.own_models import TRAINED, trained
from tightframe.models.heads import UnitBallLinear
from tightframe.phases import (
    Cohort,
    Contribution,
    Method,
    OneSum,
    Phase,
    Reading,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
    Withdrawal,
)
from tightframe.results.words import plural

RADIUS = 1.0
"""Radius for the sums of a closed form, whose head brings features into the unit ball itself."""
START_RADIUS = 2.0**7
"""Radius for the sums of a start, whose head takes features as they are: longer ones are shortened in the
sums only. Features are rounded to 2^-17 then, fine enough for a head that goes on training."""
Solve = Callable[[Any, FrozenSums, bool], tuple[torch.Tensor, torch.Tensor]]
"""(options, pooled sums, whether the head has a bias) -> weight (C, d) and bias (C,) on phi. Rows of classes
that are not known mean nothing."""


Intercepts = Callable[[Any], Priors | None]


def _as_solved(config: Any) -> Priors | None:
    return None


def one_sum_method(
    *,
    solve: Solve,
    products: bool,
    needs_bias: bool,
    follows: str,
    intercepts: Intercepts = _as_solved,
    **attributes: Any,
) -> Method:
    """Make a method, and a start, of what a closed form does with the pooled sums.

    Args:
        products: whether it needs G, and not B and n only.
        needs_bias: whether it has no form for a head without a bias.
        follows: see ``phases.OneSum``.
        intercepts: by which shares, given its options, the bias is set anew where the sums are noisy.
        **attributes: of ``phases.Method``: ``name``, ``title``, ``paper`` and ``config``.
    """

    def init_server(setting: Setting, seed: int) -> ServerState:
        return ServerState(model_update.initial_model(setting, seed))

    def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
        if setting.privacy is not None:
            return (release_phase(setting, solve, intercepts, products=products, start=False),)
        return (scale_phase(beside=True),)

    def first(setting: Setting) -> tuple[Phase, ...]:
        counts = counts_field(setting.num_classes)
        width = model_update.shared_width(setting)
        return holders_phase(counts), counts_phase(counts, width)

    def before(setting: Setting) -> tuple[Phase, ...]:
        if setting.privacy is not None:
            return ()
        return *first(setting), sums_phase(setting, solve, products=products, start=False)

    def withdraw(setting: Setting, asked: Withdrawal) -> tuple[Phase, ...]:
        width = model_update.shared_width(setting)
        after = partial(solved, setting, solve)
        return withdrawal.phases(setting.num_classes, width, asked, after, products=products)

    def start(setting: Setting) -> tuple[Phase, ...]:
        check_head(setting, bias=needs_bias)
        if setting.privacy is not None:
            return (release_phase(setting, solve, intercepts, products=products, start=True),)
        solution = sums_phase(setting, solve, products=products, start=True)
        return *first(setting), solution, scale_phase(beside=False)

    return Method(
        **{
            "init_server": init_server,
            "plan": plan,
            "before": before,
            "withdraw": withdraw,
            "start": start,
            "rounds": 1,
            "one_sum": OneSum(follows, lambda setting: opened(setting, products=products)),
            "head": lambda config, width, classes: UnitBallLinear(width, classes),
            "personalise": personalise,
            "private": lambda config: None,
            "rounded": True,
            **attributes,
        }
    )


def sums_phase(setting: Setting, solve: Solve, *, products: bool, start: bool) -> Phase:
    """Return the exchange of the sums, after which the head is the closed form's.

    Args:
        setting: with the options of the closed form.
        products: whether G is summed.
        start: for a head that takes features as they are and goes on training; otherwise one that brings them
            into the unit ball itself.
    """
    radius = START_RADIUS if start else RADIUS
    width = model_update.shared_width(setting)
    schema = Schema(sum_fields(setting.num_classes, width, products=products))

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        sums = contribute_sums(silo, received, products=products, radius=radius)
        kept = None if start else withdrawal.own_state(sums, admitted_classes(silo, received))
        return Contribution(sums, kept)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        if cohort.failed:
            raise RunError(
                f"Expected the sums of all silos, but {plural(cohort.failed, 'silo')} of {cohort.size} could "
                "not add its own, which and why is in their own logs: mend it, or make features fewer where "
                "a log has TF-625, and start the job again.",
                code="TF-510",
            )
        if not start:
            return solved(setting, solve, state, totals)
        sums = pooled(totals)
        # A unit of length for features that may be far shorter than the radius.
        length = sums.length
        weight, bias = solve(setting.config, sums.over(length), BIAS in state.model)
        weight, bias = centred(weight, bias, sums.known, 0.0)
        model = with_head(state.model, weight / (length * radius), bias)
        known = sums.known.to(torch.uint8)
        return state.evolve(model=model, extra={**state.extra, KNOWN: known})

    return Phase("sums", schema, model_update.broadcast_of, contribute, update)


def release_phase(
    setting: Setting, solve: Solve, intercepts: Intercepts, *, products: bool, start: bool
) -> Phase:
    """Return the exchange of noisy sums under differential privacy; from these the head is solved and scaled.

    Args:
        setting: with the options of the closed form, and privacy.
        intercepts: see ``one_sum_method``.
        products: whether G is released.
        start: for a head that takes features as they are and goes on training: they are shortened to the
            job's ``feature_clip`` in the sums only. Otherwise the head brings them into the unit ball itself.
    """
    assert setting.privacy is not None  # noqa: S101  (asked for with privacy only)
    radius, absent = (setting.privacy.feature_clip, 0.0) if start else (1.0, ABSENT)
    width = model_update.shared_width(setting)
    schema = Schema(noisy_fields(setting.num_classes, width, products=products))

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        model = frozen(silo, received)
        sums = silo.private_frozen_sums(model, width, products=products, radius=radius)
        return Contribution({item.name: sums[item.name.removeprefix(PREFIX)] for item in schema.fields}, None)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        noisy = read(totals)
        known = noisy.sums.known
        weight, bias = solve(setting.config, noisy.sums, BIAS in state.model)
        weight, bias = centred(weight, bias, known, absent)
        shifted = intercepts(setting.config) if BIAS in state.model else None
        scale, bias = temperature.of_gaussians(weight, bias, noisy, intercepts=shifted)
        bias = torch.where(known, bias / scale, bias)
        model = with_head(state.model, weight / (scale * radius), bias)
        return state.evolve(model=model, extra={**state.extra, KNOWN: known.to(torch.uint8)})

    return Phase("release", schema, model_update.broadcast_of, contribute, update)


def solved(setting: Setting, solve: Solve, state: ServerState, totals: Totals) -> ServerState:
    """Return the state with the head that a total gives, and with the total, for a withdrawal.

    It keeps how many different rows were counted before, which a withdrawal's rule rests on.
    """
    sums = pooled(totals)
    weight, bias = centred(*solve(setting.config, sums, BIAS in state.model), sums.known)
    extra = {**state.extra, **withdrawal.kept_total(totals), KNOWN: sums.known.to(torch.uint8)}
    return state.evolve(model=with_head(state.model, weight, bias), extra=extra)


def opened(setting: Setting, *, products: bool) -> dict[str, int]:
    """Return what the sum opens, and how many numbers each is.

    Args:
        setting: with C classes, and a model of features of width d.
        products: whether G is summed, whose upper triangle travels.
    """
    classes, width = setting.num_classes, model_update.shared_width(setting)
    gram = {"G, products of features, d (d + 1) / 2": width * (width + 1) // 2} if products else {}
    return {**gram, "B, class sums of features, C x d": classes * width, "n, class counts, C": classes}


def with_head(model: Tensors, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the model with another linear head, each tensor in its own type.

    Args:
        model: by name; its head has one row a class, or for two classes one row (``SingleLogit``).
        weight: (C, d).
        bias: (C,); left out where the head has none.
    """
    if len(model[WEIGHT]) == 1:  # the logits [0, z]
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    changed = {WEIGHT: weight, **({BIAS: bias} if BIAS in model else {})}
    return {name: changed[name].to(item.dtype) if name in changed else item for name, item in model.items()}


def scale_phase(*, beside: bool) -> Phase:
    """Return the exchange that scales the head by a temperature.

    Args:
        beside: with ``own/trained`` in the update group, which a training round must have: after a drop-out
            its sum opens, and the head keeps its scale.
    """
    schema = Schema((*((TRAINED,) if beside else ()), temperature.field()))

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        losses = temperature.contribute(silo, received, state)
        return Contribution({**(trained() if beside else {}), **losses.tensors}, None)

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        return temperature.update(state, totals)

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        return Reading(state, totals).warning(*temperature.warned(totals))

    return Phase("scale", schema, temperature.broadcast, contribute, update, read)


def check_head(setting: Setting, *, bias: bool) -> None:
    """Refuse a model whose head no linear solution can be put into.

    Args:
        bias: whether the solution needs a bias.

    Raises:
        ValueError: naming the head.
    """
    head = model_update.shared_template(setting).get_submodule("head")
    if not isinstance(head, nn.Linear):
        raise ValueError(f"Expected the model to have a linear head, but its head is {type(head).__name__}.")
    if bias and head.bias is None:
        raise ValueError(
            "Expected the model's head to have a bias, but it has none: start with fed3r, or set "
            "model_options.head_bias."
        )


def personalise(silo: SiloView, tensors: Tensors, state: Tensors) -> nn.Module:
    """Return the final model after one round of plain local training, as the job's ``training`` says."""
    return train(silo, model_update.broadcast_model(tensors), state, plain_training()).model
