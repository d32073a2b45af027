"""Renders the records of the synthetic twin: an analytic scene, evaluated at any number of pixels.

A scene is drawn from uniforms that depend on the record's name only, in units in which the image spans
[-1, 1] x [-1, 1]; the number of pixels is applied last. Only ``+ - * /``, ``sqrt`` and comparisons are
used, in float64, and factors of matrix products are dyadic with few bits, so that pixels are equal on
every IEEE machine. Angles are unit vectors for the same reason.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The appearance of each class. Colours are the lesion's transmission of the skin's red, green and blue;
# the other columns are strengths (0..1) or lengths in units of half the image.
#          core               rim                second colour      radius irreg soft  opac
_BODY = (
    ((0.30, 0.22, 0.26), (0.48, 0.34, 0.32), (0.20, 0.25, 0.42), 0.74, 0.30, 0.16, 0.95),  # MEL
    ((0.62, 0.42, 0.28), (0.72, 0.52, 0.38), (0.52, 0.34, 0.24), 0.60, 0.07, 0.14, 0.90),  # NV
    ((0.84, 0.68, 0.86), (0.92, 0.78, 0.90), (0.48, 0.48, 0.68), 0.66, 0.16, 0.36, 0.88),  # BCC
    ((1.02, 0.56, 0.42), (1.02, 0.66, 0.54), (1.00, 0.48, 0.38), 0.80, 0.14, 0.50, 0.85),  # AK
    ((0.88, 0.70, 0.30), (0.76, 0.56, 0.26), (0.94, 0.80, 0.42), 0.68, 0.12, 0.07, 0.92),  # BKL
    ((0.92, 0.80, 0.74), (0.66, 0.48, 0.42), (0.78, 0.62, 0.56), 0.60, 0.06, 0.30, 0.88),  # DF
    ((0.62, 0.12, 0.24), (0.74, 0.22, 0.30), (0.40, 0.08, 0.34), 0.62, 0.14, 0.09, 0.97),  # VASC
    ((0.96, 0.44, 0.38), (0.82, 0.32, 0.30), (1.05, 0.92, 0.56), 0.72, 0.18, 0.20, 0.92),  # SCC
)
#   second colour, network, scales, light dots, dark dots, centre patch, patch radius, vessels, rim
_DETAIL = (
    (0.85, 0.45, 0.00, 0.00, 0.35, 0.00, 0.25, 0.00, 0.00),  # MEL
    (0.25, 0.40, 0.00, 0.00, 0.10, 0.00, 0.25, 0.00, 0.00),  # NV
    (0.45, 0.00, 0.05, 0.05, 0.90, 0.05, 0.30, 0.95, 0.00),  # BCC
    (0.30, 0.10, 0.95, 0.00, 0.00, 0.00, 0.30, 0.10, 0.00),  # AK
    (0.40, 0.15, 0.10, 0.95, 0.30, 0.00, 0.30, 0.00, 0.00),  # BKL
    (0.15, 0.30, 0.00, 0.00, 0.00, 1.00, 0.46, 0.00, 0.10),  # DF
    (0.75, 0.00, 0.00, 0.00, 0.05, 0.00, 0.30, 0.05, 0.25),  # VASC
    (0.55, 0.00, 0.35, 0.15, 0.00, 0.80, 0.34, 0.50, 0.80),  # SCC
)
_CLASSES = np.array([[*a, *b, *c, *rest] for a, b, c, *rest in _BODY])
_CLASSES = np.concatenate([_CLASSES, np.array(_DETAIL)], axis=1)

_CONFUSABLE = ((1, 4, 2), (0, 4, 5), (7, 3, 0), (7, 4, 2), (0, 1, 3), (1, 2, 4), (0, 2, 1), (2, 3, 4))
"""The classes that each class is easily confused with; a record is blended towards one of them."""

_OVERLAP = 0.2
"""Largest share of the other class in a record's appearance."""

