"""Losses that are functions of each hospital's own class counts, of nothing else where features are zero.

A network of one unit, off for every record, leaves the head's bias: each record's balanced loss is one of two
numbers that follow from its hospital's counts, and a round's mean adds how many of each were drawn. Two
rounds' totals, less a colluding hospital's own, had one solution for the two others' counts, but for which
class is which.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import Federation, Records, hearts

from tightframe.errors import TooFewError
from tightframe.learning import model_update
from tightframe.learning.few_records.unit_records import UnitRecords
from tightframe.rounds import codec

JOB: dict[str, Any] = {
    "method": "fedrod",
    "weights": "exact",
    "rounds": 2,
    "evaluation": {"models": 1},
    "training": {"learning_rate": 1e-30, "batch_size": 1, "momentum": 0.0, "weight_decay": 0.0},
    "model_options": {"widths": [1]},
}
LOSS = "training/balanced_softmax"
HOSPITALS = ("hospital-1", "hospital-2", "hospital-5")


def explained(
    value: float, pairs: list[tuple[int, int]], sizes: tuple[int, ...], bias: np.ndarray
) -> list[tuple[int, int]]:
    """Return which numbers of records of class 1 at two hospitals, of those given, explain a loss."""
    found = []
    for pair in pairs:
        each = []
        for size, ill in zip(sizes, pair, strict=True):
            whole = math.log((size - ill) * math.exp(bias[0]) + ill * math.exp(bias[1]))
            well = whole - math.log(size - ill) - bias[0]
            slope = (whole - math.log(ill) - bias[1] - well) / max(sizes)
            away = int(3.5 * math.sqrt(ill * (size - ill) / size))
            each.append((size * well / max(sizes), slope, np.arange(ill - away, ill + away + 1)))
        (left, by, drawn), (right, beside, others) = each
        rest = value - left - right - by * drawn
        number = rest / beside if abs(beside) > 1e-9 else np.full(len(rest), float(others.mean()))
        near = np.abs(rest - beside * np.round(number)) < 2e-7
        if (near & (number > others[0] - 0.5) & (number < others[-1] + 0.5)).any():
            found.append(pair)
    return found


def left(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return which numbers of class 1 at the two others explain two rounds' losses, less the third's own."""
    data = federation.data
    sizes = tuple(len(item.labels("train")) for item in data.values())
    model: Any = model_update.build_template(federation.setup.setting)
    model.load_state_dict(dict(federation.shared.state.model))
    for item in data.values():
        assert not model.eval().features(torch.as_tensor(item.raw("train"))).any()
    sent, encode = list[float](), codec.encode

    def spy(schema: Any, tensors: Any, **how: Any) -> Any:
        sent.append(float(tensors[LOSS]) if LOSS in tensors else 0.0)
        return encode(schema, tensors, **how)

    monkeypatch.setattr(codec, "encode", spy)
    bias = model.head.bias.detach().double().numpy()
    pairs = list(itertools.product(*(range(6, size - 6) for size in sizes[:2])))
    for number in (1, 2):
        total = float(federation.sum("train", number)[LOSS])
        pairs = explained(total - sent[-1] * sizes[2] / max(sizes), pairs, sizes[:2], bias)
    return pairs


def test_a_network_whose_features_are_zero_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = hearts(5)
    data: dict[str, Records] = {name: every[name] for name in HOSPITALS}
    federation = Federation(JOB, data, state=tmp_path / "one").enroll()
    with pytest.raises(TooFewError, match="3 of 3 silos in round 1 could not contribute"):
        left(federation, monkeypatch)
    monkeypatch.setattr(UnitRecords, "check", lambda _: None)
    true = tuple(int((item.labels("train") == 1).sum()) for item in data.values())
    sizes = tuple(len(item.labels("train")) for item in data.values())
    found = left(Federation(JOB, data, state=tmp_path / "other").enroll(), monkeypatch)
    either = {tuple(min(n, size - n) for n, size in zip(pair, sizes, strict=False)) for pair in found}
    assert either == {tuple(min(n, size - n) for n, size in zip(true[:2], sizes, strict=False))}
