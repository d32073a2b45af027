"""``tightframe data prepare`` as people type it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from tightframe.data.isic import TEST_COUNTS, TRAIN_COUNTS, IsicOptions, IsicSite, prepare
from tightframe.data.isic.folder import IMAGES, SPLIT, FolderData
from tightframe.errors import DataError
from tightframe_app.data import commands as data
from tightframe_app.data.commands import INTERRUPTED, app

CENTER = 5


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def isic(download: Path, output: Path, *more: str) -> Result:
    return command("isic2019", "-i", download, "--split", download / SPLIT, "-o", output, *more)


@pytest.fixture(scope="module")
def download(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many images as centre 5 really has, made and tiny, and a split file that is right for it."""
    folder = tmp_path_factory.mktemp("down[load]")
    (folder / prepare.ORIGINALS).mkdir()
    rows: list[tuple[str, int, int, str]] = []
    for fold, counts in (("train", TRAIN_COUNTS), ("test", TEST_COUNTS)):
        for label, count in enumerate(counts[CENTER]):
            rows += [(f"ISIC_{len(rows) + index:07d}", label, CENTER, fold) for index in range(count)]
    pixels = np.random.default_rng(0).integers(0, 200, (12, 12, 3), dtype=np.uint8)
    for name, *_ in rows:
        Image.fromarray(pixels).save(folder / prepare.ORIGINALS / f"{name}.jpg")
    with (folder / SPLIT).open("w", newline="") as stream:
        csv.writer(stream).writerows([("image", "target", "center", "fold"), *rows])
    return folder


