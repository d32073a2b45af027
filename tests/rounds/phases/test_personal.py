"""Personal accuracies as sums: the oracle is scikit-learn silo by silo, and the encoding of the sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle

from tightframe.rounds import codec
from tightframe.rounds.phases import personal
from tightframe.rounds.sums.plain import PlainServer

CLASSES = 3


class Toy(torch.nn.Module):
    """Logits that are linear in the input, and a dropout that evaluation must switch off."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(5, CLASSES)
        stream = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(CLASSES, 5, generator=stream))
            self.head.bias.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(inputs))
        return logits


def _predict(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(inputs)
    return logits


def _records(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=stream)
    return torch.randn(count, 5, generator=stream), labels


def _batches(records: tuple[torch.Tensor, torch.Tensor], size: int = 7) -> Iterator[Any]:
    return zip(records[0].split(size), records[1].split(size), strict=True)


def _count(seed: int, records: tuple[torch.Tensor, torch.Tensor], counts: list[int]) -> Any:
    return personal.count(_predict, Toy(seed).train(), _batches(records), torch.tensor(counts), CLASSES)


def test_what_is_counted_is_the_schema() -> None:
    tensors, _ = _count(0, _records(1, 20), [1, 2, 3])
    schema = personal.schema()
    assert (
        set(tensors)
        == {item.name for item in schema.fields}
        == {
            "personal/accuracy",
            "personal/valid_classes",
            "personal/label_share",
            "personal/silos",
            "personal/judged",
        }
    )
    for item in schema.fields:
        assert tensors[item.name].shape == item.shape == ()
        assert tensors[item.name].dtype == torch.float64
        assert 0 <= float(tensors[item.name]) <= item.bound == 1.0
        assert item.static and item.ring == 64 and not item.weighted and not item.per_class
    assert float(tensors["personal/silos"]) == 1


SILOS = [(0, 40, [30, 10, 0]), (1, 25, [0, 0, 5]), (2, 90, [7, 7, 7])]


def _expected(seed: int, count: int, counts: list[int]) -> tuple[float, float, float, np.ndarray]:
    inputs, labels = _records(10 + seed, count)
    with torch.no_grad():
        guess = Toy(seed).eval()(inputs).argmax(1).numpy()
    truth, amounts = labels.numpy(), np.array(counts)
    return (
        oracle.accuracy_score(truth, guess),
        oracle.accuracy_score(truth, guess, sample_weight=(amounts > 0)[truth]),
        oracle.accuracy_score(truth, guess, sample_weight=amounts[truth]),
        oracle.confusion_matrix(truth, guess, labels=range(CLASSES)),
    )


def test_means_over_silos_through_the_encoding_of_sums() -> None:
    """Every silo counts once, whatever its size, and accuracies of 0 and 1 are within the bound."""
    schema, parties = personal.schema(), len(SILOS)
    total = PlainServer(schema)
    rows = []
    for seed, count, counts in SILOS:
        tensors, confusion = _count(seed, _records(10 + seed, count), counts)
        *row, table = _expected(seed, count, counts)
        rows.append(np.rint(np.array(row) * 32) / 32)  # the grid of all silos
        np.testing.assert_array_equal(confusion, table)
        total.add(f"site-{seed}", codec.encode(schema, tensors, share=count / 90, parties=parties))
    totals = codec.decode(schema, total.open(), parties=parties)
    found = personal.summarise(totals)
    assert found is not None and found.silos == 3
    expected = dict(zip(("accuracy", "valid_classes", "label_share"), np.mean(rows, axis=0), strict=True))
    assert found.as_json() == pytest.approx({"silos": 3, **expected}, abs=2.0**-24)
    assert len({round(value, 6) for value in expected.values()}) == 3, "or a mix-up would not show"


def test_batches_do_not_change_a_count() -> None:
    records = _records(3, 50)
    first, second = (
        personal.count(_predict, Toy(1), _batches(records, size), torch.tensor([1, 2, 0]), CLASSES)
        for size in (1, 50)
    )
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("count", "counts", "only"),
    [(0, [3, 3, 3], None), (8, [0, 0, 0], None), (8, [5, 0, 0], 2)],
    ids=["no test records", "no training records", "only classes it never trained on"],
)
def test_what_a_silo_lacks_does_not_count(count: int, counts: list[int], only: int | None) -> None:
    inputs, labels = _records(4, count)
    if only is not None:
        labels = torch.full_like(labels, only)
    batches = _batches((inputs, labels)) if count else iter(())
    tensors, confusion = personal.count(_predict, Toy(0), batches, torch.tensor(counts), CLASSES)
    assert confusion.sum() == count, "its own report still has what there is"
    lacking = {"personal/valid_classes", "personal/label_share", "personal/judged"}
    lacking |= set() if count else {"personal/accuracy", "personal/silos"}
    assert {name for name, value in tensors.items() if float(value) == 0} >= lacking
    assert float(tensors["personal/silos"]) == (1 if count else 0)
    others = [_count(seed, _records(5 + seed, 20), [1, 1, 1])[0] for seed in range(3)]
    together = {name: sum((one[name] for one in others), tensors[name]).numpy() for name in tensors}
    found = personal.summarise(together)
    assert found is not None and found.silos == 3 + (count > 0)
    expected = np.mean([float(one["personal/valid_classes"]) for one in others])
    assert found.valid_classes == pytest.approx(expected)


def test_of_fewer_than_three_silos_no_mean_is_told() -> None:
    """It would be close to one silo's own; the three shares apart from the accuracy."""
    full = [_count(seed, _records(5 + seed, 20), [1, 1, 1])[0] for seed in range(3)]
    two = {name: (full[0][name] + full[1][name]).numpy() for name in full[0]}
    assert personal.summarise(two) is None
    unjudged, _ = _count(2, _records(7, 20), [0, 0, 0])
    mixed = personal.summarise({name: two[name] + unjudged[name].numpy() for name in two})
    assert mixed is not None and mixed.silos == 3
    assert mixed.valid_classes is None and mixed.label_share is None


def test_totals_that_stayed_shut_have_no_means() -> None:
    assert personal.summarise({}) is None


def test_a_perfect_and_a_hopeless_model_reach_the_bounds() -> None:
    labels = torch.tensor([0, 1, 2, 1])
    inputs = torch.nn.functional.one_hot(labels, CLASSES).float()
    for sign, value in ((1.0, 1.0), (-1.0, 0.0)):
        tensors, _ = personal.count(
            lambda model, x, sign=sign: sign * x, Toy(0), [(inputs, labels)], torch.tensor([2, 1, 1]), CLASSES
        )
        assert float(tensors["personal/accuracy"]) == float(tensors["personal/label_share"]) == value
        codec.encode(personal.schema(), tensors, share=1.0, parties=3)  # not refused


def test_nan_logits_are_class_0() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    tensors, confusion = personal.count(
        lambda model, x: torch.full((len(x), CLASSES), math.nan),
        Toy(0),
        [(torch.zeros(4, 5), labels)],
        torch.tensor([1, 1, 1]),
        CLASSES,
    )
    assert confusion[:, 0].tolist() == [2, 1, 1]
    assert float(tensors["personal/accuracy"]) == 0.5


def test_counts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="weights"):
        _count(0, _records(1, 5), [1, 2])
