"""Preprocess the originals of ISIC 2019 into the images that ``isic.folder`` reads.

FLamby's recipe (owkin/FLamby, ``dataset_creation_scripts/resize_images.py``): bilinear resizing to a
shorter side of 224 pixels with the aspect kept, then colour constancy by shades of grey, saved as JPEG
under the same name. One difference: FLamby's cast to 8 bits makes values of 256 and more wrap around
to black; here they are clipped. Torch-free.
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

from tightframe.data.images.files import open_picture
from tightframe.data.isic import CLASS_NAMES, FULL_SHORTER_SIDE, NUM_CENTERS, TEST_COUNTS, TRAIN_COUNTS
from tightframe.data.isic.folder import IMAGES, SPLIT, Row, listed, read_split
from tightframe.data.manifest import Entry, Manifest, sha256, worker_starts, write_whole
from tightframe.errors import DataError

ORIGINALS = "ISIC_2019_Training_Input"
MANIFEST = "isic2019_manifest.jsonl"
REPORT = "isic2019_report.json"
POWER = 6
QUALITY = 75
"""JPEG quality: Pillow's default, which FLamby uses."""
RECIPE: Mapping[str, str | int] = {
    "shorter_side": FULL_SHORTER_SIDE,
    "resampling": "bilinear",
    "colour_constancy": f"shades of grey, power {POWER}, clipped",
    "jpeg_quality": QUALITY,
}
# A product that is an integer up to rounding must not fall below it, so that a grey image does not change.
_ROUNDING = 1e-9

