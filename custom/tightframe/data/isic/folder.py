"""Real records of Fed-ISIC2019 at a site, in FLamby's folder layout.

``<root>/ISIC_2019_Training_Input_preprocessed/<image>.jpg`` and FLamby's split file (CSV without
an extension). FLamby is not needed. Torch-free until ``records`` is called.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import Progress, with_progress
from tightframe.data.images.files import open_picture
from tightframe.data.isic import CLASS_NAMES, HAM_CENTERS, NUM_CENTERS, IsicOptions, IsicSite
from tightframe.data.looks import Pictured, Waves, waves_of
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError
from tightframe.phases import Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset

IMAGES = "ISIC_2019_Training_Input_preprocessed"
SPLIT = "train_test_split"
_COLUMNS = ("image", "target", "center", "fold")
_SHOWN = 5


@dataclass(frozen=True)
class Row:
    """One image of the split file."""

    image: str
    target: int
    center: int
    fold: str


def listed(names: Sequence[str]) -> str:
    """Format the number of names and the first few: ``7 (a, b, c, d, e, ...)``."""
    first = ", ".join(names[:_SHOWN])
    return f"{len(names)} ({first}{', ...' if len(names) > _SHOWN else ''})"


def read_split(path: Path) -> tuple[Row, ...]:
    """Read FLamby's split file.

    Args:
        path: CSV with at least the columns image, target, center and fold; fold is ``train`` or
            ``test``.

    Returns:
        Every image of every centre, in the file's order.

    Raises:
        DataError: TF-204 if there is no such file or it is malformed (also if a target or center is not
            an integer); TF-207 if a target is not one of the eight classes.
    """
    rows: list[Row] = []
    unknown: list[str] = []
    for number, values in _csv(path, _COLUMNS, "split file"):
        try:
            image, target, center = (
                values["image"],
                _integer(values["target"]),
                _integer(values["center"]),
            )
        except ValueError:
            raise DataError(
                f"Expected integers as target and center in line {number} of {path}, but got "
                f"{values['target']!r} and {values['center']!r}: fetch FLamby's train_test_split again.",
                code="TF-204",
            ) from None
        bare = image and "/" not in image and "\\" not in image and not image.startswith(".")
        if not bare or values["fold"] not in ("train", "test") or not 0 <= center < NUM_CENTERS:
            raise DataError(
                f"Expected an image's name, a center of 0..{NUM_CENTERS - 1} and the fold train or test in "
                f"line {number} of {path}, but got {image!r}, {center} and {values['fold']!r}: "
                "fetch FLamby's train_test_split again.",
                code="TF-204",
            )
        if not 0 <= target < len(CLASS_NAMES):
            unknown.append(f"{image}: {target}")
        rows.append(Row(image, target, center, values["fold"]))
    if unknown:
        raise DataError(
            f"Expected targets of 0..{len(CLASS_NAMES) - 1} ({', '.join(CLASS_NAMES)}) in {path}, but got "
            f"others for {listed(unknown)}: the data set has no such classes.",
            code="TF-207",
        )
    repeated = [name for name, times in Counter(row.image for row in rows).items() if times > 1]
    if repeated:
        raise DataError(
            f"Expected each image once in {path}, but these are repeated: {listed(repeated)}; "
            "fetch FLamby's train_test_split again.",
            code="TF-204",
        )
    return tuple(rows)


def read_lesions(path: Path) -> dict[str, str]:
    """Read the lesion of each image, by image name, from FLamby's ``HAM10000_metadata``.

    Raises:
        DataError: TF-204 if there is no such file or it lacks a column.
    """
    columns = ("lesion_id", "image_id")
    return {values["image_id"]: values["lesion_id"] for _, values in _csv(path, columns, "lesion file")}


def leakage_free(rows: Sequence[Row], lesions: dict[str, str]) -> tuple[Row, ...]:
    """Leave out the test images whose lesion has an image in the training fold of any centre."""
    trained = {lesions[row.image] for row in rows if row.fold == "train" and row.image in lesions}
    return tuple(row for row in rows if row.fold != "test" or lesions.get(row.image) not in trained)


def _check_lesions(rows: Sequence[Row], lesions: dict[str, str], site: IsicSite) -> None:
    """Refuse a lesion file that lacks an image whose lesion is needed.

    These are the centre's own images and, for a leakage-free test, the training images of all HAM centres.
    """
    needed = [row for row in rows if row.center == site.center]
    if site.leakage_free_test:
        needed += [row for row in rows if row.fold == "train" and row.center in HAM_CENTERS]
    unknown = sorted({row.image for row in needed if not lesions.get(row.image)})
    if unknown:
        raise DataError(
            f"Expected a lesion for every image of centre {site.center}, but {site.lesions} has none for "
            f"{listed(unknown)}: correct `lesions`, or leave it out (centres 0 and 4 have no lesion ids).",
            code="TF-204",
        )


def decode(path: Path) -> NDArray[np.uint8]:
    """Read the pixels of an image file: RGB, uint8 (H, W, 3).

    Raises:
        DataError: TF-205 if it is missing, TF-206 if it cannot be decoded completely.
    """
    from PIL import Image  # only processes that read records need it

    try:
        with open_picture(path) as image:
            pixels: NDArray[np.uint8] = np.asarray(image.convert("RGB"), dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"Expected an image at {path}, but there is none.", code="TF-205") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"Expected a readable image at {path}, but got: {error}.", code="TF-206") from None
    return pixels


class FolderData:
    """One centre's real records; see ``SiloData``.

    Args:
        site: the site's entry.
        options: the job's options.

    Raises:
        DataError: TF-203, TF-204, TF-207 or TF-208, before any image is read.
    """

    synthetic = False

    def __init__(self, site: IsicSite, options: IsicOptions) -> None:
        self.site = site
        self.options = options
        self._cache: Any = None
        self._waves: dict[str, Waves | None] = {}
        self._images = site.root / IMAGES
        if not os.path.isdir(self._images):  # also False if this process may not read the parent folder
            raise DataError(
                f"Expected the images of Fed-ISIC2019 in {self._images}, but there is no such folder: set "
                "`root` to the folder that holds it, and check that this process may read it.",
                code="TF-203",
            )
        if site.leakage_free_test and site.lesions is None:
            raise DataError(
                "Expected `lesions` to be the path of FLamby's HAM10000_metadata, because "
                "`leakage_free_test` is on, but it is not set.",
                code="TF-204",
            )
        rows = read_split(site.split or site.root / SPLIT)
        self._lesions = read_lesions(site.lesions) if site.lesions else {}
        if site.lesions:
            _check_lesions(rows, self._lesions, site)
        self._everything = tuple(row.image for row in rows if row.center == site.center)
        if site.leakage_free_test:
            rows = leakage_free(rows, self._lesions)
        self._rows = tuple(row for row in rows if row.center == site.center)
        for fold in ("train", "test"):
            if not any(row.fold == fold for row in self._rows):
                raise DataError(
                    f"Expected images of centre {site.center} in the {fold} fold, but the split file has "
                    f"none: it has {_centers(rows, fold)}; correct `center` or `split`.",
                    code="TF-208",
                )

    @property
    def source(self) -> str:
        """One line for reports."""
        view = ", leakage-free test" if self.site.leakage_free_test else ""
        return f"Fed-ISIC2019 records, centre {self.site.center}{view}"

    @cached_property
    def _folds(self) -> dict[str, tuple[Row, ...]]:
        train = [row for row in self._rows if row.fold == "train"]
        labels = np.array([row.target for row in train], dtype=np.int64)
        held_out = validation_mask(labels, [self._lesions.get(row.image, row.image) for row in train])
        return {
            "train": tuple(row for row, out in zip(train, held_out, strict=True) if not out),
            "validation": tuple(row for row, out in zip(train, held_out, strict=True) if out),
            "test": tuple(row for row in self._rows if row.fold == "test"),
        }

    def names(self, fold: Fold) -> tuple[str, ...]:
        """Return the names of a fold's images, in record order."""
        return tuple(row.image for row in self._folds[fold])

    def record_ids(self, fold: Fold) -> tuple[str, ...]:
        """Return the names by which a site withdraws records: those of the images."""
        return self.names(fold)

    def same_patient(self, fold: Fold) -> NDArray[np.int64] | None:
        """Return the lesion of each image of a fold, which is one patient's; None if none is known."""
        if not self._lesions:
            return None
        numbers = {name: place for place, name in enumerate(sorted(set(self._lesions.values())))}
        return np.array([numbers[self._lesions[name]] for name in self.names(fold)], dtype=np.int64)

    def contents(self) -> Iterator[bytes]:
        """Yield the content of each of the centre's existing pictures, like pictures by contract."""
        for name in self._everything:
            if (path := self._path(name)).is_file():
                if name not in self._waves:  # without ``check``, or in no fold
                    with suppress(DataError):
                        self._waves[name] = waves_of(decode(path))
                yield Pictured.of(path.read_bytes(), self._waves.get(name))

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,)."""
        return np.array([row.target for row in self._folds[fold]], dtype=np.int64)

    def check(self, progress: Progress | None = None) -> None:
        """Decode every image of the centre once.

        Raises:
            DataError: TF-205 for missing files, TF-206 for unreadable ones, with their number and the first
                names.
        """
        names = [row.image for row in self._rows]
        missing = [name for name in names if not os.path.isfile(self._path(name))]
        if missing:
            raise DataError(
                f"Expected {len(names)} images of centre {self.site.center} in {self._images}, but "
                f"{listed(missing)} are missing: complete the download, or correct `root` or `split`.",
                code="TF-205",
            )
        unreadable: list[str] = []
        for name in with_progress(names, progress, "read {done} of {total} images"):
            try:
                self._waves[name] = waves_of(decode(self._path(name)))
            except DataError:
                unreadable.append(name)
        if unreadable:
            raise DataError(
                f"Expected {len(names)} readable images of centre {self.site.center} in {self._images}, but "
                f"{listed(unreadable)} cannot be decoded completely: copy or preprocess them again.",
                code="TF-206",
            )

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 (3, image_size, image_size) and int label."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.isic.records import ImageCache, ImageRecords

        if self._cache is None:
            self._cache = ImageCache()
        names = self.names(fold)
        return ImageRecords(
            names=names,
            labels=self.labels(fold),
            read=partial(_read, tuple(self._path(name) for name in names)),
            size=self.options.image_size,
            cache=self._cache,
            augment_seed=augment_seed,
        )

    def _path(self, name: str) -> Path:
        return self._images / f"{name}.jpg"


def _integer(text: str) -> int:
    """Parse an integer, also in pandas' form (``3.0``); raise ValueError for anything else."""
    number = float(text)
    if not number.is_integer():  # nor are NaN and infinities
        raise ValueError(text)
    return int(number)


def _read(paths: tuple[Path, ...], index: int) -> NDArray[np.uint8]:
    return decode(paths[index])


def _centers(rows: Sequence[Row], fold: str) -> str:
    counts = np.bincount([row.center for row in rows if row.fold == fold], minlength=NUM_CENTERS)
    return ", ".join(f"centre {center}: {count}" for center, count in enumerate(counts))


def _csv(path: Path, columns: Sequence[str], what: str) -> list[tuple[int, dict[str, str]]]:
    """Read the lines of a CSV file as (line number, values), and check that it has these columns."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            lines = [(reader.line_num, values) for values in reader]
            header = list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"Expected FLamby's {what} at {path}, but it cannot be read: {error}.", code="TF-204"
        ) from None
    missing = [column for column in columns if column not in header]
    short = [
        str(number)
        for number, values in lines
        if any(values[column] is None for column in columns if column in header)
    ]
    if missing or short or not lines:
        problem = (
            f"no column {missing}" if missing else f"short lines: {listed(short)}" if short else "no line"
        )
        raise DataError(
            f"Expected FLamby's {what} at {path} with the columns {list(columns)}, but got {problem}: "
            "fetch it again.",
            code="TF-204",
        )
    return lines
