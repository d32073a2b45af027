"""Looks of pictures and volumes, by which records are recognised in rewritten files.

Re-encoding changes a file's bytes. The lowest coefficients of a discrete cosine transform describe where a
picture is dark: quality, size, brightness and colour hardly change them, a narrow crop does a little. Each is
compared with the set's median, so that changes of all pictures alike cancel.

Each place of a sketch weights some coefficients and takes the picture with the highest sum, which remains the
highest if all sums change a little; it notes which other coefficients of that picture are above the median.
Two sets agree in a place if the same picture is in both, or by chance, once in 256 or more often. If pictures
are so similar that halves of one set agree, other patients' would, too: then there is no sketch. Pictures
turned to a canonical orientation are sketched in addition to the originals, so that mirrored ones, and ones
rotated by a right angle, are recognised. Torch-free.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tightframe.data.columns import PLACES

SKETCHES = 4
"""Sketches of the original pictures, and as many of turned ones: with several, more survives a crop in one of
them."""
FEWEST = 16
"""Fewest pictures for a meaningful median."""
MOST_OWN = 0.16
"""Largest share of places in which a set's own halves may agree: 25 of 64 in another set are five deviations
more."""
_HIGHEST = {2: 5, 3: 3}
"""Axes -> most half waves of a coefficient, over all axes together."""
_SHORTEST = 8
_WEIGHED, _NOTED = 8, 8
"""Number of coefficients that choose a place's picture, and of those that are noted of it."""
_FLAT = 0.05
"""Contrast below which a picture has no look, as share of the set's median."""
_BLOCKS = 16
_AT_ONCE = 4096
_GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue (ITU-R BT.601)."""

Waves: TypeAlias = NDArray[np.float32]
Numbers: TypeAlias = NDArray[np.float64]


class Pictured(bytes):
    """A picture, as one record's content.

    Attributes:
        waves: its coefficients, as ``waves_of``; None if it has none.
    """

    waves: Waves | None

    @classmethod
    def of(cls, content: bytes, waves: Waves | None) -> Pictured:
        """Return a content with its coefficients."""
        pictured = cls(content)
        pictured.waves = waves
        return pictured


def waves_of(values: NDArray[np.generic]) -> Waves | None:
    """Return a picture's lowest coefficients along each axis; None if it is too small for them.

    Args:
        values: (H, W, channels), or of a volume (D, H, W, channels); three channels are red, green and blue.
    """
    *sides, channels = values.shape
    if len(sides) not in _HIGHEST or min(sides) < _SHORTEST or not channels:
        return None
    grey = _GREY if channels == 3 else np.full(channels, 1 / channels, np.float32)
    count = _HIGHEST[len(sides)] + 1
    if len(sides) == 2:
        return _plane(values, count, grey)
    planes = np.stack([_plane(plane, count, grey) for plane in values])
    waves: Waves = np.tensordot(_cosines(sides[0], count), planes, 1)
    return waves


def channels_last(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return an array's record, (channels, *sides) or (*sides), in the form that ``waves_of`` takes."""
    with_channels = values.ndim == 4 or (values.ndim == 3 and values.shape[0] in (1, 3))
    return np.moveaxis(values, 0, -1) if with_channels else values[..., None]


@dataclass
class Looks:
    """Looks of a set's pictures, one at a time; one with more or fewer axes than the first is left out."""

    _waves: list[Waves] = field(default_factory=list)

    def add(self, waves: Waves) -> None:
        """Add a picture."""
        if not self._waves or self._waves[0].shape == waves.shape:
            self._waves.append(waves)

    def sketches(self) -> tuple[bytes, ...]:
        """Return the sketches: ``PLACES`` numbers of 8 bytes each."""
        if len(self._waves) < FEWEST:
            return ()
        waves = np.stack(self._waves).astype(np.float64)
        axes = waves.ndim - 1
        of_all = waves.reshape(len(waves), -1)
        of_all = of_all[np.isfinite(of_all).all(axis=1)]
        of_all = of_all[np.sort(np.unique(of_all, axis=0, return_index=True)[1])]  # distinct, in their order
        contrast = np.linalg.norm(of_all[:, 1:], axis=1)
        least = 1e-5 * np.abs(of_all[:, 0])  # smaller values are rounding
        if (contrast > least).any():
            least = np.maximum(least, _FLAT * np.median(contrast[contrast > least]))
        contrasted = contrast > least
        if np.count_nonzero(contrasted) < FEWEST:
            return ()
        kept = (of_all[contrasted] / contrast[contrasted, None]).reshape(-1, *waves.shape[1:])
        sketches: list[bytes] = []
        for turned, shown in enumerate((kept, _turned(kept))):
            chosen = np.stack([_along(shown, which) for which in _coefficients(axes)], axis=1)
            by_likeness = chosen[np.argsort(chosen[:, 0], kind="stable")]
            if min(_own_agreement(chosen), _own_agreement(by_likeness)) > MOST_OWN:
                continue
            own = 2 * axes + turned
            places = _places(chosen).reshape(SKETCHES, PLACES)
            which = np.arange(own * SKETCHES, (own + 1) * SKETCHES)[:, None]
            sketches += [sketch.tobytes() for sketch in (places + 256 * which).astype("<u8")]
        return tuple(sketches)


