"""Records for a trained model from files: pictures, DICOM files, rows of a table.

Problems are collected, not raised, so that one broken file among a thousand does not end a run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.data.contract import Contract
from tightframe.data.forms import PictureForm, Pixels, TableForm
from tightframe.data.images import dicom
from tightframe.data.images.files import open_picture
from tightframe.data.table import CSV_ENDINGS, PARQUET_ENDINGS, TableSite
from tightframe.data.table.encoding import features_of
from tightframe.data.table.sources.rows import read
from tightframe.errors import ModelError, TightframeError

if TYPE_CHECKING:
    from tightframe.inference.model import TrainedModel

PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
DICOM = (".dcm", ".dicom")
TABLE = ".csv"
MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow's modes with 8 bits per channel."""
MOST_COLUMNS = 100_000


@dataclass(frozen=True)
class Problem:
    """An input without a prediction.

    Attributes:
        reason: what was expected, and what came.
    """

    name: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.code}: {self.reason}"


class Inputs(Protocol):
    """Inputs for a model, in order."""

    problems: list[Problem]
    left: int

    def __len__(self) -> int:
        """Return the number of inputs, unreadable ones included."""

    def records(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, record) of each readable input; the others go to ``problems``."""


def find(
    model: TrainedModel,
    places: Sequence[Path],
    *,
    originals: bool = False,
    name_column: str | None = None,
    modality: str | None = None,
    entry: TableSite | None = None,
) -> Inputs:
    """Find the inputs, and check their form against the model's before any computation.

    Args:
        places: files, or folders with pictures; for a model of a table one CSV file.
        originals: pictures are the camera's, to be prepared like training records.
        name_column: column of a table that names a row in the output.
        modality: the only one that DICOM files may have.
        entry: of a site, for a table with its own names, codes and units; by default it has the contract's.

    Raises:
        ModelError: TF-823, listing all problems.
    """
    spec = model.setup.dataset
    options: Any = spec.options.model_validate(model.setup.job.dataset_options)
    form = None if spec.form is None else spec.form(options)
    if form is None:
        raise ModelError(
            f"Expected a data set whose records can be made from files, but {spec.title} does not say how "
            "(`DatasetSpec.form`): use tightframe.load_model and give records as arrays.",
            code="TF-823",
        )
    problems = [
        f"Expected {place}, but there is no such file or folder" for place in places if not _is(place)
    ]
    if isinstance(form, TableForm):
        problems += _wrong_options(originals=originals, modality=modality)
        problems += [f"Expected one CSV file, but got {len(places)}"] if len(places) != 1 else []
        if entry is not None:
            _refuse(problems)
            return OwnRows(places[0], options.contract, entry, name_column)
        problems += [
            f"Expected a table (.csv; with --site-config also .parquet) with {form.said}, but got {place}"
            for place in places
            if _is(place) and place.suffix.lower() != TABLE
        ]
        _refuse(problems)
        return TableRows(places[0], form, name_column)
    if name_column is not None:
        problems.append("--name is for a table: pictures are called by their files")
    if originals and form.originals is None:
        problems.append(f"--originals: pictures of {spec.title} need no preparation")
    files, others = _files(places, form.endings)
    problems += [f"Expected {form.said}, but {path} is no picture" for path in others if path in places]
    if not files and not problems:
        kinds = ", ".join((*PICTURES, "DICOM", *form.endings))
        problems.append(f"Expected {form.said} ({kinds}), but found none in {_named(places)}")
    _refuse(problems)
    return PictureFiles(files, form, originals, modality, left=len(others))


def _wrong_options(*, originals: bool, modality: str | None) -> list[str]:
    flags = {"--originals": originals, "--modality": modality is not None}
    return [
        f"{name} is for pictures, but the model judges rows of a table" for name, on in flags.items() if on
    ]


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        listed = "".join(f"\n  - {item}" for item in problems)
        raise ModelError(f"the model cannot judge this input:{listed}", code="TF-823")


def _is(place: Path) -> bool:
    return place.is_file() or place.is_dir()


def _named(places: Sequence[Path]) -> str:
    return ", ".join(str(place) for place in places[:3])


def _files(places: Sequence[Path], endings: tuple[str, ...] = ()) -> tuple[list[Path], list[Path]]:
    """Return the pictures among files and below folders, sorted by folder, and all other files."""
    pictures: list[Path] = []
    others: list[Path] = []
    for place in places:
        inside = place.is_dir()
        paths = sorted(item for item in place.rglob("*") if item.is_file()) if inside else [place]
        for path in paths:
            is_picture = path.name.lower().endswith((*PICTURES, *DICOM, *endings)) or dicom.is_dicom(path)
            (pictures if is_picture else others).append(path)
    return list(dict.fromkeys(pictures)), others


@dataclass
class PictureFiles:
    """Pictures, each in a file.

    Attributes:
        originals, modality: see ``find``.
        left: number of other files in the folders.
        problems: see ``Inputs``.
    """

    files: list[Path]
    form: PictureForm
    originals: bool = False
    modality: str | None = None
    left: int = 0
    problems: list[Problem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.files)

    def records(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Inputs``."""
        for path in self.files:
            try:
                pixels = self._sized(path, self._pixels(path))
                record: Any = self.form.transform(pixels)
            except TightframeError as error:
                self.problems.append(Problem(str(path), error.code, str(error.args[0])))
                continue
            yield str(path), record

    def _pixels(self, path: Path) -> Pixels:
        """Return the pixels with the form's channels."""
        if self.form.read is not None:
            return self.form.read(path)
        if path.suffix.lower() not in PICTURES:
            picture = dicom.read(path)
            if self.modality is not None and picture.modality != self.modality:
                raise _unreadable(f"the modality {self.modality}", picture.modality or "none")
            return _with_channels(picture.pixels, self.form.channels)
        from PIL import Image

        try:
            with open_picture(path) as image:
                if (frames := getattr(image, "n_frames", 1)) != 1:
                    raise _unreadable("one picture", f"{frames} in one file: split it first")
                if image.mode not in MODES:
                    raise _unreadable("8 bits a channel", f"the mode {image.mode}: convert it first")
                pixels: Pixels = np.asarray(
                    image.convert("RGB" if self.form.channels == 3 else "L"), np.uint8
                )
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise _unreadable("a picture that can be decoded", str(error).replace(str(path), "it")) from None
        return pixels if pixels.ndim == 3 else pixels[..., None]

    def _sized(self, path: Path, pixels: Pixels) -> Pixels:
        """Return the pixels, prepared if they are originals, in the model's size."""
        if self.originals and self.form.originals is not None:
            pixels = self.form.originals(pixels)
        if self.form.size is not None and pixels.shape[:2] != self.form.size:
            height, width = self.form.size
            size = f"{pixels.shape[1]} x {pixels.shape[0]}"
            raise _unreadable(f"{width} x {height} pixels", size)
        return pixels


