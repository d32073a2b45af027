"""How many unknown numbers a record has: what others could add to its inputs adds none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch.nn import functional

from tightframe.learning.few_records import record_values
from tightframe.learning.few_records.products import ClassSums, Products
from tightframe.learning.few_records.record_values import FOLLOWS, MOST, PICTURES, ROWS, most_values

DRAW = np.random.default_rng(0)
FIVE = torch.from_numpy(DRAW.normal(size=(300, 5))).float()


def count_values(batches: Iterable[torch.Tensor], columns: tuple[int, ...], least: int) -> float:
    """Of records of one class."""
    read = ((batch, torch.zeros(len(batch), dtype=torch.int64)) for batch in batches)
    (found,) = record_values.count_values(read, 1, columns, least).tolist()
    return found


def levels(number: int, records: int = 300) -> torch.Tensor:
    """A category, in as many numbers."""
    return functional.one_hot(torch.arange(records) % number, number).float()


def with_share(share: float) -> torch.Tensor:
    """A column that follows from the first one but for this part of its variance."""
    first, other = (FIVE[:, place] - FIVE[:, place].mean() for place in (0, 1))
    other = other - (other @ first) / (first @ first) * first
    mixed = first / first.norm() * (1 - share) ** 0.5 + other / other.norm() * share**0.5
    return torch.stack([first, mixed], 1)


@pytest.mark.parametrize(
    ("rows", "columns", "values"),
    [
        (FIVE, (), 5),
        (FIVE * torch.tensor([1e-6, 1, 1e6, 1, 1]) + 1, (), 5),
        (torch.cat([FIVE, torch.zeros(300, 100)], 1), (), 5),
        (torch.cat([FIVE, FIVE.new_full((300, 1), 7), FIVE * 2.2 - 1, FIVE.sum(1, keepdim=True)], 1), (), 5),
        (torch.cat([FIVE, levels(9)], 1), (), 5 + 9 / 24),
        (torch.cat([FIVE, levels(9), torch.zeros(300, 99)], 1), (1, 1, 1, 1, 1, 108), 5 + math.log2(9) / 24),
        (torch.cat([FIVE, levels(9), levels(9)], 1), (1, 1, 1, 1, 1, 9, 9), 5 + math.log2(9) / 24),
        (torch.cat([levels(9), FIVE], 1), (9, 1, 1, 1, 1, 1), 5 + math.log2(9) / 24),
        (torch.full((300, 3), torch.nan), (), 0),
        (torch.full((300, 3), torch.inf), (), 0),
        (with_share(FOLLOWS * 1.2), (), 2),
        (with_share(FOLLOWS * 0.8), (), 1),
        (torch.from_numpy(DRAW.normal(size=(40, 60))).float(), (), 39),
        (torch.from_numpy(DRAW.normal(size=(700, 600))).float(), (), MOST),
        (torch.from_numpy(DRAW.normal(size=(700, 20)) @ DRAW.normal(size=(20, 600))).float(), (), 20),
        (levels(600, 3000), (600,), 1),
        (torch.cat([levels(256, 1300)] * 2, 1), (256, 256), 1),  # as long as is counted: not added up
    ],
    ids=[
        *("numbers", "units", "unused", "derived", "levels", "column", "category twice", "category first"),
        *("nan", "infinite", "follows hardly", "follows", "few records", "long", "long and derived"),
        *("many levels", "many levels twice"),
    ],
)
def test_what_says_nothing_new_is_not_counted(
    rows: torch.Tensor, columns: tuple[int, ...], values: int
) -> None:
    assert count_values([rows[:100], rows[100:]], columns, 5) == pytest.approx(values)


def test_a_record_of_yes_and_no_is_worth_its_bits() -> None:
    """All 339 records of four hospitals were read from 1,177 sums, 48 of a class from 150."""
    rows = torch.from_numpy(DRAW.integers(0, 2, size=(339, 10))).float()
    values = count_values([rows], (), 5)
    assert values == pytest.approx(10 / 24)
    assert not Products(48, 2, 10).allowed(339, 2, 339 * values)
    assert not ClassSums(150, 10).allowed(48 * values, 2)
    wide = torch.from_numpy(DRAW.integers(0, 2, size=(339, 32))).float()
    assert count_values([wide], (), 5) == 32, "more possible rows than can be written down"
    real = torch.from_numpy(DRAW.normal(size=(339, 1))).float()
    for more in (
        [real],
        [real, 2 * real - 1, rows @ torch.rand(10, 1)],
    ):  # as columns that follow from others
        # Else all 48 records of a class, with the number, were read from 264 sums.
        assert count_values([torch.cat([rows, *more], 1)], (), 5) == pytest.approx(1 + 10 / 24)
    assert count_values([torch.cat([wide, real], 1)], (), 5) == 33


def test_possible_rows_are_counted_by_the_steps_of_numbers() -> None:
    years = torch.arange(60.0)[:, None] + 20
    rows = torch.cat([levels(2, 60)[:, :1], levels(3, 60), years, torch.full((60, 1), 7.0)], 1)
    read = [(rows[:30], torch.zeros(30)), (rows[30:], torch.zeros(30))]
    each = pytest.approx([1, math.log2(3), math.log2(60), 0])
    assert record_values.column_bits(read, [1, 3, 1, 1]) == each
    assert record_values.column_bits([], ()) == ()
    hidden = torch.tensor([1.0, 1, 1, 1, 1e3, 1], dtype=torch.float64)  # spreads of about 1/2, and 0.017
    assert sum(record_values.column_bits(read, [1, 3, 1, 1], hidden)) < math.log2(2 * 3 * 10)
    least = 4 * years.std().item() / rows[:, :4].std(0).max().item()  # an eighth of it, in 27 steps
    eighth = torch.tensor([1.0, 1, 1, 1, 2 * least, 1], dtype=torch.float64)
    assert sum(record_values.column_bits(read, [1, 3, 1, 1], eighth)) == pytest.approx(
        math.log2(2 * 3) + math.log2(28) / 4, abs=0.01
    )
    real = torch.rand(60, 1, generator=torch.Generator().manual_seed(1))  # in 64 steps to a deviation
    assert math.log2(64) < sum(record_values.column_bits([(real, torch.zeros(60))], ())) < math.log2(64 * 4)


def test_rare_values_are_counted_by_how_likely_rows_are() -> None:
    """Against SciPy's entropy; 37 drugs that 5 % have are no 2^37 rows, nor are as many rare numbers."""
    had = torch.from_numpy(
        np.random.default_rng(0).permuted(np.arange(200 * 37).reshape(37, 200) % 200, axis=1) < 10
    ).T
    label = torch.zeros(200)
    expected = 37 * entropy([0.05, 0.95], base=2)
    assert sum(record_values.column_bits([(had.float(), label)], ())) == pytest.approx(expected, rel=1e-5)
    assert expected < 24
    times = torch.where(had, torch.arange(200)[:, None] % 3 + 1.0, 0.0)  # how often
    assert sum(record_values.column_bits([(times, label)], ())) < 37 * 0.6


