"""The rule on sums of features and of products at its edges, by numbers worked out by hand.

Heart disease has 10 columns, so p = 10 values of a record, and C = 2 classes; m = 2. Products of 8 features
need n >= 16 records; their 36 + 16 numbers, and 2 x 13 moments, fit into 8. Sums of 8 features by class need
16 values, so 2 records.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import HEART

from tightframe.config.job import parse_job
from tightframe.config.policy import Policy, PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.errors import RunError
from tightframe.learning.few_records.products import (
    ALONE,
    COUNTED,
    ENOUGH,
    LEAVING,
    LOSING,
    ROWS,
    Behind,
    ClassSums,
    Parts,
    Products,
    Sizes,
    Units,
)
from tightframe.phases import Field, OwnRows, Schema, ServerState
from tightframe.rounds.few_records import across_jobs, layers, planned, rule
from tightframe.rounds.riders.class_rules import with_holders
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.securesum.site.journal import History, RoundsAccepted


def policy(factor: int = 2, **rules: Any) -> Policy:
    return PolicyBlock(profile="standard", records_per_feature=factor, **rules).resolve(production=True)


@functools.cache
def setup(method: str = "fed3r", weights: str = "exact", **changes: Any) -> JobSetup:
    model = {"model": "random_features", "model_options": {"width": 8, "standardise": True}}
    values = {"sites": ["a", "b", "c", "d"], "min_sites": 3, "method": method, "weights": weights}
    return prepare(parse_job({**HEART, "rounds": 1, **model, **values, **changes}))


def test_a_job_that_no_records_suffice_for_is_refused_at_once() -> None:
    def refused(of: JobSetup, site: Policy) -> str:
        with pytest.raises(BelowPolicyError) as caught:
            rule.check_job(site, of)
        assert caught.value.code == "TF-625"
        return caught.value.refusals[0].asked

    by_class = prepare(
        setup("ccvr").job.model_copy(update={"model": "mlp", "model_options": {"widths": [8]}})
    )
    assert refused(setup(weights="uniform"), policy()) == "products of 8 features with uniform weights"
    assert refused(by_class, policy()) == "products of 8 features by class"
    for allowed in (setup(), setup("fedncm", "uniform")):  # no products, or not by class
        rule.check_job(policy(), allowed)
    for lax in (by_class, setup(weights="uniform")):
        rule.check_job(policy(0), lax)


def test_only_a_policy_that_tells_shows_the_lead_the_rule() -> None:
    for tells in (True, False):
        with pytest.raises(BelowPolicyError) as caught:
            rule.check_job(policy(tell_refusals=tells), setup(weights="uniform"))
        assert bool(caught.value.outside()) is tells


def test_declared_records_are_enough_or_not_by_one() -> None:
    rule.check_declared(policy(), setup(), Sizes(17, 1))
    rule.check_declared(policy(0), setup(), Sizes(0, 0))
    rule.check_declared(policy(), setup("fedncm"), Sizes(2, 2))  # all of them could be of one class
    rule.check_declared(policy(), setup("fedncm", "uniform"), Sizes(1, 0))  # tells nothing: counted later
    cases = (
        ("fed3r", Sizes(16, 1), "over 15 declared"),
        ("fedncm", Sizes(1, 0), "over all declared records, with 10 values"),
    )
    for method, sizes, words in cases:
        with pytest.raises(BelowPolicyError, match=rf"^TF-625: [\s\S]*{words}"):
            rule.check_declared(policy(), setup(method), sizes)


def test_dense_layers_on_inputs_have_two_records_a_unit() -> None:
    def widest(**changes: Any) -> int | None:
        found = layers.units_planned(trained(**changes))
        return None if found is None else found.width

    def trained(**changes: Any) -> JobSetup:
        model = {"model": "mlp", "model_options": {"widths": [8, 6]}}
        return prepare(parse_job({**setup("fedavg").job.model_dump(), **model, **changes}))

    job = trained()
    rule.check_declared(policy(), job, Sizes(20, 4))
    rule.check_declared(policy(0), job, Sizes(0, 0))
    rule.check_declared(policy(), trained(weights="uniform"), Sizes(4, 1))  # see check_rows
    with pytest.raises(BelowPolicyError, match=r"8 units, .* trained on 15 declared") as caught:
        rule.check_declared(policy(), job, Sizes(19, 4))
    assert caught.value.code == "TF-625"
    assert caught.value.refusals[0].required == "at most 7 units a layer; or privacy"
    for inputs, required in ((40, "7 rounds of 2 units, or 15 inputs"), (15, "15 rounds")):
        with pytest.raises(BelowPolicyError) as caught:
            rule.check_units(policy(), Units(2, 2, inputs, 90, 16), 30.0, "records")
        assert caught.value.refusals[0].required == f"at most {required}; or privacy"
    assert widest(method="fedsgd") == widest(method="fedmr") == 8
    behind = {"method_options": {"variant": "fishr_arith_fullbatch"}, "model_options": {"widths": [90, 2]}}
    assert widest(method="fedilc", **behind) == 90  # whose first field is narrow
    assert widest(rounds=30) == 30
    assert widest(encoder="random", rounds=5) == 6  # the features', fewer than units by rounds
    pictures = {"dataset": "digits", "dataset_options": {}}
    assert widest(**pictures) == 10 and widest(**pictures, rounds=20) == 64  # of 64 pixels
    frozen = {"model": "random_features", "model_options": {"width": 100}}
    assert widest(**frozen, rounds=20) == 40 and widest(**frozen, rounds=90) == 100
    small = {"model": "small_cnn", "model_options": {}}
    assert widest(**pictures, **small, rounds=90) == 32, "128 channels at 2 x 2 places, each sum by itself"
    vgg = {"dataset": "fed_isic2019", "dataset_options": {"image_size": 32}, "model": "vgg11"}
    assert widest(**vgg, model_options={}) == 512 and widest(**vgg, model_options={"hidden": []}) == 128
    assert widest(**vgg, model_options={"hidden": []}, method="fedper") == 128  # whose head stays
    private = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}
    assert widest(weights="uniform", privacy=private) is None


STEP = {"learning_rate": 1e-3, "batch_size": 16, "momentum": 0.5, "weight_decay": 0.0}
PICTURES = {"dataset": "digits", "dataset_options": {}, "model": "small_cnn", "model_options": {}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training": STEP}, Behind()),
        ({"method": "fedsgd", "method_options": {"sampling_rate": 0.25}}, Behind(0.25)),
        ({"model": "mlp", "model_options": {"dropout": 0.875}, "training": STEP}, Behind(0.125)),
        ({"model": "random_features", "model_options": {"dropout": 0.25}, "training": STEP}, Behind(0.75)),
        ({**PICTURES, "model": "vgg11", "training": STEP, "dataset": "fed_isic2019"}, Behind(0.5)),
        ({"training": {**STEP, "weight_decay": 0.5}}, Behind(most=16_000)),
        ({"training": {**STEP, "weight_decay": 0.5, "optimizer": "adam"}}, Behind(most=32_000)),
        ({"method": "fedprox", "method_options": {"mu": 500.0}, "training": STEP}, Behind(most=16)),
        ({"method": "feddyn", "method_options": {"alpha": 500.0}, "training": STEP}, Behind(most=16)),
        ({"method": "fedcurv", "method_options": {"weight": 250.0}, "training": STEP}, Behind(most=16)),
        ({"method": "fedmmd", "method_options": {"weight": 500.0}, "training": STEP}, Behind(most=16)),
        (
            {
                "method": "feddc",
                "method_options": {"alpha": 500.0, "momentum": "ignore"},
                "training": STEP,
            },
            Behind(most=16),
        ),
        (
            {
                "method": "combine",
                "method_options": {"local": "fedprox", "fedprox_mu": 500.0},
                "training": STEP,
            },
            Behind(most=16),
        ),
    ],
)
def test_what_a_job_keeps_out_of_an_update_is_not_behind_it(
    changes: dict[str, Any], expected: Behind
) -> None:
    job = {**setup("fedavg").job.model_dump(), "model": "mlp", "model_options": {}, **changes}
    found = layers.behind(prepare(parse_job(job)))
    assert (found.share, found.most) == pytest.approx((expected.share, expected.most))


def test_an_update_is_of_enough_records_of_each_silo_whatever_the_model() -> None:
    options = {"method": "fedsgd", "method_options": {"sampling_rate": 0.05}}
    few = prepare(parse_job({**setup("fedavg").job.model_dump(), **PICTURES, **options}))
    assert policy().class_count(synthetic=False) == 5
    rule.check_behind(policy(), few, 100)
    rule.check_behind(policy(0), few, 99)
    rule.check_behind(policy(), setup("fedavg"), 1)
    for records in (99, 9):
        with pytest.raises(BelowPolicyError, match=r"^TF-625: [\s\S]*at least 5 \(min_class_count\)"):
            rule.check_behind(policy(), few, records)


def test_a_round_whose_sum_has_an_update_in_two_forms_counts_twice() -> None:
    found = layer_rounds(25, method="scaffold", rounds=2, training={**STEP, "momentum": 0.0})
    assert found.units is not None and found.units.times == 4
    assert found.parts(2).rounds == layer_rounds(24, rounds=4).parts(2).rounds


def layer_rounds(records: float, **changes: Any) -> across_jobs.Rounds:
    """Of 3 units on 13 columns; under a rule of 2 each round takes 6 of so many records."""
    model = {"model": "mlp", "model_options": {"widths": [3]}, "rounds": 4}
    job = parse_job({**setup("fedavg").job.model_dump(), **model, **changes})
    found = across_jobs.rounds_planned(prepare(job), Sizes(records, 0))
    assert found is not None
    return found


def test_rounds_of_jobs_add_up_as_parts_of_what_their_records_allow() -> None:
    found = layer_rounds(25)
    names, places = ("hearts", "job-b"), [("train", number, 0) for number in (1, 2, 3, 4)]
    assert found.places == set(places)
    first = [found.entries("hearts", "job-a", place)[0] for place in places[:3]]
    assert across_jobs.taken(first, 2) == Parts(Fraction(18, 25), Fraction(9, 625))
    many = [layer_rounds(250).entries("hearts", "job-0", place)[0] for place in places[:3]]
    assert across_jobs.taken([*first, *many], 2).rounds == Fraction(18, 25), "columns fewer than a half"
    one = layer_rounds(25, rounds=1)
    one.check(policy(), *names, History(first))
    (told,) = found.check_next(policy(), *names, places[0], History(first))
    assert (told,) == found.entries(*names, places[0]) != (first[0],)
    history = History([*first, told])
    found.check_next(policy(), *names, places[0], history)  # of its tries one is opened
    one.check(policy(), *names, history)
    for check in (
        lambda: found.check_next(policy(), *names, places[1], history),
        lambda: one.check(policy(), "hearts", "job-c", history),
        lambda: found.check(policy(), *names, History(first)),
    ):
        with pytest.raises(BelowPolicyError, match=r"^TF-625: [\s\S]*, [01] such sums over 25 records"):
            check()
    one.check(policy(), "others", "job-c", history)
    history.append(RoundsAccepted("hearts", one.config))
    one.check(policy(), "hearts", "job-c", history)


def test_layers_of_jobs_add_up_by_their_squares_and_once_in_a_chain() -> None:
    """7 units of 20 records take a quarter of the square of 14/20; eight jobs 98 %."""
    resume = {"lineage": "job-a", "previous": "job-a", "after_round": 1, "checkpoint_sha256": "0" * 64}
    first = layer_rounds(20, rounds=1)
    seven = replace(first, units=Units(7, 1, 13, 300, 1))
    entries = [seven.entries("hearts", job, ("train", 1, 0))[0] for job in JOBS]
    assert across_jobs.taken(entries, 2).units == Fraction(98, 100)
    seven.check(policy(), "hearts", "job-c", History(entries[:7]))
    for check in (seven.check, partial(seven.check_next, place=("train", 1, 0))):
        with pytest.raises(BelowPolicyError, match=r"They took 98.0% [\s\S]*, 0 such sums over 20 records"):
            check(policy(), dataset="hearts", job="job-c", history=History(entries))
    resumed = replace(seven, lineage="job-a")
    resumed.check(policy(), "hearts", "job-c", History(entries))
    (told,) = resumed.check_next(policy(), "hearts", "job-c", ("train", 1, 0), History(entries))
    assert across_jobs.taken([*entries, told], 2).units == Fraction(98, 100)
    assert layer_rounds(20, rounds=2, resume=resume).lineage == "job-a" and first.lineage is None
    assert across_jobs.rounds_left(Parts(), Parts(Fraction(1))) is None
    assert across_jobs.rounds_left(Parts(Fraction(1, 4)), Parts(Fraction(3, 2))) == 0
    assert across_jobs.rounds_left(Parts(Fraction(1, 4)), Parts(Fraction(1, 4))) == 3


def test_products_of_trained_features_add_up_and_frozen_ones_do_not() -> None:
    """36 products and 16 sums of 8 features, of 12 records' 120 values: two of three jobs fit."""
    values = {"method_options": {"covariance": "shared"}, "model": "mlp", "model_options": {"widths": [8]}}
    job = {**setup("ccvr").job.model_dump(), **values, "rounds": 1}
    found = across_jobs.rounds_planned(prepare(parse_job(job)), Sizes(12, 0))
    assert found is not None
    (place,) = found.multiplied
    assert place[0] == "after" and found.places == {("train", 1, 0), place}
    told = [found.entries("hearts", job, place)[0] for job in ("job-a", "job-b")]
    assert across_jobs.taken(told, 2) == Parts(products=Fraction(104, 120))
    of = ("hearts", "job-c", place)
    assert found.check_next(policy(), *of, History(told[:1])) == found.entries(*of)
    with pytest.raises(BelowPolicyError, match=r"1 more sum of layers .* and 1 more sum of products of 8"):
        found.check_next(policy(), *of, History(told))
    alone = replace(found, units=None, layers=frozenset())
    alone.check(policy(), "hearts", "job-c", History(told[:1]))
    with pytest.raises(BelowPolicyError, match=r"for 1 more sum of products .*, 0 such sums over 12 records"):
        alone.check(policy(), "hearts", "job-c", History(told))
    assert across_jobs.rounds_left(Parts(products=Fraction(2, 5)), Parts()) == 2
    for method in ("fed3r", "fedcgs"):
        assert across_jobs.rounds_planned(setup(method), Sizes(10, 0)) is None
    assert across_jobs.taken(told, 0) == Parts()


