"""What a proof of a total must be made of: each part is refused by its own check, with its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.hostile import (
    World,
    closed,
    dealing_falsely,
    names,
    ready,
    refused,
    refused_by,
    signed_receipt,
)
from tests.support.securesum.protocol import MIXED, add_integers

from tightframe.securesum.checks import dropped_secrets, key_hash, masked_hash
from tightframe.securesum.errors import InconsistencyError, MessageError, SignatureError, VerificationError
from tightframe.securesum.messages import (
    GROUPS,
    Group,
    Masked,
    RevealRequest,
    SumId,
    TermProof,
    links_of,
    pairs_digest,
    pairs_of,
)
from tightframe.securesum.primitives import Secret
from tightframe.securesum.rules import SiteRules
from tightframe.securesum.server import Evidence, Sum

ONE, TWO, THREE, FOUR = names(4)
CHALLENGE = bytes(range(32))


@pytest.fixture
def world() -> World:
    """Three silos' sum; the fourth dropped out."""
    made = ready()
    made.run(0, drop_term=[FOUR])
    return made


def evidence_of(world: World) -> Evidence:
    assert world.evidence is not None
    return world.evidence


def combined(evidence: Evidence, name: str) -> Mapping[Group, bytes]:
    return evidence.ground.combine(CHALLENGE, evidence.term(evidence.proof(name)))


def test_the_terms_shown_add_up_to_the_total(world: World) -> None:
    evidence = evidence_of(world)
    terms = [evidence.term(evidence.proof(name)) for name in names(3)]
    assert add_integers(MIXED, "update", terms) == world.plain(names(3))["update"]  # type: ignore[arg-type]


def test_a_part_of_every_silo_is_needed(world: World) -> None:
    evidence = evidence_of(world)
    expected = evidence.ground.combine(CHALLENGE, evidence.total.groups)
    parts = {name: combined(evidence, name) for name in names(3)}
    evidence.ground.check_sum(expected, parts)
    for name in names(3):
        rest = {other: part for other, part in parts.items() if other != name}
        error = refused(VerificationError, evidence.ground.check_sum, expected, rest)
        assert error.found == f"none of {[name]}"
    swapped = {**parts, ONE: parts[TWO]}
    assert refused(VerificationError, evidence.ground.check_sum, expected, swapped).found == "a false one"


def test_seeds_are_those_of_exactly_the_dropped_sites(world: World) -> None:
    evidence = evidence_of(world)
    seeds = evidence.seeds_of_dropped()
    evidence.ground.check_dropped(seeds)
    for wrong, found in (
        ({}, "of []"),
        ({**seeds, THREE: seeds[FOUR]}, f"of {[THREE, FOUR]}"),
        ({**seeds, "stranger": seeds[FOUR]}, f"of {[FOUR, 'stranger']}"),
        ({FOUR: {}}, "of []"),
        ({FOUR: {**seeds[FOUR], "static": bytes(32)}}, "of ['static', 'update']"),
        ({FOUR: {"update": bytes(32)}}, "another"),
    ):
        assert refused(VerificationError, evidence.ground.check_dropped, wrong).found == found


def test_each_part_of_a_proof_is_what_its_silo_signed_or_committed_to(world: World) -> None:
    evidence = evidence_of(world)
    ground, seeds, proof = evidence.ground, evidence.seeds_of_dropped(), evidence.proof(ONE)
    other = evidence.proof(TWO)
    receipt = proof.receipt
    for what, changes, expected in (
        ("the receipt", {"receipt": other.receipt}, "its own"),
        ("the receipt", {"receipt": signed_receipt(world, receipt, slot=1)}, "its own"),
        ("the receipt", {"receipt": signed_receipt(world, receipt, sum_id=SumId(7, "train-0"))}, "its own"),
        ("the masked term", {"masked": {}}, "of the groups"),
        ("the masked term", {"masked": {**proof.masked, "static": b""}}, "of the groups"),
        ("the seeds", {"seeds": {}}, "of the groups"),
        ("the seeds", {"seeds": {**proof.seeds, "static": bytes(32)}}, "of the groups"),
        ("the masked update term", {"masked": {"update": proof.masked["update"][::-1]}}, "the one that its"),
        ("the masked update term", {"links": proof.links[::-1]}, "the one that its receipt"),
        ("the hashes of the pair secrets", {"pairs": other.pairs}, "those that its receipt"),
        ("the update self seed", {"seeds": other.seeds}, "the one that it committed to"),
    ):
        changed: Any = replace(proof, **changes)  # type: ignore[arg-type]
        error = refused(VerificationError, ground.show, ONE, changed, seeds)
        assert error.what.startswith(f"{what} of {ONE}") and error.expected.startswith(expected), error
    assert refused(VerificationError, ground.show, TWO, proof, seeds).what.startswith("the receipt of")


