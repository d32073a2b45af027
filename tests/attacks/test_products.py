"""Records computed from an opened sum of products of features, and the rule that keeps such sums shut.

The reader needs the opened total and the job alone: any hospital has both, and so has the server. With fewer
records than features the products have a null space, which vanishes at the records' features: least squares
from random starts ends at records.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tests.attacks import test_withdrawals
from tests.support.attacks.liar import lies
from tests.support.attacks.malicious_server import ANY_WIDTH, STANDARD, Chosen, Federation, Records, hearts
from torch import nn
from torch.utils.data import Subset

from tightframe.config.policy import PolicyBlock
from tightframe.errors import PolicyError, RunError, TightframeError
from tightframe.learning import model_update
from tightframe.learning.few_records.distinct_rows import BITS
from tightframe.learning.few_records.products import ALONE, COUNTED, ENOUGH, ROWS, ClassSums, Sizes
from tightframe.learning.one_sum import feature_sums
from tightframe.learning.one_sum.feature_sums import COUNTS, SUMS, pooled
from tightframe.rounds import codec
from tightframe.rounds.codec import integer_totals
from tightframe.rounds.few_records import layers
from tightframe.rounds.few_records.rule import warned
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import LocalSilo

OFF = PolicyBlock(profile="standard", records_per_feature=0, minimum_cohort=1)
ANY_COHORT = STANDARD.model_copy(update={"minimum_cohort": 1})
"""``ccvr`` is for four hospitals (``test_two_equations``)."""
WIDE: dict[str, Any] = {
    "method": "fed3r",
    "weights": "exact",
    "model": "random_features",
    "model_options": {"standardise": True},
}
"""The model's default width, 256."""
CCVR: dict[str, Any] = {
    "method": "ccvr",
    "weights": "exact",
    "training": {"learning_rate": 0.01, "batch_size": 16},
    "model_options": {"widths": [128], "standardise": True},
}


def small() -> dict[str, Records]:
    """Three hospitals with 216 records together."""
    every = hearts(12)
    return {name: every[name] for name in ("hospital-4", "hospital-8", "hospital-12")}


def totals(federation: Federation, name: str) -> dict[str, np.ndarray]:
    """Sum one exchange after the other, as an honest server does, up to the one with a field of this name."""
    for exchange in federation.setup.plan:
        found = federation.sum(*exchange.place)
        if name in found and found[name].any():
            return found
    raise AssertionError(f"no total has {name}")


def least_squares(
    phi: Any, null: torch.Tensor, start: torch.Tensor, steps: int, most: float = 1e-9
) -> torch.Tensor:
    """Return points (n, p) at which ``phi`` has hardly a part in a null space (k, d): Levenberg-Marquardt."""
    slope = torch.func.vmap(torch.func.jacfwd(lambda point: phi(point[None])[0] @ null.T))
    points, damped = start, torch.full((len(start),), 1e-2, dtype=torch.float64)
    cost = (phi(points) @ null.T).square().sum(1)
    for _ in range(steps):
        jacobian, residual = slope(points), phi(points) @ null.T
        normal = torch.einsum("bnk,bnl->bkl", jacobian, jacobian)
        scaled = torch.diag_embed(torch.diagonal(normal, dim1=1, dim2=2).clamp_min(1e-12))
        gradient = torch.einsum("bnk,bn->bk", jacobian, residual)
        step = torch.linalg.solve(normal + damped[:, None, None] * scaled, gradient)
        moved = points - step / step.norm(dim=1, keepdim=True).clamp_min(1.0)
        lower = (phi(moved) @ null.T).square().sum(1)
        better = lower < cost
        points, cost = torch.where(better[:, None], moved, points), torch.where(better, lower, cost)
        damped = torch.where(better, damped * 0.3, damped * 4).clamp(1e-9, 1e6)
    return points[cost < most]