def _plane(values: NDArray[np.generic], count: int, grey: Waves) -> Waves:
    """Return the coefficients of a plane, (H, W, channels), (count, count)."""
    height, width, channels = values.shape
    rows, columns = _cosines(height, count), _cosines(width, count)
    summed = np.zeros((count, width * channels), np.float32)
    for start in range(0, height, 256):  # so that no picture is copied as floats
        part = values[start : start + 256].reshape(-1, width * channels).astype(np.float32)
        summed += rows[:, start : start + 256] @ part
    waves: Waves = (summed.reshape(count, width, channels) @ grey) @ columns.T
    return waves


@lru_cache(maxsize=64)
def _cosines(side: int, count: int) -> Waves:
    """Return cosines of 0 to ``count`` - 1 half waves along a side, (count, side), divided by the side."""
    middles = (np.arange(side) + 0.5) / side
    return (np.cos(np.pi * np.arange(count)[:, None] * middles) / side).astype(np.float32)


def _coefficients(axes: int) -> list[tuple[int, ...]]:
    """Return the half waves along each axis of the coefficients used, in their order."""
    highest = _HIGHEST[axes]
    every = itertools.product(range(highest + 1), repeat=axes)
    return sorted(
        (which for which in every if 0 < sum(which) <= highest), key=lambda which: (sum(which), which)
    )


def _along(waves: Numbers, which: tuple[int, ...]) -> Numbers:
    """Return a coefficient of each picture, (n,), as a view."""
    index: tuple[int | slice, ...] = (slice(None), *which)
    return waves[index]


def _turned(waves: Numbers) -> Numbers:
    """Return pictures mirrored so that one half wave is positive along each axis, the strongest first."""
    turned = waves.copy()
    axes = turned.ndim - 1
    signs = 1.0 - 2.0 * (np.arange(turned.shape[1]) % 2)
    strengths = []
    for axis in range(axes):
        first = _along(turned, tuple(int(place == axis) for place in range(axes)))
        strengths.append(np.abs(first))
        along = signs.reshape(tuple(-1 if place == axis else 1 for place in range(axes)))
        turned[first < 0] *= along
    orders = np.argsort(-np.stack(strengths, axis=1), axis=1, kind="stable")
    for order in itertools.permutations(range(axes)):
        in_order = (orders == order).all(axis=1)
        turned[in_order] = turned[in_order].transpose(0, *(1 + place for place in order))
    return turned


def _own_agreement(ordered: Numbers) -> float:
    """Return the share of places in which two halves of a set agree.

    Args:
        ordered: coefficients, (n, K). Halves consist of blocks, so that a patient's pictures, which are
            consecutive or similar, are hardly ever in both.
    """
    half = np.arange(len(ordered)) * _BLOCKS // len(ordered) % 2
    one, other = (_places(ordered[half == which]) for which in (0, 1))
    return float(np.mean(one == other))


def _places(chosen: Numbers) -> NDArray[np.int64]:
    """Return each place's notes of its picture, (``SKETCHES`` * ``PLACES``,).

    Args:
        chosen: the coefficients used of each picture, (n, K).
    """
    weights, noted = _design(chosen.shape[1])
    middle = np.median(chosen, axis=0)
    from_middle = chosen - middle
    spread = np.median(np.abs(from_middle), axis=0)
    spread[spread == 0] = np.inf
    most = np.full(len(noted), -np.inf)
    cursor = np.zeros(len(noted), np.int64)
    for start in range(0, len(chosen), _AT_ONCE):
        # Bounded, so that a few outlying pictures do not take every place.
        sums = np.tanh(from_middle[start : start + _AT_ONCE] / spread) @ weights
        best = sums.argmax(axis=0)
        higher = sums[best, np.arange(len(noted))] > most
        most[higher] = sums[best, np.arange(len(noted))][higher]
        cursor[higher] = start + best[higher]
    above = np.take_along_axis(from_middle[cursor] > 0, noted, axis=1)
    places: NDArray[np.int64] = above @ (1 << np.arange(_NOTED))
    return places


@lru_cache(maxsize=4)
def _design(count: int) -> tuple[Numbers, NDArray[np.int64]]:
    """Return each place's weights of the coefficients, (K, places), and those that it notes, (places, 8).

    They are drawn by a hash, the same in every version of any library.
    """
    total = SKETCHES * PLACES
    weights, noted = np.zeros((count, total)), np.zeros((total, _NOTED), np.int64)
    for place in range(total):
        drawn = hashlib.shake_256(f"looks {count} {place}".encode()).digest(8 * count)
        order = np.argsort(np.frombuffer(drawn, "<u8"), kind="stable")
        signs: Sequence[float] = [1.0 if byte % 2 else -1.0 for byte in hashlib.sha256(drawn).digest()]
        weights[order[:_WEIGHED], place] = signs[:_WEIGHED]
        noted[place] = order[_WEIGHED : _WEIGHED + _NOTED]
    return weights, noted