def test_a_receipt_in_a_proof_is_signed_by_its_silo_in_this_session(world: World) -> None:
    evidence = evidence_of(world)
    ground, seeds, proof = evidence.ground, evidence.seeds_of_dropped(), evidence.proof(ONE)
    for receipt in (
        replace(proof.receipt, signature=bytes(64)),
        replace(proof.receipt, follows=False),
        replace(evidence.proof(TWO).receipt, name=ONE),
    ):
        error = refused(SignatureError, ground.show, ONE, replace(proof, receipt=receipt), seeds)
        assert error.blamed == ONE


def test_links_that_its_silo_signed_are_of_every_later_site(world: World) -> None:
    evidence = evidence_of(world)
    proof = evidence.proof(ONE)
    short = proof.links[:-32]
    signed = signed_receipt(world, proof.receipt, update=masked_hash(proof.masked["update"], short))
    changed = replace(proof, links=short, receipt=signed)
    refused(MessageError, evidence.ground.show, ONE, changed, evidence.seeds_of_dropped())


def test_the_form_of_combinations(world: World) -> None:
    ground, right = evidence_of(world).ground, combined(evidence_of(world), ONE)
    assert ground.has_form(right)
    for wrong in (
        {},
        {"update": right["update"][:-1]},
        {"static": right["update"]},
        {**right, "static": b""},
    ):
        assert not ground.has_form(wrong)  # type: ignore[arg-type]


# A dropped silo that dealt another pair secret than its seed gives -------------------------------------

SEVEN = names(7)
LIARS = pytest.mark.parametrize(("liar", "victim"), [(SEVEN[1], SEVEN[4]), (SEVEN[6], SEVEN[2])])
"""Before the victim in the roster, and after it: the key of their mask, and the pad of the victim's link."""


def off_by_a_mask(monkeypatch: pytest.MonkeyPatch, liar: str, victim: str, group: Group = "update") -> World:
    """The server declares the liar dropped, and opens the sum with what its seed gives."""
    rules = SiteRules(any_static_cohort=group == "static")
    world = dealing_falsely(monkeypatch, liar, victim, slot=0, group=group, sites=7, site_rules=rules)
    with monkeypatch.context() as patch:
        patch.setattr(Sum, "_check_pair_secrets", lambda *arguments: None)
        opened = world.run(0, drop_term=[liar])
    others = world.plain(name for name in SEVEN if name != liar)
    assert opened.groups[group] != others[group], "or the attack would be none"
    return world


def shown(evidence: Evidence, total: Sum, victim: str, **changes: Any) -> Any:
    """The request for shares with a proof of the victim's term; a call on a silo."""
    proof: TermProof = replace(evidence.proof(victim), **changes)
    dropped = evidence.seeds_of_dropped()
    raw = RevealRequest(total.slot, total.receipts, total.agreements, {victim: proof}, dropped).to_bytes()
    return lambda site: site.reveal(raw)


@LIARS
@pytest.mark.parametrize("group", GROUPS)
def test_no_total_is_off_by_a_mask_that_a_dropped_silo_dealt_falsely(
    monkeypatch: pytest.MonkeyPatch, group: Group, liar: str, victim: str
) -> None:
    """The victim has really gone, so that its term is shown; the liar is back."""
    world = off_by_a_mask(monkeypatch, liar, victim, group)
    evidence = evidence_of(world)
    total = closed(world, 1, [victim])
    world.agree(total, total.survivors)
    error = refused(VerificationError, total.reveal_request)
    for call in (
        shown(evidence, total, victim),
        shown(evidence, total, victim, pairs=seeds_hashes(evidence, group, liar, victim)),
    ):
        refused_by(world, [name for name in total.survivors if name != liar], VerificationError, call)
    assert (
        error.what == f"the {group} pair secret between {victim} and {liar} in the proof of sum 0/train-0/0"
    )
    assert error.expected == f"the one that the receipt of {victim} names"


