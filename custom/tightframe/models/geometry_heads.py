"""Heads whose class vectors are set by geometry and not by gradients: frames and unit prototypes.

The frame and the prototypes, which are the same at all silos, are frozen parameters: part of the model,
so that they are broadcast and saved with it, but never trained and never sent to the server. They are
drawn from torch's global stream, which the server seeds; the silos get them by broadcast. Both heads
compute in float32, even if the rest of the network uses a lower precision.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from tightframe.geometry import simplex_etf

TemperatureForm = Literal["plain", "softplus", "clamp"]
PrototypeInit = Literal["orthonormal", "etf"]

NORM_GUARD = 1e-12
LOWEST_TEMPERATURE = 1e-3


def unit_features(features: torch.Tensor) -> torch.Tensor:
    """Normalise the rows of (B, d): ``x / sqrt(|x|^2 + 1e-12)``.

    A row of length up to 1e-6 gets no gradient: its direction means nothing, and its gradient would be up
    to a million times larger than that of others.
    """
    square = features.detach().square().sum(1, keepdim=True)
    features = torch.where(square > NORM_GUARD, features, features.detach())
    return features * (features.square().sum(1, keepdim=True) + NORM_GUARD).rsqrt()


def etf_logits(
    features: torch.Tensor,
    projection_weight: torch.Tensor,
    projection_bias: torch.Tensor,
    etf: torch.Tensor,
    temperature: torch.Tensor | float,
) -> torch.Tensor:
    """Compute the logits of projected unit features for a fixed frame: ``beta * mu V``.

    ``mu = m / sqrt(|m|^2 + 1e-12)`` with ``m = P h + b``. Source: Li et al., No Fear of Classifier
    Biases (FedETF), ICCV 2023.

    Args:
        features: h, (B, h).
        projection_weight: P, (d, h).
        projection_bias: b, (d,).
        etf: V, class vectors in columns, (d, C).
        temperature: beta, a scalar.

    Returns:
        (B, C).
    """
    projected = nn.functional.linear(features, projection_weight, projection_bias)
    return temperature * (unit_features(projected) @ etf)


class EtfHead(nn.Module):
    """A classifier whose class vectors are a fixed simplex equiangular tight frame.

    With all options: ``logits = beta * (m / sqrt(|m|^2 + 1e-12)) V`` with ``m = P h + b`` (FedETF);
    with none: ``logits = h V`` (FedAvg_ETF).

    Args:
        num_classes: number of classes C, at least 2.
        dim: width d of the frame, at least C - 1. By default the feature width without a projection,
            and the number of classes with one.
        temperature: initial value of the learnable ``beta``; None for none.
        projection: whether a linear layer with bias maps h to d before the frame.
        normalise: whether features are normalised before the frame.
        scale: length of the class vectors.
        temperature_form: ``plain`` uses the parameter itself, which may become negative and then inverts
            the classifier; ``softplus`` uses ``log(1 + exp(beta))``, and the parameter starts at the
            value for which this is ``temperature``; ``clamp`` uses at least 0.001, below which the
            parameter has no gradient.

    Attributes:
        etf: V, (d, C), frozen.

    Raises:
        ValueError: if no such frame exists, if ``dim`` differs from the feature width without a
            projection, or if the initial temperature is too small for its form.
    """

    def __init__(
        self,
        feature_width: int,
        num_classes: int,
        *,
        dim: int | None = None,
        temperature: float | None = None,
        projection: bool = False,
        normalise: bool = False,
        scale: float = 1.0,
        temperature_form: TemperatureForm = "plain",
    ) -> None:
        super().__init__()
        if dim is None:
            dim = num_classes if projection else feature_width
        if not projection and dim != feature_width:
            raise ValueError(
                f"Expected `dim` to be the feature width {feature_width} without a projection, but got {dim}."
            )
        frame = simplex_etf(num_classes, dim, seed=_drawn_seed(), scale=scale)
        self.feature_width, self.num_classes, self.dim = feature_width, num_classes, dim
        self.normalise = normalise
        self.temperature_form = temperature_form
        self.projection = nn.Linear(feature_width, dim) if projection else None
        self.beta = (
            None if temperature is None else nn.Parameter(_raw_temperature(temperature, temperature_form))
        )
        self.etf = nn.Parameter(frame.float(), requires_grad=False)

    def temperature(self) -> torch.Tensor | float:
        """Return the factor of the logits: a scalar tensor, or 1.0 if there is no ``beta``."""
        if self.beta is None:
            return 1.0
        if self.temperature_form == "softplus":
            return nn.functional.softplus(self.beta)
        return self.beta.clamp_min(LOWEST_TEMPERATURE) if self.temperature_form == "clamp" else self.beta

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C) of features (B, h)."""
        with torch.autocast(features.device.type, enabled=False):
            features = _wide(features)
            if self.projection is not None:
                features = self.projection(features)
            if self.normalise:
                features = unit_features(features)
            logits = features @ self.etf
            return logits if self.beta is None else self.temperature() * logits


