"""The class rules: a total of one class is used only where enough silos hold enough records of it.

A per-class total over one or two silos is close to one silo's own number, and a class sum of one
record, or patient, is that record. So a silo contributes to a class only with local records of at least
``min_class_count`` patients, and a class is used only while at least three silos report that they hold it.
The silos report the classes that they hold as a sum of flags: the first sum of a run carries flags only, and
class sums follow for the classes that the next broadcast offers.

Silos and server both apply the rules. They do not stop a silo that sends more than one flag of a class, as
long as the total is at most the number of silos: only ``min_class_count`` and differential privacy protect
against that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.learning.one_sum.feature_sums import COUNTS, RECORDS
from tightframe.learning.one_sum.temperature import KNOWN, LOSSES
from tightframe.learning.one_sum.withdrawal import TOTAL
from tightframe.phases import (
    ADMITTED,
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
from tightframe.rounds.moments import COUNTS as POOLED
from tightframe.rounds.moments import SUMS
from tightframe.rounds.riders.view import RiderView, rider_view

HOLDERS = "classes/holders"
OFFERED = "classes/offered"
MIN_HOLDERS = 3
IN_PRODUCTS, IN_LOSSES, IN_MOMENTS = "classes in products", "classes in losses", "classes in moments"
"""Names in the release profile of the classes that a sum over classes includes."""
STATE = RIDERS + "class_holders"
"""Key in the server's state of the holders of each class in the last opened sum, float64 (C,)."""


def attach(phase: Phase, num_classes: int, *, sums: bool = True) -> Phase:
    """Return a phase under the class rules; the same phase if they apply to none of its fields.

    Args:
        phase: whose per-class fields, and sums over classes, the rules apply to.
        sums: whether the job has sums by class, so that it warns once if no class has enough holders.
    """
    flags = fields(phase.schema, num_classes)
    if not flags.fields:
        return phase

    def broadcast(state: ServerState) -> Tensors:
        return {**phase.broadcast(state), OFFERED: offered(holders_in(state), num_classes)}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        offer = received_offer(received, num_classes)
        view = rider_view(silo)
        counts = view.held_counts() * view.enough_of_class()
        active, least = silo.offers_prototypes, view.min_class_count
        for_method = {name: item for name, item in received.items() if name != OFFERED}
        everything = sums_over_classes(phase.schema) and not bool(offer.any())
        for_method[ADMITTED] = counts >= least if everything else held_classes(counts, least, active) & offer
        contribution = phase.contribute(silo, for_method, state)
        tensors = withhold(
            phase.schema, contribution.tensors, offer=offer, counts=counts, min_count=least, active=active
        )
        return replace(contribution, tensors=tensors)

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        before = holders_in(state)
        admitted, holders = admit(phase.schema, totals, offered(before, num_classes))
        if holders is not None:
            cohort.check_flags(totals, [HOLDERS])
            state = with_holders(state, holders)
        reading = phase.read(state, admitted, cohort)
        if sums and holders is not None and before is None and not offered(holders, num_classes).any():
            return reading.warning(
                f"no class has {MIN_HOLDERS} holders: class sums are never used, and the method runs "
                "without them"
            )
        return reading

    return replace(phase, schema=phase.schema + flags, broadcast=broadcast, contribute=contribute, read=read)


def own_classes(silo: RiderView, schema: Schema, received: Tensors) -> dict[str, torch.Tensor]:
    """Return this silo's numbers of records and flags of each class, which do not depend on its class sums.

    Args:
        schema: of the phase; of its per-class fields those of shape (C,) are numbers of records, or with a
            bound of 1 flags, and those of shape (K, 2) numbers of records with a finding and without it.
            ``feature_sums.RECORDS`` is the sum of the first.
    """
    counts = silo.held_counts()
    shapes = {(len(counts),), (len(counts), 2)} if silo.setting.findings else {(len(counts),)}
    counts_schema = Schema(
        tuple(
            item for item in schema.fields if item.per_class and item.shape in shapes and item.name != HOLDERS
        )
    )
    # As ``learning.few_records.distinct_rows.counts_phase`` and pooled class counts have them.
    once = any(item.name == POOLED or item.name.endswith("/rows") for item in counts_schema.fields)
    records = silo.class_counts("train", distinct=once).to(torch.float64)

    def value(item: Field) -> torch.Tensor:
        if len(item.shape) == 2:
            return silo.finding_counts().to(torch.float64)
        return torch.ones_like(records) if item.bound == 1.0 else records

    fields = {item.name: value(item) for item in counts_schema.fields}
    ruled = OFFERED in received  # else the job has no class rules, and a term has all classes
    if ruled:
        counts = counts * silo.enough_of_class()
    offer = received_offer(received, len(counts)) if ruled else torch.ones_like(counts).bool()
    own = withhold(
        counts_schema,
        fields,
        offer=offer,
        counts=counts,
        min_count=silo.min_class_count if ruled else 1,
        active=silo.offers_prototypes,
    )
    return own | ({RECORDS: own[COUNTS].sum()} if RECORDS in schema else {})


def with_holders(state: ServerState, holders: NDArray[np.float64]) -> ServerState:
    """Return the state with the holders of each class (C,)."""
    return state.evolve(extra={**state.extra, STATE: torch.from_numpy(np.array(holders, dtype=np.float64))})


