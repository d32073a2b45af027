"""What the secure sum does *not* stop, shown. Each of these is in the documentation as a limit.

A change that makes one of these tests fail has removed a limit, or a test has gone wrong: either
way the documentation must be read again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.securesum.hostile import (
    difference,
    from_shares,
    names,
    ready,
    refused,
    signed_agreement,
    signed_receipt,
    without_pair_masks,
)
from tests.support.securesum.protocol import JOB, MIXED, World, add_integers

from tightframe.phases import Field, Schema
from tightframe.rounds.riders import class_rules
from tightframe.securesum import encoding, rules
from tightframe.securesum.checks import group_layout, pair_secret
from tightframe.securesum.errors import ReplayError, StaticCohortError
from tightframe.securesum.masks import keystream, pair_key, self_key
from tightframe.securesum.messages import (
    Agreement,
    AgreementRequest,
    FieldSpec,
    Masked,
    Reveal,
    RevealRequest,
    SumId,
    challenge,
)
from tightframe.securesum.proofs import combinations
from tightframe.securesum.rules import SiteRules
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import slot_secret, slot_share

ONE, TWO, THREE, FOUR = names(4)


# A malicious site --------------------------------------------------------------------------------


def test_a_random_vector_of_one_malicious_site_poisons_the_sum_and_names_nobody() -> None:
    """Masks hide poison as well as data: the sum is exactly that of what was sent."""
    fields = (FieldSpec("weights", (1000,), 32, 20, 1.0, "update"),)
    random = np.random.default_rng(0)
    honest = [random.normal(0, 0.01, 1000).clip(-1, 1) for _ in range(3)]
    poison = random.uniform(-1, 1, 1000)  # within the bound, so that no check can tell
    world = ready(schemas={"train": fields})
    total = world.start(0)
    for name, vector in zip(names(4), [*honest, poison], strict=True):
        term = encoding.encode(vector, ring=32, bits=20, bound=1.0, name="weights").tobytes()
        total.add(
            name,
            world.sites[name].mask(world.request(name, total), fields, {"update": term, "static": b""}),
        )
    total.close()
    world.agree(total, names(4))
    world.reveal(total, names(4))
    opened = total.open()
    found = encoding.decode(np.frombuffer(opened.groups["update"], "<u4"), ring=32, bits=20)
    assert np.abs(found - (sum(honest) + poison)).max() <= 4 * 2.0**-21
    assert np.corrcoef(found, poison)[0, 1] > 0.99
    assert abs(np.corrcoef(found, sum(honest))[0, 1]) < 0.2
    assert opened.blamed == {}


def test_a_term_over_the_bound_by_a_site_that_does_not_check_wraps_unseen() -> None:
    """The bound is each site's own check. Uniform ring elements give a uniform total."""
    opened = ready().run(0)  # the harness's terms are uniform over the whole ring
    assert opened.blamed == {}
    values = encoding.decode(np.frombuffer(opened.groups["update"][:24], "<u4"), ring=32, bits=8)
    assert np.abs(values).max() > 4 * MIXED[0].bound


# Classes -----------------------------------------------------------------------------------------

SUMS = Schema((Field("class_sums", (3, 4), ring=64, bound=10.0, static=True, per_class=True),))
RECORD = torch.tensor([0.25, -1.5, 3.0, 0.125], dtype=torch.float64)


def class_sums(offer: list[int], least: int, counts: Any) -> tuple[np.ndarray, np.ndarray]:
    """The opened sums of three sites' class sums and holder flags; the first has one record of class 2."""
    generator = torch.Generator().manual_seed(0)
    total, holders = np.zeros((3, 4)), np.zeros(3)
    for site, own in enumerate(counts):
        rows = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        rows[2] = RECORD if site == 0 else 0.0
        kept = class_rules.withhold(
            SUMS,
            {"class_sums": rows},
            offer=torch.tensor(offer).bool(),
            counts=torch.tensor(own),
            min_count=least,
            active=True,
        )
        total += kept["class_sums"].numpy()
        holders += kept[class_rules.HOLDERS].numpy()
    return total, holders


COUNTS = ([9, 9, 1], [9, 9, 0], [9, 9, 0])


def test_a_class_with_one_record_at_one_site_is_revealed_without_a_minimum() -> None:
    """Classes are offered whatever the holders, and one record is enough: the sum is that record."""
    total, holders = class_sums([1, 1, 1], 1, COUNTS)
    assert holders.tolist() == [3, 3, 1]
    assert total[2].tolist() == RECORD.tolist()
    assert total[0].tolist() != RECORD.tolist()
    # An honest server would not use the row, but it has it; it would not have offered the class either.
    kept, _ = class_rules.admit(
        SUMS, {"class_sums": total, class_rules.HOLDERS: holders}, torch.tensor([1, 1, 1])
    )
    assert not kept["class_sums"][2].any()
    offered = class_rules.offered(holders, 3).tolist()
    assert offered == [1, 1, 0]
    total, _ = class_sums(offered, 1, COUNTS)
    assert not total[2].any()


