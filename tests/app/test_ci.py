"""What CI asks a run's files: that it trained, and that it learned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.app.watching import OUTCOME
from tests.results.building import evaluated, row

from tightframe.results.exchanges import write_rows
from tightframe.results.outcome import Outcome


@pytest.mark.parametrize(
    ("course", "trained", "wrong"),
    [
        ([0.125, 0.2, 0.3, 0.36], True, None),
        ([0.125, 0.2, 0.3, 0.35], True, "above 0.35"),
        ([0.125, 0.5, 0.6, 0.5], True, "more after round 3"),
        ([0.125, 0.5, 0.6, None], True, "to be evaluated"),
        ([0.125, None, 0.6, 0.7], True, "to be evaluated"),
        ([0.125, 0.2, 0.3, 0.9], False, "too few"),
    ],
)
def test_a_run_must_have_learned(
    root: Path, tmp_path: Path, course: list[float | None], trained: bool, wrong: str | None
) -> None:
    ended = {"trained": trained, "reason": None if trained else "too few", "rounds": 3}
    Outcome.model_validate(OUTCOME | ended).write(tmp_path)
    rows = [
        row(number, "train" if number else "start", ["a"], evaluation=evaluated(balanced_accuracy=value))
        for number, value in enumerate(course)
    ]
    write_rows(tmp_path, [*rows, row(3, "closing", ["a"])])
    command = [sys.executable, str(root / ".ci" / "check_job"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (wrong is None), done.stderr
    assert (wrong or "") in done.stderr and "Traceback" not in done.stderr
    if trained:
        assert "model after round 2: balanced accuracy" in done.stdout


def test_ci_asks(root: Path) -> None:
    assert ".venv/bin/python .ci/check_job\n" in (root / ".ci" / "run").read_text()
