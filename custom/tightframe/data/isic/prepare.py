"""From the originals of ISIC 2019 to the preprocessed images that the reader of Fed-ISIC2019 wants.

FLamby's recipe (owkin/FLamby, ``dataset_creation_scripts/resize_images.py``): the shorter side becomes
224 pixels, the aspect is kept, bilinear; then colour constancy by shades of grey; JPEG under the same
name. One thing differs: FLamby's cast to 8 bits lets values of 256 and more wrap round to black; here
they are clipped. Torch-free.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tightframe.data.isic import CLASS_NAMES, FULL_SHORTER_SIDE, NUM_CENTERS, TEST_COUNTS, TRAIN_COUNTS
from tightframe.data.isic.folder import IMAGES, SPLIT, Row, listed, read_split
from tightframe.data.manifest import Entry, Manifest, sha256, worker_starts, write_whole
from tightframe.errors import DataError

ORIGINALS = "ISIC_2019_Training_Input"
MANIFEST = "isic2019_manifest.jsonl"
REPORT = "isic2019_report.json"
POWER = 6
QUALITY = 75
"""JPEG quality; Pillow's default, which FLamby takes."""
RECIPE: Mapping[str, str | int] = {
    "shorter_side": FULL_SHORTER_SIDE,
    "resampling": "bilinear",
    "colour_constancy": f"shades of grey, power {POWER}, clipped",
    "jpeg_quality": QUALITY,
}
# A product that is a whole number but for rounding must not fall below it: a grey image stays as it is.
_ROUNDING = 1e-9

Advance = Callable[[int, int], None]
"""Told after each image: how many are done, of how many."""


