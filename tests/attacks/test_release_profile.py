"""Ordinary jobs over one cohort that differ in a setting which acts on one silo's term before the sum.

Nobody drops out, an honest server will do: each total is one more equation in the same few unknowns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.test_false_flags import Some
from tests.attacks.test_products import small, totals
from tests.support.attacks.kits import accept_release
from tests.support.attacks.liar import lies
from tests.support.attacks.malicious_server import Chosen, Federation, Records, hearts, identity

from tightframe.config.policy import PolicyBlock
from tightframe.errors import JobError, RunError, SecureSumError
from tightframe.rounds.riders.class_rules import HOLDERS
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.checks.enrolment import check_sums
from tightframe.rounds.sums.vault import read_journal
from tightframe_app.site.checks.job import records_option

SLIM = {"model_options": {"widths": [8]}}
"""Of few units, as so few records allow where nobody tells their number."""
WHOLE = {"training": {"batch_size": 65_536, "momentum": 0.0, "learning_rate": 1e-3}}
FASTER, LONGER, PULLED = (
    {"training": {**WHOLE["training"], **other}}
    for other in ({"learning_rate": 4e-3}, {"epochs": 9}, {"weight_decay": 0.5})
)
LINEAR = {"model": "identity"}
ETF = {"method": "fedavg_etf", "rounds": 4, "evaluation": {"models": 3}}


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(3)


def train(federation: Federation) -> dict[str, Any]:
    return federation.sum("train", 1)


def enrolment_refused(federation: Federation, name: str = "hospital-1") -> str:
    with pytest.raises(SecureSumError) as caught:
        federation.ask_to_enroll(name, federation.params())
    assert caught.value.code == "TF-617"
    return str(caught.value)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({**SLIM, "weights": "uniform"}, [({**SLIM, "weights": "exact"}, "weights")]),
        ({"weights": "exact"}, [({"weights": "power_of_two"}, "weights")]),
        ({"update_norm": 1.0}, [({"update_norm": 1.0002}, "update_norm")]),
        (
            {},
            [
                ({"update_norm": 1.0}, "update_norm"),
                ({"update_bound": 4.0}, "update_bound"),
                # The same two rules, by names of a method: weighted or not, or by the steps that a silo took.
                ({"method": "fednova", "training": {**WHOLE["training"], "weight_decay": 0.0}}, "updates"),
                ({"method": "feddyn"}, "updates"),
                # A norm shortens updates by the learning rate, and a pull weighs silos by their steps: one
                # hospital's own update, measured to 5 and 9 %.
                (FASTER, "training"),
                (LONGER, "training"),
                (PULLED, "training"),
                ({"model_options": {"widths": [4]}}, "training"),
                # Other seeds' gradients are of the same records: 8 % from two seeds of width 4,096.
                ({**FASTER, "seed": 1}, "training"),
                # A given model can be another one's function with layers of other lengths.
                ({"initial_model_sha256": "0" * 64}, "training"),
            ],
        ),
        (
            ETF,
            [
                ({**ETF, "method_options": {"average": "weighted"}}, "updates"),
                ({**ETF, "method_options": {"mu_divisor": "count_weighted"}}, "class_sums"),
                ({**ETF, "seed": 1}, "features in training"),
            ],
        ),
        (
            {"method": "fedproto"},
            [({"method": "fedproto", "method_options": {"weighting": "records"}}, "class_sums")],
        ),
        ({"method": "fedprox", "method_options": {"mu": 0.0}}, [({"method": "fedprox"}, "training")]),
        ({"method": "feddyn"}, [({"method": "feddyn", "method_options": {"alpha": 0.5}}, "training")]),
        (LINEAR, [({**LINEAR, **FASTER, "seed": 1}, "training")]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sums_over_the_same_records_are_formed_in_one_way(
    hospitals: dict[str, Records],
    tmp_path: Path,
    first: Mapping[str, Any],
    others: Sequence[tuple[Mapping[str, Any], str]],
) -> None:
    train(Federation({**WHOLE, **first}, hospitals, state=tmp_path).enroll())
    policy = PolicyBlock(profile="standard", given_models="any")
    for number, (second, named) in enumerate(others):
        job = f"job-b{number}"
        other = Federation({**WHOLE, **second}, hospitals, state=tmp_path, job_id=job, policy=policy)
        said = enrolment_refused(other)
        assert f"{named} " in said
    train(Federation({**WHOLE, **first}, hospitals, state=tmp_path, job_id="job-c").enroll())


RANDOM = {"model": "random_features", "model_options": {"width": 16, "standardise": True}}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("job", "summed"),
    [
        ({"method": "fedncm"}, "frozen/sums"),
        ({"method": "ccvr", "method_options": {"covariance": "shared"}}, "moments/products"),
    ],
    ids=str,
)
def test_no_other_features_of_the_same_records_are_summed(
    tmp_path: Path, job: dict[str, Any], summed: str
) -> None:
    """Each seed's class sums or products are more equations in the same records."""
    first = {**RANDOM, **job, "weights": "exact"}
    hospitals, policy = small(), PolicyBlock(profile="standard", minimum_cohort=1)
    federation = Federation(first, hospitals, state=tmp_path, policy=policy).enroll()
    assert any(
        summed in (totals := federation.sum(*each.place)) and totals[summed].any()
        for each in federation.setup.plan
    )
    other = {**first, "model_options": {**RANDOM["model_options"], "seed": 1}}
    second = Federation(other, hospitals, state=tmp_path, job_id="job-b", policy=policy)
    assert "features " in enrolment_refused(second, "hospital-4")


