"""A site's half of an epoch's setup: advertise, confirm, and the checks before its first term."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tightframe.securesum.checks import (
    Keys,
    box_bound,
    box_key,
    commitment,
    pair_secret,
    read_advertisements,
    verify,
    verify_advertisement,
)
from tightframe.securesum.encoding import RingOverflowError, check_no_wrap
from tightframe.securesum.errors import (
    InconsistencyError,
    ParametersError,
    RosterError,
    ShareError,
    StateError,
    TotalError,
)
from tightframe.securesum.identity import Signer, Verifier
from tightframe.securesum.messages import (
    GROUPS,
    KINDS,
    SALT_BYTES,
    SHARE_BYTES,
    Advertisement,
    Advertisements,
    Confirmation,
    Dealt,
    Params,
    Setup,
    hashes_digest,
    hashes_signed,
    pair_secret_hash,
    ready_signed,
    session_id,
    share_hash,
)
from tightframe.securesum.primitives import (
    HASH_BYTES,
    KEM_CIPHERTEXT_BYTES,
    KEM_SEED_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    Encapsulate,
    Random,
    Secret,
    digest,
    ed25519_public,
    ed25519_sign,
    kem_decapsulate,
    kem_encapsulate,
    kem_public,
    open_sealed,
    seal,
    x25519,
    x25519_public,
)
from tightframe.securesum.rules import Expected, SiteRules, check
from tightframe.securesum.shamir import split_many
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import (
    SLOT_SHARES,
    Advertised,
    Confirmed,
    Epoch,
    Established,
    Fresh,
    slot_secret,
    term_name,
)

State = TypeVar("State", Advertised, Confirmed, Established)
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Step(Generic[State, Reply]):
    """The result of a handler.

    Attributes:
        state: the site's next state.
        entries: journal entries that must be durable before the state is stored and the reply sent.
        kept: name -> bytes to keep, secretly, until a later step replaces them; None to erase them. They are
            as large as a term, so they are not part of the state.
    """

    state: State
    reply: Reply
    entries: tuple[journal.Entry, ...] = ()
    kept: Mapping[str, bytes | None] = field(default_factory=dict, repr=False)


def advertise(
    params: Params,
    *,
    rules: SiteRules,
    expected: Expected,
    signer: Signer,
    history: journal.History,
    dataset: str,
    application: bytes,
    profile: journal.Profile | None = None,
    previous: Established | None = None,
    random: Random = os.urandom,
) -> Step[Advertised, Advertisement]:
    """Accept an epoch's parameters and advertise fresh keys for it.

    Args:
        params: the parameters that the server proposes.
        rules: this site's own rules.
        expected: the parameters that this site derives from its own copy of the job.
        signer: signs with the provisioned key.
        history: everything in this site's journal.
        dataset: this site's data set.
        application: application data sent and signed with the keys, at most 4096 bytes.
        profile: the release profile of this site's terms; None if noise makes a single profile unnecessary.
        previous: this site's state of the epoch before; None if there was none in this job.
        random: source of random bytes.

    Raises:
        ParametersError: TF-601.
        TotalError: TF-622, if the last total that this site was told in the epoch before was never verified.
        ReplayError: TF-608, if this epoch of the job, or a later one, was begun before.
        StaticCohortError: TF-612, if the static group is to be opened for another cohort than before.
        ReleaseProfileError: TF-617, if terms would be formed under another profile than before.
    """
    check(params, rules, expected)
    _check_rings(params)
    history.check_epoch(params)
    if params.may_open_static and not rules.any_static_cohort:
        history.check_static(dataset, params.roster)
    if profile is not None:
        history.check_profile(dataset, profile)
    left = _left_behind(previous, history)
    channel, signing = Secret(random(KEY_BYTES)), Secret(random(KEY_BYTES))
    decapsulation = Secret(random(KEM_SEED_BYTES))
    secrets, commitments = [], []
    for slot in range(params.slots):
        own = b""
        for group in GROUPS:
            for kind in KINDS:
                seed = random(KEY_BYTES)
                own += seed
                commitments.append(commitment(expected.name, slot, group, kind, seed))
        secrets.append(Secret(own))
    unsigned = Advertisement(
        name=expected.name,
        certificate=signer.certificate,
        channel_key=x25519_public(channel),
        session_key=ed25519_public(signing),
        slots=b"".join(commitments),
        application=application,
        encapsulation_key=kem_public(decapsulation),
        signature=b"",
    )
    agreed = params.digest()
    reply = replace(unsigned, signature=signer.sign(unsigned.signed(agreed)))
    epoch = Epoch(params, expected.name, dataset, rules.minimum_cohort, rules.any_static_cohort)
    raw = reply.to_bytes()
    entry = journal.Advertised(params.job, params.epoch, agreed, digest("advertised", raw))
    state = Advertised(epoch, raw, channel, decapsulation, signing, tuple(secrets))
    return Step(state, reply, (entry,), left)


def confirm(
    state: Advertised,
    message: Advertisements,
    *,
    verifier: Verifier,
    random: Random = os.urandom,
    encapsulate: Encapsulate = kem_encapsulate,
) -> Step[Confirmed, Confirmation]:
    """Verify the advertisements of all sites, deal shares of this site's secrets, and its pair secrets.

    Args:
        state: this site's.
        verifier: checks identities for this site.
        random: source of random bytes.
        encapsulate: makes a fresh shared secret for an encapsulation key.

    Raises:
        MessageError: TF-604.
        RosterError: TF-605, if they are not exactly the roster's, or this site's own was altered.
        IdentityError, SignatureError: TF-602, TF-603, naming the site.
        KeyAgreementError: TF-606, if a key is malformed, of low order or occurs twice.
        StateError: TF-609, if this site is not in the state Advertised.
    """
    require_state(state, Advertised)
    epoch, params = state.epoch, state.epoch.params
    advertisements = read_advertisements(params, message)
    if message.items[epoch.index] != state.advertisement:
        raise RosterError(
            f"the advertisement of {epoch.name}",
            expected="the one that this site sent",
            found="a different one",
        )
    parameters, keys = params.digest(), Keys()
    for item in advertisements:
        # A site pins its peers, and need not pin itself.
        pinned = item.name != epoch.name and verifier.pinned_only
        verify_advertisement(replace(verifier, pinned_only=pinned), item, parameters)
        keys.add(item)
    session = session_id(params, advertisements)
    dealt = _deal(state, session, random)
    hashes = {name: _hashes(session, epoch.name, name, plain, params) for name, plain in dealt.items()}
    digests = [hashes_digest(item) for item in hashes.values()]
    boxes = {
        item.name: _sealed(state, session, item, dealt[item.name], random, encapsulate)
        for item in advertisements
        if item.name != epoch.name
    }
    reply = Confirmation(
        name=epoch.name,
        boxes=boxes,
        hashes=hashes,
        hashes_signature=ed25519_sign(state.signing, hashes_signed(session, epoch.name, digests)),
        ready=ed25519_sign(state.signing, ready_signed(session, epoch.name)),
    )
    confirmed = Confirmed(
        epoch,
        session,
        message.items,
        state.channel,
        state.decapsulation,
        state.signing,
        state.secrets,
        Secret(dealt[epoch.name]),
        b"".join(digests),
    )
    return Step(confirmed, reply)


def establish(state: Confirmed, raw: bytes) -> Established:
    """Check every share and pair secret dealt to this site, and that all sites confirmed this session.

    Raises:
        MessageError: TF-604.
        RosterError: TF-605, if the dealers are not exactly the roster.
        SignatureError: TF-603, naming the dealer.
        ShareError: TF-607, naming the dealer, if a box, a share or a pair secret is not what it signed.
        InconsistencyError: TF-610, if this site's own part was altered.
    """
    epoch, params = state.epoch, state.epoch.params
    setup = Setup.from_bytes(raw, sites=len(params.roster), slots=params.slots)
    if set(setup.dealt) != set(params.roster):
        raise RosterError(
            "the dealers of the setup",
            expected=f"the roster {list(params.roster)}",
            found=str(sorted(setup.dealt)),
        )
    boxes = []
    for dealer in params.roster:
        dealt = setup.dealt[dealer]
        _check_signatures(state, dealer, dealt)
        if dealer == epoch.name:
            _check_own(state, dealt)
            boxes.append(state.own_box.expose())
        else:
            boxes.append(_opened(state, dealer, dealt))
    # Regrouped from one box for each dealer to one block for each slot, so that what a slot holds can be
    # erased by itself.
    by_dealer = np.frombuffer(b"".join(boxes), np.uint8).reshape(len(boxes), -1)
    size = params.slots * SLOT_SHARES
    shares = by_dealer[:, :size].reshape(len(boxes), params.slots, -1)
    pair_secrets = by_dealer[:, size:].reshape(len(boxes), params.slots, -1)
    slots = tuple(
        Fresh(secrets, Secret(shares[:, slot].tobytes()), Secret(pair_secrets[:, slot].tobytes()))
        for slot, secrets in enumerate(state.secrets)
    )
    return Established(
        epoch, state.session, state.advertisements, state.signing, setup_digest(raw), (), slots, None, {}
    )


def _left_behind(previous: Established | None, history: journal.History) -> dict[str, bytes | None]:
    """Return what is erased of the epoch before, once its last total is verified.

    In a new epoch nothing asks for it any more, although what this site computes from then on rests on it.
    """
    if previous is None:
        return {}
    params, told = previous.epoch.params, previous.told
    given = previous.last_revealed
    if given > (-1 if told is None else told.slot):
        raise TotalError(
            f"the total of slot {given}, for which this site gave shares in epoch {params.epoch}",
            expected="announced before the next epoch",
            found="withheld",
        )
    if told is not None and not history.verified(params.job, params.epoch, told.slot):
        raise TotalError(
            f"the total of sum {told.sum_id}, which was announced in epoch {params.epoch}",
            expected="verified before the next epoch",
            found="one that was not",
        )
    return {term_name(slot): None for slot in range(params.slots)}


def require_state(state: object, *kinds: type[object]) -> None:
    """Check that the state is one of ``kinds``.

    Raises:
        StateError: TF-609.
    """
    if not isinstance(state, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise StateError("the state of this site", expected=expected, found=type(state).__name__)


def setup_digest(raw: bytes) -> bytes:
    """Return the hash by which a site recognises its setup, so that it refuses another one: 32 bytes."""
    return digest("setup", raw)


def _check_rings(params: Params) -> None:
    """Refuse a schema in which a sum over the roster could wrap, before any key is spent on it."""
    for schema, fields in params.schemas.items():
        for item in fields:
            try:
                check_no_wrap(item.ring, item.bits, item.bound, len(params.roster))
            except (RingOverflowError, ValueError):
                raise ParametersError(
                    f"field {item.name} of schema {schema}",
                    expected=f"one whose sum over {len(params.roster)} sites fits its ring",
                    found=f"{item.ring} bits for bound {item.bound:g} with {item.bits} fraction bits",
                ) from None


def _deal(state: Advertised, session: bytes, random: Random) -> dict[str, bytes]:
    """Split this site's secrets: holder -> plaintext of its box, as ``box_plain_bytes`` says."""
    params, own = state.epoch.params, state.epoch.name
    holders, parts = len(params.roster), params.slots * len(GROUPS) * len(KINDS)
    secrets: NDArray[np.uint8] = np.frombuffer(b"".join(item.expose() for item in state.secrets), np.uint8)
    shares = split_many(
        secrets.reshape(parts, KEY_BYTES), threshold=params.threshold, holders=holders, random=random
    )
    # Without a salt, whoever sees a hash could test guesses of the share.
    salts = np.frombuffer(random(holders * parts * SALT_BYTES), np.uint8).reshape(holders, parts, SALT_BYTES)
    salted = np.concatenate([salts, shares], axis=2)
    seeds = [
        (slot, group, slot_secret(secrets, group, "pair").expose())
        for slot, secrets in enumerate(state.secrets)
        for group in GROUPS
    ]
    return {
        # One to itself too, which nobody uses, so that every list of hashes has the same layout.
        name: salted[holder].tobytes()
        + b"".join(pair_secret(seed, session, slot, group, own, name) for slot, group, seed in seeds)
        for holder, name in enumerate(params.roster)
    }