@dataclass(frozen=True)
class Report:
    """What a run has found and done.

    Attributes:
        rows: the images asked for: of the split file, or of one of its centres.
        centers: the centres asked for.
        made, kept: images that this run made, and that an earlier one had (verified by their hashes).
        missing: images without an original.
        broken: image -> why its original cannot be read, or its result not be a JPEG.
        ignored: originals that are not asked for.
        strangers: files in the output folder that no line of the manifest vouches for.
        preprocessed: images whose original is of the preprocessed size already.
        wrapped: images in which FLamby's cast would have wrapped values round.
        differences: where the split file's counts are not those of FLamby's.
        prepared: finished images by fold, centre and class, (2, 6, 8).
        manifest: the file with the hashes.
    """

    rows: int
    centers: tuple[int, ...]
    made: int
    kept: int
    missing: tuple[str, ...]
    broken: Mapping[str, str]
    ignored: tuple[str, ...]
    strangers: tuple[str, ...]
    preprocessed: tuple[str, ...]
    wrapped: int
    differences: tuple[str, ...]
    prepared: NDArray[np.int64]
    manifest: Path

    @property
    def problems(self) -> list[str]:
        """What keeps the folder from being the data set, each with its code; empty if nothing does."""
        found = []
        if self.differences:
            found.append(
                f"TF-204: the split file is not FLamby's: it has {self.rows} images instead of "
                f"{expected_counts(self.centers).sum()}; counts that differ: {listed(self.differences)}"
            )
        if self.missing:
            found.append(f"TF-205: images are missing: {listed(self.missing)}")
        if self.broken:
            found.append(f"TF-206: images cannot be read: {listed(sorted(self.broken))}")
        if self.preprocessed:
            found.append(
                f"TF-203: Expected originals, but the shorter side of {listed(self.preprocessed)} is "
                f"{FULL_SHORTER_SIDE} pixels, as if they had been preprocessed before"
            )
        if self.strangers:
            found.append(
                f"TF-203: the output folder holds files that this preparation does not vouch for: "
                f"{listed(self.strangers)}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values, with every name."""
        values = asdict(self) | {
            "problems": self.problems,
            "prepared": self.prepared.tolist(),
            "manifest": self.manifest.name,
            "manifest_sha256": sha256(self.manifest.read_bytes()),
        }
        return values


def prepare(
    images: Path,
    split: Path,
    output: Path,
    *,
    center: int | None = None,
    workers: int = 1,
    advance: Advance | None = None,
) -> Report:
    """Preprocess every image of the split file that is not done yet.

    May be interrupted at any time and started again: each image is written whole or not at all, and
    one that is done is told by the hashes of its original and of its result.

    Args:
        images: folder of the originals, or the one that holds ``ISIC_2019_Training_Input``.
        split: FLamby's ``train_test_split``; a copy goes into ``output``.
        output: gets ``ISIC_2019_Training_Input_preprocessed``, the manifest and the report, with every name.
        center: only the images of this centre, 0 to 5.
        workers: processes; with more than one, a script of yours that calls this must be guarded by
            ``if __name__ == "__main__"``, because each begins by importing it.
        advance: told of every image.

    Returns:
        What was done and what is wrong; broken and missing images do not stop the others.

    Raises:
        DataError: TF-203 if there are no originals, or if the output cannot be used or written;
            TF-204, TF-207 if the split file is malformed.
        FileExistsError: if the output holds images or a split file of another origin.
    """
    rows = read_split(split)
    asked = [row for row in rows if center in (None, row.center)]
    folder, present = _originals(images)
    target = output / IMAGES
    if target.resolve() == folder.resolve():
        raise FileExistsError(f"Expected an output beside the originals, but both are {folder}.")
    try:
        with Manifest.open(output / MANIFEST, RECIPE, beside=target) as manifest:
            _copy_split(split, output / SPLIT)
            target.mkdir(exist_ok=True)
            tasks = [
                _Task(folder / f"{name}.jpg", target / f"{name}.jpg", manifest.entries.get(name))
                for name in (row.image for row in asked)
                if name in present
            ]
            done = _run(tasks, manifest, workers, advance)
        report = _report(asked, center, present, target, manifest, done)
        write_whole(output / REPORT, (json.dumps(report.as_json(), indent=2) + "\n").encode())
    except FileExistsError:
        raise
    except BrokenProcessPool:
        raise DataError(
            "A process that preprocesses images ended all at once, as if memory had run out. Nothing that "
            "was finished is lost: run the same command again, with fewer --workers."
        ) from None
    except OSError as error:
        raise DataError(f"Expected to be able to write to {output}, but got: {error}.") from None
    return report


def colour_constancy(image: Image.Image) -> tuple[Image.Image, int]:
    """Make the light of an image white, by shades of grey with the Minkowski norm 6.

    The light's colour is estimated as ``e_c = (mean of x_c^6)^(1/6)`` in each channel c, and each
    channel is multiplied by ``|e| / (sqrt(3) e_c)``; fractions are cut off, as FLamby does. An image
    without any light stays as it is.

    Source: Finlayson and Trezzi, Shades of Gray and Colour Constancy, Color and Imaging Conference
    2004.

    Args:
        image: RGB, 8 bits.

    Returns:
        The image, and how many of its values were clipped to 255 that a cast would have wrapped.

    >>> colour_constancy(Image.new("RGB", (2, 2), (200, 100, 100)))[0].getpixel((0, 0))
    (141, 141, 141)
    """
    histogram = image.histogram()
    channels = [histogram[start : start + 256] for start in (0, 256, 512)]
    pixels = image.width * image.height
    # Sums of whole numbers are exact, however many pixels there are.
    light = [
        (sum(count * value**POWER for value, count in enumerate(channel)) / pixels) ** (1 / POWER)
        for channel in channels
    ]
    white = math.hypot(*light) / math.sqrt(3)
    table: list[int] = []
    wrapped = 0
    for channel, estimate in zip(channels, light, strict=True):
        gain = white / estimate if estimate > 0 else 1.0
        values = [int(value * gain + _ROUNDING) for value in range(256)]
        wrapped += sum(count for value, count in zip(values, channel, strict=True) if value > 255)
        table += [min(value, 255) for value in values]
    return image.point(table), wrapped


def preprocess(image: Image.Image) -> tuple[Image.Image, int]:
    """The whole recipe: shorter side 224, then ``colour_constancy``.

    The longer side is cut to whole pixels, as FLamby does; the shorter one is 224 exactly, where
    FLamby's is 223 for some sizes by a rounding error.

    Args:
        image: RGB, 8 bits, of any size.

    Returns:
        As ``colour_constancy``.
    """
    shorter = min(image.size)
    width, height = (max(extent * FULL_SHORTER_SIDE // shorter, FULL_SHORTER_SIDE) for extent in image.size)
    return colour_constancy(image.resize((width, height), Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class _Task:
    """One image: where its original lies, where it goes, what the manifest says of it."""

    source: Path
    target: Path
    known: Entry | None


@dataclass(frozen=True)
class _Result:
    """One image's end: its line of the manifest, or why there is none."""

    image: str
    entry: Entry | None
    kept: bool = False
    problem: str = ""


def _one(task: _Task) -> _Result:
    """Preprocess one image, unless that was done; an original that cannot be used is a result, too."""
    name = task.target.stem
    try:
        data = task.source.read_bytes()
        digest = sha256(data)
        if task.known is not None and task.known.vouches(digest, task.target):
            return _Result(name, task.known, kept=True)
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as original:
            size = original.size
            image, wrapped = preprocess(original.convert("RGB"))
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=QUALITY)  # refuses more than 65,500 pixels a side
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        return _Result(name, None, problem=str(error))
    made = stream.getvalue()
    write_whole(task.target, made)
    return _Result(name, Entry(name, digest, sha256(made), {"size": list(size), "wrapped": wrapped}))


def _run(
    tasks: Sequence[_Task], manifest: Manifest, workers: int, advance: Advance | None
) -> dict[str, _Result]:
    """Do the tasks in so many processes, noting each in the manifest as soon as it is done."""
    done: dict[str, _Result] = {}

    def note(result: _Result) -> None:
        done[result.image] = result
        if result.entry is None:
            manifest.forget(result.image)
        elif not result.kept:
            manifest.add(result.entry)
        if advance:
            advance(len(done), len(tasks))

    if workers == 1:
        for task in tasks:
            note(_one(task))
        return done
    # A forked copy of a process that draws a progress bar may hold its locks for ever.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=worker_starts)
    try:
        for future in as_completed([pool.submit(_one, task) for task in tasks]):
            note(future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def _originals(images: Path) -> tuple[Path, frozenset[str]]:
    """The folder of the originals, and the names in it.

    Raises:
        DataError: TF-203.
    """
    folder = images / ORIGINALS if (images / ORIGINALS).is_dir() else images
    try:
        names = frozenset(name[:-4] for name in os.listdir(folder) if name.endswith(".jpg"))
    except OSError as error:
        raise DataError(f"Expected the originals of ISIC 2019 in {folder}, but got: {error}.") from None
    if not names:
        raise DataError(
            f"Expected the originals of ISIC 2019 (*.jpg) in {folder}, but there are none: name the folder "
            f"{ORIGINALS}, or the one that holds it."
        )
    return folder, names


def _copy_split(split: Path, copy: Path) -> None:
    """Put the split file where the reader looks for it."""
    data = split.read_bytes()
    if not copy.exists():
        write_whole(copy, data)
    elif copy.read_bytes() != data:
        raise FileExistsError(
            f"Expected {copy} to be the same as {split}, but they differ: remove one of them."
        )


def _counts(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Images by fold (train, test), centre and class: (2, 6, 8)."""
    counts = np.zeros((2, NUM_CENTERS, len(CLASS_NAMES)), dtype=np.int64)
    for row in rows:
        counts[int(row.fold == "test"), row.center, row.target] += 1
    return counts


def expected_counts(centers: Sequence[int]) -> NDArray[np.int64]:
    """FLamby's images by fold (train, test), centre and class, of these centres: (2, 6, 8)."""
    counts = np.array([TRAIN_COUNTS, TEST_COUNTS], dtype=np.int64)
    others = [center for center in range(NUM_CENTERS) if center not in centers]
    counts[:, others] = 0
    return counts


def _report(
    asked: Sequence[Row],
    center: int | None,
    present: frozenset[str],
    target: Path,
    manifest: Manifest,
    done: Mapping[str, _Result],
) -> Report:
    centers = tuple(range(NUM_CENTERS)) if center is None else (center,)
    entries = {name: result.entry for name, result in done.items() if result.entry is not None}
    counts, expected = _counts(asked), expected_counts(centers)
    differences = [
        f"centre {place} {('train', 'test')[fold]} {CLASS_NAMES[label]}: {counts[fold, place, label]} "
        f"instead of {expected[fold, place, label]}"
        for fold, place, label in np.argwhere(counts != expected).tolist()
    ]
    own = {f"{name}.jpg" for name in manifest.entries}
    return Report(
        rows=len(asked),
        centers=centers,
        made=sum(result.entry is not None and not result.kept for result in done.values()),
        kept=sum(result.kept for result in done.values()),
        missing=tuple(row.image for row in asked if row.image not in present),
        broken={name: result.problem for name, result in done.items() if result.entry is None},
        ignored=tuple(sorted(present - {row.image for row in asked})),
        strangers=tuple(sorted(set(os.listdir(target)) - own)),
        preprocessed=tuple(
            sorted(name for name, entry in entries.items() if min(entry.facts["size"]) == FULL_SHORTER_SIDE)
        ),
        wrapped=sum(entry.facts["wrapped"] > 0 for entry in entries.values()),
        differences=tuple(differences),
        prepared=_counts([row for row in asked if row.image in entries]),
        manifest=manifest.path,
    )
