"""One picture of a DICOM file, as pixels; of its header only what pixels need is read. Needs pydicom.

Read are single-frame images of MONOCHROME1, MONOCHROME2, RGB and YBR_FULL(_422). Grey values become 8 bits:
rescaled (slope and intercept), then by the file's own window, if it has one, else over the whole range of the
stored bits, so that a picture's pixels do not depend on other files; MONOCHROME1 is inverted.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import DataError

PREAMBLE = 128
MOST_PIXELS = 2**26
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422")
_RLE_SEGMENTS = 15
_SOI, _SOS = b"\xff\xd8", 0xDA
_MOST_MARKERS = 1000
_SOF = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB)
"""JPEG frame headers that are whole pictures: no differential (hierarchical) ones, no JPEG-LS."""


class DicomError(DataError):
    """A file that cannot be read as one picture.

    Args:
        message: with the path, and the file's fault.
        rule: the broken rule, in words without any value of the file.
    """

    code = "TF-206"

    def __init__(self, message: str, rule: str) -> None:
        self.rule = rule
        super().__init__(message)


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


def read(
    path: Path,
    *,
    pixels: bool = True,
    window: tuple[float, float] | None = None,
) -> DicomPicture:
    """Read a picture.

    Args:
        pixels: False checks the header only; then the pixels are of size 0.
        window: rescaled grey values that become black and white, in place of the file's own window.

    Raises:
        DicomError: TF-206 if the file is no DICOM picture, of several frames, more than ``MOST_PIXELS``,
            another photometric interpretation, or compressed in a way that cannot be decoded here.
        DataError: TF-219 if pydicom is not installed.
    """
    pydicom = _pydicom()
    unreadable = "DICOM that cannot be decoded"
    try:
        # A deflated file is unpacked whole before its size is known.
        meta = pydicom.filereader.read_file_meta_info(path)
        if getattr(meta.get("TransferSyntaxUID"), "is_deflated", False):
            raise _wrong(
                path, "a file that is not deflated", "one that is", "deflated DICOM; convert it first"
            )
        stored = pydicom.dcmread(path, stop_before_pixels=not pixels)
        modality = str(stored.get("Modality", "") or "")
        _check(path, stored)
    except DicomError:
        raise
    except Exception as error:  # a broken element raises its reader's own errors
        raise _wrong(path, "a readable DICOM file", f"{type(error).__name__}", unreadable) from None
    if not pixels:
        return DicomPicture(np.zeros((0, 0, 1), np.uint8), modality)
    if "PixelData" not in stored:
        raise _wrong(path, "a DICOM picture", "no pixels", "DICOM without pixels")
    grey = str(stored.PhotometricInterpretation) in GREY
    try:
        if stored.file_meta.TransferSyntaxUID.is_encapsulated:
            _check_frame(stored)
        values = pydicom.pixels.pixel_array(stored)  # colours as RGB, whatever the file has
        values = _grey(stored, values, window) if grey else values
    except Exception as error:  # each decoder has errors of its own
        syntax = getattr(getattr(stored, "file_meta", None), "TransferSyntaxUID", None)
        syntax_name = getattr(syntax, "name", None) or "an unknown transfer syntax"
        compressed = getattr(syntax, "is_compressed", False)
        rule = (
            "DICOM compressed in a way that cannot be decoded here, or damaged" if compressed else unreadable
        )
        found = f"{syntax_name} ({type(error).__name__}); convert it first"
        raise _wrong(path, "pixels that can be decoded here", found, rule) from None
    if grey:
        return DicomPicture(values[..., None], modality)
    if values.dtype != np.uint8 or values.ndim != 3 or values.shape[-1] != 3:
        found = f"{values.dtype} of shape {values.shape}"
        raise _wrong(path, "8 bits for each of three colours", found, "DICOM colours of other than 8 bits")
    return DicomPicture(np.ascontiguousarray(values, dtype=np.uint8), modality)


def _check(path: Path, stored: Any) -> None:
    frames = int(stored.get("NumberOfFrames", 1) or 1)
    if frames != 1:
        found = f"{frames} frames (multi-frame): split it first"
        raise _wrong(path, "one picture", found, "several pictures in one file")
    photometric = str(stored.get("PhotometricInterpretation", "") or "none")
    if photometric not in (*GREY, *COLOUR):
        expected = f"the photometric interpretation {', '.join((*GREY, *COLOUR))}"
        raise _wrong(path, expected, photometric, "DICOM of another photometric interpretation")
    if "ModalityLUTSequence" in stored:
        found = "a table of values (Modality LUT): convert it first"
        raise _wrong(path, "a slope and an intercept of grey values", found, "DICOM with a Modality LUT")
    pixels = int(stored.get("Rows", 0) or 0) * int(stored.get("Columns", 0) or 0)
    if pixels > MOST_PIXELS:
        raise _wrong(path, f"at most {MOST_PIXELS} pixels", f"{pixels}", f"more than {MOST_PIXELS} pixels")


def _check_frame(stored: Any) -> None:
    """Check that a compressed picture has the header's size; decoders use the size in its own stream.

    Raises:
        ValueError: for another size, or a compression whose size is not known here.
    """
    from PIL import Image
    from pydicom.encaps import get_frame
    from pydicom.uid import RLELossless

    frame = get_frame(stored.PixelData, 0, number_of_frames=1)
    size = int(stored.Columns), int(stored.Rows)
    if stored.file_meta.TransferSyntaxUID == RLELossless:
        unpacked = size[0] * size[1] * int(stored.SamplesPerPixel) * int(stored.BitsAllocated) // 8
        fits = _unpacks_to(frame, unpacked + _RLE_SEGMENTS)
    elif frame[:2] == _SOI:
        fits = _jpeg_size(frame) == size
    else:
        with Image.open(io.BytesIO(frame), formats=("JPEG2000",)) as image:
            fits = image.size == size
    if not fits:
        raise ValueError("Expected a compressed picture of the size in the header")


def _jpeg_size(frame: bytes) -> tuple[int, int]:
    """Return columns and rows from the stream of a JPEG of any number of bits (ISO 10918-1, B.2.2).

    Raises:
        ValueError: without exactly one frame header before the first scan.
    """
    at, sizes = len(_SOI), list[tuple[int, int]]()
    for _ in range(_MOST_MARKERS):
        if at + 9 > len(frame) or frame[at] != 0xFF or frame[at + 1] == _SOS:
            break
        marker, length, _, rows, columns = struct.unpack_from(">xBHBHH", frame, at)
        if marker in _SOF:
            sizes.append((columns, rows))
        at += 1 if marker == 0xFF else 2 + max(length, 2)  # a marker may have filling before it
    if len(sizes) != 1:
        raise ValueError("Expected one JPEG frame of a known kind")
    return sizes[0]


def _unpacks_to(frame: bytes, most: int) -> bool:
    """Check that an RLE frame (PS3.5 G) unpacks to at most a number of bytes."""
    count, *starts = struct.unpack("<16I", frame[:64])
    if not 1 <= count <= _RLE_SEGMENTS:
        raise ValueError("Expected 1 to 15 segments")
    total = 0
    for begin, end in pairwise([*starts[:count], len(frame)]):
        at = begin
        while at < end and total <= most:
            control = frame[at]
            total += control + 1 if control < 128 else 257 - control if control > 128 else 0
            at += control + 2 if control < 128 else 2 if control > 128 else 1
    return total <= most


def _grey(stored: Any, values: NDArray[Any], window: tuple[float, float] | None) -> NDArray[np.uint8]:
    """Return grey values of 8 bits.

    Raises:
        ValueError: for another number of axes, or values that are not finite.
    """
    slope = float(stored.get("RescaleSlope", 1) or 1)
    intercept = float(stored.get("RescaleIntercept", 0) or 0)
    scaled = values.astype(np.float64) * slope + intercept
    center, width = (_first(stored.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if window is not None:
        low, high = window
    elif center is not None and width is not None and width >= 1:
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
    if shares.ndim != 2 or not np.isfinite(shares).all():
        raise ValueError("Expected one finite grey value a pixel")
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
        import pydicom.filereader
        import pydicom.pixels
    except ImportError:
        raise DataError(
            "Expected the package pydicom, which reads DICOM files, but it is not installed: pip install "
            "'tightframe[dicom]' at this site.",
            code="TF-219",
        ) from None
    return pydicom


def _wrong(path: Path, expected: str, found: str, rule: str) -> DicomError:
    return DicomError(f"Expected {expected} in {path}, but got {found}.", rule)