def _hashes(session: bytes, dealer: str, holder: str, plain: bytes, params: Params) -> bytes:
    """Return the hashes of all shares and pair secrets in a box, joined."""
    hashes, start = [], 0
    for slot in range(params.slots):
        for group in GROUPS:
            for kind in KINDS:
                salted = plain[start : start + SHARE_BYTES]
                hashes.append(share_hash(session, dealer, holder, slot, group, kind, salted))
                start += SHARE_BYTES
    for slot in range(params.slots):
        for group in GROUPS:
            secret = plain[start : start + KEY_BYTES]
            hashes.append(pair_secret_hash(session, dealer, holder, slot, group, secret))
            start += KEY_BYTES
    return b"".join(hashes)


def _sealed(
    state: Advertised,
    session: bytes,
    holder: Advertisement,
    plain: bytes,
    random: Random,
    encapsulate: Encapsulate,
) -> bytes:
    own, nonce = state.epoch.name, random(NONCE_BYTES)
    encapsulated, ciphertext = encapsulate(holder.encapsulation_key)
    agreed = x25519(state.channel, holder.channel_key, owner=holder.name)
    key = box_key(encapsulated, agreed, session, own, holder.name, ciphertext)
    return ciphertext + nonce + seal(key, nonce, plain, box_bound(session, own, holder.name))


