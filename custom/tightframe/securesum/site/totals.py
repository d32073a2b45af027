"""Check the totals that a site receives, and combine its own term in them.

A total is told with the request for the next term. The site sends combinations of its own term of that
total in the receipt of the next, and reveals shares of the next sum only if everybody's add up to those of
the total. Until then nothing that was computed from the total is opened.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from tightframe.securesum import reading
from tightframe.securesum.checks import commitment, group_layout
from tightframe.securesum.errors import (
    FollowersError,
    MessageError,
    ParametersError,
    StateError,
    TotalError,
    VerificationError,
)
from tightframe.securesum.masks import Accumulator, Layout
from tightframe.securesum.messages import (
    MAX_TERM,
    Group,
    Params,
    Receipt,
    RevealRequest,
    TermRequest,
    Told,
    Total,
    by_group,
    challenge,
)
from tightframe.securesum.primitives import KEY_BYTES
from tightframe.securesum.proofs import Ground
from tightframe.securesum.rules import MAX_SITES
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import Confirmed, Established, Fresh, Revealed, term_name

Kept: TypeAlias = Callable[[str], bytes | None]
"""Returns what earlier steps kept under a name; None if there is nothing."""


@dataclass(frozen=True)
class KeptTerm:
    """A site's term as it keeps it of a slot, secretly.

    Its stored form ends with the integers as they are, so that reading it copies none of them.

    Attributes:
        integers: group -> the masked integers before shares are revealed; z' of the revealed groups after
            that.
        own_keys: group -> the key of the site's own mask; empty after shares are revealed.
        keys: group -> every other site -> the key of the mask with it; empty after shares are revealed.
    """

    integers: Mapping[Group, bytes | memoryview]
    own_keys: Mapping[Group, bytes]
    keys: Mapping[Group, Mapping[str, bytes]]

    def __repr__(self) -> str:
        return f"KeptTerm({sorted(self.integers)})"

    def to_bytes(self) -> bytes:
        """Return the stored form: the length of a head, the head, then the integers of each group."""
        sizes = {group: len(data) for group, data in self.integers.items()}
        head = reading.pack(_Head(sizes, self.own_keys, self.keys).as_value())
        return b"".join((len(head).to_bytes(4, "big"), head, *self.integers.values()))

    @classmethod
    def from_bytes(cls, raw: bytes) -> KeptTerm:
        """Read the stored form.

        Raises:
            MessageError: TF-604.
        """
        start = 4 + int.from_bytes(raw[:4], "big")
        head = _Head.from_bytes(raw[4:start])
        integers, view = {}, memoryview(raw)
        for group, size in head.sizes.items():
            integers[group] = view[start : start + size]
            start += size
        if start != len(raw):
            raise MessageError("a kept term", expected=f"{start} bytes", found=f"{len(raw)} bytes")
        return cls(integers, head.own_keys, head.keys)

    def revealed(
        self, state: Established, schema: str, survivors: Sequence[str], groups: Sequence[Group]
    ) -> KeptTerm:
        """Return z' of the groups for which shares are revealed, without any key.

        Without keys it is z' already: a crash came after it was kept and before the state was. The journal
        allows no other survivors than those of then.
        """
        if not self.keys:
            return KeptTerm({group: self.integers[group] for group in groups}, {}, {})
        fields = state.epoch.params.schemas[schema]
        return KeptTerm(
            {
                group: self._revealed(group, group_layout(fields, group), state.epoch.name, survivors)
                for group in groups
            },
            {},
            {},
        )

    def _revealed(self, group: Group, layout: Layout, own: str, survivors: Sequence[str]) -> bytes:
        """Return z' of one group: without the site's own mask and those with sites that dropped out."""
        term = Accumulator(layout, self.integers[group])
        keys = {name: key for name, key in self.keys[group].items() if name not in survivors}
        # The site added the stream of a site after it, and subtracted that of a site before it.
        term.add_streams(
            [key for name, key in keys.items() if name < own],
            [self.own_keys[group], *(key for name, key in keys.items() if own < name)],
        )
        return term.to_bytes()


@dataclass(frozen=True)
class _Head(reading.Message):
    """Header before the integers in a kept term's stored form."""

    sizes: Annotated[Mapping[Group, int], by_group(reading.integer(0, MAX_TERM))]
    own_keys: Annotated[Mapping[Group, bytes], by_group(reading.blob(KEY_BYTES))] = field(repr=False)
    keys: Annotated[
        Mapping[Group, Mapping[str, bytes]], by_group(reading.mapping(reading.blob(KEY_BYTES), 0, MAX_SITES))
    ] = field(repr=False)