@pytest.mark.parametrize(
    "changes",
    [{"offer_prototypes": False}, {"policy": PolicyBlock(profile="standard", min_class_count=9)}],
    ids=["offer_prototypes", "min_class_count"],
)
def test_nor_does_a_site_change_its_own_rules_between_two_jobs_unawares(
    hospitals: dict[str, Records], tmp_path: Path, changes: dict[str, Any]
) -> None:
    train(Federation({}, hospitals, state=tmp_path).enroll())
    said = enrolment_refused(Federation({}, hospitals, state=tmp_path, job_id="job-b", **changes))
    assert f"own {next(iter(changes)).replace('policy', 'min_class_count')}" in said


@pytest.mark.whole
def test_of_two_jobs_that_one_record_lies_between_the_second_is_refused_before_anything_is_summed(
    tmp_path: Path,
) -> None:
    """Pooled moments told it in clear, before other means and deviations were refused (TF-617)."""
    job: dict[str, Any] = {"model_options": {"widths": [8], "standardise": True}, "weights": "exact"}
    name = "hospital-4"
    before, summed = small(), "statistics/sums"
    places = np.arange(len(before[name].labels("train")))
    after = {**before, name: Chosen(before[name], places[1:])}
    first = Federation(job, before, state=tmp_path).enroll().statistics()[summed]
    shuffled = {**before, name: Chosen(before[name], places[::-1])}
    Federation(job, shuffled, state=tmp_path, job_id="job-b").enroll()  # the same records in another order
    other = Federation(job, after, state=tmp_path, job_id="job-c")
    refused = enrolment_refused(other, name)
    session = other.sessions[name]
    with pytest.raises(SecureSumError, match="summed records") as told:  # as `site check --job` does
        check_sums(session.context, other.setup, read_journal(session.context.ledger_paths, check=None))
    seen = re.findall(r'summed records .* \["([0-9a-f]{64})"\]', refused)[-1]
    assert records_option(str(told.value)) == f" --records {seen}", "which a person would have to copy"
    done = accept_release(other, name, tmp_path, identity, "--records", seen)
    assert done.exit_code == 0 and "of one training record all its values" in done.output, done.output
    second = other.enroll().statistics()[summed]
    assert np.allclose(first - second, before[name].raw("train")[0]), "what a person was asked of"