# The appearance of each centre's records: skin (red, green, blue), colour cast, light, vignette,
# magnification, mean hairs (of six), noise, contrast.
_CENTERS = (
    ((0.84, 0.66, 0.58), (1.00, 1.00, 1.00), 1.00, 0.18, 1.00, 1.2, 0.030, 1.00),
    ((0.88, 0.70, 0.68), (1.03, 0.97, 1.04), 1.06, 0.05, 0.86, 0.6, 0.020, 0.95),
    ((0.80, 0.60, 0.54), (1.02, 0.98, 0.94), 0.96, 0.30, 1.12, 1.6, 0.030, 1.06),
    ((0.76, 0.62, 0.60), (0.94, 1.00, 1.06), 0.94, 0.12, 1.22, 2.2, 0.040, 1.00),
    ((0.72, 0.54, 0.46), (1.04, 0.98, 0.90), 0.90, 0.40, 0.92, 2.6, 0.045, 0.92),
    ((0.86, 0.62, 0.62), (1.06, 0.94, 0.96), 1.02, 0.24, 0.80, 0.8, 0.055, 0.88),
)

_DOTS = 6
_LINES = 3
_HAIRS = 6


class Uniforms:
    """Uniform numbers in [0, 1), a pure function of a name.

    They are the raw output of PCG64, whose stream NumPy guarantees between versions; it gives no such
    guarantee for its distributions.
    """

    def __init__(self, name: str) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
        self._bits = np.random.PCG64(seed)

    def __call__(self, *shape: int) -> Array:
        """Return numbers of this shape, each with 32 random bits."""
        raw = np.asarray(self._bits.random_raw(int(np.prod(shape, dtype=np.int64))), dtype=np.uint64)
        return ((raw >> np.uint64(32)).astype(np.float64) / 2.0**32).reshape(shape)

    def lattice(self, cells: int) -> Array:
        """Return values of 16 bits at the corners of ``cells`` x ``cells`` squares."""
        return np.floor(self(cells + 1, cells + 1) * 65536.0) / 65536.0

    def direction(self) -> tuple[float, float]:
        """Return a unit vector, spread over all directions (not quite evenly)."""
        a, b = (2.0 * self(2) - 1.0).tolist()
        length = float(np.sqrt(a * a + b * b)) + 1e-9
        return a / length, b / length


@dataclass(frozen=True)
class Plane:
    """The pixel grid: coordinates (side, side), and one pixel's width."""

    x: Array
    y: Array
    pixel: float


@lru_cache(maxsize=8)
def plane(side: int) -> Plane:
    """Return the pixel centres of an image of ``side`` pixels, in [-1, 1]."""
    line = (2.0 * np.arange(side) + 1.0) / side - 1.0
    x, y = np.broadcast_to(line[None, :], (side, side)), np.broadcast_to(line[:, None], (side, side))
    return Plane(np.ascontiguousarray(x), np.ascontiguousarray(y), 2.0 / side)


@lru_cache(maxsize=32)
def _interpolation(side: int, cells: int) -> Array:
    """Return 12-bit weights of a smooth interpolation from lattice corners to pixels, (side, cells + 1)."""
    place = (np.arange(side) + 0.5) * cells / side
    low = np.minimum(place.astype(np.int64), cells - 1)
    part = place - low
    part = np.floor(part * part * (3.0 - 2.0 * part) * 4096.0) / 4096.0
    matrix = np.zeros((side, cells + 1))
    matrix[np.arange(side), low] = 1.0 - part
    matrix[np.arange(side), low + 1] += part
    return matrix


def _noise(lattice: Array, side: int) -> Array:
    """Return value noise in [0, 1], (side, side). Every product here is exact in float64."""
    matrix = _interpolation(side, lattice.shape[0] - 1)
    noise: Array = matrix @ lattice @ matrix.T
    return noise


def _step(value: Array) -> Array:
    """Apply a smooth step from 0 (at 0 and below) to 1 (at 1 and above)."""
    value = np.minimum(np.maximum(value, 0.0), 1.0)
    return value * value * (3.0 - 2.0 * value)


def _towards(image: Array, amount: Array, colour: Array) -> Array:
    """Blend (3, side, side) towards a colour (3,) or image by an amount (side, side)."""
    target = colour[:, None, None] if colour.ndim == 1 else colour
    return image + amount * (target - image)