def seeds_hashes(evidence: Evidence, group: Group, liar: str, victim: str) -> bytes:
    """The hashes for the victim, but with that of what the liar's seed gives.

    The liar signs a second list with it, if it is asked to: only the victim knows which secret it was dealt.
    """
    proof, session = evidence.proof(victim), evidence.ground.session
    seeds = {liar: Secret(evidence.seeds_of_dropped()[liar][group])}
    links = links_of(proof.links, group, SEVEN, victim)
    keyed = dropped_secrets(session, 0, group, victim, seeds, links)[liar][1]
    named = pairs_of(proof.pairs, group, SEVEN, victim)[liar]
    assert proof.pairs.count(named) == 1
    return proof.pairs.replace(named, key_hash(session, 0, group, victim, liar, keyed))


@LIARS
def test_combinations_of_the_victim_itself_show_such_a_total_to_be_false(
    monkeypatch: pytest.MonkeyPatch, liar: str, victim: str
) -> None:
    """It knows which secrets it used."""
    world = off_by_a_mask(monkeypatch, liar, victim)
    total = closed(world, 1)
    raw = RevealRequest(1, total.receipts, ()).to_bytes()
    refused_by(world, [victim], VerificationError, lambda site: site.reveal(raw))


@LIARS
def test_what_was_dealt_falsely_for_another_slot_is_no_matter(
    monkeypatch: pytest.MonkeyPatch, liar: str, victim: str
) -> None:
    world = dealing_falsely(monkeypatch, liar, victim, slot=2, sites=7)
    world.run(0, drop_term=[liar])
    here = [name for name in SEVEN if name != victim]
    assert world.run(1, drop_term=[victim]).groups == {"update": world.plain(here)["update"]}


def test_a_silo_names_the_pair_secrets_that_it_used() -> None:
    """Of each other silo: the hash that the first of the two signed at the setup."""
    world = ready()
    total = world.start(0)
    for name in names(4):
        receipt = Masked.from_bytes(
            world.sites[name].mask(world.request(name, total), MIXED, world.term(name))
        ).receipt
        hashes = world.session.keyed_hashes(name, 0)
        assert receipt.pairs == pairs_digest(hashes)
        for group in GROUPS:
            named = pairs_of(hashes, group, names(4), name)
            assert list(named) == [other for other in names(4) if other != name]
            for other, data in named.items():
                first, second = sorted((name, other))
                assert data == world.session.signed_pair_secret_hash(first, second, 0, group)


def test_a_silo_that_names_other_pair_secrets_is_named_before_its_term_is_added() -> None:
    """So an honest server never has a proof to show that others refuse."""
    world = ready()
    total = world.start(0)
    masked = Masked.from_bytes(world.sites[ONE].mask(world.request(ONE, total), MIXED, world.term(ONE)))
    lie = replace(masked, receipt=signed_receipt(world, masked.receipt, pairs=bytes(32)))
    error = refused(InconsistencyError, total.add, ONE, lie.to_bytes())
    assert (error.blamed, error.what) == (ONE, f"the pair secrets' hash in the receipt of {ONE}")
    total.add(ONE, masked.to_bytes())


@pytest.mark.parametrize("silo", ["before any total", "not in the total", "cut", "of another group"])
def test_combinations_that_a_silo_cannot_have_are_refused_before_its_term_is_added(silo: str) -> None:
    """An honest server asks nobody to reveal for what all of them refuse."""
    world, name = ready(), FOUR if silo == "not in the total" else ONE
    slot = 0 if silo == "before any total" else 1
    if slot:
        world.run(0, drop_term=[FOUR])
    total = world.start(slot)
    masked = Masked.from_bytes(world.sites[name].mask(world.request(name, total), MIXED, world.term(name)))
    evidence = evidence_of(world) if slot else None
    right = {"update": bytes(1536)} if evidence is None else combined(evidence, ONE)
    wrong = {"cut": {"update": right["update"][:-1]}, "of another group": {"static": right["update"]}}
    combinations: Any = wrong.get(silo, right)
    lie = replace(masked, receipt=signed_receipt(world, masked.receipt, combinations=combinations))
    error = refused(MessageError, total.add, name, lie.to_bytes())
    assert (error.blamed, error.what) == (name, f"the combinations of {name}")
    total.add(name, masked.to_bytes())


def test_hashes_of_pair_secrets_that_its_silo_signed_are_of_every_other_site(world: World) -> None:
    evidence = evidence_of(world)
    proof = evidence.proof(ONE)
    for pairs in (b"", proof.pairs[:-32], proof.pairs + bytes(32)):
        receipt = signed_receipt(world, proof.receipt, pairs=pairs_digest(pairs))
        changed = replace(proof, pairs=pairs, receipt=receipt)
        error = refused(MessageError, evidence.ground.show, ONE, changed, evidence.seeds_of_dropped())
        assert error.what == f"the hashes of the pair secrets of {ONE}"
