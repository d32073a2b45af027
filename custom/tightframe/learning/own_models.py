"""A model of each silo's own, where there is no global one (FedProto, local-only).

The model is drawn and kept at the silo; what leaves is that it has trained. Three things are told apart:
an *own model* is this one, a *personal model* is what a silo makes of the final model for its own use, and
a *site model* is an architecture that a job gives to one site.
"""

from __future__ import annotations

import torch
from torch import nn

from tightframe.learning.model_update import copied, initial_model
from tightframe.phases import Field, SiloView, Tensors

OWN = "own/"
TRAINED = Field("own/trained", (), bound=1.0, mechanism="constant")
"""One from each silo, whatever its records: the sum is the size of the cohort, which everybody knows."""


def trained() -> dict[str, torch.Tensor]:
    """Return a silo's tensor for ``TRAINED``."""
    return {TRAINED.name: torch.ones((), dtype=torch.float64)}


def own_tensors(silo: SiloView, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the silo's model as last committed, by its own names; a draw of its own while it has none."""
    kept = {name.removeprefix(OWN): item for name, item in state.items() if name.startswith(OWN)}
    return kept or initial_model(silo.setting, silo.generator("own model").initial_seed())


def kept_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a silo that keeps this model: ``own/<name>``, copies on the CPU."""
    return copied(model.state_dict(), OWN)


def own_trained(silo: SiloView, _model: Tensors, state: Tensors) -> nn.Module:
    """Return the personal model: the silo's own, as it is, in evaluation mode."""
    return silo.load(own_tensors(silo, state)).eval()
