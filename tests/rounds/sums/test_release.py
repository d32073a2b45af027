"""Which settings are in the release profile: each option of a job and each rule of a site is decided on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tests.support.attacks.malicious_server import HEART
from tests.support.tables import statistics_job

from tightframe.config.job import Evaluation, JobConfig, Training, parse_job
from tightframe.config.policy import Policy, PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.learning.one_sum.temperature import KNOWN, field
from tightframe.methods import METHODS
from tightframe.phases import CLASS_COUNTS, Field, Schema
from tightframe.rounds.job_checks import HEAD_OPTIONS
from tightframe.rounds.moments import COUNTS
from tightframe.rounds.riders.class_rules import IN_LOSSES, IN_MOMENTS, IN_PRODUCTS, sums_by_class
from tightframe.rounds.riders.class_rules import STATE as HOLDERS
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.sums.common import Formed
from tightframe.rounds.sums.release import (
    DECLARED,
    OWN_WEIGHT,
    _features,
    _phases,
    formed_by,
    records_name,
    release_profile,
    with_formed,
    with_weight,
)
from tightframe.rounds.sums.revealed import REVEALED, what_both_reveal
from tightframe.securesum.errors import ReleaseProfileError
from tightframe.securesum.site.journal import History, ProfileUsed

SITES = ["a", "b", "c", "d"]
METHOD = {"method": "fedmr", "training": {"learning_rate": 1e-3}}
AVERAGED = {"method": "fedavg", "method_options": {}}
"""Without class sums."""

IN: Mapping[str, tuple[Any, str]] = {
    "method": ("fednova", "updates"),
    "method_options": ({"mu_inter": 0.25}, "class_sums"),
    "dataset_options": ({"window": "stay"}, "records"),
    "site_models": ({"b": {"model": "mlp", "model_options": {"widths": [32, 64]}}}, "site_models"),
    "training.batch_size": (16, "steps"),
    "training.epochs": (2, "steps"),
    "training.momentum": (0.5, "steps"),
    "training.optimizer": ("adam", "steps"),
    "training.loop": ("theirs", "steps"),
    "class_rules": ("off", "class_rules"),
    "weights": ("power_of_two", "weights"),
    "max_weight_share": (0.5, "max_weight_share"),
    "start": ("fed3r", "class_sums"),
    "update_norm": (1.0, "update_norm"),
    "update_bound": (4.0, "update_bound"),
    "prototype_sites": (["a", "b", "c"], "prototype_sites"),
    "evaluation.score_bins": (16, "score_bins"),
    "statistics": ({"bins": 20}, "statistics"),
    "encoder": ("random", "features"),  # and then model, model_options, seed and start: FEATURES
    "model": ("random_features", "training"),
    "model_options": ({"widths": [4]}, "training"),
    "rounds": (5, "training"),  # where a method counts them
    "training.learning_rate": (0.1, "training"),
    "training.weight_decay": (0.1, "training"),
    "training.augment": (False, "training"),
    "initial_model_sha256": ("0" * 64, "training"),
    "seed": (7, "features in training"),  # where these are summed by class
}
"""Options that act on one silo's term before the sum: another value, and the setting that it changes."""
OUT: Mapping[str, tuple[Any, str]] = {
    "job_name": ("another", "a name"),
    "dataset": (None, "another data set is another entry of the journal"),
    "sites": (SITES[:3], "which silos: the static group has one cohort, held by entries of its own"),
    "min_sites": (4, "which survivors: updates of several sets are blurred by draws, counts have one cohort"),
    "sites_per_round": (None, "refused with secure sums"),
    "training.amp": (True, "rounding"),
    "evaluation.batch_size": (8, "memory"),
    "evaluation.models": (2, "which models, each another function of the records whatever this says"),
    "summation": ("plain", "a plain sum shows each term: nothing is left to combine"),
    "server_trust": ("semi_honest", "who can open a sum"),
    "colluders": (2, "who can open a sum"),
    "whole_sums": (True, "who can open a sum"),
    "site_timeout": (9, "time"),
    "fetch_timeout": (9, "time"),
    "threads": (2, "rounding"),
    "answer_grid": (2.0, "time"),
    "local_baseline_epochs": (1, "stays at the silo"),
    "average_last": (2, "what is made of totals"),
    "personalise": (True, "counts of their own, of every silo alike"),
    "privacy": (None, "noise in place of a profile"),
    "resume": (None, "a resumed job goes on as the first one"),
    "evaluate_only": (None, "no term but an evaluation, formed as at every closing"),
    "withdraw": (None, "terms are formed as in the first one; rules of its own say what is opened of them"),
}
"""Options that do not: another value where there is one to try, and why."""
BASE: Mapping[str, dict[str, Any]] = {
    "site_models": {"method": "fedproto"},
    "rounds": {"method": "fedproc", "method_options": {}},
    "training.loop": {"method": "fedavg", "method_options": {}},
    "dataset_options": {"dataset": "eicu", "model": "mlp"},
    "statistics": {**statistics_job(), "method_options": {}, "model_options": {}},
}
"""Jobs that have an option at all, where FedMR's over heart disease does not."""

