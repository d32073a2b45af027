"""Findings: which rule of a contract is broken in which column and rows. They hold no value of a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 10


@dataclass(frozen=True)
class Finding:
    """Rows that break one rule.

    Attributes:
        column: the contract's name of it; empty for a rule of whole rows.
        rule: that they break, in words.
    """

    column: str
    rule: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        """Return one line: the column, the rule, how many rows, and the first of them."""
        where = f"{self.column}: " if self.column else ""
        return f"{where}{self.rule}: {rows_in_words(self.rows)}"


def rows_in_words(rows: Sequence[int]) -> str:
    """Return how many rows, and the numbers of the first.

    >>> rows_in_words([4]), rows_in_words([2, 3])
    ('1 row (4)', '2 rows (2, 3)')
    """
    some = ", ".join(map(str, rows[:SHOWN])) + (", ..." if len(rows) > SHOWN else "")
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'} ({some})"