def schema(*, products: int = 0, features: int = 0) -> Schema:
    """A sum of features; neither is one of anything else."""
    return Schema(
        (
            Field("other", (3,)),
            Field("products", (3,), static=True, products=products),
            Field("sums", (3,), static=True, features=features),
        )
    )


def state(counts: list[int] | None, **extra: torch.Tensor) -> ServerState:
    """Counted rows of each class, none of which another class has."""
    if counts is None:
        return ServerState({}, dict(extra))
    rows = torch.tensor(counts, dtype=torch.float64)
    return ServerState({}, {COUNTED: rows, ROWS: rows, ENOUGH: torch.zeros(len(rows)), **extra})


MANY = Sizes(1000, 0)
JOBS = ["job-a", *(f"job-{number}" for number in range(7))]


@pytest.mark.parametrize(
    ("counts", "summed", "sizes"),
    [
        ([14, 2], {"products": 8, "features": 8}, MANY),
        ([10, 7], {"products": 8}, Sizes(1000, 1)),
        ([2, 0], {"features": 8}, MANY),  # a class without records has no sum
        (None, {}, MANY),
    ],
)
def test_so_many_counted_records_are_enough(
    counts: list[int] | None, summed: dict[str, int], sizes: Sizes
) -> None:
    rule.check_sum(policy(), setup(), schema(**summed), state(counts), sizes)