OWN = {"min_class_count", "min_test_count", "full_batches"}
OTHER_RULES = {
    # What it accepts, not what it does; a job's own value is in the profile where it must be.
    *(
        "require_secure_sum",
        "minimum_cohort",
        "colluders",
        "semi_honest_server",
        "weights",
        "max_weight_share",
        "max_update_norm",
    ),
    *("max_records", "class_rules_off", "allow_sign_split", "static_cohort", "allowed_methods"),
    *("allowed_submitters", "signed_jobs", "max_parameters", "max_message_bytes", "max_sites", "max_rounds"),
    *(
        "max_epochs",
        "max_batch_values",
        "evaluated_share",
        "max_score_bins",
        "clear_metrics",
        "min_answer_grid",
    ),
    *("max_evaluations", "min_withdrawn", "records_per_feature", "given_models", "min_row_bits"),
    # Identities, jobs with privacy, and what is told outside of sums.
    *("profile", "pins", "pinned_only", "central_provisioning", "required_privacy", "epsilon_cap"),
    *("delta_cap", "max_releases", "charged_retries", "neighbours", "private_noise", "epsilon_shown"),
    *("tell_refusals", "egress_guard", "log_streaming"),
}
OWN_ENTRY = {"offer_prototypes"}
OTHER_ENTRY = {
    *("data", "dataset_id"),  # other records are another data set
    *("device", "loader_workers", "feature_cache"),  # rounding, and nothing
    *("accepted_options", "training_loops", "accepted_models"),  # the job's value is in the profile
    *("state_dir", "ledger_roots", "engine_account", "policy"),
    *("withdrawn",),  # from one run no two lists are withdrawn
}


def options() -> set[str]:
    """The options of a job by their names; those of a block with the block's name before them."""
    blocks: dict[str, type[BaseModel]] = {"training": Training, "evaluation": Evaluation}
    return {
        name
        for key in JobConfig.model_fields
        for name in ([f"{key}.{inner}" for inner in blocks[key].model_fields] if key in blocks else [key])
    }


def job_with(changes: Mapping[str, Any]) -> JobConfig:
    """FedMR's job over heart disease, with other options given by their names."""
    values: dict[str, Any] = {**HEART, **METHOD, "sites": SITES, "min_sites": 3, "rounds": 2}
    for name, value in changes.items():
        block, _, key = name.partition(".")
        values[block] = {**values.get(block, {}), key: value} if key else value
    return parse_job(values)


def profile(changes: Mapping[str, Any], entry: SiteEntry | None = None) -> dict[str, str]:
    """The profile of that job at a site."""
    made = release_profile(prepare(job_with(changes)), entry or SiteEntry())
    assert made is not None
    return dict(made)


def test_every_option_and_every_rule_is_decided_on() -> None:
    """Add a new one here: to those in the profile if it acts on one silo's term before the sum."""
    assert not IN.keys() & OUT.keys()
    assert options() == IN.keys() | OUT.keys()
    assert set(Policy.model_fields) == OWN | OTHER_RULES
    assert set(SiteEntry.model_fields) == OWN_ENTRY | OTHER_ENTRY