Advance = Callable[[int, int], None]
"""Called after each image with the number of finished images and the total."""


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Attributes:
        rows: number of requested images: of the split file, or of one of its centres.
        made, kept: images made by this run, and those of an earlier run (verified by their hashes).
        broken: image -> why its original cannot be read, or its result cannot be saved as JPEG.
        ignored: originals that were not requested.
        strangers: files in the output folder that the manifest does not list.
        preprocessed: images whose original already has the preprocessed size.
        wrapped: number of images in which FLamby's cast would have wrapped values around.
        differences: differences between the split file's counts and FLamby's.
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
        """Problems that make the folder differ from the data set, each with its code."""
        problems = []
        if self.differences:
            problems.append(
                f"TF-204: the split file is not FLamby's: it has {self.rows} images instead of "
                f"{expected_counts(self.centers).sum()}; counts that differ: {listed(self.differences)}"
            )
        if self.missing:
            problems.append(f"TF-205: images are missing: {listed(self.missing)}")
        if self.broken:
            problems.append(f"TF-206: images cannot be read: {listed(sorted(self.broken))}")
        if self.preprocessed:
            problems.append(
                f"TF-203: Expected originals, but the shorter side of {listed(self.preprocessed)} is "
                f"{FULL_SHORTER_SIDE} pixels, as if they had already been preprocessed"
            )
        if self.strangers:
            problems.append(
                f"TF-203: the output folder holds files that this preparation did not make: "
                f"{listed(self.strangers)}"
            )
        return problems

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with every name."""
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
    """Preprocess every image of the split file that is not finished yet.

    A run may be interrupted at any time and started again: each image is written whole or not at all, and
    a finished one is recognised by the hashes of its original and its result.

    Args:
        images: folder of the originals, or the one that holds ``ISIC_2019_Training_Input``.
        split: FLamby's ``train_test_split``, which is copied to ``output``.
        output: folder for ``ISIC_2019_Training_Input_preprocessed``, the manifest and the report.
        center: only the images of this centre, 0 to 5.
        workers: number of processes. With more than one, a calling script must be guarded by
            ``if __name__ == "__main__"``, because each process imports it.
        advance: called after every image.

    Returns:
        The results and problems; broken and missing images do not stop the others.

    Raises:
        DataError: TF-203 if there are no originals, or if the output cannot be used or written;
            TF-204, TF-207 if the split file is malformed.
        FileExistsError: if the output holds images or a split file of another origin.
    """
    rows = read_split(split)
    requested = [row for row in rows if center in (None, row.center)]
    folder, present = _originals(images)
    target = output / IMAGES
    if target.resolve() == folder.resolve():
        raise FileExistsError(
            f"Expected the output in another folder than the originals, but both are {folder}."
        )
    try:
        with Manifest.open(output / MANIFEST, RECIPE, folder=target) as manifest:
            _copy_split(split, output / SPLIT)
            target.mkdir(exist_ok=True, mode=0o700)
            tasks = [
                _Task(folder / f"{name}.jpg", target / f"{name}.jpg", manifest.entries.get(name))
                for name in (row.image for row in requested)
                if name in present
            ]
            results = _run(tasks, manifest, workers, advance)
        report = _report(requested, center, present, target, manifest, results)
        write_whole(output / REPORT, (json.dumps(report.as_json(), indent=2) + "\n").encode())
    except FileExistsError:
        raise
    except BrokenProcessPool:
        raise DataError(
            "A process that preprocesses images was killed, probably for lack of memory. Finished images are "
            "kept: run the same command again, with fewer --workers."
        ) from None
    except OSError as error:
        raise DataError(f"Expected to be able to write to {output}, but got: {error}.") from None
    return report


def colour_constancy(image: Image.Image) -> tuple[Image.Image, int]:
    """Correct an image for the colour of its light, by shades of grey with the Minkowski norm 6.

    The light's colour is estimated as ``e_c = (mean of x_c^6)^(1/6)`` in each channel c, and each
    channel is multiplied by ``|e| / (sqrt(3) e_c)``; values are truncated to integers, as in FLamby. A
    black image does not change.

    Source: Finlayson and Trezzi, Shades of Gray and Colour Constancy, Color and Imaging Conference
    2004.

    Args:
        image: RGB, 8 bits.

    Returns:
        The image, and the number of values that were clipped to 255 and that a cast would have wrapped.

    >>> colour_constancy(Image.new("RGB", (2, 2), (200, 100, 100)))[0].getpixel((0, 0))
    (141, 141, 141)
    """
    histogram = image.histogram()
    channels = [histogram[start : start + 256] for start in (0, 256, 512)]
    pixels = image.width * image.height
    # Sums of integers are exact, however many pixels there are.
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
    """Apply the whole recipe: shorter side 224, then ``colour_constancy``.

    The longer side is rounded down to whole pixels, as in FLamby. The shorter side is exactly 224; for
    some sizes FLamby's is 223 because of a rounding error.

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
    """One image: the paths of its original and its result, and its entry in the manifest, if any."""

    source: Path
    target: Path
    known: Entry | None


@dataclass(frozen=True)
class _Result:
    """One image's result: its entry for the manifest, or the problem."""

    image: str
    entry: Entry | None
    kept: bool = False
    problem: str = ""


def _one(task: _Task) -> _Result:
    """Preprocess one image unless it is finished; an unusable original gives a result with its problem."""
    name = task.target.stem
    try:
        data = task.source.read_bytes()
        digest = sha256(data)
        if task.known is not None and task.known.vouches(digest, task.target):
            return _Result(name, task.known, kept=True)
        with open_picture(io.BytesIO(data), ("JPEG",)) as original:
            size = original.size
            image, wrapped = preprocess(original.convert("RGB"))
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=QUALITY)  # refuses more than 65,500 pixels a side
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        return _Result(name, None, problem=str(error))
    jpeg = stream.getvalue()
    write_whole(task.target, jpeg)
    return _Result(name, Entry(name, digest, sha256(jpeg), {"size": list(size), "wrapped": wrapped}))


