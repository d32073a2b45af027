"""What the guide says to one who tries everything on one machine: its commands, all but the engine's."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.app.federation.test_commands import DATES, PROJECT, make_kit
from tests.support import ROOT
from tests.support.production.guides import ONE_MACHINE, Guide
from tests.support.securesum.certificates import issue
from typer.testing import CliRunner, Result

from tightframe.data.image_sets import open_silos
from tightframe_app.cli import app

SITES = ("hospital-1", "hospital-2", "hospital-3")


def run(line: str, code: int = 0) -> Result:
    program, *words = shlex.split(line)
    done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert program == "tightframe" and done.exit_code == code, f"{line}\n{done.output}{done.exception}"
    return done


@pytest.mark.whole
def test_three_hospitals_of_digits_accept_the_guides_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_site, export = Guide(ROOT / "docs" / "operations.md").commands(ONE_MACHINE, {})
    run(export)
    options = json.loads(re.findall(r"dataset_options=(\{.*?\})", export)[0])
    assert "job: valid" in run("tightframe jobs check job").output
    run("tightframe jobs export fedmr_isic --sites hospital-1,hospital-2,hospital-3 -o images")
    silos = open_silos("digits", **options)
    for number, name in enumerate(SITES):
        make_kit(Path("kits/consortium/prod_00") / name, issue(PROJECT, name, **DATES))
        run(add_site.replace("hospital-1", name).replace('"silo": 0', f'"silo": {number}'))
        check = f"tightframe site check -c kits/consortium/prod_00/{name}/local/tightframe.json --production"
        told = run(f"{check} --job job").output
        mine = silos[f"silo-{number}"]
        assert "no problem was found" in told and f"{len(mine.labels('train'))} train" in told, told
        assert Path(f"state-{name}").stat().st_mode & 0o777 == 0o700
        assert "problem" in run(f"{check} --job images", code=1).output, "of a data set that it does not have"


def test_what_the_guide_says_to_install_brings_the_digits() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    (extra,) = re.findall(r"`pip install -q -c constraints.txt '\.\[(\w+)\]'`", guide)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(item.startswith("scikit-learn") for item in project["optional-dependencies"][extra])
