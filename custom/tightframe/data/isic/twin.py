"""The synthetic twin of Fed-ISIC2019: generated records in the real set's proportions.

It serves rehearsals, which need records without access restrictions. The twin has the real centre x
class x fold counts, scaled; its lesions differ by class, its skin, light and optics by centre. It is
frozen (``TWIN_VERSION``, and a test that hashes pixels), no method was tuned on it, and it supports no
claim about a method. Torch-free.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.base import Progress
from tightframe.data.isic import NUM_CENTERS, TEST_COUNTS, TRAIN_COUNTS, IsicOptions, shorter_side
from tightframe.data.twin_render import Uniforms, render
from tightframe.data.validation import validation_mask
from tightframe.phases import Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset

TWIN_VERSION = 1
SCALE = 0.034
"""Generated share of the real counts: 1,004 records in total."""
FLOOR = 6
"""Least number of records of a cell (centre, fold, class) that is not empty in the real set."""


def scaled(count: int) -> int:
    """Return the number of records generated for a real cell of ``count``: 0 for 0, else at least ``FLOOR``.

    >>> scaled(0), scaled(2), scaled(3363)
    (0, 6, 114)
    """
    return 0 if count == 0 else max(FLOOR, round(count * SCALE))


@dataclass(frozen=True)
class Key:
    """The identity of a generated record, from which its pixels are drawn and nothing else."""

    copy: int
    center: int
    fold: str
    label: int
    index: int

    @property
    def name(self) -> str:
        """The record's id."""
        return f"twin{TWIN_VERSION}-{self.copy}-{self.center}-{self.fold}-{self.label}-{self.index:04d}"


def keys(silo: int, fold: str) -> tuple[Key, ...]:
    """Return the records of one silo's train or test fold, ordered by a hash of their names.

    Args:
        silo: silo index; silo 6 is a second copy of centre 0 with records of its own.
        fold: ``train`` (with the validation records) or ``test``.
    """
    copy, center = divmod(silo, NUM_CENTERS)
    counts = {"train": TRAIN_COUNTS, "test": TEST_COUNTS}[fold][center]
    records = [
        Key(copy, center, fold, label, index)
        for label, count in enumerate(counts)
        for index in range(scaled(count))
    ]
    return tuple(sorted(records, key=lambda key: hashlib.sha256(key.name.encode()).digest()))


def image(key: Key, side: int) -> NDArray[np.uint8]:
    """Render one record.

    Args:
        side: pixels of a side; the scene is the same at every size.

    Returns:
        RGB pixels, uint8 (side, side, 3).
    """
    return render(Uniforms(key.name), key.center, key.label, side)


class TwinData:
    """The twin's records of one silo; see ``SiloData``.

    Args:
        silo: index of the silo in the job's roster; centre ``silo % 6``.
        options: the job's options.
    """

    synthetic = True

    def __init__(self, silo: int, options: IsicOptions) -> None:
        if silo < 0:
            raise ValueError(f"Expected `silo` to be at least 0, but got {silo}.")
        self.silo = silo
        self.options = options
        self._cache: Any = None

    @property
    def source(self) -> str:
        """One line for reports."""
        copy, center = divmod(self.silo, NUM_CENTERS)
        return f"synthetic twin of Fed-ISIC2019, centre {center}" + (f" (copy {copy + 1})" if copy else "")

    @cached_property
    def _folds(self) -> dict[str, tuple[Key, ...]]:
        train = keys(self.silo, "train")
        labels = np.array([key.label for key in train], dtype=np.int64)
        held_out = validation_mask(labels, [key.name for key in train])
        return {
            "train": tuple(key for key, out in zip(train, held_out, strict=True) if not out),
            "validation": tuple(key for key, out in zip(train, held_out, strict=True) if out),
            "test": keys(self.silo, "test"),
        }

    def keys(self, fold: Fold) -> tuple[Key, ...]:
        """Return the records of a fold, in record order."""
        return self._folds[fold]

    def record_ids(self, fold: Fold) -> list[str]:
        """Return the names of a fold's records, in record order."""
        return [key.name for key in self.keys(fold)]

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,)."""
        return np.array([key.label for key in self._folds[fold]], dtype=np.int64)

    def check(self, progress: Progress | None = None) -> None:
        """Do nothing: generated records cannot be missing or broken."""

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 (3, image_size, image_size) and int label."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.isic.records import ImageCache, ImageRecords

        if self._cache is None:
            self._cache = ImageCache()
        side = shorter_side(self.options.image_size)
        members = self._folds[fold]
        return ImageRecords(
            names=[key.name for key in members],
            labels=self.labels(fold),
            read=partial(_read, members, side),
            size=self.options.image_size,
            cache=self._cache,
            augment_seed=augment_seed,
        )


def _read(members: tuple[Key, ...], side: int, index: int) -> NDArray[np.uint8]:
    return image(members[index], side)


def open_twin(silo: int, options: IsicOptions) -> TwinData:
    """Open the twin of silo ``silo`` of a job's roster."""
    return TwinData(silo, options)
