"""ISIC 2019's originals become FLamby's preprocessed images, whatever happens on the way."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tightframe.data.isic.folder import IMAGES, SPLIT
from tightframe.data.isic.prepare import (
    MANIFEST,
    ORIGINALS,
    REPORT,
    Report,
    colour_constancy,
    prepare,
    preprocess,
)
from tightframe.errors import DataError

Pixels = NDArray[np.uint8]
NAMES = [f"ISIC_{index:07d}" for index in range(8)]


def shades_of_grey(pixels: Pixels) -> NDArray[np.float64]:
    """Finlayson and Trezzi 2004: the light is the Minkowski mean, and von Kries' diagonal removes it."""
    values = pixels.astype(np.float64)
    light = np.mean(values**6, axis=(0, 1)) ** (1 / 6)
    return values / (np.sqrt(3) * light / np.linalg.norm(light))


def clipped(values: NDArray[np.float64]) -> Pixels:
    """As the file holds it: fractions cut off, 255 at the most."""
    return np.clip(np.floor(values), 0, 255).astype(np.uint8)


def noise(seed: int, width: int, height: int, cast: tuple[float, float, float] = (0.9, 0.6, 0.5)) -> Pixels:
    """Noise under a coloured light."""
    values = np.random.default_rng(seed).random((height, width, 3))
    return (255 * values * np.array(cast)).astype(np.uint8)


@pytest.mark.parametrize("seed", range(5))
def test_colour_constancy_is_the_formula_of_the_paper(seed: int) -> None:
    cast = np.random.default_rng(seed).uniform(0.1, 1.0, 3)
    pixels = noise(seed, 61, 37, tuple(cast))
    expected = shades_of_grey(pixels)
    image, wrapped = colour_constancy(Image.fromarray(pixels))
    assert np.array_equal(np.asarray(image), clipped(expected))
    assert wrapped == (expected >= 256).sum()


def test_values_are_clipped_where_a_cast_would_wrap_them() -> None:
    pixels = np.full((40, 40, 3), (200, 100, 100), dtype=np.uint8)
    pixels[0, 0] = (200, 240, 100)
    expected = shades_of_grey(pixels)
    assert expected[0, 0, 1] > 256 and expected[0, 0, 1] % 256 < 128, "a wrapped value would be dark"
    image, wrapped = colour_constancy(Image.fromarray(pixels))
    assert wrapped == 1
    assert image.getpixel((0, 0)) == (int(expected[0, 0, 0]), 255, int(expected[0, 0, 2]))


def test_grey_and_black_images_stay_as_they_are() -> None:
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    for pixels in (ramp, np.zeros((3, 5, 3), dtype=np.uint8)):
        image, wrapped = colour_constancy(Image.fromarray(pixels))
        assert np.array_equal(np.asarray(image), pixels)
        assert wrapped == 0


def test_a_channel_without_light_stays_dark() -> None:
    image, _ = colour_constancy(Image.new("RGB", (4, 4), (180, 0, 0)))
    assert image.getpixel((0, 0)) == (int(180 / np.sqrt(3)), 0, 0)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((600, 450), (298, 224)),
        ((450, 600), (224, 298)),
        ((1024, 1024), (224, 224)),
        ((1022, 767), (298, 224)),
        ((100, 90), (248, 224)),
    ],
)
def test_the_shorter_side_is_224_and_the_aspect_kept(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    image, _ = preprocess(Image.new("RGB", size, (9, 9, 9)))
    assert image.size == expected
    assert min(image.size) == 224 and 0 <= max(size) * 224 / min(size) - max(image.size) < 1


def test_resizing_is_bilinear_with_antialiasing() -> None:
    """PyTorch's own, on a grey image, whose colours do not change."""
    grey = np.random.default_rng(3).integers(0, 256, (450, 600), dtype=np.uint8)
    image, _ = preprocess(Image.fromarray(grey).convert("RGB"))
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(grey)[None, None].float(), (224, 298), mode="bilinear", antialias=True
    )
    difference = np.asarray(image)[..., 0].astype(float) - expected[0, 0].numpy()
    assert np.abs(difference).max() < 1.01


