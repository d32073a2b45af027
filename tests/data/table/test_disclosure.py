"""What a silo tells of its table could be published by itself: attacks by all other silos together."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tightframe.data.contract import Contract
from tightframe.data.table import disclosure
from tightframe.data.table.disclosure import UNITS, made_by_few, moments_of, rounded_moments, term, withheld
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
        if not least <= sum(counts) <= most:
            continue  # not all tables that look alike would be enumerated
        own = np.array(counts)
        hidden = withheld(own, least, order)
        if hidden.any():
            alike[tuple(hidden), tuple(np.where(hidden, -1, own)), int(own.sum())].append(counts)
    checked = 0
    for (hidden, _, _), tables in alike.items():
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


@pytest.mark.parametrize(
    ("patients", "least", "order", "hidden"),
    [
        ([3, 5, 30, 40], 5, (), [1, 1, 1, 0]),  # the smallest first, until there are 2 * 5 and one for each
        ([3, 9, 30, 40], 5, (), [1, 1, 0, 0]),
        ([3, 8, 30, 40], 5, (), [1, 1, 1, 0]),
        ([0, 4, 9, 10, 11, 30], 5, (), [0, 1, 1, 1, 0, 0]),  # one larger goes as well, two larger does not
        ([2, 50, 9, 40], 3, (3, 2, 1, 0), [1, 0, 0, 1]),  # the latest first, so that a curve ends late
        ([1, 50, 9, 40], 2, (3, 2, 1, 0), [1, 0, 1, 0]),
    ],
)
def test_no_more_cells_are_withheld_than_need_be(
    patients: list[int], least: int, order: tuple[int, ...], hidden: list[int]
) -> None:
    assert withheld(np.array(patients), least, order).tolist() == list(map(bool, hidden))


def test_only_times_are_withheld_by_their_place() -> None:
    """By the order of times, the commoner side would go in place of the rarer one."""
    survival = {"time": "days", "event": "died", "high": 1000, "unit": "days"}
    layout = Layout(Contract.model_validate({**CONTRACT, "survival": survival}), 10, (500, 1000))
    sides, times = [0] * 10 + [1] * 50 + [2] * 2, [0] * 30 + [2] * 27 + [1] * 3 + [3] * 2
    cells = np.array([np.arange(62) % 10, sides, times]).T
    names, labels = [f"r{place}" for place in range(62)], np.zeros(62, dtype=np.int64)
    own = term(Tabulated(layout, labels, cells, cells[:, :1] / 5 - 1, names, np.arange(62)), LEAST)
    hidden = [own.withheld_cells[0, place.start : place.end].tolist() for place in layout.places[1:]]
    assert hidden == [[1, 0, 1, 0], [1, 1, 0, 1, 0]]


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


def test_a_class_and_values_are_told_from_the_least_number_on_and_none_is_no_secret() -> None:
    for count in range(LEAST + 2):
        rows: list[tuple[float | None, int | None, int]] = [(12.0 * place, 0, 0) for place in range(count)]
        whole = term(table([*rows, *[(age, side, 1) for age, side, _ in ward()]]), LEAST)
        values = term(table([*rows, *[(GONE, 0, 0)] * 40]), LEAST)
        few = 0 < count < LEAST
        assert whole.records[0] == (0 if few else count) and whole.withheld_records[0] == few
        assert values.moments[0, 0, 0] == (0 if few else count) and values.withheld_moments[0, 0] == few
        flags = [*whole.withheld_cells.flat, *values.withheld_cells.flat, *whole.withheld_moments.flat]
        assert set(flags) <= {0, 1}, "they are counted over silos"


@pytest.mark.parametrize("least", [1, LEAST])
@pytest.mark.filterwarnings("error")
def test_a_number_that_a_hospital_does_not_record_is_missing_in_each_record(least: int) -> None:
    own, age = term(table([*[(GONE, 0, 0)] * 44, *ward()[1::2]]), least), LAYOUT.places[0]
    assert own.cells[0, : age.end].tolist() == [0] * 10 + [44]
    assert not own.withheld_cells[0, : age.end].any() and not own.withheld_moments[0].any()
    # With so few records that all are needed to hide how many have no value, none is told.
    hides = term(table([(GONE, 0, 0), *[(30.0, 0, 0)] * (LEAST - 1)]), LEAST)
    assert not hides.cells[0, : age.end].any() and not hides.moments.any()
    assert hides.withheld_cells[0, : age.end].tolist() == [0] * 10 + [1]
    none = np.zeros(0, dtype=np.int64)
    empty = term(Tabulated(LAYOUT, none, none.reshape(0, 2), np.zeros((0, 1)), [], none), least)
    assert not empty.records.any() and not empty.withheld_cells.any()


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
    assert not safe.cells[0, : LAYOUT.places[0].missing].any()
    whole = term(table(rows[2:]), LEAST).cells[0, : LAYOUT.places[0].missing]
    assert sorted(whole) == [0] * 6 + [7, 9, 40, 50], "nothing is withheld"
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


@pytest.mark.parametrize(("least", "told"), [(1, True), (2, False)])
def test_a_column_that_one_patient_dominates_is_told_only_where_nothing_is_withheld(
    least: int, told: bool
) -> None:
    ages = [1.0, 2.0, 1.5, 3.0, 2.5, 3.5, 0.5, 90.0]
    own = term(table([(age, 0, 0) for age in ages]), least)
    assert own.withheld_moments[0, 0] == (not told)


def test_moments_are_exact_only_where_nothing_is_withheld() -> None:
    """Of a dozen patients exact ones tell each one's value."""
    rows = [(age, 0, 0) for age, _, _ in ward(count=12)]
    values = np.array([age / 50 - 1 for age, _, _ in rows if age is not None])
    assert (moments_of(values) != rounded_moments(values)).any()
    assert (term(table(rows), 1).moments[0, 0] == moments_of(values)).all()
    assert (term(table(rows), LEAST).moments[0, 0] == rounded_moments(values)).all()


