"""Rows for a model of eICU: one column for each drug of the vocabulary, 1 where it was ordered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tightframe.data.eicu import EicuOptions, vocabulary_sha256
from tightframe.data.forms import TableForm, named_columns, numbers

ORDERED = frozenset({0.0, 1.0})


def form(options: EicuOptions) -> TableForm:
    """Return how records are made of rows in a job."""
    return TableForm(
        choose=partial(_choose, options),
        encode=_encode,
        said=f"a column for each of the vocabulary's {options.drugs} drugs, called by its HICL code, 0 or 1",
    )


def _choose(options: EicuOptions, header: Sequence[str]) -> tuple[list[str], list[str]]:
    codes = sorted({int(name) for name in header if name.isascii() and name.isdigit()})
    names, problems = named_columns([str(code) for code in codes], header)
    if len(codes) != options.drugs:
        problems.append(
            f"Expected {options.drugs} columns called by HICL codes, the job's `drugs`, but got {len(codes)}"
        )
    elif options.vocabulary not in (None, found := vocabulary_sha256(codes)):
        problems.append(
            f"Expected the drugs of the vocabulary with SHA-256 {options.vocabulary}, but these columns have "
            f"{found}"
        )
    return names, problems


def _encode(columns: Sequence[str], values: Sequence[str]) -> tuple[NDArray[np.float32], list[str]]:
    return numbers(columns, values, lambda name: ORDERED)
