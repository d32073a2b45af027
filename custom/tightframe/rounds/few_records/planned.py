"""Sums of products and by class that a job plans without noise, as the rule on few records counts them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from tightframe.learning.few_records.products import ClassSums, Products
from tightframe.learning.model_update import shared_template, shared_width
from tightframe.models.frozen import is_frozen
from tightframe.phases import Field, Schema
from tightframe.rounds.moments import SQUARES, SUMS
from tightframe.rounds.riders.class_rules import fields, sums_by_class
from tightframe.rounds.setup import JobSetup

_Sum = TypeVar("_Sum", Products, ClassSums)
once = functools.lru_cache(maxsize=16)
"""Cache for a process's jobs: a long run checks many sums, each before its term."""


def products_planned(setup: JobSetup) -> Products | None:
    """Return the widest sum of products that a job plans; None if it plans none."""
    return _widest(setup, products_in)


def products_in(setup: JobSetup, schema: Schema) -> Products | None:
    """Return the products of features in a sum; None if it has none without noise."""
    width = max((item.products for item in schema.fields), default=0)
    if not width:
        return None
    moments = sum(
        item.size
        for phase in setup.statistics_phases()
        for item in phase.schema.fields
        if item.name in (SUMS, SQUARES)
    )
    return Products(width, setup.setting.num_classes, setup.most_values, moments)


def class_sums_planned(setup: JobSetup) -> ClassSums | None:
    """Return the widest sums of frozen features by class that a job plans; None if it plans none."""
    return _widest(setup, class_sums_in)


def class_sums_in(setup: JobSetup, schema: Schema) -> ClassSums | None:
    """Return the sums of frozen features by class in a sum; None if it has none without noise."""
    width = max((item.features for item in schema.fields), default=0)
    return ClassSums(width, setup.most_values) if width else None


def means_of_columns(setup: JobSetup) -> bool:
    """Check whether a job sums silos' means of columns that no layer before the head mixes."""
    fields = (item for each in setup.plan for phase in each.phases for item in phase.schema.fields)
    return setup.privacy is None and any(item.means for item in fields) and _unmixed(setup)


@once
def sums_columns(setup: JobSetup) -> bool:
    """Check whether a job sums columns that no layer before the head mixes, by class or as products."""
    fields = [item for phase in setup.kinds for item in phase.schema.fields] if setup.trains else []
    summed = any(item.products or sums_by_class(item) for item in fields)
    return setup.privacy is None and summed and _unmixed(setup)


def _unmixed(setup: JobSetup) -> bool:
    template = shared_template(setup.setting)
    tensors = (*template.named_parameters(), *template.named_buffers())
    return all(item.dim() < 2 for name, item in tensors if not name.startswith("head."))


@once
def class_numbers(setup: JobSetup) -> int:
    """Return how many numbers a whole run's exact class sums in training open of each class; 0 without any.

    Sums behind convolutions are not counted, as no training was inverted through these. A frozen encoder's
    features give the same numbers in each round, which count once.
    """
    if setup.privacy is not None or not setup.trains or setup.method.one_sum is not None:
        return 0
    template, width = shared_template(setup.setting), shared_width(setup.setting)
    frozen = is_frozen(template)
    if not frozen and any(item.dim() > 2 for item in template.parameters()):
        return 0
    in_rounds, in_run = 0, 0
    for schema in telling(setup).values():
        for item in filter(sums_in_training, schema.fields):
            numbers = item.size // item.shape[0] if item.independent is None else item.independent
            if frozen and item.shape[1] == width:
                in_run = max(in_run, numbers)
            else:
                in_rounds += numbers
    return in_rounds + in_run


@once
def telling(setup: JobSetup) -> dict[tuple[int, int], Schema]:
    """Return the schemas of a whole run that open class sums in training, by round and index in the round.

    The first sum by class of a run carries flags only, under the class rules (``riders.class_rules``).
    """
    earlier = (*setup.statistics_phases(), *setup.before_phases())
    classes = setup.dataset.num_classes
    flagged = setup.job.class_rules == "off" or any(fields(phase.schema, classes).fields for phase in earlier)
    schemas = {}
    for number in range(1, setup.job.rounds + 1):
        for index, phase in enumerate(setup.training_phases(number)):
            if flagged and any(map(sums_in_training, phase.schema.fields)):
                schemas[number, index] = phase.schema
            flagged = flagged or bool(fields(phase.schema, classes).fields)
    return schemas


def sums_in_training(item: Field) -> bool:
    """Return True for sums by class that no other rule covers."""
    return sums_by_class(item) and not item.features and not item.products


def _widest(setup: JobSetup, sums_in: Callable[[JobSetup, Schema], _Sum | None]) -> _Sum | None:
    sums = (sums_in(setup, phase.schema) for exchange in setup.plan for phase in exchange.phases)
    return max((item for item in sums if item is not None), key=lambda item: item.width, default=None)