def test_a_lying_server_gets_a_class_of_one_holder_but_not_below_the_minimum() -> None:
    """The holder rule rests on the server's offer. ``min_class_count`` is the site's own."""
    lie = [1, 1, 1]
    total, holders = class_sums(lie, 1, COUNTS)
    assert holders[2] < class_rules.MIN_HOLDERS
    assert total[2].tolist() == RECORD.tolist()
    total, holders = class_sums(lie, 5, COUNTS)
    assert not total[2].any()
    assert holders[2] == 0
    # With enough records of its own, one site's class sum is what a lying server gets.
    total, _ = class_sums(lie, 5, ([9, 9, 5], [9, 9, 0], [9, 9, 0]))
    assert total[2].tolist() == RECORD.tolist()


# Differencing ------------------------------------------------------------------------------------


def test_differencing_two_cohorts_gives_a_static_vector_when_the_rule_is_off_and_is_refused_when_on() -> None:
    lax = ready(site_rules=SiteRules(any_static_cohort=True))
    whole, part = lax.run(0), lax.run(1, drop_term=[FOUR])
    found = difference(MIXED, "static", whole.groups["static"], part.groups["static"])
    assert found == lax.term(FOUR)["static"]  # every bit of it

    strict = ready(site_rules=SiteRules())
    assert "static" in strict.run(0).groups
    assert "static" not in strict.run(1, drop_term=[FOUR]).groups
    smaller = World(3, site_rules=SiteRules(), epoch=1)
    for name, site in smaller.sites.items():
        site.entries = strict.sites[name].entries
        refused(StaticCohortError, site.advertise, smaller.params.to_bytes())


def test_the_rule_is_each_sites_own_so_t_lax_sites_open_a_strict_sites_static_vector() -> None:
    """Every site follows its own policy; a site's vector is as safe as t - c others' policies make it."""
    world = World(4, site_rules=SiteRules(any_static_cohort=True))
    world.sites[FOUR].rules = SiteRules()
    world.set_up()
    whole, part = world.run(0), world.run(1, drop_term=[FOUR])  # a server that says that it dropped out
    found = difference(MIXED, "static", whole.groups["static"], part.groups["static"])
    assert found == world.term(FOUR)["static"]


def test_differencing_two_rounds_gives_an_update_that_did_not_change() -> None:
    """Update sums are opened for any survivors. A server that shows the same model in two rounds, and
    says that one site dropped out of one, gets what of that site's update is the same in both: all of
    it, were training to repeat itself. Its batches are others in each round; only noise that is new
    each time (differential privacy) stops it. A second *try* of one round is refused.
    """
    world = ready(site_rules=SiteRules())
    whole = world.run(0, sum_id=SumId(5, "train-0", 0))
    part = world.run(1, sum_id=SumId(6, "train-0", 0), drop_term=[FOUR])
    found = difference(MIXED, "update", whole.groups["update"], part.groups["update"])
    assert found == world.term(FOUR)["update"]


def test_a_second_try_of_a_sum_with_shares_given_is_refused() -> None:
    world = ready(site_rules=SiteRules())
    world.run(0, sum_id=SumId(5, "train-0", 0))
    with pytest.raises(ReplayError) as caught:
        world.run(1, sum_id=SumId(5, "train-0", 1), drop_term=[FOUR])
    assert "with revealed shares" in str(caught.value)


# Collusion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", [3, 4, 6])
def test_the_server_and_all_other_sites_read_the_last_honest_sites_vector(sites: int) -> None:
    """c = n - 1 colluders know every pair mask, and their shares alone give b. Nothing can help there."""
    world = ready(sites)
    victim, rest = names(sites)[-1], names(sites)[:-1]
    session, total = world.session.session, world.start(0)
    for name in rest:
        world.sites[name].mask(world.request(name, total), MIXED, world.term(name))
    own = {name: world.sites[name].state.slots[1].secrets for name in rest}
    total = world.start(1)
    masked = Masked.from_bytes(
        world.sites[victim].mask(world.request(victim, total), MIXED, world.term(victim))
    ).update
    left, fields = masked, MIXED
    for name in rest:  # the pair masks, each by the colluder's own a
        seed = slot_secret(own[name], "update", "pair").expose()
        secret = pair_secret(seed, session, 1, "update", name, victim)
        mask = keystream(pair_key(secret, session, 1, "update", name, victim), len(masked))
        left = add_integers(fields, "update", [{"update": left}, {"update": mask}])
    place = world.params.index(victim)
    shares = {
        name: slot_share(world.sites[name].state.slots[1].shares, place, "update", "self") for name in rest
    }
    if sites > 3:  # of three, t = 3: the victim itself has to reveal, as it does when all are there
        b = from_shares(world, shares)
        mask = keystream(self_key(b, session, 1, "update", victim), len(masked))
        assert difference(fields, "update", left, mask) == world.term(victim)["update"]
    # In any case the opened sum less the colluders' own terms is the victim's vector.
    opened = ready(sites).run(0).groups["update"]
    others = [world.term(name) for name in rest]
    assert (
        difference(fields, "update", opened, add_integers(fields, "update", others))
        == (world.term(victim)["update"])
    )


