"""Pixels of files against independent formulas, and every kind of broken file by its rule."""

from __future__ import annotations

import gzip
import io
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)
from tests.support.pictures import noise, write_dicom

from tightframe.data.images.contract import Picture
from tightframe.data.images.files import UnfitError, fitted, read
from tightframe.errors import DataError


def picture(**values: Any) -> Picture:
    return Picture.model_validate({"column": "file", "size": [16, 16], "colour": "gray", **values})


WINDOW = {"low": -100.0, "high": 300.0}


def test_pillow_files_have_their_own_pixels(tmp_path: Path) -> None:
    colours, grey, deep = noise((20, 24, 3)), noise((20, 24)), noise((20, 24), most=65536)
    file = tmp_path / "a"
    Image.fromarray(colours).save(file, "PNG")
    np.testing.assert_array_equal(read(file, picture(colour="rgb")), colours)
    Image.fromarray(colours).save(file, "TIFF")
    np.testing.assert_array_equal(read(file, picture(colour="rgb")), colours)
    Image.fromarray(grey).save(file, "PNG")
    np.testing.assert_array_equal(read(file, picture())[..., 0], grey)
    Image.fromarray(np.repeat(grey[..., None], 3, 2)).save(file, "PNG")
    np.testing.assert_array_equal(read(file, picture())[..., 0], grey), "three equal channels are grey"
    Image.fromarray(colours).quantize(17).save(file, "PNG")
    expected = np.asarray(Image.fromarray(colours).quantize(17).convert("RGB"))
    np.testing.assert_array_equal(read(file, picture(colour="rgb")), expected)
    Image.fromarray(np.dstack([colours, np.full((20, 24), 255, np.uint8)])).save(file, "PNG")
    np.testing.assert_array_equal(read(file, picture(colour="rgb")), colours), "an opaque alpha channel"
    for kind in ("PNG", "TIFF"):
        Image.fromarray(deep).save(file, kind)
        whole = np.rint(deep.astype(np.float64) / 65535 * 255)
        assert np.abs(read(file, picture())[..., 0] - whole).max() <= 1
        found = read(file, picture(window={"low": 1000.0, "high": 3000.0}))[..., 0]
        part = np.rint(np.clip((deep.astype(np.float64) - 1000) / 2000, 0, 1) * 255)
        assert np.abs(found - part).max() <= 1
    floats = np.random.default_rng(0).normal(100, 100, (20, 24)).astype(np.float32)
    Image.fromarray(floats).save(file, "TIFF")
    part = np.rint(np.clip((floats + 100) / 400, 0, 1) * 255)
    assert np.abs(read(file, picture(window=WINDOW))[..., 0].astype(int) - part).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_in_exif_is_applied(orientation: int, tmp_path: Path) -> None:
    """By the definition of tag 274: where row 0 and column 0 of what is stored are to be seen."""
    stored = np.kron(noise((4, 5)), np.ones((8, 8), np.uint8))
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.T,
        6: stored.T[:, ::-1],
        7: stored[::-1, ::-1].T,
        8: stored.T[::-1],
    }[orientation]
    np.testing.assert_array_equal(read(tmp_path / "a.png", picture())[..., 0], turned)


def test_dicom_values_follow_slope_window_and_photometric_interpretation(tmp_path: Path) -> None:
    file = tmp_path / "a"
    stored = (noise((20, 24), most=4000).astype(np.int16) - 1000).astype(np.int16)
    ct = {"RescaleSlope": 0.5, "RescaleIntercept": -24.0, "Modality": "CT"}
    write_dicom(file, stored, **ct)
    units = stored * 0.5 - 24
    expected = np.clip((units + 100) / 400, 0, 1) * 255
    found = read(file, picture(window=WINDOW, modality="CT"))[..., 0]
    assert np.abs(found - expected).max() <= 0.51
    write_dicom(file, stored, "MONOCHROME1", **ct)
    assert np.abs(read(file, picture(window=WINDOW))[..., 0] - (255 - expected)).max() <= 0.51
    colours = noise((20, 24, 3))
    write_dicom(file, colours, "RGB")
    np.testing.assert_array_equal(read(file, picture(colour="rgb")), colours)
    write_dicom(file, colours, "YBR_FULL")
    y, b, r = (colours[..., place].astype(np.float64) for place in range(3))
    # ITU-T T.871 (JFIF), full range.
    rgb = np.stack(
        [y + 1.402 * (r - 128), y - 0.344136 * (b - 128) - 0.714136 * (r - 128), y + 1.772 * (b - 128)], 2
    )
    assert np.abs(read(file, picture(colour="rgb")) - np.clip(rgb, 0, 255)).max() <= 1.5


