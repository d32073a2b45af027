"""Random Fourier features: cosines of a Gaussian projection, for tables and small pictures.

Their inner products approximate the Gaussian kernel, ``phi(x) . phi(y) ~ exp(-|x - y|^2 / (2 s^2))``, so that
a linear head on them is a kernel machine.

Source: Rahimi and Recht, Random Features for Large-Scale Kernel Machines, NeurIPS 2007, algorithm 1.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import nn

from tightframe.models.backbones.mlp import classifier_of, number_of_values
from tightframe.models.base import BackboneSpec, Options


class RandomFeaturesOptions(Options):
    """No parameters: cosines of a Gaussian projection.

    Attributes:
        width: number of features D.
        bandwidth: s of the kernel, in units of the inputs; None takes sqrt(d) for d inputs, which fits
            standardised ones: their squared distances are about 2 d.
        seed: of the projection, which is public.
        standardise: whether the inputs are standardised by pooled moments of the training folds.
        dropout: of the head's input.
    """

    width: int = Field(default=256, ge=1, le=65536)
    bandwidth: float | None = Field(default=None, gt=0, le=1e6)
    seed: int = Field(default=0, ge=0, lt=2**31)
    standardise: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)


class RandomFourier(nn.Module):
    """``phi(x) = sqrt(2 / D) cos(W x + b)``, W normal with deviation 1 / s, b uniform on [0, 2 pi).

    W and b are no part of the model's state: whoever builds it draws the same.

    Args:
        inputs: d, numbers of a record.
        width: D.
        bandwidth: s.
        seed: of W and b.
    """

    weight: torch.Tensor
    offset: torch.Tensor

    def __init__(self, inputs: int, width: int, bandwidth: float, seed: int) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(seed)
        weight = torch.randn(width, inputs, generator=stream, dtype=torch.float64) / bandwidth
        offset = torch.rand(width, generator=stream, dtype=torch.float64) * (2 * math.pi)
        self.register_buffer("weight", weight.float(), persistent=False)
        self.register_buffer("offset", offset.float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features (B, D) of inputs (B, ...)."""
        projected = nn.functional.linear(x.flatten(1), self.weight, self.offset)
        return math.sqrt(2 / len(self.offset)) * projected.cos()


def build(options: RandomFeaturesOptions, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a head on random features of flattened inputs.

    Raises:
        ValueError: if a record has no values.
    """
    inputs = number_of_values("random_features", input_shape)
    bandwidth = math.sqrt(inputs) if options.bandwidth is None else options.bandwidth
    backbone = RandomFourier(inputs, options.width, bandwidth, options.seed)
    return classifier_of(
        backbone, options.width, input_shape, num_classes, options.dropout, standardise=options.standardise
    )


RANDOM_FEATURES = BackboneSpec(
    name="random_features",
    title="random Fourier features",
    options=RandomFeaturesOptions,
    build=build,
    frozen=True,
)
