"""Evaluation as sums: the oracle is scikit-learn on the records of all silos together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from tests.support.error_bounds import auroc_error_bound, average_precision_error_bound

from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.rounds.riders import evaluation

CLASSES = 4
NAMES = ("MEL", "NV", "BCC", "AK")
BINS = 64


class Toy(torch.nn.Module):
    """Logits that are linear in the input, and a dropout that evaluation must switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(inputs))
        return logits


def _predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(inputs)
    return logits


def _model() -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Toy().train()


def _records(seed: int, count: int, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that tell something of their labels, the later classes rarer."""
    stream = torch.Generator().manual_seed(seed)
    weights = torch.tensor([4.0, 3.0, 2.0, 1.0])[:classes]
    labels = torch.multinomial(weights, count, replacement=True, generator=stream)
    inputs = torch.randn(count, 6, generator=stream)
    with torch.no_grad():
        inputs = inputs + 1.5 * _model().head.weight[labels]
    return inputs, labels


def _batches(records: tuple[torch.Tensor, torch.Tensor], size: int = 7) -> Iterator[Any]:
    return zip(records[0].split(size), records[1].split(size), strict=True)


def _count(
    validation: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    model: torch.nn.Module | None = None,
) -> dict[str, torch.Tensor]:
    folds: dict[Any, Any] = {"validation": _batches(validation), "test": _batches(test)}
    return evaluation.count(model or _model(), _predict, folds, num_classes=CLASSES, score_bins=BINS)


def _numpy(totals: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in totals.items()}


def _nothing() -> Iterator[Any]:
    return iter(())


def test_what_is_counted_is_the_schema() -> None:
    counted = _count(_records(1, 20), _records(2, 30))
    schema = evaluation.schema(CLASSES, BINS)
    assert set(counted) == {item.name for item in schema.fields}
    for item in schema.fields:
        assert tuple(counted[item.name].shape) == item.shape
        assert counted[item.name].dtype == torch.float64
        assert item.static and item.ring == 64 and not item.weighted


def test_metrics_of_summed_counts_equal_the_oracle_on_all_records() -> None:
    """Three silos of different sizes, one of them without the last class; both folds."""
    silos = [
        {
            "validation": _records(10 + k, 15 + 10 * k),
            "test": _records(20 + k, 40 + 30 * k, CLASSES - (k == 0)),
        }
        for k in range(3)
    ]
    counts = [_numpy(_count(silo["validation"], silo["test"])) for silo in silos]
    totals = {name: np.sum([count[name] for count in counts], axis=0) for name in counts[0]}
    found = evaluation.summarise(totals, NAMES)
    for fold in evaluation.FOLDS:
        inputs = torch.cat([silo[fold][0] for silo in silos])
        labels = torch.cat([silo[fold][1] for silo in silos])
        _compare(getattr(found, fold), totals[f"evaluation/{fold}/scores"], inputs, labels)


def _compare(found: FoldMetrics, scores: np.ndarray, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    with torch.no_grad():
        logits = _model().eval()(inputs)
    truth, guess = labels.numpy(), logits.argmax(1).numpy()
    exact = torch.softmax(logits.double(), 1).numpy()
    assert 0.3 < oracle.accuracy_score(truth, guess) < 0.95, "neither chance nor perfect, or it shows little"
    assert found.records == len(truth)
    assert found.loss == pytest.approx(oracle.log_loss(truth, exact, labels=range(CLASSES)), rel=1e-5)
    assert found.accuracy == pytest.approx(oracle.accuracy_score(truth, guess))
    assert found.balanced_accuracy == pytest.approx(oracle.balanced_accuracy_score(truth, guess))
    recall = oracle.recall_score(truth, guess, labels=range(CLASSES), average=None)
    assert found.recall == pytest.approx(dict(zip(NAMES, recall, strict=True)))
    assert found.class_records == dict(zip(NAMES, np.bincount(truth, minlength=CLASSES), strict=True))
    areas = [oracle.roc_auc_score(truth == c, exact[:, c]) for c in range(CLASSES)]
    room = auroc_error_bound(scores).mean()
    assert 0 < room < 0.05
    assert abs(found.auroc - np.mean(areas)) <= room + 1e-12
    precision = [oracle.average_precision_score(truth == c, exact[:, c]) for c in range(CLASSES)]
    room = average_precision_error_bound(scores).mean()
    assert abs(found.average_precision - np.mean(precision)) <= room + 1e-12


def test_batches_do_not_change_a_count() -> None:
    records = _records(3, 50)
    by_size = [
        evaluation.count(
            _model(),
            _predict,
            {"validation": _batches(records, size), "test": _nothing()},
            num_classes=CLASSES,
            score_bins=BINS,
        )
        for size in (1, 16, 50)
    ]
    for other in by_size[1:]:
        for name in ("confusion", "scores"):
            assert torch.equal(
                other[f"evaluation/validation/{name}"], by_size[0][f"evaluation/validation/{name}"]
            )
        assert float(other["evaluation/validation/loss"]) == pytest.approx(
            float(by_size[0]["evaluation/validation/loss"]), rel=1e-5
        )


def test_a_class_without_records_has_no_recall_and_no_area() -> None:
    inputs, labels = _records(4, 60, classes=3)
    found = evaluation.summarise(_numpy(_count((inputs, labels), (inputs, labels))), NAMES).test
    assert found.recall["AK"] is None and found.class_records["AK"] == 0
    with torch.no_grad():
        logits = _model().eval()(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # AK is predicted, but never true
        expected = oracle.balanced_accuracy_score(labels.numpy(), logits.argmax(1).numpy())
    assert found.balanced_accuracy == pytest.approx(expected)
    assert found.auroc is not None, "the mean is over the classes that are there"


def test_an_empty_fold_says_so_and_nothing_else() -> None:
    records = _records(5, 12)
    counted = evaluation.count(
        _model(),
        _predict,
        {"validation": _nothing(), "test": _batches(records)},
        num_classes=CLASSES,
        score_bins=BINS,
    )
    found = evaluation.summarise(_numpy(counted), NAMES)
    assert found.validation.as_json() == {"records": 0}
    assert found.test.records == 12
    assert not counted["evaluation/validation/scores"].any()
    assert evaluation.local_metrics(counted, NAMES) == found


def test_nan_logits_are_undecided_and_the_loss_is_cut() -> None:
    """As documented: class 0 at score 0, and 1e4 a record, so that the sum stays finite."""
    labels = torch.tensor([0, 1, 1, 3])
    model = _model()
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    counted = _numpy(_count((torch.ones(4, 6), labels), (torch.ones(4, 6), labels), model))
    confusion, scores = counted["evaluation/test/confusion"], counted["evaluation/test/scores"]
    assert confusion[:, 0].tolist() == [1, 2, 0, 1] and confusion.sum() == 4
    assert scores[:, :, 0].sum() == scores.sum() == 4 * CLASSES, "every score is in the lowest bin"
    assert counted["evaluation/test/loss"] == 4e4
    found = evaluation.summarise(counted, NAMES).test
    assert found.loss == 1e4 and found.accuracy == 0.25
    assert found.auroc == 0.5, "no score tells anything"


@pytest.mark.parametrize("factor", [1e6, math.inf])
def test_a_diverged_model_cannot_leave_the_bound_of_the_loss(factor: float) -> None:
    def predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(inputs), CLASSES)
        logits[:, 1] = factor
        return logits

    records = (torch.zeros(3, 6), torch.tensor([0, 0, 0]))  # sure of the wrong class
    folds: dict[Any, Any] = {"validation": _nothing(), "test": _batches(records)}
    counted = evaluation.count(_model(), predict, folds, num_classes=CLASSES, score_bins=BINS)
    assert float(counted["evaluation/test/loss"]) == 3e4


def test_no_real_number_of_one_record_leaves_in_a_loss() -> None:
    """Whoever chooses the model makes one record's loss what he likes; by hand, of logs of the sigmoid."""

    def leaving(active: float, records: int = 40) -> float:
        def predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(inputs), 2).index_put(
                (torch.tensor(0), torch.tensor(1)), torch.tensor(active)
            )

        folds: dict[Any, Any] = {
            "validation": _nothing(),
            "test": _batches((torch.zeros(records, 6), torch.zeros(records, dtype=torch.int64)), records),
        }
        counted = evaluation.count(_model(), predict, folds, num_classes=2, score_bins=BINS, coarse_loss=True)
        left = evaluation.told(counted, [])
        assert set(left) == {item.name for item in evaluation.schema(2, BINS).fields}
        return float(left["evaluation/test/loss"])

    sums = {
        value: math.log(2) * 39 + min(16.0, math.log1p(math.exp(min(value, 600))))
        for value in (7.0, 7.001, 7.01, 1e3, math.inf)
    }
    assert {value: leaving(value) for value in sums} == {value: round(total) for value, total in sums.items()}
    assert leaving(7.0) == leaving(7.001) == leaving(7.01) < leaving(1e3) == leaving(math.inf)
    every = [leaving(float(value), records) for records in (16, 45, 89) for value in range(-9, 10)]
    assert math.gcd(*map(int, every)) == 1 and all(total.is_integer() for total in every), (
        "on one grid for silos of any number of records, which steps of it would tell"
    )


