"""A site's half of the secure sum: pure state machines.

Every handler takes a state and a message and returns a ``Step``: the next state, the reply and the
journal entries. The caller makes the entries durable, stores the state, then sends the reply. It
answers a repeated message with the stored reply, because most handlers refuse to run twice. What a
step keeps aside (``Step.kept``) the caller hands to later handlers by name, as ``kept``. The first half,
``advertise`` and ``confirm``, is in ``site.setup``; the states are in ``site.state``; what is checked of
totals is in ``site.totals``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tightframe.securesum.checks import (
    group_layout,
    key_hash,
    link,
    masked_hash,
    pair_secret,
    verify,
    verify_receipt,
)
from tightframe.securesum.errors import (
    InconsistencyError,
    ParametersError,
    ReplayError,
    StateError,
    StaticCohortError,
    SurvivorsError,
    VerificationError,
)
from tightframe.securesum.masks import Accumulator, Layout, pair_key, self_key
from tightframe.securesum.messages import (
    GROUPS,
    NO_TOTAL,
    Agreement,
    AgreementRequest,
    FieldSpec,
    Group,
    Masked,
    Receipt,
    Reveal,
    RevealRequest,
    TermRequest,
    Told,
    agreement_signed,
    pairs_digest,
    receipts_digest,
)
from tightframe.securesum.primitives import HASH_BYTES, ed25519_sign
from tightframe.securesum.site import journal
from tightframe.securesum.site.setup import (
    Step,
    advertise,
    confirm,
    establish,
    require_state,
    setup_digest,
)
from tightframe.securesum.site.state import (
    Abandoned,
    Advertised,
    Confirmed,
    Epoch,
    Established,
    Fresh,
    Revealed,
    SlotState,
    dealt_pair_secret,
    slot_secret,
    slot_share,
    term_name,
)
from tightframe.securesum.site.state import Agreed as AgreedSlot
from tightframe.securesum.site.state import Masked as MaskedSlot
from tightframe.securesum.site.totals import (
    Kept,
    KeptTerm,
    check_followers,
    check_told,
    check_total,
    combined,
    ground_of,
    require,
)

__all__ = [
    "Advertised",
    "Confirmed",
    "Established",
    "Step",
    "advertise",
    "agree",
    "check_request",
    "check_told",
    "confirm",
    "mask",
    "reveal",
]


def mask(
    state: Confirmed | Established,
    request: TermRequest,
    *,
    fields: tuple[FieldSpec, ...],
    basis: bytes,
    follows: bool,
    term: Mapping[Group, bytes],
    history: journal.History,
    kept: Kept,
    profile: journal.Profile | None = None,
) -> Step[Established, Masked]:
    """Mask a term with the one-time secrets of a slot, and drop these secrets; combine the term before.

    The receipt has the combinations of this site's own term of the total told. A site combines its term only
    of the total that it was told last, and only if it revealed its shares for that total.

    The masked term and the keys of its masks are kept until shares of the slot are revealed; then the term
    with its masks between survivors, until a request rests on a later total: see ``site.totals``.

    Once a masked term has left, t other sites can open it without this one. So the cohort, the state and
    the release profile that it commits its site to are in the journal before it leaves, whether or not
    the site is ever asked to reveal. They stay there if a drop-out keeps the static group masked.

    Slot numbers only increase. Whatever an older slot still holds is erased here: its sum is finished
    or was abandoned, and a server that provokes this early gets less from this site, never more.

    Args:
        state: ``Confirmed`` before the first term of an epoch, which needs a setup in the request.
        request: the server's request.
        fields: this site's own schema.
        basis: SHA-256 of the state that the term rests on.
        follows: whether this site computed that state by itself.
        term: the encoded integers of each group, little-endian in schema order.
        history: everything in this site's journal.
        kept: what earlier steps kept.
        profile: the term's release profile; None if noise makes a single profile unnecessary.

    Raises:
        ParametersError: TF-601, if slot or schema are not those of the epoch's parameters.
        MessageError: TF-604, if a term does not have the schema's size.
        ReplayError: TF-608, if the slot or the sum was used before, or another setup came before.
        StateError: TF-609, if the setup is missing, or the term of the total told is lost.
        StaticCohortError: TF-612, if the static group was masked for another cohort meanwhile.
        ReleaseProfileError: TF-617, if terms were formed under another profile meanwhile.
        TotalError: TF-622, if the request rests on another total than it may; see ``check_told``.
        ProtocolError: as ``establish`` raises with the first request.
    """
    require_state(state, Confirmed, Established)
    params, slot = state.epoch.params, request.slot
    _check_schema(state, request, fields)
    if len(basis) != HASH_BYTES or not set(term) <= set(GROUPS):
        raise ValueError(
            f"Expected `basis` to be a SHA-256 and `term` to hold the two groups {list(GROUPS)} only, "
            f"but got {len(basis)} bytes and {sorted(term)}."
        )
    history.check_slot(params.job, params.epoch, slot, request.sum_id)
    total = check_told(state, request, history)
    layouts = {group: group_layout(fields, group) for group in GROUPS}
    commitments = _commitments(state.epoch, layouts["static"], profile, history)
    established, fresh = _unused(state, request)
    told, expected, combinations = combined(established, total, kept)
    del total  # as large as the term that is masked now
    own = established.epoch.name
    secrets = {group: _pair_secrets(established, fresh, slot, group) for group in GROUPS}
    keyed = {group: _keyed(own, secrets[group]) for group in GROUPS}
    session = established.session
    keys = {
        group: {
            other: pair_key(secret, session, slot, group, *sorted((own, other)))
            for other, secret in keyed[group].items()
        }
        for group in GROUPS
    }
    pairs = b"".join(
        key_hash(session, slot, group, own, other, secret)
        for group in GROUPS
        for other, secret in keyed[group].items()
    )
    links = b"".join(link(*pair) for group in GROUPS for other, pair in secrets[group].items() if own < other)
    own_keys = {
        group: self_key(slot_secret(fresh.secrets, group, "self").expose(), session, slot, group, own)
        for group in GROUPS
    }
    masked = {
        group: _masked(layouts[group], term.get(group, b""), own, own_keys[group], keys[group])
        for group in GROUPS
    }
    unsigned = Receipt(
        name=own,
        slot=slot,
        sum_id=request.sum_id,
        basis=basis,
        total=NO_TOTAL if told is None else told.digest(),
        combinations=combinations,
        follows=follows,
        update=masked_hash(masked["update"], links),
        static=masked_hash(masked["static"], links),
        pairs=pairs_digest(pairs),
        signature=b"",
    )
    signature = ed25519_sign(established.signing, unsigned.signed(session))
    receipt = replace(unsigned, signature=signature)
    slots = (
        *(_erased(item) for item in established.slots[:slot]),
        MaskedSlot(request.schema, receipt, fresh.shares),
        *established.slots[slot + 1 :],
    )
    entries = [*commitments]
    if params.schemas[request.schema]:
        entries.append(journal.StateMasked(params.lineage, params.job, request.sum_id.round, basis))
    entries.append(
        journal.SlotUsed(params.job, params.epoch, slot, request.sum_id, receipt.update, receipt.static)
    )
    sums = (*established.sums, request.sum_id)
    after = replace(established, sums=sums, slots=slots, told=told, expected=expected)
    left: dict[str, bytes | None] = {
        term_name(earlier): None
        for earlier, held in enumerate(established.slots[:slot])
        if not isinstance(held, Fresh | Abandoned) and not _still_needed(held, earlier, told)
    }
    left[term_name(slot)] = KeptTerm(masked, own_keys, keys).to_bytes()
    reply = Masked(masked["update"], masked["static"], receipt, links)
    return Step(after, reply, tuple(entries), left)


def agree(
    state: Established, request: AgreementRequest, *, history: journal.History
) -> Step[Established, Agreement]:
    """Sign a survivor set that is smaller than the roster, with its receipts, once for ever.

    Raises:
        SignatureError: TF-603, if a receipt was not signed by its site in this session.
        StateError: TF-609, if this slot holds no masked term of this site.
        InconsistencyError: TF-610, if a receipt is of another sum, basis or total than this site's, or not
            one of those signed before.
        SurvivorsError: TF-611, if the set is too small, lacks this site, is the whole roster, or is not the
            one signed before.
        FollowersError: TF-624, if too few sites computed the state by themselves.
    """
    require_state(state, Established)
    epoch, params, slot = state.epoch, state.epoch.params, request.slot
    held, survivors, receipts = _survivors(state, slot, request.receipts, history)
    if survivors == params.roster:
        raise SurvivorsError(
            f"the survivors of slot {slot} to sign", expected="fewer than the roster", found="all of it"
        )
    signed = agreement_signed(state.session, slot, held.receipt.sum_id, survivors, receipts)
    reply = Agreement(epoch.name, slot, ed25519_sign(state.signing, signed))
    entry = journal.Agreed(params.job, params.epoch, slot, survivors)
    agreed = AgreedSlot(held.schema, held.receipt, held.shares, survivors, receipts)
    return Step(state.with_slot(slot, agreed), reply, (entry,))


def reveal(
    state: Established, request: RevealRequest, *, history: journal.History, kept: Kept
) -> Step[Established, Reveal]:
    """Reveal this site's shares of a slot: of b for the survivors, of a for the dropped sites.

    If a site of the roster is missing, at least t sites must have signed exactly the set and the receipts
    that this site signed. If none is, there is nothing to sign: no share of any a is revealed, and whoever
    reveals for the whole roster signs no other set and reveals for none. Opening one slot over two different
    sets would need t - c honest sites for each, which 2t > n + c rules out. And the combinations of all terms
    of the total told must add up to those of the total: what was computed from a false total is never opened.

    Raises:
        SignatureError: TF-603, if a receipt or an agreement was not signed by its site.
        StateError: TF-609, if this slot holds no masked term of this site, or no longer.
        InconsistencyError: TF-610, if a receipt is of another sum, basis or total than this site's, or not
            one of those that this site signed.
        SurvivorsError: TF-611, if the set is too small, lacks this site, or differs from the one signed
            before; if it is smaller than the roster and was not signed by this site, or by fewer than t.
        VerificationError: TF-623, if the total told is false, or is not shown to be the sum of its terms.
        FollowersError: TF-624, if too few sites computed the state by themselves.
    """
    require_state(state, Established)
    epoch, params, slot = state.epoch, state.epoch.params, request.slot
    held, survivors, receipts = _survivors(state, slot, request.receipts, history)
    if survivors != params.roster and isinstance(held, MaskedSlot):
        raise SurvivorsError(
            f"the survivors of slot {slot}", expected="signed by this site", found=str(list(survivors))
        )
    _check_agreements(state, held, survivors, receipts, request.agreements)
    if state.told is not None:
        if epoch.name in request.missing and held.receipt.combinations:
            raise VerificationError(
                f"the term of {epoch.name} in the proof of sum {state.told.sum_id}",
                expected="by its own combinations, which it gave",
                found="shown by the server",
            )
        check_total(ground_of(state, state.told), request, state.expected)
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
    term = KeptTerm.from_bytes(require(kept(term_name(slot)), slot))
    rest = term.revealed(state, held.schema, survivors, groups)
    unsigned = Reveal(epoch.name, slot, shares["update"], shares["static"], b"")
    reply = replace(unsigned, signature=ed25519_sign(state.signing, unsigned.signed(state.session)))
    entries: list[journal.Entry] = [journal.Revealed(params.job, params.epoch, slot, survivors, groups)]
    if state.told is not None:
        verified = state.told.slot, state.told.digest()
        entries.insert(0, journal.TotalVerified(params.job, params.epoch, *verified))
    if params.schemas[held.schema]:
        number, basis = held.receipt.sum_id.round, held.receipt.basis
        entries.insert(0, journal.StateSummed(params.lineage, params.job, number, basis))
    if "static" in groups:
        entries.append(journal.StaticOpened(epoch.dataset, survivors, params.lineage))
    revealed = Revealed(held.schema, held.receipt.sum_id, survivors, receipts, groups)
    left = {term_name(slot): rest.to_bytes()}
    return Step(state.with_slot(slot, revealed), reply, tuple(entries), left)


def _commitments(
    epoch: Epoch, static: Layout, profile: journal.Profile | None, history: journal.History
) -> tuple[journal.Entry, ...]:
    """Return entries for the cohort and the profile of a term, as far as they are not in the journal yet.

    Raises:
        StaticCohortError: TF-612.
        ReleaseProfileError: TF-617.
    """
    params, dataset = epoch.params, epoch.dataset
    commitments: list[journal.Entry] = []
    if params.static_open and static.nbytes:
        if not epoch.any_static_cohort:
            history.check_static(dataset, params.roster)
        if not history.static_known(dataset, params.roster):
            commitments.append(journal.StaticMasked(dataset, params.roster, params.lineage))
    if profile is not None:
        history.check_profile(dataset, profile)
        if profile not in history.profiles(dataset):
            commitments.append(journal.ProfileUsed(dataset, profile, params.lineage))
    return tuple(commitments)


def check_request(
    state: Confirmed | Established, request: TermRequest, fields: tuple[FieldSpec, ...]
) -> Established:
    """Refuse what ``mask`` refuses of a request, before anything is done for it.

    Args:
        state: as for ``mask``.
        request: as for ``mask``.
        fields: as for ``mask``.

    Returns:
        The state with the request's set-up, for ``mask``, which need not verify that again.

    Raises:
        ParametersError, ReplayError, StateError, ProtocolError: as ``mask`` does.
    """
    require_state(state, Confirmed, Established)
    _check_schema(state, request, fields)
    return _unused(state, request)[0]


def _unused(state: Confirmed | Established, request: TermRequest) -> tuple[Established, Fresh]:
    """Return the state with its set-up, and a slot that is not used yet for a sum that is not either."""
    established, slot = _established(state, request), request.slot
    fresh = established.slots[slot]
    if not isinstance(fresh, Fresh):
        raise ReplayError(f"slot {slot}", expected="fresh", found=type(fresh).__name__.lower())
    if request.sum_id in established.sums:
        raise ReplayError(
            f"the sum in slot {slot}", expected="a new one", found=f"{request.sum_id}, used before"
        )
    return established, fresh


def _check_schema(
    state: Confirmed | Established, request: TermRequest, fields: tuple[FieldSpec, ...]
) -> None:
    params = state.epoch.params
    agreed = params.schemas.get(request.schema)
    if agreed is None:
        raise ParametersError(
            "the schema", expected=f"one of {sorted(params.schemas)}", found=repr(request.schema)
        )
    if agreed != fields:
        differing = {item.name for item in set(agreed) ^ set(fields)}
        raise ParametersError(
            f"the fields of schema {request.schema}",
            expected="those of this site's own schema, in the same order",
            found=f"a difference in {sorted(differing) or 'the order'}",
        )


def _established(state: Confirmed | Established, request: TermRequest) -> Established:
    if isinstance(state, Confirmed):
        if not request.setup:
            raise StateError("the first request of an epoch", expected="with a setup", found="none")
        return establish(state, request.setup)
    if request.setup and setup_digest(request.setup) != state.setup:
        raise ReplayError("the setup", expected="the one that this epoch began with", found="a different one")
    return state


def _pair_secrets(
    state: Established, fresh: Fresh, slot: int, group: Group
) -> dict[str, tuple[bytes, bytes]]:
    """Return every other site, in roster order -> the pair secrets to it and from it."""
    own, session = state.epoch.name, state.session
    seed = slot_secret(fresh.secrets, group, "pair").expose()
    return {
        name: (
            pair_secret(seed, session, slot, group, own, name),
            dealt_pair_secret(fresh.pair_secrets, place, group),
        )
        for place, name in enumerate(state.epoch.params.roster)
        if name != own
    }


def _keyed(own: str, secrets: Mapping[str, tuple[bytes, bytes]]) -> dict[str, bytes]:
    """Return every other site -> the pair secret that keys the mask with it: from the first of the two."""
    return {other: sent if own < other else received for other, (sent, received) in secrets.items()}


def _masked(layout: Layout, term: bytes, own: str, own_key: bytes, keys: Mapping[str, bytes]) -> bytes:
    """Return one group of a term under this site's own mask and those with all other sites."""
    vector = Accumulator(layout, term)
    vector.add_streams(
        [own_key, *(key for name, key in keys.items() if own < name)],
        [key for name, key in keys.items() if name < own],
    )
    return vector.to_bytes()