@pytest.mark.parametrize("job", [{"method": "fedncm"}, {"method": "fed3r"}, {"start": "fed3r"}], ids=str)
def test_so_is_one_whose_sums_of_features_would_tell_it(tmp_path: Path, job: dict[str, Any]) -> None:
    """Another head is refused as well, but only once these are opened."""
    values = {"weights": "exact", "model": "random_features", "model_options": {"width": 16}, **job}
    name, before, policy = "hospital-4", small(), PolicyBlock(profile="standard", minimum_cohort=1)
    federation = Federation(values, before, state=tmp_path, policy=policy).enroll()
    federation.sum(*next(iter(federation.setup.plan)).place)
    corrected = Corrected(before[name])
    changed = {**before, name: corrected}
    second = Federation(values, changed, state=tmp_path, job_id="job-b", policy=policy)
    assert "summed records" in enrolment_refused(second, name)


class Corrected(Records):
    """A hospital's records, one value of one of which is another."""

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        found = self._data.records(fold, augment_seed=augment_seed)
        kept = [found[place] for place in range(len(found))]
        inputs = torch.as_tensor(kept[0][0]).clone()
        inputs[0] += 1
        return [(inputs, kept[0][1]), *kept[1:]]


def test_two_jobs_set_up_at_once_are_one_too_many(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """Both enrolled before either summed anything: what is masked first is what holds."""
    one = Federation({**SLIM, "weights": "uniform"}, hospitals, state=tmp_path).enroll()
    other = Federation({**SLIM, "weights": "exact"}, hospitals, state=tmp_path, job_id="job-b").enroll()
    train(one)
    with pytest.raises(SecureSumError, match=r"^TF-617: "):
        train(other)


def test_what_changes_no_silos_weight_is_no_other_way(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """Other seeds, more rounds, threads: no hospital is asked of these."""
    train(Federation({}, hospitals, state=tmp_path).enroll())
    others: tuple[dict[str, Any], ...] = ({"seed": 5}, {"rounds": 3}, {"threads": 2}, {"answer_grid": 2.0})
    for number, other in enumerate(others):
        federation = Federation(other, hospitals, state=tmp_path, job_id=f"job-{number}")
        federation.ask_to_enroll("hospital-1", federation.params())


@pytest.mark.parametrize("job", [{"method": "fedprox"}, {"model": "random_features"}], ids=str)
def test_a_refusal_shows_what_differs_in_a_line(
    job: dict[str, Any], hospitals: dict[str, Records], tmp_path: Path
) -> None:
    train(Federation({}, hospitals, state=tmp_path).enroll())
    said = enrolment_refused(Federation(job, hospitals, state=tmp_path, job_id="job-b"))
    ((name, value),) = job.items()
    assert f"{name} {value}" in said and "learning_rate" not in said and "{" not in said
    assert "(training method fedavg" in said or "(training model mlp" in said


def test_a_job_that_goes_on_is_not_hindered(hospitals: dict[str, Records], tmp_path: Path) -> None:
    values = {**SLIM, "rounds": 3, "weights": "uniform"}
    train(Federation(values, hospitals, state=tmp_path, job_id="job-a").enroll())
    resume = {"lineage": "job-a", "previous": "job-a", "after_round": 1, "checkpoint_sha256": "0" * 64}
    Federation({**values, "resume": resume}, hospitals, state=tmp_path, job_id="job-b").enroll()


@pytest.mark.parametrize("method", ["fedproc", "fedavg_etf", "fedavg"])
@pytest.mark.parametrize("least", [0, 6, 200])
def test_no_job_says_how_few_records_of_a_class_are_too_few(method: str, least: int) -> None:
    """By bisection it would be one hospital's class count, and the next total less its class mean."""
    job = Federation.job_of({"method": method, "method_options": {"min_class_count": least}}, ["a", "b", "c"])
    with pytest.raises(JobError, match=r"method_options\.min_class_count.*each site's own rule"):
        prepare(job)


@pytest.mark.whole
def test_a_persons_consent_lets_both_ways_be_used(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """By the command that the refusal names, at each site, with the site's own kit."""
    train(Federation({**SLIM, "weights": "uniform"}, hospitals, state=tmp_path).enroll())
    other = Federation({**SLIM, "weights": "exact"}, hospitals, state=tmp_path, job_id="job-b")
    assert "release accept" in enrolment_refused(other)
    for name in hospitals:
        done = accept_release(other, name, tmp_path, identity)
        assert done.exit_code == 0, done.output
        assert "weights: uniform" in done.output and "weights: exact" in done.output
        assert "with 3 silos, 3 jobs" in done.output
    train(other.enroll())
    train(Federation({**SLIM, "weights": "uniform"}, hospitals, state=tmp_path, job_id="job-c").enroll())
    third = Federation({**SLIM, "weights": "power_of_two"}, hospitals, state=tmp_path, job_id="job-d")
    assert "weights power_of_two" in enrolment_refused(third)


PRODUCTS: dict[str, Any] = {**RANDOM, "weights": "exact", "class_rules": "on"}
FED3R = {**PRODUCTS, "method": "fed3r"}
CCVR = {
    **PRODUCTS,
    "method": "ccvr",
    "method_options": {"covariance": "shared"},
    "model_options": {"width": 16},
    "min_sites": 4,
}
NO_RARE = {HOLDERS: {HOLDERS: np.array([0.0, np.nan])}}
"""What the liar says: that it holds no record of class 0, which leaves two holders."""


def rare(held: int) -> dict[str, Records]:
    """Four hospitals, three of which hold so many records of class 0."""
    every = hearts(5)
    holders = ("hospital-1", "hospital-2", "hospital-5")
    return {
        name: Some(every[name], {0: held if name in holders else 0, 1: 40})
        for name in (*holders, "hospital-4")
    }


def products_refused(federation: Federation, name: str, why: str = "classes in products") -> str:
    with pytest.raises(SecureSumError, match=why) as caught:
        totals(federation, name)
    assert caught.value.code == "TF-617"
    return str(caught.value)


@pytest.mark.whole
def test_another_hospitals_flag_does_not_put_a_class_into_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both totals the difference was the products of the other holders' few records of that class.

    The first one is opened, whatever the run says then.
    """
    hospitals = rare(10)
    with monkeypatch.context() as patched:
        lies(patched, "hospital-5", NO_RARE)
        with pytest.raises(RunError, match="two classes at least"):
            totals(Federation(FED3R, hospitals, state=tmp_path).enroll(), "frozen/products")
    again = Federation(FED3R, hospitals, state=tmp_path, job_id="job-b").enroll()
    products_refused(again, "frozen/products", "classes in moments")


@pytest.mark.whole
def test_products_of_other_classes_need_a_persons_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospitals, summed = rare(10), "moments/products"
    for job in ("job-a", "job-b"):
        found = totals(Federation(CCVR, hospitals, state=tmp_path, job_id=job).enroll(), summed)
        assert found["moments/records"] == 30 + 160
    lies(monkeypatch, "hospital-5", NO_RARE)
    other = Federation(CCVR, hospitals, state=tmp_path, job_id="job-c").enroll()
    products_refused(other, summed)
    for name in hospitals:
        done = accept_release(other, name, tmp_path, identity, "--classes", '["disease"]')
        assert done.exit_code == 0 and "products of a class's records alone" in done.output, done.output
    accepted = Federation(CCVR, hospitals, state=tmp_path, job_id="job-d").enroll()
    assert totals(accepted, summed)["moments/records"] == 160


@pytest.mark.parametrize("method", ["fedncm", "fed3r"])
@pytest.mark.whole
def test_another_hospitals_false_moments_make_no_other_features_of_the_same_records(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six jobs of one file gave 32 of 32 records of a class: each standardised the inputs anew."""
    job, summed, data = {**PRODUCTS, "method": method}, "frozen/sums", small()
    for name in ("job-a", "job-b"):
        assert totals(Federation(job, data, state=tmp_path, job_id=name).enroll(), summed)[summed].any()
    own, many = data["hospital-8"].raw("train").astype(float), 200.0
    mean, std = own.mean(0), 1.3 * own.std(0).clip(0.3)
    moments = {"values": many, "sums": many * mean, "squares": many * (mean**2 + std**2)}
    false = {"statistics/sums": {f"statistics/{name}": value for name, value in moments.items()}}
    with monkeypatch.context() as patched:
        lies(patched, "hospital-8", false)
        other = Federation(job, data, state=tmp_path, job_id="job-c").enroll()
        refused = products_refused(other, summed, "encoder")
    seen = re.findall(r'encoder \["([0-9a-f]{64})"\]', refused)[-1]
    done = accept_release(other, "hospital-4", tmp_path, identity, "--encoder", seen)
    assert done.exit_code == 0 and "other features of the same records" in done.output, done.output
    again = totals(Federation(job, data, state=tmp_path, job_id="job-d").enroll(), summed)
    assert again[summed].any()


SCALED = {"model_options": {"widths": [8], "standardise": True}, "weights": "exact"}
WEIGHED = {"model_options": {"widths": [8]}, "method_options": {"loss": "focal"}, "weights": "exact"}
WIDE = {"statistics/sums": {"statistics/squares": 2.0**20}}
RARE = {"statistics/counts": {"statistics/counts": np.array([np.nan, 2.0**20])}}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("job", "false", "named"),
    [
        # Smaller inputs make shorter updates, of which a norm cuts off less.
        (SCALED, WIDE, "moments"),
        # A class's weight in the loss is all others' counts over its own, without a limit.
        (WEIGHED, RARE, "counts"),
    ],
    ids=str,
)
def test_another_hospitals_false_statistics_make_no_other_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: dict[str, Any],
    false: dict[str, Any],
    named: str,
) -> None:
    summed, data = "update/head.bias", small()
    for name in ("job-a", "job-b"):
        values = {**job, "seed": int(name == "job-b")}
        assert totals(Federation(values, data, state=tmp_path, job_id=name).enroll(), summed)[summed].any()
    with monkeypatch.context() as patched:
        lies(patched, "hospital-8", false)
        other = Federation(job, data, state=tmp_path, job_id="job-c").enroll()
        refused = products_refused(other, summed, named)
    seen = re.findall(rf'{named} \["([0-9a-f]{{64}})"\]', refused)[-1]
    done = accept_release(other, "hospital-4", tmp_path, identity, f"--{named}", seen)
    assert done.exit_code == 0 and "as all hospitals' totals make them" in done.output, done.output
    again = totals(Federation(job, data, state=tmp_path, job_id="job-d").enroll(), summed)
    assert again[summed].any()


@pytest.mark.whole
def test_another_hospitals_false_sums_ask_for_no_losses_at_another_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 such jobs the losses told one validation record's features to 4e-6, of width 16."""
    summed, data = "temperature/losses", small()
    policy = PolicyBlock(profile="standard", evaluated_share=None)  # evaluations are not the subject
    for name in ("job-a", "job-b"):
        same = Federation(FED3R, data, state=tmp_path, job_id=name, policy=policy).enroll()
        assert totals(same, summed)[summed].any()
    with monkeypatch.context() as patched:
        lies(patched, "hospital-8", {"frozen/sums": {"frozen/sums": np.arange(32.0).reshape(2, 16)}})
        other = Federation(FED3R, data, state=tmp_path, job_id="job-c", policy=policy).enroll()
        refused = products_refused(other, summed, "head")
    seen = re.findall(r'head \["([0-9a-f]{64})"\]', refused)[-1]
    done = accept_release(other, "hospital-4", tmp_path, identity, "--head", seen)
    assert done.exit_code == 0 and "all features of one validation record" in done.output, done.output