@pytest.mark.parametrize("name", IN)
def test_what_acts_on_one_silos_term_changes_the_profile(name: str) -> None:
    value, setting = IN[name]
    base = BASE.get(name, {})
    before, after = profile(base), profile({**base, name: value})
    assert after[setting] != before.get(setting)
    assert name == "encoder" or setting in before, "a frozen encoder's setting has none before it"
    assert what_both_reveal(setting), "a person is told what both reveal"


@pytest.mark.parametrize("name", [name for name, (value, _) in OUT.items() if value is not None])
def test_what_does_not_leaves_it_as_it_is(name: str) -> None:
    assert profile({}) == profile({name: OUT[name][0]})


PROTO = 'fedproto {"lam":0.1,"weighting":"holders"}'
WORDS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"rounds": 1}, {"updates": "update weighted", "steps": "batches of 64, epochs 1, momentum 0.9"}),
    ({"method": "fednova"}, {"updates": "direction weighted"}),
    ({"method": "fedproto"}, {"updates": "own as it is", "class_sums": PROTO}),
    (
        {"method": "fed3r", "rounds": 1, "model_options": {"widths": [4]}},
        {"class_sums": "of frozen features"},
    ),
    ({"update_norm": None}, {"update_norm": "none", "update_bound": "8"}),
    ({"update_norm": 8.0}, {"update_norm": "8", "update_bound": "as the norm"}),
    ({"update_norm": 8.5}, {"update_norm": "8.5", "update_bound": "8"}),
    ({"training.momentum": 0.0}, {"steps": "batches of 64"}),
    ({"training.optimizer": "adam", "training.momentum": 0.0}, {"steps": "batches of 64, epochs 1, adam"}),
]


@pytest.mark.parametrize(("changes", "expected"), WORDS)
def test_its_words_stay(changes: dict[str, Any], expected: dict[str, str]) -> None:
    """Sites' journals have them: another word for the same would refuse a job with the same settings."""
    assert profile(changes).items() >= expected.items()


def test_a_site_without_prototypes_has_another() -> None:
    before, after = profile({}), profile({}, SiteEntry(offer_prototypes=False))
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {
        "own offer_prototypes": ("yes", "no")
    }


def test_a_table_summary_has_the_sites_own_rule() -> None:
    entry = SiteEntry(policy=PolicyBlock(min_class_count=77))
    job = {**statistics_job(), "method_options": {}, "model_options": {}}
    assert (profile(job)["own min_class_count"], profile(job, entry)["own min_class_count"]) == (
        "5 patients",
        "77 patients",
    )


def test_a_job_with_noise_has_none() -> None:
    private = {**HEART, "sites": SITES, "min_sites": 3, "weights": "uniform", "privacy": {}}
    assert release_profile(prepare(parse_job(private)), SiteEntry()) is None


def test_options_that_change_nothing_do_not_ask_for_consent() -> None:
    """The share without weights; beside how models are trained, epochs of plain steps and the seed."""
    uniform = {"weights": "uniform"}
    assert profile(uniform) == profile({**uniform, "max_weight_share": 0.5})
    plain = {**AVERAGED, "training.momentum": 0.0}
    before, after = profile(plain), profile({**plain, "training.epochs": 5, "seed": 1})
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"training"}


def test_every_option_counts_where_an_own_loop_reads_it() -> None:
    own = {"method": "fedavg", "method_options": {}, "training.loop": "theirs"}
    assert profile(own) != profile({**own, "training.learning_rate": 0.25})


@pytest.mark.parametrize("rule", sorted(OWN))
def test_a_sites_own_rules_are_in_it(rule: str) -> None:
    changed = SiteEntry(policy=PolicyBlock(**{rule: True if rule == "full_batches" else 77}))
    before, after = profile({}), profile({}, changed)
    assert {name for name in before if before[name] != after[name]} == {f"own {rule}"}
    assert f"own {rule}" in REVEALED and before["own min_class_count"] == "5 patients"


def test_every_setting_has_an_explanation() -> None:
    for name in set(profile({})) | set(profile({"method": "fedproto"})):
        assert what_both_reveal(name)


