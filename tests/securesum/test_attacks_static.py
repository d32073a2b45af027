"""Attacks on the static group: it hardly changes, so a second cohort would give a site's vector away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.securesum.hostile import closed, names, ready, refused, refused_by
from tests.securesum.protocol import DATASET, JOB, MIXED, World

from tightframe.securesum import journal
from tightframe.securesum.errors import ReplayError, StateError, StaticCohortError, SurvivorsError
from tightframe.securesum.messages import FieldSpec, Reveal, RevealRequest, SumId, TermRequest

ONE, TWO, THREE, FOUR = names(4)


def opened_once() -> World:
    """All four have opened their static group."""
    world = ready()
    assert "static" in world.run(0).groups
    return world


def with_journals(world: World, earlier: World) -> World:
    """The same sites, later: their journals have outlived the run."""
    for name, site in world.sites.items():
        site.entries = list(earlier.sites[name].entries)
    return world


@pytest.mark.parametrize(
    ("when", "changes"),
    [
        ("in this job", {"epoch": 1}),
        ("in a later job", {"job": "job-2", "lineage": "job-2"}),
        ("in a resumed job", {"job": "job-2", "lineage": JOB}),
        ("in this job, as if it were another lineage", {"epoch": 1, "lineage": "job-0"}),
    ],
)
def test_the_static_group_of_another_cohort_is_refused(when: str, changes: dict[str, Any]) -> None:
    earlier = opened_once()
    later = with_journals(
        World(3, **changes), earlier
    )  # three of the four: the difference would be the fourth's vector
    for site in later.sites.values():
        refused(StaticCohortError, site.advertise, later.params.to_bytes())
        assert site.state is None
    shut = with_journals(World(3, static_open=False, **changes), earlier)
    shut.set_up()
    assert shut.run(0, sum_id=SumId(1, "train-0")).groups == {
        "update": shut.plain(shut.params.roster)["update"]
    }
    same = with_journals(World(4, **changes), earlier)
    same.set_up()
    assert same.run(0, sum_id=SumId(1, "train-0")).groups == same.plain(names(4))


@pytest.mark.parametrize("empty", [(), (FieldSpec("none", (0,), 32, 0, 1.0, "static"),)])
def test_a_job_without_static_sums_is_of_any_cohort_and_binds_nobody(empty: tuple[FieldSpec, ...]) -> None:
    """As one with differential privacy is, whose noisy sums are in the update group."""
    schemas = {"train": (FieldSpec("weight", (2, 3), 32, 8, 1.0, "update"), *empty)}
    later = with_journals(World(3, job="job-2", lineage="job-2", schemas=schemas), opened_once())
    later.set_up()
    assert later.run(0).groups == later.plain(names(3))
    for site in later.sites.values():
        opened = [entry.roster for entry in site.entries if isinstance(entry, journal.StaticOpened)]
        assert opened == [names(4)]


def test_after_a_drop_out_no_site_reveals_anything_of_the_static_group() -> None:
    world = ready(stored=True)
    total = closed(world, 0, (FOUR,))
    world.agree(total, names(3))
    request = total.reveal_request().to_bytes()
    for name in names(3):
        raw = world.sites[name].reveal(request)
        assert Reveal.from_bytes(raw).static == {}
        total.add_reveal(name, raw)
        assert not any(isinstance(entry, journal.StaticOpened) for entry in world.sites[name].entries)
    assert set(total.open().groups) == {"update"}


def test_a_drop_out_cannot_be_taken_back_to_open_the_static_group() -> None:
    """After an answer for fewer, the same slot with everybody is refused: its static group is lost."""
    world = ready(stored=True)
    receipts = closed(world).receipts
    total = world.start(0)
    total._receipts = {item.name: item for item in receipts[:3]}
    total.close()
    world.agree(total, names(3))
    everybody = RevealRequest(0, receipts, {}).to_bytes()
    refused_by(world, names(3), SurvivorsError, lambda site: site.reveal(everybody))
    world.reveal(total, names(3))
    refused_by(world, names(3), SurvivorsError, lambda site: site.reveal(everybody))
    assert set(total.open().groups) == {"update"}


def test_two_jobs_at_a_time_cannot_open_two_cohorts() -> None:
    """Both enrolled before either opened anything: the first answer of a site settles it."""
    whole, part = World(4, seed="whole"), World(3, seed="part", job="job-2", lineage="job-2")
    for name, site in part.sites.items():
        site.entries = whole.sites[name].entries  # one journal a site
    whole.set_up()
    part.set_up()
    totals = {}
    for world in (whole, part):
        totals[world.params.job] = closed(world)
    whole.reveal(totals[JOB], names(4))
    part.reveal(totals["job-2"], names(3))
    assert "static" in totals[JOB].open().groups
    assert set(totals["job-2"].open().groups) == {"update"}
    # And from then on not even a masked static term leaves for the other cohort.
    request = TermRequest(1, SumId(1, "train-0"), "train").to_bytes()
    refused_by(
        part, names(3), StaticCohortError, lambda site: site.mask(request, MIXED, part.term(site.name))
    )


def test_static_shares_are_no_update_shares_and_have_one_slot() -> None:
    """A group's secrets are its own: what opens the update group after a drop-out opens no static one."""
    world = ready()
    keys = set()
    for slot in range(3):
        for item in world.session.peers.values():
            for group in ("update", "static"):
                keys |= {item.slot_key(slot, group), item.commitment(slot, group)}  # type: ignore[arg-type]
    assert len(keys) == 3 * 4 * 2 * 2


def test_a_cohort_that_a_person_accepted_is_the_only_other_one() -> None:
    earlier = opened_once()
    later = with_journals(World(3, epoch=1), earlier)
    for site in later.sites.values():
        site.entries.append(journal.CohortAccepted(DATASET, names(3)))
    later.set_up()
    assert "static" in later.run(0, sum_id=SumId(1, "train-0")).groups
    again = with_journals(World(4, epoch=2), earlier)
    for name in names(3):
        again.sites[name].entries = later.sites[name].entries
        refused(StaticCohortError, again.sites[name].advertise, again.params.to_bytes())


def test_a_static_sum_that_was_given_up_is_not_opened_later() -> None:
    world = ready(stored=True)
    lost = closed(world)
    world.run(1)
    request = lost.reveal_request().to_bytes()
    refused_by(world, names(4), StateError, lambda site: site.reveal(request))
    again = replace(TermRequest.from_bytes(world.request(ONE, lost)), setup=b"").to_bytes()
    refused_by(world, names(4), ReplayError, lambda site: site.mask(again, MIXED, world.term(site.name)))
