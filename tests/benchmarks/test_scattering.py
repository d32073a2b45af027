"""The benchmark of scattering at toy size: what it says. No time is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = ["--sample", "3", "--batch", "2", "--size", "16", "-J", "2", "-L", "2"]


@pytest.mark.parametrize("more", [[], ["--channels", "3", "--features"]])
def test_it_says_what_is_extrapolated(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import scattering

    line = scattering.main([*SMALL, *more])
    assert "x 16 x 16, J = 2, L = 2, one thread" in line
    assert "s, extrapolated from 3 (" in line
