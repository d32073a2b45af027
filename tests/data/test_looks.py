"""Pictures known by how they look in files that were written anew; other patients' pictures never are."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.support import pictures

from tightframe.data.arrays import ArrayData
from tightframe.data.columns import marked
from tightframe.data.content import Content, content_of
from tightframe.data.image_sets.readers import read_idx
from tightframe.data.images.silo import open_site
from tightframe.data.isic.folder import IMAGES
from tightframe.data.looks import FEWEST, Pictured, channels_last, waves_of
from tightframe.privacy.ledger.entries import ALIKE, DataNoted

Pixels = NDArray[Any]
FAR = ALIKE - 9


def noted(shown: Iterable[Pixels]) -> DataNoted:
    """What a ledger notes of pictures, (H, W), (H, W, 3) or of volumes (D, H, W, 1)."""
    return of_waves(waves_of(item if item.ndim > 2 else item[..., None]) for item in shown)


def of_waves(waves: Iterable[Any]) -> DataNoted:
    content = Content.of(Pictured.of(str(place).encode(), item) for place, item in enumerate(waves))
    return ledger_note(content)


def ledger_note(content: Content | None) -> DataNoted:
    assert content is not None
    return DataNoted("ward", content.digest, "", marked(content.combinations, b"s" * 32))


def alike(one: DataNoted, other: DataNoted) -> int:
    """Most equal places of two sketches."""
    ours, theirs = (np.frombuffer(bytes.fromhex(each.columns or "")[8:], np.uint8) for each in (one, other))
    pairs = itertools.product(ours.reshape(-1, 64), theirs.reshape(-1, 64))
    most = max((int((a == b).sum()) for a, b in pairs), default=0)
    assert one.has_columns_of(other) == (most >= ALIKE)
    return most


def skin(count: int, seed: int, side: int = 72) -> list[Pixels]:
    """Coloured pictures of a dark patch of any shape, on skin that is lit from anywhere, with fine noise."""
    generator = np.random.default_rng(seed)
    across, down = np.meshgrid(*[np.linspace(-1, 1, side)] * 2)
    made = []
    for _ in range(count):
        x, y, wide, turn = generator.normal(0, [0.15, 0.15, 0.2, 1.0])
        along, beside = (
            np.cos(turn) * across + np.sin(turn) * down,
            np.cos(turn) * down - np.sin(turn) * across,
        )
        patch = 1 / (1 + np.exp(12 * (np.hypot((along - x) * np.exp(wide), beside - y) - 0.5)))
        spots = sum(
            strength * np.exp(-((across - a) ** 2 + (down - b) ** 2) / 0.1)
            for strength, a, b in generator.uniform(-1, 1, (6, 3)) * [40, 1, 1]
        )
        light = 190 + generator.normal(0, 12) * across + generator.normal(0, 12) * down
        grey = light - generator.uniform(50, 110) * patch + spots + generator.normal(0, 4, across.shape)
        colour = np.stack([grey, 0.8 * grey, 0.75 * grey + 10 * patch], axis=-1)
        made.append(np.clip(colour, 0, 255).astype(np.uint8))
    return made


def jpeg(shown: Pixels, quality: int) -> Pixels:
    stream = io.BytesIO()
    Image.fromarray(shown).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream))


def scaled(shown: Pixels, side: int) -> Pixels:
    return np.asarray(Image.fromarray(shown).resize((side, side), Image.Resampling.BILINEAR))


def brighter(shown: Pixels) -> Pixels:
    """By up to 3 %, each by its own."""
    factor = 1 + 0.03 * np.cos(float(shown[0, 0, 0]))
    return np.clip(shown * factor, 0, 255).astype(np.uint8)


def cut(shown: Pixels, share: float) -> Pixels:
    """Cut at all four sides."""
    edge = max(1, round(share * len(shown)))
    return shown[edge:-edge, edge:-edge]


def grey(shown: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(shown).convert("L"))


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "JPEG": lambda shown: jpeg(shown, 75),
    "poor JPEG": lambda shown: jpeg(shown, 40),
    "halved": lambda shown: scaled(shown, len(shown) // 2),
    "64 pixels": lambda shown: scaled(shown, 64),
    "grey": grey,
    "brighter or darker": brighter,
    "another tone curve": lambda shown: (255 * (shown / 255) ** 0.8).astype(np.uint8),
    "mirrored": lambda shown: shown[:, ::-1],
    "turned by a right angle, and a poor JPEG": lambda shown: jpeg(np.rot90(shown).copy(), 40),
    "cut by 3 %": lambda shown: cut(shown, 0.015),
    "cut, brighter, halved, grey and a JPEG": lambda shown: jpeg(
        grey(scaled(brighter(cut(shown, 0.01)), len(shown) // 2)), 60
    ),
}


@pytest.fixture(scope="module")
def known() -> tuple[list[Pixels], DataNoted]:
    shown = skin(120, 1)
    return shown, noted(shown)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_same_pictures_written_anew_are_recognised(
    change: Callable[[Pixels], Pixels], known: tuple[list[Pixels], DataNoted]
) -> None:
    shown, first = known
    assert alike(first, noted([change(item) for item in shown[::-1]])) > ALIKE + 3


@pytest.mark.parametrize(("share", "least", "most"), [(0.3, ALIKE, 64), (0.75, 0, ALIKE - 1), (1.0, 0, FAR)])
def test_from_about_half_of_the_pictures_in_common(share: float, least: int, most: int) -> None:
    shown, gone = skin(150, 2, 32), round(share * 150)
    assert least <= alike(noted(shown), noted(shown[gone:] + skin(gone, 3, 32))) <= most


def radiographs(count: int, generator: np.random.Generator) -> list[Pixels]:
    """Nearly black ones of one kind of view, which differ little; four of ten are empty."""
    across, down = np.meshgrid(*[np.linspace(-1, 1, 24)] * 2)
    made = []
    for place in range(count):
        x, y, wide, heart = generator.normal(0, [0.08, 0.08, 0.1, 0.4])
        field = sum(
            np.exp(-((((across - side - x) * np.exp(wide)) / 0.3) ** 2) - (down - y) ** 2)
            for side in (-0.5, 0.5)
        )
        body = field + heart * np.exp(-((across - 0.1) ** 2 + (down - 0.3) ** 2) / 0.08)
        body += generator.normal(0, 0.25, (3, 3))[1, 1] * across + generator.normal(0, 0.2) * down
        empty = np.full(across.shape, place % 3)
        made.append(
            (empty if place % 5 < 2 else 14 * body + generator.normal(0, 1, body.shape))
            .clip(0, 255)
            .astype(np.uint8)
        )
    return made


def test_other_patients_radiographs_are_not_taken_for_the_same() -> None:
    """Empty ones are in all sets."""
    for seed in range(10):
        one, other = (radiographs(120, np.random.default_rng([seed, which])) for which in (0, 1))
        assert alike(noted(one), noted(other)) < ALIKE - 4
    in_another_window = [(item * 5.0).clip(0, 255).astype(np.uint8) for item in one]
    assert alike(noted(one), noted(in_another_window)) > ALIKE + 20


def test_pictures_without_contrast_have_no_look() -> None:
    shown = skin(40, 5, 32)
    flat = [np.full((32, 32, 3), level, np.uint8) for level in range(60)]
    assert noted(shown).columns == noted(flat[:30] + shown + flat[30:]).columns != ""
    assert len(noted(flat).columns or "") == len(noted(flat + shown[: FEWEST - 1]).columns or "") == 16
    assert alike(noted(shown), noted(shown + shown)) == 64, "each counts once"


def test_where_a_set_is_like_itself_throughout_it_has_no_sketch() -> None:
    """Pictures made of two mixed templates: the next hospital's are the same."""
    one, two = skin(2, 6, 32)
    generator = np.random.default_rng(7)
    mixed = [(one * share + two * (1 - share)).astype(np.uint8) for share in generator.random(200)]
    assert len(noted(mixed).columns or "") == 16


