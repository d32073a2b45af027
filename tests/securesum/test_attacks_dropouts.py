"""Attacks by false drop-outs: what a server can compute of a site that it declares dead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.securesum.hostile import (
    agreeing,
    closed,
    from_shares,
    names,
    negative,
    own_secrets,
    ready,
    refused,
    refused_by,
    revealing,
    signed_agreement,
    without_pair_masks,
)
from tests.support.securesum.protocol import MIXED, World, add_integers

from tightframe.securesum import rules
from tightframe.securesum.errors import (
    ProtocolError,
    StateError,
    SurvivorsError,
)
from tightframe.securesum.masks import keystream, self_key
from tightframe.securesum.messages import (
    GROUPS,
    KINDS,
    Agreement,
    Group,
    Kind,
    Masked,
    Reveal,
    SumId,
    receipts_digest,
)
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import Revealed, slot_share

ONE = names(1)[0]


# A site that is declared dead --------------------------------------------------------------------


@pytest.mark.parametrize("sites", [4, 6])
@pytest.mark.parametrize("late", [False, True])
def test_a_site_falsely_declared_dead_stays_masked(sites: int, late: bool) -> None:
    """The server holds the term, and all that the n - 1 others may tell: b of themselves, a of the victim.

    Or the term was late, and comes to the server when all this is done.
    """
    world = ready(sites)
    roster, victim = names(sites), names(sites)[-1]
    rest = roster[:-1]
    secrets = own_secrets(world, 0)  # to compare; the server has none of them
    total = world.start(0)
    uploads = {}
    for name in rest if late else roster:
        raw = world.sites[name].mask(world.request(name, total), MIXED, world.term(name))
        uploads[name] = Masked.from_bytes(raw)
    receipts = [uploads[name].receipt for name in rest]
    agreements = [Agreement.from_bytes(agreeing(0, receipts)(world.sites[name])) for name in rest]
    reveals = {
        name: Reveal.from_bytes(revealing(0, receipts, agreements)(world.sites[name])) for name in rest
    }
    if late:
        raw = world.sites[victim].mask(world.request(victim, total), MIXED, world.term(victim))
        uploads[victim] = Masked.from_bytes(raw)
        refused(StateError, lambda: closed_without(world, victim).add(victim, raw))

    # The victim's a comes out, and the others' b; of its b there is not one share.
    a = from_shares(world, {name: item.update[victim] for name, item in reveals.items()})
    assert a == secrets[victim, "update", "pair"]
    seen = {
        share for item in reveals.values() for part in (item.update, item.static) for share in part.values()
    }
    for name in rest:
        b = from_shares(world, {holder: item.update[name] for holder, item in reveals.items()})
        assert b == secrets[name, "update", "self"]
        digest = receipts_digest(world.session.session, receipts)
        expected = Revealed("train", SumId(0, "train-0"), rest, digest, ("update",))
        assert world.sites[name].state.slots[0] == expected
    assert not any(item.static for item in reveals.values())
    assert len(seen) == sites * (sites - 1)

    # All pair masks off: what is left is the vector under its own mask, whole.
    term = world.term(victim)["update"]
    left = without_pair_masks(world, victim, 0, "update", uploads, a)
    key = self_key(secrets[victim, "update", "self"], world.session.session, 0, "update", victim)
    own = keystream(key, len(term))
    assert left == add_integers(MIXED, "update", [{"update": term}, {"update": own}])
    assert left != term
    assert not any(left[at : at + 4] == term[at : at + 4] for at in range(0, len(term), 4))
    assert (
        add_integers(MIXED, "update", [{"update": left}, {"update": negative(MIXED, "update", own)}]) == term
    )

    # And no second set, with the victim in it, gets an answer of the others. The victim itself, told that
    # nobody is gone, gives its one share of each b, and no share of any a.
    everybody = [uploads[name].receipt for name in roster]
    refused_by(world, rest, SurvivorsError, revealing(0, everybody))
    others = [item for item in everybody if item.name != ONE]
    refused_by(world, rest[1:], SurvivorsError, agreeing(0, others))
    refused_by(world, (victim,), SurvivorsError, agreeing(0, everybody))
    alone = Reveal.from_bytes(revealing(0, everybody)(world.sites[victim])).update
    held = [world.sites[name].state.slots[0] for name in roster]
    assert not any(hasattr(item, "shares") for item in held), "nobody has another share to give"
    assert len({alone[victim]}) < world.params.threshold - 1, "with a colluding silo's too few for its b"
    assert all(alone[name] not in seen for name in roster)


def closed_without(world: World, victim: str) -> Any:
    """The honest server's sum after the survivor set was settled."""
    total = world.start(0)
    total._receipts = {name: None for name in world.params.roster if name != victim}  # type: ignore[misc]
    total._survivors = tuple(total._receipts)
    return total