RANDOM = {"method_options": {}, "rounds": 1, "model": "random_features", "model_options": {"width": 8}}
DRAWN = {"model": "mlp", "model_options": {"widths": [4]}, "encoder": "random", "method_options": {}}
EICU = {**RANDOM, "dataset": "eicu", "dataset_options": {"drugs": 20}, "method": "fed3r"}
ISIC = {**RANDOM, "dataset": "fed_isic2019", "dataset_options": {"image_size": 32}, "method": "fed3r"}
SHARED = {"method": "ccvr", "method_options": {"covariance": "shared"}}
FEATURES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**RANDOM, "method": "fedncm"}, {"model_options": {"width": 8, "seed": 1}}),
    ({**RANDOM, "method": "fedncm"}, {"model_options": {"width": 8, "bandwidth": 0.5}}),
    ({**RANDOM, "method": "fedavg", "start": "fedncm"}, {"model_options": {"width": 9}}),
    ({**DRAWN, "method": "fedncm", "rounds": 1}, {"seed": 7}),
    ({**DRAWN, **SHARED}, {"seed": 7}),
    ({**RANDOM, **SHARED}, {"model_options": {"width": 8, "seed": 1}}),
    ({**DRAWN, **METHOD}, {"seed": 7}),
    ({**DRAWN, "method": "creff"}, {"model_options": {"widths": [5]}}),
    (ISIC, {"dataset_options": {"image_size": 33}}),
    ({**ISIC, "model": "scattering", "model_options": {}}, {"dataset_options": {"image_size": 40}}),
    (EICU, {"dataset_options": {"drugs": 21}}),
    (EICU, {"dataset_options": {"drugs": 20, "vocabulary": "0" * 64}}),
]
"""Jobs that sum features which no training moves, and what makes them others."""


@pytest.mark.parametrize(("job", "changes"), FEATURES)
def test_other_features_that_no_training_moves_are_another_profile(
    job: dict[str, Any], changes: dict[str, Any]
) -> None:
    before, after = profile(job), profile({**job, **changes})
    others = {name for name in before | after if before.get(name) != after.get(name)}
    assert others - {"training", "features in training", "own class_values"} == {"features"}


@pytest.mark.parametrize("job", [{**DRAWN, "method": "fedavg"}, METHOD, SHARED], ids=str)
def test_jobs_without_such_sums_name_no_features(job: dict[str, Any]) -> None:
    """Of a frozen encoder's head, or of an encoder that trains: sites are not asked about these again."""
    assert "features" not in profile({"method_options": {}, **job})


def test_other_features_whose_products_are_summed_are_another_profile() -> None:
    """Width and seed of an encoder; not a job's seed that draws nothing of it."""
    first = {"method": "fed3r", "method_options": {}, "rounds": 1, "model": "random_features"}
    base = profile({**first, "model_options": {"width": 8}})
    for other in ({"width": 9}, {"width": 8, "seed": 1}):
        assert {
            name for name, value in profile({**first, "model_options": other}).items() if value != base[name]
        } == {"features"}
    started = {"initial_model_sha256": "0" * 64, "seed": 7}
    assert profile({**first, "model_options": {"width": 8}, **started}) == base
    drawn = {**first, "model": "mlp", "model_options": {"widths": [4]}}
    assert profile(drawn)["features"] != profile({**drawn, "seed": 7})["features"]
    assert "features" in REVEALED
    other = profile({**first, "model_options": {"width": 8}, "method": "fedncm"})
    assert {name for name, value in other.items() if value != base[name]} == {"losses"}, "one encoder"


def agrees(job: dict[str, Any], *earlier: dict[str, Any]) -> bool:
    """Whether a site that summed in earlier jobs, without consent, sums in another."""
    journal = History([ProfileUsed("d", tuple(sorted(profile(each).items())), "a") for each in earlier])
    try:
        journal.check_profile("d", tuple(sorted(profile(job).items())))
    except ReleaseProfileError:
        return False
    return True


GIVEN = {"initial_model_sha256": "0" * 64}
FAST = {"training": {"learning_rate": 0.1}}
LOOP = {"method": "fedavg", "method_options": {}, "training.loop": "theirs"}
FLAT = {"model": "identity", "method": "fedavg", "method_options": {}}


