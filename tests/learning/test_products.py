"""How many records surely stand behind a sum of products, and how many must."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightframe.learning.few_records.products import ClassSums, Products, Sizes


@given(
    st.lists(st.integers(1, 10**6), min_size=3, max_size=7),
    st.integers(0, 2),
    st.lists(st.integers(1, 2**30), min_size=2, max_size=2),
)
def test_whoever_lies_no_more_count_than_the_honest_have(
    records: list[int], colluders: int, lies: list[int]
) -> None:
    """Each set of liars, who declare anything; what they put into a sum is at most what they declare."""
    for liars in combinations(range(len(records)), colluders):
        declared = {str(place): float(number) for place, number in enumerate(records)}
        declared |= {str(place): float(lie) for place, lie in zip(liars, lies, strict=False)}
        honest = sum(number for place, number in enumerate(records) if place not in liars)
        sizes = Sizes.of(declared, colluders)
        assert sizes.sure() <= honest
        # Half of the honest silos' records count, and all that liars declare.
        counted = honest // 2 + sum(declared[str(place)] for place in liars)
        assert sizes.sure(counted) <= honest // 2
        assert sizes.sure(1e12) == sizes.sure(), "an opened number above the declared one tells nothing"


@pytest.mark.parametrize(
    ("width", "records", "factor", "allowed"),
    [
        (256, 1e9, 2, True),
        (256, 511, 2, False),  # rank
        (10, 20, 2, True),
        (10, 19, 2, False),
        (256, 2569, 2, False),  # 256 * 257 / 2 + 2 * 256 = 33,408 numbers of 13 * 2569 = 33,397 values
        (256, 2570, 2, True),
        (256, 1, 0, True),
    ],
)
def test_both_rules(width: int, records: float, factor: int, allowed: bool) -> None:
    found = Products(width, 2, 13)
    assert found.allowed(records, factor) is allowed
    widest = found.widest(records, factor)
    assert (widest == width) is allowed
    assert widest == 0 or Products(widest, 2, 13).allowed(records, factor)
    assert not Products(widest + 1, 2, 13).allowed(records, factor) or widest == width


def test_other_numbers_of_the_same_records_count_too() -> None:
    """10 features have 55 + 20 numbers."""
    assert Products(10, 2, 4).allowed(20, 2, 75) and not Products(10, 2, 4).allowed(20, 2, 74)
    assert Products(10, 2, 4, moments=8).numbers == 83
    assert Products(10, 2, 4, moments=8).widest(20, 2, 82) == 9


def test_products_of_so_many_records_have_full_rank() -> None:
    draw = np.random.default_rng(1)
    features = np.cos(draw.normal(size=(13, 20)).T @ draw.normal(size=(13, 40)))
    assert not Products(40, 2, 13).allowed(20, 2)
    assert np.linalg.matrix_rank(features.T @ features) == 20


@pytest.mark.parametrize(
    ("width", "values", "factor", "widest"),
    [(312, 624, 2, 312), (313, 624, 2, 312), (1400, 625, 2, 312), (1400, 624, 0, 1400), (4, 0, 2, 0)],
)
def test_numbers_of_a_class_stay_below_its_values(
    width: int, values: float, factor: int, widest: int
) -> None:
    found = ClassSums(width, 13)
    assert found.widest(values, factor) == widest
    assert found.allowed(values, factor) is (widest == width)