def check_told(
    state: Confirmed | Established, request: TermRequest, history: journal.History
) -> Total | None:
    """Check the total that a request for a term rests on; None if this epoch has none yet.

    The server's last opened total is the one that it told before, or one of a later sum. Nothing that it
    opened is withdrawn, and nothing that it passed over comes back. A sum for which this site gave its shares
    counts as opened: else one state could be summed again and again.

    Raises:
        ParametersError: TF-601, if this epoch has no such slot.
        TotalError: TF-622, if the total was withheld or replayed, or is not of the sum for which this site
            revealed its shares: other survivors, groups or sizes.
        SurvivorsError: TF-611, if this site signed another survivor set of that sum.
    """
    check_slot(request.slot, state.epoch.params)
    told, slots = (state.told, state.slots) if isinstance(state, Established) else (None, ())
    given = -1 if isinstance(state, Confirmed) else state.last_revealed
    if not request.total:
        if given >= 0:
            raise _refused(
                "a total", f"at least that of slot {given}, for which this site gave shares", "none"
            )
        if told is not None:
            raise _refused("a total", f"at least that of sum {told.sum_id}, announced before", "none")
        return None
    total = Total.from_bytes(request.total)
    what, params = f"the total of sum {total.sum_id}", state.epoch.params
    last = max((slot for slot, item in enumerate(slots) if not isinstance(item, Fresh)), default=-1)
    if total.slot < given:
        raise _refused(what, f"of slot {given} at least, for which this site gave shares", f"of {total.slot}")
    if told is not None and total.slot == told.slot:
        if total.told() != told:
            raise _refused(what, "the one announced before", "another")
    elif not last <= total.slot < request.slot:
        raise _refused(
            what,
            f"of a slot from {max(last, 0)} to {request.slot - 1}, or announced before",
            f"of {total.slot}",
        )
    _check_content(what, total, params, state.epoch.least)
    _check_own(what, total, state, history, request.seeds)
    return total


def check_slot(slot: int, params: Params) -> None:
    """Refuse a slot that an epoch does not have, before a record is read for it.

    Raises:
        ParametersError: TF-601.
    """
    if slot >= params.slots:
        raise ParametersError("the slot", expected=f"below {params.slots}", found=str(slot))


def _check_content(what: str, total: Total, params: Params, least: int) -> None:
    """Check schema, survivors and sizes of a total."""
    if total.schema not in params.schemas:
        raise _refused(f"the schema of {what}", f"one of {sorted(params.schemas)}", repr(total.schema))
    in_order = [name for name in params.roster if name in total.survivors]
    if list(total.survivors) != in_order or len(in_order) < least:
        raise _refused(
            f"the survivors of {what}",
            f"at least {least} sites of the roster, sorted, each once",
            str(list(total.survivors)),
        )
    layouts = {group: group_layout(params.schemas[total.schema], group) for group in ("update", "static")}
    allowed = ["update", "static"] if layouts["static"].nbytes else ["update"]
    if "update" not in total.groups or not set(total.groups) <= set(allowed):
        raise _refused(f"the groups of {what}", f"update, of {allowed}", str(sorted(total.groups)))
    for group, data in total.groups.items():
        if len(data) != layouts[group].nbytes:
            raise _refused(f"the {group} group of {what}", f"{layouts[group].nbytes} bytes", str(len(data)))


def _check_own(
    what: str,
    total: Total,
    state: Confirmed | Established,
    history: journal.History,
    seeds: Mapping[str, Mapping[Group, bytes]],
) -> None:
    """Check a total against what this site did in its slot; before its first term it did nothing."""
    params = state.epoch.params
    history.check_survivors(params.job, params.epoch, total.slot, total.survivors)
    masked = state.sums if isinstance(state, Established) else ()
    held = state.slots[total.slot] if isinstance(state, Established) else None
    if isinstance(held, Revealed):
        mine = (held.sum_id, held.schema)
        if (total.sum_id, total.schema) != mine or not set(total.groups) <= set(held.groups):
            raise _refused(
                what,
                f"of sum {held.sum_id} and {list(held.groups)}, for which this site gave its shares",
                f"{total.sum_id}, {sorted(total.groups)}",
            )
        if total.receipts != held.receipts:
            raise _refused(f"the receipts of {what}", "those for which this site gave its shares", "others")
        _check_opened(what, total, state, seeds)
    elif state.epoch.name in total.survivors and total.sum_id not in masked:
        raise _refused(f"the survivors of {what}", "without this site, which has no term in it", "with it")


