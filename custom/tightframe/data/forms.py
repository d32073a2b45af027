"""Make records for a trained model from files: a picture, or a row of a table.

A data set defines them for its records, so that a model trained on them can be used on others: the transforms
are those of the evaluation. Torch-free at import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class PictureForm:
    """Pictures.

    Attributes:
        channels: 3 for RGB, 1 for grey.
        transform: pixels, uint8 (H, W, channels), -> the record, a float32 tensor of the model's input shape.
        said: description of suitable pictures, in one clause.
        size: (height, width) that they must have; None for any.
        originals: converts original pixels of a camera to those of prepared records; None where records need
            no preparation.
    """

    channels: Literal[1, 3]
    transform: Callable[[Pixels], Any]
    said: str
    size: tuple[int, int] | None = None
    originals: Callable[[Pixels], Pixels] | None = None
    read: Callable[[Path], Pixels] | None = None
    endings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableForm:
    """Rows of a table with a header.

    Attributes:
        choose: header -> the columns of a record, in the model's order, and all problems. Other columns are
            allowed, and not used.
        encode: (columns, their values as text in that order) -> the record, and all problems.
        said: description of the columns, in one clause.
        values: names of a record's values; empty where the job does not name them.
    """

    choose: Callable[[Sequence[str]], tuple[list[str], list[str]]]
    encode: Callable[[Sequence[str], Sequence[str]], tuple[NDArray[np.float32], list[str]]]
    said: str
    values: tuple[str, ...] = ()


RecordForm = PictureForm | TableForm


def named_columns(names: Sequence[str], header: Sequence[str]) -> tuple[list[str], list[str]]:
    """Find columns by their names, in any order.

    Args:
        names: in the model's order.

    Returns:
        The columns, and the problems: missing and repeated columns.

    >>> named_columns(["age", "sex"], ["sex", "id", "sex"])[1]
    ["Expected a column 'age', but there is none", "Expected one column 'sex', but there are 2"]
    """
    count = Counter(header)
    problems = [f"Expected a column {name!r}, but there is none" for name in names if not count[name]]
    problems += [
        f"Expected one column {name!r}, but there are {count[name]}" for name in names if count[name] > 1
    ]
    return list(names), problems


def number(text: str) -> float | None:
    """Return a finite number, or None if the text is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def numbers(
    columns: Sequence[str], values: Sequence[str], levels: Callable[[str], frozenset[float] | None]
) -> tuple[NDArray[np.float32], list[str]]:
    """Turn texts into numbers.

    Args:
        levels: column -> its only allowed values; None for any number.

    Returns:
        float32 (D,), and the problems; wrong values are 0 then.

    >>> numbers(["age", "sex"], ["?", "2"], lambda name: frozenset({0.0, 1.0}) if name == "sex" else None)[1]
    ["Expected a number for 'age', but got '?'", "Expected 0 or 1 for 'sex', but got '2'"]
    """
    array = np.zeros(len(columns), np.float32)
    problems = []
    for place, (name, text) in enumerate(zip(columns, values, strict=True)):
        value, known = number(text), levels(name)
        if value is None or (known is not None and value not in known):
            wanted = "a number" if known is None else " or ".join(f"{item:g}" for item in sorted(known))
            problems.append(f"Expected {wanted} for {name!r}, but got {text[:40]!r}")
        else:
            array[place] = value
    return array, problems
