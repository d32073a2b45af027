"""A head that each silo has for itself: what is sent is the rest of the model, the body.

Shared by methods of that kind, which never import each other. A silo without a head of its own yet
begins with the one that the run's seed gives, which is the same everywhere and never changes at the
server: the global model is the common body with it, and is near chance until silos put theirs on it.
"""

from __future__ import annotations

import torch
from torch import nn

from tightframe import model_update
from tightframe.model_update import BUFFER, UPDATE
from tightframe.phases import Field, Setting, Tensors

HEAD = "head."
_OWN = (UPDATE + HEAD, BUFFER + HEAD)


def in_head(name: str) -> bool:
    """Whether a model's parameter or buffer is the head's."""
    return name.startswith(HEAD)


def in_body(name: str) -> bool:
    """Whether it is not."""
    return not in_head(name)


def body_fields(setting: Setting) -> tuple[Field, ...]:
    """``model_update.model_fields`` without those of the head."""
    return tuple(item for item in model_update.model_fields(setting) if not item.name.startswith(_OWN))


def body_terms(received: Tensors, model: nn.Module) -> dict[str, torch.Tensor]:
    """``model_update.model_terms`` without those of the head."""
    terms = model_update.model_terms(received, model)
    return {name: item for name, item in terms.items() if not name.startswith(_OWN)}


def own_model(received: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    """The body received, under the head that the silo has kept, or the common one while it has none."""
    return {**received, **{name: item for name, item in state.items() if in_head(name)}}


def kept_head(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's head by names, to keep; a copy on the CPU."""
    return {name: item.detach().cpu().clone() for name, item in model.state_dict().items() if in_head(name)}