@pytest.mark.parametrize(
    ("counts", "summed", "sizes", "words"),
    [
        ([15, 0], {"products": 8}, MANY, "over 15 counted records"),
        ([1000, 1000], {"products": 8}, Sizes(16, 1), "over 15 counted records"),
        ([2, 1], {"features": 8}, MANY, "class 1, with 10 values"),
        ([20, 1], {"products": 8, "features": 8}, MANY, "class 1, with 10 values"),
        (None, {"products": 8}, MANY, "over 0 counted records"),
        (None, {"features": 8}, MANY, "class 0, with 0 values"),
    ],
)
def test_one_record_fewer_is_not(
    counts: list[int] | None, summed: dict[str, int], sizes: Sizes, words: str
) -> None:
    with pytest.raises(BelowPolicyError, match=rf"^TF-625: [\s\S]*{words}"):
        rule.check_sum(policy(), setup(), schema(**summed), state(counts), sizes)
    rule.check_sum(policy(0), setup(), schema(**summed), state(counts), sizes)


@pytest.mark.parametrize("lacking", [COUNTED, ROWS, ENOUGH])
def test_a_state_of_an_earlier_build_counts_nothing(lacking: str) -> None:
    of = {name: item for name, item in state([1000, 1000]).extra.items() if name != lacking}
    for summed, words in (
        ({"products": 8}, "over 0 counted records, with 0"),
        ({"features": 8}, "with 0 values"),
    ):
        with pytest.raises(BelowPolicyError, match=words):
            rule.check_sum(policy(), setup(), schema(**summed), ServerState({}, of), MANY)


