"""The class rules: a total of one class is used only where enough silos hold enough records of it.

A per-class total over one or two silos is close to one silo's own number, and a class sum of one
record is that record. So a silo has a say in a class only with ``min_class_count`` local records
of it, and a class counts only while at least three silos say that they hold it. Whoever holds what
travels as a sum of flags: the first sum of a run carries flags only, and class sums follow for the
classes that the next broadcast offers.

This binds silos and server alike. A server that lies about who holds a class is not stopped by
it; then ``min_class_count`` and differential privacy are what holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.phases import (
    RIDERS,
    Cohort,
    Contribution,
    Field,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)

if TYPE_CHECKING:
    from tightframe.rounds.silo.view import LocalSilo

HOLDERS = "classes/holders"
OFFERED = "classes/offered"
MIN_HOLDERS = 3
STATE = RIDERS + "class_holders"
"""In the server's state: holders of each class in the last opened sum, float64 (C,)."""


def riding(phase: Phase, num_classes: int) -> Phase:
    """A phase under the class rules; the same phase where it has no per-class field.

    Args:
        phase: whose per-class fields the rules apply to.
        num_classes: C.
    """
    flags = fields(phase.schema, num_classes)
    if not flags.fields:
        return phase

    def broadcast(state: ServerState) -> Tensors:
        return {**phase.broadcast(state), OFFERED: offered(remembered(state), num_classes)}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        offer = received_offer(received, num_classes)
        seen = {name: item for name, item in received.items() if name != OFFERED}
        made = phase.contribute(silo, seen, state)
        tensors = withhold(
            phase.schema,
            made.tensors,
            offer=offer,
            counts=silo.class_counts("train", distinct=True),
            least=cast("LocalSilo", silo).min_class_count,
            speaks=silo.offers_prototypes,
        )
        return replace(made, tensors=tensors)

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        before = remembered(state)
        kept, holders = admit(phase.schema, totals, offered(before, num_classes))
        if holders is not None:
            state = remembering(state, holders)
        reading = phase.read(state, kept, cohort)
        if holders is not None and before is None and not offered(holders, num_classes).any():
            return reading.warning(
                f"no class has {MIN_HOLDERS} holders: class sums are never used, and the method runs "
                "without them"
            )
        return reading

    return replace(phase, schema=phase.schema + flags, broadcast=broadcast, contribute=contribute, read=read)


def remembering(state: ServerState, holders: NDArray[np.float64]) -> ServerState:
    """The state with the holders of each class (C,)."""
    return state.evolve(extra={**state.extra, STATE: torch.from_numpy(np.array(holders, dtype=np.float64))})


def remembered(state: ServerState) -> NDArray[np.float64] | None:
    """Holders of each class (C,) in the last opened sum; None before the first."""
    return state.extra[STATE].numpy() if STATE in state.extra else None


def fields(schema: Schema, num_classes: int) -> Schema:
    """The flags that go with a method's per-class fields: holders of each class (C,); none without them."""
    if not any(item.per_class for item in schema.fields):
        return Schema(())
    return Schema((Field(HOLDERS, (num_classes,), ring=64, bound=1.0, static=True, per_class=True),))


def offered(holders: NDArray[np.float64] | None, num_classes: int) -> torch.Tensor:
    """Which classes a broadcast offers, uint8 (C,), by the holders in the last opened sum."""
    if holders is None:
        return torch.zeros(num_classes, dtype=torch.uint8)
    return torch.from_numpy((holders >= MIN_HOLDERS - 0.5).astype(np.uint8))


def received_offer(received: Tensors, num_classes: int) -> torch.Tensor:
    """The broadcast's offer, bool (C,).

    Raises:
        ContributionError: TF-403 if the broadcast has none, or one of another shape.
    """
    offer = received.get(OFFERED)
    if offer is None or offer.dtype != torch.uint8 or tuple(offer.shape) != (num_classes,):
        raise ContributionError(
            f"Expected the broadcast to offer classes as uint8 ({num_classes},), but it does not: the server "
            "runs another job configuration or package version."
        )
    return offer.bool()


def withhold(
    schema: Schema, tensors: Tensors, *, offer: torch.Tensor, counts: torch.Tensor, least: int, speaks: bool
) -> dict[str, torch.Tensor]:
    """A silo's tensors under the class rules, its own flags included.

    Args:
        schema: the method's fields; rows of the per-class ones are set to zero where a rule says so.
        tensors: what the method contributes.
        offer: classes that the broadcast offers, bool (C,).
        counts: the silo's training records of each class, (C,).
        least: ``min_class_count`` of the site.
        speaks: whether this silo submits class sums at all.
    """
    held = (counts >= least) & speaks
    allowed = held & offer
    kept = dict(tensors)
    for item in schema.fields:
        if item.per_class:
            rows = allowed.view(-1, *[1] * (len(item.shape) - 1))
            kept[item.name] = torch.where(rows, kept[item.name], torch.zeros_like(kept[item.name]))
    kept[HOLDERS] = held.to(torch.float64)
    return kept


def admit(
    schema: Schema, totals: Totals, offer: torch.Tensor
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64] | None]:
    """What a method may use of opened totals, and who holds what.

    Rows of classes that were not offered, or that fewer than three silos hold by this sum's own
    flags, are set to zero.

    Returns:
        The totals without the flags; the holders (C,), None if the static group was not opened.
    """
    kept: Mapping[str, NDArray[np.float64]] = {name: item for name, item in totals.items() if name != HOLDERS}
    holders = totals.get(HOLDERS)
    if holders is None:
        return dict(kept), None
    used = offer.bool().numpy() & (holders >= MIN_HOLDERS - 0.5)
    return {
        name: np.where(used.reshape(-1, *[1] * (item.ndim - 1)), item, 0.0)
        if name in schema and schema[name].per_class
        else item
        for name, item in kept.items()
    }, holders
