"""The scattering transform of pictures, to second order, with Morlet wavelets.

Sources: Mallat, Group Invariant Scattering, Communications on Pure and Applied Mathematics 2012; Bruna and
Mallat, Invariant Scattering Convolution Networks, PAMI 2013. Constants of the filters, the padding and the
subsampling between steps are those of kymatio 0.3 (Andreux et al., Kymatio: Scattering Transforms in Python,
JMLR 2020), so that its outputs are ours.

With x the padded picture, * the circular convolution and ``phi`` the low-pass, a path's output is

    order 0   x * phi
    order 1   |x * psi_{j,t}| * phi
    order 2   ||x * psi_{j1,t1}| * psi_{j2,t2}| * phi      j2 > j1

sampled every 2^J. What was convolved with a wavelet of scale j is kept at every 2^j-th point only: in Fourier
space its products are folded, and product and fold together are one small matrix product for each frequency.
The last low-pass is separable and followed by sampling, so it is two matrix products with few rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

MAX_SCALE = 8
"""Largest J: a wavelet of 2^8 points is wider than the pictures that we know."""
PERIODS = range(-2, 3)
"""A filter is wrapped around the borders: the sum of itself shifted by these multiples of the sides."""


def paths(J: int, L: int) -> int:  # noqa: N803  (the paper's names)
    """Return the number of paths K = 1 + J L + L^2 J (J - 1) / 2.

    >>> paths(2, 8), paths(4, 8)
    (81, 417)
    """
    return 1 + J * L + L * L * J * (J - 1) // 2


def scattering2d(images: torch.Tensor, J: int, L: int = 8) -> torch.Tensor:  # noqa: N803
    """Return the scattering transform of pictures, to second order.

    Paths stand in this order: the low-pass; first order by (j, theta); second order by (j1, theta1, j2,
    theta2) with j2 > j1; the last index runs fastest.

    Args:
        images: (B, H, W), float32 or float64; both sides at least 2^J.
        J: scales; outputs are averages over about 2^J points.
        L: angles.

    Returns:
        (B, K, floor(H / 2^J), floor(W / 2^J)) in the type of ``images``, on its device.

    Raises:
        ValueError: for another shape or type, or if J or L is out of range.

    >>> scattering2d(torch.ones(2, 16, 24), J=2, L=4).shape
    torch.Size([2, 25, 4, 6])
    """
    if images.ndim != 3 or images.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "Expected `images` (B, H, W) of float32 or float64, but got "
            f"{tuple(images.shape)} of {images.dtype}."
        )
    if not 1 <= J <= MAX_SCALE or L < 1:
        raise ValueError(f"Expected `J` from 1 to {MAX_SCALE} and `L` from 1 on, but got {J} and {L}.")
    height, width = images.shape[1:]
    if min(height, width) < 2**J:
        raise ValueError(f"Expected pictures of at least {2**J} x {2**J} points, but got {height} x {width}.")
    bank = bank_of(height, width, J, L, images.dtype, images.device)
    with torch.autocast(images.device.type, enabled=False):
        return torch.stack([_transform(image, bank) for image in images])


@dataclass(frozen=True)
class _Filters:
    """Wavelets of one scale for spectra of one size, arranged for the fold that follows them.

    Attributes:
        fold: f, the subsampling: what is left is M / f x N / f points.
        count: L.
        shape: of what is left.
        blocks: where f is 1 or 2, the wavelets in f^2 blocks, each value twice, for real and imaginary parts:
            (f^2, L, M / f, 2 N / f). Else None.
        matrices: where it is more, a matrix for each frequency left: (M N / f^2, f^2, L). Else None.
    """

    fold: int
    count: int
    shape: tuple[int, int]
    blocks: torch.Tensor | None
    matrices: torch.Tensor | None

    @property
    def in_blocks(self) -> torch.Tensor:
        """The wavelets in f^2 blocks, each value once: (f^2, L, M / f, N / f)."""
        if self.blocks is not None:
            return self.blocks[..., ::2]
        assert self.matrices is not None  # noqa: S101  (one of the two is there)
        return self.matrices.view(*self.shape, self.fold**2, self.count).permute(2, 3, 0, 1)


@dataclass(frozen=True)
class _Bank:
    """Filters for pictures of one size.

    Attributes:
        scales: J.
        rows, columns: indices of the padding by reflection, into a picture's rows and columns.
        first: by j, the wavelets of the first order; their fold is 2^j.
        second: by (j1, j2), those of the second order, at every 2^j1-th point; their fold is 2^(j2 - j1).
        low: by j, the low-pass of the rows and of the columns of a map at every 2^j-th point, sampled at
            every 2^J-th and without the borders: (h, M / 2^j) and (w, N / 2^j).
    """

    scales: int
    rows: torch.Tensor
    columns: torch.Tensor
    first: tuple[_Filters, ...]
    second: dict[tuple[int, int], _Filters]
    low: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def _transform(image: torch.Tensor, bank: _Bank) -> torch.Tensor:
    """Return the paths (K, h, w) of one picture (H, W); one at a time stays in a processor's cache."""
    padded = image[bank.rows[:, None], bank.columns[None, :]]
    first_order, second_order = [], []
    spectrum = torch.fft.fft2(padded)[None]
    for j1 in range(bank.scales):
        (maps,) = _moduli(spectrum, bank.first[j1])  # |x * psi1|, (L, m, n)
        first_order.append(_averaged(maps, bank.low[j1]))
        if j1 == bank.scales - 1:
            break
        spectra = torch.fft.fft2(maps)
        wider = [
            torch.stack([_averaged(item, bank.low[j2]) for item in _moduli(spectra, bank.second[j1, j2])])
            for j2 in range(j1 + 1, bank.scales)
        ]
        second_order.append(torch.stack(wider, dim=1).flatten(0, 2))  # (theta1, j2, theta2, h, w)
    return torch.cat([_averaged(padded[None], bank.low[0]), *first_order, *second_order])


