"""The optimisers of local training, through torch's own functional forms.

``torch.optim``'s classes import torch's compiler at their first use, which costs every process a
second and a half. In the simulator every task is a process of its own, so this is a third of a
short task's time; the functional forms are the same arithmetic without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


class Optimizer(Protocol):
    """The interface that the local loop needs; every ``torch.optim.Optimizer`` has it."""

    param_groups: Any

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""

    def step(self) -> Any:
        """Change the parameters by their gradients."""


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimiser, fresh in every stage.

    Attributes:
        name: ``sgd`` or ``adam``.
        weight_decay: coupled L2.
    """

    name: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    @classmethod
    def of(cls, local: Any) -> OptimizerSettings:
        """Read a job's ``training`` section (optimizer, learning_rate, momentum, weight_decay)."""
        return cls(local.optimizer, local.learning_rate, local.momentum, local.weight_decay)

    def build(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Build the optimiser over ``parameters``."""
        return _Sgd(parameters, self) if self.name == "sgd" else _Adam(parameters, self)


class _Functional:
    """Parameters and settings; ``param_groups`` is what torch's gradient scaler reads."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> None:
        self.parameters = list(parameters)
        self.param_groups: Any = [{"params": self.parameters}]
        self.settings = settings

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _with_gradient(self) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        """Return places, parameters and gradients of the parameters that have one."""
        entries = [(i, p, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        return [i for i, _, _ in entries], [p for _, p, _ in entries], [g for _, _, g in entries]


class _Sgd(_Functional):
    """``torch.optim.SGD`` with momentum and coupled weight decay."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> None:
        super().__init__(parameters, settings)
        self._buffers: list[torch.Tensor | None] = [None] * len(self.parameters)

    @torch.no_grad()
    def step(self) -> None:
        places, parameters, gradients = self._with_gradient()
        buffers = [self._buffers[place] for place in places]
        sgd(
            parameters,
            gradients,
            buffers,
            weight_decay=self.settings.weight_decay,
            momentum=self.settings.momentum,
            lr=self.settings.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for place, buffer in zip(places, buffers, strict=True):
            self._buffers[place] = buffer


class _Adam(_Functional):
    """``torch.optim.Adam`` with coupled weight decay."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> None:
        super().__init__(parameters, settings)
        self._first = [torch.zeros_like(item) for item in self.parameters]
        self._second = [torch.zeros_like(item) for item in self.parameters]
        self._steps = [torch.zeros((), dtype=torch.float32) for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        places, parameters, gradients = self._with_gradient()
        adam(
            parameters,
            gradients,
            [self._first[place] for place in places],
            [self._second[place] for place in places],
            [],
            [self._steps[place] for place in places],
            amsgrad=False,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            lr=self.settings.learning_rate,
            weight_decay=self.settings.weight_decay,
            eps=ADAM_EPS,
            maximize=False,
        )
