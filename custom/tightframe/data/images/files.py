"""One picture or volume of a file, 8 bits a channel, in a contract's size: PNG, JPEG, TIFF, DICOM, NIfTI.

A file's content decides its format, not its name. Of its header only what pixels need is read. An error names
a rule, and nothing from the file: neither a value nor its path. Torch-free.

Scaling is linear with a triangle as wide as a pixel of the result, so that shrinking averages: Pillow's
BILINEAR for pictures, and the same along each axis for volumes.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.data.images import dicom
from tightframe.data.images.contract import Picture, Window
from tightframe.errors import DataError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

Pixels = NDArray[np.uint8]
MOST_BYTES = 2**30
MOST_PIXELS = dicom.MOST_PIXELS
MOST_VOXELS = 2**27
MOST_BEFORE = 2**24
"""Bytes of a volume's file before its voxels: header and extensions, which are passed over."""
FORMATS = ("PNG", "JPEG", "TIFF")
"""Formats that are tried, of all that Pillow reads."""
_GZIP, _NIFTI_PLACE = b"\x1f\x8b", 344
_NIFTI_1, _NIFTI_2 = 348, 540
"""Bytes of the fixed headers."""
_STEP = 2**24
_PLAIN = ("L", "RGB", "1", "P", "PA", "LA", "La", "RGBA", "RGBa", "RGBX")
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")


class UnfitError(DataError):
    """A file that is not a picture of the contract's kind.

    Args:
        rule: the broken rule, in words without any value of the file.
    """

    code = "TF-206"

    def __init__(self, rule: str) -> None:
        self.rule = rule
        super().__init__(f"Expected a picture that keeps the contract, but got {rule}.")


def read(path: Path, picture: Picture) -> Pixels:
    """Return the pixels of a file in their own size: (H, W, channels), or of a volume (D, H, W, 1).

    Axes of a volume are those of the closest anatomical orientation: from the feet up, from the front to the
    back, from right to left. An orientation in EXIF is applied to a picture.

    Raises:
        UnfitError: TF-206.
        DataError: TF-219 without the package that this kind of file takes.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnfitError("no file (a folder, a pipe or a device)")
        if status.st_size > MOST_BYTES:
            raise UnfitError("a file of more than 1 GiB")
        head = head_of(path)
    except FileNotFoundError:
        raise UnfitError("no such file") from None
    except OSError:
        raise UnfitError("a file that this process may not read") from None
    if not head:
        raise UnfitError("an empty file")
    return _decoded(_volume if picture.dimensions == 3 else _flat, path, head, picture)


def read_one(path: Path, picture: Picture) -> Pixels:
    """Return a file's pixels in the contract's size, (*size, channels), for use of a model.

    Raises:
        UnfitError: TF-206, as in training.
    """
    with quiet():
        return np.moveaxis(fitted(read(path, picture), picture), 0, -1)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back the warnings of decoders, which have values of a file in them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file, which show its format."""
    with path.open("rb") as stream:
        return stream.read(512)


def _decoded(
    decode: Callable[[Path, bytes, Picture], Pixels], path: Path, head: bytes, picture: Picture
) -> Pixels:
    try:
        return decode(path, head, picture)
    except DataError:
        raise
    except Exception:  # each decoder has errors of its own, which contain values of the file
        raise UnfitError("a file that cannot be decoded completely") from None


def _flat(path: Path, head: bytes, picture: Picture) -> Pixels:
    if head[dicom.PREAMBLE : dicom.PREAMBLE + 4] == b"DICM":
        return _dicom(path, picture)
    from PIL import Image, ImageOps

    try:
        opened = open_picture(path)
    except Image.DecompressionBombError:
        raise UnfitError(f"more than {MOST_PIXELS} pixels") from None
    except Image.UnidentifiedImageError:
        raise UnfitError("another kind of file than PNG, JPEG, TIFF and DICOM") from None
    with opened as image:
        if getattr(image, "n_frames", 1) != 1:
            raise UnfitError("several pictures in one file")
        mode = image.mode
        if mode not in (*_PLAIN, *_DEEP):
            raise UnfitError(f"another colour space ({mode}) than RGB or grey")
        image.load()
        upright: Any = ImageOps.exif_transpose(image)
        if mode in _DEEP:
            return _of_colour(_deep(np.asarray(upright), mode, picture.window)[..., None], picture)
        if "A" in mode.upper() or "transparency" in image.info:
            upright = upright.convert("RGBA")
            if upright.getextrema()[3] != (255, 255):
                raise UnfitError("transparent pixels")
        if mode in ("L", "1", "LA", "La") and "transparency" not in image.info:
            values = np.asarray(upright.convert("L"))[..., None]
        else:
            values = np.asarray(upright.convert("RGB"))
    pixels, window = _of_colour(values, picture), picture.window
    return pixels if window is None else eight_bits(pixels, window.low, window.high)