def test_volumes_are_turned_by_their_affine_whatever_their_name(tmp_path: Path) -> None:
    """One object stored in two orders of axes is the same record; slices go up, rows to the back."""
    values = np.random.default_rng(1).normal(100, 120, (20, 22, 24)).astype(np.float32)  # x, y, z
    upright = nibabel.Nifti1Image(values, np.eye(4))
    nibabel.save(upright, tmp_path / "a.nii")
    # The same, stored with z first and pointing down.
    affine = np.array([[0, 0, 1, 0], [0, 1, 0, 0], [-1, 0, 0, 23], [0, 0, 0, 1]], float)
    nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0)[::-1], affine), tmp_path / "b.nii.gz")
    nibabel.save(nibabel.Nifti2Image(values[..., None], np.eye(4)), tmp_path / "c.nii")
    (tmp_path / "b.nii.gz").rename(tmp_path / "b")
    wanted = picture(size=[16, 16, 16], window=WINDOW, fit="stretch")
    expected = np.clip((values + 100) / 400, 0, 1) * 255
    for name in ("a.nii", "b", "c.nii"):
        found = read(tmp_path / name, wanted)
        assert found.shape == (24, 22, 20, 1)
        for x, y, z in ((0, 0, 0), (3, 21, 5), (19, 7, 23)):
            assert abs(float(found[z, 21 - y, 19 - x, 0]) - expected[x, y, z]) <= 0.51, name


def test_a_volume_is_scaled_as_pillow_scales_each_axis() -> None:
    pixels = noise((40, 36, 33))[..., None]
    wanted = picture(size=[16, 20, 30], window=WINDOW, fit="stretch")
    values = pixels[..., 0].astype(np.float32)
    for axis, side in enumerate(wanted.size):
        moved = np.moveaxis(values, axis, -1)
        flat = Image.fromarray(np.ascontiguousarray(moved).reshape(-1, moved.shape[-1]))
        made = np.asarray(flat.resize((side, flat.height), Image.Resampling.BILINEAR))
        values = np.moveaxis(made.reshape(*moved.shape[:-1], side), -1, axis)
    found = fitted(pixels, wanted)
    assert found.shape == (1, 16, 20, 30)
    assert np.abs(found[0] - values).max() <= 0.6


def test_a_picture_covers_fits_or_is_stretched() -> None:
    """The scaling against torch's antialiased one; what is kept and what is black by its place."""
    pixels = noise((40, 80, 3))
    scale = torch.nn.functional.interpolate
    whole = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    to = {
        name: {"size": size, "mode": "bilinear", "antialias": True}
        for name, size in (("crop", (16, 32)), ("pad", (8, 16)), ("stretch", (16, 16)))
    }
    cropped = scale(whole, **to["crop"])[0, :, :, 8:24].numpy()
    assert np.abs(fitted(pixels, picture(colour="rgb")) - cropped).max() <= 1.01
    padded = fitted(pixels, picture(colour="rgb", fit="pad"))
    assert not padded[:, :4].any() and not padded[:, 12:].any()
    assert np.abs(padded[:, 4:12] - scale(whole, **to["pad"])[0].numpy()).max() <= 1.01
    stretched = fitted(pixels, picture(colour="rgb", fit="stretch"))
    assert np.abs(stretched - scale(whole, **to["stretch"])[0].numpy()).max() <= 1.01
    exact = fitted(pixels[:16, :16], picture(colour="rgb", fit="exact"))
    np.testing.assert_array_equal(exact, pixels[:16, :16].transpose(2, 0, 1))


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def saved(kind: str, image: Image.Image, **more: Any) -> Callable[[Path], None]:
    return lambda path: image.save(path, kind, **more)


