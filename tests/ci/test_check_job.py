"""What CI asks a run's files: that it trained, and that it learned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.support import ROOT
from tests.support.results.building import evaluated, row
from tests.support.watched_jobs import OUTCOME

from tightframe.results.outcome import Outcome
from tightframe.results.rows import write_rows

SCRIPT = ROOT / ".ci" / "check_job"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, as a module."""
    module = ModuleType("check_job")
    module.__file__ = str(SCRIPT)
    exec(compile(SCRIPT.read_text(), SCRIPT, "exec"), vars(module))  # noqa: S102
    return module


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
    script: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    course: list[float | None],
    trained: bool,
    wrong: str | None,
) -> None:
    ended = {"trained": trained, "reason": None if trained else "too few", "rounds": 3}
    Outcome.model_validate(OUTCOME | ended).write(tmp_path)
    rows = [
        row(number, "train" if number else "start", ["a"], evaluation=evaluated(balanced_accuracy=value))
        for number, value in enumerate(course)
    ]
    write_rows(tmp_path, [*rows, row(3, "closing", ["a"])])
    problem = script.check(tmp_path)
    assert wrong in problem if wrong else problem == ""
    if trained:
        assert "model after round 2: balanced accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new", "wrong"),
    [
        ("metrics.jsonl", '"seconds": 3.0', '"seconds": 9.0', None),
        ("metrics.jsonl", '"loss": 0.5', '"loss": 0.6', "the same metrics"),
        ("model.safetensors", "weights", "others", "the same model.safetensors"),
        ("best_model.safetensors", "weights", "others", "the same best_model.safetensors"),
    ],
)
def test_a_run_must_equal_the_one_in_one_process(
    script: ModuleType, tmp_path: Path, name: str, old: str, new: str, wrong: str | None
) -> None:
    rows = [
        row(
            number,
            "train",
            ["a"],
            evaluation=evaluated(balanced_accuracy=number / 4),
            training={"loss": 0.5},
            seconds=3.0,
        )
        for number in (1, 2, 3)
    ]
    places = [tmp_path / "engine", tmp_path / "alone"]
    for place in places:
        place.mkdir()
        Outcome.model_validate(OUTCOME | {"trained": True, "reason": None, "rounds": 3}).write(place)
        write_rows(place, rows)
        for model in ("model.safetensors", "best_model.safetensors"):
            (place / model).write_text("weights")
    changed = places[1] / name
    changed.write_text(changed.read_text().replace(old, new, 1))
    assert script.check(places[0]) == ""
    problem = script.compare(*places)
    assert wrong in problem if wrong else problem == ""
    if name == "model.safetensors":
        command = [sys.executable, str(SCRIPT), *map(str, places)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and problem in done.stderr
        command[-1] = str(places[0])
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_ci_asks(root: Path) -> None:
    text = (root / ".ci" / "run").read_text()
    assert ".venv/bin/python .ci/check_job\n" in text
    assert '.ci/job_alone jobs/fedmr_isic "$meanwhile/alone"\n' in text
    assert '.ci/check_job $results "$meanwhile/alone/server"\n' in text
