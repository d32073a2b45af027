"""Combinations of integers. The oracle is the same sum in Python's own integers, without BLAS and numpy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.securesum import independent

from tightframe.securesum.errors import MessageError
from tightframe.securesum.masks import Accumulator, Layout
from tightframe.securesum.proofs import combinations

CHALLENGE = bytes(range(32))
RUNS = st.lists(st.tuples(st.sampled_from([32, 64]), st.integers(1, 90)), min_size=1, max_size=4)


def by_hand(challenge: bytes, group: str, runs: Sequence[tuple[int, int]], data: bytes) -> bytes:
    specs = [{"ring": ring, "shape": [count], "group": group} for ring, count in runs]
    return independent.combined(specs, group, challenge, data)


@settings(deadline=None, max_examples=40)
@given(RUNS, st.binary(min_size=32, max_size=32), st.sampled_from(["update", "static"]), st.randoms())
def test_it_is_what_python_makes_of_it(
    runs: list[tuple[int, int]], challenge: bytes, group: str, source: random.Random
) -> None:
    layout = Layout(tuple(runs))
    data = source.randbytes(layout.nbytes)
    made = combinations.combine(challenge, group, layout, data)
    assert made == by_hand(challenge, group, runs, data)
    assert len(made) == combinations.layout_of(layout).nbytes


@pytest.mark.many
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 8191, 8192, 8193])
def test_edges_of_rows_and_blocks(count: int, fill: int) -> None:
    """With the largest elements, too, for which products are largest."""
    runs = ((32, count), (64, 3), (32, 1))
    layout = Layout(runs)
    data = bytes([fill]) * layout.nbytes
    assert combinations.combine(CHALLENGE, "update", layout, data) == by_hand(CHALLENGE, "update", runs, data)


def test_more_rows_than_float64_adds_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums are taken over into integers before they could lose a bit."""
    monkeypatch.setattr(combinations, "_EXACT_ROWS", 300)
    runs = ((32, 20_003),)
    data = np.random.default_rng(0).bytes(Layout(runs).nbytes)
    made = combinations.combine(CHALLENGE, "update", Layout(runs), data)
    assert made == by_hand(CHALLENGE, "update", runs, data)


def test_the_largest_sum_is_exact_and_a_larger_one_is_refused() -> None:
    """A product is at most 2**32 - 1, and _EXACT_ROWS of them are below 2**53."""
    assert combinations._EXACT_ROWS * (2**32 - 1) < 2**53
    partial = np.zeros((32 + 127, 32))
    partial[5, 5] = 2.0**53
    with pytest.raises(ArithmeticError, match="below 2\\*\\*53"):
        combinations._diagonals(partial)
    partial[5, 5] -= 1
    assert combinations._diagonals(partial)[0] == 2**53 - 1


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("place", [0, 1, 63, 64, 511])
def test_one_element_that_differs_by_any_power_of_two_is_seen(ring: int, place: int) -> None:
    width, layout = ring // 8, Layout(((ring, 512),))
    data = np.random.default_rng(ring + place).bytes(layout.nbytes)
    good = combinations.combine(CHALLENGE, "update", layout, data)
    start = place * width
    value = int.from_bytes(data[start : start + width], "little")
    for power in range(ring):
        other = ((value + 2**power) % 2**ring).to_bytes(width, "little")
        bad = data[:start] + other + data[start + width :]
        assert combinations.combine(CHALLENGE, "update", layout, bad) != good


def test_linear() -> None:
    """The combinations of a sum are the sum of those of its terms, modulo each ring."""
    layout, source = Layout(((32, 70), (64, 9), (32, 3))), np.random.default_rng(1)
    terms = [source.bytes(layout.nbytes) for _ in range(5)]
    total = Accumulator(layout)
    for term in terms:
        total.add(term)
    parts = [combinations.combine(CHALLENGE, "static", layout, term) for term in terms]
    whole = combinations.combine(CHALLENGE, "static", layout, total.to_bytes())
    assert combinations.add(layout, parts) == whole
    assert combinations.add(layout, parts[:4]) != whole
    with pytest.raises(MessageError):
        combinations.add(layout, [*parts[:4], parts[4][:-1]])


def test_the_bits_depend_on_challenge_group_and_ring() -> None:
    seen = {
        combinations.random_bits(challenge, group, ring, 500).tobytes()
        for challenge in (CHALLENGE, CHALLENGE[::-1])
        for group in ("update", "static")
        for ring in (32, 64)
    }
    assert len(seen) == 8
    bits = combinations.random_bits(CHALLENGE, "update", 32, 100_000)
    assert bits.size == 100_127 and set(bits.tolist()) == {0, 1}
    assert abs(float(bits.mean()) - 0.5) < 0.01
    again = combinations.random_bits(CHALLENGE, "update", 32, 10)
    assert (again == bits[:137]).all(), "one stream, of any length"


def test_combinations_of_nothing_and_of_another_size() -> None:
    assert combinations.combine(CHALLENGE, "update", Layout(()), b"") == b""
    assert combinations.add(Layout(()), [b"", b""]) == b""
    for wrong in (b"", bytes(7), bytes(9)):
        with pytest.raises(MessageError):
            combinations.combine(CHALLENGE, "update", Layout(((32, 2),)), wrong)
