"""The guide to pictures of one's own: its files are valid, and its commands lead from JPEGs to answers."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest
from tests.support import ROOT
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import parse_site_file
from tightframe.data.images import ImagesSite
from tightframe.data.images.contract import Augment, Picture, PictureContract
from tightframe_app.cli import app
from tightframe_app.jobs.folders import read_job

PAGE = (ROOT / "docs" / "own-pictures.md").read_text(encoding="utf-8")
HAM = Path(os.environ.get("TIGHTFRAME_TEST_DATA", ROOT.parent / "shared" / "data")) / "fed_isic_ham"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_its_contract_is_valid_and_it_names_every_key() -> None:
    (text,) = blocks("json")
    made = PictureContract.model_validate(json.loads(text))
    assert made.picture.shape == (3, 64, 64)
    for model in (Picture, Augment, ImagesSite):
        for name in model.model_fields:
            if name not in ("units", "decimal"):  # refused for pictures
                assert f"`{name}`" in PAGE, name


@pytest.mark.whole
@pytest.mark.skipif(not HAM.is_dir(), reason="no pictures: set TIGHTFRAME_TEST_DATA")
def test_its_commands_lead_from_dicom_files_at_four_sites_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each class at each site every fifth picture, for tests every third;
    the simulation in one process, its sums secure.
    """
    monkeypatch.chdir(tmp_path)
    images = "ISIC_2019_Training_Input_preprocessed"
    Path("ham").mkdir()
    Path("ham", images).symlink_to(HAM / images)
    split = (HAM / "train_test_split").read_text().splitlines()
    groups: dict[tuple[str, ...], list[str]] = {}
    for line in split[1:]:
        if (HAM / images / f"{line.partition(',')[0]}.jpg").is_file():
            groups.setdefault(tuple(line.split(",")[-4:-1]), []).append(line)  # class, site, fold
    few = [line for group, lines in groups.items() for line in lines[:: 3 if group[-1] == "test" else 5]]
    Path("ham", "train_test_split").write_text("\n".join([split[0], *few]) + "\n")
    assert "`python docs/ham_as_dicom.py`" in PAGE
    runpy.run_path(str(ROOT / "docs" / "ham_as_dicom.py"))
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert [line.split()[1] for line in commands] == [
        *("data", "data", "data", "jobs", "site", "simulate", "predict"),
    ]
    for line in commands:
        if line.split()[1] == "simulate":
            job = parse_job(read_job(Path(shlex.split(line)[2])))
            entries = parse_site_file(json.loads(Path("sites.json").read_text())).sites
            result = federation.run_job(job, entries=entries, folder=Path("simulator_workspace"))
            continue
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}{done.exception}"
    assert Path("described.html").is_file() and Path("contract.notes.md").is_file()
    assert json.loads(Path("contract.json").read_text())["picture"]["modality"] == "XC"
    assert job.summation == "secure" and result.outcome.trained and not result.outcome.synthetic
    test = result.outcome.final().test
    assert test.records is not None and test.records > 100
    assert test.balanced_accuracy is not None and test.balanced_accuracy > 0.2, "eight classes"
    with Path("answers.csv").open(newline="") as stream:
        answers = {Path(row["input"]).stem: row["answer"] for row in csv.DictReader(stream)}
    with Path("site-1", "manifest.csv").open(newline="") as stream:
        truth = {row["image"]: row["diagnosis"] for row in csv.DictReader(stream)}
    assert answers.keys() == truth.keys()
    assert sum(answers[name] == truth[name] for name in truth) / len(truth) > 0.3
