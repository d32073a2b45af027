"""A model, or a head, of each silo's own.

Where there is no global model (FedProto, local-only), a silo draws and keeps one; what leaves is that it has
trained. Three things are told apart: an *own model* is this one, a *personal model* is what a silo makes of
the final model for its own use, and a *site model* is an architecture that a job gives to one site.

With a head of each silo's own (FedPer, FedRep, FedBABU) the body is averaged, and the head stays at its silo,
which begins with the one that the run's seed gives: the same everywhere, it never changes at the server. So
the global model is the common body with it, and is near chance until silos put theirs on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tightframe.learning.halves import ServerRule, Trained, averaging
from tightframe.learning.model_update import BUFFER, UPDATE, copied, initial_model, model_fields, named
from tightframe.phases import Contribution, Field, Setting, SiloView, Tensors

OWN = "own/"
TRAINED = Field("own/trained", (), bound=1.0, mechanism="constant")
"""One from each silo, whatever its records: the sum is the size of the cohort, which everybody knows."""


def trained() -> dict[str, torch.Tensor]:
    """Return a silo's tensor for ``TRAINED``."""
    return {TRAINED.name: torch.ones((), dtype=torch.float64)}


def own_tensors(silo: SiloView, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the silo's model as last committed, by its own names; a draw of its own while it has none."""
    return named(state, OWN) or initial_model(silo.setting, silo.generator("own model").initial_seed())


def kept_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a silo that keeps this model: ``own/<name>``, copies on the CPU."""
    return copied(model.state_dict(), OWN)


def own_trained(silo: SiloView, _model: Tensors, state: Tensors) -> nn.Module:
    """Return the personal model: the silo's own, as it is, in evaluation mode."""
    return silo.load(own_tensors(silo, state)).eval()


HEAD = "head."
_OWN = (UPDATE + HEAD, BUFFER + HEAD)


def in_head(name: str) -> bool:
    """Return whether a parameter or buffer of a model, by its name, belongs to the head."""
    return name.startswith(HEAD)


def in_body(name: str) -> bool:
    """Return whether it belongs to the rest of the model."""
    return not in_head(name)


def averaging_body() -> ServerRule:
    """Average the body as FedAvg does; the head at the server stays as it is."""
    return replace(averaging(), fields=_body_fields, terms=lambda trained: _sent(trained.terms))


def keep_head(trained: Trained) -> Contribution:
    """Keep the trained head as the silo's state; send nothing more."""
    state = trained.model.state_dict()
    return Contribution({}, copied({name: item for name, item in state.items() if in_head(name)}))


def _body_fields(setting: Setting) -> tuple[Field, ...]:
    fields = tuple(item for item in model_fields(setting) if not item.name.startswith(_OWN))
    if not any(item.name.startswith(UPDATE) for item in fields):
        raise ValueError(
            "Expected a network with trainable parameters before its head, which are what silos average, but "
            "it has none; give it a hidden layer, or choose a method that averages the head"
        )
    return fields


def _sent(terms: Tensors) -> Tensors:
    return {name: item for name, item in terms.items() if not name.startswith(_OWN)}


def with_own_head(received: Tensors, state: Tensors) -> Tensors:
    """Put the head that the silo has kept on the body received; without one, keep the common head."""
    return {**received, **{name: item for name, item in state.items() if in_head(name)}}