def _still_needed(held: SlotState, slot: int, told: Told | None) -> bool:
    """Return True for the slot of the last total, if this site gave its shares for it."""
    return told is not None and told.slot == slot and isinstance(held, Revealed)


def _erased(slot: SlotState) -> SlotState:
    """Return an older slot without its secrets; of a revealed slot the survivors are kept."""
    return slot if isinstance(slot, Revealed) else Abandoned()


def _survivors(
    state: Established, slot: int, receipts: Sequence[Receipt], history: journal.History
) -> tuple[MaskedSlot | AgreedSlot, tuple[str, ...], bytes]:
    """Return the slot's state, the survivor set and the digest of the receipts, once these are checked.

    Every receipt must be of this sum, and those of a survivor set that this site signed the ones it signed.
    """
    epoch, params = state.epoch, state.epoch.params
    if slot >= params.slots:
        raise StateError("the slot", expected=f"below {params.slots}", found=str(slot))
    survivors = tuple(item.name for item in receipts)
    history.check_survivors(params.job, params.epoch, slot, survivors)
    held = state.slots[slot]
    if isinstance(held, AgreedSlot | Revealed) and held.survivors != survivors:
        raise SurvivorsError(
            f"the survivors of slot {slot}",
            expected=f"the set that this site answered before, {list(held.survivors)}",
            found=str(list(survivors)),
        )
    if not isinstance(held, MaskedSlot | AgreedSlot):
        raise StateError(f"slot {slot}", expected="masked", found=type(held).__name__.lower())
    in_order = [name for name in params.roster if name in survivors]
    if list(survivors) != in_order or epoch.name not in in_order:
        raise SurvivorsError(
            f"the survivors of slot {slot}",
            expected=f"sites of the roster, sorted, each once, {epoch.name} among them",
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
    check_followers(receipts, params)
    digest = receipts_digest(state.session, receipts)
    if isinstance(held, AgreedSlot) and held.receipts != digest:
        raise InconsistencyError(
            f"the receipts of slot {slot}",
            expected="those with which this site signed the survivor set",
            found="others",
        )
    return held, survivors, digest


def _check_receipt(state: Established, own: Receipt, receipt: Receipt) -> None:
    verify_receipt(receipt, state.session, state.peers[receipt.name].session_key)
    for part, expected, received in (
        ("slot", str(own.slot), str(receipt.slot)),
        ("sum", str(own.sum_id), str(receipt.sum_id)),
        ("basis", own.basis.hex(), receipt.basis.hex()),
        ("total", own.total.hex(), receipt.total.hex()),
    ):
        # No site is blamed, because a server that tells sites different totals causes this as well.
        if expected != received:
            raise InconsistencyError(
                f"the {part} in the receipt of {receipt.name}", expected=expected, found=received
            )
    if receipt.name == own.name and receipt != own:
        raise InconsistencyError(
            f"the receipt of {own.name}", expected="the one that this site sent", found="a different one"
        )


def _check_agreements(
    state: Established,
    held: MaskedSlot | AgreedSlot,
    survivors: tuple[str, ...],
    receipts: bytes,
    agreements: Sequence[Agreement],
) -> None:
    """Check that at least t survivors signed the survivor set and the receipts, unless it is the roster."""
    slot, params = held.receipt.slot, state.epoch.params
    if survivors == params.roster:
        if agreements:
            raise SurvivorsError(
                f"the signatures under the survivor set of slot {slot}, the whole roster",
                expected="none",
                found=str(len(agreements)),
            )
        return
    signers = [item.name for item in agreements]
    in_order = [name for name in survivors if name in signers]
    if signers != in_order:
        raise SurvivorsError(
            f"the signers of the survivor set of slot {slot}",
            expected="survivors, sorted, each once",
            found=str(signers),
        )
    if len(signers) < params.threshold:
        raise SurvivorsError(
            f"the number of signatures under the survivor set of slot {slot}",
            expected=f"at least {params.threshold}",
            found=str(len(signers)),
        )
    for item in agreements:
        signed = agreement_signed(state.session, item.slot, held.receipt.sum_id, survivors, receipts)
        verify(
            state.peers[item.name].session_key, item.signature, signed, owner=item.name, what="a survivor set"
        )
        if item.slot != slot:
            raise InconsistencyError(
                f"the slot in the agreement of {item.name}", expected=str(slot), found=str(item.slot)
            )


def _groups(
    state: Established,
    held: MaskedSlot | AgreedSlot,
    survivors: tuple[str, ...],
    history: journal.History,
) -> tuple[Group, ...]:
    """Return the groups to open; ``static`` only if it was and will be opened for no other cohort."""
    epoch, params = state.epoch, state.epoch.params
    update_only: tuple[Group, ...] = ("update",)
    if not params.static_open or not group_layout(params.schemas[held.schema], "static").nbytes:
        return update_only
    if not epoch.any_static_cohort:
        if survivors != params.roster:
            return update_only
        try:
            history.check_static(epoch.dataset, params.roster)
        except StaticCohortError:  # another job of this site opened it since this epoch began
            return update_only
    return GROUPS
