"""Frozen encoders: a model of which the head alone trains and travels.

The encoder is all of a model but its ``head``. Frozen, its parameters do not train and its running statistics
do not move, whatever mode the model is in, so that a record's features are the same throughout a run and need
to be computed once. Every tensor keeps its name: checkpoints and pretrained weights are those of the model
that is not frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

HEAD = "head."

Model = TypeVar("Model", bound=nn.Module)


class FrozenEncoder(nn.Module):
    """Mixin that ``freeze`` puts before the class of a model.

    Attributes:
        takes_features: whether ``features`` is given what ``encode`` returned, and passes it on.
    """

    takes_features: bool
    _encoder: tuple[nn.Module, ...]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features (B, d) of inputs (B, ...), without a gradient and in evaluation mode."""
        training, self.training = self.training, False
        try:
            with torch.no_grad():
                features: torch.Tensor = super().features(x)  # type: ignore[misc]
        finally:
            self.training = training
        return features

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features (B, d) of inputs (B, ...), or of features computed before."""
        return x if self.takes_features else self.encode(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C)."""
        head: Any = self.head
        logits: torch.Tensor = head(self.features(x))
        return logits

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Set the mode of the head; the encoder stays in evaluation mode."""
        super().train(mode)
        for part in self._encoder:
            part.train(False)
        return self


def _frozen_class(plain: type[nn.Module]) -> type[nn.Module]:
    return type(f"Frozen{plain.__name__}", (FrozenEncoder, plain), {})


def freeze(model: Model) -> Model:
    """Freeze all of a model but its head, in place.

    The class of the model is replaced by one of its own with ``FrozenEncoder``, as torch's parametrizations
    do: a module around it would change the names of its tensors.

    Args:
        model: with ``features(x) -> (B, d)``, ``head`` and ``forward = head(features)``.

    Returns:
        The same model. Calling it again changes nothing.

    >>> from tightframe.models.heads import Classifier
    >>> model = freeze(Classifier(nn.Linear(4, 3), 3, 2))
    >>> [name for name, item in model.named_parameters() if item.requires_grad]
    ['head.weight', 'head.bias']
    """
    if isinstance(model, FrozenEncoder):
        return model
    for name, parameter in model.named_parameters():
        if not name.startswith(HEAD):
            parameter.requires_grad_(False)
    frozen: Any = model
    plain: type[nn.Module] = type(model)
    frozen.__class__ = _frozen_class(plain)
    frozen.takes_features = False
    # In a tuple, so that they are not registered a second time.
    frozen._encoder = tuple(part for name, part in model.named_children() if name != HEAD.rstrip("."))
    model.train(model.training)
    return model


def unfrozen(model: nn.Module) -> nn.Module:
    """Give a model back the class that it had before ``freeze``, in place; another is returned as it is.

    For programs that read a network's code; what does not train stays without a gradient.
    """
    if isinstance(model, FrozenEncoder):
        changed: Any = model
        changed.__class__ = type(model).__bases__[1]
        return model.eval()
    return model


def is_frozen(model: nn.Module) -> bool:
    """Return whether the encoder of a model is frozen."""
    return isinstance(model, FrozenEncoder)


def encoder_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (hex) of all tensors of a model's state but those of its head.

    Two models of one class with the same hash have the same features.
    """
    return tensors_sha256({name: item for name, item in state.items() if not name.startswith(HEAD)})


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (hex) of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
