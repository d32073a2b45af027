"""Color-MNIST and Rotated-CIFAR10: image sets whose silos differ by a spurious cue.

They are made from MNIST's and CIFAR-10's training images as in the experiments of FedILC (Zhu et al.,
arXiv 2205.09305). Every draw comes from the stated seed. Torch-free.

Color-MNIST, five silos: the first 50,000 MNIST training images are shuffled; silo i trains on the places
``i::5`` below 40,000 and validates on those from 40,000 on; the test fold is the last 10,000, out of
distribution. Label: digit below five, flipped with probability 0.15 in the test fold only. Colour: the
label, other with probability 0.15, 0.30, 0.45, 0.60, 0.75 at the five silos and 0.9 in the test fold.
2 x 14 x 14, the channel of the other colour black.

Rotated-CIFAR10, three silos of three sub-environments: the first 40,000 CIFAR-10 training images are
shuffled; sub-environment i of nine trains on the places ``i::9`` below 30,000 and validates on the rest
(in the authors' code six images are in both); the test fold is the last 10,000, turned by an angle uniform
in [-90, 90] degrees. Angles: (10, 25, 40), (60, 75, 90), (-10, -40, -90), counter-clockwise. Every second
pixel (16 x 16), then turned: nearest pixel, black outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tightframe.data.image_sets.readers import ImageSet
from tightframe.phases import Fold, stream_seed

COLOR_NOISE = (0.15, 0.30, 0.45, 0.60, 0.75)
"""Probability, at each of the five silos, that the colour differs from the label's."""
OOD_COLOR_NOISE = 0.9
OOD_LABEL_NOISE = 0.15
ANGLES = ((10.0, 25.0, 40.0), (60.0, 75.0, 90.0), (-10.0, -40.0, -90.0))
"""Degrees, counter-clockwise, of the three sub-environments of each of the three silos."""
OOD_ANGLE = 90.0


@dataclass(frozen=True)
class Share:
    """One silo's records.

    Attributes:
        folds: train, validation and test (for derived sets the out-of-distribution records).
        environments: for derived sets: index of the sub-environment of each record of a fold,
            int64 (n,); -1 for those of the test fold.
    """

    folds: dict[Fold, ImageSet]
    environments: dict[Fold, NDArray[np.int64]] = field(default_factory=dict)


def color_mnist(source: ImageSet, *, seed: int) -> list[Share]:
    """Make Color-MNIST: is the digit below five? The colour is a cue of different strength in five silos.

    Of MNIST's 60,000 training images the first 50,000 are shuffled; silo i trains on the positions
    ``i::5`` below 40,000 (8,000 records) and validates on the positions ``i::5`` from 40,000 on
    (2,000); the last 10,000 images are the out-of-distribution test fold. A source of another size is
    cut in the same proportions, 4 : 1 : 1. Then, for each environment:

    * label ``= 1[digit < 5]``, flipped with probability 0.15 in the test fold and never elsewhere;
    * colour ``= label xor Bernoulli(e)`` with e = 0.15, 0.30, 0.45, 0.60, 0.75 and 0.9 in the test fold;
    * every second pixel, 28 x 28 to 14 x 14, in two channels, of which ``1 - colour`` is set to 0.

    Args:
        source: MNIST images, uint8 (n, 1, 28, 28).
        seed: of the shuffle, the flips and the colours.

    Returns:
        Five silos; images are uint8 (n, 2, 14, 14), labels 0 or 1.

    Raises:
        ValueError: if the images have another shape, or there are fewer than 30.
    """
    if source.images.shape[1:] != (1, 28, 28) or len(source) < 30:
        raise ValueError(f"Expected at least 30 images of shape (1, 28, 28), but got {source.images.shape}.")
    train_end, end = len(source) * 4 // 6, len(source) * 5 // 6
    order = _generator(seed, "color_mnist", "order").permutation(end)
    test = _colored(source, np.arange(end, len(source)), OOD_COLOR_NOISE, OOD_LABEL_NOISE, seed, "test")
    silos = []
    for silo, noise in enumerate(COLOR_NOISE):
        train, validation = order[:train_end][silo::5], order[train_end:][silo::5]
        silos.append(
            _derived(
                _colored(source, train, noise, 0.0, seed, f"train-{silo}"),
                _colored(source, validation, noise, 0.0, seed, f"validation-{silo}"),
                test,
                [silo],
            )
        )
    return silos


