"""Parts of local training: terms of the loss, stages, and the report.

Types and small functions only; the loop that runs them is in ``learning.loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.outputs import loss

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Batches: TypeAlias = Callable[[int], Iterable[Batch]]
GradientCorrection: TypeAlias = Callable[[nn.Module], None]
"""Called on the model after the backward pass; may change ``parameter.grad`` in place."""


@dataclass(frozen=True)
class BatchView:
    """One training step as a term sees it.

    Attributes:
        inputs: (B, ...); of a frozen encoder they may be features already.
        labels: int64, classes (B,) or findings (B, K), see ``learning.outputs``.
        features: (B, d), float32 (or the model's own wider type); ``NoFeatures`` of a network without them.
        logits: (B, C), likewise.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    features: torch.Tensor
    logits: torch.Tensor
    model: nn.Module


class NoFeatures:
    """Stands for the features of a network that returns logits only: any use of them raises."""

    def __getattr__(self, name: str) -> Any:
        """Refuse.

        Raises:
            TypeError: always.
        """
        raise TypeError("Expected a network with `features` and `head`, but it returns logits only.")


@dataclass(frozen=True)
class Term:
    """One part of the loss of a batch.

    Attributes:
        name: under which its mean is reported.
        weight: its factor in the loss; with 0 it is computed for the report only.
        fn: the term as a scalar tensor.
        per_record: a mean over records of something that depends on one record each, so that
            gradients of single records exist (and may be clipped).
    """

    name: str
    weight: float
    fn: Callable[[BatchView], torch.Tensor]
    per_record: bool


@dataclass(frozen=True)
class ParameterTerm:
    """One part of the loss that depends on the parameters alone (FedProx, FedDyn, Ditto)."""

    name: str
    weight: float
    fn: Callable[[nn.Module], torch.Tensor]


def every_parameter(_name: str) -> bool:
    """Return True: a stage trains all parameters unless it says otherwise."""
    return True


@dataclass(frozen=True)
class Stage:
    """One stretch of local training.

    Attributes:
        terms: parts of the loss of each batch, in the order of summation.
        epochs, steps: how long; exactly one of them. With ``steps``, epochs repeat as needed.
        trainable: which parameters train, by name; the others stay as they are (their modules'
            running statistics are still updated).
        parameter_terms: parts of the loss that depend on the parameters alone.
        corrections: called in order after each backward pass.
    """

    terms: Sequence[Term]
    optimizer: OptimizerSettings
    epochs: int | None = None
    steps: int | None = None
    trainable: Callable[[str], bool] = every_parameter
    parameter_terms: Sequence[ParameterTerm] = ()
    corrections: Sequence[GradientCorrection] = ()

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"Expected one of `epochs` and `steps`, but got {self.epochs} and {self.steps}.")
        names = [*self.names, "loss"]
        if len(set(names)) != len(names):
            raise ValueError(f"Expected term names to be unique and none to be 'loss', but got {names[:-1]}.")
        if not any(term.weight for term in self.terms):
            raise ValueError("Expected a stage to have at least one term with a weight, but it has none.")

    def select(self, model: nn.Module, flags: Mapping[str, bool]) -> list[nn.Parameter]:
        """Let those parameters train that the stage trains, and no others; they are returned, in order.

        Args:
            flags: which parameters the model itself lets train, by name.

        Raises:
            ValueError: if there are none.
        """
        trained = []
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name] and self.trainable(name))
            if parameter.requires_grad:
                trained.append(parameter)
        if not trained:
            raise ValueError(
                "Expected a stage to train at least one parameter, but `trainable` selects none."
            )
        return trained

    @property
    def parts(self) -> tuple[Term | ParameterTerm, ...]:
        """All its terms, in order."""
        return (*self.terms, *self.parameter_terms)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all its terms, in order."""
        return tuple(part.name for part in self.parts)


@dataclass(frozen=True)
class FitReport:
    """Report of a local training.

    Attributes:
        steps: optimiser steps taken.
        records: records seen, counted each time.
        terms: mean over steps of each unweighted term, and of ``loss``, the weighted total; a
            term that is part of some stages only is averaged over their steps.
    """

    steps: int = 0
    records: int = 0
    terms: dict[str, float] = field(default_factory=dict)


def cross_entropy(weight: float = 1.0) -> Term:
    """Return the cross-entropy of the logits, a batch mean, as the term ``cross_entropy``.

    Of findings it is the binary one, see ``learning.outputs``.
    """
    return Term(
        "cross_entropy",
        weight,
        lambda view: loss(view.logits, view.labels),
        per_record=True,
    )


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Convert values to float32 if they are narrower: statistics of half precision lose all their digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