def test_a_patients_many_pictures_in_turn_do_not_count_as_that() -> None:
    series = [np.roll(item, step, axis=0) for item in skin(40, 8, 32) for step in range(6)]
    assert alike(noted(series), noted([jpeg(item, 75) for item in series])) > ALIKE + 3
    others = [np.roll(item, step, axis=0) for item in skin(40, 9, 32) for step in range(6)]
    assert alike(noted(series), noted(others)) <= FAR


def volumes(count: int, seed: int) -> list[Pixels]:
    """Bodies of a few bright places, (20, 16, 40, 1)."""
    generator = np.random.default_rng(seed)
    places = np.stack(
        np.meshgrid(*(np.linspace(-1, 1, side) for side in (20, 16, 40)), indexing="ij"), axis=-1
    )
    return [
        sum(
            strength * np.exp(-((places - middle) ** 2).sum(axis=-1, keepdims=True) / 0.15)
            for strength, middle in zip(
                generator.uniform(40, 90, 7), generator.uniform(-1, 1, (7, 3)), strict=True
            )
        )
        .clip(0, 255)
        .astype(np.uint8)
        for _ in range(count)
    ]


def test_volumes_are_known_in_three_dimensions() -> None:
    shown = volumes(60, 1)
    first = noted(shown)
    changes: dict[str, Callable[[Pixels], Pixels]] = {
        "halved": lambda item: item.reshape(10, 2, 8, 2, 20, 2, 1).mean(axis=(1, 3, 5)),
        "mirrored": lambda item: item[:, :, ::-1],
        "other axes": lambda item: np.moveaxis(item, 0, 1),
        "another window": lambda item: np.clip(item.astype(float), 5, 200),
        "cut": lambda item: item[:, :, 1:],
    }
    for name, change in changes.items():
        assert alike(first, noted(map(change, shown))) > ALIKE, name
    assert alike(first, noted(volumes(60, 2))) <= FAR
    assert alike(first, noted(item[10] for item in shown)) <= FAR, "a slice is no volume"


