"""Optimisers of the server: pure functions on named tensors, whose moments are part of its state.

Each takes parameters, gradients (or a mean update) and moments, and returns new parameters and new
moments; nothing is changed in place, so that a checkpoint holds all there is. Moments are one flat
dictionary, ``first/<name>``, ``second/<name>`` or ``momentum/<name>``, which fits into
``ServerState.extra``; an empty one stands for the state before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tightframe.phases import Tensors

Stepped = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""New parameters and new moments."""

FIRST, SECOND, MOMENTUM = "first/", "second/", "momentum/"


def adam_step(
    parameters: Tensors,
    gradients: Tensors,
    moments: Tensors,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Stepped:
    """Make one step of Adam with coupled weight decay, as ``torch.optim.Adam``.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015, algorithm 1. With
    ``g <- g + weight_decay * w`` and t counting from 1::

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        w <- w - learning_rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        parameters: w, by name, floating point of any shape.
        gradients: g, the same names and shapes.
        moments: ``first/<name>`` and ``second/<name>``; empty before the first step.
        step: t, the number of this step, from 1.
        betas: b1 and b2.
        eps: added to the root.
        weight_decay: coupled L2: part of the gradient and so of the moments.

    Returns:
        New parameters and moments, each in its parameter's type.

    Raises:
        ValueError: if names or shapes differ, if ``step`` is not positive, or if a later step has no moments.
    """
    if step < 1:
        raise ValueError(f"Expected `step` to count from 1, but got {step}.")
    if step > 1 and not moments:
        raise ValueError(f"Expected the moments of step {step - 1}, but got none.")
    start = dict.fromkeys((FIRST, SECOND), 0.0)
    gradients, moments = _prepared(parameters, gradients, moments, start)
    first_share, second_share = (1 - beta**step for beta in betas)
    new_parameters, new_moments = {}, {}
    for name, weight in parameters.items():
        slope = gradients[name]
        if weight_decay:
            slope = slope.add(weight, alpha=weight_decay)
        first = torch.lerp(moments[FIRST + name], slope, 1 - betas[0])
        second = (moments[SECOND + name] * betas[1]).addcmul(slope, slope, value=1 - betas[1])
        root = second.sqrt() / second_share**0.5 + eps
        new_parameters[name] = weight.addcdiv(first, root, value=-learning_rate / first_share)
        new_moments[FIRST + name], new_moments[SECOND + name] = first, second
    return new_parameters, new_moments


def sgd_step(
    parameters: Tensors,
    gradients: Tensors,
    moments: Tensors,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Stepped:
    """Make one step of SGD with momentum and coupled weight decay, as ``torch.optim.SGD``.

    With ``g <- g + weight_decay * w``: ``u <- momentum * u + g`` and ``w <- w - learning_rate * u``, no
    dampening, not Nesterov's form. Without momentum there are no moments. At a rate other than 1 the last
    bits depend on the processor: a method whose server takes such steps declares ``rounded``.

    Args:
        parameters: w, by name, floating point of any shape.
        gradients: g, the same names and shapes.
        moments: ``momentum/<name>``; empty before the first step.
        momentum: share of the last direction that is kept.
        weight_decay: coupled L2.

    Returns:
        New parameters and moments, each in its parameter's type.

    Raises:
        ValueError: if names or shapes differ.

    >>> weight, slope = {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
    >>> sgd_step(weight, slope, {}, learning_rate=0.25)
    ({'w': tensor([0.5000])}, {})
    """
    gradients, moments = _prepared(parameters, gradients, moments, {MOMENTUM: 0.0} if momentum else {})
    new_parameters, new_moments = {}, {}
    for name, weight in parameters.items():
        direction = gradients[name]
        if weight_decay:
            direction = direction.add(weight, alpha=weight_decay)
        if momentum:
            direction = (moments[MOMENTUM + name] * momentum).add(direction)
            new_moments[MOMENTUM + name] = direction
        new_parameters[name] = weight.add(direction, alpha=-learning_rate)
    return new_parameters, new_moments


def fedopt_step(
    parameters: Tensors,
    mean_updates: Tensors,
    moments: Tensors,
    *,
    variant: Literal["adam", "yogi", "adagrad"] = "adam",
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
) -> Stepped:
    """Make one step of FedAdam, FedYogi or FedAdagrad in the paper's form.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, Adaptive Federated
    Optimization, ICLR 2021, algorithm 2. With D the mean of the silos' updates::

        m <- b1 m + (1 - b1) D
        adam:  v <- b2 v + (1 - b2) D^2
        yogi:  v <- v - (1 - b2) D^2 sign(v - D^2)
        adagrad:  v <- v + D^2
        w <- w + learning_rate * m / (sqrt(v) + tau)

    from m = 0 and v = tau^2. There is no bias correction, unlike in Adam, and D points downhill.

    Args:
        parameters: w, by name, floating point of any shape.
        mean_updates: D, the same names and shapes.
        moments: ``first/<name>`` and ``second/<name>``; empty before the first step.
        learning_rate: the server's step size.
        betas: b1 and b2, which ``adagrad`` has not.
        tau: adaptivity; smaller is more adaptive.

    Returns:
        New parameters and moments, each in its parameter's type.

    Raises:
        ValueError: if names or shapes differ, or if ``variant`` is none of these.
    """
    if variant not in ("adam", "yogi", "adagrad"):
        raise ValueError(f"Expected `variant` to be 'adam', 'yogi' or 'adagrad', but got {variant!r}.")
    start = {FIRST: 0.0, SECOND: tau**2}
    mean_updates, moments = _prepared(parameters, mean_updates, moments, start)
    new_parameters, new_moments = {}, {}
    for name, weight in parameters.items():
        update, second = mean_updates[name], moments[SECOND + name]
        square = update * update
        first = betas[0] * moments[FIRST + name] + (1 - betas[0]) * update
        if variant == "adam":
            second = betas[1] * second + (1 - betas[1]) * square
        elif variant == "adagrad":
            second = second + square
        else:
            second = second - (1 - betas[1]) * square * torch.sign(second - square)
        new_parameters[name] = weight + learning_rate * first / (second.sqrt() + tau)
        new_moments[FIRST + name], new_moments[SECOND + name] = first, second
    return new_parameters, new_moments


STEP = "adam/step"
"""In ``ServerState.extra``: the number of Adam's steps so far."""


@dataclass(frozen=True)
class GradientDescent:
    """A server that steps down the silos' mean gradient; its moments are ``<optimizer>/<kind>/<name>``.

    Attributes:
        optimizer: ``sgd_step`` or ``adam_step``.
    """

    optimizer: Literal["sgd", "adam"]
    learning_rate: float
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def initial(self) -> dict[str, torch.Tensor]:
        """Return what the server keeps before its first step."""
        return {STEP: torch.tensor(0)} if self.optimizer == "adam" else {}

    def step(self, model: Tensors, gradients: Tensors, extra: Tensors) -> Stepped:
        """Make one step.

        Args:
            model: the global model, by name.
            gradients: of the parameters that train, by the same names.
            extra: what the server keeps.

        Returns:
            New parameters, and what of ``extra`` is new.
        """
        before = {name: model[name] for name in gradients}
        prefix = f"{self.optimizer}/"
        moments, kept = kept_moments(extra, prefix), {}
        if self.optimizer == "adam":
            number = int(extra[STEP]) + 1
            stepped, moments = adam_step(
                before,
                gradients,
                moments,
                step=number,
                learning_rate=self.learning_rate,
                betas=self.betas,
                eps=self.eps,
                weight_decay=self.weight_decay,
            )
            kept[STEP] = torch.tensor(number)
        else:
            stepped, moments = sgd_step(
                before,
                gradients,
                moments,
                learning_rate=self.learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
        return stepped, {**kept, **{prefix + name: item for name, item in moments.items()}}


def kept_moments(extra: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """Return the moments in a server's state, ``<prefix><kind>/<name>``; empty before the first step.

    >>> sorted(kept_moments({"adam/first/w": torch.zeros(1), "adam/step": torch.tensor(1)}, "adam/"))
    ['first/w']
    """
    kinds = tuple(prefix + kind for kind in (FIRST, SECOND, MOMENTUM))
    return {name.removeprefix(prefix): item for name, item in extra.items() if name.startswith(kinds)}


def _prepared(
    parameters: Tensors, gradients: Tensors, moments: Tensors, start: Mapping[str, float]
) -> tuple[Tensors, Tensors]:
    """Return gradients in their parameters' types, and moments, which begin at the values of ``start``."""
    if not moments:
        moments = {
            kind + name: torch.full_like(weight, value)
            for kind, value in start.items()
            for name, weight in parameters.items()
        }
    expected = {kind + name: weight.shape for kind in start for name, weight in parameters.items()}
    _same("gradients", {name: weight.shape for name, weight in parameters.items()}, gradients)
    _same("moments", expected, moments)
    return {name: gradients[name].to(weight) for name, weight in parameters.items()}, moments


def _same(what: str, expected: Mapping[str, torch.Size], given: Tensors) -> None:
    if set(expected) != set(given):
        missing, strange = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
        raise ValueError(
            f"Expected {what} for every parameter, but got none for {missing[:5]} and unknown {strange[:5]}."
        )
    for name, shape in expected.items():
        if given[name].shape != shape:
            raise ValueError(
                f"Expected {what} of {name} of shape {tuple(shape)}, but got {tuple(given[name].shape)}."
            )