def test_real_images_under_the_formula(real_data: Path) -> None:
    paths = sorted((real_data / "fed_isic_ham" / IMAGES).iterdir())[::40]
    assert len(paths) == 32
    before, after, wrapped = [], [], 0
    for path in paths:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        expected = shades_of_grey(pixels)
        corrected, count = colour_constancy(Image.fromarray(pixels))
        assert np.array_equal(np.asarray(corrected), clipped(expected)), path.name
        wrapped += count > 0
        for values, spread in ((pixels, before), (np.asarray(corrected), after)):
            light = np.mean(values.astype(float) ** 6, axis=(0, 1)) ** (1 / 6)
            spread.append(light.max() / light.min())
    assert 0 < wrapped < len(paths), "clipping matters for some real images, and only for some"
    assert min(before) > 1.05 > 1.02 > max(after), "their light is coloured before and white after"


# Whole runs


def save(path: Path, pixels: Pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "JPEG", quality=90)


def write_split(path: Path, rows: list[tuple[str, int, int, str]]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("image", "target", "center", "fold"), *rows])


ROWS = [
    (name, index % 4, 3 if index < 6 else 1, "train" if index % 3 else "test")
    for index, name in enumerate(NAMES)
]


@pytest.fixture
def download(tmp_path: Path) -> Path:
    """A made download: eight originals, six of centre 3 and two of centre 1, one more, and the split file."""
    folder = tmp_path / "download"
    for index, name in enumerate([*NAMES, "ISIC_9999999_downsampled"]):
        save(folder / ORIGINALS / f"{name}.jpg", noise(index, 70 + index, 50))
    write_split(folder / SPLIT, ROWS)
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


@pytest.fixture
def again(download: Path, output: Path) -> Callable[..., Report]:
    """Run the preparation, the first time and every other time."""
    return lambda **how: prepare(download, download / SPLIT, output, **how)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_image_is_what_flamby_would_have_saved(
    again: Callable[..., Report], download: Path, output: Path
) -> None:
    report = again()
    assert (report.made, report.kept, report.missing, report.broken) == (8, 0, (), {})
    assert report.ignored == ("ISIC_9999999_downsampled",)
    assert sorted(path.stem for path in (output / IMAGES).iterdir()) == NAMES
    for name in NAMES:
        with Image.open(download / ORIGINALS / f"{name}.jpg") as image:
            width = image.width * 224 // image.height
            resized = image.resize((width, 224), Image.Resampling.BILINEAR)
        stream = io.BytesIO()
        Image.fromarray(clipped(shades_of_grey(np.asarray(resized)))).save(stream, "JPEG")
        assert (output / IMAGES / f"{name}.jpg").read_bytes() == stream.getvalue()
    assert (output / SPLIT).read_bytes() == (download / SPLIT).read_bytes()


def test_counts_are_told_by_fold_centre_and_class(again: Callable[..., Report], output: Path) -> None:
    report = again()
    for name, label, center, fold in ROWS:
        same = [row for row in ROWS if row[1:] == (label, center, fold)]
        assert report.prepared[int(fold == "test"), center, label] == len(same), name
    assert report.prepared.sum() == 8
    assert "centre 3 train NV: 2 instead of 649" in report.differences
    assert "centre 4 test BKL: 0 instead of 49" in report.differences
    assert not any("centre 1 train SCC" in text for text in report.differences), "0 is FLamby's number, too"
    assert any("TF-204" in text and "8 images instead of 23247" in text for text in report.problems)
    written = json.loads((output / REPORT).read_text())
    assert written["ignored"] == ["ISIC_9999999_downsampled"] and written["problems"] == report.problems
    made = [path for path in output.rglob("*") if path.is_file()]
    assert len(made) > 8 and {path.stat().st_mode & 0o777 for path in made} == {0o600}, "they are records"


def test_one_centre_alone(again: Callable[..., Report], output: Path) -> None:
    report = again(center=1)
    assert (report.rows, report.made, report.centers) == (2, 2, (1,))
    assert sorted(path.stem for path in (output / IMAGES).iterdir()) == NAMES[6:]
    assert "2 images instead of 3954" in report.problems[0]
    assert not any("centre 3" in text for text in report.differences)
    other = again(center=3)
    assert (other.made, other.kept, other.strangers) == (6, 0, ()), "the first centre's are vouched for"


def test_missing_originals_do_not_stop_the_others(again: Callable[..., Report], download: Path) -> None:
    for name in NAMES[2:4]:
        (download / ORIGINALS / f"{name}.jpg").unlink()
    report = again()
    assert (report.made, report.missing) == (6, tuple(NAMES[2:4]))
    assert any(f"TF-205: images are missing: 2 ({NAMES[2]}, {NAMES[3]})" in text for text in report.problems)