def test_findings_that_are_left_out_are_not_in_the_loss_that_leaves() -> None:
    """A model that answers nothing but one finding, with a loss of its own for each that has it."""
    labels = torch.tensor([[1, 0], [1, 1], [0, 1], [1, -1]] * 5)

    def predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([-30.0, 0.0]).expand(len(inputs), 2)

    def leaving(left_out: list[str], least: int = 1) -> float:
        silo: Any = SimpleNamespace(
            left_out=left_out,
            setup=SimpleNamespace(privacy=None),
            context=SimpleNamespace(
                policy=SimpleNamespace(min_test_count=least),
                data=SimpleNamespace(labels=lambda fold: labels.numpy()),
            ),
        )
        folds: dict[Any, Any] = {"validation": _nothing(), "test": _batches((torch.zeros(20, 6), labels), 7)}
        counted = evaluation.count(
            _model(),
            predict,
            folds,
            num_classes=2,
            score_bins=BINS,
            findings=True,
            told_labels=evaluation._told_labels(silo),
            coarse_loss=True,
        )
        return float(evaluation.told(counted, left_out)["evaluation/test/loss"])

    ln2 = math.log(2) / 2
    assert leaving([]) == round(15 * 15 + 15 * ln2)
    assert leaving(["test/0"]) == round(15 * ln2)
    assert leaving(["test/0"], 10) == round(10 * ln2), "unknown values in steps"
    assert leaving(["test"]) == 0


def test_only_the_evaluation_is_split_off() -> None:
    totals = {"evaluation/test/loss": np.zeros(()), "update/w": np.ones(2), "training/loss": np.ones(())}
    own, others = evaluation.split_totals(totals)
    assert list(own) == ["evaluation/test/loss"]
    assert list(others) == ["update/w", "training/loss"]