def _dots(px: Array, py: Array, draws: Array, radius: float, reach: float, pixel: float) -> Array:
    """Return round dots as opacity (side, side); draws (n, 4) are position (2), size and strength."""
    width = np.maximum(radius * (0.6 + 0.8 * draws[:, 2]), 0.75 * pixel)[:, None, None]
    dx = px[None] - (reach * (2.0 * draws[:, 0] - 1.0))[:, None, None]
    dy = py[None] - (reach * (2.0 * draws[:, 1] - 1.0))[:, None, None]
    bump = 1.0 - (dx * dx + dy * dy) / (width * width)
    return np.max(np.maximum(bump, 0.0) * draws[:, 3][:, None, None], axis=0)


def _line(at: Plane, uniforms: Uniforms, width: float, bend: float, reach: float) -> Array:
    """Return a bent line as opacity (side, side); below a pixel's width it is drawn a pixel wide, fainter."""
    u, v = uniforms.direction()
    shift, curve = ((2.0 * uniforms(2) - 1.0) * np.array([reach, bend])).tolist()
    along = u * at.x + v * at.y
    across = u * at.y - v * at.x - shift - curve * along * along
    slope = 2.0 * curve * along
    distance = np.abs(across) / np.sqrt(1.0 + slope * slope)
    drawn = max(width, at.pixel)
    return np.maximum(1.0 - distance / drawn, 0.0) * (width / drawn)


@dataclass(frozen=True)
class _Looks:
    """One record's drawn parameters; see ``_BODY`` and ``_DETAIL`` for the columns."""

    core: Array
    rim: Array
    second: Array
    radius: float
    irregular: float
    soft: float
    opacity: float
    second_share: float
    network: float
    scales: float
    light_dots: float
    dark_dots: float
    patch: float
    patch_radius: float
    vessels: float
    ring: float


def _looks(uniforms: Uniforms, label: int) -> _Looks:
    """Draw a record's parameters: those of its class, blended towards a class it is easily confused with."""
    draws = uniforms(2 + _CLASSES.shape[1])
    others = _CONFUSABLE[label]
    other = others[int(draws[0] * len(others))]
    share = _OVERLAP * draws[1]
    row = (1.0 - share) * _CLASSES[label] + share * _CLASSES[other]
    jitter = 2.0 * draws[2:] - 1.0
    row[:9] *= 1.0 + 0.10 * jitter[:9]
    row[9:13] *= 1.0 + 0.22 * jitter[9:13]
    row[13:] *= 1.0 + 0.45 * jitter[13:]
    return _Looks(row[0:3], row[3:6], row[6:9], *(float(value) for value in row[9:]))


def render(uniforms: Uniforms, center: int, label: int, side: int) -> NDArray[np.uint8]:
    """Draw one record.

    Args:
        uniforms: fresh, of the record's name.
        center: 0..5.
        label: 0..7.
        side: pixels of a side.

    Returns:
        RGB pixels, uint8 (side, side, 3).
    """
    at = plane(side)
    skin, cast, light, vignette, magnification, hairs, grain, contrast = _CENTERS[center]
    looks = _looks(uniforms, label)
    coarse, middle, fine = (_noise(uniforms.lattice(cells), side) for cells in (5, 13, 26))
    tone = np.array(skin) * (1.0 + 0.16 * (uniforms(1) - 0.5) + 0.08 * (uniforms(3) - 0.5))
    image = tone[:, None, None] * (0.94 + 0.12 * coarse)
    image = _lesion(image, at, uniforms, looks, magnification, (coarse, middle, fine))
    image = _hairs(image, at, uniforms, hairs)
    return _exposed(image, at, uniforms, np.array(cast) * light, vignette, grain, contrast)