def harm(folder: Path) -> dict[str, str]:
    """Break four originals, each in a way of its own; what is said of each."""
    cut, text, other, empty = (folder / f"{name}.jpg" for name in NAMES[:4])
    cut.write_bytes(cut.read_bytes()[:-300])
    text.write_text("not an image")
    Image.new("RGB", (60, 50)).save(other, "PNG")
    empty.write_bytes(b"")
    said = ("truncated", "cannot identify", "cannot identify", "cannot identify")
    return dict(zip(NAMES[:4], said, strict=True))


def test_broken_originals_are_named_and_the_others_done(
    again: Callable[..., Report], download: Path, output: Path
) -> None:
    whole = files(download)
    said = harm(download / ORIGINALS)
    report = again()
    assert report.made == 4 and report.broken.keys() == said.keys()
    for name, words in said.items():
        assert words in report.broken[name]
        assert not (output / IMAGES / f"{name}.jpg").exists()
    assert any(text.startswith(f"TF-206: images cannot be read: 4 ({NAMES[0]},") for text in report.problems)
    for name, data in whole.items():
        (download / name).write_bytes(data)
    mended = again()
    assert (mended.made, mended.kept, mended.broken) == (4, 4, {})


def test_an_image_that_no_jpeg_can_hold_is_broken_and_stops_no_other(
    again: Callable[..., Report], download: Path
) -> None:
    save(download / ORIGINALS / f"{NAMES[0]}.jpg", np.full((1, 300, 3), 90, np.uint8))  # 224 x 67,200
    report = again()
    assert (report.made, list(report.broken)) == (7, [NAMES[0]])
    assert report.broken[NAMES[0]]


def test_an_image_whose_original_broke_later_is_vouched_for_no_longer(
    again: Callable[..., Report], download: Path
) -> None:
    again()
    harm(download / ORIGINALS)
    report = again()
    assert (report.kept, len(report.broken)) == (4, 4)
    assert report.strangers == tuple(f"{name}.jpg" for name in NAMES[:4])


def test_the_originals_are_only_read(again: Callable[..., Report], download: Path) -> None:
    before = files(download)
    again()
    assert files(download) == before


def test_images_that_were_preprocessed_before_are_told(
    again: Callable[..., Report], real_data: Path, download: Path
) -> None:
    real = sorted((real_data / "fed_isic_ham" / IMAGES).iterdir())[0]
    shutil.copy(real, download / ORIGINALS / f"{NAMES[5]}.jpg")
    report = again()
    assert report.preprocessed == (NAMES[5],)
    assert any("TF-203" in text and NAMES[5] in text for text in report.problems)


# Interrupted and repeated runs


def test_a_finished_run_has_nothing_left_to_do(again: Callable[..., Report], output: Path) -> None:
    again()
    images = {path: path.stat().st_mtime_ns for path in (output / IMAGES).iterdir()}
    manifest = (output / MANIFEST).read_bytes()
    report = again()
    assert (report.made, report.kept) == (0, 8)
    assert {path: path.stat().st_mtime_ns for path in (output / IMAGES).iterdir()} == images
    assert (output / MANIFEST).read_bytes() == manifest


@pytest.mark.whole
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_goes_on_and_ends_the_same(
    again: Callable[..., Report], download: Path, output: Path, tmp_path: Path, workers: int
) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == 8
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(workers=workers, advance=interrupt)
    assert len((output / MANIFEST).read_bytes().splitlines()) == 4, "the recipe and three images"
    told: list[tuple[int, int]] = []
    report = again(workers=workers, advance=lambda *done: told.append(done))
    assert (report.made, report.kept) == (5, 3)
    assert told == [(count, 8) for count in range(1, 9)]
    prepare(download, download / SPLIT, tmp_path / "at once")
    assert files(output).keys() == files(tmp_path / "at once").keys()
    (output / REPORT).unlink(), (tmp_path / "at once" / REPORT).unlink()  # says what each run made
    assert files(output) == files(tmp_path / "at once")


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


@pytest.mark.parametrize(
    "happen",
    [
        lambda download, output: change(output / IMAGES / f"{NAMES[2]}.jpg"),
        lambda download, output: (output / IMAGES / f"{NAMES[2]}.jpg").unlink(),
        lambda download, output: save(download / ORIGINALS / f"{NAMES[2]}.jpg", noise(99, 80, 60)),
        lambda download, output: (output / MANIFEST).write_bytes((output / MANIFEST).read_bytes()[:-40]),
        lambda download, output: (output / MANIFEST).write_bytes(
            (output / MANIFEST).read_bytes().replace(NAMES[2].encode(), b"ISIC_changed")
        ),
    ],
    ids=["a result changed", "a result gone", "an original changed", "a torn line", "a line changed"],
)
def test_what_the_manifest_does_not_prove_is_made_again(
    again: Callable[..., Report], download: Path, output: Path, happen: Callable[[Path, Path], object]
) -> None:
    again()
    happen(download, output)
    report = again()
    assert (report.made, report.kept) == (1, 7)
    assert again().kept == 8


