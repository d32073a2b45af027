"""Rows for a model of Fed-Heart-Disease: the thirteen columns of a record, raw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tightframe.data.forms import TableForm, named_columns, numbers
from tightframe.data.heart import FEATURES, HeartOptions

NUMBERS = frozenset({"age", "trestbps", "chol", "thalach", "oldpeak"})
YES_OR_NO = frozenset({0.0, 1.0})


def form(options: HeartOptions) -> TableForm:
    """Return how records are made of rows."""
    return TableForm(
        choose=partial(named_columns, FEATURES),
        encode=_encode,
        said=f"the columns {', '.join(FEATURES)} (cp_2 to cp_4 and restecg_1, restecg_2 are 1 at that level)",
    )


def _encode(columns: Sequence[str], values: Sequence[str]) -> tuple[NDArray[np.float32], list[str]]:
    made, problems = numbers(columns, values, lambda name: None if name in NUMBERS else YES_OR_NO)
    for name in ("cp_", "restecg_"):
        if sum(value for column, value in zip(columns, made, strict=True) if column.startswith(name)) > 1:
            problems.append(f"Expected at most one 1 in the columns {name}*, but there are more")
    return made, problems
