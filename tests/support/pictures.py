"""Pictures, DICOM files and volumes with a contract, written by Pillow, pydicom and nibabel, for tests."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from tightframe.data.images import ImagesOptions, ImagesSite
from tightframe.data.images.contract import PictureContract

SKIN: dict[str, Any] = {
    "title": "Skin",
    "picture": {"column": "file", "size": [16, 16], "colour": "rgb"},
    "label": {"column": "diagnosis", "classes": [{"code": "NV"}, {"code": "MEL"}]},
    "record": "id",
    "patient": "who",
}
HEADER = ("id", "who", "file", "diagnosis")


def contract(picture: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The contract with other values; None takes a key out."""
    values = {**json.loads(json.dumps(SKIN)), **changes}
    values["picture"] |= dict(picture or {})
    return {key: value for key, value in values.items() if value is not None}


def options(values: Mapping[str, Any] = SKIN) -> ImagesOptions:
    """A job's options."""
    return ImagesOptions(contract=PictureContract.model_validate(values))


def site(folder: Path, **values: Any) -> ImagesSite:
    """A site's entry, with the manifest in the folder of the pictures."""
    return ImagesSite.model_validate({"root": str(folder), "file": str(folder / "manifest.csv"), **values})


def noise(shape: Sequence[int], seed: int = 0, most: int = 256) -> NDArray[Any]:
    """Random pixels."""
    kind = np.uint8 if most <= 256 else np.uint16
    return np.random.default_rng(seed).integers(0, most, tuple(shape)).astype(kind)


def write_manifest(folder: Path, rows: Iterable[Sequence[str]], header: Sequence[str] = HEADER) -> None:
    """Write the manifest."""
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)


def write_skin(folder: Path, count: int = 40, side: int = 16, seed: int = 0) -> list[list[str]]:
    """Write PNG files whose red tells the class, and their manifest; return its rows."""
    folder.mkdir(exist_ok=True)
    rows = []
    for place in range(count):
        pixels = noise((side, side, 3), seed * 1000 + place) // 4 + 60
        pixels[..., 0] += np.uint8(100 * (place % 2))
        Image.fromarray(pixels).save(folder / f"{place}.png")
        rows.append([f"r{seed}-{place}", f"p{seed}-{place // 2}", f"{place}.png", ("NV", "MEL")[place % 2]])
    write_manifest(folder, rows)
    return rows


def write_dicom(path: Path, pixels: NDArray[Any], photometric: str = "MONOCHROME2", **elements: Any) -> None:
    """Write a DICOM file; elements replace its own, None takes one out."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = elements.pop("syntax", ExplicitVRLittleEndian)
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    made = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    made.SOPClassUID, made.SOPInstanceUID = SecondaryCaptureImageStorage, meta.MediaStorageSOPInstanceUID
    made.PatientName, made.Modality = "Secret^Name", "XC"
    colours = photometric not in ("MONOCHROME1", "MONOCHROME2", "PALETTE COLOR")
    made.SamplesPerPixel, made.PhotometricInterpretation = (3 if colours else 1), photometric
    if colours:
        made.PlanarConfiguration = 0
    made.Rows, made.Columns = pixels.shape[-3:-1] if colours else pixels.shape[-2:]
    made.BitsAllocated = made.BitsStored = pixels.dtype.itemsize * 8
    made.HighBit, made.PixelRepresentation = made.BitsStored - 1, int(pixels.dtype.kind == "i")
    made.PixelData = pixels.tobytes()
    for name, value in elements.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    pydicom.dcmwrite(path, made, enforce_file_format=True)
