"""Propose a contract of pictures from a manifest or from folders, with the decisions left to a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from tightframe.data.contract import MAX_COLUMNS
from tightframe.data.images import ImagesSite, dicom
from tightframe.data.images.contract import Augment, Picture, PictureContract, Window
from tightframe.data.images.files import UnfitError, head_of, read, volume_values
from tightframe.data.images.silo import folder_files, place_of
from tightframe.data.images.views import NIFTI
from tightframe.data.table.proposal import (
    MISSING,
    Proposal,
    about_title,
    guessed,
    label_columns,
    label_of,
    outwards,
    require_columns,
)
from tightframe.data.table.sources.rows import Cells, read_all
from tightframe.errors import DataError
from tightframe.options import listed

SAMPLE = 200
"""Pictures that are read, at even distances."""
SIDES = (16, 32, 48, 64, 96, 128, 224)
GENTLE = Augment(flips=(), rotate=10.0)
"""Proposed transforms, without mirroring, which can change the finding."""


@dataclass(frozen=True)
class _Look:
    """One picture: its sides, its colours, the limits of a volume's values, its modality."""

    sides: tuple[int, ...]
    colours: bool
    limits: tuple[float, float] | None = None
    modality: str | None = None


def propose(
    path: Path,
    roles: Mapping[str, str | None],
    column: str,
    *,
    size: int | None = None,
    root: Path | None = None,
    title: str | None = None,
) -> Proposal:
    """Propose a contract from a manifest.

    Args:
        roles: as of ``data.table.proposal.propose``.
        column: with the paths of the pictures.
        size: side of the pictures for the model; by default the largest usual one that all of them have.
        root: folder of the pictures; the manifest's by default.
        title: of the data; the file's stem by default.

    Raises:
        DataError: as ``data.table.proposal.propose``; TF-206 if no picture of the sample can be read.
    """
    entry = {**guessed(path), "root": str((root or path.parent).absolute())}
    site = ImagesSite.model_validate({**_without_decimal(entry), "missing": list(MISSING)})
    header, cells, _ = read_all(site, MAX_COLUMNS)
    chosen = {role: name for role, name in roles.items() if name is not None}
    labels = label_columns(chosen.pop("label"), header)
    require_columns(path, header, [*labels, *chosen.values(), column])
    label = label_of(labels, cells)
    named = title or path.name.partition(".")[0]
    label = (label[0], [*([] if title else [about_title(named)]), *label[1]])
    return _proposal(named, chosen, label, column, cells[column], _without_decimal(entry), site.root, size)


def propose_folders(root: Path, *, size: int | None = None, title: str | None = None) -> Proposal:
    """Propose a contract from a folder whose folders are the classes.

    Raises:
        DataError: TF-207 for fewer than 2 classes or more than 20, TF-208 without files, TF-206 as
            ``propose``.
    """
    files = folder_files(root)
    if not files:
        raise DataError(
            f"Expected {root} to have a folder of pictures for each class, but there are none.", code="TF-208"
        )
    label = label_of(["class"], {"class": [path.parts[0] for path in files]})
    label = (label[0], [*([] if title else [about_title(root.name)]), *label[1]])
    entry = {"root": str(root.absolute()), "layout": "folders"}
    chosen = {"record": "record"}
    return _proposal(
        title or root.name, chosen, label, "file", [str(path) for path in files], entry, root, size
    )


def _without_decimal(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "decimal"}