@pytest.mark.parametrize(
    ("job", "earlier", "expected"),
    [
        ({}, ({"training.amp": True, "threads": 2, "evaluation.batch_size": 8},), True),
        (FAST, ({},), False),
        ({**AVERAGED, "seed": 1}, (AVERAGED,), True),
        # Class sums of another seed's features are, too: all 10 records of a class from eleven seeds.
        ({"seed": 1}, ({},), False),
        # Of other rounds another number of records makes a class's: see ``few_records.planned``.
        ({"rounds": 5}, ({},), False),
        ({"rounds": 5, **AVERAGED}, (AVERAGED,), True),
        ({"rounds": 5, "method": "fedavg_etf"}, ({"method": "fedavg_etf"},), False),
        ({"rounds": 5, **LOOP}, (LOOP,), False),
        # Another seed's gradients are other functions of the same records.
        ({**FAST, "seed": 1}, ({},), False),
        ({**FAST, "seed": 1}, ({}, {"seed": 1}), False),
        # A given model may be any seed's, or another given one, with layers of other lengths.
        (GIVEN, (GIVEN,), True),
        (GIVEN, ({},), False),
        ({}, (GIVEN,), False),
        ({"initial_model_sha256": "1" * 64}, (GIVEN,), False),
        ({**FAST, **GIVEN}, ({},), False),
        ({**FAST, "seed": 1}, (GIVEN,), False),
        ({**FAST, "seed": 1, "initial_model_sha256": "1" * 64}, (GIVEN,), False),
        ({**FAST, **GIVEN}, (FAST, {"seed": 1}), False),
        ({**AVERAGED, "seed": 1}, ({**AVERAGED, **GIVEN}, AVERAGED), True),
        ({**AVERAGED, **GIVEN, "seed": 1}, ({**AVERAGED, **GIVEN}, AVERAGED), True),
        ({**GIVEN, "seed": 1}, (GIVEN,), False),
        ({**FLAT, "seed": 1}, (FLAT,), True),
        ({**FLAT, **FAST, "seed": 1}, (FLAT,), False),
        ({**FLAT, **FAST, **GIVEN}, (FLAT,), False),
    ],
    ids=str,
)
def test_models_are_trained_in_one_way(
    job: dict[str, Any], earlier: tuple[dict[str, Any], ...], expected: bool
) -> None:
    assert agrees(job, *earlier) is expected


@pytest.mark.parametrize("method", [each.name for each in METHODS if each.one_sum is None])
def test_methods_say_whether_they_count_rounds(method: str) -> None:
    """Whatever asks anything of no number fails."""
    setup = prepare(job_with({"method": method, "method_options": {}, "training.momentum": 0.0}))
    none: Any = object()
    if setup.method.counts_rounds:
        with pytest.raises(TypeError):
            setup.method.plan(setup.setting, 2, none)
    else:
        assert setup.method.plan(setup.setting, 2, none)


def test_what_no_training_moves_names_no_training() -> None:
    for job in ({**RANDOM, "method": "fedncm"}, {**RANDOM, "method": "fed3r"}):
        assert "training" not in profile(job)


@pytest.mark.parametrize("changes", [{"ridge": 1.0}, {"priors": "balanced"}], ids=str)
def test_another_head_whose_losses_are_summed_is_another_profile(changes: dict[str, Any]) -> None:
    """24 jobs of other ``ridge`` told 24 numbers of the same validation records; a start has one form."""
    job = {**RANDOM, "method": "fed3r"}
    before, after = profile(job), profile({**job, "method_options": changes})
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"losses"}
    started = profile({**RANDOM, "method": "fedavg", "start": "fed3r"})
    assert started["losses"] == before["losses"] and "losses" in REVEALED
    single = {"method": "fedavg", "method_options": {}, "start": "fed3r", "model_options": {"widths": [4]}}
    headed = {**single, "model_options": {"widths": [4], "single_logit": True}}
    assert profile(single)["losses"] != profile(headed)["losses"]
    assert "losses" not in profile({**RANDOM, "method": "fedavg"})


