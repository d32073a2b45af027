"""The exchange that counts rows: of each class all that it has, in all each row once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods.silo import FakeSilo

from tightframe.learning.distinct_rows import DistinctRows, counts_phase, row_digests, units
from tightframe.learning.one_sum.feature_sums import counts_field
from tightframe.learning.products import ALL_VALUES, COUNTED, VALUES, ClassSums
from tightframe.learning.record_values import MOST
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


def opened(tables: list[Any], **silo: Any) -> dict[str, list[float]]:
    """Run the exchange on tables (inputs, labels), and return what the state has of it."""
    phase = counts_phase(counts_field(2))
    totals: dict[str, Any] = {}
    for place, (inputs, labels) in enumerate(tables):
        of = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
        for name, item in phase.contribute(
            Silo(f"site-{place}", SETTING, *of, **silo), {}, {}
        ).tensors.items():
            totals[name] = totals.get(name, 0) + item.numpy()
    cohort = Cohort(round=0, weights={}, largest=1.0)
    state = phase.update(ServerState({}, {"kept": torch.ones(1)}), totals, cohort)
    assert sorted(totals) == ["frozen/all_values", "frozen/counts", "frozen/values"]
    assert all(item.per_class and item.static for item in phase.schema.fields) and "kept" in state.extra
    assert [(item.bits, item.bound) for item in phase.schema.fields[1:]] == [(0, 2.0**20 * MOST)] * 2
    return {name: state.extra[name].tolist() for name in (COUNTED, VALUES, ALL_VALUES)}


def test_a_table_of_few_yes_no_columns_passes_the_rule_by_class() -> None:
    """Both classes have all 64 rows; by the first class alone 2,250 positives counted as none."""
    rows = DRAW.integers(0, 2, size=(4500, 6))
    found = opened([(rows, np.arange(4500) % 2)] * 3)
    assert found[COUNTED] == [192, 0]
    bits = 192 * 6 / 24
    assert found[VALUES] == [bits, bits] and found[ALL_VALUES] == [bits, 0]
    assert ClassSums(6, 6).allowed(found[VALUES][1], 2)


def test_what_was_added_to_a_record_gives_no_values() -> None:
    """100 columns that say nothing: all 32 records of a class were read from 1,900 sums of 48 x 113 / 2."""
    records, labels = DRAW.normal(size=(72, 13)), np.arange(72) % 9 < 2
    added = np.concatenate([records, np.zeros((72, 50)), records[:, :1] + np.arange(50) / 50], 1)
    tables = [(inputs, labels.astype(int)) for inputs in (records, added)]
    plain, padded = (opened([table] * 3) for table in tables)
    assert plain == padded and plain[VALUES] == [3 * 56 * 13, 3 * 16 * 13]
    assert not ClassSums(1900, 113).allowed(padded[VALUES][1], 2)


def test_a_class_whose_records_say_nothing_is_seen_to_have_some() -> None:
    found = opened([(np.ones((20, 3)), np.arange(20) % 2)])
    assert found == {COUNTED: [1, 0], VALUES: [1, 1], ALL_VALUES: [1, 0]}


def test_a_silo_that_offers_nothing_counts_nothing() -> None:
    tables = [(DRAW.normal(size=(20, 3)), np.arange(20) % 2)]
    assert opened(tables, offers_prototypes=False) == {key: [0, 0] for key in (COUNTED, VALUES, ALL_VALUES)}
