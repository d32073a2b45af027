"""The synthetic twin of a contract: generated records that keep it, for simulations without records.

Numbers lie around a centre of their class, categories and booleans are as frequent as their class says; the
contract alone decides, so that all silos have one task. No claim about any data can be made on it.
"""

from __future__ import annotations

import numpy as np

from tightframe.data.contract import Contract, MultiLabel
from tightframe.data.table import TableOptions
from tightframe.data.table.silo import TableData, fold_of

RECORDS = 240
PREVALENCE = 0.3
"""Prevalence of each finding."""
_MISSING_SHARE = 0.05


def open_twin(silo: int, options: TableOptions) -> TableData:
    """Return the twin of a silo: 240 records, each of a patient of its own."""
    contract = options.contract
    seed = int(contract.sha256()[:16], 16)
    task = np.random.Generator(np.random.PCG64(seed))
    random = np.random.Generator(np.random.PCG64([seed, silo]))
    several = isinstance(contract.label, MultiLabel)
    count = len(contract.label.titles)
    if several:
        labels = (random.random((RECORDS, count)) < PREVALENCE).astype(np.int64)
    else:
        labels = random.integers(0, count, RECORDS)
    features = np.concatenate(_columns(contract, labels, task, random), axis=1).astype(np.float32)
    keys = [f"{silo}-{row}" for row in range(RECORDS)]
    folds = np.array([fold_of(key, contract.shares) for key in keys], dtype=np.int64)
    survival = None
    if contract.survival is not None:
        survival = np.stack([random.beta(1, 3, RECORDS), random.random(RECORDS) < 0.6], axis=1)
    return TableData(
        features,
        labels.astype(np.int64),
        folds,
        keys,
        keys if contract.patient else None,
        source=f"synthetic twin of {contract.title}, silo {silo}",
        synthetic=True,
        survival=survival,
    )


def _columns(
    contract: Contract, labels: np.ndarray, task: np.random.Generator, random: np.random.Generator
) -> list[np.ndarray]:
    """Return the values of each column's features, (n, k)."""
    parts, classes = [], len(contract.label.titles)
    for column in contract.columns:
        if column.kind == "number":
            centres = task.uniform(-0.5, 0.5, classes)
            # Of findings the centres of those that a record has add up.
            centre = centres[labels] if labels.ndim == 1 else labels @ centres
            values = np.clip(random.normal(centre, 0.4), -1.0, 1.0)[:, None]
        else:
            levels = 2 if column.kind == "boolean" else len(column.vocabulary)
            shares = task.dirichlet(np.ones(levels), classes).cumsum(axis=1)
            # Of findings the first that a record has decides, or the last of all where it has none.
            group = labels if labels.ndim == 1 else np.where(labels.any(1), labels.argmax(1), classes - 1)
            drawn = (random.random(len(labels))[:, None] > shares[group, :-1]).sum(axis=1)
            values = (drawn[:, None] == np.arange(1, levels)).astype(np.float64)
        if column.missing == "indicator":
            missing = random.random(len(labels)) < _MISSING_SHARE
            values = np.concatenate([np.where(missing[:, None], 0.0, values), missing[:, None]], axis=1)
        parts.append(values)
    return parts
