"""Pair secrets on the drop-out path: what the server finds, whom it names, and what it cannot find."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.hostile import (
    closed,
    dealing_falsely,
    from_shares,
    names,
    own_secrets,
    ready,
    refused,
    without_pair_masks,
)
from tests.support.securesum.protocol import MIXED, World, add_integers

from tightframe.securesum import checks
from tightframe.securesum.checks import link, masked_hash, pair_secret
from tightframe.securesum.errors import MessageError, RecoveryError
from tightframe.securesum.masks import keystream, self_key
from tightframe.securesum.messages import GROUPS, Group, Masked, Reveal, links_of
from tightframe.securesum.primitives import ed25519_sign
from tightframe.securesum.rules import SiteRules
from tightframe.securesum.server import Sum
from tightframe.securesum.site.state import dealt_pair_secret, slot_secret

SIX = names(6)


def recovering(world: World, missing: tuple[str, ...], slot: int = 0) -> Sum:
    """A sum with all but the reveals' opening."""
    total = closed(world, slot, missing)
    here = [name for name in world.params.roster if name not in missing]
    world.agree(total, here)
    world.reveal(total, here)
    return total


# Recovery ----------------------------------------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize("gone", SIX)
def test_whoever_drops_out_any_t_of_the_others_open_the_sum(gone: str) -> None:
    """Every place in the roster: all masks with it keyed by its own secrets, some by others', or all."""
    world = ready(6)
    total = closed(world, 0, (gone,))
    here = [name for name in SIX if name != gone]
    world.agree(total, here)
    raws = {name: world.sites[name].reveal(total.reveal_request().to_bytes()) for name in here}
    assert world.params.threshold == 5
    for name in here:
        total.add_reveal(name, raws[name])
    assert total.open().groups == {"update": world.plain(here)["update"]}


@pytest.mark.many
@pytest.mark.parametrize("gone", list(itertools.combinations(names(7), 2)), ids=lambda pair: "+".join(pair))
def test_two_that_drop_out_and_survivors_that_vanish_before_they_reveal(gone: tuple[str, str]) -> None:
    """Semi-honest: t = 4 of 7. A survivor's link is at the server whether or not it ever reveals."""
    rules = SiteRules(trust=frozenset({"malicious", "semi_honest"}))
    world = ready(7, trust="semi_honest", site_rules=rules)
    assert world.params.threshold == 4
    here = [name for name in names(7) if name not in gone]
    for slot, silent in enumerate((here[0], here[-1])):
        opened = world.run(slot, drop_term=gone, drop_reveal=[silent])
        assert opened.survivors == tuple(here)
        assert opened.groups == {"update": world.plain(here)["update"]}


@pytest.mark.parametrize("gone", [SIX[0], SIX[3], SIX[5]])
def test_both_groups_are_recovered_where_both_are_opened(gone: str) -> None:
    world = ready(6, site_rules=SiteRules(any_static_cohort=True))
    here = [name for name in SIX if name != gone]
    assert world.run(0, drop_term=[gone]).groups == world.plain(here)


def test_the_two_sites_of_a_pair_hold_the_same_two_secrets() -> None:
    world = ready(4)
    world.run(0)
    for one, two in itertools.permutations(names(4), 2):
        for group in GROUPS:
            dealer, holder = (world.sites[name].state.slots[2] for name in (one, two))
            seed = slot_secret(dealer.secrets, group, "pair").expose()
            derived = pair_secret(seed, world.session.session, 2, group, one, two)
            assert dealt_pair_secret(holder.pair_secrets, world.params.index(one), group) == derived


# Whoever lies is named ---------------------------------------------------------------------------


def sent(world: World, slot: int, name: str) -> bytes:
    """A site's masked term."""
    return world.sites[name].mask(world.request(name, world.start(slot)), MIXED, world.term(name))


@pytest.mark.parametrize("group", GROUPS)
def test_a_survivor_whose_link_is_wrong_is_named(group: Group) -> None:
    world = ready(6, site_rules=SiteRules(any_static_cohort=True))
    liar, gone = SIX[1], SIX[4]
    total = world.start(0)
    for name in SIX:
        if name != gone:
            raw = sent(world, 0, name)
            total.add(name, spoiled(world, raw, group, gone) if name == liar else raw)
    total.close()
    here = list(total.survivors)
    world.agree(total, here)
    world.reveal(total, here)
    error = refused(RecoveryError, total.open)
    assert error.blamed == liar
    assert error.what == f"the {group} pair secret from {liar} to {gone} in slot 0"
    assert error.found == "a different one from its link"


def spoiled(world: World, raw: bytes, group: Group, other: str) -> bytes:
    """A masked term of slot 0 with one bit of one link changed, and a receipt that its site signs for it."""
    item = Masked.from_bytes(raw)
    name = item.receipt.name
    later = list(links_of(item.links, group, world.params.roster, name))
    links = bytearray(item.links)
    links[(GROUPS.index(group) * len(later) + later.index(other)) * 32] ^= 1
    receipt = replace(
        item.receipt,
        update=masked_hash(item.update, bytes(links)),
        static=masked_hash(item.static, bytes(links)),
    )
    signature = ed25519_sign(world.sites[name].state.signing, receipt.signed(world.session.session))
    item = replace(item, links=bytes(links), receipt=replace(receipt, signature=signature))
    state = world.sites[name].state  # it stands by what it sent
    world.sites[name].state = state.with_slot(0, replace(state.slots[0], receipt=item.receipt))
    return item.to_bytes()