def open_picture(source: Path | IO[bytes], formats: tuple[str, ...] = FORMATS) -> ImageFile:
    """Open a picture by Pillow, which reads its header; pixels are decoded later.

    Pillow's own limit is higher, and it would also try formats that start other programs.

    Raises:
        DecompressionBombError: Pillow's, for more than ``MOST_PIXELS`` pixels.
        UnidentifiedImageError: Pillow's, for another kind of file.
    """
    from PIL import Image

    image = Image.open(source, formats=formats)
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise Image.DecompressionBombError(f"more than {MOST_PIXELS} pixels")
    return image


def _of_colour(pixels: Pixels, picture: Picture) -> Pixels:
    """Return pixels with the contract's channels; three equal ones are grey."""
    if pixels.shape[2] == picture.channels:
        return pixels
    if picture.channels == 3:
        raise UnfitError("grey, where the contract has colours")
    if not (pixels == pixels[..., :1]).all():
        raise UnfitError("colours, where the contract has grey")
    return pixels[..., :1]


def _deep(values: NDArray[Any], mode: str, window: Window | None) -> Pixels:
    if window is not None:
        return eight_bits(values, window.low, window.high)
    if not mode.startswith("I;16"):
        raise UnfitError("values of 32 bits, which need a `window` in the contract")
    return eight_bits(values, 0, 2**16 - 1)


def eight_bits(values: NDArray[Any], low: float, high: float) -> Pixels:
    """Return ``rint(255 (x - low) / (high - low))``, from 0 to 255.

    Raises:
        UnfitError: for values that are not finite.
    """
    scaled = (values.astype(np.float32) - np.float32(low)) * np.float32(255.0 / (high - low))
    if not np.isfinite(scaled).all():
        raise UnfitError("values that are not finite")
    pixels: Pixels = np.rint(np.clip(scaled, 0, 255, out=scaled), out=scaled).astype(np.uint8)
    return pixels


def _dicom(path: Path, picture: Picture) -> Pixels:
    window = None if picture.window is None else (picture.window.low, picture.window.high)
    try:
        decoded = dicom.read(path, window=window)
    except dicom.DicomError as error:
        raise UnfitError(error.rule) from None
    if picture.modality is not None and decoded.modality != picture.modality:
        raise UnfitError("DICOM of another modality than the contract's")
    return _of_colour(decoded.pixels, picture)


def _volume(path: Path, head: bytes, picture: Picture) -> Pixels:
    assert picture.window is not None  # noqa: S101 - the contract has checked
    return eight_bits(volume_values(path, head), picture.window.low, picture.window.high)[..., None]


