"""What privacy costs is never shown as less, and what is left of it never as more."""

from __future__ import annotations

from tightframe.results.words import rounded_down, rounded_up


def test_rounding_for_people() -> None:
    assert rounded_up(8.0041) == "8.005" and rounded_down(8.0049) == "8.004"
    assert rounded_up(8.0) == rounded_down(8.0) == "8.000"
    assert rounded_up(1e-9) == "0.001" and rounded_down(1e-9) == "0.000"