def check_own(of: ServerState, summed: Schema, own: tuple[list[float], list[float]], **given: Any) -> None:
    """Hold a silo's own rows of each class, with so many values each, to the rule."""
    rows, values = (torch.tensor(item, dtype=torch.float64) for item in own)
    how = {"policy": policy(), "sizes": MANY, "seen": False, **given}
    rule.check_own(setup=setup(), schema=summed, state=of, own=OwnRows(rows, rows, values), **how)


@pytest.mark.parametrize(
    ("of", "own", "given", "words"),
    [
        (state([14, 2]), ([7, 1], [5, 4]), {}, None),  # 78 numbers of 16 records: 4.875 of each
        (state([14, 2]), ([7, 1], [5, 3.9]), {}, "with 78 values"),
        (state([14, 3]), ([7, 1], [4, 4]), {"sizes": Sizes(1000, 1)}, "over 16 counted records, with 64"),
        (state([14, 3]), ([0, 0], [0, 0]), {}, None),  # none of its own is in it
        (state([20, 0]), ([7, 1], [4, 0]), {}, None),  # of a class that is not summed nothing counts
        (
            state([14, 6], **{LEAVING: torch.tensor(1.0), LOSING: torch.tensor([1, 1])}),
            ([9, 2], [4, 4]),
            {},
            "over 19 counted records, with 76 values",
        ),
        (state([14, 20]), ([16, 2], [5, 5]), {"seen": True}, None),
        (state([14, 20]), ([15, 2], [4, 4]), {"seen": True}, "over 17 counted records, with 68 values"),
        (state([14, 20]), ([13, 2], [9, 9]), {"seen": True}, "over 15 counted records"),
    ],
)
def test_of_products_each_silos_own_records_have_the_values_needed_on_average(
    of: ServerState, own: Any, given: dict[str, Any], words: str | None
) -> None:
    if words is None:
        return check_own(of, schema(products=8), own, **given)
    with pytest.raises(BelowPolicyError, match=words):
        check_own(of, schema(products=8), own, **given)
    return check_own(of, schema(products=8), own, **given, policy=policy(0))