def read(federation: Federation, opened: dict[str, np.ndarray]) -> tuple[int, int]:
    """Return how many records are read from a total to 1% of a deviation, and the products' rank."""
    module: Any = model_update.build_template(federation.setup.setting)
    module.load_state_dict(dict(federation.shared.state.model))
    mean, deviation = (getattr(module.standardise, name).detach().double() for name in ("mean", "std"))
    weight, offset = module.backbone.weight.double(), module.backbone.offset.double()
    found = pooled(opened)
    assert found.gram is not None
    rank = int(torch.linalg.matrix_rank(found.gram, hermitian=True, rtol=1e-13))
    null = torch.linalg.eigh(found.gram).eigenvectors[:, : len(weight) - int(found.records)].T

    def phi(points: torch.Tensor) -> torch.Tensor:
        return math.sqrt(2 / len(weight)) * (points @ weight.T + offset).cos()

    start = torch.randn(30, weight.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = least_squares(phi, null, start, 40)
    records = np.concatenate([item.raw("train") for item in federation.data.values()])
    true = (torch.as_tensor(records).double() - mean) / deviation
    distance, which = torch.cdist(points, true).min(1) if len(points) else (torch.zeros(0), torch.zeros(0))
    return len(which[distance < 0.01].unique()), rank


@pytest.mark.whole
def test_without_the_rule_whoever_reads_the_total_has_records_in_clear(tmp_path: Path) -> None:
    federation = Federation(WIDE, small(), state=tmp_path, policy=OFF).enroll()
    found, _ = read(federation, totals(federation, "frozen/products"))
    assert found >= 5


def told_apart(folder: Path, units: int) -> float:
    """Return how surely a trained record's pattern of active units is told from one that nobody has (AUROC).

    Of each unit an update has a sum over the records for which it is active. So over rounds at a low rate
    the records' patterns span what the updates span, if there are more units than records.
    """
    job = {
        "weights": "exact",
        "rounds": 17,
        "training": {"learning_rate": 1e-3, "batch_size": 16},
        "model_options": {"widths": [units], "standardise": True},
    }
    federation = Federation(job, small(), state=folder, policy=ANY_WIDTH).enroll()
    model = dict(federation.shared.state.model)
    sums = []
    for exchange in federation.setup.plan:
        total = federation.sum(*exchange.place)
        model = dict(federation.shared.state.model) if exchange.round == 8 else model
        if exchange.training:
            sums.append(
                np.c_[*(total[f"update/backbone.1.{name}"].reshape(units, -1) for name in ("weight", "bias"))]
            )
    slope = model["head.weight"][1] - model["head.weight"][0]
    span = np.linalg.svd(np.concatenate(sums, 1) / slope.double().numpy()[:, None], full_matrices=False)[0]
    span = span[:, : min(216, units // 2)]
    trained, never = (
        np.concatenate([item.raw(fold) for item in federation.data.values()]) for fold in ("train", "test")
    )
    inputs = torch.as_tensor(np.concatenate([trained, never])).float()
    inputs = (inputs - model["standardise.mean"]) / model["standardise.std"]
    active = (inputs @ model["backbone.1.weight"].T + model["backbone.1.bias"] > 0).double().numpy()
    within = np.square(active @ span).sum(1) / active.sum(1)
    return float(roc_auc_score(np.repeat([1, 0], [len(trained), len(never)]), within))


@pytest.mark.whole
def test_layers_with_more_units_than_records_tell_who_was_trained_on(tmp_path: Path) -> None:
    assert told_apart(tmp_path / "wide", 512) > 0.95
    assert told_apart(tmp_path / "allowed", 72) < 0.85


def refused(values: dict[str, Any], folder: Path, data: dict[str, Records] | None = None) -> str:
    """Return why a hospital refuses a job at enrolment, before anything is masked."""
    with pytest.raises(PolicyError) as caught:
        Federation(values, data or small(), state=folder, policy=ANY_COHORT).enroll()
    assert caught.value.code == "TF-625"
    return str(caught.value)


@pytest.mark.whole
def test_a_hospital_refuses_more_features_than_its_rule_allows(tmp_path: Path) -> None:
    assert "at most" in refused(WIDE, tmp_path / "wide")
    assert "weights exact" in refused({**WIDE, "weights": "uniform"}, tmp_path / "untold")
    started = {**WIDE, "method": "fedavg", "start": "fed3r"}
    assert "256 features" in refused(started, tmp_path / "start")
    assert "covariance shared" in refused(CCVR, tmp_path / "class")
    shared = {**CCVR, "method_options": {"covariance": "shared"}}
    assert "128 features" in refused(shared, tmp_path / "shared")
    layers = {"weights": "exact", "model_options": {"widths": [73], "standardise": True}}
    assert "at most 72 units" in refused(layers, tmp_path / "layers")
    head = {**WIDE, "method": "fedavg", "rounds": 37}  # two classes by 37 rounds
    assert "the first on 256 numbers of a record in 37 sums" in refused(head, tmp_path / "head")
    assert "silos as this one" in refused({**layers, "weights": "uniform"}, tmp_path / "own")


def test_one_who_lies_about_its_records_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million declared by the colluding hospital: the others' 144 count."""
    told = SiloSession._weight

    def weight(self: SiloSession, records: int) -> float:
        return 1e6 if self.context.name == "hospital-8" else told(self, records)

    monkeypatch.setattr(SiloSession, "_weight", weight)
    assert "over 144 declared records" in refused(WIDE, tmp_path)


@pytest.mark.whole
def test_records_that_do_not_count_are_not_relied_on(tmp_path: Path) -> None:
    """Class 0 is left to two hospitals: of the 484 records declared, 269 are summed."""
    data = hearts(4) | {"hospital-5": hearts(8)["hospital-8"]}
    policy = PolicyBlock(profile="standard", min_class_count=17, min_row_bits=0)
    values = {**WIDE, "class_rules": "on", "model_options": {"width": 64, "standardise": True}}
    federation = Federation(values, data, state=tmp_path, policy=policy).enroll()
    with pytest.raises(PolicyError, match=r"^TF-625: [\s\S]*over 100 counted"):
        totals(federation, "frozen/products")


def test_a_class_that_a_liar_takes_out_of_the_counts_is_held_to_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flags three hospitals hold it; by the counts, to which one adds a negative number, nobody does."""
    data = small()
    told = (COUNTS, "frozen/rows")
    others = sum(int((data[name].labels("train") == 0).sum()) for name in data if name != "hospital-8")
    lies(
        monkeypatch,
        "hospital-8",
        {COUNTS: {name: np.array([-float(others), np.nan]) for name in told}},
    )
    federation = Federation(of_class_sums(201), data, state=tmp_path).enroll()
    with pytest.raises(PolicyError, match="class 0, with 0 values") as caught:
        totals(federation, SUMS)
    assert caught.value.code == "TF-625" and federation.shared.state.extra[ROWS][0] == 0


def test_of_a_plain_sum_a_hospitals_own_records_count(tmp_path: Path) -> None:
    """Its server sees each term: of 16 records of class 0 with 5.2 values, not 48."""
    for width, enough in ((41, True), (42, False)):
        values = {**of_class_sums(width), "summation": "plain"}
        federation = Federation(values, small(), state=tmp_path / str(width))
        setup, context = federation.setup, federation.sessions["hospital-4"].context
        silo, view = Contributor(context), LocalSilo(context, federation.setup, torch.device("cpu"), 0)
        (sums,) = (item for item in setup.plan if SUMS in item.phase.schema)
        counts = torch.tensor([48.0, 168.0], dtype=torch.float64)
        counted = {COUNTED: counts, ROWS: counts, ENOUGH: torch.ones(2)}
        state = setup.initial_state().evolve(extra=counted)
        with nullcontext() if enough else pytest.raises(PolicyError, match=r"class 0, .*with 83 values"):
            silo._check_own(view, sums, sums.phase, state, Sizes(216.0, 0.0))


@pytest.mark.whole
def test_no_total_tells_one_hospitals_own_number_of_records(tmp_path: Path) -> None:
    """10 times the counts less rows times varying columns was 16 and 50: hospital-4's, twice hospital-3's."""
    federation = Federation(of_class_sums(64), hearts(4), state=tmp_path).enroll()
    opened: dict[str, np.ndarray] = {}
    for exchange in federation.setup.plan:
        opened |= federation.sum(*exchange.place)
        if SUMS in opened:
            break
    numbers = {name: item for name, item in opened.items() if item.shape == (2,)}
    own = [np.bincount(item.labels("train"), minlength=2) for item in federation.data.values()]
    assert COUNTS in numbers and opened[SUMS].any()
    for times in range(1, 14):
        for name, total in numbers.items():
            left = times * opened[COUNTS] - total
            told = [
                (name, times, label)
                for alone in own
                for label in (0, 1)
                for step in range(1, times)
                if alone[label] and left[label] == step * alone[label] != (times - 1) * opened[COUNTS][label]
            ]
            assert told == []


@pytest.mark.whole
def test_a_hospital_whose_records_have_too_few_values_leaves_the_sum_of_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of class 1 hospital-3's have 4.17, others' more: 213 of these are too few for 444 features by class."""
    data = hearts(4)
    federation = Federation(of_class_sums(444), data, state=tmp_path / "wide").enroll()
    with pytest.raises(RunError, match="1 silo of 4 could not add") as caught:
        totals(federation, SUMS)
    assert caught.value.code == "TF-510" and federation.evidence is not None
    assert caplog.text.count("nothing can be contributed to this sum: TF-625") == 1
    assert "hospital-3: nothing" in caplog.text and "with 888 values, at most 443" in caplog.text
    schema = federation.setup.plan.find("before", 0, 2).phase.schema
    less = codec.decode(schema, integer_totals(schema, federation.evidence.total.groups), parties=4)
    federation = Federation(of_class_sums(443), data, state=tmp_path / "allowed").enroll()
    whole = totals(federation, SUMS)
    assert whole[COUNTS].tolist() == [199, 213] != less[COUNTS].tolist()
    assert np.median(np.abs(less[SUMS])) > 1e3 * np.abs(whole[SUMS]).max(), "random"


@pytest.mark.whole
def test_a_small_hospital_does_not_keep_a_class_shut_of_which_another_has_enough(tmp_path: Path) -> None:
    """Where no column of a small one's records of a class varies."""
    data: dict[str, Records] = dict(hearts(4))
    data["hospital-4"] = Same(data["hospital-4"], 0)
    for width, enough in ((483 // ALONE, True), (483 // ALONE + 1, False)):
        federation = Federation(of_class_sums(width), data, state=tmp_path / str(width)).enroll()
        with nullcontext() if enough else pytest.raises(RunError, match="could not add its own"):
            assert totals(federation, "frozen/sums")["frozen/counts"].tolist() == [199, 213]


class Same(Records):
    """Records of which all of one class are the same."""

    def __init__(self, data: Records, label: int) -> None:
        super().__init__(data)
        self._label = label

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        inner, labels = super().records(fold), self.labels(fold)
        first = inner[int(np.flatnonzero(labels == self._label)[0])][0]
        return [
            (first + 0 if labels[i] == self._label else inner[i][0], inner[i][1]) for i in range(len(inner))
        ]


class Repeated(Records):
    """A few of a hospital's records, each of them so many times."""

    def __init__(self, data: Records, each: int) -> None:
        super().__init__(data)
        self._each = each

    def _chosen(self, fold: str) -> np.ndarray:
        labels = np.asarray(super().labels(fold))
        few = np.concatenate([np.flatnonzero(labels == label)[:4] for label in (0, 1)])
        return np.repeat(few, self._each) if fold == "train" else np.arange(len(labels))

    def labels(self, fold: str) -> Any:
        return np.asarray(super().labels(fold))[self._chosen(fold)]

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return Subset(super().records(fold), self._chosen(fold).tolist())


@pytest.mark.parametrize(
    ("method", "width", "why"),
    [("fed3r", 48, "over 0 counted records"), ("fedncm", 61, "class 0, with 120 values")],
    ids=["products", "class"],
)
def test_records_that_are_the_same_count_once(tmp_path: Path, method: str, width: int, why: str) -> None:
    """Of 24 records, each there nine times, 19 were read from products of 48 features.

    One hospital that may lie has 72 of the 24: what it declares holds repeats.
    """
    data = {name: Repeated(item, 9) for name, item in small().items()}
    values = {**WIDE, "method": method, "model_options": {"width": width, "standardise": True}}
    policy = PolicyBlock(profile="standard", evaluated_share=None, min_row_bits=0)
    federation = Federation(values, data, state=tmp_path, policy=policy).enroll()
    with pytest.raises(PolicyError, match=rf"^TF-625: [\s\S]*{why}"):
        totals(federation, "frozen/sums")


class Wider(Records):
    """Records with 100 numbers more, which say nothing."""

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        inner = super().records(fold)
        return [(torch.cat([inner[i][0], torch.zeros(100)]), inner[i][1]) for i in range(len(inner))]


@pytest.mark.whole
@pytest.mark.parametrize("added", ["levels", "columns"])
def test_numbers_that_say_nothing_do_not_count(
    tmp_path: Path, added: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 48 records of class 0, 32 of 32 unknown ones were read from 1,900 sums of 48 x 113 / 2."""
    numbers: list[dict[str, Any]] = [
        {"column": f"n{place}", "kind": "number", "low": 0.0, "high": 300.0} for place in range(113)
    ]
    if added == "levels":  # of a category, which no record has
        levels = [f"l{place}" for place in range(101)]
        numbers[13:] = [{"column": "kind", "kind": "category", "vocabulary": levels}]
    label = {"column": "y", "classes": [{"code": "0"}, {"code": "1"}]}
    contract = {"title": "t", "columns": numbers, "label": label}
    values = of_class_sums(1900, dataset="table", dataset_options={"contract": contract})
    data: dict[str, Records] = {name: Wider(item) for name, item in small().items()}
    if added == "levels":  # 216 records of 14 columns
        assert "at most 1512 features" in refused(values, tmp_path, data)
        return
    federation = Federation(values, data, state=tmp_path).enroll()
    with pytest.raises(RunError, match="3 of 3 silos in round 0 could not"):
        totals(federation, "frozen/sums")
    assert "class 0, each worth one of this silo's, with 250 values, at most 125 features" in caplog.text


def test_within_the_rule_the_products_have_no_null_space(tmp_path: Path) -> None:
    values = {**WIDE, "model_options": {"width": 32, "standardise": True}}
    federation = Federation(values, small(), state=tmp_path).enroll()
    assert read(federation, totals(federation, "frozen/products")) == (0, 32)


def alone(federation: Federation, gram: torch.Tensor) -> int:
    """Return how many records some combination of the products' rows is of alone, up to a scale.

    Whoever knows the weights finds the combination where no others are on a side of some unit.
    """
    model: Any = model_update.build_template(federation.setup.setting)
    model.load_state_dict(dict(federation.shared.state.model))
    records = np.concatenate([item.raw("train") for item in federation.data.values()])
    with torch.no_grad():
        phi = nn.functional.normalize(model.double().features(torch.as_tensor(records).double()))
    sizes, vectors = torch.linalg.eigh(gram)
    vectors, sizes = vectors[:, sizes > 1e-12 * sizes[-1]], sizes[sizes > 1e-12 * sizes[-1]]
    parts = phi @ vectors
    inside = (phi - parts @ vectors.T).norm(dim=1) < 1e-5
    return int((inside & (((parts.square() / sizes).sum(1) - 1).abs() < 0.01)).sum())


def read_rows(federation: Federation, gram: torch.Tensor) -> int:
    """Return how many records are read from rows of the products: those that are some point's features."""
    weight = federation.shared.state.model["backbone.1.weight"].double()
    records = np.concatenate([item.raw("train") for item in federation.data.values()])
    true, found = nn.functional.normalize(torch.as_tensor(records).double()), set[int]()
    for row in nn.functional.normalize(gram[gram.diagonal() > 1e-9]):
        fires = row > 1e-9
        point = torch.linalg.lstsq(weight[fires], row[fires]).solution
        if (
            fires.sum() > len(point) and (torch.relu(weight @ point) - row).norm() < 1e-5
        ):  # so the reader knows
            near = true @ nn.functional.normalize(point, dim=0)
            assert near.max() > 1 - 1e-5, "and is right"
            found.add(int(near.argmax()))
    return len(found)


@pytest.mark.whole
def test_no_record_is_on_a_units_side_alone_in_the_products(tmp_path: Path) -> None:
    """Of a random network on raw columns, whose author chose nothing."""
    values = {**WIDE, "model": "mlp", "model_options": {"widths": [36]}, "seed": 1}
    told = []
    for place, policy in enumerate((OFF, STANDARD)):
        federation = Federation(values, small(), state=tmp_path / str(place), policy=policy).enroll()
        gram = pooled(totals(federation, "frozen/products")).gram
        assert gram is not None
        told.append((read_rows(federation, gram), alone(federation, gram)))
    assert told[0] == (1, 1) and told[1] == (0, 0)


def one_step_off(federation: Federation, opened: dict[str, np.ndarray]) -> int:
    """Return how many records are read from rows of the products: of features one step off at one record."""
    model: Any = model_update.build_template(federation.setup.setting)
    model.load_state_dict(dict(federation.shared.state.model))
    mean, deviation = (getattr(model.standardise, name).detach().double() for name in ("mean", "std"))
    backbone, found = model.backbone.double(), pooled(opened)
    assert found.gram is not None

    def steps(point: torch.Tensor) -> torch.Tensor:
        features = backbone(point[None])[0]
        return features / features.norm().clamp_min(1) * 2.0**BITS

    origin = torch.zeros(13, dtype=torch.float64)
    slope, exact = torch.func.jacrev(steps)(origin), steps(origin)
    most, total, gram = exact.round(), found.sums.sum(0) * 2.0**BITS, found.gram * 4.0**BITS
    off = total - found.records * most
    squares = gram.diagonal() - 2 * most * total + found.records * most.square()
    records = np.concatenate([item.raw("train") for item in federation.data.values()])
    true, told = (torch.as_tensor(records).double() - mean) / deviation, set[int]()
    for place in ((squares == 1) & (off.abs() == 1)).nonzero()[:, 0].tolist():  # so the reader knows
        row, other = off[place] * (gram[place] - most[place] * total) - exact, torch.arange(len(off)) != place
        point = torch.linalg.lstsq(slope[other], row[other, None]).solution[:, 0]
        near = (true - point).abs().amax(1)
        assert near.min() < 0.1, "and is right"
        told.add(int(near.argmin()))
    return len(told)


def test_no_record_alone_is_a_rounding_step_off_in_the_products(tmp_path: Path) -> None:
    """At a large bandwidth cosines hardly differ; the seed is one of 100,000 that were searched offline."""
    options = {"standardise": True, "bandwidth": 1e6, "width": 35, "seed": 43086}
    told = []
    for place, radius in enumerate((0.0, feature_sums.NARROW)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(feature_sums, "NARROW", radius)
            values = {**WIDE, "model_options": options}
            federation = Federation(values, small(), state=tmp_path / str(place)).enroll()
            told.append(one_step_off(federation, totals(federation, "frozen/products")))
    assert told == [2, 0]


def between_borders(weight: np.ndarray, gram: np.ndarray) -> list[np.ndarray]:
    """Return directions of two numbers that one record alone has between borders of units on them.

    Between three borders in a row some combination of features is not zero, and elsewhere it is. The products
    times this one are the features of one record if they are those of any two numbers.

    Args:
        weight: of the units, (d, 2), without biases.
        gram: the products.
    """
    borders = np.arctan2(-weight[:, 0], weight[:, 1]) % np.pi
    borders = np.r_[0, np.sort(borders[borders < np.pi / 2]), np.pi / 2]
    angles = np.unique(np.r_[np.linspace(0, np.pi / 2, 1000), borders])
    features = np.maximum(np.c_[np.cos(angles), np.sin(angles)] @ weight.T, 0)
    found = []
    for low, high in zip(borders[:-2], borders[2:], strict=True):
        inside = (angles > low + 1e-9) & (angles < high - 1e-9)
        sizes, vectors = np.linalg.eigh(features[~inside].T @ features[~inside])
        none = vectors[:, sizes < 1e-13 * sizes[-1]]
        row = gram @ (none @ np.linalg.svd(features[inside] @ none, full_matrices=False)[2][0])
        row *= np.sign(row.sum())
        fires = row > 1e-3 * row.max()
        point = np.linalg.lstsq(weight[fires], row[fires])[0]
        made = np.maximum(weight @ point, 0)
        if (point > 0).all() and np.linalg.norm(made - row) < 1e-3 * np.linalg.norm(row):
            found.append(point / np.linalg.norm(point))
    return found


TWO: dict[str, Any] = {"model": "mlp", "model_options": {"widths": [2, 35], "standardise": True}}


@pytest.mark.parametrize(
    "values",
    [
        {"method": "fed3r"},
        {"method": "fedncm"},
        {"method": "ccvr", "method_options": {"covariance": "shared"}},
        {"method": "creff", "rounds": 2},
        {"method": "fedavg", "start": "fedncm"},
    ],
)
def test_sums_of_what_units_make_of_two_numbers_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    assert "of 2 numbers, at least 8" in refused({"weights": "exact", **TWO, **values}, tmp_path)


@pytest.mark.whole
def test_units_on_two_numbers_would_tell_records_between_their_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has five patients on either side, but between two of them there is one record."""
    monkeypatch.setattr(layers, "NARROW", 0)
    values = {"method": "fed3r", "weights": "exact", **TWO, "seed": 3}
    federation = Federation(values, small(), state=tmp_path, policy=STANDARD).enroll()
    gram = pooled(totals(federation, "frozen/products")).gram
    assert gram is not None
    model: Any = model_update.build_template(federation.setup.setting)
    model.load_state_dict(dict(federation.shared.state.model))
    records = torch.as_tensor(np.concatenate([item.raw("train") for item in federation.data.values()]))
    with torch.no_grad():
        true = nn.functional.normalize(model.backbone[:3](model.standardise(records))).numpy()
    told = between_borders(model.backbone[3].weight.detach().double().numpy(), gram.numpy())
    right = [int((np.abs(true - point).max(1) < 5e-4).sum()) for point in told]
    assert right.count(1) >= 3, "the others are of several records in one place"


@pytest.mark.whole
def test_a_withdrawal_of_fewer_records_than_features_takes_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        test_withdrawals, "VALUES", {**test_withdrawals.VALUES, "method": "fed3r", "weights": "exact"}
    )
    ended = test_withdrawals.Ended(tmp_path)
    five = {name: lines[-5:] for name, lines in ended.enough().items()}  # of one class
    withdrawal = ended.withdraws("job-b", five)
    with pytest.raises(TightframeError, match="4 of 4 silos in round 0 could not contribute"):
        withdrawal.sum("before", 0, 0)
    assert "products of 4 features do not disclose them" in caplog.text


def of_class_sums(width: int, **values: Any) -> dict[str, Any]:
    """Values of a job that sums features by class, and no products."""
    return {**WIDE, "method": "fedncm", "model_options": {"width": width, "standardise": True}, **values}


@pytest.mark.whole
def test_class_sums_wider_than_a_class_has_values_are_not_made(tmp_path: Path) -> None:
    """Of 48 records of class 0 all are read from 1,400 sums; 123 sums are half as many as their values."""
    assert "1080 features" in refused(of_class_sums(1081), tmp_path / "declared")
    federation = Federation(
        of_class_sums(1081, weights="uniform"), small(), state=tmp_path / "known"
    ).enroll()
    with pytest.raises(PolicyError, match=r"^TF-625: [\s\S]*class 0, with 480 values.*240 features"):
        totals(federation, "frozen/sums")
    federation = Federation(of_class_sums(125), small(), state=tmp_path / "own").enroll()
    with pytest.raises(RunError, match="3 of 3 silos in round 0 could not"):
        totals(federation, "frozen/sums")
    federation = Federation(of_class_sums(123), small(), state=tmp_path / "allowed").enroll()
    assert totals(federation, "frozen/sums")["frozen/counts"].tolist() == [48, 168]


def test_the_console_says_which_class_sums_a_standard_policy_refuses() -> None:
    assert "SUMS OF 703 FEATURES BY CLASS" in warned(ClassSums(703, 13), 216, classes=2)[0]
    assert warned(ClassSums(702, 13), 216, classes=2) == warned(ClassSums(703, 13), None, classes=2) == []


@pytest.mark.whole
def test_a_withdrawal_of_fewer_values_than_class_sums_takes_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Five of each class have 50 values."""
    values = {**test_withdrawals.VALUES, "model_options": {"width": 26}}
    monkeypatch.setattr(test_withdrawals, "VALUES", values)
    ended = test_withdrawals.Ended(tmp_path)
    with pytest.raises(TightframeError, match="4 of 4 silos in round 0 could not contribute"):
        ended.withdraws("job-b", ended.enough()).sum("before", 0, 0)
    assert "sums of 26 features by class do not disclose them" in caplog.text


@pytest.mark.whole
@pytest.mark.parametrize(
    ("method", "width", "left"), [("fed3r", 36, 5), ("fedncm", 160, 5)], ids=["products", "class"]
)
def test_what_stays_after_a_withdrawal_is_enough_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, width: int, left: int
) -> None:
    """Each hospital takes out enough; 30 records of 507 would stay, with fewer values than sums."""
    every = hearts(12)
    monkeypatch.setattr(
        test_withdrawals, "hearts", lambda sites: {f"hospital-{i}": every[f"hospital-{i}"] for i in (1, 5, 9)}
    )
    values = {"method": method, "weights": "exact", "model_options": {"width": width}}
    monkeypatch.setattr(test_withdrawals, "VALUES", {**test_withdrawals.VALUES, **values})
    ended = test_withdrawals.Ended(tmp_path)
    names = {
        site: [
            f"record,train-{place}"
            for label in (0, 1)
            for place in np.flatnonzero(np.asarray(item.labels("train")) == label)[left:]
        ]
        for site, item in ended.data.items()
    }
    withdrawal = ended.withdraws("job-b", names)
    with pytest.raises(TightframeError, match=r"^TF-523: .*Expected enough records to stay"):
        test_withdrawals.take_out(withdrawal)


@pytest.mark.whole
def test_nor_are_a_rare_classs_products_safe_without_the_rule(tmp_path: Path) -> None:
    federation = Federation(CCVR, small(), state=tmp_path, policy=OFF).enroll()
    opened = totals(federation, "moments/products")
    module: Any = model_update.build_template(federation.setup.setting)
    module.load_state_dict(dict(federation.shared.state.model))
    module = module.eval().double()
    width, number = opened["moments/sums"].shape[1], round(float(opened["moments/counts"][0]))
    gram = np.zeros((width, width))
    gram[np.triu_indices(width)] = opened["moments/products"][0]
    null = torch.linalg.eigh(torch.as_tensor(gram + np.triu(gram, 1).T)).eigenvectors[:, : width - number].T
    mean, deviation = (getattr(module.standardise, name).detach().flatten() for name in ("mean", "std"))

    def phi(points: torch.Tensor) -> torch.Tensor:
        features = module.features(points * deviation + mean)
        return features / features.norm(dim=1, keepdim=True)

    start = torch.randn(60, len(mean), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = least_squares(phi, null, start, 60)
    records = np.concatenate(
        [item.raw("train")[item.labels("train") == 0] for item in federation.data.values()]
    )
    distance, which = torch.cdist(points, (torch.as_tensor(records).double() - mean) / deviation).min(1)
    assert len(which[distance < 0.05].unique()) >= 5


def few_of_a_class(*others: str) -> dict[str, Records]:
    """Three hospitals with five records of class 1 each, and others without any."""
    every, kept = hearts(12), {}
    for name in ("hospital-1", "hospital-2", "hospital-5", *others):
        labels = np.asarray(every[name].labels("train"))
        few = np.flatnonzero(labels == 1)[: 0 if name in others else 5]
        kept[name] = Chosen(every[name], np.sort(np.r_[np.flatnonzero(labels == 0), few]))
    return kept


@pytest.mark.whole
def test_nor_does_ccvr_sum_a_rare_class_over_fewer_values_than_features(tmp_path: Path) -> None:
    """All records together would do for the products, and its features are of a model that all know."""
    data = few_of_a_class("hospital-6", "hospital-9", "hospital-10")
    job = {**CCVR, "rounds": 1, "method_options": {"covariance": "shared"}}
    job["model_options"] = {"widths": [90], "standardise": True}
    federation = Federation(job, data, state=tmp_path).enroll()
    with pytest.raises(
        PolicyError, match=r"^TF-625: [\s\S]*90 features by class .* class 1, with 150 values"
    ):
        totals(federation, "moments/sums")


@pytest.mark.whole
def test_features_of_many_starts_summed_by_class_tell_its_records(tmp_path: Path) -> None:
    """A hospital and the server read the others' ten: sums of ReLU units are a network with them as units.

    At a small rate the features are the start's. That sites remember the first one's start is left out here
    (``test_release_profile``), and so is the rule on a class's records (``test_class_sums``).
    """
    data, sums = few_of_a_class(), []
    for seed in range(6):
        job = {
            **{"method": "fedavg_etf", "method_options": {"mu_divisor": "count_weighted", "warm_up": 2}},
            **{"weights": "exact", "rounds": 2, "seed": seed, "evaluation": {"models": 1, "score_bins": 2}},
            "training": {"learning_rate": 1e-8, "batch_size": 16},
            "model_options": {"widths": [96], "standardise": True},
        }
        federation = Federation(job, data, state=tmp_path / str(seed), policy=OFF).enroll()
        for exchange in federation.setup.plan:
            start = dict(federation.shared.state.model)
            opened = federation.sum(*exchange.place)
            if exchange.round == 2 and exchange.training:
                sums.append((start, opened["memory/numerator"][1], opened["memory/denominator"][1]))
    mean, deviation = (sums[0][0][f"standardise.{name}"].double() for name in ("mean", "std"))
    own, *others = (
        (torch.as_tensor(item.raw("train")[np.asarray(item.labels("train")) == 1]).double() - mean)
        / deviation
        for item in data.values()
    )
    true = torch.cat(others)
    assert [number for *_, number in sums] == [15.0] * len(sums)
    weight, offset = (
        torch.cat([start[f"backbone.1.{name}"].double() for start, *_ in sums]) for name in ("weight", "bias")
    )
    total = torch.cat([torch.as_tensor(found).double() for _, found, _ in sums])
    total = total - torch.relu(own @ weight.T + offset).sum(0)
    found = min((as_a_network(weight, offset, total, len(true), seed) for seed in range(4)), key=cost_of)
    assert float(torch.cdist(true, found[1]).min(1).values.max()) < 1e-3


def cost_of(found: tuple[float, torch.Tensor]) -> float:
    return found[0]


def as_a_network(
    weight: torch.Tensor, offset: torch.Tensor, total: torch.Tensor, records: int, seed: int
) -> tuple[float, torch.Tensor]:
    """Return rows (n, p), and how far their sum of ReLU features is from a total: Levenberg-Marquardt."""
    rows = torch.randn(records, weight.shape[1], generator=torch.Generator().manual_seed(seed)).double()
    damped, cost = 1e-2, math.inf
    for _ in range(200):
        before = rows @ weight.T + offset
        off = torch.relu(before).sum(0) - total
        cost = float(off @ off)
        slope = ((before > 0).double()[:, :, None] * weight).transpose(0, 1).reshape(len(total), -1)
        normal, gradient = slope.T @ slope, slope.T @ off
        while damped < 1e9:
            moved = rows - torch.linalg.solve(normal + damped * torch.eye(len(normal)), gradient).view_as(
                rows
            )
            if float((torch.relu(moved @ weight.T + offset).sum(0) - total).square().sum()) < cost:
                break
            damped *= 3
        rows, damped = moved, damped / 2
        if cost < 1e-8 or damped > 1e8:
            break
    return cost, rows
