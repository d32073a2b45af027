"""A head of each silo's own (FedPer, FedRep, FedBABU): the body is averaged, the head stays at its silo.

A silo without a head of its own yet begins with the one that the run's seed gives, which is the same
everywhere and never changes at the server: the global model is the common body with it, and is near
chance until silos put theirs on it.
"""

from __future__ import annotations

from dataclasses import replace

from tightframe.learning.halves import ServerRule, Trained, averaging
from tightframe.learning.model_update import BUFFER, UPDATE, copied, model_fields
from tightframe.phases import Contribution, Field, Setting, Tensors

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