def _lesion(
    image: Array,
    at: Plane,
    uniforms: Uniforms,
    looks: _Looks,
    magnification: float,
    noises: tuple[Array, Array, Array],
) -> Array:
    """Draw the lesion onto the skin (3, side, side)."""
    coarse, middle, fine = noises
    place = 0.30 * (uniforms(2) - 0.5)
    u, v = uniforms.direction()
    dx, dy = at.x - place[0], at.y - place[1]
    px, py = u * dx + v * dy, (u * dy - v * dx) * (1.0 + 0.35 * float(uniforms(1)[0]))
    radius = looks.radius * magnification
    distance = np.sqrt(px * px + py * py) + 1e-6
    inside = distance / (radius * _border(px / distance, py / distance, uniforms, looks.irregular))
    mask = _step((1.0 + looks.soft - inside) / (2.0 * looks.soft + at.pixel / radius)) * looks.opacity

    draws = uniforms(2 * _DOTS + 1, 4)
    spot = radius * (draws[-1, :2] - 0.5)
    sx, sy = px - spot[0], py - spot[1]
    second = (
        _step(1.3 - (sx * sx + sy * sy) / (0.5 * radius * radius) + 0.8 * (coarse - 0.5)) * looks.second_share
    )
    edge = _step(1.6 * inside - 0.6)
    colour = _towards(
        looks.core[:, None, None] + edge * (looks.rim - looks.core)[:, None, None], second, looks.second
    )
    body = image * colour
    body = body * (1.0 - looks.network * 0.9 * (np.abs(2.0 * middle - 1.0) - 0.35))
    ring = np.maximum(1.0 - np.abs(inside - 0.85) / 0.25, 0.0)
    body = _towards(body, looks.ring * 0.8 * ring, body * np.array([0.85, 0.50, 0.48])[:, None, None])
    patch_radius = looks.patch_radius * magnification
    patch = _step(1.5 - distance / patch_radius) * looks.patch
    body = _towards(body, 0.85 * patch, np.array([0.93, 0.86, 0.78]))
    body = _towards(body, looks.scales * _step(3.0 * fine - 1.5), np.array([0.95, 0.92, 0.85]))
    for part, strength, colours in (
        (draws[:_DOTS], looks.light_dots, (0.96, 0.93, 0.80)),
        (draws[_DOTS : 2 * _DOTS], looks.dark_dots, (0.20, 0.17, 0.24)),
    ):
        body = _towards(
            body,
            min(strength, 1.0) * _dots(px, py, part, 0.11 * magnification, 0.75 * radius, at.pixel),
            np.array(colours),
        )
    vessels = np.max([_line(at, uniforms, 0.035, 0.8, 0.4 * radius) for _ in range(_LINES)], axis=0)
    body = _towards(body, min(looks.vessels, 1.0) * vessels, np.array([0.62, 0.14, 0.20]))
    return _towards(image, mask, body)


def _border(cosine: Array, sine: Array, uniforms: Uniforms, irregular: float) -> Array:
    """Return the lesion's radius by direction, in units of its mean radius: harmonics 2 to 6."""
    draws = 2.0 * uniforms(5, 2) - 1.0
    c, s = cosine, sine
    total = np.ones_like(cosine)
    for a, b in draws.tolist():
        c, s = c * cosine - s * sine, s * cosine + c * sine
        total += (0.55 * irregular) * (a * c + b * s)
    return np.maximum(total, 0.35)


def _hairs(image: Array, at: Plane, uniforms: Uniforms, mean: float) -> Array:
    """Draw up to six hairs across the image, of one colour."""
    present = (uniforms(_HAIRS) < mean / _HAIRS).tolist()
    colour = np.array([0.16, 0.11, 0.08]) + 0.30 * uniforms(1)
    for drawn in present:
        if drawn:
            image = _towards(image, 0.9 * _line(at, uniforms, 0.022, 0.5, 0.9), colour)
    return image


def _exposed(
    image: Array, at: Plane, uniforms: Uniforms, cast: Array, vignette: float, grain: float, contrast: float
) -> NDArray[np.uint8]:
    """Apply light, colour cast, contrast and sensor noise; uint8 (side, side, 3)."""
    u, v = uniforms.direction()
    draws = uniforms(3) - 0.5
    shade = 1.0 - vignette * (0.5 * (at.x * at.x + at.y * at.y)) + 0.10 * draws[0] * (u * at.x + v * at.y)
    image = image * (cast * (1.0 + 0.10 * draws[1]))[:, None, None] * shade
    image = (image - 0.55) * (contrast * (1.0 + 0.12 * draws[2])) + 0.55
    side = at.x.shape[0]
    image = image + grain * 3.0 * (np.stack([_noise(uniforms.lattice(48), side) for _ in range(3)]) - 0.5)
    pixels = np.rint(255.0 * np.minimum(np.maximum(image, 0.0), 1.0))
    return np.ascontiguousarray(pixels.astype(np.uint8).transpose(1, 2, 0))
