"""The four ways into the guides: their commands lead from nothing to what they promise."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import ROOT, forking
from tests.support.engine.simulation import assert_equal, run_alone

DOORS = {
    "data-scientist": ["TRAINED: fedncm_heart", "FedETF", "TRAINED: fedetf_heart"],
    "hospital-it": ["systemd/tightframe-site.service", "minimum_cohort"],
    "data-protection": ["minimum_cohort"],
    "researcher": ["FedMR", "TRAINED: fedncm_heart", "verified"],
}
"""What each says, in this order."""
BEGIN = "tightframe simulate jobs/fedncm_heart"
"""Two of them begin with it; it runs once."""
WORKSPACE = "simulator_workspace"


def blocks(page: str) -> list[str]:
    """Return the commands, without those that install."""
    found = re.findall(r"^ *```sh\n(.*?)^ *```$", page, flags=re.M | re.S)
    return [textwrap.dedent(block) for block in found if "pip install" not in block]


def test_every_way_is_tried() -> None:
    assert {path.stem for path in (ROOT / "docs" / "doors").glob("*.md")} == set(DOORS)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command ran with which two ways begin, and what it said."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "said").write_text(_run(BEGIN, folder))
    return folder


@pytest.fixture(scope="module")
def walk(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Go a way: the folder in which its commands ran, and what they said."""

    @functools.cache
    def gone(door: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(door)
        commands = "\n".join(blocks((ROOT / "docs" / "doors" / f"{door}.md").read_text(encoding="utf-8")))
        if BEGIN in commands:
            shutil.copytree(begun / WORKSPACE, folder / WORKSPACE)
            commands = commands.replace(BEGIN, f"cat {begun / 'said'}")
        assert commands
        return folder, _run(commands, folder)

    return gone


def _run(commands: str, folder: Path) -> str:
    (folder / "jobs").symlink_to(ROOT / "jobs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    values = forking.environment(os.environ | {"PATH": path})
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{commands}"],
        cwd=folder,
        env=values,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.whole
@pytest.mark.parametrize("door", DOORS)
def test_its_commands_do_what_they_promise(door: str, walk: Callable[[str], tuple[Path, str]]) -> None:
    (_, said), place = walk(door), 0
    for words in DOORS[door]:
        assert (place := said.find(words, place)) >= 0, (words, said[-3000:])


@pytest.mark.whole
def test_the_changed_job_is_that_of_one_process_to_the_bit(
    walk: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    """Personal models among it; other jobs through the engine: ``tests/engine/test_jobs.py``."""
    folder, _ = walk("data-scientist")
    server = folder / WORKSPACE / "server" / "simulate_job"
    assert_equal(server, run_alone(folder / "exported" / "heart", tmp_path))
    assert json.loads((server / "outcome.json").read_text())["personal"] is not None
    for place in range(1, 5):
        ours = folder / WORKSPACE / f"site-{place}" / "simulate_job" / "personal_model.safetensors"
        assert ours.read_bytes() == (tmp_path / f"site-{place}" / ours.name).read_bytes()
