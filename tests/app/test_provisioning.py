"""`tightframe provisioning show`: the files of `provisioning/`, from a checkout and from a wheel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support import ROOT
from typer.testing import CliRunner

from tightframe_app import provisioning
from tightframe_app.cli import app

FILES = {str(p.relative_to(ROOT / "provisioning")) for p in (ROOT / "provisioning").rglob("*") if p.is_file()}


@pytest.fixture(params=["checkout", "wheel"])
def _installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "wheel":
        place = tmp_path / "package" / "provisioning_files"
        shutil.copytree(ROOT / "provisioning", place)
        monkeypatch.setattr(provisioning, "PLACES", (place, tmp_path / "none"))


@pytest.mark.usefixtures("_installed")
def test_files_are_listed_printed_and_written_as_they_are(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["provisioning", "show"])
    assert set(listed.output.split()) == FILES
    printed = CliRunner().invoke(app, ["provisioning", "show", "local/privacy.json"])
    assert printed.stdout_bytes == (ROOT / "provisioning" / "local" / "privacy.json").read_bytes()
    done = CliRunner().invoke(app, ["provisioning", "show", "monitoring/", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    written = {p.name: p.read_bytes() for p in (tmp_path / "out" / "monitoring").iterdir()}
    assert written == {p.name: p.read_bytes() for p in (ROOT / "provisioning" / "monitoring").iterdir()}


def test_a_policy_is_explained_rule_by_rule() -> None:
    done = CliRunner().invoke(app, ["provisioning", "show", "policies/strict.json", "--explain"])
    said = " ".join(done.output.split())
    assert "required_privacy: true refuse jobs without differential privacy." in said
    rules = json.loads((ROOT / "provisioning" / "policies" / "strict.json").read_text())
    assert [line.partition(":")[0] for line in done.output.splitlines() if line[0] != " "] == list(rules)
    refused = CliRunner().invoke(app, ["provisioning", "show", "local/privacy.json", "--explain"])
    assert refused.exit_code == 2


def test_nothing_is_replaced_and_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "strict.json").write_text("mine")
    done = CliRunner().invoke(app, ["provisioning", "show", "policies", "-o", str(tmp_path)])
    assert isinstance(done.exception, FileExistsError) and "strict.json" in str(done.exception)
    assert [p.name for p in (tmp_path / "policies").iterdir()] == ["strict.json"]
    assert (tmp_path / "policies" / "strict.json").read_text() == "mine"


@pytest.mark.parametrize("name", ["locale", "../README.md", "/etc/passwd", "local/privac"])
def test_another_name_is_refused(name: str) -> None:
    done = CliRunner().invoke(app, ["provisioning", "show", name])
    assert done.exit_code == 2 and "privacy" not in done.stdout


def test_an_installation_without_them_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provisioning, "PLACES", (tmp_path, tmp_path))
    with pytest.raises(FileNotFoundError, match="reinstall the wheel"):
        provisioning.folder()