def apart(had: np.ndarray) -> float:
    """Bits of yes/no columns that tell nothing of each other."""
    return math.fsum(entropy([column.mean(), 1 - column.mean()], base=2) for column in had.T)


def test_what_one_column_tells_of_another_is_counted_once() -> None:
    """And chance tells nothing: independent columns keep all their bits, of few records, too."""
    draw = np.random.default_rng(0)
    had, age = draw.random((140, 7)) < 0.4, draw.uniform(20, 90, (140, 1)).round()
    decade = np.eye(10)[age[:, 0].astype(int) // 10]

    def bits(*parts: np.ndarray, columns: tuple[int, ...] = ()) -> float:
        rows = torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float32))
        return sum(record_values.column_bits([(rows, torch.zeros(140))], columns))

    alone = apart(had)
    assert bits(had) == pytest.approx(alone, rel=0.05)
    assert bits(had, ~had, had, ~had) == pytest.approx(alone, rel=0.05)
    times = np.where(had, 3.0, 0.0)
    assert bits(had, times) == pytest.approx(alone, rel=0.05)
    assert bits(age, np.sqrt(age), 100 - age) == pytest.approx(bits(age), abs=0.5)
    by_decade = bits(age, decade, columns=(1, 10)) - bits(age)
    assert 0 < by_decade < 0.6 * bits(decade, columns=(10,)), "numbers are compared by quarters"
    many = draw.random((140, 300)) < 0.5
    assert bits(many) == pytest.approx(apart(many))
    assert count_values([torch.from_numpy(np.concatenate([had, ~had] * 3, axis=1)).float()], (), 5) == (
        pytest.approx(7 / 24)
    ), "not 42 columns of too many possible rows"


