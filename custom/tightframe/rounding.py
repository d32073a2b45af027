"""Numbers that people must not read as better than they are: what privacy costs, and what is left of it."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def rounded_up(value: float, digits: int = 3) -> str:
    """A cost as it is shown to people: never less than it is.

    >>> rounded_up(5.81234), rounded_up(8.0)
    ('5.813', '8.000')
    """
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_CEILING))


def rounded_down(value: float, digits: int = 3) -> str:
    """What is left, as it is shown to people: never more than it is."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR))
