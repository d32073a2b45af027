"""A site's policy: profiles, overrides, and jobs that ask for less."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support import ROOT
from tests.support.jobs import SMALL

from tightframe import __version__
from tightframe.config.job import Evaluation, check_job, parse_job
from tightframe.config.policy import Policy, PolicyBlock
from tightframe.config.profiles import CLEAR_METRICS, PROFILES
from tightframe.config.refusals import MAX_TOLD, BelowPolicyError
from tightframe.config.site import SiteEntry, check_record_options, open_data, parse_site_file
from tightframe.errors import PolicyError, SiteConfigError
from tightframe.methods.fedilc import FedILCConfig
from tightframe.methods.fedrod import FedRODConfig
from tightframe.rounds.context import SiloContext
from tightframe.rounds.silo.session import SiloSession
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
    [
        {"pins": {"site-1": ["xyz"]}},
        {"weights": []},
        {"minimum_cohort": 0},
        {"bogus": 1},
        {"profile": "lax"},
        {"epsilon_cap": 0.0},
        {"epsilon_cap": float("inf")},
        {"delta_cap": 1.0},
        {"max_releases": 0},
        {"charged_retries": -1},
        {"neighbours": "image"},
        {"clear_metrics": ["accuracy"]},
        {"allowed_submitters": [""]},
        {"required_privacy": 1},
    ],
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
        ({"answer_grid": 0.5}, "min_answer_grid"),
    ],
)
def test_a_job_below_the_policy_is_refused_and_each_rule_named(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(PolicyError, match=rf"^TF-614: [\s\S]*{rule}"):
        PolicyBlock().resolve(production=True).check(_job(**changes))
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


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dataset_options": {"drugs": 40, "equal_sizes": True}, "summation": "secure"}, "equal_sizes"),
        ({"summation": "plain"}, "require_secure_sum"),
        ({"training": {**SMALL["training"], "loop": "careful"}, "summation": "secure"}, "training_loops"),
    ],
)
def test_it_holds_before_every_task(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    job = parse_job({**EICU, **changes})
    entry = SiteEntry(policy=PolicyBlock(profile="standard"))
    session = SiloSession(SiloContext("site-1", job, entry, run_dir=tmp_path))
    for task in ("enroll", "confirm", "contribute", "reveal", "baseline"):
        with pytest.raises(PolicyError, match=rule):
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
    assert PolicyBlock().resolve(production=False).name() == "research"
    changed = PolicyBlock(profile="research", max_rounds=5).resolve(production=False)
    assert changed.name() == "research, with max_rounds 5"
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


class _Privacy:
    """A job's ``privacy`` block, as the job's own model has it."""

    def __init__(self, **changes: Any) -> None:
        values = {
            "epsilon": 8.0,
            "delta": 1e-5,
            "neighbours": "record",
            "releases": 10,
            "evaluation": "local",
            "evaluations": 1,
        }
        self.__dict__.update(values | changes)


class _Private:
    """A job with differential privacy: ``config.job`` may or may not know the key yet."""

    def __init__(self, job: Any, **privacy: Any) -> None:
        self._job, self.privacy = job, _Privacy(**privacy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


def _strict(**changes: Any) -> Any:
    return PolicyBlock(profile="strict", **changes).resolve(production=True)


def _refused(policy: Any, job: Any, **how: Any) -> list[list[str]]:
    with pytest.raises(BelowPolicyError) as caught:
        policy.check(job, **how)
    assert caught.value.code == "TF-614"
    return caught.value.outside()


FITTING: dict[str, Any] = {
    "weights": "uniform",
    "sites": [f"site-{i}" for i in range(1, 6)],
    "min_sites": 5,
}


def test_strict_requires_privacy_within_its_caps() -> None:
    policy = _strict()
    fitting = {**FITTING, "rounds": 50}
    assert _refused(policy, _job(**FITTING)) == [
        ["required_privacy", "no differential privacy", "a job with a privacy block"]
    ]
    policy.check(_Private(_job(**FITTING)))
    policy.check(_Private(_job(**fitting), releases=7, evaluation="noisy", evaluations=3))
    # Four rounds can hold three releases of class sums, whatever the job asks.
    few = _job(**FITTING, rounds=4)
    policy.check(_Private(few, releases=99, evaluation="noisy", evaluations=3))
    assert _refused(
        _strict(max_releases=6), _Private(few, releases=99, evaluation="noisy", evaluations=99)
    ) == [["max_releases", "7", "at most 6"]]
    for privacy, told in (
        ({"epsilon": 8.5}, ["epsilon_cap", "8.5", "at most 8"]),
        ({"epsilon": None}, ["epsilon_cap", "no limit", "at most 8"]),
        ({"delta": 1e-4}, ["delta_cap", "0.0001", "at most 1e-05"]),
        ({"releases": 11}, ["max_releases", "11", "at most 10"]),
        ({"evaluation": "noisy", "evaluations": 3}, ["max_releases", "13", "at most 10"]),
        ({"neighbours": "patient"}, ["neighbours", "patient", "record"]),
    ):
        assert _refused(policy, _Private(_job(**fitting), **privacy)) == [told]
    everything = _Private(_job(**fitting), epsilon=9.0, delta=1e-3, releases=99, neighbours="patient")
    assert [rule for rule, *_ in _refused(policy, everything)] == [
        "epsilon_cap",
        "delta_cap",
        "max_releases",
        "neighbours",
    ]


def test_a_site_counts_its_budget_of_records_or_of_patients() -> None:
    records, patients = (_job(**FITTING, privacy={"neighbours": level}) for level in ("record", "patient"))
    _strict().check(records)
    assert _refused(_strict(), patients) == [["neighbours", "patient", "record"]]
    _strict(neighbours="patient").check(patients)
    assert _refused(_strict(neighbours="patient"), records) == [["neighbours", "record", "patient"]]
    for job in (records, patients):
        PolicyBlock().resolve(production=True).check(job)


def test_exact_evaluations_of_more_models_are_refused_with_what_to_set() -> None:
    many = _job(**FITTING, rounds=30, evaluation={"models": 25})
    few = _job(**FITTING, rounds=24, evaluation={"models": 25})
    for policy, most in ((PolicyBlock().resolve(production=True), 11), (_strict(required_privacy=False), 6)):
        for job in (many, few):
            assert _refused(policy, job) == [
                [
                    "max_evaluations",
                    "exact evaluations of 25 models",
                    f"at most {most} in evaluation.models",
                ]
            ]
            policy.check(job.model_copy(update={"evaluation": Evaluation(models=most)}))
        policy.check(_job(**FITTING, rounds=most - 1, evaluation={"models": 25}))
    nothing_exact = _job(**FITTING, rounds=30, privacy={}, evaluation={"models": 25})
    PolicyBlock().resolve(production=True).check(nothing_exact)
    PolicyBlock(max_evaluations=None).resolve(production=True).check(many)
    PolicyBlock(profile="research").resolve(production=False).check(many)
    assert many.sha256() != _job(**FITTING, rounds=30).sha256() and "models" not in Evaluation().model_dump()


def test_caps_hold_for_a_job_that_offers_privacy_unasked_and_null_lifts_them() -> None:
    standard = PolicyBlock().resolve(production=True)
    standard.check(_job())
    assert _refused(standard, _Private(_job(), epsilon=99.0)) == [["epsilon_cap", "99", "at most 8"]]
    lifted = PolicyBlock.model_validate({"epsilon_cap": None}).resolve(production=True)
    lifted.check(_Private(_job(), epsilon=99.0))
    assert lifted.epsilon_cap is None and lifted.delta_cap == 1e-5
    assert PolicyBlock().resolve(production=False).epsilon_cap is None


def test_null_leaves_the_profiles_value_where_it_is_no_value() -> None:
    block = PolicyBlock.model_validate({"profile": "strict", "required_privacy": None, "weights": None})
    assert block.resolve(production=True) == _strict()


def test_whose_jobs_and_which_methods() -> None:
    policy = PolicyBlock(
        allowed_methods=["fedmr", "fedetf"], allowed_submitters=["lead@a.org", "lead@b.org"]
    ).resolve(production=True)
    fitting = _job(method="fedmr")
    policy.check(fitting, submitter="lead@b.org")
    assert _refused(policy, _job(), submitter="lead@a.org") == [
        ["allowed_methods", "fedavg", "one of fedmr, fedetf"]
    ]
    told = _refused(policy, fitting, submitter="mallory@c.org")
    assert told == [["allowed_submitters", "mallory@c.org", "one of this site's list"]]
    assert "lead@" not in repr(told), "who else may is not told"
    assert _refused(policy, fitting)[0][1] == "an unknown submitter"
    empty = PolicyBlock(allowed_methods=[]).resolve(production=True)
    assert _refused(empty, fitting) == [["allowed_methods", "fedmr", "one of none"]]


def test_plain_sums_show_only_the_numbers_that_may_be_seen() -> None:
    plain = _job(summation="plain", personalise=True, min_sites=3)
    policy = PolicyBlock(require_secure_sum=False).resolve(production=True)
    assert _refused(policy, plain) == [
        ["clear_metrics", "training, evaluation, personal in clear", "at most nothing in clear"]
    ]
    some = PolicyBlock(require_secure_sum=False, clear_metrics=["training", "evaluation"])
    assert _refused(some.resolve(production=True), plain)[0][1] == "personal in clear"
    every = PolicyBlock(require_secure_sum=False, clear_metrics=list(CLEAR_METRICS)).resolve(production=True)
    every.check(plain)
    local = _Private(_job(summation="plain", min_sites=3))
    policy.check(local)  # with privacy losses and evaluation stay at the silo


@pytest.mark.parametrize("variant", ["geometric", "inter_geo", "intra_geo", "geo_substitute"])
def test_geometric_means_have_no_bound_for_a_record(variant: Any) -> None:
    options = FedILCConfig(variant=variant)
    strict = _strict(allow_sign_split=True)
    with pytest.raises(BelowPolicyError, match="has no bound, so no noise hides it"):
        strict.check_method(options)
    research = PolicyBlock().resolve(production=False)
    research.check_method(options, _job())
    with pytest.raises(BelowPolicyError, match="privacy: the job asks for geometric means"):
        research.check_method(options, _Private(_job()))
    strict.check_method(FedILCConfig(variant="intra_arith"))
    assert strict.asks_of_method(_job()) and research.asks_of_method(_Private(_job()))
    assert not research.asks_of_method(_job())


NORMED: tuple[tuple[str, Any], ...] = (
    ("fedavg", None),
    ("fedmr", None),
    ("fedilc", FedILCConfig(variant="intra_arith")),
)


@pytest.mark.parametrize("profile", ["standard", "strict"])
@pytest.mark.parametrize(("method", "options"), NORMED)
def test_updates_need_a_norm_that_bounds_them(profile: Any, method: str, options: Any) -> None:
    policy = PolicyBlock(profile=profile, allow_sign_split=True, required_privacy=False).resolve(
        production=True
    )
    without, within, above = (_job(method=method, update_norm=norm) for norm in (None, 1000.0, 1000.5))
    assert policy.asks_of_method(without) and not policy.asks_of_method(within)
    with pytest.raises(BelowPolicyError, match="max_update_norm: the job asks for no update_norm") as caught:
        policy.check_method(options, without)
    assert caught.value.outside() == [["max_update_norm", "no update_norm", "at most 1000"]]
    policy.check_method(options, within)
    assert ["max_update_norm", "1000.5", "at most 1000"] in _refused(policy, above)
    for loose in (PolicyBlock(profile=profile, max_update_norm=None), PolicyBlock(profile="research")):
        loose.resolve(production=True).check_method(options, without)


@pytest.mark.parametrize(
    ("units", "sites", "asked"),
    [(None, 17, "at least 18"), (None, 18, ""), (2, 8, "at least 9"), (2, 9, "")],
)
def test_a_network_of_class_shares_needs_more_honest_silos_than_units(
    units: int | None, sites: int, asked: str
) -> None:
    """And no fewer than classes, of which there are eight."""
    options = FedRODConfig(personal_head="hyper_network", hyper_width=units)
    names = [f"site-{place}" for place in range(sites)]
    job = _job(method="fedrod", sites=names, min_sites=sites, update_norm=1.0)
    policy = PolicyBlock().resolve(production=True)
    with pytest.raises(BelowPolicyError, match=asked) if asked else nullcontext():
        policy.check_method(options, job)
    policy.check_method(FedRODConfig(), job)
    PolicyBlock(profile="research").resolve(production=True).check_method(options, job)


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedproto", None), ("local_only", None), ("fedilc", FedILCConfig(variant="inter_geo"))],
)
def test_what_can_have_no_norm_needs_none(method: str, options: Any) -> None:
    policy = PolicyBlock(allow_sign_split=True).resolve(production=True)
    policy.check_method(options, _job(method=method))


def test_repeated_records_are_refused_with_privacy_whatever_the_site_accepts() -> None:
    job = parse_job({**EICU, "dataset_options": {"drugs": 40, "oversample_minority": True}})
    research = PolicyBlock().resolve(production=False)
    check_record_options(job, SiteEntry(), research)
    for policy, asked in (
        (research, _Private(job)),
        (PolicyBlock(required_privacy=True).resolve(production=False), job),
    ):
        with pytest.raises(BelowPolicyError, match="oversample_minority, each record at most once"):
            check_record_options(asked, SiteEntry(), policy)


def test_the_lead_is_told_rule_asked_and_required_value_or_the_code_alone() -> None:
    job = _job(weights="exact", summation="plain", class_rules="off")
    told = _refused(_strict(), job)
    assert ["weights", "exact", "one of power_of_two, uniform"] in told
    assert {rule for rule, *_ in told} <= set(Policy.model_fields)
    assert all(len(part) <= MAX_TOLD for item in told for part in item)
    assert _refused(_strict(tell_refusals=False), job) == []
    long = PolicyBlock(allowed_methods=[f"method-{i}" for i in range(99)]).resolve(production=True)
    assert len(_refused(long, _job())[0][2]) == MAX_TOLD


@pytest.mark.parametrize("profile", PROFILES)
def test_templates_are_the_profiles_with_every_key_written_out(profile: Any) -> None:
    values = json.loads((ROOT / "provisioning" / "policies" / f"{profile}.json").read_text())
    assert list(values) == list(Policy.model_fields), "every key, in the order of the documentation"
    written = PolicyBlock.model_validate(values).resolve(production=True)
    assert written == PolicyBlock(profile=profile).resolve(production=True)
    assert json.loads(json.dumps(values)) == {"profile": profile, **json.loads(json.dumps(PROFILES[profile]))}


def test_profiles_get_stricter_in_order() -> None:
    """A job that a stricter profile accepts is accepted by each looser one."""
    accepted = _Private(_job(**FITTING))
    for profile in ("strict", "standard", "research"):
        PolicyBlock(profile=profile).resolve(production=True).check(accepted)
    strict, standard = PROFILES["strict"], PROFILES["standard"]
    assert strict["minimum_cohort"] >= standard["minimum_cohort"]
    assert set(strict["weights"]) < set(standard["weights"])
    assert strict["charged_retries"] < standard["charged_retries"]
    assert _strict().describe().startswith("strict (minimum_cohort 5, weights power_of_two, uniform")
    assert PolicyBlock().resolve(production=False).differences("research") == {}


def test_log_streaming_cannot_be_allowed() -> None:
    with pytest.raises(ValidationError, match="log_streaming"):
        PolicyBlock.model_validate({"log_streaming": True})