def test_what_follows_from_several_columns_is_counted_once() -> None:
    draw = np.random.default_rng(0)
    had = draw.random((140, 7)) < 0.4
    one, other = (had[:, list(each)] for each in zip(*itertools.combinations(range(7), 2), strict=True))
    scores = had @ draw.normal(size=(7, 10))

    def bits(*parts: np.ndarray) -> float:
        rows = torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float32))
        return sum(record_values.column_bits([(rows, torch.zeros(140))], ()))

    three = [had[:, list(each)].sum(1) for each in itertools.combinations(range(7), 3)]
    parity, majority = np.stack(three, axis=1) % 2, np.stack(three, axis=1) > 1
    alone = pytest.approx(apart(had), rel=0.05)
    assert bits(had, scores) == alone, "a linear function of them"
    assert bits(had, one & other, one | other, one ^ other, parity, majority) == alone, "not 120"
    fourteen = draw.random((140, 14)) < 0.4  # of which hardly a row is there again
    several = [fourteen[:, [place, place + 1]].all(1) for place in range(13)]
    assert bits(fourteen, np.stack(several, axis=1)) < apart(fourteen) + 3, "not 21"
    some = np.where(np.arange(140)[:, None] % 2, draw.random((140, 200)) < 0.08, False)
    assert bits(some) > 30, "half of the patients have nothing"
    numbers = draw.normal(size=(140, 100))  # of more than half as many as records each seems to follow
    assert bits(numbers) > 7 * 100
    rare = draw.random((140, 37)) < 0.05
    assert bits(rare) == pytest.approx(apart(rare), rel=0.05)


def test_numbers_in_few_narrow_places_are_counted_as_these() -> None:
    draw = np.random.default_rng(0)
    had = draw.random((140, 7)) < 0.4
    near = torch.from_numpy(np.where(had, 95, 5) + draw.uniform(-0.05, 0.05, (140, 7))).float()
    alone = apart(had)
    found = record_values.column_bits([(near, torch.zeros(140))], ())
    assert alone <= sum(found) < alone + 2
    tail = torch.from_numpy(draw.lognormal(sigma=2, size=(140, 1))).float()  # most are alike to the model
    assert sum(record_values.column_bits([(tail, torch.zeros(140))], ())) < 6


@pytest.mark.parametrize(
    ("differ", "least", "bits"), [(4, 5, 0), (5, 5, 1), (296, 5, 0), (1, 1, 1), (0, 1, 0)]
)
def test_a_column_differs_in_enough_records(differ: int, least: int, bits: int) -> None:
    """No single record decides, nor one of fewer than the class rules ask for."""
    column = torch.zeros(300, 1)
    column[:differ] = 1
    assert count_values([torch.cat([FIVE[:, :1], column], 1)], (), least) == pytest.approx(1 + bits / 24)


def test_of_few_records_a_column_differs_in_half() -> None:
    assert count_values([], (), 1) == 0 == count_values([FIVE[:1]], (), 5)
    assert count_values([FIVE[:4]], (), 5) == 3 and count_values([FIVE[:6]], (), 5) == 5
    rare = torch.tensor([[1.0], [1], [0], [0], [0], [0]])
    assert count_values([rare], (), 5) == 0 and count_values([rare[:5]], (), 5) > 0


def test_a_class_has_what_varies_in_it() -> None:
    """A column that only another class has, and one that follows from others in all but this class."""
    label = torch.arange(300) % 3 // 2  # 200 of class 0
    only = torch.where(label == 1, FIVE[:, 3], 0.0)
    mixed = torch.where(label == 1, FIVE[:, 0], FIVE[:, 4])
    rows = torch.stack([*FIVE[:, :3].T, only, mixed], 1)
    read = [(rows[:150], label[:150]), (rows[150:], label[150:])]
    assert record_values.count_values(read, 3, (), 5).tolist() == [4, 5, 0]
    assert record_values.count_values(read, 2, (3, 1, 1), 5).tolist() == [2, 3]


