"""A site's policy: profiles, overrides, and jobs that ask for less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.conftest import SMALL

from tightframe import __version__
from tightframe.config.job import check_job, parse_job
from tightframe.config.policy import PROFILES, PolicyBlock
from tightframe.config.site import SiteEntry, check_record_options, open_data, parse_site_file
from tightframe.errors import PolicyError, SiteConfigError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.silo import SiloSession
from tightframe.securesum.rules import SiteRules


def _job(**changes: Any) -> Any:
    return parse_job({**SMALL, "summation": "secure", **changes})


def test_profiles_by_default() -> None:
    assert PolicyBlock().resolve(production=True).profile == "standard"
    assert PolicyBlock().resolve(production=False).profile == "research"
    chosen = PolicyBlock(profile="research", colluders=3).resolve(production=True)
    assert chosen.profile == "research" and chosen.colluders == 3 and chosen.class_rules_off


def test_standard_is_the_stricter_one() -> None:
    standard, research = PROFILES["standard"], PROFILES["research"]
    assert set(standard) == set(research)
    assert standard["require_secure_sum"] and not research["require_secure_sum"]
    for name in ("class_rules_off", "allow_sign_split", "semi_honest_server"):
        assert research[name] and not standard[name]
    assert standard["static_cohort"] == research["static_cohort"] == "enrolled"


def test_what_the_protocol_enforces() -> None:
    pin = "ab" * 32
    block = PolicyBlock(pins={"site-2": [pin]}, pinned_only=True, minimum_cohort=5, static_cohort="any")
    rules = block.resolve(production=True).site_rules()
    assert rules == SiteRules(
        minimum_cohort=5,
        colluders=1,
        trust=frozenset({"malicious"}),
        weights=frozenset({"exact", "power_of_two", "uniform"}),
        any_static_cohort=True,
        pins={"site-2": frozenset({bytes.fromhex(pin)})},
        pinned_only=True,
    )
    assert "semi_honest" in PolicyBlock(semi_honest_server=True).resolve(production=True).site_rules().trust


@pytest.mark.parametrize(
    "values",
    [{"pins": {"site-1": ["xyz"]}}, {"weights": []}, {"minimum_cohort": 0}, {"bogus": 1}, {"profile": "lax"}],
)
def test_wrong_rules_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PolicyBlock.model_validate(values)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"summation": "plain"}, "require_secure_sum"),
        ({"class_rules": "off"}, "class_rules_off"),
        ({"server_trust": "semi_honest"}, "semi_honest_server"),
    ],
)
def test_a_job_below_the_policy_is_refused_and_each_rule_named(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(PolicyError, match=rule) as caught:
        PolicyBlock().resolve(production=True).check(_job(**changes))
    assert caught.value.code == "TF-614"
    PolicyBlock().resolve(production=False).check(_job(**changes))


def test_all_broken_rules_are_listed_together() -> None:
    policy = PolicyBlock(weights=["uniform"], minimum_cohort=3).resolve(production=True)
    with pytest.raises(PolicyError) as caught:
        policy.check(_job(summation="plain", class_rules="off"))
    for rule in ("require_secure_sum", "class_rules_off", "weights", "minimum_cohort"):
        assert rule in str(caught.value)


def test_sums_split_by_sign_are_refused_at_enrolment_before_anything_is_declared(tmp_path: Path) -> None:
    """Which method sums so is known from its options alone; the other variants are accepted."""

    def enrol(variant: str, block: PolicyBlock) -> None:
        job = parse_job(
            {
                **SMALL,
                "summation": "plain",
                "method": "fedilc",
                "method_options": {"variant": variant},
            }
        )
        entry = SiteEntry(policy=block)
        session = SiloSession(
            SiloContext("site-1", job, entry, run_dir=tmp_path, records=open_data(job, "site-1", None))
        )
        session.handle("enroll", {"job_sha256": job.sha256(), "version": __version__})

    strict, loose = PolicyBlock(allow_sign_split=False), PolicyBlock()
    with pytest.raises(PolicyError, match="allow_sign_split"):
        enrol("inter_geo", strict)
    assert not list(tmp_path.rglob("declaration.json"))
    enrol("intra_geo", strict)
    enrol("inter_geo", loose)


EICU: dict[str, Any] = {
    **SMALL,
    "dataset": "eicu",
    "dataset_options": {"drugs": 40},
    "model": "mlp",
    "model_options": {"widths": [4]},
}


@pytest.mark.parametrize("option", [{"train_hospitals": 21}, {"equal_sizes": True}, {"window": "stay"}])
def test_a_job_may_not_choose_a_sites_records_unless_the_site_says_so(option: dict[str, Any]) -> None:
    """Two jobs over the same silos that differ by one hospital would tell that hospital's counts."""
    job = parse_job({**EICU, "dataset_options": {"drugs": 40, **option}})
    standard = PolicyBlock(profile="standard").resolve(production=False)
    research = PolicyBlock().resolve(production=False)
    (name,) = option
    with pytest.raises(PolicyError, match=f"accepted_options: the job asks for {name}"):
        check_record_options(job, SiteEntry(), standard)
    check_record_options(job, SiteEntry(), research)
    accepting = SiteEntry(accepted_options={"eicu": option})
    check_record_options(job, accepting, standard)
    with pytest.raises(PolicyError, match="is required"):  # and then nothing else
        check_record_options(parse_job(EICU), accepting, standard)


def test_it_holds_before_every_task(tmp_path: Path) -> None:
    job = parse_job({**EICU, "dataset_options": {"drugs": 40, "equal_sizes": True}, "summation": "secure"})
    entry = SiteEntry(policy=PolicyBlock(profile="standard"))
    session = SiloSession(SiloContext("site-1", job, entry, run_dir=tmp_path))
    for task in ("enroll", "confirm", "contribute", "reveal", "baseline"):
        with pytest.raises(PolicyError, match="equal_sizes"):
            session.handle(task, {})


def test_accepted_options_with_a_wrong_name_are_refused_with_the_site_file() -> None:
    for accepted, named in (
        ({"eicu": {"drugs": 3}}, "drugs"),
        ({"nothing": {}}, "nothing"),
        ({"eicu": {"window": "year"}}, "window"),
    ):
        with pytest.raises(SiteConfigError, match=named):
            parse_site_file({"sites": {"site-1": {"accepted_options": accepted}}})


def test_the_twin_may_use_single_records_and_real_ones_five() -> None:
    policy = PolicyBlock().resolve(production=False)
    assert (policy.class_count(synthetic=True), policy.class_count(synthetic=False)) == (1, 5)
    assert PolicyBlock(min_class_count=9).resolve(production=False).class_count(synthetic=True) == 9


def test_what_is_loose_is_told() -> None:
    assert PolicyBlock().resolve(production=True).describe() == "standard"
    told = PolicyBlock().resolve(production=False).describe()
    for rule in ("require_secure_sum off", "class_rules_off on", "allow_sign_split on"):
        assert rule in told


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sites": ["a", "b"], "min_sites": 2}, "sites"),
        ({"colluders": 2}, "colluders"),
        ({"colluders": 0}, "colluders"),
        ({"summation": "fast"}, "summation"),
    ],
)
def test_secure_sums_that_cannot_be(changes: dict[str, Any], key: str) -> None:
    job, problems = check_job({**SMALL, "summation": "secure", **changes})
    assert job is None and any(problem.startswith(key) for problem in problems)
    assert check_job({**SMALL, "sites": ["a", "b"], "min_sites": 2, "summation": "plain"})[0] is not None
