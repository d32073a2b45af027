"""Columns of a table that few records have, in honest training of a layer on them.

A total's column is the sum of these records' slopes alone. With one hidden layer and two classes the slope at
a unit is, by the next layer's weights, the record's error or zero: so the quotients are subset sums of a few
errors, of which a reader finds the errors, and so for which units each record fires. From twelve rounds these
gave 56 of 67 such records whole, with label, by integer programming.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from tests.support.attacks.malicious_server import ANY_WIDTH, STANDARD, Federation, Records, in_folds

UNITS, COLUMNS, RARE, PER = 32, 40, 12, 150


def wards(*, together: bool) -> dict[str, Records]:
    """Four hospitals. At one, five to seven patients have a rare drug, or one of two that go together."""
    draw, made = np.random.default_rng(0), {}
    weights, rates = draw.normal(size=COLUMNS), draw.uniform(0.15, 0.5, COLUMNS)
    for site in range(4):
        rows = draw.random((PER + 60, COLUMNS)) < rates
        if together:
            rows[:, :RARE] = rows[:, RARE : 2 * RARE]
        else:
            rows[:, :RARE] = False
        for drug in range(site, RARE, 4):
            rows[draw.choice(PER, 5 + drug // 4, replace=False), drug] ^= True
        risk = rows @ weights + draw.normal(size=len(rows))
        labels = (risk > np.median(risk)).astype(np.int64)
        made[f"hospital-{site + 1}"] = in_folds(rows.astype(np.float32), labels, PER, 30)
    return made


def errors_in(quotients: np.ndarray, near: float) -> np.ndarray | None:
    """Return the fewest numbers, up to five, whose subset sums quotients are; None if there are none."""
    known = np.sort(quotients[np.abs(quotients) > near])
    if not len(known):
        return None
    known = np.concatenate([[0.0], known[np.diff(known, prepend=-np.inf) > near]])
    apart = np.abs(known[:, None] - known)
    sizes = np.sort(apart[apart > near])
    sizes = sizes[np.diff(sizes, prepend=-np.inf) > near]
    often = [(np.abs(apart - size) < near).sum() for size in sizes]
    likely = sizes[np.argsort(often)[::-1][:10]]
    for number in range(1, 6):
        subsets = np.array(list(itertools.product((0, 1), repeat=number)))
        signs = np.array(list(itertools.product((1, -1), repeat=number)))
        for chosen in itertools.combinations(likely, number):
            errors = np.array(chosen) * signs
            sums = np.sort(errors @ subsets.T, axis=1)
            apart = np.diff(sums, axis=1).min(1) > near
            reached = (np.abs(known[:, None] - sums[apart, None]).min(2) < near).all(1)
            if reached.any():
                return np.asarray(errors[apart][reached][0])
    return None


def told(federation: Federation, *, together: bool) -> int:
    """Return of how many records one total tells which units they fire for, and their label."""
    model = {name: item.double().numpy() for name, item in federation.shared.state.model.items()}
    total = federation.sum("train", 1)
    slopes = total["gradient/backbone.1.weight"]
    slopes = slopes / np.abs(slopes).max()
    if together:
        slopes = slopes[:, :RARE] - slopes[:, RARE : 2 * RARE]
    quotients = slopes / (model["head.weight"][1] - model["head.weight"][0])[:, None]
    rows = np.concatenate([item.raw("train") for item in federation.data.values()])
    labels = np.concatenate([item.labels("train") for item in federation.data.values()])
    fires = rows @ model["backbone.1.weight"].T + model["backbone.1.bias"] > 0
    found = set[int]()
    for drug in range(RARE):
        differ = rows[:, drug] != (rows[:, RARE + drug] if together else 0)
        errors = errors_in(quotients[:, drug], 1e-4)
        for error in () if errors is None else errors:
            same = differ & (fires == _pattern(quotients[:, drug], errors, error)).all(1)
            # Of a pair the sign also says which of the two drugs it was.
            found |= set(np.flatnonzero(same & (together | ((labels == 1) == (error < 0)))).tolist())
    return len(found)


def _pattern(quotients: np.ndarray, errors: np.ndarray, error: float) -> np.ndarray:
    subsets = np.array(list(itertools.product((0, 1), repeat=len(errors))))
    nearest = np.abs(quotients[:, None] - subsets @ errors).argmin(1)
    return subsets[nearest, np.flatnonzero(errors == error)[0]] == 1


@pytest.mark.whole
@pytest.mark.parametrize("together", [False, True])
def test_columns_that_few_records_have_or_tell_apart_tell_none_of_them(
    together: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = {
        "method": "fedsgd",
        "dataset": "eicu",
        "dataset_options": {"drugs": COLUMNS},
        "weights": "exact",
        "model_options": {"widths": [UNITS]},
    }
    data = wards(together=together)
    without, found = (
        told(Federation(job, data, state=tmp_path / str(place), policy=policy).enroll(), together=together)
        for place, policy in enumerate((ANY_WIDTH, STANDARD))
    )
    assert without >= 15 and not found
    # Each hospital reads how many columns teach nothing.
    warned = [item for item in caplog.records if "say nothing in training" in item.msg]
    counts = {site: item.raw("train").sum(0) for site, item in data.items()}
    few = {site: np.flatnonzero((n > 0) & (np.minimum(n, PER - n) < UNITS)) for site, n in counts.items()}
    assert {item.args[0]: item.args[1] for item in warned} == {site: len(few[site]) for site in few}
    for item in warned:
        names = [f"column {place + 1}" for place in few[item.args[0]]]
        assert item.args[3] == ", ".join(names if len(names) <= 8 else [*names[:8], "..."])