def test_a_wrong_link_of_a_site_that_is_there_does_no_harm() -> None:
    """Links are read for sites that drop out only."""
    world = ready(4)
    total = world.start(0)
    for name in names(4):
        raw = sent(world, 0, name)
        total.add(name, spoiled(world, raw, "update", names(4)[3]) if name == names(4)[0] else raw)
    total.close()
    world.agree(total, names(4))
    world.reveal(total, names(4))
    assert total.open().groups == world.plain(names(4))


@pytest.mark.parametrize(("liar", "victim"), [(SIX[0], SIX[3]), (SIX[5], SIX[3]), (SIX[2], SIX[3])])
def test_a_site_that_dealt_another_pair_secret_than_its_seed_gives_is_named(
    monkeypatch: pytest.MonkeyPatch, liar: str, victim: str
) -> None:
    """Before and after the victim in the roster: of a mask's key, or of the pad of the victim's link.

    It seals and signs the wrong one, so that the victim cannot see it. It shows once the liar drops out.
    """
    world = dealing_falsely(monkeypatch, liar, victim, slot=1)
    # Another slot is not touched by it.
    assert world.run(0, drop_term=[liar]).groups == {
        "update": world.plain(name for name in SIX if name != liar)["update"]
    }
    error = refused(RecoveryError, recovering(world, (liar,), 1).open)
    assert error.blamed == liar
    assert error.what == f"the update pair secret from {liar} to {victim} in slot 1"
    assert error.found == "a different one from its pair seed"


def test_after_a_refused_opening_the_totals_are_still_masked() -> None:
    world = ready(6)
    total = recovering(world, (SIX[4],))
    total._links[SIX[0]] = bytes(len(total._links[SIX[0]]))
    before = total._totals["update"].to_bytes()
    assert refused(RecoveryError, total.open).blamed == SIX[0]
    assert total._totals["update"].to_bytes() == before


def test_links_of_another_number_are_refused() -> None:
    roster = ("a", "b", "c")
    links = bytes(range(64)) + bytes(range(100, 164))
    assert links_of(links, "update", roster, "a") == {"b": links[:32], "c": links[32:64]}
    assert links_of(links, "static", roster, "a") == {"b": links[64:96], "c": links[96:]}
    assert links_of(links[:64], "static", roster, "b") == {"c": links[32:64]}
    assert links_of(b"", "static", roster, "c") == {}
    for site, wrong in (("a", links[:-1]), ("a", links + bytes(64)), ("b", links), ("c", bytes(64))):
        error = refused(MessageError, lambda site=site, wrong=wrong: links_of(wrong, "update", roster, site))
        assert error.what == f"the links of {site}"


# What the server does not find ---------------------------------------------------------------------


@pytest.mark.parametrize("victim", [SIX[0], SIX[2], SIX[5]])
def test_what_opens_one_slot_says_nothing_of_another(victim: str) -> None:
    """The victim drops out of slot 0 and is back in slot 1, whose every link the server has as well."""
    world = ready(6)
    seeds = {slot: own_secrets(world, slot)[victim, "update", "pair"] for slot in (0, 1)}
    own = own_secrets(world, 1)[victim, "update", "self"]
    total = closed(world, 0, (victim,))
    world.agree(total, total.survivors)
    request = total.reveal_request().to_bytes()
    reveals = {name: world.sites[name].reveal(request) for name in total.survivors}
    seed = from_shares(world, {name: Reveal.from_bytes(raw).update[victim] for name, raw in reveals.items()})
    assert seed == seeds[0]
    for name, raw in reveals.items():
        total.add_reveal(name, raw)
    world.finish(total)
    uploads = {name: Masked.from_bytes(sent(world, 1, name)) for name in SIX}
    term, session = world.term(victim)["update"], world.session.session
    mask = keystream(self_key(own, session, 1, "update", victim), len(term))
    only_own = add_integers(MIXED, "update", [{"update": term}, {"update": mask}])
    assert without_pair_masks(world, victim, 1, "update", uploads, seeds[1]) == only_own
    assert without_pair_masks(world, victim, 1, "update", uploads, seed) != only_own


def test_a_link_gives_the_other_secret_to_whoever_has_one() -> None:
    one, two = bytes(range(32)), bytes(range(200, 232))
    both = link(one, two)
    assert both == link(two, one)
    assert (link(both, one), link(both, two)) == (two, one)
    assert both not in (one, two)
    with pytest.raises(ValueError, match="shorter"):
        link(one, two[:-1])


def test_every_pair_secret_of_an_epoch_is_its_own() -> None:
    """Seed, session, slot, group, dealer and holder: each of them alone makes another secret."""
    base: tuple[Any, ...] = (bytes(32), bytes(32), 0, "update", "a", "b")
    others: tuple[Any, ...] = (bytes([1] * 32), bytes([1] * 32), 1, "static", "c", "c")
    found = {checks.pair_secret(*base), checks.pair_secret(*base[:4], "b", "a")}
    for place, other in enumerate(others):
        found.add(checks.pair_secret(*base[:place], other, *base[place + 1 :]))
    assert len(found) == 2 + 6
    assert {len(item) for item in found} == {32}