def volume_values(path: Path, head: bytes) -> NDArray[np.float32]:
    """Return the values of a NIfTI file, (D, H, W), in the orientation that ``read`` says.

    Raises:
        UnfitError, DataError: as ``read``; what the decoder raises for a damaged file.
    """
    try:
        import nibabel
    except ImportError:
        raise DataError(
            "Expected the package nibabel, which reads NIfTI files, but it is not installed: pip install "
            "'tightframe[nifti]' at this site.",
            code="TF-219",
        ) from None
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL + 1)  # it logs values of headers
    with gzip.open(path, "rb") if head[:2] == _GZIP else path.open("rb") as stream:
        first = stream.read(_NIFTI_2)
        kind, length = (
            (nibabel.Nifti1Image, _NIFTI_1)
            if first[_NIFTI_PLACE : _NIFTI_PLACE + 3] == b"n+1"
            else (nibabel.Nifti2Image, _NIFTI_2)
            if first[4:7] == b"n+2"
            else (None, 0)
        )
        if kind is None:
            raise UnfitError("another kind of file than NIfTI in one file (.nii, .nii.gz)")
        # Of the fixed header alone: nibabel's own reader unpacks extensions of any size before it is checked.
        header: Any = kind.header_class(first[:length])
        shape = tuple(int(side) for side in header.get_data_shape())
        shape = shape[:3] if shape[3:] == (1,) else shape
        if len(shape) != 3:
            raise UnfitError("several volumes, or none, in one file")
        voxels = math.prod(shape)
        if voxels > MOST_VOXELS:
            raise UnfitError(f"more than {MOST_VOXELS} voxels")
        if (stored := header.get_data_dtype()).kind not in "iuf" or stored.itemsize > 8:
            raise UnfitError("voxels that are no plain numbers")
        before = int(header.get_data_offset())
        if not length <= before <= MOST_BEFORE:
            raise UnfitError(f"voxels that begin later than {MOST_BEFORE} bytes, or in the header")
        stream.read(before - len(first)) if before > len(first) else stream.seek(before)
        slope, shift = header.get_slope_inter()
        scaled = (1.0 if slope is None else slope, 0.0 if shift is None else shift)
        content = _content(stream, voxels * stored.itemsize)
        proxy = kind.ImageArrayProxy(content, (shape, stored, 0, *scaled))
        upright = nibabel.as_closest_canonical(kind(proxy, header.get_best_affine(), header))
        values = np.asarray(upright.dataobj, dtype=np.float32).reshape(upright.shape[:3])
    # Canonical axes go to the right, to the front and up; ours are (depth, height, width) as a reader looks.
    ordered: NDArray[np.float32] = values.transpose(2, 1, 0)[:, ::-1, ::-1]
    return ordered


def _content(stream: io.BufferedIOBase, count: int) -> io.BytesIO:
    """Read a number of bytes, allocating memory for bytes that exist and not for those claimed.

    Raises:
        EOFError: if there are fewer.
    """
    content = io.BytesIO()
    while (remaining := count - content.tell()) > 0:
        if not content.write(stream.read(min(remaining, _STEP))):
            raise EOFError
    content.seek(0)
    return content


def fitted(pixels: Pixels, picture: Picture) -> Pixels:
    """Return a record's pixels, (channels, *size), from those of a file, (*sides, channels).

    Raises:
        UnfitError: for a size that the contract refuses.
    """
    sides, size = pixels.shape[:-1], picture.size
    if picture.fit == "exact" and sides != size:
        raise UnfitError("another size than the contract's")
    ratios = [want / have for want, have in zip(size, sides, strict=True)]
    smaller = min(ratios) > 1 if picture.fit == "pad" else max(ratios) > 1
    if smaller:
        raise UnfitError("fewer pixels than the contract's size")
    if sides != size:
        target = size
        if picture.fit != "stretch":
            factor = max(ratios) if picture.fit == "crop" else min(ratios)
            target = tuple(max(1, round(side * factor)) for side in sides)
        pixels = _placed(_scaled(pixels, target), size)
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0))


def _placed(pixels: Pixels, size: tuple[int, ...]) -> Pixels:
    """Return the middle part of a size along each axis, padded with black."""
    placed = np.zeros((*size, pixels.shape[-1]), np.uint8)
    source, target = [], []
    for want, have in zip(size, pixels.shape[:-1], strict=True):
        count = min(want, have)
        source.append(slice((have - count) // 2, (have - count) // 2 + count))
        target.append(slice((want - count) // 2, (want - count) // 2 + count))
    placed[tuple(target)] = pixels[tuple(source)]
    return placed


def _scaled(pixels: Pixels, size: tuple[int, ...]) -> Pixels:
    if pixels.shape[:-1] == size:
        return pixels
    if len(size) == 2:
        from PIL import Image

        height, width = size
        shown = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        resized = np.asarray(shown.resize((width, height), Image.Resampling.BILINEAR), np.uint8)
        return resized.reshape(height, width, -1)
    values = pixels[..., 0].astype(np.float32)
    for axis, side in enumerate(size):
        if values.shape[axis] != side:
            values = np.moveaxis(
                np.tensordot(_triangles(values.shape[axis], side), values, (1, axis)), 0, axis
            )
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)[..., None]


def _triangles(have: int, want: int) -> NDArray[np.float32]:
    """Return the weights of one axis, (want, have), rows summing to 1."""
    ratio = have / want
    width = max(ratio, 1.0)
    centres = (np.arange(want) + 0.5) * ratio - 0.5
    weights = np.clip(1 - np.abs(np.arange(have) - centres[:, None]) / width, 0, None)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