def _run(
    tasks: Sequence[_Task], manifest: Manifest, workers: int, advance: Advance | None
) -> dict[str, _Result]:
    """Run the tasks in ``workers`` processes, and add each to the manifest as soon as it is finished."""
    results: dict[str, _Result] = {}

    def note(result: _Result) -> None:
        results[result.image] = result
        if result.entry is None:
            manifest.forget(result.image)
        elif not result.kept:
            manifest.add(result.entry)
        if advance:
            advance(len(results), len(tasks))

    if workers == 1:
        for task in tasks:
            note(_one(task))
        return results
    # A fork of a process that draws a progress bar may inherit a lock that is never released.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=worker_starts)
    try:
        for future in as_completed([pool.submit(_one, task) for task in tasks]):
            note(future.result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


def _originals(images: Path) -> tuple[Path, frozenset[str]]:
    """Find the folder of the originals, and list the names in it."""
    folder = images / ORIGINALS if (images / ORIGINALS).is_dir() else images
    try:
        names = frozenset(name[:-4] for name in os.listdir(folder) if name.endswith(".jpg"))
    except OSError as error:
        raise DataError(f"Expected the originals of ISIC 2019 in {folder}, but got: {error}.") from None
    if not names:
        raise DataError(
            f"Expected the originals of ISIC 2019 (*.jpg) in {folder}, but there are none: give the path of "
            f"the folder {ORIGINALS}, or of the one that holds it."
        )
    return folder, names


def _copy_split(split: Path, copy: Path) -> None:
    """Copy the split file to the path that ``isic.folder`` reads."""
    data = split.read_bytes()
    if not copy.exists():
        write_whole(copy, data)
    elif copy.read_bytes() != data:
        raise FileExistsError(
            f"Expected {copy} to be the same as {split}, but they differ: remove one of them."
        )


def _counts(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Count images by fold (train, test), centre and class: (2, 6, 8)."""
    counts = np.zeros((2, NUM_CENTERS, len(CLASS_NAMES)), dtype=np.int64)
    for row in rows:
        counts[int(row.fold == "test"), row.center, row.target] += 1
    return counts


def expected_counts(centers: Sequence[int]) -> NDArray[np.int64]:
    """Return FLamby's image counts by fold (train, test), centre and class, of these centres: (2, 6, 8)."""
    counts = np.array([TRAIN_COUNTS, TEST_COUNTS], dtype=np.int64)
    others = [center for center in range(NUM_CENTERS) if center not in centers]
    counts[:, others] = 0
    return counts


def _report(
    requested: Sequence[Row],
    center: int | None,
    present: frozenset[str],
    target: Path,
    manifest: Manifest,
    results: Mapping[str, _Result],
) -> Report:
    centers = tuple(range(NUM_CENTERS)) if center is None else (center,)
    entries = {name: result.entry for name, result in results.items() if result.entry is not None}
    counts, expected = _counts(requested), expected_counts(centers)
    differences = [
        f"centre {number} {('train', 'test')[fold]} {CLASS_NAMES[label]}: {counts[fold, number, label]} "
        f"instead of {expected[fold, number, label]}"
        for fold, number, label in np.argwhere(counts != expected).tolist()
    ]
    own = {f"{name}.jpg" for name in manifest.entries}
    return Report(
        rows=len(requested),
        centers=centers,
        made=sum(result.entry is not None and not result.kept for result in results.values()),
        kept=sum(result.kept for result in results.values()),
        missing=tuple(row.image for row in requested if row.image not in present),
        broken={name: result.problem for name, result in results.items() if result.entry is None},
        ignored=tuple(sorted(present - {row.image for row in requested})),
        strangers=tuple(sorted(set(os.listdir(target)) - own)),
        preprocessed=tuple(
            sorted(name for name, entry in entries.items() if min(entry.facts["size"]) == FULL_SHORTER_SIDE)
        ),
        wrapped=sum(entry.facts["wrapped"] > 0 for entry in entries.values()),
        differences=tuple(differences),
        prepared=_counts([row for row in requested if row.image in entries]),
        manifest=manifest.path,
    )
