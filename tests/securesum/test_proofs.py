"""What a proof of a total must be made of: each part is refused by its own check, with its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.hostile import World, names, ready, refused, signed_receipt
from tests.support.securesum.protocol import MIXED, add_integers

from tightframe.securesum.checks import masked_hash
from tightframe.securesum.errors import MessageError, SignatureError, VerificationError
from tightframe.securesum.messages import Group, SumId
from tightframe.securesum.server import Evidence

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
