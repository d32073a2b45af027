"""One silo's pictures, read and checked against the contract when they are opened; see ``SiloData``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tightframe.data.contract import MultiLabel
from tightframe.data.images import ImagesOptions, ImagesSite
from tightframe.data.images.contract import Picture, PictureContract
from tightframe.data.images.files import UnfitError, fitted, quiet, read
from tightframe.data.looks import Pictured, Waves, waves_of
from tightframe.data.table.encoding import Encoded, Faults, Finding, check_mapping, encode
from tightframe.data.table.silo import TableData, divided, refuse_broken
from tightframe.data.table.sources.rows import Cells, Rows
from tightframe.data.table.sources.rows import read as read_manifest
from tightframe.errors import DataError
from tightframe.phases import Fold

if TYPE_CHECKING:
    from torch.utils.data import Dataset

READERS = 4
"""Threads that decode; more wait for the disk."""
EachWaves: TypeAlias = list[Waves | None]
_OUT = "a path that leads out of the folder of the pictures"


class ImageData(TableData):
    """Pictures in memory, 8 bits a channel, in the contract's size; see ``SiloData``.

    Args:
        pixels: uint8 (n, channels, *size).
        labels, folds, records, patients: as of ``TableData``.
        about: ``source``, ``synthetic`` and ``aside`` of ``TableData``.
    """

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64],
        folds: NDArray[np.int64],
        records: list[str],
        patients: list[str] | None,
        *,
        picture: Picture,
        **about: Any,
    ) -> None:
        super().__init__(pixels, labels, folds, records, patients, **about)  # type: ignore[arg-type]
        self._pixels = pixels
        self._picture = picture

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 (channels, *size), normalised, and int label or findings."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.batch_records import BatchRecords
        from tightframe.data.images.views import Views

        views = Views(self._pixels, self._rows[fold], self._picture, augment_seed)
        return BatchRecords(self.labels(fold), views)


def open_site(site: ImagesSite, options: ImagesOptions) -> TableData:
    """Open the pictures of a configured site: all are read, once.

    Raises:
        DataError: as ``data.table.silo.open_site``; TF-203 if ``root`` is no folder.
    """
    contract = options.contract
    check_mapping(contract, site)
    rows, encoded, waves = encoded_records(contract, site)
    refuse_broken(encoded, site)
    contents = partial(file_contents, rows.cells[contract.picture.column], site.root, waves)
    return divided_pictures(encoded, contract, contents)


def divided_pictures(
    encoded: Encoded, contract: PictureContract, contents: Callable[[], Iterable[bytes]] | None = None
) -> TableData:
    """Return the pictures that keep the contract, in folds; see ``data.table.silo.divided``."""
    return divided(encoded, contract, partial(ImageData, picture=contract.picture, contents=contents))


def file_contents(paths: Cells, root: Path, waves: EachWaves) -> Iterator[Pictured]:
    """Yield the bytes of pictures' files, and their looks; file names do not count.

    Args:
        paths: below ``root``; a path without a file is skipped.
        waves: of the picture of each path (``data.looks``).
    """
    by_path: dict[Path, Waves | None] = {}
    for text, own in zip(paths, waves, strict=True):
        try:
            path = place_of(text or "", root.resolve())
        except UnfitError:
            continue  # reported by the contract's check
        if path.is_file():
            by_path.setdefault(path, own)
    return (Pictured.of(path.read_bytes(), own) for path, own in by_path.items())


def encoded_records(contract: PictureContract, site: ImagesSite) -> tuple[Rows, Encoded, EachWaves]:
    """Return the rows of the manifest, all records with their pixels as features, uint8, and their waves.

    Raises:
        DataError: TF-203 if ``root`` is no folder, TF-218 if folders cannot give what the contract wants; as
            ``read`` for a manifest.
    """
    if not site.root.is_dir():
        raise DataError(
            f"Expected the pictures in {site.root}, but there is no such folder: correct `root`, and check "
            "that this process may read it.",
            code="TF-203",
        )
    rows = folder_rows(contract, site.root) if site.layout == "folders" else read_manifest(contract, site)
    encoded = encode(rows, contract, site)
    pixels, waves, faults = _all_pixels(rows.cells[contract.picture.column], contract.picture, site.root)
    broken = encoded.broken.copy()
    findings = list(encoded.findings)
    for rule, places in sorted(faults.items(), key=lambda item: item[1]):
        broken[places] = True
        findings.append(Finding(contract.picture.column, rule, tuple(encoded.numbers[places].tolist())))
    features: Any = pixels
    return rows, replace(encoded, features=features, broken=broken, findings=tuple(findings)), waves


def folder_rows(contract: PictureContract, root: Path) -> Rows:
    """Return the files below a folder of classes as rows, in the order of their paths.

    Raises:
        DataError: TF-218 if the contract has columns that folders do not give.
    """
    fold = None if contract.fold is None else contract.fold.column
    findings = contract.label.columns if isinstance(contract.label, MultiLabel) else ()
    if columns := [column for column in (*findings, contract.patient, fold) if column is not None]:
        raise DataError(
            f"Expected a contract that folders can keep, but it wants the columns {columns}, which they "
            "do not have: write a manifest.",
            code="TF-218",
        )
    files = folder_files(root)
    names: Cells = [str(path) for path in files]
    cells: dict[str, Cells] = {
        contract.picture.column: names,
        contract.label.columns[0]: [path.parts[0] for path in files],
    }
    if contract.record is not None:
        cells[contract.record] = list(names)
    return Rows(cells, list(range(1, len(files) + 1)), str(root))


def folder_files(root: Path) -> list[PurePosixPath]:
    """Return the files below the folders of a folder, relative to it, sorted; no hidden ones."""
    listed = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = PurePosixPath(Path(folder).relative_to(root).as_posix())
        listed += [inside / name for name in files if not name.startswith(".")]
    return sorted(path for path in listed if len(path.parts) > 1)


def place_of(text: str, root: Path) -> Path:
    """Return the file that a manifest's path names.

    Args:
        text: relative to the folder.
        root: the folder, resolved.

    Raises:
        UnfitError: if it is absolute, or leads out of the folder, by a link too.
    """
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or "\0" in text:
        raise UnfitError(_OUT)
    try:
        place = (root / path).resolve()
    except (OSError, RuntimeError):  # a circle of links
        raise UnfitError("no such file") from None
    if not place.is_relative_to(root):
        raise UnfitError(_OUT)
    return place


def _all_pixels(paths: Cells, picture: Picture, root: Path) -> tuple[NDArray[np.uint8], EachWaves, Faults]:
    """Return the pixels of all rows, (n, channels, *size), the waves of the files' own, and the faults."""
    folder = root.resolve()
    pixels = np.zeros((len(paths), *picture.shape), np.uint8)
    waves: EachWaves = [None] * len(paths)
    faults: Faults = {}
    places: set[Path] = set()
    to_read: list[tuple[int, Path]] = []
    for row, text in enumerate(paths):
        try:
            if text is None:
                raise UnfitError("no path")
            place = place_of(text, folder)
            if place in places:
                raise UnfitError("the picture of an earlier row")
            places.add(place)
            to_read.append((row, place))
        except UnfitError as error:
            faults.setdefault(error.rule, []).append(row)

    def one(item: tuple[int, Path]) -> str | None:
        row, place = item
        try:
            original = read(place, picture)
            waves[row] = waves_of(original)  # independent of the contract's size
            pixels[row] = fitted(original, picture)
        except UnfitError as error:
            return error.rule
        return None

    with quiet(), ThreadPoolExecutor(READERS) as pool:
        for (row, _), rule in zip(to_read, pool.map(one, to_read), strict=True):
            if rule is not None:
                faults.setdefault(rule, []).append(row)
    return pixels, waves, {rule: sorted(rows) for rule, rows in faults.items()}
