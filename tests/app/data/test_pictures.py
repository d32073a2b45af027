"""``tightframe data`` and ``jobs export`` with pictures, as people type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from tests.support.pictures import SKIN, contract, noise, options, write_dicom, write_manifest, write_skin
from typer.testing import CliRunner, Result

from tightframe import data, models
from tightframe.data.images.contract import PictureContract
from tightframe.data.images.proposal import propose
from tightframe_app.cli import app
from tightframe_app.jobs.folders import read_job
from tightframe_app.jobs.pairs import pair_with_contract


def typed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(part) for part in arguments])


def told(result: Result) -> str:
    return " ".join((result.output + str(result.exception or "")).split())


def entry_of(result: Result) -> dict[str, Any]:
    (line,) = [line for line in result.output.splitlines() if line.startswith('{"data"')]
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_proposal_is_a_contract_that_its_own_pictures_keep(tmp_path: Path) -> None:
    folder, output, config = tmp_path / "in", tmp_path / "contract.json", tmp_path / "site.json"
    write_skin(folder, side=50)
    roles = ["--label", "diagnosis", "--record", "id", "--patient", "who"]
    done = typed("data", "init", folder / "manifest.csv", "--picture", "file", *roles, "-o", output)
    assert done.exit_code == 0, told(done)
    made = PictureContract.model_validate(json.loads(output.read_text()))
    assert made.picture.size == (48, 48) and made.picture.colour == "rgb" and made.patient == "who"
    assert "nothing is mirrored" in (tmp_path / "contract.notes.md").read_text()
    config.write_text(json.dumps(entry_of(done)))
    checked = typed("data", "check", "--contract", output, "-s", config)
    assert checked.exit_code == 0 and "40 rows" in checked.output, told(checked)
    page = tmp_path / "page.html"
    described = typed("data", "describe", "--contract", output, "-s", config, "-o", page)
    assert described.exit_code == 0, told(described)
    red = np.mean(
        [np.asarray(Image.open(folder / f"{place}.png"))[1:-1, 1:-1, 0].mean() for place in range(40)]
    )
    (line,) = [line.split() for line in described.output.splitlines() if line.startswith("red")]
    assert abs(float(line[2]) - red) < 2
    assert "Private to this site" in page.read_text() and page.stat().st_mode & 0o077 == 0
    (folder / "3.png").write_bytes(b"broken")
    checked = typed("data", "check", "--contract", output, "-s", config)
    assert checked.exit_code == 1 and "another kind of file" in told(checked) and "(5)" in told(checked)


def test_a_proposal_from_folders_and_of_dicom_and_volumes(tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    for place in range(12):
        folder = folders / "ab"[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        write_dicom(folder / f"{place}", noise((40, 36), place), Modality="DX")
    done = typed("data", "init", folders, "-o", tmp_path / "a.json")
    assert done.exit_code == 0, told(done)
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["picture"]["modality"] == "DX" and made["picture"]["colour"] == "gray"
    assert made["picture"]["size"] == [32, 32] and entry_of(done)["data"]["images"]["layout"] == "folders"
    assert typed("data", "init", folders, "--label", "x", "-o", tmp_path / "b.json").exit_code != 0
    (tmp_path / "site.json").write_text(json.dumps(entry_of(done)))
    (folders / "b" / "3").write_bytes(b"broken")
    checked = typed("data", "check", "--contract", tmp_path / "a.json", "-s", tmp_path / "site.json")
    assert "row 9 is b/3" in told(checked), "a folder has no lines to look up"
    rows = []
    for place in range(6):
        cube = np.random.default_rng(place).normal(0, 100, (20, 34, 50)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(cube, np.eye(4)), tmp_path / f"{place}.nii")
        rows.append([f"{place}", f"{place}", f"{place}.nii", ("NV", "MEL")[place % 2]])
    write_manifest(tmp_path, rows)
    proposed = propose(tmp_path / "manifest.csv", {"label": "diagnosis", "record": "id"}, "file").contract
    assert proposed["picture"]["size"] == [48, 32, 16] and proposed["picture"]["fit"] == "stretch"
    assert proposed["picture"]["window"]["low"] < -200 and proposed["picture"]["window"]["high"] > 200
    wrong = typed("data", "init", tmp_path / "manifest.csv", "--picture", "id", "--label", "diagnosis")
    assert wrong.exit_code != 0 and "TF-206" in told(wrong)


@pytest.mark.parametrize("method", ["fedavg", "fed3r"])
@pytest.mark.parametrize(
    "picture",
    [
        {"size": [32, 32]},
        {"size": [48, 64], "colour": "gray"},
        {"size": [32, 32, 32], "colour": "gray", "window": {"low": 0, "high": 1}},
    ],
)
def test_a_job_of_any_contract_has_a_model_that_takes_its_pictures(
    method: str, picture: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(contract(picture)))
    for preset in ("rehearsal", "full"):
        job = pair_with_contract(method, path).job(preset)
        assert job.dataset == "images" and job.dataset_options == {"contract": contract(picture)}
        spec = models.get(str(job.model))
        shape = options(contract(picture)).contract.picture.shape
        spec.build(spec.options.model_validate(job.model_options), shape, 2)
    twin = data.get("images").twin
    assert twin is not None
    records: Any = twin(0, options(contract(picture))).records("train")
    assert tuple(records[0][0].shape) == shape


def test_export_and_site_check_of_a_job_with_pictures(tmp_path: Path) -> None:
    """One site with a table and pictures: each job opens its own."""
    path, config, job = tmp_path / "contract.json", tmp_path / "sites.json", tmp_path / "job"
    path.write_text(json.dumps(SKIN))
    folder = tmp_path / "in"
    write_skin(folder)
    images = {"root": str(folder), "file": str(folder / "manifest.csv")}
    entries = {"data": {"images": images, "table": {"file": str(folder / "manifest.csv")}}}
    config.write_text(json.dumps({"sites": {"a": entries}}))
    words = ["--contract", path, "--sites", "a,b,c", "-o", job]
    done = typed("jobs", "export", "--method", "fed3r", *words)
    assert done.exit_code == 0, told(done)
    assert read_job(job)["dataset"] == "images"
    checked = typed("site", "check", "--config", config, "--job", job, "--verbose")
    assert "images: Skin" in told(checked) and "all read" in told(checked), told(checked)
    assert "table: not opened" in told(checked)
    (folder / "3.png").unlink()
    broken = typed("site", "check", "--config", config, "--job", job, "--verbose")
    assert broken.exit_code == 1 and "TF-215" in told(broken) and "no such file: 1 row (5)" in told(broken)


def test_a_contract_of_both_kinds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(
        json.dumps({**SKIN, "columns": [{"column": "age", "kind": "number", "low": 0, "high": 1}]})
    )
    done = typed("jobs", "export", "--method", "fedavg", "--contract", path, "-o", tmp_path / "job")
    assert done.exit_code != 0 and "TF-101" in told(done) and "columns" in told(done)


def test_statistics_are_of_tables_only(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(contract()))
    done = typed("jobs", "export", "--statistics", tmp_path / "c.json", "-o", tmp_path / "job")
    assert done.exit_code != 0 and "statistics are of tables only" in told(done)