def _moduli(spectra: torch.Tensor, filters: _Filters) -> Iterator[torch.Tensor]:
    """Yield |x * psi| of each map, for each wavelet, at the points that the fold leaves: (L, m, n).

    Args:
        spectra: Fourier transforms of the maps, complex (A, M, N).
    """
    maps, rows, columns = spectra.shape
    fold = filters.fold
    m, n = rows // fold, columns // fold
    # The frequencies a m + i and b n + k, for all a and b, fold onto (i, k).
    parts = torch.view_as_real(spectra)
    if filters.blocks is not None:
        by_block = parts.view(maps, fold, m, fold, 2 * n)
        for one in by_block:
            yield _modulus(_folded(one, filters.blocks))
        return
    assert filters.matrices is not None  # noqa: S101  (one of the two is there)
    by_frequency = parts.view(maps, fold, m, fold, n, 2).permute(2, 4, 0, 5, 1, 3)
    products = torch.bmm(by_frequency.reshape(m * n, 2 * maps, fold * fold), filters.matrices)
    products = products.view(m, n, maps, 2, filters.count).permute(2, 4, 0, 1, 3)
    yield from _modulus(products.contiguous())


def _folded(parts: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the sum over f^2 blocks of a spectrum (f, m, f, 2 n) times those of L wavelets: (L, m, n, 2)."""
    fold = parts.shape[0]
    total = parts[0, :, 0] * blocks[0]
    for place in range(1, fold * fold):
        total.addcmul_(parts[place // fold, :, place % fold], blocks[place])
    return total.unflatten(-1, (-1, 2))


def _modulus(parts: torch.Tensor) -> torch.Tensor:
    """Return |inverse transform| (..., m, n) of spectra (..., m, n, 2), real and imaginary parts last."""
    squares = torch.view_as_real(torch.fft.ifft2(torch.view_as_complex(parts))).square_()
    return (squares[..., 0] + squares[..., 1]).sqrt_()  # a third of the time of `abs`


def _averaged(maps: torch.Tensor, low: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the low-pass of maps (..., m, n), sampled and cropped: (..., h, w)."""
    rows, columns = low
    return rows @ (maps @ columns.T)


@functools.lru_cache(maxsize=8)
def bank_of(
    height: int,
    width: int,
    J: int,  # noqa: N803
    L: int,  # noqa: N803
    dtype: torch.dtype,
    device: torch.device,
) -> _Bank:
    """Return the filters for pictures of a size; computed once, in float64."""
    step = 2**J
    sides = tuple((side + step) // step * step + step for side in (height, width))

    def tensor(values: NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    def filters(spectra: NDArray[np.float64], fold: int) -> _Filters:
        blocks = _in_blocks(spectra, fold)
        shape = blocks.shape[2], blocks.shape[3]
        if fold <= 2:
            return _Filters(fold, L, shape, tensor(blocks.repeat(2, axis=-1)), None)
        return _Filters(fold, L, shape, None, tensor(blocks.transpose(2, 3, 0, 1).reshape(-1, fold**2, L)))

    wavelets = [
        np.stack([wavelet(sides, j, angle, L) for angle in angles(L)]) for j in range(J)
    ]  # (L, M, N) each
    low = tuple(
        tuple(
            tensor(_low_matrix(side, kept, J, j))
            for side, kept in zip(sides, (height // step, width // step), strict=True)
        )
        for j in range(J)
    )
    return _Bank(
        J,
        torch.from_numpy(_reflected(height, sides[0])).to(device),
        torch.from_numpy(_reflected(width, sides[1])).to(device),
        tuple(filters(wavelets[j], 2**j) for j in range(J)),
        {
            (j1, j2): filters(_periodised(wavelets[j2], 2**j1), 2 ** (j2 - j1))
            for j1 in range(J)
            for j2 in range(j1 + 1, J)
        },
        low,  # type: ignore[arg-type]
    )


def angles(L: int) -> list[float]:  # noqa: N803
    """Return the wavelets' angles in their order: (floor(L - L / 2 - 1) - t) pi / L."""
    return [(math.floor(L - L / 2 - 1) - t) * math.pi / L for t in range(L)]


def wavelet(sides: tuple[int, ...], j: int, angle: float, L: int) -> NDArray[np.float64]:  # noqa: N803
    """Return the Fourier transform (M, N) of a Morlet wavelet of scale 2^j, which is taken as real."""
    sigma, frequency, slant = 0.8 * 2**j, 3 * math.pi / 4 / 2**j, 4 / L
    wave = _gabor(sides, sigma, angle, frequency, slant)
    bump = _gabor(sides, sigma, angle, 0.0, slant)
    return np.fft.fft2(wave - wave.sum() / bump.sum() * bump).real


def _gabor(
    sides: tuple[int, ...], sigma: float, angle: float, frequency: float, slant: float
) -> NDArray[np.complex128]:
    """Return exp(-u^T R D R^T u / (2 sigma^2) + i xi u . direction) / (2 pi sigma^2 / slant), wrapped."""
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    form = rotation @ np.diag([1.0, slant**2]) @ rotation.T / (2 * sigma**2)
    total = np.zeros(sides, dtype=np.complex128)
    for vertical in PERIODS:
        for horizontal in PERIODS:
            u = np.arange(sides[0])[:, None] + vertical * sides[0]
            v = np.arange(sides[1])[None, :] + horizontal * sides[1]
            exponent = -(form[0, 0] * u**2 + (form[0, 1] + form[1, 0]) * u * v + form[1, 1] * v**2)
            total += np.exp(exponent + 1j * frequency * (u * math.cos(angle) + v * math.sin(angle)))
    return total / (2 * math.pi * sigma**2 / slant)


def _low_matrix(side: int, kept: int, J: int, j: int) -> NDArray[np.float64]:  # noqa: N803
    """Return the low-pass of a signal at every 2^j-th point, sampled every 2^J, without the first sample.

    phi is a Gaussian of sigma = 0.8 * 2^(J - 1), the product of one in u and one in v.

    Returns:
        (kept, side / 2^j).
    """
    sigma = 0.8 * 2 ** (J - 1)
    places = np.arange(side)
    bump = sum(np.exp(-((places + period * side) ** 2) / (2 * sigma**2)) for period in PERIODS)
    spectrum = np.fft.fft(bump / math.sqrt(2 * math.pi) / sigma).real
    kernel = np.fft.ifft(_periodised(spectrum[None, :], 2**j, axes=(1,))[0]).real  # at every 2^j-th point
    length, stride = side // 2**j, 2 ** (J - j)
    rows = (np.arange(1, kept + 1) * stride)[:, None]
    return kernel[(rows - np.arange(length)[None, :]) % length]


def _periodised(
    spectra: NDArray[np.float64], factor: int, axes: tuple[int, ...] = (1, 2)
) -> NDArray[np.float64]:
    """Return the transform of a filter for signals at every ``factor``-th point.

    Frequencies above the new Nyquist frequency are dropped, as kymatio does: the signal that the filter is
    for has none of them.
    """
    for axis in axes:
        side = spectra.shape[axis]
        keep = np.ones(side)
        start, length = int(side / factor / 2), int(side * (1 - 1 / factor))
        keep[start : start + length] = 0
        shape = [1] * spectra.ndim
        shape[axis] = side
        masked = np.moveaxis(spectra * keep.reshape(shape), axis, -1)
        folded = masked.reshape(*masked.shape[:-1], factor, side // factor).sum(-2)
        spectra = np.moveaxis(folded, -1, axis)
    return spectra


def _in_blocks(spectra: NDArray[np.float64], fold: int) -> NDArray[np.float64]:
    """Cut filters (L, M, N) into blocks (f^2, L, M / f, N / f), divided by f^2: a fold is a mean."""
    count, rows, columns = spectra.shape
    blocks = spectra.reshape(count, fold, rows // fold, fold, columns // fold).transpose(1, 3, 0, 2, 4)
    return blocks.reshape(fold**2, count, rows // fold, columns // fold) / fold**2


def _reflected(side: int, padded: int) -> NDArray[np.int64]:
    """Return which point of a side each point of the padded side repeats; borders are not repeated."""
    before = (padded - side) // 2
    places = np.abs(np.arange(padded) - before) % (2 * (side - 1)) if side > 1 else np.zeros(padded, int)
    return np.where(places < side, places, 2 * (side - 1) - places)
