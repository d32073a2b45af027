"""``tightframe site model``: who accepted which given model."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest
from tests.support.outputs import checked
from typer.testing import CliRunner, Result

from tightframe.config.site import site_entry
from tightframe_app.cli import app

SOURCE = "torchvision, whose page has the SHA-256"


def typed(*arguments: object, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["site", "model", *map(str, arguments)], input=answer)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tightframe.json"
    path.write_text(json.dumps({"state_dir": "/x", "policy": {"profile": "strict"}}))
    path.chmod(0o640)
    return path


def test_a_person_accepts_a_file_whose_hash_is_taken_here(config: Path, tmp_path: Path) -> None:
    model = tmp_path / "start.safetensors"
    model.write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    given = ("accept", "-c", config, "--file", model, "--source", SOURCE, "--by", "A. Muster")
    before = config.read_bytes()
    refused = typed(*given, answer="n\n")
    assert refused.exit_code == 1 and config.read_bytes() == before
    assert sha256 in refused.output and "shows single patients' records" in refused.output
    done = typed(*given, answer="y\n")
    assert done.exit_code == 0, done.output
    entry = site_entry(tmp_path, "hospital-1", production=True)
    assert entry is not None and list(entry.accepted_models) == [sha256] and entry.state_dir == "/x"
    note = entry.accepted_models[sha256]
    assert note.startswith(f"{SOURCE}; accepted by A. Muster on 20")
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    assert f"{sha256}  {note}" in typed("show", "-c", config).output
    told = checked("site model show", typed("show", "-c", config, "--format", "json").output)
    assert told["given_models"] == "accepted" and told["models"] == [{"sha256": sha256, "note": note}]
    assert "accepted already" in typed(*given).output


def test_one_hash_and_one_site_are_named(config: Path) -> None:
    given = ("accept", "-c", config, "--source", SOURCE, "--yes")
    for wrong, said in (((), "the model's file or its SHA-256"), (("--sha256", "12"), "accepted_models")):
        failed = typed(*given, *wrong)
        assert failed.exit_code and said in f"{failed.output}{failed.exception}"
    config.write_text(json.dumps({"sites": {"a": {}, "b": {"loader_workers": 2}}}))
    failed = typed(*given, "--sha256", "A" * 64)
    assert failed.exit_code and "name one of the sites" in f"{failed.output}{failed.exception}"
    assert typed(*given, "--sha256", "A" * 64, "--site", "b").exit_code == 0
    sites = json.loads(config.read_text())["sites"]
    assert (
        sites["a"] == {} and sites["b"]["loader_workers"] == 2 and "a" * 64 in sites["b"]["accepted_models"]
    )
