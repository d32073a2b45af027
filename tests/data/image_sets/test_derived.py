"""Color-MNIST and Rotated-CIFAR10 against their statement in the paper's experiments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tightframe.data.image_sets.derived import ANGLES, Share, color_mnist, rotate, rotated_cifar10
from tightframe.data.image_sets.readers import ImageSet, read_mnist
from tightframe.phases import Fold

RNG = np.random.default_rng(1)
TRAINED: tuple[Fold, ...] = ("train", "validation")
FOLDS: tuple[Fold, ...] = (*TRAINED, "test")


@pytest.fixture(scope="module")
def mnist() -> ImageSet:
    """60,000 images that carry their own number where the subsampling keeps it."""
    images = np.zeros((60_000, 1, 28, 28), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(60_000) & 255
    images[:, 0, 0, 2] = np.arange(60_000) >> 8
    images[:, 0, 0, 4] = 255
    images[:, 0, 1, :] = 77  # odd rows and columns are dropped
    images[:, 0, :, 1] = 77
    return ImageSet(images, RNG.integers(0, 10, 60_000))


@pytest.fixture(scope="module")
def colored(mnist: ImageSet) -> list[Share]:
    return color_mnist(mnist, seed=3)


def number(images: np.ndarray) -> np.ndarray:
    """Which MNIST image each is, read off whichever channel is not black."""
    whole = images.max(axis=1).astype(np.int64)
    return whole[:, 0, 0] + 256 * whole[:, 0, 1]


def color(images: np.ndarray) -> np.ndarray:
    """The channel that is not black."""
    lit = images[:, :, 0, 2] == 255
    assert (lit.sum(axis=1) == 1).all(), "exactly one channel is black"
    return lit.argmax(axis=1)


def test_color_mnist_has_the_stated_sizes_and_no_image_twice(colored: list[Share]) -> None:
    assert len(colored) == 5
    seen = []
    for share in colored:
        assert {fold: len(part) for fold, part in share.folds.items()} == {
            "train": 8000,
            "validation": 2000,
            "test": 10_000,
        }
        assert share.folds["train"].images.shape[1:] == (2, 14, 14)
        seen += [number(share.folds[fold].images) for fold in TRAINED]
        np.testing.assert_array_equal(number(share.folds["test"].images), np.arange(50_000, 60_000))
    together = np.sort(np.concatenate(seen))
    np.testing.assert_array_equal(together, np.arange(50_000))
    assert not np.array_equal(seen[0], np.sort(seen[0])), "the 50,000 are shuffled"


def test_every_second_pixel_is_kept(mnist: ImageSet, colored: list[Share]) -> None:
    images = colored[2].folds["validation"].images
    np.testing.assert_array_equal(images.max(axis=1), mnist.images[number(images)][:, 0, ::2, ::2])


def test_labels_and_colours_agree_as_often_as_stated(mnist: ImageSet, colored: list[Share]) -> None:
    below_five = mnist.labels < 5
    for share, noise in zip(colored, (0.15, 0.30, 0.45, 0.60, 0.75), strict=True):
        for fold in TRAINED:
            part = share.folds[fold]
            np.testing.assert_array_equal(part.labels, below_five[number(part.images)])
            differs = float((color(part.images) != part.labels).mean())
            assert abs(differs - noise) < 5 * np.sqrt(noise * (1 - noise) / len(part))
    test = colored[0].folds["test"]
    flipped = float((test.labels != below_five[number(test.images)]).mean())
    assert abs(flipped - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 10_000)
    differs = float((color(test.images) != test.labels).mean())
    assert abs(differs - 0.9) < 5 * np.sqrt(0.9 * 0.1 / 10_000)


def test_draws_come_from_the_seed_alone(mnist: ImageSet, colored: list[Share]) -> None:
    again, other = color_mnist(mnist, seed=3), color_mnist(mnist, seed=4)
    for fold in FOLDS:
        np.testing.assert_array_equal(again[1].folds[fold].images, colored[1].folds[fold].images)
        assert not np.array_equal(other[1].folds[fold].images, colored[1].folds[fold].images)


def test_color_mnist_of_real_images(real_data: Path) -> None:
    """A small version, cut 4 : 1 : 1."""
    shares = color_mnist(read_mnist(real_data / "mnist_t10k", "test"), seed=0)
    sizes = {fold: [len(share.folds[fold]) for share in shares] for fold in FOLDS}
    assert sizes == {
        "train": [1334, 1333, 1333, 1333, 1333],
        "validation": [334, 334, 333, 333, 333],
        "test": [1667] * 5,
    }
    images = shares[0].folds["train"].images
    assert ((images[:, 0].max(axis=(1, 2)) == 0) ^ (images[:, 1].max(axis=(1, 2)) == 0)).all()


@pytest.fixture(scope="module")
def rotated() -> tuple[ImageSet, list[Share]]:
    """Constant images whose three channels are their number: no rotation changes their middle."""
    images = np.zeros((50_000, 3, 32, 32), dtype=np.uint8)
    for channel in range(3):
        images[:, channel] = ((np.arange(50_000) >> (8 * channel)) & 255)[:, None, None]
    source = ImageSet(images, RNG.integers(0, 10, 50_000))
    return source, rotated_cifar10(source, seed=0)


def middle_number(images: np.ndarray) -> np.ndarray:
    middle = images[:, :, 8, 8].astype(np.int64)
    return middle[:, 0] + 256 * middle[:, 1] + 65_536 * middle[:, 2]


@pytest.mark.whole
def test_rotated_cifar10_has_the_stated_sizes_and_no_image_twice(
    rotated: tuple[ImageSet, list[Share]],
) -> None:
    source, shares = rotated
    seen = []
    for silo, share in enumerate(shares):
        for fold, first, rest in zip(TRAINED, (3334, 1112), (3333, 1111), strict=True):
            part, environments = share.folds[fold], share.environments[fold]
            numbers, counts = np.unique(environments, return_counts=True)
            assert numbers.tolist() == [3 * silo, 3 * silo + 1, 3 * silo + 2]
            # 30,000 = 9 * 3,333 + 3 and 10,000 = 9 * 1,111 + 1: the first ones have one more.
            extra = 3 if fold == "train" else 1
            assert counts.tolist() == [first if n < extra else rest for n in numbers]
            np.testing.assert_array_equal(part.labels, source.labels[middle_number(part.images)])
            seen.append(middle_number(part.images))
        assert share.folds["train"].images.shape[1:] == (3, 16, 16)
        np.testing.assert_array_equal(middle_number(share.folds["test"].images), np.arange(40_000, 50_000))
        assert (share.environments["test"] == -1).all()
    # Each of the 40,000 once: validation begins where training ends.
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(40_000))


def test_each_environment_is_turned_by_its_angle() -> None:
    source = ImageSet(RNG.integers(1, 256, (90, 3, 32, 32), dtype=np.uint8), np.arange(90) % 10)
    for share, angles in zip(rotated_cifar10(source, seed=0), ANGLES, strict=True):
        part = share.folds["train"]
        for number, angle in zip(sorted(set(share.environments["train"].tolist())), angles, strict=True):
            for image in part.images[share.environments["train"] == number]:
                candidates = [pillow(original[:, ::2, ::2], angle) for original in source.images]
                assert any(np.array_equal(image, candidate) for candidate in candidates)


def test_test_angles_are_uniform_from_minus_ninety_to_ninety() -> None:
    """Recovered from the images: one bright pixel far from the centre."""
    images = np.zeros((5000, 3, 32, 32), dtype=np.uint8)
    images[:, :, 14:18, 28:32] = 255  # to the right; after halving columns 14 and 15, rows 7 and 8
    shares = rotated_cifar10(ImageSet(images, np.zeros(5000, np.int64)), seed=0)
    bright = shares[0].folds["test"].images[:, 0].astype(float)
    rows, columns = np.mgrid[:16, :16] - 7.5
    mass = bright.sum(axis=(1, 2))
    angles = np.degrees(
        np.arctan2(-(bright * rows).sum(axis=(1, 2)) / mass, (bright * columns).sum(axis=(1, 2)) / mass)
    )
    assert len(angles) == 1000
    assert np.abs(angles).max() < 95
    shares_of_quarters = np.histogram(angles, bins=[-95, -45, 0, 45, 95])[0] / 1000
    assert np.abs(shares_of_quarters - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 1000)


def pillow(image: np.ndarray, angle: float) -> np.ndarray:
    turned = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).rotate(
        angle, Image.Resampling.NEAREST
    )
    return np.asarray(turned).transpose(2, 0, 1)


@pytest.mark.parametrize("angle", [0.0, 10.0, 25.0, 40.0, 60.0, 75.0, 90.0, -10.0, -40.0, -90.0])
def test_rotation_equals_pillows(angle: float) -> None:
    images = RNG.integers(1, 256, (4, 3, 16, 16), dtype=np.uint8)
    expected = np.stack([pillow(image, angle) for image in images])
    np.testing.assert_array_equal(rotate(images, np.full(4, angle)), expected)


def test_rotation_equals_pillows_at_any_angle_but_for_its_rounding() -> None:
    """Pillow computes places in 1/65536 of a pixel, so that a place on a border may go either way."""
    images = RNG.integers(1, 256, (300, 3, 16, 16), dtype=np.uint8)
    angles = RNG.uniform(-90, 90, 300)
    expected = np.stack([pillow(image, angle) for image, angle in zip(images, angles.tolist(), strict=True)])
    differs = (rotate(images, angles) != expected).any(axis=1).sum(axis=(1, 2))
    assert differs.max() <= 4
    assert (differs == 0).mean() > 0.9


def test_sources_of_another_shape_are_refused() -> None:
    small = ImageSet(np.zeros((60, 1, 14, 14), np.uint8), np.zeros(60, np.int64))
    with pytest.raises(ValueError, match=r"shape \(1, 28, 28\), but got \(60, 1, 14, 14\)"):
        color_mnist(small, seed=0)
    with pytest.raises(ValueError, match=r"shape \(3, 32, 32\), but got \(60, 1, 14, 14\)"):
        rotated_cifar10(small, seed=0)
    few = ImageSet(np.zeros((44, 3, 32, 32), np.uint8), np.zeros(44, np.int64))
    with pytest.raises(ValueError, match="at least 45"):
        rotated_cifar10(few, seed=0)