def test_records_of_arrays_are_pictures_too() -> None:
    """Channels first, or none, of any scale; signals and what is too small have no look."""
    shown = np.stack(skin(90, 4, 32))
    labels = np.arange(90) % 2

    def opened(values: Pixels) -> DataNoted:
        parts = {"train": slice(0, 50), "validation": slice(50, 60), "test": slice(60, 90)}
        folds = {fold: (values[part], labels[part]) for fold, part in parts.items()}
        return ledger_note(content_of(ArrayData(folds, source="arrays", num_classes=2)))

    first = opened(np.moveaxis(shown, -1, 1))
    for other in (np.moveaxis(shown, -1, 1) / 255 - 0.5, np.stack([grey(item) for item in shown])):
        assert alike(first, opened(other.astype(np.float32))) > ALIKE
    assert waves_of(channels_last(np.zeros((32, 4)))) is waves_of(np.zeros((32, 1))) is None


def test_dicom_and_its_export_to_png_are_the_same_pictures(tmp_path: Path) -> None:
    """Under another contract: another size, and a crop for a stretch."""
    rows = [[f"r{place}", f"p{place}", str(place), ("NV", "MEL")[place % 2]] for place in range(40)]
    for name in ("dicom", "png"):
        (tmp_path / name).mkdir()
    for place, shown in enumerate(map(grey, skin(40, 10, 48))):
        pictures.write_dicom(tmp_path / "dicom" / str(place), shown.astype(np.uint16) * 16)
        Image.fromarray(scaled(shown, 40)).save(tmp_path / "png" / str(place), "PNG")

    def opened(name: str, **picture: Any) -> DataNoted:
        pictures.write_manifest(tmp_path / name, rows)
        made = pictures.contract({"colour": "gray", **picture})
        return ledger_note(content_of(open_site(pictures.site(tmp_path / name), pictures.options(made))))

    first = opened("dicom", size=[16, 16], window={"low": 0, "high": 4095})
    second = opened("png", size=[12, 24], fit="crop")
    assert first.fingerprint != second.fingerprint and alike(first, second) > ALIKE + 20


def test_sets_of_real_pictures_are_different_and_so_are_halves_of_one(real_data: Path) -> None:
    """Dermoscopy of four centres, at 32 pixels, and handwritten digits, which are all alike."""
    with np.load(real_data / "fed_isic_ham" / "ham32_subset.npz") as stored:
        images, centres = stored["images"], stored["center"]
    skins = [waves_of(item) for item in images]
    digits = [
        waves_of(item[..., None])
        for item in read_idx(real_data / "mnist_t10k" / "t10k-images-idx3-ubyte.gz", 3)[:2000]
    ]
    generator = np.random.default_rng(0)
    for waves, most in ((skins, FAR), (digits, ALIKE - 5)):
        for _ in range(5):
            drawn = generator.permutation(len(waves))
            one, other = ([waves[place] for place in half] for half in np.array_split(drawn, 2))
            assert alike(of_waves(one), of_waves(other)) <= most
    sites = [of_waves(itertools.compress(skins, centres == centre)) for centre in np.unique(centres)]
    for one, other in itertools.combinations(sites, 2):
        assert alike(one, other) <= FAR


REAL: Sequence[tuple[str, Callable[[Pixels], Pixels], int]] = (
    ("a poor JPEG", lambda shown: jpeg(shown, 40), 55),
    ("64 pixels", lambda shown: scaled(shown, 64), 55),
    ("grey", grey, 55),
    ("cut by 3 %", lambda shown: cut(shown, 0.015), ALIKE + 5),
)


@pytest.mark.whole
@pytest.mark.parametrize(("change", "least"), [item[1:] for item in REAL], ids=[item[0] for item in REAL])
def test_real_pictures_written_anew_are_recognised(
    change: Callable[[Pixels], Pixels], least: int, real_data: Path
) -> None:
    files = sorted((real_data / "fed_isic_ham" / IMAGES).iterdir())[::4]
    shown = [np.asarray(Image.open(path).convert("RGB")) for path in files]
    assert alike(noted(shown), noted(map(change, shown))) >= least
