"""A whole model that each silo has for itself, where there is no global one.

Shared by methods of that kind, which never import each other. A silo's model starts from a draw of its own
random stream in the first round that it is part of, and is the silo's own state from then on.

Such methods sum losses and counts alone, which stay shut where a silo drops out. What a silo has trained is
kept only if the sum with its term was opened, and so a part of it must be for any cohort: ``TRAINED``.
Without that one silo's drop-out would take the round from all, and a silo lost for good every round.
"""

from __future__ import annotations

import torch
from torch import nn

from tightframe.model_update import initial_model
from tightframe.phases import Field, SiloView, Tensors

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
