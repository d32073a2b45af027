"""Attacks on the static group: it hardly changes, so a second cohort would give a site's vector away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.securesum.hostile import (
    agreed,
    closed,
    names,
    ready,
    refused,
    refused_by,
)
from tests.support.securesum.protocol import DATASET, JOB, MIXED, World

from tightframe.securesum.errors import (
    ReleaseProfileError,
    ReplayError,
    StateError,
    StaticCohortError,
    SurvivorsError,
)
from tightframe.securesum.messages import FieldSpec, Reveal, RevealRequest, SumId, TermRequest
from tightframe.securesum.site import journal

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
    whole, total = closed(world), world.start(0)
    receipts = whole.receipts
    total._receipts, total._links = {item.name: item for item in receipts[:3]}, whole._links
    total.close()
    world.agree(total, names(3))
    everybody = RevealRequest(0, receipts, ()).to_bytes()
    refused_by(world, names(3), SurvivorsError, lambda site: site.reveal(everybody))
    world.reveal(total, names(3))
    refused_by(world, names(3), SurvivorsError, lambda site: site.reveal(everybody))
    assert set(total.open().groups) == {"update"}


def two_jobs() -> tuple[World, World]:
    """Two jobs of other cohorts, both set up, with one journal a site."""
    whole, part = World(4, seed="whole"), World(3, seed="part", job="job-2", lineage="job-2")
    for name, site in part.sites.items():
        site.entries = whole.sites[name].entries
    whole.set_up()
    part.set_up()
    return whole, part


def mask_refused(world: World, sites: tuple[str, ...]) -> None:
    """No static term leaves for the world's cohort."""
    total = world.start(0)
    refused_by(
        world,
        sites,
        StaticCohortError,
        lambda site: site.mask(world.request(site.name, total), MIXED, world.term(site.name)),
    )


def test_two_jobs_at_a_time_cannot_open_two_cohorts() -> None:
    """Both enrolled before either masked anything: the first term of a site settles it."""
    whole, part = two_jobs()
    total = agreed(whole)
    mask_refused(part, names(3))
    whole.reveal(total, names(4))
    assert "static" in total.open().groups
    mask_refused(part, names(3))


@pytest.mark.parametrize("asked", [(), (TWO,), (TWO, THREE)])
def test_a_site_that_is_not_asked_to_reveal_remembers_its_cohort_all_the_same(asked: tuple[str, ...]) -> None:
    """Whoever is asked: t others' shares open a masked term, so that masking it is what counts."""
    whole, part = two_jobs()
    total = agreed(whole)
    whole.reveal(total, asked)
    mask_refused(part, names(3))
    again = with_journals(World(3, job="job-3", lineage="job-3"), whole)
    for site in again.sites.values():
        refused(StaticCohortError, site.advertise, again.params.to_bytes())


@pytest.mark.parametrize("stored", [False, True])
def test_a_term_that_never_left_binds_its_site_as_well(stored: bool) -> None:
    """A crash after the journal and before the send: nobody can say that it did not leave."""
    world = ready(stored=stored)
    total = world.start(0)
    world.sites[ONE].mask(world.request(ONE, total), MIXED, world.term(ONE))  # and the answer is lost
    later = with_journals(World(3, job="job-2", lineage="job-2"), world)
    refused(StaticCohortError, later.sites[ONE].advertise, later.params.to_bytes())
    for name in (TWO, THREE):
        later.sites[name].advertise(later.params.to_bytes())


def test_counts_that_a_drop_out_kept_shut_open_later_for_the_same_cohort_and_for_no_other() -> None:
    world = ready(stored=True)
    total = closed(world, 0, (FOUR,))
    world.agree(total, names(3))
    world.reveal(total, names(3))
    assert set(total.open().groups) == {"update"}
    later = with_journals(World(3, job="job-2", lineage="job-2"), world)
    for site in later.sites.values():
        refused(StaticCohortError, site.advertise, later.params.to_bytes())
    same = with_journals(World(4, job="job-2", lineage="job-2"), world)
    same.set_up()
    assert same.run(0).groups == same.plain(names(4))


def test_a_masked_static_group_stays_shut_once_a_person_accepts_another_cohort() -> None:
    world = ready()
    total = agreed(world)
    for site in world.sites.values():
        site.entries.append(journal.CohortAccepted(DATASET, names(3)))
    world.reveal(total, names(4))
    assert set(total.open().groups) == {"update"}


PROFILE: journal.Profile = (("update_norm", "none"), ("weights", "exact"))
OTHER: journal.Profile = (("update_norm", "2"), ("weights", "exact"))


def with_profile(world: World, profile: journal.Profile | None) -> World:
    for site in world.sites.values():
        site.profile = profile
    return world


def test_a_data_set_has_one_release_profile_until_a_person_accepts_another() -> None:
    world = with_profile(World(4), PROFILE)
    world.set_up()
    world.run(0)
    other = {"job": "job-2", "lineage": "job-2"}
    later = with_profile(with_journals(World(4, **other), world), OTHER)
    for site in later.sites.values():
        error = refused(ReleaseProfileError, site.advertise, later.params.to_bytes())
        assert "update_norm none" in str(error) and "update_norm 2" in str(error)
        assert "weights" not in str(error), "what is the same is not told of"
    private = with_profile(with_journals(World(4, **other), world), None)
    private.set_up()
    private.run(0)
    for site in later.sites.values():
        site.entries.append(journal.ProfileAccepted(DATASET, OTHER))
    later.set_up()
    later.run(0)
    # Both may be used from then on, and a third one not.
    back = with_profile(with_journals(World(4, job="job-3", lineage="job-3"), later), PROFILE)
    back.set_up()
    back.run(0)
    third = with_profile(
        with_journals(World(4, job="job-4", lineage="job-4"), later), (("weights", "uniform"),)
    )
    for site in third.sites.values():
        refused(ReleaseProfileError, site.advertise, third.params.to_bytes())


def test_a_term_of_another_profile_is_not_masked_where_both_jobs_were_set_up_before() -> None:
    world, later = with_profile(World(4), PROFILE), World(4, job="job-2", lineage="job-2")
    with_profile(later, OTHER)
    for name, site in later.sites.items():
        site.entries = world.sites[name].entries
    world.set_up()
    later.set_up()
    closed(world)
    total = later.start(0)
    refused_by(
        later,
        names(4),
        ReleaseProfileError,
        lambda site: site.mask(later.request(site.name, total), MIXED, later.term(site.name)),
    )
    closed(world, 1)
    used = [entry for entry in world.sites[ONE].entries if isinstance(entry, journal.ProfileUsed)]
    assert used == [journal.ProfileUsed(DATASET, PROFILE, JOB)], "once a data set and profile"


def test_static_shares_are_no_update_shares_and_have_one_slot() -> None:
    """A group's secrets are its own: what opens the update group after a drop-out opens no static one."""
    world = ready()
    keys = set()
    for slot in range(3):
        for item in world.session.peers.values():
            for group in ("update", "static"):
                for kind in ("self", "pair"):
                    keys.add(item.commitment(slot, group, kind))  # type: ignore[arg-type]
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
    lost = agreed(world)
    world.run(1)
    request = lost.reveal_request().to_bytes()
    refused_by(world, names(4), StateError, lambda site: site.reveal(request))
    again = replace(TermRequest.from_bytes(world.request(ONE, lost)), setup=b"").to_bytes()
    refused_by(world, names(4), ReplayError, lambda site: site.mask(again, MIXED, world.term(site.name)))