def cut(write: Callable[[Path], None], share: float) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        write(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return made


def stored(*arguments: Any, **elements: Any) -> Callable[[Path], None]:
    return lambda path: write_dicom(path, *arguments, **elements)


def nifti(values: np.ndarray, **header: Any) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        image = nibabel.Nifti1Image(values, np.eye(4))
        data = bytearray(image.to_bytes())
        for place, content in header.items():
            start = int(place.removeprefix("at"))
            data[start : start + len(content)] = content
        path.write_bytes(bytes(data))

    return made


GREY, RGB = Image.fromarray(noise((20, 20))), Image.fromarray(noise((20, 20, 3)))
CLEAR = Image.fromarray(np.dstack([noise((20, 20, 3)), noise((20, 20), 5)]))
CUBE = np.ones((18, 18, 18), np.float32)
VOLUME = {"size": [16, 16, 16], "window": WINDOW}
DAMAGED = "cannot be decoded"
ENVELOPE = bytes.fromhex("308006092a864886f70d010703a080") + bytes(200)
"""The beginning of a CMS enveloped-data object, as which DICOM Secure Media encrypts files."""
BROKEN: list[tuple[str, Callable[[Path], Any], dict[str, Any], str]] = [
    ("nothing", lambda path: path.write_bytes(b""), {}, "an empty file"),
    ("missing", lambda path: None, {}, "no such file"),
    ("folder", lambda path: path.mkdir(), {}, "no file"),
    ("text", lambda path: path.write_text("not a picture"), {}, "another kind of file"),
    ("gif", saved("GIF", GREY), {}, "another kind of file"),
    ("truncated png", cut(saved("PNG", RGB), 0.5), {"colour": "rgb"}, DAMAGED),
    ("truncated jpeg", cut(saved("JPEG", RGB), 0.5), {"colour": "rgb"}, DAMAGED),
    ("truncated tiff", cut(saved("TIFF", GREY), 0.5), {}, DAMAGED),
    ("bomb", lambda path: path.write_bytes(png_of_size(60_000, 60_000)), {}, "more than 67108864 pixels"),
    ("large", lambda path: path.write_bytes(png_of_size(9_000, 9_000)), {}, "more than 67108864 pixels"),
    ("pages", saved("TIFF", GREY, save_all=True, append_images=[GREY]), {}, "several pictures"),
    ("animated", saved("PNG", GREY, save_all=True, append_images=[RGB.convert("L")]), {}, "several pictures"),
    ("cmyk", saved("JPEG", RGB.convert("CMYK")), {"colour": "rgb"}, "another colour space (CMYK)"),
    ("lab", saved("TIFF", Image.new("LAB", (20, 20))), {"colour": "rgb"}, "another colour space (LAB)"),
    ("alpha", saved("PNG", CLEAR), {"colour": "rgb"}, "transparent pixels"),
    ("clear colour", saved("PNG", GREY, transparency=7), {}, "transparent pixels"),
    ("grey for colour", saved("PNG", GREY), {"colour": "rgb"}, "grey, where the contract has colours"),
    ("colour for grey", saved("PNG", RGB), {}, "colours, where the contract has grey"),
    ("32 bits", saved("TIFF", Image.fromarray(np.ones((20, 20), np.float32))), {}, "need a `window`"),
    (
        "no number",
        saved("TIFF", Image.fromarray(np.full((20, 20), np.nan, np.float32))),
        {"window": WINDOW},
        "values that are not finite",
    ),
    ("small", saved("PNG", GREY.crop((0, 0, 12, 20))), {}, "fewer pixels than the contract's"),
    ("other size", saved("PNG", GREY), {"fit": "exact"}, "another size than the contract's"),
    ("dicom frames", stored(noise((2, 20, 20)), NumberOfFrames=2), {}, "several pictures"),
    ("dicom modality", stored(noise((20, 20))), {"modality": "CT"}, "another modality"),
    ("dicom palette", stored(noise((20, 20)), "PALETTE COLOR"), {}, "another photometric interpretation"),
    ("dicom without pixels", stored(noise((20, 20)), PixelData=None), {}, "DICOM without pixels"),
    ("dicom short", stored(noise((20, 20)), Rows=40), {}, "DICOM that " + DAMAGED),
    ("dicom truncated", cut(stored(noise((20, 20))), 0.6), {}, DAMAGED),
    ("dicom bomb", stored(noise((20, 20)), Rows=60_000, Columns=60_000), {}, "more than 67108864 pixels"),
    (
        "dicom compressed",
        stored(noise((20, 20)), PixelData=encapsulate([b"\0" * 64]), syntax=JPEGLSLossless),
        {},
        "compressed in a way that cannot be decoded here",
    ),
    (
        "dicom damaged jpeg 2000",
        stored(noise((20, 20)), PixelData=encapsulate([b"\0" * 64]), syntax=JPEG2000Lossless),
        {},
        "compressed in a way that cannot be decoded here, or damaged",
    ),
    ("dicom encrypted", lambda path: path.write_bytes(ENVELOPE), {}, "another kind of file"),
    ("dicom deflated", stored(noise((20, 20)), syntax=DeflatedExplicitVRLittleEndian), {}, "deflated DICOM"),
    ("no volume", saved("PNG", GREY), VOLUME, "another kind of file than NIfTI"),
    ("nifti truncated", cut(nifti(CUBE), 0.5), VOLUME, DAMAGED),
    ("nifti series", nifti(np.ones((18, 18, 18, 2), np.float32)), VOLUME, "several volumes"),
    ("nifti plane", nifti(np.ones((18, 18), np.float32)), VOLUME, "several volumes, or none"),
    (
        "nifti bomb",
        nifti(CUBE, at42=struct.pack("<3h", 9000, 9000, 9000)),
        VOLUME,
        "more than 134217728 voxels",
    ),
    ("nifti no number", nifti(CUBE * np.nan), VOLUME, "values that are not finite"),
    (
        "gzip of text",
        lambda path: path.write_bytes(gzip.compress(b"x" * 600)),
        VOLUME,
        "another kind of file",
    ),
    ("gzip cut", cut(lambda path: path.write_bytes(gzip.compress(bytes(9))), 0.5), VOLUME, DAMAGED),
]


@pytest.mark.parametrize(
    ("write", "contract", "rule"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN]
)
def test_a_broken_file_is_named_by_its_rule_and_nothing_of_it(
    write: Callable[[Path], Any], contract: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "Mueller_Anna"
    write(path)
    wanted = picture(**contract)
    with pytest.raises(UnfitError) as caught:
        fitted(read(path, wanted), wanted)
    assert rule in caught.value.rule
    assert "Mueller" not in str(caught.value) and "Secret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def compressed(kind: str, size: int) -> Callable[[Path], None]:
    """A DICOM file of 8 x 8 pixels by its header, whose compressed picture is of another size."""

    def made(path: Path) -> None:
        content = io.BytesIO()
        if kind == "RLE":
            content.write(struct.pack("<16I", 1, 64, *[0] * 14) + b"\x81\x00" * (size * size // 128))
        else:
            Image.new("L", (size, size)).save(content, kind)
        syntax = {"RLE": RLELossless, "JPEG": JPEGBaseline8Bit, "JPEG2000": JPEG2000Lossless}[kind]
        write_dicom(path, noise((8, 8)), PixelData=encapsulate([content.getvalue()]), syntax=syntax)

    return made


def extended(after: bytes, **fields: Any) -> Callable[[Path], None]:
    """A packed volume that unpacks to 64 MiB before its voxels, or claims more than it has."""

    def made(path: Path) -> None:
        header = nibabel.Nifti1Header()
        header.set_data_shape((18, 18, 18))
        header["magic"], header["vox_offset"] = b"n+1", 352
        for name, value in fields.items():
            header[name] = value
        path.write_bytes(gzip.compress(header.binaryblock + after, 1))

    return made


EXTENSION = bytes([1, 0, 0, 0]) + struct.pack("<ii", 2**26, 6) + bytes(2**26)
LARGE: list[tuple[str, Callable[[Path], None], dict[str, Any], str]] = [
    ("nifti extension", extended(EXTENSION, vox_offset=352 + 2**26), VOLUME, "voxels that begin later"),
    ("nifti claim", extended(bytes(900), dim=[3, 512, 512, 256, 1, 1, 1, 1]), VOLUME, DAMAGED),
    (
        "dicom jpeg",
        compressed("JPEG", 1000),
        {},
        "compressed in a way that cannot be decoded here, or damaged",
    ),
    ("dicom jpeg 2000", compressed("JPEG2000", 1000), {}, "or damaged"),
    ("dicom rle", compressed("RLE", 1000), {}, "or damaged"),
]
"""Small files that would take tens of MiB."""


@pytest.mark.parametrize(("write", "contract", "rule"), [c[1:] for c in LARGE], ids=[c[0] for c in LARGE])
def test_no_more_is_unpacked_than_the_header_justifies(
    write: Callable[[Path], None],
    contract: dict[str, Any],
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "a")
    decoded: list[object] = []
    monkeypatch.setattr(pydicom.pixels, "pixel_array", decoded.append)  # which takes memory outside of Python
    tracemalloc.start()
    try:
        with pytest.raises(UnfitError) as caught:
            read(tmp_path / "a", picture(**contract))
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert rule in caught.value.rule and not decoded


def jpeg_frame(*sofs: tuple[int, int, int]) -> bytes:
    """A JPEG's markers, each frame header of (marker, bits, side); no scan of it is decoded."""
    comment, scan = b"\xff\xfe\x00\x08\xff\xc0\x00\x08\x00\x00", bytes.fromhex("ffda0008010100003f00")
    parts = (struct.pack(">BBHBHHB3x", 0xFF, mark, 11, bits, side, side, 1) for mark, bits, side in sofs)
    return b"\xff\xd8" + comment + b"\xff" + b"".join(parts) + scan + b"\xff\xd9"


@pytest.mark.parametrize(
    ("syntax", "sofs", "asked"),
    [
        (JPEGExtended12Bit, [(0xC1, 12, 8)], True),
        (JPEGLosslessSV1, [(0xC3, 16, 8)], True),
        (JPEGLosslessSV1, [(0xC3, 16, 4000)], False),
        (JPEGLosslessSV1, [(0xC3, 16, 8), (0xC3, 16, 4000)], False),
        (JPEGLosslessSV1, [], False),
        (JPEGLSLossless, [(0xF7, 16, 8)], False),
    ],
)
def test_a_decoder_is_asked_for_jpegs_of_any_bits_that_have_the_headers_size(
    syntax: Any,
    sofs: list[tuple[int, int, int]],
    asked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pillow reads 8 bits only; pylibjpeg and gdcm, where a site has them, up to 16."""
    values, content = noise((8, 8)).astype(np.uint16), encapsulate([jpeg_frame(*sofs)])
    write_dicom(tmp_path / "a", values, PixelData=content, syntax=syntax)
    monkeypatch.setattr(pydicom.pixels, "pixel_array", lambda _: values)
    if asked:
        assert read(tmp_path / "a", picture(size=[8, 8])).size == 64
        return
    with pytest.raises(UnfitError, match="or damaged"):
        read(tmp_path / "a", picture(size=[8, 8]))


@pytest.mark.parametrize(("package", "extra"), [("pydicom", "dicom"), ("nibabel", "nifti")])
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, of = tmp_path / "a", picture()
    if package == "pydicom":
        write_dicom(file, noise((20, 24)))
    else:
        nibabel.save(nibabel.Nifti1Image(np.zeros((16, 16, 16), np.float32), np.eye(4)), tmp_path / "a.nii")
        file, of = tmp_path / "a.nii", picture(size=[16, 16, 16], window=WINDOW)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"^TF-219: .*{package}.*'tightframe\[{extra}\]'"):
        read(file, of)
