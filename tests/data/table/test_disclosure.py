"""What a silo tells of its table could be published by itself: attacks by all other silos together."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tightframe.data.contract import Contract
from tightframe.data.table import disclosure
from tightframe.data.table.disclosure import UNITS, moments_of, rounded_moments, term, withheld
from tightframe.data.table.tabulated import Layout, Tabulated

CONTRACT: dict[str, Any] = {
    "title": "Ward",
    "columns": [
        {"column": "age", "kind": "number", "low": 0, "high": 100, "missing": "fill"},
        {"column": "side", "kind": "category", "vocabulary": ["left", "right", "both"], "missing": "fill",
         "fill": "left"},
    ],
    "label": {"column": "ill", "classes": [{"code": "0"}, {"code": "1"}]},
}  # fmt: skip
LAYOUT = Layout(Contract.model_validate(CONTRACT), 10)
LEAST = 5
GONE = None


def table(
    rows: list[tuple[float | None, int | None, int]], owners: list[int] | None = None, layout: Layout = LAYOUT
) -> Tabulated:
    """Records of (age, side, class)."""
    ages = [age for age, _, _ in rows]
    bins, levels = layout.bins, len(layout.places[1].column.vocabulary)
    width = 100 / bins
    cells = [
        [bins if age is None else min(int(age / width), bins - 1), levels if side is None else side]
        for age, side, _ in rows
    ]
    return Tabulated(
        layout,
        np.array([label for _, _, label in rows], dtype=np.int64),
        np.array(cells, dtype=np.int64),
        np.array([[0.0 if age is None else age / 50 - 1] for age in ages]),
        [f"r{place}" for place in range(len(rows))],
        np.arange(len(rows)) if owners is None else np.array(owners),
    )


def ward(seed: int = 1, count: int = 120) -> list[tuple[float | None, int | None, int]]:
    stream = np.random.default_rng(seed)
    return [
        (float(np.clip(stream.normal(50, 12), 0, 99.9)), int(stream.integers(0, 2)), place % 2)
        for place in range(count)
    ]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("least", "cells", "most"), [(2, 4, 10), (3, 3, 22), (3, 4, 14), (5, 3, 32)])
def test_no_withheld_cell_follows_from_all_others_their_sum_and_the_rule(
    least: int, cells: int, most: int, ordered: bool
) -> None:
    """Every table of that size, by someone who knows the rule: each small cell may have two values or more.

    The tables are enumerated, and put together that look alike; none of the rule's own reasoning is used.
    """
    order = range(cells)[::-1] if ordered else ()
    alike: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    for counts in itertools.product(range(most + 1), repeat=cells):
        own = np.array(counts)
        hidden = withheld(own, least, order)
        if own.sum() >= least and hidden.any():
            alike[tuple(hidden), tuple(np.where(hidden, -1, own)), int(own.sum())].append(counts)
    checked = 0
    for (hidden, _, total), tables in alike.items():
        if total > most:
            continue  # not all tables that look alike were enumerated
        for place in np.flatnonzero(hidden):
            values = {counts[place] for counts in tables}
            checked += 1
            assert len(values) > 1 or values == {0} or min(values) >= least, (tables, place)
    assert checked > 50


def test_primary_suppression_alone_would_give_the_cell_away() -> None:
    """What complementary suppression is for: the class total minus the visible cells."""
    rows = [*ward(), *[(50.0, 2, 0)] * 2]
    own = term(table(rows), LEAST)
    first, last = LAYOUT.places[1].start, LAYOUT.places[1].end
    true = np.bincount([side for _, side, label in rows if label == 0], minlength=3)
    assert true[2] == 2
    alone = own.records[0] - sum(true[:2])
    assert alone == 2, "total minus the others is the cell itself"
    seen = own.cells[0, first:last]
    hidden = own.withheld_cells[0, first:last]
    assert hidden[2] == 1 and hidden.sum() == 2
    assert own.records[0] - seen.sum() >= 2 * LEAST + 2, "of both withheld cells together"


def test_no_small_number_is_in_a_term() -> None:
    for seed in range(20):
        rows = ward(seed, 60 + 10 * seed)
        rows[0], rows[1] = (GONE, None, 0), (GONE, 1, 1)
        own = term(table(rows), LEAST)
        told = [own.records, own.cells, own.moments[:, :, 0]]
        assert all(not ((values > 0) & (values < LEAST)).any() for values in told)
        assert own.withheld_cells.any()
        # Nor by difference: what the class total has more than all visible cells of a column.
        for place in LAYOUT.places:
            left = own.records - own.cells[:, place.start : place.end].sum(1)
            assert not ((left > 0) & (left < LEAST)).any()
        # And of the values that are told, more than the visible bins have.
        age = LAYOUT.places[0]
        left = own.moments[:, 0, 0] - own.cells[:, age.start : age.missing].sum(1)
        assert not ((left > 0) & (left < LEAST)).any()


def test_a_small_class_tells_nothing_not_even_where_its_records_lie() -> None:
    few = [(12.0, 1, 1), (88.0, 0, 1), (13.0, 2, 1)]
    healthy = [(age, side, 0) for age, side, _ in ward()]
    own = term(table([*healthy, *few]), LEAST)
    others = term(table([*healthy, (50.0, 1, 1)]), LEAST)
    assert own.records[1] == 0 and own.withheld_records[1] == 1
    assert not own.cells[1].any() and own.withheld_cells[1].all() and own.withheld_moments[1].all()
    for name in ("records", "cells", "moments", "withheld_records", "withheld_cells", "withheld_moments"):
        assert (getattr(own, name) == getattr(others, name)).all(), "one patient looks like three"


def test_mean_and_deviation_of_few_are_withheld_and_so_is_what_tells_how_few() -> None:
    rows = [(GONE, 0, 0)] * 40 + [(30.0 + place, 0, 0) for place in range(LEAST - 1)]
    own = term(table([*rows, *[(age, side, 1) for age, side, _ in ward()]]), LEAST)
    age = LAYOUT.places[0]
    assert own.records[0] == 44
    assert not own.moments[0].any() and own.withheld_moments[0].all()
    assert not own.cells[0, : age.end].any() and own.withheld_cells[0, : age.end].all()
    one = term(table([(30.0, 0, 0), *[(GONE, 0, 0)] * 40, *ward()[1::2]]), LEAST)
    assert not one.moments[0].any(), "of one record the sum is its value"


def test_few_missing_values_are_hidden_among_values() -> None:
    """How many are untold is the same for one missing value and for four; of no values are told twice."""
    rows = [(age, side, 0) for age, side, _ in ward(count=200)]
    told = []
    for missing in range(1, LEAST):
        own = term(table([(GONE, 0, 0)] * missing + rows[missing:]), LEAST)
        age = LAYOUT.places[0]
        assert own.cells[0, age.missing] == 0 and own.withheld_cells[0, age.missing] == 1
        told.append(int(own.records[0] - own.moments[0, 0, 0]))
    assert told == [LEAST] * (LEAST - 1)
    whole = term(table(rows), LEAST)
    assert whole.moments[0, 0, 0] == 200 and not whole.withheld_cells[0, age.missing], "none is no secret"
    many = term(table([(GONE, 0, 0)] * 9 + rows[9:]), LEAST)
    assert many.cells[0, age.missing] == 9


def test_sums_and_squares_of_few_values_would_be_equations_in_withheld_bins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number of ten values, one for each bin: total, sum and squares give three withheld bins exactly."""
    ages = [5.0] * 2 + [25.0] * 7 + [55.0] * 9 + [65.0] * 40 + [75.0] * 50
    rows: list[tuple[float | None, int | None, int]] = [(age, 0, 0) for age in ages]

    def solved(own: disclosure.Term) -> list[float] | None:
        bins = LAYOUT.places[0].missing
        hidden = np.flatnonzero(own.withheld_cells[0, :bins])
        if len(hidden) > 3:
            return None
        q = np.rint((np.arange(5, 100, 10) / 100) * UNITS)
        total, first, high, low = own.moments[0, 0].astype(float)
        left = np.array([total, first, high * UNITS + low])
        powers = np.stack([q**0, q, q**2])
        left -= powers @ own.cells[0, :bins]
        scale = np.array([1, UNITS, UNITS**2])[:, None]
        found, *_ = np.linalg.lstsq(powers[:, hidden] / scale, left / scale[:, 0], rcond=None)
        return list(np.round(found, 3))

    safe = term(table(rows), LEAST)
    assert safe.withheld_moments[0, 0] and safe.cells[0, 6] == 40, "bins are kept, mean and deviation are not"
    monkeypatch.setattr(disclosure, "made_by_few", lambda *_: False)
    monkeypatch.setattr(disclosure, "rounded_moments", moments_of)
    safe = term(table(rows), LEAST)
    assert solved(safe) is None and safe.moments[0, 0, 0] == len(rows), "the mean is kept, the bins are not"
    monkeypatch.setattr(disclosure, "VALUES_OF_A_BIN", 0)
    assert solved(term(table(rows), LEAST)) == [2.0, 7.0, 9.0], "without the rules the attack succeeds"


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([27.5], False),  # one patient has had the drug: sum and squares prove it, and give the dose
        ([27.5, 12.0], False),  # two unknowns, two equations
        ([27.5, 12.0, 40.0, 5.0], False),
        ([27.5, 12.0, 40.0, 5.0, 19.0, 33.0, 8.0, 22.0], True),
        ([1.0, 2.0, 1.5, 3.0, 2.5, 3.5, 0.5, 90.0], False),  # nearly all of the sum is the last one's
        ([0.0], True),
    ],
)
def test_moments_that_few_patients_make_are_withheld(others: list[float], told: bool) -> None:
    rows = [(0.0, 0, 0)] * 60 + [(dose, 0, 0) for dose in others]
    own = term(table([*rows, *ward()[1::2]]), LEAST)
    assert bool(own.withheld_moments[0, 0]) != told and bool(own.moments[0, 0].any()) == told
    assert not own.withheld_moments[1, 0], "of many values they are told"