COMMON = [-1.0] * 20 + [-0.5] * 20 + [0.0] * 20 + [0.5] * 20
RARE = [0.1, 0.2, 0.3, 0.4, 0.7]


@pytest.mark.parametrize(
    ("values", "few"),
    [
        ([*COMMON, *[1.0] * 20, *RARE[:4]], True),  # four have values that no five share
        ([*COMMON, *RARE], False),
        (RARE[:4], False),  # they are the whole silo, and make all of its sums
        ([0.0] * 60 + [0.1, 0.2] * 3, True),  # three numbers of patients from three equations
        ([0.0] * 60 + [place / 10 for place in range(1, 8)] * 3, True),
        ([0.0] * 60 + [place / 10 for place in range(1, 9)] * 3, False),  # of nine values
        ([place / 10 for place in range(6)] * 2, True),
        (
            [place / 10 for place in range(6)] + [place / 10 for place in range(5)],
            False,
        ),  # so few fit many ways
    ],
)
def test_few_patients_make_moments_by_values_of_their_own(values: list[float], few: bool) -> None:
    assert made_by_few(np.array(values), np.arange(len(values)), LEAST) == few


@pytest.mark.parametrize(
    ("far", "rest", "few"),
    [
        (
            [1.0],
            [0.2] * 5,
            True,
        ),  # squares of all but two add less than 0.21 of the farthest one's
        ([1.0], [0.2] * 6, False),
        ([0.03] * 30, [0.085], True),  # of one with many records, distances less than a tenth
        ([0.03] * 30, [0.095], False),
        ([0.0], [0.0], False),
    ],
)
def test_one_patient_makes_moments_by_distance(far: list[float], rest: list[float], few: bool) -> None:
    values = np.array([*[0.0] * 101, *rest, *[-item for item in far], *far])
    owners = np.array([*range(101 + len(rest)), *[200] * len(far), *[201] * len(far)])
    assert made_by_few(values, owners, 1) == few


def test_the_records_of_one_patient_are_one_patients() -> None:
    doses = [27.5, 12.0, 40.0, 5.0, 19.0, 33.0]
    rows = [(0.0, 0, 0)] * 60 + [(dose, 0, 0) for dose in doses]
    own = term(table(rows, [*range(60), *[60] * len(doses)]), LEAST)
    assert own.withheld_moments[0, 0]


@pytest.mark.whole
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


def test_rounding_is_to_the_nearest_of_steps_that_are_no_longer_than_asked_for() -> None:
    steps = {0.5: [5, 6, 7], 1.9: [5, 6, 7], 2.1: [6, 6, 8], 4.5: [4, 8, 8], 8.0: [8, 8, 8], 16.0: [0, 0, 0]}
    assert {most: [disclosure._rounded(value, most) for value in (5, 6, 7)] for most in steps} == steps
    q = 629_147  # odd, and so is its square
    assert rounded_moments(np.array([2 * q / UNITS - 1])).tolist() == [1, q, *divmod(q**2, UNITS)], "as it is"


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