ONE = {ENOUGH: torch.tensor([0.0, 1.0])}


@pytest.mark.parametrize(
    ("of", "own", "given", "words"),
    [
        (state([20, 20]), ([5, 5], [0.8, 0.8]), {}, None),  # 16 of 20 records
        (state([20, 20]), ([5, 5], [0.8, 0.7]), {}, "class 1, each worth one of this silo's, with 14 values"),
        (state([20, 20]), ([5, 0], [0.8, 0.0]), {}, None),
        (state([20, 20], **ONE), ([5, 5], [0.8, 0.0]), {}, None),  # another's are enough
        (state([20, 20], **ONE), ([5, 5], [0.7, 9]), {}, "class 0, .*with 14 values"),
        (state([20, 20], **ONE), ([5, 5], [2, 0.5]), {"policy": policy(ALONE)}, None),
        (state([20, 20], **ONE), ([5, 5], [3, 0.5]), {"policy": policy(ALONE + 1)}, "class 1, .*with 10"),
        (
            state([20, 20], **ONE, **{LEAVING: torch.tensor(5.0), LOSING: torch.tensor([0, 1])}),
            ([5, 5], [0.8, 1]),
            {},
            "class 1, .*with 15 values",  # it was enough before
        ),
        (state([20, 20], **ONE), ([2, 2], [8, 8]), {"seen": True}, None),  # the server sees the term
        (state([20, 20], **ONE), ([2, 1], [8, 8]), {"seen": True}, "class 1, .*with 8 values"),
    ],
)
def test_of_class_sums_they_have_too_unless_one_silo_alone_has_enough(
    of: ServerState, own: Any, given: dict[str, Any], words: str | None
) -> None:
    if words is None:
        return check_own(of, schema(features=8), own, **given)
    with pytest.raises(BelowPolicyError, match=words):
        check_own(of, schema(features=8), own, **given)
    return check_own(of, schema(features=8), own, **{**given, "policy": policy(0)})


def test_a_class_that_stays_with_no_sure_value_is_held_to_the_rule() -> None:
    """Of it an earlier withdrawal has taken all that was sure; by its flags it is still summed."""
    of = state([14, 0], **{LEAVING: torch.tensor(0.0), LOSING: torch.tensor([0, 0])})
    with pytest.raises(RunError, match="class 1, with 0 values"):
        of = with_holders(of, np.array([3, 3]))
        rule.check_sum(policy(), setup(), schema(features=8), of, MANY)