@pytest.mark.parametrize(("changes", "expected"), [({}, True), ({"seed": 1}, True), (FAST, False)], ids=str)
def test_what_earlier_builds_named_by_seeds_holds_for_all(changes: dict[str, Any], expected: bool) -> None:
    now, before = profile({**AVERAGED, **changes}), profile(AVERAGED)
    before |= {"training from seed 0": before.pop("training")}
    assert "initial_model" not in now["training"]
    journal = History([ProfileUsed("d", tuple(sorted(before.items())), "a")])
    if expected:
        journal.check_profile("d", tuple(sorted(now.items())))
    else:
        with pytest.raises(ReleaseProfileError, match="training"):
            journal.check_profile("d", tuple(sorted(now.items())))


def test_a_journal_of_before_asks_once_where_it_names_features_without_inputs_or_kept_classes() -> None:
    """One that names none takes those of the first job."""
    now = profile(EICU)
    old = {name: value for name, value in now.items() if name != "features"}
    History([ProfileUsed("d", tuple(sorted(old.items())), "a")]).check_profile(
        "d", tuple(sorted(now.items()))
    )
    for before in (
        'random_features {"width":8}, no weights',
        now["features"].removesuffix(", classes kept"),
    ):
        named = {**old, "features": before}
        journal = History([ProfileUsed("d", tuple(sorted(named.items())), "a")])
        with pytest.raises(ReleaseProfileError, match=r"another \(features [^)]*shape.*classes kept"):
            journal.check_profile("d", tuple(sorted(now.items())))


WITHDRAW = {"lineage": "x", "previous": "x", "checkpoint_sha256": "0" * 64, "state_sha256": "0" * 64}


def test_a_withdrawal_has_the_profile_of_the_run_that_it_withdraws_from() -> None:
    first = {"method": "fed3r", "rounds": 1, "model_options": {"widths": [4]}}
    assert profile({**first, "withdraw": WITHDRAW}) == profile(first)
    assert profile(first)["class_sums"] == "of frozen features"


def test_what_an_evaluation_and_a_table_summary_name_is_little() -> None:
    alone = profile(
        {"evaluate_only": {}, "rounds": 0, "initial_model_sha256": "0" * 64, "method_options": {}}
    )
    assert set(alone) == {"records", "class_rules", "score_bins", "own min_test_count"}
    setup: Any = prepare(parse_job({**HEART, **statistics_job(), "sites": SITES, "min_sites": 3}))
    for ends, words in ((None, "bins 10"), ((90.0, 365.0), "bins 10, times to 90, 365")):
        vars(setup)["layout"] = replace(setup.layout, ends=ends)
        assert dict(release_profile(setup, SiteEntry()) or ())["statistics"] == words


def test_features_are_named_by_what_draws_them() -> None:
    """Not by the scales that are pooled, the head, or which records there are."""

    def said(**changes: Any) -> str:
        return profile({**RANDOM, "method": "fedncm", **changes})["features"]

    assert said(model_options={"width": 8, "standardise": True}).endswith(", no weights, classes kept")
    started = profile({**DRAWN, **METHOD, "encoder": "frozen", "initial_model_sha256": "1" * 64})["features"]
    assert started.endswith(f", {'1' * 64}, classes kept")
    drawn = profile({**DRAWN, **METHOD})["features"]
    headed = {"model_options": {"widths": [4], HEAD_OPTIONS[0]: 0.5}}
    assert profile({**DRAWN, **METHOD, **headed})["features"] == drawn
    before, after = profile(EICU), profile({**EICU, "dataset_options": {"drugs": 20, "window": "stay"}})
    assert {name for name in before if before[name] != after[name]} == {"records"}


def test_products_alone_are_sums_of_features_too() -> None:
    setup = prepare(parse_job({**HEART, **RANDOM, "method": "fedncm", "sites": SITES, "min_sites": 3}))
    fields = (Field("frozen/products", (3,), static=True, products=2),)
    phases: Any = [SimpleNamespace(schema=Schema(fields))]
    assert _features(setup, phases) == dict(release_profile(setup, SiteEntry()) or ())["features"]