def _with_channels(pixels: Pixels, channels: int) -> Pixels:
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    raise _unreadable("a grey picture", "colours")


@dataclass
class TableRows:
    """Rows of a CSV file.

    Attributes:
        name_column: see ``find``.
        left: see ``PictureFiles``; always 0.
        problems: see ``Inputs``.

    Raises:
        ModelError: TF-823 for a header without the model's columns, listing all problems.
    """

    path: Path
    form: TableForm
    name_column: str | None = None
    left: int = 0
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        header = self.header
        self._columns, wrong = self.form.choose(header)
        if self.name_column is not None and header.count(self.name_column) != 1:
            wrong = [*wrong, f"Expected one column {self.name_column!r} that names a row"]
        if wrong:
            divided = [
                f"the header has {mark!r} {header[0].count(mark)} times: commas divide columns, and numbers "
                "have a decimal point, unless --site-config names a site's own form"
                for mark in ";\t|"
                if len(header) == 1 and mark in header[0]
            ]
            wrong = [*(divided or wrong), f"the model takes {self.form.said}"]
        _refuse(wrong)
        self._places = [header.index(name) for name in self._columns]

    @cached_property
    def header(self) -> list[str]:
        """Names of the columns."""
        lines = self._lines
        if not lines or len(lines[0][1]) > MOST_COLUMNS:
            raise ModelError(
                f"Expected a table with a header in {self.path}, but it has none.", code="TF-823"
            )
        return [name.strip() for name in lines[0][1]]

    @cached_property
    def _lines(self) -> list[tuple[int, list[str]]]:
        try:
            with self.path.open(newline="", encoding="utf-8-sig") as stream:
                reader = csv.reader(stream)
                return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
        except UnicodeDecodeError as error:
            raise ModelError(
                f"Expected {self.path} as CSV in UTF-8, but byte {error.start} is not. Save it so; of a "
                "contract's table a site's entry (--site-config) may name another `encoding`.",
                code="TF-823",
            ) from None
        except (OSError, csv.Error) as error:
            raise ModelError(f"Expected {self.path} as CSV, but got: {error}.", code="TF-823") from None

    def __len__(self) -> int:
        return len(self._lines) - 1

    def records(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Inputs``."""
        for number, row in self._lines[1:]:
            name = f"line {number}"
            if len(row) != len(self.header):
                reason = f"Expected {len(self.header)} values, as the header has, but got {len(row)}"
                self.problems.append(Problem(name, "TF-824", reason))
                continue
            if self.name_column is not None:
                name = row[self.header.index(self.name_column)].strip() or name
            values = [row[place].strip() for place in self._places]
            encoded: NDArray[np.float32]
            encoded, wrong = self.form.encode(self._columns, values)
            if wrong:
                self.problems.append(Problem(name, "TF-824", "; ".join(wrong)))
                continue
            yield name, torch.from_numpy(encoded)


def _unreadable(expected: str, actual: str) -> ModelError:
    return ModelError(f"Expected {expected}, but got {actual}.", code="TF-824")


class OwnRows:
    """Rows of a site's table with its own names, codes and units; see ``Inputs``.

    They are read as in training, by the site's entry and the job's contract, but need neither the label nor
    other columns that are no inputs of the model.

    Args:
        path: of the file, in place of the entry's own table.
        contract: of the model's job.
        site: the site's entry.
        name_column: the column that names a row in the output, as the file calls it.

    Raises:
        ModelError: TF-823 for another kind of file.
        DataError: as ``data.table.sources.rows.read``.
    """

    left = 0

    def __init__(
        self, path: Path, contract: Contract, site: TableSite, name_column: str | None = None
    ) -> None:
        if not path.name.lower().endswith(CSV_ENDINGS + PARQUET_ENDINGS):
            raise ModelError(
                f"Expected a table ({', '.join(CSV_ENDINGS + PARQUET_ENDINGS)}), but got {path}.",
                code="TF-823",
            )
        learned = [column.column for column in contract.columns]
        wanted = [*learned]
        if name_column is not None:
            self._names = site.columns.get(name_column, name_column)
            wanted += [self._names] if self._names not in learned else []
        entry = site.model_copy(update={"file": path, "database": None})
        self._rows, self._named = read(contract, entry, wanted), name_column is not None
        self._kind = "line" if entry.is_text else "row"
        self._contract, self._entry = contract, entry
        self.problems = [
            Problem(f"{self._kind} {number}", "TF-824", "another number of values than the header")
            for number in self._rows.ragged
        ]

    def __len__(self) -> int:
        return len(self._rows.numbers) + len(self._rows.ragged)

    def records(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Inputs``."""
        cells = self._rows.cells
        features, by_column = features_of(cells, len(self._rows.numbers), self._contract, self._entry)
        wrong: dict[int, list[str]] = {}
        for column, faults in by_column.items():
            for rule, places in faults.items():
                for place in places:
                    wrong.setdefault(place, []).append(f"{column}: {rule}")
        for place, number in enumerate(self._rows.numbers):
            name = (cells[self._names][place] if self._named else None) or f"{self._kind} {number}"
            if place in wrong:
                self.problems.append(Problem(name, "TF-824", "; ".join(wrong[place])))
            else:
                yield name, torch.from_numpy(features[place])