def test_a_column_of_few_values_in_a_class_is_worth_their_bits_there() -> None:
    """One of numbers at all others; of 16 values it is one of numbers, of fewer their bits."""
    label = torch.arange(600) % 2
    for values, worth in ((2, 4 + 1 / 24), (15, 4 + math.log2(15) / 24), (16, 5)):
        few = torch.where(label == 1, (torch.arange(600) // 2 % values).float(), FIVE[:, 4].repeat(2))
        rows = torch.cat([FIVE[:, :4].repeat_interleave(2, 0), few[:, None]], 1)
        (first, second) = record_values.count_values([(rows, label)], 2, (), 5).tolist()
        assert first == 5 and second == pytest.approx(worth)
    few = torch.stack([torch.arange(300) % 20, torch.arange(300) // 20 % 15], 1)
    assert count_values([few], (), 5) == pytest.approx(math.log2(300) / 24)  # all possible rows are few


def test_a_picture_that_was_scaled_up_has_no_more_numbers() -> None:
    small = torch.from_numpy(DRAW.uniform(size=(400, 1, 8, 8))).float()
    large = functional.interpolate(small, (64, 64), mode="bilinear")
    shown = (large * 255).round() / 255  # as a file has it
    assert count_values(shown.split(64), (), 5) == 63  # all but the brightness
    assert count_values([shown.expand(-1, 3, -1, -1)], (), 5) == 63
    assert count_values([torch.from_numpy(DRAW.uniform(size=(600, 3, 16, 16))).float()], (), 5) == MOST
    assert count_values([small], (), 5) == 64


def test_of_pictures_what_hardly_varies_and_what_all_share_adds_nothing() -> None:
    small = torch.from_numpy(DRAW.uniform(size=(400, 1, 8, 8))).float()
    large = functional.interpolate(small, (64, 64), mode="bilinear")
    large[:, :, :16] = torch.from_numpy(DRAW.normal(size=(400, 1, 16, 64)) * 1e-3).float()
    assert count_values([large[:, 0]], (), 5) == count_values([large], (), 5) <= 64
    bright = torch.from_numpy(DRAW.normal(size=(100, 1, 1, 1)) + DRAW.normal(size=(100, 1, 128, 256)) * 0.05)
    assert count_values([bright.float()], (), 5) == 99


def test_of_many_pictures_the_first_are_looked_at() -> None:
    batch = torch.from_numpy(DRAW.uniform(size=(PICTURES // 2, 2, 2))).float()
    read = []

    def batches(inputs: torch.Tensor):  # type: ignore[no-untyped-def]
        for place in range(4):
            read.append(place)
            yield inputs

    assert count_values(batches(batch), (), 5) == 4 and read == [0, 1]
    read.clear()
    assert count_values(batches(batch.flatten(1)), (), 5) == 4 and read == [0, 1, 2, 3]
    read.clear()
    assert count_values(batches(FIVE.repeat(ROWS // 600, 1)), (), 5) == 5 and read == [0, 1, 2]


def test_the_most_is_known_from_a_job() -> None:
    assert most_values((13,), ()) == 13
    assert most_values((600,), (1,) * 600) == most_values((2, 20, 20), ()) == MOST
    assert most_values((108,), (1, 107)) == 2


@pytest.mark.parametrize(("wide", "values"), [(1, 12), (4, 12), (40, 3.97), (1e6, 1)])
def test_columns_that_are_hidden_from_the_model_leave_one(wide: float, values: float) -> None:
    """By a contract's ranges, or by what a false deviation divides them by.

    Eleven tenths of a spread and one: (1 + 1.1)^2 / (1 + 0.11) = 3.97.
    """
    rows = torch.from_numpy(DRAW.normal(size=(300, 12))).float()
    rows = (rows - rows.mean(0)) / rows.std(0, unbiased=False)
    hidden = torch.tensor([1.0] + [wide * 0.999] * 11, dtype=torch.float64)
    labels = torch.zeros(300, dtype=torch.int64)
    for told, scale in ((rows, hidden), (rows / hidden.float(), torch.ones(12, dtype=torch.float64))):
        (found,) = record_values.count_values([(told, labels)], 1, [1] * 12, 5, scale=scale).tolist()
        assert found == pytest.approx(values, rel=0.01)
    assert record_values.count_values([(told, labels)], 1, [1] * 12, 5).tolist() == [12]
