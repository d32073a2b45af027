"""The table of thresholds, what it is for, and every demand of ``check`` broken by itself."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightframe.securesum.errors import ParametersError
from tightframe.securesum.messages import Params
from tightframe.securesum.rules import (
    MAX_SITES,
    MAX_SLOTS,
    Expected,
    SiteRules,
    check,
    default_colluders,
    honest_sites,
    minimum_survivors,
    threshold,
)

CONFIG = bytes(range(32))
SITES = tuple(f"site-{place}" for place in range(6))


def params(**changes: object) -> Params:
    """Of six sites, as good as they must be and no better."""
    values: dict[str, object] = {
        "job": "job-1",
        "lineage": "job-1",
        "epoch": 0,
        "roster": SITES,
        "threshold": 5,
        "colluders": 1,
        "slots": 1,
        "schemas": {},
        "weights": "exact",
        "trust": "malicious",
        "min_sites": 3,
        "static_open": True,
        "config_sha256": CONFIG,
        "version": "0.1.0",
    }
    return Params(**{**values, **changes})  # type: ignore[arg-type]


EXPECTED = Expected(
    name="site-2",
    job="job-1",
    lineage="job-1",
    sites=frozenset(SITES),
    colluders=1,
    trust="malicious",
    threshold=5,
    min_sites=3,
    weights="exact",
    config_sha256=CONFIG,
    version="0.1.0",
)


def expecting(wanted: Params, **changes: object) -> Expected:
    """What a site knows whose job asks for exactly this, so that other demands are tried by themselves."""
    values = {name: getattr(wanted, name) for name in ("colluders", "trust", "threshold", "min_sites")}
    return dataclasses.replace(EXPECTED, **{**values, **changes})


def accepted(wanted: Params, rules: SiteRules, **changes: object) -> None:
    check(wanted, rules, expecting(wanted, **changes))


@pytest.mark.parametrize(("sites", "shares"), [(3, 3), (4, 3), (6, 5), (10, 7), (20, 14), (100, 67)])
def test_thresholds_of_the_specification(sites: int, shares: int) -> None:
    assert threshold(sites, default_colluders(sites)) == shares


@pytest.mark.parametrize(
    ("sites", "colluders"), [(3, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10), (109, 10), (250, 25)]
)
def test_default_colluders(sites: int, colluders: int) -> None:
    assert default_colluders(sites) == colluders


@pytest.mark.many
@pytest.mark.parametrize("sites", range(3, MAX_SITES + 1))
def test_thresholds_for_every_cohort_and_number_of_colluders(sites: int) -> None:
    for colluders in range(1, sites - 1):
        malicious = threshold(sites, colluders, "malicious")
        # Two survivor sets need t - c honest signers each, who sign once: 2(t - c) <= n - c is excluded.
        assert 2 * malicious > sites + colluders
        assert 2 * (malicious - colluders) > sites - colluders
        assert 3 * malicious > 2 * sites
        assert malicious <= sites
        # It is the least such number.
        least = malicious - 1
        assert not (2 * least > sites + colluders and 3 * least > 2 * sites)

        semi_honest = threshold(sites, colluders, "semi_honest")
        assert 2 * semi_honest > sites
        assert colluders < semi_honest <= malicious
        assert not (2 * (semi_honest - 1) > sites and semi_honest - 1 > colluders)


def two_sets_can_open(sites: int, colluders: int, shares: int) -> bool:
    """By trying all ways to part the honest sites: colluders sign both sets, every honest site one."""
    honest = set(range(colluders, sites))
    return any(
        len(first) + colluders >= shares and len(honest - set(first)) + colluders >= shares
        for size in range(len(honest) + 1)
        for first in combinations(honest, size)
    )


@pytest.mark.parametrize("sites", range(3, 9))
def test_no_two_survivor_sets_can_both_be_opened(sites: int) -> None:
    for colluders in range(1, sites - 1):
        assert not two_sets_can_open(sites, colluders, threshold(sites, colluders))
        # Where 2t > n + c is what decides, and no rounding adds to it, one share less is not enough.
        if sites + colluders >= 2 * (2 * sites // 3) and (sites + colluders) % 2 == 0:
            assert two_sets_can_open(sites, colluders, threshold(sites, colluders) - 1)


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"threshold": 2, "min_sites": 1, "colluders": 0}, 3),
        ({"threshold": 5, "min_sites": 3}, 5),
        ({"threshold": 3, "min_sites": 6}, 6),
        ({"threshold": 3, "min_sites": 3, "colluders": 3}, 5),
    ],
)
def test_the_smallest_survivor_set_is_the_largest_of_its_bounds(changes: dict[str, int], least: int) -> None:
    assert minimum_survivors(params(**changes)) == least


# The demands.


def test_parameters_as_they_must_be_pass() -> None:
    check(params(), SiteRules(), EXPECTED)
    accepted(params(slots=MAX_SLOTS, min_sites=6, threshold=6, colluders=4), SiteRules())
    semi_honest = params(trust="semi_honest", threshold=4)
    accepted(semi_honest, SiteRules(trust=frozenset({"malicious", "semi_honest"})))
    check(params(), SiteRules(minimum_cohort=3, colluders=0), EXPECTED)
    accepted(params(roster=SITES[1:4], threshold=3), SiteRules())
    check(params(slots=9), SiteRules(), dataclasses.replace(EXPECTED, slots=9, schemas={}))


def test_the_smallest_and_the_largest_cohort() -> None:
    for count, shares in ((3, 3), (MAX_SITES, 167)):
        roster = tuple(sorted(f"site-{place}" for place in range(count)))
        accepted(params(roster=roster, threshold=shares), SiteRules(), sites=frozenset(roster))


MANY = tuple(sorted(f"site-{place}" for place in range(MAX_SITES + 1)))

BROKEN = {
    "job": (params(job="job-2"), {}, {}, "the job id", "'job-1'", "'job-2'"),
    "lineage": (params(lineage="job-0"), {}, {}, "the lineage", "'job-1'", "'job-0'"),
    "configuration": (
        params(config_sha256=bytes(32)),
        {},
        {},
        "the SHA-256 of the job's configuration",
        CONFIG.hex(),
        bytes(32).hex(),
    ),
    "version": (params(version="0.1.1"), {}, {}, "the package version", "0.1.0", "0.1.1"),
    "weights of the job": (params(weights="uniform"), {}, {}, "the weight rule", "exact", "uniform"),
    "weights of the policy": (
        params(),
        {"weights": frozenset({"uniform", "power_of_two"})},
        {},
        "the weight rule",
        "one of ['power_of_two', 'uniform'] (this site's policy)",
        "exact",
    ),
    "unsorted": (
        params(roster=SITES[::-1]),
        {},
        {},
        "the roster",
        "sorted, each site once",
        str(list(SITES[::-1])),
    ),
    "twice": (
        params(roster=("site-0", "site-1", "site-2", "site-2")),
        {},
        {},
        "the roster",
        "sorted, each site once",
        "['site-0', 'site-1', 'site-2', 'site-2']",
    ),
    "stranger": (
        params(roster=(*SITES, "site-x"), threshold=5),
        {},
        {},
        "the roster",
        f"silos of the job {sorted(SITES)}",
        str([*SITES, "site-x"]),
    ),
    "without this site": (
        params(roster=("site-0", "site-1", "site-3"), threshold=3),
        {},
        {},
        "the roster",
        "with this site, site-2",
        "['site-0', 'site-1', 'site-3']",
    ),
    "two sites": (
        params(roster=("site-1", "site-2"), threshold=2),
        {"minimum_cohort": 2},
        {},
        "the number of sites",
        "from 3 to 250",
        "2",
    ),
    "fewer sites than the policy's": (
        params(),
        {"minimum_cohort": 7},
        {},
        "the number of sites",
        "at least 7 (this site's policy: minimum_cohort)",
        "6",
    ),
    "too many sites": (
        params(roster=MANY, threshold=168),
        {},
        {"sites": frozenset(MANY)},
        "the number of sites",
        "from 3 to 250",
        "251",
    ),
    "trust": (
        params(trust="semi_honest"),
        {},
        {},
        "the trust model of the server",
        "one of ['malicious'] (this site's policy)",
        "semi_honest",
    ),
    "fewer colluders than the policy's": (
        params(colluders=1),
        {"colluders": 2},
        {},
        "the number of assumed colluders",
        "at least 2 (this site's policy: colluders)",
        "1",
    ),
    "no colluders at all": (
        params(colluders=0),
        {"colluders": 0},
        {},
        "the number of assumed colluders",
        "at least 1 (this site's policy: colluders)",
        "0",
    ),
    "low threshold": (params(threshold=4), {}, {}, "the threshold", "from 5 to 6", "4"),
    "low threshold for the colluders": (
        params(colluders=4, threshold=5),
        {},
        {},
        "the threshold",
        "from 6 to 6",
        "5",
    ),
    "low threshold of a server assumed semi-honest": (
        params(trust="semi_honest", threshold=3),
        {"trust": frozenset({"semi_honest"})},
        {},
        "the threshold",
        "from 4 to 6",
        "3",
    ),
    "high threshold": (params(threshold=7), {}, {}, "the threshold", "from 5 to 6", "7"),
    "too many colluders": (
        params(colluders=5, threshold=6),
        {},
        {},
        "the number of assumed colluders",
        "at most 4",
        "5",
    ),
    "survivors of the job": (
        params(min_sites=3),
        {},
        {"min_sites": 4},
        "the smallest survivor set",
        "4 (the job's)",
        "3",
    ),
    "more survivors than the job's": (
        params(min_sites=5),
        {},
        {"min_sites": 4},
        "the smallest survivor set",
        "4 (the job's)",
        "5",
    ),
    "colluders of the job": (
        params(colluders=1),
        {},
        {"colluders": 2},
        "the number of assumed colluders",
        "2 (the job's)",
        "1",
    ),
    "trust of the job": (
        params(trust="semi_honest"),
        {"trust": frozenset({"malicious", "semi_honest"})},
        {"trust": "malicious"},
        "the trust model of the server",
        "malicious (the job's)",
        "semi_honest",
    ),
    "threshold of the job": (params(), {}, {"threshold": 6}, "the threshold", "6 (the job's)", "5"),
    "slots of the job": (params(slots=2), {}, {"slots": 1}, "the number of slots", "1 (the job's)", "2"),
    "a schema that the job has not": (
        params(schemas={"train": (), "more": ()}),
        {},
        {"schemas": {"train": (), "other": ()}},
        "the schemas",
        "those of the job's sums",
        "a difference in ['more', 'other']",
    ),
    "survivors of the policy": (
        params(min_sites=4),
        {"minimum_cohort": 5},
        {},
        "the smallest survivor set",
        "at least 5 (this site's policy: minimum_cohort)",
        "4",
    ),
    "no slots": (params(slots=0), {}, {}, "the number of slots", "from 1 to 256", "0"),
    "too many slots": (params(slots=257), {}, {}, "the number of slots", "from 1 to 256", "257"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_demand_broken_by_itself_is_named(case: str) -> None:
    bad, rules, known, what, expected, found = BROKEN[case]
    with pytest.raises(ParametersError) as caught:
        check(bad, SiteRules(**rules), expecting(bad, **known))
    error = caught.value
    assert (error.code, error.what, error.expected, error.found) == ("TF-601", what, expected, found)
    assert error.blamed is None


def test_a_server_cannot_lower_a_rule_by_another_parameter() -> None:
    """A threshold is held against the colluders and the trust that go with it, after those are checked."""
    with pytest.raises(ParametersError, match="trust model of the server"):
        check(params(trust="semi_honest", threshold=4), SiteRules(), EXPECTED)
    with pytest.raises(ParametersError, match="assumed colluders"):
        check(params(colluders=0), SiteRules(), EXPECTED)


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 12),
    st.sampled_from(["malicious", "semi_honest"]),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_whatever_passes_is_safe(
    sites: int, shares: int, colluders: int, least: int, trust: str, cohort: int, assumed: int
) -> None:
    roster = tuple(sorted({"site-2", *(f"site-{place}" for place in range(sites))}))
    wanted = params(roster=roster, threshold=shares, colluders=colluders, min_sites=least, trust=trust)
    rules = SiteRules(minimum_cohort=cohort, colluders=assumed, trust=frozenset({"malicious", "semi_honest"}))
    try:
        accepted(wanted, rules, sites=frozenset(roster))
    except ParametersError:
        return
    count = len(roster)
    assert count >= 3
    assert colluders >= max(1, assumed)
    assert colluders < shares <= count
    assert minimum_survivors(wanted) >= max(3, cohort, colluders + 2, shares)
    assert 2 * shares > (count + colluders if trust == "malicious" else count)


def test_however_many_are_assumed_to_collude_a_site_counts_on_itself() -> None:
    assert [honest_sites(5, colluders) for colluders in (1, 3, 4, 5, 9)] == [4, 2, 1, 1, 1]