@pytest.mark.parametrize(
    ("leaving", "loses", "holders", "summed", "words"),
    [
        (5, [1, 1], None, {"products": 8}, "over 15 counted records"),
        (30, [1, 1], None, {"products": 8}, "over 0 counted records"),
        (
            0,
            [0, 0],
            [3, 2],
            {"products": 8},
            "over 14 counted records",
        ),  # a class of two holders leaves whole
        (5, [0, 1], None, {"features": 8}, "class 1, with 10 values"),
        (13, [1, 0], None, {"features": 8}, "class 0, with 10 values"),
        (15, [1, 0], None, {"features": 8}, "class 0, with 0 values"),
        (4, [1, 1], None, {"products": 8}, None),
        (13, [0, 0], None, {"features": 8}, None),  # a class that loses none keeps all
        (5, [0, 1], [3, 2], {"features": 8}, None),  # one that leaves whole has no sum
    ],
)
def test_in_a_withdrawal_those_that_stay_count(
    leaving: int, loses: list[int], holders: list[int] | None, summed: dict[str, int], words: str | None
) -> None:
    """Of 14 and 6 records."""
    extra = {LEAVING: torch.tensor(float(leaving)), LOSING: torch.tensor(loses)}
    of = state([14, 6], **extra)
    if holders is not None:
        of = with_holders(of, np.array(holders))
    if words is None:
        return rule.check_sum(policy(), setup(), schema(**summed), of, MANY)
    with pytest.raises(RunError, match=rf"^TF-523: [\s\S]*{words}"):
        rule.check_sum(policy(), setup(), schema(**summed), of, MANY)
    return None


@pytest.mark.parametrize(
    ("records", "required"),
    [(15, "at most 7 features, or privacy"), (1, "privacy"), (3, "at most 1 feature, or privacy")],
)
def test_a_refusal_names_the_widest_that_passes(records: int, required: str) -> None:
    with pytest.raises(BelowPolicyError) as caught:
        rule.check_declared(policy(), setup(), Sizes(records, 0))
    assert caught.value.refusals[0].required == required


def test_the_console_says_which_products_a_standard_policy_refuses() -> None:
    found = Products(8, 2, 10)
    assert rule.warned(found, 16) == []
    assert "OVER 15 SURE RECORDS" in rule.warned(found, 15)[0]
    assert "OVER UNKNOWN NUMBERS OF RECORDS" in rule.warned(found, None)[0]


def test_the_widest_sum_of_a_plan_is_found() -> None:
    exchanges = [
        SimpleNamespace(phases=[SimpleNamespace(schema=schema(products=width))]) for width in (4, 9, 0)
    ]
    plan: Any = SimpleNamespace(
        setting=setup().setting, plan=exchanges, most_values=10, statistics_phases=lambda: ()
    )
    assert planned.products_planned(plan) == Products(9, 2, 10)
    assert planned.products_in(setup(), Schema(())) is planned.class_sums_in(setup(), Schema(())) is None
    assert planned.products_planned(setup()) == Products(8, 2, 10, moments=26)
    options = {"width": 8, "standardise": False}
    bare = prepare(setup().job.model_copy(update={"model_options": options}))
    assert planned.products_planned(bare) == Products(8, 2, 10)
    assert planned.products_planned(setup("fedncm")) is None
    found = planned.class_sums_planned(setup("fedncm"))
    assert found is not None and found.width == 8
    assert planned.class_sums_planned(setup("fedavg")) is None


def test_a_class_whose_rows_are_others_too_has_a_sum_without_a_count() -> None:
    of = with_holders(state([20, 0]), np.array([3, 3]))
    with pytest.raises(BelowPolicyError, match="class 1, with 0 values"):
        rule.check_sum(policy(), setup(), schema(features=8), of, MANY)


def test_the_console_tells_sums_by_class_from_products() -> None:
    sums = ClassSums(8, 10)
    assert rule.warned(sums, 4, classes=2) == rule.warned(sums, None, classes=2) == []
    (said,) = rule.warned(sums, 2, classes=2)
    assert "SUMS OF 8 FEATURES BY CLASS OVER 2 RECORDS" in said and "a small one of the 2 classes" in said
    (said,) = rule.warned(Products(8, 2, 10), 15)
    assert "PRODUCTS OF 8 FEATURES OVER 15 SURE RECORDS" in said and "if they are few" in said