def _proposal(
    title: str,
    chosen: Mapping[str, str],
    label: tuple[dict[str, Any], list[str]],
    column: str,
    paths: Cells,
    entry: dict[str, Any],
    root: Path,
    size: int | None,
) -> Proposal:
    given_paths = [path for path in paths if path is not None]
    sample = given_paths[:: max(1, len(given_paths) // SAMPLE)][:SAMPLE]
    looks, problems = _look(sample, root.resolve())
    if not looks:
        rules = "; ".join(f"{rule} ({count})" for rule, count in problems.most_common(5))
        raise DataError(
            f"Expected {column!r} to hold paths of pictures under {root}, but of {len(sample)} none can be "
            f"read: {rules or 'no paths'}. Is the folder right (--root)?",
            code="TF-206",
        )
    picture, notes = _picture(column, looks, size)
    if problems:
        rules = "; ".join(f"{rule} ({count})" for rule, count in problems.most_common(5))
        notes.append(
            f"{sum(problems.values())} of {len(sample)} files looked at are no such pictures: {rules}."
        )
    contract: dict[str, Any] = {
        "title": title,
        "picture": picture,
        "label": label[0],
        **{role: chosen[role] for role in ("record", "patient") if role in chosen},
        **({"fold": {"column": chosen["fold"]}} if "fold" in chosen else {}),
    }
    try:
        PictureContract.model_validate(contract)
    except ValidationError as error:
        problems_listed = "".join(f"\n  - {line}" for line in listed(error, "contract.", PictureContract))
        raise DataError(
            f"Expected names and codes that a contract can have, but{problems_listed}", code="TF-204"
        ) from None
    first = list(label[1])
    if "patient" not in chosen:
        first.append(
            "No column names the patient (--patient): pictures of one patient may then lie in different "
            "folds, and no job can hide patients."
        )
    return Proposal(contract, entry, (*first, *notes))


def _look(paths: Sequence[str], root: Path) -> tuple[list[_Look], Counter[str]]:
    """Read some pictures; count the faults of the others."""
    looks, problems = [], Counter[str]()
    for text in paths:
        try:
            looks.append(_look_at(place_of(text, root)))
        except UnfitError as error:
            problems[error.rule] += 1
    return looks, problems


def _look_at(path: Path) -> _Look:
    """Return the properties of one file.

    Raises:
        UnfitError: if it is neither a picture nor a volume.
    """
    if path.name.lower().endswith(NIFTI) and path.is_file():
        try:
            values = volume_values(path, head_of(path))
        except DataError:
            raise
        except Exception:  # each decoder has errors of its own
            raise UnfitError("a file that cannot be decoded completely") from None
        low, high = np.quantile(values, (0.005, 0.995))
        return _Look(values.shape, False, (float(low), float(high)))
    try:
        colours, pixels = False, read(path, Picture(column="x", size=(8, 8), colour="gray"))
    except UnfitError as error:
        if not error.rule.startswith("colours"):
            raise
        colours, pixels = True, read(path, Picture(column="x", size=(8, 8), colour="rgb"))
    modality = dicom.read(path, pixels=False).modality if dicom.is_dicom(path) else None
    return _Look(pixels.shape[:2], colours, None, modality)


def _picture(column: str, looks: Sequence[_Look], size: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return the proposed picture, and the open decisions."""
    dimensions = Counter(len(one.sides) for one in looks).most_common(1)[0][0]
    kept = [one for one in looks if len(one.sides) == dimensions]
    least = [min(one.sides[axis] for one in kept) for axis in range(dimensions)]
    most = [max(one.sides[axis] for one in kept) for axis in range(dimensions)]
    values: dict[str, Any] = {"column": column}
    notes = []
    if dimensions == 3:
        values["size"] = [size or _side(side, 96) for side in least]
        values |= {"colour": "gray", "fit": "stretch"}
        low = min(one.limits[0] for one in kept if one.limits)
        high = max(one.limits[1] for one in kept if one.limits)
        low, high = outwards(low, max(high, low + 1e-6))
        values["window"] = Window(low=low, high=high).model_dump()
        notes.append(
            f"window: {low:g} to {high:g} is this file's range, rounded outwards; put in its place what is "
            "possible, or what matters (of CT, in Hounsfield units)."
        )
        notes.append("fit: each axis is scaled alone, whatever the distances of voxels are; resample before.")
    else:
        colours = sum(one.colours for one in kept)
        side = size or _side(min(least), 224)
        values |= {"size": [side, side], "colour": "rgb" if colours else "gray", "fit": "crop"}
        if 0 < colours < len(kept):
            notes.append(
                f"colour: {len(kept) - colours} of {len(kept)} pictures are grey and would break it."
            )
        notes.append(
            f"fit: `crop` scales a picture until it covers {side} x {side} and keeps its middle; take `pad` "
            "if its edges matter."
        )
    ranges = " x ".join(
        f"{low}" if low == high else f"{low} to {high}" for low, high in zip(least, most, strict=True)
    )
    notes.insert(0, f"size: pictures have {ranges} pixels; a network for small ones trains faster.")
    modalities = Counter(one.modality for one in kept if one.modality)
    if len(modalities) == 1 and sum(modalities.values()) == len(kept):
        values["modality"] = next(iter(modalities))
    elif modalities:
        shown = ", ".join(f"{name} {count}" for name, count in modalities.most_common(5))
        notes.append(f"modality: {shown}; should one only take part?")
    values["augment"] = GENTLE.model_dump(mode="json")
    notes.append(
        "augment: nothing is mirrored. Add `horizontal` and `vertical` to `flips` and take more degrees "
        "where that does not change the class, as in dermoscopy."
    )
    return values, notes


def _side(least: int, most: int) -> int:
    """Return the largest usual side that fits into the smallest picture."""
    fitting = [side for side in SIDES if side <= min(least, most)]
    return fitting[-1] if fitting else max(8, min(least, most))
