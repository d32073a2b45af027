"""A total of fractions must not tell the fractions: k/n of known n add up to one number in one way only."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch

from tightframe import methods
from tightframe.rounds import codec
from tightframe.rounds.phases import personal
from tightframe.rounds.setup import prepare
from tightframe.securesum import encoding

WHOLE = ("personal/silos", "personal/judged", "own/trained", "closing/present", "holders", "/holders")
"""Fields of zeros and ones: their totals are numbers of silos."""
FINE = {
    # Ones of the classes that a silo holds, unless the job weighs by records, which gives counts.
    "memory/denominator",
    "prototype/shares",
}


def total_of(field: str, values: list[Fraction]) -> int:
    """What a sum of each silo's value opens, as an integer of the ring."""
    schema = personal.schema()
    total = 0
    for value in values:
        tensors = {item.name: torch.zeros((), dtype=torch.float64) for item in schema.fields}
        tensors[field] = torch.tensor(float(value), dtype=torch.float64)
        term = codec.encode(schema, tensors, share=1.0, parties=len(values))["static"]
        place = [item.name for item in schema.fields].index(field) * 8
        total += int.from_bytes(term[place : place + 8], "little")
    return total


def explanations(sizes: tuple[int, ...], total: int, bits: int) -> int:
    """In how many ways numbers of right answers, by silo, add up to a total."""
    ways = Counter({0: 1})
    for size in sizes:
        # The encoding rounds to nearest, ties to even, as `round` of an exact fraction does.
        terms = [round(Fraction(k, size) * 2**bits) for k in range(size + 1)]
        after: Counter[int] = Counter()
        for (so_far, count), term in itertools.product(ways.items(), terms):
            after[so_far + term] += count
        ways = after
    return ways[total]


@pytest.mark.parametrize("field", [personal.ACCURACY, personal.VALID_CLASSES, personal.LABEL_SHARE])
@pytest.mark.parametrize(
    ("sizes", "right", "least"),
    [
        ((104, 89, 16, 45), (81, 60, 11, 33), 10_000),
        ((101, 89, 17, 45), (70, 66, 13, 30), 10_000),
        ((203, 172, 85), (105, 94, 56), 5_000),
        ((16, 17, 19, 23), (12, 11, 14, 15), 500),
        ((10, 11, 13), (7, 8, 9), 20),
    ],
)
def test_many_numbers_of_right_answers_explain_a_total(
    field: str, sizes: tuple[int, ...], right: tuple[int, ...], least: int
) -> None:
    values = [Fraction(k, size) for k, size in zip(right, sizes, strict=True)]
    total = total_of(field, values)
    assert explanations(sizes, total, personal.FRACTION_BITS) >= least


@pytest.mark.whole
def test_the_enumeration_names_every_count_of_a_fine_sum() -> None:
    sizes, right = (203, 172, 85), (105, 94, 56)
    fine = encoding.FRACTION_BITS_64
    total = sum(round(Fraction(k, size) * 2**fine) for k, size in zip(right, sizes, strict=True))
    assert explanations(sizes, total, fine) == 1, "the attack itself is broken"


@pytest.mark.parametrize("method", methods.METHODS, ids=lambda method: method.name)
def test_no_method_sums_a_fraction_finely(method: methods.Method) -> None:
    job = {
        "job_name": "j",
        "dataset": "fed_heart_disease",
        "model": "mlp",
        "method": method.name,
        "sites": [f"s{i}" for i in range(6)],
        "min_sites": 5,
        "rounds": method.rounds or 3,
        "training": {"momentum": 0.0},
        "personalise": True,
    }
    setup = prepare(job)
    fields = {
        item.name: item
        for exchange in setup.plan
        for phase in exchange.phases
        for item in phase.schema.fields
        if item.effective_bound <= 1.0 and not item.weighted
    }
    assert personal.ACCURACY in fields
    for name, item in fields.items():
        if item.bits is None and not name.endswith(WHOLE):
            assert name in FINE, f"{name} may be a ratio of small numbers: sum counts, or give it few `bits`"
