"""The scattering transform against kymatio's outputs, and against its definition without any subsampling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tightframe.models.scattering import paths, scattering2d
from tightframe.models.scattering_products import ScatteringProducts

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "scattering.npz")
KYMATIO_PI = 3.1415
"""By this, in place of pi, kymatio divides each filter: one factor for each filter on a path."""


def _orders(scales: int, angles: int) -> tuple[slice, slice, slice]:
    """Places of the orders 0, 1 and 2 among the paths."""
    first = 1 + scales * angles
    return slice(0, 1), slice(1, first), slice(first, None)


def _error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 2e-6)])
@pytest.mark.parametrize("case", range(int(GOLDEN["n_cases"])))
def test_golden(case: int, dtype: torch.dtype, close: float) -> None:
    """kymatio 0.3 to 1e-4, as it is; and to its own precision of float32 once both use one pi."""
    scales, angles = int(GOLDEN[f"c{case}_J"]), int(GOLDEN[f"c{case}_L"])
    expected = GOLDEN[f"c{case}_s"].astype(np.float64)
    found = scattering2d(torch.from_numpy(GOLDEN[f"c{case}_x"]).to(dtype), scales, angles)
    assert found.dtype == dtype and found.shape == expected.shape
    for filters, order in enumerate(_orders(scales, angles), start=1):
        assert _error(found[:, order].numpy(), expected[:, order]) < 1e-4
        scaled = expected[:, order] * (KYMATIO_PI / math.pi) ** filters
        assert _error(found[:, order].double().numpy(), scaled) < close


@pytest.mark.parametrize("case", range(int(GOLDEN["n_cases"])))
def test_products_of_matrices_are_kymatios_too(case: int) -> None:
    """For exports: of another number of pictures than the trace had."""
    scales, angles = int(GOLDEN[f"c{case}_J"]), int(GOLDEN[f"c{case}_L"])
    pictures = torch.from_numpy(GOLDEN[f"c{case}_x"]).float()
    products, more = ScatteringProducts(*pictures.shape[1:], scales, angles), torch.cat([pictures] * 2)
    traced = torch.jit.trace(products, more, check_trace=False)
    expected = GOLDEN[f"c{case}_s"].astype(np.float64)
    found = traced(pictures)
    for filters, order in enumerate(_orders(scales, angles), start=1):
        scaled = expected[:, order] * (KYMATIO_PI / math.pi) ** filters
        assert _error(found[:, order].double().numpy(), scaled) < 2e-6


def _gabor(side: int, sigma: float, theta: float, xi: float, slant: float) -> NDArray[Any]:
    turn = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
    form = turn @ np.diag([1, slant**2]) @ turn.T
    made = np.zeros((side, side), complex)
    for up in range(-2, 3):
        for along in range(-2, 3):
            u = np.stack(
                np.meshgrid(np.arange(side) + up * side, np.arange(side) + along * side, indexing="ij")
            )
            square = np.einsum("iab,ij,jab->ab", u, form, u)
            wave = np.exp(1j * xi * (u[0] * np.cos(theta) + u[1] * np.sin(theta)))
            made += np.exp(-square / (2 * sigma**2)) * wave
    return made / (2 * np.pi * sigma**2 / slant)


def _by_definition(image: NDArray[Any], scales: int, angles: int) -> NDArray[Any]:
    """Every step at every point, by numpy's FFT; sampled at the end."""
    step = 2**scales
    side = (image.shape[0] + step) // step * step + step
    before = (side - image.shape[0]) // 2
    padded = np.pad(image, (before, side - image.shape[0] - before), mode="reflect")
    low = np.fft.fft2(_gabor(side, 0.8 * 2 ** (scales - 1), 0, 0, 1)).real
    waves = {}
    for j in range(scales):
        for t in range(angles):
            theta = (int(angles - angles / 2 - 1) - t) * np.pi / angles
            sigma, xi, slant = 0.8 * 2**j, 3 * np.pi / 4 / 2**j, 4 / angles
            wave, bump = _gabor(side, sigma, theta, xi, slant), _gabor(side, sigma, theta, 0, slant)
            waves[j, t] = np.fft.fft2(wave - wave.sum() / bump.sum() * bump).real

    def modulus(x: NDArray[Any], key: tuple[int, int]) -> NDArray[Any]:
        return np.abs(np.fft.ifft2(np.fft.fft2(x) * waves[key]))

    kept = [padded]
    kept += [modulus(padded, key) for key in waves]
    for one in waves:
        inner = modulus(padded, one)
        kept += [modulus(inner, other) for other in waves if other[0] > one[0]]
    return np.stack([np.fft.ifft2(np.fft.fft2(x) * low).real[::step, ::step][1:-1, 1:-1] for x in kept])


@pytest.mark.parametrize(("scales", "angles"), [(2, 8), (3, 4), (1, 3)])
@pytest.mark.parametrize("picture", range(2))
def test_the_definition(picture: int, scales: int, angles: int) -> None:
    """Subsampling between the steps costs about a hundredth of each order."""
    image = GOLDEN["c0_x"][picture]
    side = len(image)
    found = scattering2d(torch.from_numpy(image[None]), scales, angles)[0].numpy()
    expected = _by_definition(image, scales, angles)
    assert found.shape == expected.shape == (paths(scales, angles), side >> scales, side >> scales)
    for order, bound in zip(_orders(scales, angles), (1e-9, 1e-2, 1.5e-2), strict=True):
        if expected[order].size:
            assert _error(found[order], expected[order]) < bound


def test_sides_that_are_no_multiple_and_differ() -> None:
    images = torch.randn(2, 21, 34, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = scattering2d(images, 2, 4)
    assert found.shape == (2, paths(2, 4), 5, 8)
    assert torch.equal(found[1], scattering2d(images[1:], 2, 4)[0]), "no picture sees another"
    turned = scattering2d(images.transpose(1, 2), 2, 4)
    assert torch.allclose(turned[:, 0], found[:, 0].transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_what_a_transform_keeps() -> None:
    """A constant picture has its value and nothing else; no path gains more than the picture has."""
    constant = scattering2d(torch.full((1, 32, 32), 3.0, dtype=torch.float64), 3, 4)[0]
    assert torch.allclose(constant[0], torch.tensor(3.0, dtype=torch.float64), rtol=1e-2)
    assert float(constant[1:].abs().max()) < 1e-9
    image = torch.randn(1, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(scattering2d(2 * image, 2, 4), 2 * scattering2d(image, 2, 4))


@pytest.mark.parametrize(
    ("images", "scales", "angles"),
    [
        (torch.zeros(32, 32), 2, 8),
        (torch.zeros(1, 32, 32, dtype=torch.int64), 2, 8),
        (torch.zeros(1, 32, 32), 0, 8),
        (torch.zeros(1, 32, 32), 2, 0),
        (torch.zeros(1, 7, 32), 3, 8),
    ],
)
def test_refused(images: torch.Tensor, scales: int, angles: int) -> None:
    with pytest.raises(ValueError, match="Expected"):
        scattering2d(images, scales, angles)