@pytest.mark.parametrize(
    ("name", "shape", "per_class", "found"),
    [
        ("sums", (2, 8), True, True),
        ("counts", (2,), True, False),
        (COUNTS, (4, 2), True, False),
        ("w", (2, 8), False, False),
        ("evaluation/test/confusion", (2, 2), True, False),
    ],
)
def test_class_sums_are_of_vectors(name: str, shape: tuple[int, ...], per_class: bool, found: bool) -> None:
    assert sums_by_class(Field(name, shape, static=True, per_class=per_class)) is found


def test_an_update_beside_which_more_is_trained_is_one() -> None:
    plain = {"training.momentum": 0.0, "method_options": {}}
    assert profile({**plain, "method": "scaffold"})["updates"] == "update as it is"


SCALED = {"model": "mlp", "model_options": {"widths": [4], "standardise": True}, "method_options": {}}
FEDAVG = {**SCALED, "method": "fedavg"}
FOCAL = {**FEDAVG, "method_options": {"loss": "focal"}, "model_options": {"widths": [4]}}
PRODUCTS, AT_HEAD = frozenset({"encoder", IN_PRODUCTS}), frozenset({"head", IN_LOSSES})


def formed(job: Mapping[str, Any], counts: float | None = None, **tensors: float) -> list[Formed]:
    """How terms are formed by a state, one exchange after the other, with other tensors of the model."""
    setup = prepare(job_with(job))
    start, ones = setup.initial_state(), torch.ones(2, dtype=torch.float64)
    model = {name: item + tensors.get(name.rpartition(".")[2], 0.0) for name, item in start.model.items()}
    extra = {KNOWN: ones.to(torch.uint8), HOLDERS: 3 * ones}
    extra |= {} if counts is None else {CLASS_COUNTS: counts * ones}
    state = start.evolve(model=model, extra={**start.extra, **extra})
    return [
        formed_by(setup, phase.schema, phase.broadcast(state), state.model)
        for exchange in setup.plan
        for phase in exchange.phases
    ]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (FEDAVG, [IN_MOMENTS, "moments"]),
        ({**FEDAVG, "model_options": {"widths": [4]}}, []),
        # No training moves this encoder, but nothing that it gives is summed by class.
        ({**FEDAVG, "encoder": "random"}, [IN_MOMENTS, "moments"]),
        ({**SCALED, "method": "fedmr"}, [IN_MOMENTS, "moments"]),
        ({**SCALED, "method": "fedmr", "encoder": "random"}, [IN_MOMENTS, "encoder"]),
        ({**SCALED, **SHARED}, [IN_MOMENTS, "moments", {"moments", IN_PRODUCTS}]),
        # A person is asked before the training of what is summed behind it.
        ({**SCALED, **SHARED, "encoder": "random"}, [IN_MOMENTS, "encoder", PRODUCTS]),
        ({**FEDAVG, "start": "fedncm"}, [IN_MOMENTS, {"encoder", "moments"}, AT_HEAD, "moments"]),
        ({**FEDAVG, "start": "fed3r"}, [IN_MOMENTS, PRODUCTS | {"moments"}, AT_HEAD, "moments"]),
        ({**RANDOM, "method": "fedavg", "start": "fedncm"}, ["encoder", AT_HEAD]),
        ({**SCALED, "rounds": 1, "method": "fed3r"}, [IN_MOMENTS, PRODUCTS, AT_HEAD]),
    ],
)
def test_what_a_runs_state_decides_is_named(job: dict[str, Any], expected: list[Any]) -> None:
    found = list(dict.fromkeys(frozenset(item) for item in formed(job) if item))
    assert found == [frozenset({item} if isinstance(item, str) else item) for item in expected]
    assert all(what_both_reveal(name) for item in found for name in item)


def test_a_withdrawal_leaves_one_other_head() -> None:
    """Beside that of its run; a second one of the same records would be one more equation in their losses."""
    job, schema, known = {**RANDOM, "method": "fed3r"}, Schema((field(),)), {KNOWN: torch.ones(2)}
    names = {}
    for name, more in (("first", {}), ("withdrawal", {"withdraw": WITHDRAW})):
        setup = prepare(job_with({**job, **more}))
        model = setup.initial_state().model
        names[name] = formed_by(setup, schema, known, model).keys() - {IN_LOSSES}
    assert names == {"first": {"head"}, "withdrawal": {"head that a withdrawal leaves"}}
    assert {what_both_reveal(name) for each in names.values() for name in each} == {REVEALED["head"]}