def test_another_recipe_or_foreign_images_are_refused(again: Callable[..., Report], output: Path) -> None:
    again()
    manifest = output / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"jpeg_quality": 75', '"jpeg_quality": 95'))
    with pytest.raises(FileExistsError, match="95"):
        again()
    manifest.unlink()
    before = files(output)
    with pytest.raises(FileExistsError, match="empty or the output of an earlier run"):
        again()
    assert files(output) == before


def test_files_beside_the_images_are_told(again: Callable[..., Report], output: Path) -> None:
    again()
    (output / IMAGES / "ISIC_0000099.jpg").write_bytes(b"mine")
    report = again()
    assert report.strangers == ("ISIC_0000099.jpg",)
    assert any("did not make: 1 (ISIC_0000099.jpg)" in text for text in report.problems)


def test_another_split_file_is_not_replaced(
    again: Callable[..., Report], download: Path, output: Path
) -> None:
    again()
    write_split(download / SPLIT, ROWS[:5])
    with pytest.raises(FileExistsError, match="they differ"):
        again()


def test_the_output_is_not_the_originals_folder(download: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (download / ORIGINALS).rename(tmp_path / "x" / IMAGES)
    with pytest.raises(FileExistsError, match="in another folder than the originals"):
        prepare(tmp_path / "x" / IMAGES, download / SPLIT, tmp_path / "x")


@pytest.mark.parametrize("named", ["nowhere", "."])
def test_a_folder_without_originals(download: Path, output: Path, tmp_path: Path, named: str) -> None:
    with pytest.raises(DataError, match=r"^TF-203: .*originals of ISIC 2019"):
        prepare(tmp_path / named, download / SPLIT, output)
    assert not output.exists()


def test_a_malformed_split_file_stops_at_once(download: Path, output: Path) -> None:
    (download / SPLIT).write_text("image,target\nISIC_0000000,1\n")
    with pytest.raises(DataError, match=r"^TF-204: "):
        prepare(download, download / SPLIT, output)
    assert not output.exists()


def test_an_output_that_cannot_be_written(download: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^TF-203: .*able to write"):
        prepare(download, download / SPLIT, tmp_path / "file" / "prepared")


@pytest.fixture
def large(download: Path) -> None:
    """Originals that take a while, so that a run can be met in the middle."""
    pixels = noise(5, 1200, 1200)
    for name in NAMES:
        save(download / ORIGINALS / f"{name}.jpg", pixels)


@pytest.mark.whole
@pytest.mark.usefixtures("large")
def test_a_process_that_dies_is_named_and_loses_nothing(again: Callable[..., Report], output: Path) -> None:
    def kill(done: int, total: int) -> None:
        for child in psutil.Process().children() if done == 1 else []:
            with contextlib.suppress(psutil.Error):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()

    with pytest.raises(DataError, match="fewer --workers"):
        again(workers=2, advance=kill)
    kept = len((output / MANIFEST).read_bytes().splitlines()) - 1
    assert kept >= 1
    report = again()
    assert (report.kept, report.made) == (kept, 8 - kept)


RUN = """
import sys, time
from pathlib import Path
from tightframe.data.isic.prepare import prepare
if __name__ == "__main__":
    download = Path(sys.argv[1])
    wait = lambda done, total: time.sleep(600 * (done == 3))  # to be met in the middle, however late
    prepare(download, download / "train_test_split", Path(sys.argv[2]), workers=2, advance=wait)
"""


@pytest.mark.usefixtures("large")
def test_a_killed_run_leaves_no_process_and_nothing_half_done(
    again: Callable[..., Report], download: Path, output: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(RUN)
    process = subprocess.Popen([sys.executable, str(tmp_path / "run.py"), str(download), str(output)])
    manifest = output / MANIFEST
    limit = time.monotonic() + 60
    while not manifest.exists() or len(manifest.read_bytes().splitlines()) < 4:
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    for path in (output / IMAGES).glob("ISIC_*.jpg"):
        with Image.open(path) as image:
            image.load()
    report = again()
    assert report.kept == 3 and report.made == 8 - report.kept
    assert report.strangers == ()
