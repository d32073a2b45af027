"""Results to report: one small run with a drop-out, and one that ended early; both made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import runs

from tightframe.errors import RunError


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four silos, three rounds, FedMR, secure sums; site-3 is silent in round 2."""
    folder = tmp_path_factory.mktemp("report")
    of = runs.job(rounds=3, personalise=True, local_baseline_epochs=1)
    runs.run(of, folder, silent=lambda task, site, request: site == "site-3" and runs.in_round(request, 2))
    return folder


@pytest.fixture(scope="session")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but in round 1 two silos are silent, and the run ends."""
    folder = tmp_path_factory.mktemp("early")

    def silent(task: str, site: str, request: Any) -> bool:
        return site in ("site-1", "site-3") and runs.in_round(request, 1)

    with pytest.raises(RunError):
        runs.run(runs.job(), folder, silent=silent)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the results of one party, to be altered."""

    def copy(party: str) -> Path:
        (tmp_path / party).mkdir()
        for path in (run / party).iterdir():
            if path.suffix in (".json", ".jsonl", ".pem"):
                shutil.copy(path, tmp_path / party / path.name)
        return tmp_path / party

    return copy