@pytest.mark.parametrize("sites", [5, 10])
def test_so_at_least_two_honest_sites_are_in_every_sum_and_only_their_sum_is_learnt(sites: int) -> None:
    """Why a survivor set has at least c + 2 sites: what c colluders can take off leaves two."""
    for colluders in range(1, sites - 1):
        params = ready_params(sites, colluders)
        least = rules.minimum_survivors(params)
        assert least - colluders >= 2
        assert params.threshold > colluders
    world = ready(sites)
    opened = world.run(0)
    colluding = names(sites)[: world.params.colluders]
    honest = [name for name in names(sites) if name not in colluding]
    known = add_integers(MIXED, "update", [world.term(name) for name in colluding])
    left = difference(MIXED, "update", opened.groups["update"], known)
    assert left == world.plain(honest)["update"]
    assert len(honest) >= 2
    assert left not in [world.term(name)["update"] for name in honest]


def ready_params(sites: int, colluders: int) -> Any:
    return World(sites, colluders=colluders).params


def test_a_threshold_for_an_honest_server_falls_to_a_malicious_one_with_one_colluder() -> None:
    """With n = 5 and t = 3, two honest sites and a colluder open one set, two others and it another.

    So ``semi_honest`` is a choice that each site's policy must allow, and 2t > n + c is the rule.
    """
    world = ready(5, trust="semi_honest")
    assert world.params.threshold == 3
    assert 2 * world.params.threshold <= 5 + world.params.colluders
    victim, colluder = names(5)[3], names(5)[4]
    first, second = names(5)[:2], names(5)[1:3]
    total = world.start(0)
    uploads = {
        name: Masked.from_bytes(world.sites[name].mask(world.request(name, total), MIXED, world.term(name)))
        for name in names(5)
    }
    receipts = {name: item.receipt for name, item in uploads.items()}
    place = world.params.index(victim)
    held = world.sites[colluder].state.slots[0].shares
    # The first site and the victim itself are told that everybody is there ...
    everybody = tuple(receipts[name] for name in names(5))
    full = RevealRequest(0, everybody, ()).to_bytes()
    b_shares = {
        name: Reveal.from_bytes(world.sites[name].reveal(full)).update[victim] for name in (first[0], victim)
    }
    b_shares[colluder] = slot_share(held, place, "update", "self")
    # ... two others that the victim is gone.
    rest = tuple(name for name in names(5) if name != victim)
    shown = tuple(receipts[name] for name in rest)
    fewer = AgreementRequest(0, shown).to_bytes()
    agreements = [Agreement.from_bytes(world.sites[name].agree(fewer)) for name in second]
    agreements.append(signed_agreement(world, colluder, shown))
    request = RevealRequest(0, shown, tuple(agreements)).to_bytes()
    a_shares = {name: Reveal.from_bytes(world.sites[name].reveal(request)).update[victim] for name in second}
    a_shares[colluder] = slot_share(held, place, "update", "pair")
    a, b = from_shares(world, a_shares), from_shares(world, b_shares)
    left = without_pair_masks(world, victim, 0, "update", uploads, a)
    mask = keystream(self_key(b, world.session.session, 0, "update", victim), len(left))
    assert difference(MIXED, "update", left, mask) == world.term(victim)["update"]


def test_a_colluding_silo_vouches_for_a_total_with_its_own_vector_added() -> None:
    """A server and one silo add a vector of their choice to a total, after they have seen it.

    The silo could have sent the vector in its term, but then without knowing the others'. Alone neither can:
    without the silo's lie the combinations do not add up.
    """
    world = ready()
    evidence = world.run(0).evidence
    true = evidence.total.groups
    poison = b"\x01" * len(true["update"])
    false = add_integers(MIXED, "update", [{"update": true["update"]}, {"update": poison}])
    world.evidence = replace(evidence, total=replace(evidence.total, groups={**true, "update": false}))
    total = world.start(1)
    world.contribute(total, names(3))
    raw = world.sites[FOUR].mask(world.request(FOUR, total), MIXED, world.term(FOUR))
    masked = Masked.from_bytes(raw)
    honest = masked.receipt.combinations
    made = challenge(world.session.session, world.evidence.total.told())
    layout = group_layout(MIXED, "update")
    more = combinations.combine(made, "update", layout, poison)
    lie = {**honest, "update": combinations.add(layout, [honest["update"], more])}
    receipt = signed_receipt(world, masked.receipt, combinations=lie)
    site = world.sites[FOUR]
    held = site.state.slots[1]
    site.state = site.state.with_slot(1, replace(held, receipt=receipt))  # it plays along, and gives shares
    total.add(FOUR, replace(masked, receipt=receipt).to_bytes())
    total.close()
    world.reveal(total, names(4))
    assert total.proved == () and total.open().groups == world.plain(names(4))
    for name in names(3):
        assert journal.TotalVerified(JOB, 0, 0, total.told) in world.sites[name].entries
