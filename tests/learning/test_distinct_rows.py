"""The exchange that counts rows: of each class all that it has, in all each row once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods.silo import FakeSilo

from tightframe.learning.few_records.distinct_rows import DistinctRows, counts_phase, row_digests, units
from tightframe.learning.few_records.products import COUNTED, ENOUGH, ROWS
from tightframe.learning.one_sum.feature_sums import counts_field
from tightframe.phases import Cohort, ServerState, Tensors

DRAW = np.random.default_rng(0)
SETTING: Any = SimpleNamespace(num_classes=2, local=SimpleNamespace(batch_size=64))


def test_rows_are_told_apart_by_2_to_the_minus_24() -> None:
    step = 2.0**-24
    rows = torch.tensor([[0.5], [0.5 + step], [0.5 + step / 4], [3.0], [4.0], [torch.nan], [torch.inf]])
    found = DistinctRows(2)
    found.add(row_digests(rows.double()), torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    assert found.counts.tolist() == found.by_class.tolist() == [2, 3]  # what is not finite is 0
    assert units(torch.tensor([[3.0, 4.0]]), 10.0).tolist() == [[round(0.3 * 2**24), round(0.4 * 2**24)]]
    assert row_digests(torch.zeros(1, 2, 3)) == row_digests(-torch.zeros(1, 6))


def test_a_row_of_two_classes_is_one_of_each_and_once_in_all() -> None:
    found = DistinctRows(3)
    found.add([b"1", b"2", b"2", b"1"], torch.tensor([0, 0, 1, 2]))
    found.add([b"3", b"2"], torch.tensor([2, 2]))
    assert found.by_class.tolist() == [2, 1, 3]
    assert found.counts.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="argument 2"):
        found.add([b"1", b"2"], torch.tensor([0]))


class Silo(FakeSilo):
    def load(self, tensors: Tensors) -> torch.nn.Module:
        """Features that the author of a job shaped tell him how many patients they do not vanish for."""
        raise AssertionError("Expected numbers of rows to be of inputs, which need no model.")


def opened(tables: list[Any], width: int = 6, failed: int = 0, **silo: Any) -> dict[str, list[float]]:
    """Run the exchange on tables (inputs, labels), and return what the state has of it."""
    phase = counts_phase(counts_field(2), width)
    totals: dict[str, Any] = {}
    for place, (inputs, labels) in enumerate(tables):
        of = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
        for name, item in phase.contribute(
            Silo(f"site-{place}", SETTING, *of, **silo), {}, {}
        ).tensors.items():
            totals[name] = totals.get(name, 0) + item.numpy()
    cohort = Cohort(round=0, weights=dict.fromkeys("abc", 1.0), largest=1.0, failed=failed)
    state = phase.update(ServerState({}, {"kept": torch.ones(1)}), totals, cohort)
    assert sorted(totals) == ["frozen/counts", "frozen/enough", "frozen/rows"]
    assert all(item.per_class and item.static for item in phase.schema.fields) and "kept" in state.extra
    assert (phase.schema["frozen/enough"].bits, phase.schema["frozen/enough"].bound) == (0, 1.0)
    return {name: state.extra[name].tolist() for name in (COUNTED, ROWS, ENOUGH)}


def test_rows_of_both_classes_are_counted_in_each_and_once_in_all() -> None:
    """Both have all 64 rows; by the first class alone 2,250 positives counted as none."""
    rows = DRAW.integers(0, 2, size=(4500, 6))
    found = opened([(rows, np.arange(4500) % 2)] * 3)
    assert found == {COUNTED: [192, 0], ROWS: [192, 192], ENOUGH: [0, 0]}


def test_one_silo_alone_has_enough_values_of_a_class_and_says_no_more() -> None:
    """Four times the features: of 56 and 16 records of 13 columns, and of one that has its columns twice."""
    records, labels = DRAW.normal(size=(72, 13)), np.arange(72) % 9 < 2
    twice = np.concatenate([records, 2 * records], 1)
    tables = [(inputs, labels.astype(int)) for inputs in (records, twice)]
    for width, enough in ((52, [2, 2]), (53, [2, 0]), (182, [2, 0]), (183, [0, 0])):
        assert opened(tables, width)[ENOUGH] == enough
    assert opened(tables, 52, failed=1)[ENOUGH] == [0, 0], "its flag says which classes it holds"


def test_a_silo_that_offers_nothing_counts_nothing() -> None:
    tables = [(DRAW.normal(size=(20, 3)), np.arange(20) % 2)]
    assert opened(tables, 1, offers_prototypes=False) == {key: [0, 0] for key in (COUNTED, ROWS, ENOUGH)}
    assert opened([(np.ones((20, 3)), np.arange(20) % 2)], 1)[ENOUGH] == [0, 0]
