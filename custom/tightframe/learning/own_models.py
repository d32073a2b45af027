"""A head that each silo has for itself: what is sent is the rest of the model, the body.

Shared by methods of that kind, which never import each other. A silo without a head of its own yet
begins with the one that the run's seed gives, which is the same everywhere and never changes at the
server: the global model is the common body with it, and is near chance until silos put theirs on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tightframe.learning.halves import ServerRule, Trained, averaging
from tightframe.learning.model_update import BUFFER, UPDATE, initial_model, model_fields
from tightframe.phases import Contribution, Field, Setting, SiloView, Tensors

HEAD = "head."
_OWN = (UPDATE + HEAD, BUFFER + HEAD)


def in_head(name: str) -> bool:
    """Whether a model's parameter or buffer is the head's."""
    return name.startswith(HEAD)


def in_body(name: str) -> bool:
    """Whether it is not."""
    return not in_head(name)


def averaging_body() -> ServerRule:
    """FedAvg's mean of the body; the head at the server stays as it is."""
    return replace(averaging(), fields=_body_fields, terms=lambda trained: _sent(trained.terms))


def keep_head(trained: Trained) -> Contribution:
    """Nothing more to send; the silo's state is its head."""
    state = trained.model.state_dict()
    return Contribution(
        {}, {name: item.detach().cpu().clone() for name, item in state.items() if in_head(name)}
    )


def _body_fields(setting: Setting) -> tuple[Field, ...]:
    return tuple(item for item in model_fields(setting) if not item.name.startswith(_OWN))


def _sent(terms: Tensors) -> Tensors:
    return {name: item for name, item in terms.items() if not name.startswith(_OWN)}


def own_model(received: Tensors, state: Tensors) -> Tensors:
    """The body received, under the head that the silo has kept, or the common one while it has none."""
    return {**received, **{name: item for name, item in state.items() if in_head(name)}}


OWN = "own/"
TRAINED = Field("own/trained", (), bound=1.0, mechanism="constant")
"""One from each silo, whatever its records: the sum is the size of the cohort, which everybody knows."""


def trained() -> dict[str, torch.Tensor]:
    """A silo's tensor for ``TRAINED``."""
    return {TRAINED.name: torch.ones((), dtype=torch.float64)}


def own_tensors(silo: SiloView, state: Tensors) -> dict[str, torch.Tensor]:
    """The silo's model as last committed, by its own names; a draw while it has none."""
    kept = {name.removeprefix(OWN): item for name, item in state.items() if name.startswith(OWN)}
    return kept or initial_model(silo.setting, silo.generator("own model").initial_seed())


def kept_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model to keep: ``own/<name>``, copies on the CPU."""
    return {OWN + name: item.detach().cpu().clone() for name, item in model.state_dict().items()}


def own_trained(silo: SiloView, _model: Tensors, state: Tensors) -> nn.Module:
    """The personal model: the silo's own, as it is, in evaluation mode."""
    return silo.load(own_tensors(silo, state)).eval()