def _check_signatures(state: Confirmed, dealer: str, dealt: Dealt) -> None:
    key, session = state.peers[dealer].session_key, state.session
    digests = [dealt.digests[i : i + HASH_BYTES] for i in range(0, len(dealt.digests), HASH_BYTES)]
    verify(
        key,
        dealt.signature,
        hashes_signed(session, dealer, digests),
        owner=dealer,
        what="the hashes of shares",
    )
    if hashes_digest(dealt.hashes) != digests[state.epoch.index]:
        raise ShareError(
            f"the hashes of shares from {dealer}",
            expected="those that it signed",
            found="different ones",
            blamed=dealer,
        )
    verify(key, dealt.ready, ready_signed(session, dealer), owner=dealer, what="readiness for this session")


def _check_own(state: Confirmed, dealt: Dealt) -> None:
    """Check that this site's own part is as sent: with another of its confirmations shares would differ."""
    if dealt.digests != state.digests or dealt.box:
        raise InconsistencyError(
            f"the confirmation of {state.epoch.name}",
            expected="the one that this site sent",
            found="a different one",
        )


def _opened(state: Confirmed, dealer: str, dealt: Dealt) -> bytes:
    own, session = state.epoch.name, state.session
    if not dealt.box:
        raise ShareError(
            f"the box from {dealer}",
            expected="sealed for this site in this session",
            found="none",
            blamed=dealer,
        )
    ciphertext, rest = dealt.box[:KEM_CIPHERTEXT_BYTES], dealt.box[KEM_CIPHERTEXT_BYTES:]
    nonce, sealed = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
    encapsulated = kem_decapsulate(state.decapsulation, ciphertext, owner=dealer)
    agreed = x25519(state.channel, state.peers[dealer].channel_key, owner=dealer)
    key = box_key(encapsulated, agreed, session, dealer, own, ciphertext)
    try:
        plain = open_sealed(key, nonce, sealed, box_bound(session, dealer, own), owner=dealer)
    except ShareError as error:
        error.blamed = dealer
        raise
    if _hashes(session, dealer, own, plain, state.epoch.params) != dealt.hashes:
        raise ShareError(
            f"the shares from {dealer}",
            expected="those whose hashes it signed",
            found="different ones",
            blamed=dealer,
        )
    return plain
