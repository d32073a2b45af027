"""The scattering transform of ``models.scattering`` by products of real matrices, for whole batches.

Slower, but other programs can run it: TorchScript and ONNX hold neither its loop over pictures nor, for ONNX,
Fourier transforms of any size. The filters are the same.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tightframe.models.scattering import bank_of


class ScatteringProducts(nn.Module):
    """Paths (B, K, h, w) of pictures (B, H, W) of one size.

    Args:
        scales: J.
        angles: L.
    """

    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, height: int, width: int, scales: int, angles: int) -> None:
        super().__init__()
        bank = bank_of(height, width, scales, angles, torch.float32, torch.device("cpu"))
        self.scales = scales
        self.folds: dict[str, int] = {}
        self._keep("rows", bank.rows)
        self._keep("columns", bank.columns)
        filters = {f"first_{j}": one for j, one in enumerate(bank.first)}
        filters |= {f"second_{j1}_{j2}": one for (j1, j2), one in bank.second.items()}
        for name, one in filters.items():
            self._keep(name, one.in_blocks)
            self.folds[name] = one.fold
        for j, (rows, columns) in enumerate(bank.low):
            self._keep(f"low_rows_{j}", rows)
            self._keep(f"low_columns_{j}", columns.T)
        for side in {len(bank.rows) >> j for j in range(scales)} | {
            len(bank.columns) >> j for j in range(scales)
        }:
            turns = torch.outer(torch.arange(side), torch.arange(side)).remainder(side).double()
            self._keep(f"cos_{side}", torch.cos(turns * (2 * math.pi / side)).float())
            self._keep(f"sin_{side}", torch.sin(turns * (2 * math.pi / side)).float())

    def _keep(self, name: str, values: torch.Tensor) -> None:
        self.register_buffer(name, values.contiguous(), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the paths, in the order of ``scattering2d``."""
        padded = images.index_select(1, self.rows).index_select(2, self.columns)[:, None]
        spectrum = self._transform(padded, torch.zeros_like(padded), forwards=True)
        first, second = [self._averaged(padded, 0)], []
        for j1 in range(self.scales):
            maps = self._moduli(spectrum, f"first_{j1}")  # (B, 1, L, m, n)
            maps = maps.flatten(1, 2)
            first.append(self._averaged(maps, j1))
            if j1 == self.scales - 1:
                break
            spectra = self._transform(maps, torch.zeros_like(maps), forwards=True)
            wider = [
                self._averaged(self._moduli(spectra, f"second_{j1}_{j2}"), j2)
                for j2 in range(j1 + 1, self.scales)
            ]
            second.append(torch.stack(wider, dim=2).flatten(1, 3))  # (B, theta1 j2 theta2, h, w)
        return torch.cat([*first, *second], dim=1)

    def _moduli(self, spectra: tuple[torch.Tensor, torch.Tensor], name: str) -> torch.Tensor:
        """Return |x * psi| (B, A, L, m, n) of spectra (B, A, M, N), at the points that the fold leaves."""
        fold, blocks = self.folds[name], getattr(self, name)  # (f^2, L, m, n)
        m, n = blocks.shape[-2:]
        folded = []
        for part in spectra:
            total = torch.zeros(())
            for place in range(fold * fold):
                top, left = place // fold * m, place % fold * n
                total = total + part[:, :, None, top : top + m, left : left + n] * blocks[place]
            folded.append(total)
        real, imaginary = self._transform(folded[0], folded[1], forwards=False)
        return (real.square() + imaginary.square()).sqrt()

    def _transform(
        self, real: torch.Tensor, imaginary: torch.Tensor, *, forwards: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Fourier transform over the last two axes, or the inverse one."""
        rows, columns = real.shape[-2:]
        sign, scale = (-1.0, 1.0) if forwards else (1.0, 1.0 / (int(rows) * int(columns)))
        for axis, side in ((-1, int(columns)), (-2, int(rows))):
            cos, sin = getattr(self, f"cos_{side}"), getattr(self, f"sin_{side}") * sign

            def along(values: torch.Tensor, matrix: torch.Tensor, axis: int = axis) -> torch.Tensor:
                return values @ matrix if axis == -1 else matrix @ values

            real, imaginary = (
                along(real, cos) - along(imaginary, sin),
                along(real, sin) + along(imaginary, cos),
            )
        return real * scale, imaginary * scale

    def _averaged(self, maps: torch.Tensor, j: int) -> torch.Tensor:
        """Return the low-pass of maps (..., m, n), sampled and cropped: (..., h, w)."""
        averages: torch.Tensor = getattr(self, f"low_rows_{j}") @ (maps @ getattr(self, f"low_columns_{j}"))
        return averages