def test_the_records_of_one_patient_are_one_patients() -> None:
    doses = [27.5, 12.0, 40.0, 5.0, 19.0, 33.0]
    rows = [(0.0, 0, 0)] * 60 + [(dose, 0, 0) for dose in doses]
    own = term(table(rows, [*range(60), *[60] * len(doses)]), LEAST)
    assert own.withheld_moments[0, 0]


def test_rounded_moments_are_those_of_many_columns_and_near_the_exact_ones() -> None:
    """Five patients' ages, in steps of six years: exact moments tell nearly all of them."""
    ages = np.arange(3, 100, 6) / 50 - 1
    columns = list(itertools.combinations_with_replacement(range(len(ages)), LEAST))
    exact: dict[bytes, int] = defaultdict(int)
    rounded: dict[bytes, int] = defaultdict(int)
    for column in columns:
        exact[moments_of(ages[list(column)]).tobytes()] += 1
        rounded[rounded_moments(ages[list(column)]).tobytes()] += 1
    alone = [sum(number == 1 for number in found.values()) / len(columns) for found in (exact, rounded)]
    assert alone[0] > 0.8 and alone[1] < 0.03
    multiples = 0
    for count in (5, 40, 61, 3000):
        values = np.clip(np.random.default_rng(count).normal(0.1, 0.2, count), -1, 1)
        number, total, high, low = (int(item) for item in rounded_moments(values))
        mean, deviation = total / number, (((high << 20) + low) / number - (total / number) ** 2) ** 0.5
        error = values.std() * UNITS / 2 / np.sqrt(count)
        assert abs(mean - (values.mean() + 1) / 2 * UNITS) <= error / 8 + 1
        assert abs(deviation - values.std() * UNITS / 2) <= error / 8 / np.sqrt(2) + 1
        multiples += total % count == 0
    assert multiples <= 2, "a total of own numbers times means would decompose"


def test_patients_are_counted_where_they_are_known() -> None:
    """Twenty records of two patients are a small cell."""
    rows: list[tuple[float | None, int | None, int]] = [(50.0, 2, 0)] * 20
    rows += [(age, side, 0) for age, side, _ in ward()]
    owners = [place % 2 for place in range(20)] + list(range(2, 122))
    place = LAYOUT.places[1]
    assert term(table(rows), LEAST).cells[0, place.start + 2] == 20
    own = term(table(rows, owners), LEAST)
    assert own.cells[0, place.start + 2] == 0 and own.withheld_cells[0, place.start + 2] == 1


def test_without_a_minimum_nothing_is_withheld() -> None:
    own = term(table([*ward(), (GONE, None, 0)]), 1)
    assert not own.withheld_cells.any() and own.cells[0, LAYOUT.places[0].missing] == 1


def test_moments_are_exact_whole_numbers() -> None:
    values = np.random.default_rng(3).uniform(-1, 1, 1000)
    count, total, high, low = (int(value) for value in moments_of(values))
    q = [round((value + 1) / 2 * UNITS) for value in values]
    assert (count, total) == (1000, sum(q))
    assert (high << 20) + low == sum(value * value for value in q)