def _check_opened(
    what: str,
    total: Total,
    state: Confirmed | Established,
    seeds: Mapping[str, Mapping[Group, bytes]],
) -> None:
    """Check that the server knows this site's term under its masks with others: it has b of each group.

    For the whole roster this site gave its shares without knowing that others did: t may have signed a set
    without it, and opened its pair masks. Then combinations of its term would show the term itself.
    """
    name = state.epoch.name
    for group in total.groups:
        committed = state.peers[name].commitment(total.slot, group, "self")
        seed = seeds.get(name, {}).get(group, b"")
        if not hmac.compare_digest(commitment(name, total.slot, group, "self", seed), committed):
            raise _refused(
                f"the {group} seed of this site in {what}", "the one that it committed to", "another"
            )


def combined(
    state: Established, total: Total | None, kept: Kept
) -> tuple[Told | None, dict[Group, bytes], dict[Group, bytes]]:
    """Return a total without its integers, its combinations, and those of this site's own term of it.

    The last are empty if the site gave no shares for that total. A site that did knows the receipts of its
    terms; another takes their digest as told, and compares it by the receipts of the next sum.

    Args:
        total: checked by ``check_told``; None if none was told.
        kept: what earlier steps kept.

    Raises:
        StateError: TF-609, if the term is lost.
    """
    if total is None:
        return None, {}, {}
    told = total.told()
    ground, coefficients = ground_of(state, told), challenge(state.session, told)
    if not isinstance(state.slots[told.slot], Revealed):
        return told, ground.combine(coefficients, total.groups), {}
    own = KeptTerm.from_bytes(require(kept(term_name(told.slot)), told.slot)).integers
    expected, mine = ground.combine_all(coefficients, (total.groups, own))
    return told, expected, mine


def require(kept: bytes | None, slot: int) -> bytes:
    """Return what this site kept of a slot.

    Raises:
        StateError: TF-609, if it is lost.
    """
    if kept is None:
        raise StateError(f"what this site kept of slot {slot}", expected="at hand", found="nothing")
    return kept


def check_followers(receipts: Sequence[Receipt], params: Params) -> None:
    """Check that more sites computed the state by themselves than are assumed to collude.

    Raises:
        FollowersError: TF-624.
    """
    following, needed = sum(item.follows for item in receipts), params.colluders + 1
    if following < needed:
        raise FollowersError(
            "the number of silos that computed the state of this sum by themselves",
            expected=f"at least {needed}",
            found=str(following),
        )


def check_total(ground: Ground, request: RevealRequest, expected: Mapping[Group, bytes]) -> None:
    """Check that the last total is the sum of its terms.

    Args:
        request: its receipts' signatures are checked already.
        expected: group -> combinations of the total that this site was told.

    Raises:
        VerificationError: TF-623.
        SignatureError: TF-603, if a receipt in a proof was not signed by its site.
    """
    parts = {item.name: item.combinations for item in request.receipts if item.combinations}
    outside = sorted({*parts, *request.missing} - set(ground.told.survivors))
    if outside:
        raise VerificationError(
            f"the proof of the total of sum {ground.told.sum_id}",
            expected=f"of {list(ground.told.survivors)}",
            found=f"also of {outside}",
        )
    for name, combined in parts.items():
        if not ground.has_form(combined):
            raise VerificationError(
                f"the combinations of {name} in the proof of sum {ground.told.sum_id}",
                expected=f"of the groups {list(ground.told.groups)}, of their size",
                found="others",
                blamed=name,
            )
    if request.missing:
        ground.check_dropped(request.dropped)
    coefficients = challenge(ground.session, ground.told)
    for name, proof in request.missing.items():
        parts[name] = ground.combine(coefficients, ground.show(name, proof, request.dropped))
    ground.check_sum(expected, parts)


def ground_of(state: Established, told: Told) -> Ground:
    """Return what a proof of this total is checked against."""
    return Ground(state.session, state.epoch.params, state.peers, told)


def _refused(what: str, expected: str, found: str) -> TotalError:
    return TotalError(what, expected=expected, found=found)
