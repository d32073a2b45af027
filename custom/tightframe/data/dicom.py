"""One picture of a DICOM file, as pixels; nothing of its header but what pixels need is read. Needs pydicom.

Read are single-frame images of MONOCHROME1, MONOCHROME2, RGB and YBR_FULL(_422). Grey values become 8 bits:
rescaled (slope and intercept), then by the file's own window, if it has one, else over the whole range of the
bits that are stored, so that one picture is read alike whatever else is read; MONOCHROME1 is inverted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import DataError

PREAMBLE = 128
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422")


@dataclass(frozen=True)
class DicomPicture:
    """Pixels of a file.

    Attributes:
        pixels: uint8, (H, W, 1) grey or (H, W, 3) RGB.
        modality: as the file has it; empty if it has none.
    """

    pixels: NDArray[np.uint8]
    modality: str


def is_dicom(path: Path) -> bool:
    """Check a file's first bytes, since such files often have no ending."""
    try:
        with path.open("rb") as stream:
            return stream.read(PREAMBLE + 4)[PREAMBLE:] == b"DICM"
    except OSError:
        return False


def read(path: Path, *, pixels: bool = True) -> DicomPicture:
    """Read a picture.

    Args:
        path: of the file.
        pixels: False checks the header only; then the pixels are of size 0.

    Raises:
        DataError: TF-206 if pydicom is not installed, if the file is no DICOM picture, of several frames, of
            another photometric interpretation, or compressed in a way that cannot be decoded here.
    """
    pydicom = _pydicom()
    try:
        stored = pydicom.dcmread(path, stop_before_pixels=not pixels)
    except (pydicom.errors.InvalidDicomError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise _wrong(path, "a readable DICOM file", f"{type(error).__name__}") from None
    modality = str(stored.get("Modality", "") or "")
    _check(path, stored)
    if not pixels:
        return DicomPicture(np.zeros((0, 0, 1), np.uint8), modality)
    if "PixelData" not in stored:
        raise _wrong(path, "a DICOM picture", "no pixels")
    try:
        values = pydicom.pixels.pixel_array(stored)  # colours as RGB, whatever the file has
    except Exception as error:  # each decoder has errors of its own
        syntax = getattr(getattr(stored, "file_meta", None), "TransferSyntaxUID", None)
        named = getattr(syntax, "name", None) or "an unknown transfer syntax"
        raise _wrong(
            path, "pixels that can be decoded here", f"{named} ({type(error).__name__}); convert it first"
        ) from None
    if str(stored.PhotometricInterpretation) in GREY:
        return DicomPicture(_grey(stored, values)[..., None], modality)
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[-1] != 3:
        raise _wrong(path, "8 bits for each of three colours", f"{values.dtype} of shape {values.shape}")
    return DicomPicture(np.ascontiguousarray(values, dtype=np.uint8), modality)


def _check(path: Path, stored: Any) -> None:
    frames = int(stored.get("NumberOfFrames", 1) or 1)
    if frames != 1:
        raise _wrong(path, "one picture", f"{frames} frames (multi-frame): split it first")
    photometric = str(stored.get("PhotometricInterpretation", "") or "none")
    if photometric not in (*GREY, *COLOUR):
        raise _wrong(path, f"the photometric interpretation {', '.join((*GREY, *COLOUR))}", photometric)


def _grey(stored: Any, values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return grey values of 8 bits."""
    slope = float(stored.get("RescaleSlope", 1) or 1)
    intercept = float(stored.get("RescaleIntercept", 0) or 0)
    scaled = values.astype(np.float64) * slope + intercept
    center, width = (_first(stored.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if center is not None and width is not None and width >= 1:
        # PS3.3 C.11.2.1.2.1: the linear window.
        low, high = center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2
    else:
        bits, signed = int(stored.BitsStored), bool(int(stored.get("PixelRepresentation", 0)))
        first = -(2 ** (bits - 1)) if signed else 0
        ends = [(first + offset) * slope + intercept for offset in (0, 2**bits - 1)]
        low, high = min(ends), max(ends)
    shares = np.clip((scaled - low) / max(high - low, 1e-9), 0, 1)
    if str(stored.PhotometricInterpretation) == "MONOCHROME1":
        shares = 1 - shares
    grey: NDArray[np.uint8] = np.rint(shares * 255).astype(np.uint8)
    return grey


def _first(value: Any) -> float | None:
    """Return the first of one or several values."""
    if value is None or value == "":
        return None
    many = isinstance(value, list | tuple) or (hasattr(value, "__iter__") and not isinstance(value, str))
    values = list(value) if many else [value]
    return float(values[0]) if values else None


def _pydicom() -> Any:
    try:
        import pydicom
        import pydicom.errors
        import pydicom.pixels
    except ImportError:
        raise DataError(
            "Expected pydicom to read DICOM files, but it is not installed: pip install 'tightframe[dicom]'.",
            code="TF-206",
        ) from None
    return pydicom


def _wrong(path: Path, expected: str, found: str) -> DataError:
    return DataError(f"Expected {expected} in {path}, but got {found}.", code="TF-206")