# Any strategy ------------------------------------------------------------------------------------


@pytest.mark.whole
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_no_strategy_of_server_and_colluder_gets_both_kinds_of_share(data: st.DataObject) -> None:
    """The server asks any site for any set in any order, restarts sites, and has one colluding site.

    It shows the whole roster to some, for which nobody signs anything, and smaller sets to others.

    It then holds, of each site's b and s in each group, the shares that it was told and those of
    the colluder. Never are there t of both.
    """
    sites = data.draw(st.integers(4, 6))
    world = ready(sites, seed=0)
    roster, colluder = names(sites), names(sites)[-1]
    receipts = dict(zip(roster, closed(world).receipts, strict=True))
    colluding = world.sites[colluder].state.slots[0].shares
    least = rules.minimum_survivors(world.params)
    sets = [roster, *(tuple(n for n in roster if n != gone) for gone in roster[:-1])]
    if sites == 6:
        sets = [item for item in sets if len(item) >= least]
    signatures: dict[tuple[str, ...], dict[str, Agreement]] = {}
    known: dict[tuple[str, Group, Kind], set[str]] = {
        (dealer, group, kind): {colluder}
        for dealer in roster
        for group in GROUPS
        for kind in ("self", "pair")
    }
    before = {name: world.sites[name].state for name in roster}
    steps = st.lists(
        st.tuples(st.sampled_from(roster[:-1]), st.sampled_from(sets), st.booleans(), st.booleans()),
        min_size=10,
        max_size=30,
    )
    for name, chosen, agree_first, restart in data.draw(steps):
        site = world.sites[name]
        if restart:  # the state of before, and the journal: the worst that a crash can leave
            site.state = before[name]
        shown = [receipts[item] for item in chosen]
        signed = signatures.setdefault(chosen, {})
        if colluder in chosen and chosen != roster:
            signed[colluder] = signed_agreement(world, colluder, shown)
        try:
            if agree_first:
                signed[name] = Agreement.from_bytes(agreeing(0, shown)(site))
                continue
            item = Reveal.from_bytes(revealing(0, shown, signed.values())(site))
        except ProtocolError as error:
            assert isinstance(error, SurvivorsError | StateError), error
            continue
        for group, shares in (("update", item.update), ("static", item.static)):
            for dealer in shares:
                known[dealer, group, "self" if dealer in chosen else "pair"].add(name)
    assert slot_share(colluding, 0, "update", "self")
    for dealer in roster[:-1]:
        for group in GROUPS:
            both = [len(known[dealer, group, kind]) >= world.params.threshold for kind in KINDS]
            assert not all(both)
            assert not known[dealer, "static", "pair"] - {colluder}
    for group in GROUPS:
        # All secrets that come out are of one survivor set, whichever silo was shown which.
        out = {
            kind: [
                dealer for dealer in roster[:-1] if len(known[dealer, group, kind]) >= world.params.threshold
            ]
            for kind in KINDS
        }
        if out["pair"] and out["self"]:
            opened = tuple(name for name in roster if name not in out["pair"])
            assert opened in sets and set(out["self"]) == set(opened) - {colluder}
    for name in roster[:-1]:
        answered = {
            entry.survivors
            for entry in world.sites[name].entries
            if isinstance(entry, journal.Agreed | journal.Revealed)
        }
        assert len(answered) <= 1
