"""The four ways into the guides: their commands lead from nothing to what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.support import ROOT

DOORS = {
    "data-scientist": ["TRAINED: fedncm_heart", "FedETF", "TRAINED: fedetf_heart"],
    "hospital-it": ["systemd/tightframe-site.service", "minimum_cohort"],
    "data-protection": ["minimum_cohort"],
    "researcher": ["FedMR", "TRAINED: fedncm_heart", "verified"],
}
"""What each says, in this order."""


def blocks(page: str) -> list[str]:
    """Return the commands, without those that install."""
    found = re.findall(r"^ *```sh\n(.*?)^ *```$", page, flags=re.M | re.S)
    return [textwrap.dedent(block) for block in found if "pip install" not in block]


def test_every_way_is_tried() -> None:
    assert {path.stem for path in (ROOT / "docs" / "doors").glob("*.md")} == set(DOORS)


@pytest.mark.whole
@pytest.mark.parametrize("door", DOORS)
def test_its_commands_do_what_they_promise(door: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    commands = blocks((ROOT / "docs" / "doors" / f"{door}.md").read_text(encoding="utf-8"))
    assert commands
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "set -euo pipefail\n" + "\n".join(commands)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    said, place = done.stdout + done.stderr, 0
    assert done.returncode == 0, said[-3000:]
    for words in DOORS[door]:
        assert (place := done.stdout.find(words, place)) >= 0, (words, said[-3000:])