class NormalisedPrototypeHead(nn.Module):
    """A cosine classifier: ``logits = s * (f / max(|f|, 1e-12)) W^T``, W with unit rows (FedNH).

    A feature row of length up to 1e-12 has logits near zero and gets no gradient, which would be about
    1e12 times larger than that of others.

    Args:
        feature_width: feature width d.
        num_classes: number of classes C.
        init: ``orthonormal`` or ``etf``, see ``initial_prototypes``.
        scale: initial value of s.
        learn_scale: whether s is trained; otherwise it is fixed and not sent to the server.

    Attributes:
        prototypes: W, (C, d), frozen; the server may replace them.
        scale: s, a scalar.
    """

    def __init__(
        self,
        feature_width: int,
        num_classes: int,
        *,
        init: PrototypeInit = "orthonormal",
        scale: float = 1.0,
        learn_scale: bool = True,
    ) -> None:
        super().__init__()
        self.feature_width, self.num_classes = feature_width, num_classes
        rows = initial_prototypes(num_classes, feature_width, init=init, seed=_drawn_seed())
        self.prototypes = nn.Parameter(rows.float(), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=learn_scale)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C) of features (B, d)."""
        with torch.autocast(features.device.type, enabled=False):
            features = _wide(features)
            norm = torch.linalg.vector_norm(features.detach(), dim=1, keepdim=True)
            features = torch.where(norm > NORM_GUARD, features, features.detach())
            unit = nn.functional.normalize(features, dim=1, eps=NORM_GUARD)
            return self.scale * (unit @ self.prototypes.T)


def initial_prototypes(num_classes: int, dim: int, *, init: PrototypeInit, seed: int) -> torch.Tensor:
    """Return unit class vectors in rows, at or near the largest possible distances.

    ``orthonormal``: a uniformly random orthonormal set (pairwise squared distance 2), which exists up
    to ``num_classes = dim``; for more classes independent random unit rows. ``etf``: a simplex
    equiangular tight frame, the optimum (pairwise squared distance ``2 C / (C - 1)``), which exists
    up to ``num_classes = dim + 1``.

    Args:
        num_classes: number of classes C.
        dim: feature width d.
        init: ``orthonormal`` or ``etf``.

    Returns:
        (C, d) float64.

    Raises:
        ValueError: if ``init`` is neither, or the frame does not exist.

    >>> rows = initial_prototypes(3, 5, init="orthonormal", seed=0)
    >>> (rows @ rows.T).round(decimals=6).abs().tolist()[0]
    [1.0, 0.0, 0.0]
    """
    if init == "etf":
        return simplex_etf(num_classes, dim, seed=seed).T.contiguous()
    if init != "orthonormal":
        raise ValueError(f"Expected `init` to be 'orthonormal' or 'etf', but got {init!r}.")
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, num_classes, generator=generator, dtype=torch.float64)
    if num_classes > dim:
        return nn.functional.normalize(gaussian.T, dim=1)
    rotation, triangle = torch.linalg.qr(gaussian)
    # QR determines columns only up to sign, and LAPACK's choice is not uniform.
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(torch.float64)
    return (rotation * signs).T.contiguous()


def _drawn_seed() -> int:
    """Draw a seed from torch's global stream, so that the server's seed determines the geometry as well."""
    return int(torch.randint(2**31, ()))


def _raw_temperature(value: float, form: TemperatureForm) -> torch.Tensor:
    """Return the parameter for which the temperature is ``value``."""
    if form not in ("plain", "softplus", "clamp"):
        raise ValueError(
            f"Expected `temperature_form` to be 'plain', 'softplus' or 'clamp', but got {form!r}."
        )
    least = 0.0 if form == "softplus" else LOWEST_TEMPERATURE
    if form != "plain" and value <= least:
        raise ValueError(
            f"Expected `temperature` to be above {least} for the form {form!r}, but got {value}."
        )
    raw = torch.tensor(value, dtype=torch.float64)
    if form == "softplus":
        raw = raw + torch.log(-torch.expm1(-raw))  # log(exp(value) - 1) without overflow
    return raw.float()


def _wide(features: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32, the least precision of the methods' terms and statistics."""
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features