@pytest.fixture(scope="module")
def complete(download: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A whole centre, prepared."""
    output = tmp_path_factory.mktemp("prepared")
    return isic(download, output, "--center", str(CENTER), "-w", "1"), output


def test_a_complete_centre_ends_well_and_says_how_to_go_on(complete: tuple[Result, Path]) -> None:
    done, output = complete
    assert done.exit_code == 0, done.output
    assert "images: 439 of 439 (written now 439, done before 0, missing 0, broken 0)" in done.output
    assert "*" not in done.output and "incomplete" not in done.output
    assert "5       test   9    74" in done.output
    manifest = output / prepare.MANIFEST
    assert f"SHA-256 {hashlib.sha256(manifest.read_bytes()).hexdigest()}" in done.output
    site = json.loads(done.output.splitlines()[-1].partition("centre): ")[2])
    assert site == {"data": {"fed_isic2019": {"root": str(output.resolve()), "center": CENTER}}}


def test_the_reader_takes_what_was_prepared(complete: tuple[Result, Path]) -> None:
    _, output = complete
    data = FolderData(
        IsicSite.model_validate({"root": str(output), "center": CENTER}), IsicOptions(image_size=32)
    )
    data.check()
    assert len(data.labels("train")) + len(data.labels("validation")) == sum(TRAIN_COUNTS[CENTER])
    assert np.bincount(data.labels("test"), minlength=8).tolist() == list(TEST_COUNTS[CENTER])


def test_a_second_run_makes_nothing(download: Path, complete: tuple[Result, Path]) -> None:
    _, output = complete
    done = isic(download, output, "--center", str(CENTER), "-w", "1")
    assert done.exit_code == 0
    assert "(written now 0, done before 439, missing 0, broken 0)" in done.output


def test_faults_are_named_counted_and_end_with_1(download: Path, tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    originals.mkdir()
    for index in range(20):
        name = f"ISIC_{index:07d}.jpg"
        (originals / name).write_bytes((download / prepare.ORIGINALS / name).read_bytes())
    (originals / "ISIC_0000003.jpg").write_text("[broken]")
    where = ("-i", originals, "--split", download / SPLIT, "-o", tmp_path / "out")
    done = command("isic2019", *where, "-w", "1", "--center", "5")
    assert done.exit_code == 1
    assert "images: 19 of 439 (written now 19, done before 0, missing 419, broken 1)" in done.output
    assert "19*" in done.output and "* differs from FLamby's number" in done.output
    assert "ISIC_0000003: cannot identify image file" in done.output
    assert "incomplete: TF-206: images cannot be read: 1 (ISIC_0000003)" in done.output
    assert "incomplete: TF-205: images are missing: 419 (ISIC_0000020, " in done.output
    assert "TF-204" not in done.output, "the split file is right for this centre"
    report = json.loads((tmp_path / "out" / prepare.REPORT).read_text())
    assert len(report["missing"]) == 419 and list(report["broken"]) == ["ISIC_0000003"]
    assert len(list((tmp_path / "out" / IMAGES).iterdir())) == 19


def test_a_split_file_for_fewer_images_is_not_flambys(download: Path, complete: tuple[Result, Path]) -> None:
    done = isic(download, complete[1], "-w", "1")  # all six centres
    assert done.exit_code == 1
    assert "it has 439 images instead of 23247" in done.output
    assert "centre 0 train MEL: 0 instead of 2279" in done.output
    assert "images: 439 of 23247" in done.output


def test_what_cannot_begin_is_a_named_error(download: Path, tmp_path: Path) -> None:
    done = command("isic2019", "-i", tmp_path, "--split", download / SPLIT, "-o", tmp_path / "out")
    assert isinstance(done.exception, DataError) and done.exception.code == "TF-203"
    done = command("isic2019", "-i", download, "--split", tmp_path / "none", "-o", tmp_path / "out")
    assert isinstance(done.exception, DataError) and done.exception.code == "TF-204"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [["--center", "6"], ["--center", "-1"], ["--workers", "0"]])
def test_wrong_options_are_refused(download: Path, tmp_path: Path, wrong: list[str]) -> None:
    done = isic(download, tmp_path / "out", *wrong)
    assert done.exit_code == 2 and wrong[0] in done.output


def test_an_interruption_says_that_it_can_go_on(
    download: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: Any, advance: Callable[[int, int], None], **_options: Any) -> None:
        advance(1, 439)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare", interrupted)
    done = isic(download, tmp_path / "out")
    assert done.exit_code == INTERRUPTED
    assert "the same command continues" in done.output


# eICU


def test_the_demos_tables_become_matrices(real_data: Path, tmp_path: Path) -> None:
    output = tmp_path / "eicu"
    done = command("eicu", "-t", real_data / "eicu_demo", "-o", output, "--window", "48h")
    assert done.exit_code == 0, done.output
    assert "48h: written; stays 1555, drugs 920, deaths 136, hospitals 144" in done.output
    site = json.loads(done.output.splitlines()[-1].partition("region): ")[2])
    assert site["data"]["eicu"]["root"] == str(output.resolve())
    before = {path: path.read_bytes() for path in output.iterdir()}
    again = command("eicu", "-t", real_data / "eicu_demo", "-o", output, "--window", "48h")
    assert again.exit_code == 0 and "48h: existed, verified" in again.output
    assert {path: path.read_bytes() for path in output.iterdir()} == before


def test_tables_that_are_not_there(tmp_path: Path) -> None:
    done = command("eicu", "-t", tmp_path, "-o", tmp_path / "out")
    assert isinstance(done.exception, DataError) and done.exception.code == "TF-205"
    assert "medication" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_an_unknown_window_is_refused(tmp_path: Path) -> None:
    done = command("eicu", "-t", tmp_path, "-o", tmp_path / "out", "--window", "24h")
    assert done.exit_code == 2 and "48h" in done.output


# The whole command


def test_it_is_part_of_the_command_and_errors_end_with_2(tmp_path: Path) -> None:
    line = ["-c", "from tightframe_app.cli import main; main()", "data", "prepare", "eicu"]
    done = subprocess.run(
        [sys.executable, *line, "-t", str(tmp_path / "none"), "-o", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "TF-203" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_leaves_nothing_behind(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it is wiped; elsewhere it is plain lines, without what moves a cursor."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, highlight=False, markup=False)
    monkeypatch.setattr(data, "err", console)
    with data._spinner("tables") as tell:
        tell("reading [patient]")
        tell("writing")
    with data._bar("images") as advance:
        for done in range(101):
            advance(done, 100)
    left = stream.getvalue()
    if terminal:
        assert left.endswith("\x1b[2K"), "the last thing done is to erase the line"
    else:
        tenths = [f"images: {10 * tenth} of 100" for tenth in range(11)]
        assert left.splitlines() == ["reading [patient]", "writing", *tenths]