def rotated_cifar10(source: ImageSet, *, seed: int) -> list[Share]:
    """Make Rotated-CIFAR10: three silos of three rotations each, tested on all rotations.

    Of CIFAR-10's 50,000 training images the first 40,000 are shuffled: sub-environment i of nine trains
    on the positions ``i::9`` below 30,000 (3,334 or 3,333 records) and validates on the positions
    ``i::9`` from 30,000 on; the last 10,000 images are the out-of-distribution test fold, each rotated by
    an angle uniform in [-90, 90]. A source of another size is cut in the same proportions, 3 : 1 : 1.
    Images are halved to 16 x 16 (every second pixel) and then rotated; see ``rotate``. The
    sub-environments' angles are ``ANGLES``, three for each silo.

    In the authors' code six images are in both training and validation, because it does not stop at
    30,000; here the two are disjoint.

    Args:
        source: CIFAR-10 images, uint8 (n, 3, 32, 32).
        seed: of the shuffle and of the test angles.

    Returns:
        Three silos; images are uint8 (n, 3, 16, 16), labels as in the source.

    Raises:
        ValueError: if the images have another shape, or there are fewer than 45.
    """
    if source.images.shape[1:] != (3, 32, 32) or len(source) < 45:
        raise ValueError(f"Expected at least 45 images of shape (3, 32, 32), but got {source.images.shape}.")
    train_end, end = len(source) * 3 // 5, len(source) * 4 // 5
    order = _generator(seed, "rotated_cifar10", "order").permutation(end)
    angles = _generator(seed, "rotated_cifar10", "angles").uniform(-OOD_ANGLE, OOD_ANGLE, len(source) - end)
    test = _turned(source, np.arange(end, len(source)), angles)
    environments: list[tuple[ImageSet, ImageSet]] = []
    for number, angle in enumerate(angle for silo in ANGLES for angle in silo):
        picks = (order[:train_end][number::9], order[train_end:][number::9])
        train, validation = (_turned(source, pick, np.full(len(pick), angle)) for pick in picks)
        environments.append((train, validation))
    silos = []
    for silo in range(len(ANGLES)):
        numbers = [3 * silo, 3 * silo + 1, 3 * silo + 2]
        trains, validations = zip(*(environments[number] for number in numbers), strict=True)
        silos.append(_derived(trains, validations, test, numbers))
    return silos


def rotate(images: NDArray[np.uint8], angles: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Rotate each image about its centre, by nearest neighbour, black outside the original.

    Args:
        images: (n, channels, height, width).
        angles: degrees of each, (n,), counter-clockwise as displayed.

    Returns:
        Images of the same shape.

    >>> rotate(np.array([[[[1, 2], [3, 4]]]], dtype=np.uint8), np.array([90.0])).tolist()
    [[[[2, 4], [1, 3]]]]
    """
    height, width = images.shape[-2:]
    turns = np.radians(angles)[:, None, None]
    cosine, sine = np.cos(turns), np.sin(turns)
    x = (np.arange(width) - (width - 1) / 2)[None, None, :]
    y = (np.arange(height) - (height - 1) / 2)[None, :, None]
    # Rows count downwards, so a rotation takes (x, y) to (x cos + y sin, y cos - x sin); the source of a
    # pixel is the inverse. The tiny shift keeps the last bit of a cosine from deciding the rounding of
    # positions halfway between two pixels.
    columns = np.floor(x * cosine - y * sine + (width - 1) / 2 + 0.5 + 1e-9).astype(np.int64)
    rows = np.floor(x * sine + y * cosine + (height - 1) / 2 + 0.5 + 1e-9).astype(np.int64)
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    places = np.clip(rows, 0, height - 1) * width + np.clip(columns, 0, width - 1)
    flat = images.reshape(*images.shape[:2], height * width)
    turned = np.take_along_axis(flat, places.reshape(len(images), 1, -1), axis=2).reshape(images.shape)
    return np.where(inside[:, None], turned, 0).astype(np.uint8)


def _colored(
    source: ImageSet, indices: NDArray[np.int64], noise: float, label_noise: float, seed: int, purpose: str
) -> ImageSet:
    """Colour the records of one environment red (channel 0) or green (channel 1)."""
    draws = _generator(seed, "color_mnist", purpose)
    flips, odd = draws.random((2, len(indices)))
    labels = (source.labels[indices] < 5) ^ (flips < label_noise)
    colors = labels ^ (odd < noise)
    small = source.images[indices][:, :, ::2, ::2]
    images = np.repeat(small, 2, axis=1)
    images[np.arange(len(indices)), 1 - colors.astype(np.int64)] = 0
    return ImageSet(images, labels.astype(np.int64), source.white)


def _turned(source: ImageSet, indices: NDArray[np.int64], angles: NDArray[np.float64]) -> ImageSet:
    small = source.images[indices][:, :, ::2, ::2]
    return ImageSet(rotate(small, angles), source.labels[indices], source.white)


def _derived(
    train: ImageSet | Sequence[ImageSet],
    validation: ImageSet | Sequence[ImageSet],
    test: ImageSet,
    numbers: Sequence[int],
) -> Share:
    """Build a silo of one or more sub-environments, concatenated in order."""
    folds: dict[Fold, ImageSet] = {"test": test}
    environments: dict[Fold, NDArray[np.int64]] = {"test": np.full(len(test), -1, dtype=np.int64)}
    named: tuple[tuple[Fold, ImageSet | Sequence[ImageSet]], ...] = (
        ("train", train),
        ("validation", validation),
    )
    for fold, given in named:
        parts = [given] if isinstance(given, ImageSet) else list(given)
        folds[fold] = ImageSet(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            test.white,
        )
        environments[fold] = np.repeat(np.asarray(numbers, dtype=np.int64), [len(part) for part in parts])
    return Share(folds, environments)


def _generator(seed: int, *purpose: str) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, *purpose))