def holders_in(state: ServerState) -> NDArray[np.float64] | None:
    """Return the holders of each class (C,) in the last opened sum; None before the first."""
    return state.extra[STATE].numpy() if STATE in state.extra else None


def fields(schema: Schema, num_classes: int) -> Schema:
    """Return the flags (C,) for a phase's per-class fields, and sums over classes; empty if it has none."""
    if not (sums_over_classes(schema) or any(item.per_class for item in schema.fields)):
        return Schema(())
    return Schema((Field(HOLDERS, (num_classes,), ring=64, bound=1.0, static=True, per_class=True),))


def offered(holders: NDArray[np.float64] | None, num_classes: int) -> torch.Tensor:
    """Return the classes that a broadcast offers, uint8 (C,), given the holders in the last opened sum."""
    if holders is None:
        return torch.zeros(num_classes, dtype=torch.uint8)
    return torch.from_numpy((holders >= MIN_HOLDERS - 0.5).astype(np.uint8))


def received_offer(received: Tensors, num_classes: int) -> torch.Tensor:
    """Return the classes that a broadcast offers, bool (C,).

    Raises:
        ContributionError: TF-403 if the broadcast has no offer, or one of another shape.
    """
    offer = received.get(OFFERED)
    if offer is None or offer.dtype != torch.uint8 or tuple(offer.shape) != (num_classes,):
        raise ContributionError(
            f"Expected the broadcast to offer classes as uint8 ({num_classes},), but it does not: the server "
            "runs another job configuration or package version."
        )
    return offer.bool()


def sums_over_classes(schema: Schema) -> bool:
    """Return True if a phase sums over classes, so that its silos leave out those that are not offered.

    If none is offered there are no sums by class, and such a sum is of all classes.
    """
    return any(item.over_classes for item in schema.fields)


def sums_by_class(item: Field) -> bool:
    """Return True for sums of vectors by class, but not for counts of findings and of an evaluation."""
    counts = item.name == POOLED or item.name.startswith("evaluation/")
    return item.per_class and len(item.shape) > 1 and not counts


def summed_classes(schema: Schema, received: Tensors, num_classes: int) -> dict[str, torch.Tensor]:
    """Return the classes that sums over classes include, bool (C,), by name in the release profile.

    They follow from all silos' flags: two such totals may differ by one class's part alone. In a withdrawal
    they are the classes that stay. Sums without a class are left out.
    """
    by_name = {}
    if any(item.products and not item.per_class for item in schema.fields):
        by_name[IN_PRODUCTS] = torch.ones(num_classes, dtype=torch.bool)
        if OFFERED in received:
            by_name[IN_PRODUCTS] = received_offer(received, num_classes)
        if (stay := received.get(TOTAL + COUNTS)) is not None:
            by_name[IN_PRODUCTS] = by_name[IN_PRODUCTS] & stay.bool()
    if SUMS in schema and schema[SUMS].over_classes and OFFERED in received:
        offer = received_offer(received, num_classes)
        by_name[IN_MOMENTS] = offer if bool(offer.any()) else torch.ones_like(offer)
    if LOSSES in schema:
        by_name[IN_LOSSES] = received[KNOWN].bool()
    return {name: classes for name, classes in by_name.items() if bool(classes.any())}


def held_classes(counts: torch.Tensor, min_count: int, active: bool) -> torch.Tensor:
    """Return the classes that a silo reports as held, bool (C,); see ``withhold``."""
    return (counts >= min_count) & active


def withhold(
    schema: Schema,
    tensors: Tensors,
    *,
    offer: torch.Tensor,
    counts: torch.Tensor,
    min_count: int,
    active: bool,
) -> dict[str, torch.Tensor]:
    """Apply the class rules to a silo's tensors, and add its flags.

    Args:
        schema: the method's fields; withheld rows of its per-class fields are set to zero.
        tensors: the method's contribution.
        offer: classes that the broadcast offers, bool (C,).
        counts: patients with training records of each class at the silo, (C,).
        min_count: ``min_class_count`` of the site.
        active: whether this silo contributes class sums at all.
    """
    held = held_classes(counts, min_count, active)
    allowed = held & offer
    result = dict(tensors)
    for item in schema.fields:
        if item.per_class:
            rows = allowed.view(-1, *[1] * (len(item.shape) - 1))
            result[item.name] = torch.where(rows, result[item.name], torch.zeros_like(result[item.name]))
    result[HOLDERS] = held.to(torch.float64)
    return result


def admit(
    schema: Schema, totals: Totals, offer: torch.Tensor
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64] | None]:
    """Apply the class rules to opened totals.

    Rows of classes that were not offered, or that fewer than three silos hold by this sum's own
    flags, are set to zero.

    Args:
        schema: the method's fields.
        totals: as opened.
        offer: classes that the broadcast offered, uint8 (C,).

    Returns:
        The totals without the flags; the holders (C,), None if the static group was not opened.
    """
    others: Mapping[str, NDArray[np.float64]] = {
        name: item for name, item in totals.items() if name != HOLDERS
    }
    holders = totals.get(HOLDERS)
    if holders is None:
        return dict(others), None
    used = offer.bool().numpy() & (holders >= MIN_HOLDERS - 0.5)
    return {
        name: np.where(used.reshape(-1, *[1] * (item.ndim - 1)), item, 0.0)
        if name in schema and schema[name].per_class
        else item
        for name, item in others.items()
    }, holders
