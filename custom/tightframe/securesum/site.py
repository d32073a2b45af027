"""A site's half of the secure sum: pure state machines.

Every handler takes a state and a message and returns a ``Step``: the state from now on, the reply,
and the journal entries. The caller makes the entries durable, then the state, then sends the
reply; and it answers a resent message with the reply that it kept, because most handlers refuse to
run twice. The first half, ``advertise`` and ``confirm``, is in ``site_setup``; the states are in
``site_state``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tightframe.securesum import journal
from tightframe.securesum.checks import group_layout, masked_hash, pair_mask, verify, verify_receipt
from tightframe.securesum.errors import (
    InconsistencyError,
    ParametersError,
    ReplayError,
    StateError,
    StaticCohortError,
    SurvivorsError,
)
from tightframe.securesum.masks import Accumulator, Layout, self_key
from tightframe.securesum.messages import (
    GROUPS,
    Agreement,
    AgreementRequest,
    FieldSpec,
    Group,
    Masked,
    Receipt,
    Reveal,
    RevealRequest,
    TermRequest,
    survivors_signed,
)
from tightframe.securesum.primitives import HASH_BYTES, ed25519_sign
from tightframe.securesum.site_setup import (
    Step,
    advertise,
    confirm,
    establish,
    require_state,
    setup_digest,
)
from tightframe.securesum.site_state import (
    Abandoned,
    Advertised,
    Confirmed,
    Epoch,
    Established,
    Fresh,
    Revealed,
    SlotState,
    slot_secret,
    slot_share,
)
from tightframe.securesum.site_state import Agreed as AgreedSlot
from tightframe.securesum.site_state import Masked as MaskedSlot

__all__ = [
    "Advertised",
    "Confirmed",
    "Established",
    "Step",
    "advertise",
    "agree",
    "confirm",
    "mask",
    "reveal",
]


def mask(
    state: Confirmed | Established,
    request: TermRequest,
    *,
    fields: tuple[FieldSpec, ...],
    broadcast: bytes,
    term: Mapping[Group, bytes],
    history: journal.History,
    profile: journal.Profile | None = None,
) -> Step[Established, Masked]:
    """Mask a term with the secrets of one slot, which are then gone.

    Once a masked term is out, t others can open it without this site. So what a term binds its site to,
    cohort and release profile, is in the journal before it leaves, whether or not the site is ever asked
    to reveal; and it stays there where a drop-out kept the static group shut.

    Slots only rise. Whatever an older slot still holds is erased here: its sum is over or was given
    up, and a server that brings this about early gets less from this site, never more.

    Args:
        state: ``Confirmed`` before the first term of an epoch, which needs a setup in the request.
        request: what the server asks for.
        fields: this site's own schema.
        broadcast: SHA-256 of the broadcast as it was received.
        term: the encoded integers of each group, little-endian in schema order.
        history: all that this site's journal holds.
        profile: how this term was formed; None where noise stands in for one profile.

    Raises:
        ParametersError: TF-601, if slot or schema are not those of the epoch's parameters.
        MessageError: TF-604, if a term has not the schema's size.
        ReplayError: TF-608, if the slot or the sum was used before, or another setup came before.
        StateError: TF-609, if the setup is missing.
        StaticCohortError: TF-612, if the static group was masked for another cohort meanwhile.
        ReleaseProfileError: TF-617, if terms were formed in another way meanwhile.
        ProtocolError: as ``establish`` raises with the first request.
    """
    require_state(state, Confirmed, Established)
    params, slot = state.epoch.params, request.slot
    _check_request(state, request, fields)
    if len(broadcast) != HASH_BYTES or not set(term) <= set(GROUPS):
        raise ValueError("Expected a SHA-256 of the broadcast and terms of the two groups only.")
    history.check_slot(params.job, params.epoch, slot, request.sum_id)
    layouts = {group: group_layout(fields, group) for group in GROUPS}
    bound = _bound(state.epoch, layouts["static"], profile, history)
    established = _established(state, request)
    fresh = established.slots[slot]
    if not isinstance(fresh, Fresh):
        raise ReplayError(f"slot {slot}", expected="fresh", found=type(fresh).__name__.lower())
    if request.sum_id in established.sums:
        raise ReplayError(
            f"the sum in slot {slot}", expected="a new one", found=f"{request.sum_id}, used before"
        )
    masked = {
        group: _masked(established, fresh, slot, group, layouts[group], term.get(group, b""))
        for group in GROUPS
    }
    receipt = _receipt(established, request, broadcast, masked)
    slots = (
        *(_let_go(item) for item in established.slots[:slot]),
        MaskedSlot(request.schema, receipt, fresh.shares),
        *established.slots[slot + 1 :],
    )
    used = journal.SlotUsed(params.job, params.epoch, slot, request.sum_id, receipt.update, receipt.static)
    after = replace(established, sums=(*established.sums, request.sum_id), slots=slots)
    return Step(after, Masked(masked["update"], masked["static"], receipt), (*bound, used))


def agree(
    state: Established, request: AgreementRequest, *, history: journal.History
) -> Step[Established, Agreement]:
    """After a drop-out: sign the one survivor set of a slot.

    Raises:
        SignatureError: TF-603, if a receipt is not its site's own of this session.
        StateError: TF-609, if this site has nothing masked in this slot, or no longer.
        InconsistencyError: TF-610, if a receipt is of another sum or another broadcast than this site's.
        SurvivorsError: TF-611, if the set is everybody, too small, lacks this site, or is a second one.
    """
    require_state(state, Established)
    epoch, params = state.epoch, state.epoch.params
    held, survivors = _survivors(state, request.slot, request.receipts, history)
    if survivors == params.roster:
        raise SurvivorsError(
            f"the survivors to sign in slot {request.slot}",
            expected="fewer than the roster",
            found="everybody, which needs no signature",
        )
    signed = survivors_signed(state.session, request.slot, held.receipt.sum_id, survivors)
    reply = Agreement(epoch.name, request.slot, ed25519_sign(state.signing, signed))
    entry = journal.Agreed(params.job, params.epoch, request.slot, survivors)
    agreed = AgreedSlot(held.schema, held.receipt, held.shares, survivors)
    return Step(state.with_slot(request.slot, agreed), reply, (entry,))


def reveal(
    state: Established, request: RevealRequest, *, history: journal.History
) -> Step[Established, Reveal]:
    """Give this site's shares of a slot: of b for the survivors, of s for the others.

    If everybody survived, receipts are enough. Else at least t sites must have signed exactly the
    set that this site signed. Two openings of one slot over different sets would need t - c honest
    sites each, which 2t > n + c excludes.

    Raises:
        SignatureError: TF-603, if a receipt or an agreement is not its site's own.
        StateError: TF-609, if this site has nothing masked in this slot, or no longer.
        InconsistencyError: TF-610, if a receipt is of another sum or another broadcast than this site's.
        SurvivorsError: TF-611, if the set is too small, lacks this site, was not signed by it or by
            fewer than t, or is a second one.
    """
    require_state(state, Established)
    epoch, params, slot = state.epoch, state.epoch.params, request.slot
    held, survivors = _survivors(state, slot, request.receipts, history)
    if survivors != params.roster:
        _check_agreements(state, held, survivors, request.agreements)
    groups = _groups(state, held, survivors, history)
    for group in groups:
        history.check_kinds(params.job, params.epoch, slot, survivors, group)
    shares = {
        group: {
            dealer: slot_share(held.shares, place, group, "self" if dealer in survivors else "pair")
            for place, dealer in enumerate(params.roster)
        }
        if group in groups
        else {}
        for group in GROUPS
    }
    unsigned = Reveal(epoch.name, slot, shares["update"], shares["static"], b"")
    reply = replace(unsigned, signature=ed25519_sign(state.signing, unsigned.signed(state.session)))
    entries: list[journal.Entry] = [journal.Revealed(params.job, params.epoch, slot, survivors, groups)]
    if "static" in groups:
        entries.append(journal.StaticOpened(epoch.dataset, survivors, params.lineage))
    return Step(state.with_slot(slot, Revealed(survivors)), reply, tuple(entries))


def _bound(
    epoch: Epoch, static: Layout, profile: journal.Profile | None, history: journal.History
) -> tuple[journal.Entry, ...]:
    """What this term binds the site to that is not on record yet.

    Raises:
        StaticCohortError: TF-612.
        ReleaseProfileError: TF-617.
    """
    params, dataset = epoch.params, epoch.dataset
    bound: list[journal.Entry] = []
    if params.static_open and static.nbytes:
        if not epoch.any_static_cohort:
            history.check_static(dataset, params.roster)
        if not history.static_known(dataset, params.roster):
            bound.append(journal.StaticMasked(dataset, params.roster, params.lineage))
    if profile is not None:
        history.check_profile(dataset, profile)
        if profile not in history.profiles(dataset):
            bound.append(journal.ProfileUsed(dataset, profile, params.lineage))
    return tuple(bound)


def _check_request(
    state: Confirmed | Established, request: TermRequest, fields: tuple[FieldSpec, ...]
) -> None:
    params = state.epoch.params
    if request.slot >= params.slots:
        raise ParametersError("the slot", expected=f"below {params.slots}", found=str(request.slot))
    agreed = params.schemas.get(request.schema)
    if agreed is None:
        raise ParametersError(
            "the schema", expected=f"one of {sorted(params.schemas)}", found=repr(request.schema)
        )
    if agreed != fields:
        differing = {item.name for item in set(agreed) ^ set(fields)}
        raise ParametersError(
            f"the fields of schema {request.schema}",
            expected="this site's own, in their order",
            found=f"a difference in {sorted(differing) or 'the order'}",
        )


def _established(state: Confirmed | Established, request: TermRequest) -> Established:
    if isinstance(state, Confirmed):
        if not request.setup:
            raise StateError("the first request of an epoch", expected="with a setup", found="none")
        return establish(state, request.setup)
    if request.setup and setup_digest(request.setup) != state.setup:
        raise ReplayError("the setup", expected="the one that this epoch began with", found="another")
    return state


def _masked(state: Established, fresh: Fresh, slot: int, group: Group, layout: Layout, data: bytes) -> bytes:
    """enc(x) + PRG(b) + the sum of PRG(m_ij) over later sites - that over earlier sites."""
    total = Accumulator(layout, data)
    own = state.epoch.name
    seed, private = slot_secret(fresh.secrets, group, "self"), slot_secret(fresh.secrets, group, "pair")
    plus = [self_key(seed.expose(), state.session, slot, group, own)]
    minus: list[bytes] = []
    for name, peer in state.peers.items():
        if name != own:
            public = peer.slot_key(slot, group)
            key = pair_mask(private, public, state.session, slot, group, own=own, other=name)
            (plus if own < name else minus).append(key)
    total.add_streams(plus, minus)
    return total.to_bytes()


def _receipt(
    state: Established, request: TermRequest, broadcast: bytes, masked: Mapping[Group, bytes]
) -> Receipt:
    unsigned = Receipt(
        name=state.epoch.name,
        slot=request.slot,
        sum_id=request.sum_id,
        broadcast=broadcast,
        update=masked_hash(masked["update"]),
        static=masked_hash(masked["static"]),
        signature=b"",
    )
    return replace(unsigned, signature=ed25519_sign(state.signing, unsigned.signed(state.session)))


def _let_go(slot: SlotState) -> SlotState:
    """What becomes of an older slot: nothing of it is kept but for whom it was opened."""
    return slot if isinstance(slot, Revealed) else Abandoned()


def _survivors(
    state: Established, slot: int, receipts: Sequence[Receipt], history: journal.History
) -> tuple[MaskedSlot | AgreedSlot, tuple[str, ...]]:
    """The slot, and the survivor set that all receipts of this very sum make up."""
    epoch, params = state.epoch, state.epoch.params
    if slot >= params.slots:
        raise StateError("the slot", expected=f"below {params.slots}", found=str(slot))
    survivors = tuple(item.name for item in receipts)
    history.check_survivors(params.job, params.epoch, slot, survivors)
    held = state.slots[slot]
    if isinstance(held, AgreedSlot | Revealed) and held.survivors != survivors:
        raise SurvivorsError(
            f"the survivors of slot {slot}",
            expected=f"those answered for before, {list(held.survivors)}",
            found=str(list(survivors)),
        )
    if not isinstance(held, MaskedSlot | AgreedSlot):
        raise StateError(f"slot {slot}", expected="masked", found=type(held).__name__.lower())
    known = [name for name in params.roster if name in survivors]
    if list(survivors) != known or epoch.name not in known:
        raise SurvivorsError(
            f"the survivors of slot {slot}",
            expected=f"sites of the roster, sorted, each once, with {epoch.name}",
            found=str(list(survivors)),
        )
    if len(survivors) < epoch.least:
        raise SurvivorsError(
            f"the number of survivors of slot {slot}",
            expected=f"at least {epoch.least}",
            found=str(len(survivors)),
        )
    for receipt in receipts:
        _check_receipt(state, held.receipt, receipt)
    return held, survivors


def _check_receipt(state: Established, own: Receipt, receipt: Receipt) -> None:
    verify_receipt(receipt, state.session, state.peers[receipt.name].session_key)
    for what, expected, found in (
        ("slot", str(own.slot), str(receipt.slot)),
        ("sum", str(own.sum_id), str(receipt.sum_id)),
        ("broadcast", own.broadcast.hex(), receipt.broadcast.hex()),
    ):
        # Nobody is blamed: a server that shows sites different models causes this as well.
        if expected != found:
            raise InconsistencyError(f"the {what} of {receipt.name}", expected=expected, found=found)
    if receipt.name == own.name and receipt != own:
        raise InconsistencyError(
            f"the receipt of {own.name}", expected="as this site sent it", found="another"
        )


def _check_agreements(
    state: Established,
    held: MaskedSlot | AgreedSlot,
    survivors: tuple[str, ...],
    agreements: Mapping[str, bytes],
) -> None:
    slot, threshold = held.receipt.slot, state.epoch.params.threshold
    if isinstance(held, MaskedSlot):
        raise SurvivorsError(
            f"the survivors of slot {slot}", expected="signed by this site", found=str(list(survivors))
        )
    strangers = sorted(set(agreements) - set(survivors))
    if strangers:
        raise SurvivorsError(
            f"the signers of the survivors of slot {slot}", expected="survivors", found=str(strangers)
        )
    if len(agreements) < threshold:
        raise SurvivorsError(
            f"the signatures under the survivors of slot {slot}",
            expected=f"at least {threshold}",
            found=str(len(agreements)),
        )
    signed = survivors_signed(state.session, slot, held.receipt.sum_id, survivors)
    for name, signature in agreements.items():
        verify(state.peers[name].session_key, signature, signed, owner=name, what="the survivors")


def _groups(
    state: Established,
    held: MaskedSlot | AgreedSlot,
    survivors: tuple[str, ...],
    history: journal.History,
) -> tuple[Group, ...]:
    """The groups to open: the static one only where nothing was or will be opened for another cohort."""
    epoch, params = state.epoch, state.epoch.params
    shut: tuple[Group, ...] = ("update",)
    if not params.static_open or not group_layout(params.schemas[held.schema], "static").nbytes:
        return shut
    if not epoch.any_static_cohort:
        if survivors != params.roster:
            return shut
        try:
            history.check_static(epoch.dataset, params.roster)
        except StaticCohortError:  # another job of this site opened it since this epoch began
            return shut
    return GROUPS
