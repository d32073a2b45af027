"""A hospital that sends what it likes in masked fields that count, and is honest otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tightframe.phases import Group, Schema, Tensors
from tightframe.rounds import codec
from tightframe.rounds.codec import pack, unpack
from tightframe.rounds.silo.session import SiloSession

Numbers = Mapping[str, float | NDArray[np.float64]]


def lies(monkeypatch: pytest.MonkeyPatch, liar: str, sums: Mapping[str, Numbers]) -> None:
    """Let one hospital send false numbers in fields, beyond any bound.

    Args:
        sums: name of a field -> by field, what is sent in the sums that have it: one number in all elements,
            or one in each, where NaN leaves it as it is.
    """
    at_work = [""]
    handle, encode = SiloSession.handle, codec.encode

    def handled(self: SiloSession, task: str, message: Any) -> Any:
        at_work[0] = self.context.name
        return handle(self, task, message)

    def encoded(schema: Schema, tensors: Tensors, *, share: float, parties: int) -> dict[Group, bytes]:
        made = encode(schema, tensors, share=share, parties=parties)
        numbers = next((false for name, false in sums.items() if name in schema), {})
        if at_work[0] != liar or not numbers:
            return made
        for group, term in made.items():
            arrays = dict(unpack(schema, group, term))
            for item in (item for item in schema.group(group) if item.name in numbers):
                false = np.broadcast_to(numbers[item.name], item.shape).reshape(-1)
                own = arrays[item.name].copy()
                steps = np.rint(np.nan_to_num(false) * 2.0 ** codec.bits_of(item, parties)).astype(np.int64)
                arrays[item.name] = np.where(np.isnan(false), own, steps.astype(own.dtype))
            made[group] = pack(schema, group, arrays)
        return made

    monkeypatch.setattr(SiloSession, "handle", handled)
    monkeypatch.setattr(codec, "encode", encoded)
