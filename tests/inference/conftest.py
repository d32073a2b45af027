"""What the exporter of ONNX begins with."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def operators_once() -> Iterator[None]:
    """Torch lists what it can translate to ONNX once in a process of tests: a third of a small export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    listed = functools.cache(ONNXRegistry.from_torchlib)

    def registry(**version: int) -> ONNXRegistry:
        known = copy.copy(listed(**version))
        known.functions = {name: [*found] for name, found in known.functions.items()}
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(registry))
        yield
