"""Events: what they hold, what they refuse, and their plain values."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightframe.privacy.events import (
    NOISE_MULTIPLIERS,
    Event,
    Gaussian,
    PrivacyValueError,
    SubsampledGaussian,
    as_event,
    checked_delta,
    from_value,
    with_noise,
)

noises = st.floats(*NOISE_MULTIPLIERS)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Gaussian, noises),
    st.builds(SubsampledGaussian, noises, st.floats(1e-9, 1.0), st.integers(1, 10**9)),
)


@given(EVENTS)
def test_plain_values_and_back_through_json(event: Event) -> None:
    assert from_value(json.loads(json.dumps(event.as_value(), allow_nan=False))) == event


@pytest.mark.parametrize(
    "noise", [0, 0.0, -1.0, 0.009, 2e9, math.nan, math.inf, -math.inf, True, "1", None, 1j, [1.0]]
)
def test_a_wrong_noise_multiplier_is_named(noise: Any) -> None:
    for make in (Gaussian, lambda z: SubsampledGaussian(z, 0.5, 1)):
        with pytest.raises(PrivacyValueError, match=r"^TF-700: Expected `noise_multiplier` to be a number"):
            make(noise)


@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.0000001, math.nan, math.inf, True, "0.5", None])
def test_a_wrong_sampling_rate_is_named(rate: Any) -> None:
    with pytest.raises(PrivacyValueError, match="`sampling_rate`"):
        SubsampledGaussian(1.0, rate, 1)


@pytest.mark.parametrize("steps", [0, -1, 1.0, 10**9 + 1, True, "1", None, math.nan])
def test_wrong_steps_are_named(steps: Any) -> None:
    with pytest.raises(PrivacyValueError, match="`steps`"):
        SubsampledGaussian(1.0, 0.5, steps)


@pytest.mark.parametrize("delta", [0, 0.0, 1.0, 1, -1e-5, 5e-324, math.nan, math.inf, True, "1e-5"])
def test_a_wrong_delta_is_named(delta: Any) -> None:
    with pytest.raises(PrivacyValueError, match="`delta`"):
        checked_delta(delta)
    assert checked_delta(1e-5) == 1e-5


def test_numbers_are_kept_as_one_type() -> None:
    """6 and 6.0 are one event, so that a ledger has one text for it."""
    assert json.dumps(Gaussian(6).as_value()) == json.dumps(Gaussian(6.0).as_value())
    assert type(Gaussian(np.float64(2.5)).noise_multiplier) is float
    assert type(SubsampledGaussian(1, 1, 2).sampling_rate) is float


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "gaussian",
        {},
        {"kind": "laplace", "noise_multiplier": 1.0},
        {"kind": ["gaussian"], "noise_multiplier": 1.0},
        {"noise_multiplier": 1.0},
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": 1.0, "steps": 2},
        {"kind": "gaussian", "noise_multiplier": "1.0"},
        {"kind": "gaussian", "noise_multiplier": 0.0},
        {"kind": "subsampled_gaussian", "noise_multiplier": 1.0, "sampling_rate": 0.5},
        {"kind": "subsampled_gaussian", "noise_multiplier": 1.0, "sampling_rate": 0.5, "steps": 1.0},
    ],
)
def test_what_is_no_event_is_refused(value: Any) -> None:
    with pytest.raises(PrivacyValueError, match="TF-700"):
        from_value(value)


def test_a_mechanism_of_another_kind_is_never_priced() -> None:
    for value in (None, 1.0, {"kind": "gaussian", "noise_multiplier": 1.0}, object()):
        with pytest.raises(PrivacyValueError, match="Gaussian or SubsampledGaussian"):
            as_event(value)


def test_errors_do_not_repeat_texts() -> None:
    with pytest.raises(PrivacyValueError) as raised:
        Gaussian("patient 4711")  # type: ignore[arg-type]
    assert "4711" not in str(raised.value)


def test_with_noise_changes_nothing_else() -> None:
    assert with_noise(SubsampledGaussian(1.0, 0.5, 7), 2.0) == SubsampledGaussian(2.0, 0.5, 7)
    assert with_noise(Gaussian(1.0), 2.0) == Gaussian(2.0)
    with pytest.raises(PrivacyValueError):
        with_noise(Gaussian(1.0), 0.0)