def test_products_alone_are_of_records() -> None:
    setup = prepare(job_with(FEDAVG))
    schema = Schema((Field("products", (3,), static=True, products=2),))
    assert "moments" in formed_by(setup, schema, {}, setup.initial_state().model)


def test_all_rounds_of_a_run_count_whichever_it_begins_with() -> None:
    """Sums by class begin in a later one where a method starts with training alone."""
    names = ("statistics_phases", "before_phases", "after_phases")
    run: Any = SimpleNamespace(job=SimpleNamespace(rounds=3), training_phases=lambda number: (number,))
    vars(run).update({name: lambda name=name: (name,) for name in names})
    run.kinds = JobSetup.kinds.func(run)
    assert list(_phases(run)) == [*names[:2], 1, names[2], 2, 3]


@pytest.mark.parametrize(
    ("name", "job", "acting", "other"),
    [
        ("moments", FEDAVG, ("mean", "std"), {"weight": 1.0}),
        ("encoder", {**SCALED, **SHARED, "encoder": "random"}, ("mean", "std"), {}),
        ("head", {**SCALED, "rounds": 1, "method": "fed3r"}, ("weight", "bias"), {"mean": 1.0}),
        ("counts", FOCAL, ("counts",), {"mean": 1.0, "weight": 1.0}),
    ],
)
def test_what_acts_on_terms_changes_what_is_named(
    name: str, job: dict[str, Any], acting: tuple[str, ...], other: dict[str, float]
) -> None:
    counts = {"counts": 3.0} if name == "counts" else {}
    first = next(item[name] for item in formed(job, **counts) if name in item)
    assert {item[name] for item in formed(job, **counts, **other) if name in item} == {first}
    for each in acting:
        assert first not in {item[name] for item in formed(job, **{**counts, each: 4.0}) if name in item}


def test_the_own_weight_is_named_where_weights_are_capped() -> None:
    capped, uniform = (tuple(profile({"weights": rule}).items()) for rule in ("exact", "uniform"))
    assert with_weight(capped, 7.0, 7.0) == tuple(sorted((*capped, (OWN_WEIGHT, DECLARED))))
    assert with_weight(capped, 7.0, 6.5) == tuple(sorted((*capped, (OWN_WEIGHT, "6.5"))))
    assert with_weight(uniform, 7.0, 6.5) == uniform
    assert with_weight(None, 7.0, 6.5) is None


def test_options_are_named_in_whatever_order_a_job_has_them() -> None:
    """Else the same job written anew would be another profile, and refused."""
    options = {"widths": [16], "standardise": False}
    first, second = (
        profile({"model_options": dict(items)}) for items in (options.items(), reversed(options.items()))
    )
    assert first == second and "widths" in str(first)
    formed = with_formed((("weights", "exact"),), {"counts": ("b", "a")})
    assert formed == (("counts", '["b","a"]'), ("weights", "exact"))
    assert with_formed(None, {"counts": ("a",)}) is None


def test_records_count_where_an_exact_sum_of_all_of_them_tells_those_that_changed() -> None:
    closed = {**SCALED, "method": "fed3r", "rounds": 1}
    telling = (FEDAVG, FOCAL, closed, {}, {**FOCAL, "method_options": {}, "start": "fed3r"})
    names = {records_name(prepare(job_with(changes))) for changes in telling}
    assert len(names) == 1, "in one form, whatever is summed"
    assert what_both_reveal(str(*names)) == REVEALED["summed records"]
    contract = records_name(prepare(job_with(BASE["statistics"])))
    assert contract is not None and contract not in names
    noisy = {"epsilon": 2.0, "delta": 1e-5}
    plain = {"model_options": {"widths": [4]}}
    none = (
        AVERAGED,
        {**closed, **plain, "withdraw": WITHDRAW},
        {**FEDAVG, **plain, "weights": "uniform", "privacy": noisy},
    )
    assert {records_name(prepare(job_with(changes))) for changes in none} == {None}
