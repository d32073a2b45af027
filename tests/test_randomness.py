"""What a test draws follows from its name, and from nothing else."""

from __future__ import annotations

import os
import posix
import random
import secrets
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.randomness import drawn_by_name

from tightframe.privacy.discrete_gaussian import discrete_gaussian
from tightframe.privacy.os_randomness import standard_normal


def _drawn(name: str) -> list[Any]:
    with drawn_by_name(name):
        return [
            discrete_gaussian(2.0**40, (4,)).tolist(),
            standard_normal(4).tolist(),
            secrets.token_hex(8),
            np.random.default_rng().random(),
            np.random.rand(),
            random.random(),  # noqa: S311 - that stream, too
            torch.rand(4).tolist(),
        ]


def test_a_name_gives_the_same_draws_and_another_one_others() -> None:
    first, again, other = (_drawn(name) for name in ("one", "one", "other"))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_tests_draw_by_their_names(request: pytest.FixtureRequest) -> None:
    assert (os.urandom is posix.urandom) == request.config.getoption("--drawn-anew")
