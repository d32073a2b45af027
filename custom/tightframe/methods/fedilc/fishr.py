"""Fishr: how differently the gradients of single records spread from silo to silo.

Source: Zhu et al., Weighted Geometric Mean and Invariant Gradient Covariance for Federated Learning
on Non-IID Data, arXiv 2205.09305, after Rame, Dancette and Cord, Fishr: Invariant Gradient Variances
for Out-of-Distribution Generalization, ICML 2022.

v_k is, coordinate by coordinate, the population variance (1/n) over a silo's records of the gradient
of the last linear layer. With a record's features f and the slope delta of its loss by the logits,
that gradient is ``delta f^T`` (and ``delta`` for the bias), so no gradient of a single record is ever
made::

    v_W = (delta^2)^T (f^2) / n - ((delta^T f) / n)^2,    v_b = mean(delta^2) - mean(delta)^2

The penalty is ``sum_k |v_k - vbar|^2`` with vbar the silos' mean. Its gradient needs no other silo's
graph: the parts through vbar cancel, because the deviations add up to zero, and what is left is
``sum_k 2 J_k^T (v_k - vbar)`` with vbar as a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightframe.learning import outputs
from tightframe.learning.gradients.fold import no_records, same_batches
from tightframe.learning.stages import at_least_float32
from tightframe.phases import SiloView


def logit_slopes(
    features: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return delta: the slope of each record's cross-entropy by the logits, (B, C).

    Softmax minus the label's indicator; for a layer of one row, sigmoid minus the label.

    Args:
        features: f, (B, d).
        labels: (B,) integer; 0 or 1 for a layer of one row.
        weight: (C, d), or (1, d) for a layer whose one logit is that of class 1.
        bias: (C,) or (1,), or None.
    """
    logits = torch.nn.functional.linear(features, weight, bias)
    if len(weight) == 1:
        return torch.sigmoid(logits) - labels[:, None].to(logits.dtype)
    return torch.softmax(logits, 1) - torch.nn.functional.one_hot(labels, len(weight)).to(logits.dtype)


@dataclass(frozen=True)
class GradientMoments:
    """Sums over records of the last layer's gradients and of their squares.

    Attributes:
        weight, weight_squares: (C, d).
        bias, bias_squares: (C,); zero for a layer without a bias.
        records: n.
        batches: mini-batches they were summed over.
    """

    weight: torch.Tensor
    weight_squares: torch.Tensor
    bias: torch.Tensor
    bias_squares: torch.Tensor
    records: int
    batches: int = 1

    def __add__(self, other: GradientMoments) -> GradientMoments:
        return GradientMoments(
            self.weight + other.weight,
            self.weight_squares + other.weight_squares,
            self.bias + other.bias,
            self.bias_squares + other.bias_squares,
            self.records + other.records,
            self.batches + other.batches,
        )

    def variance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the variances of the weight (C, d) and of the bias (C,); of one record exactly zero."""
        if self.records == 1:  # rounding would leave about 1e-17
            return self.weight_squares - self.weight_squares, self.bias_squares - self.bias_squares
        count = self.records
        return (
            self.weight_squares / count - (self.weight / count).square(),
            self.bias_squares / count - (self.bias / count).square(),
        )


def gradient_moments(
    features: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> GradientMoments:
    """Return the moments of one mini-batch; arguments as for ``logit_slopes``."""
    slopes = logit_slopes(features, labels, weight, bias)
    squares = slopes.square()
    with_bias = 0.0 if bias is None else 1.0
    return GradientMoments(
        slopes.T @ features,
        squares.T @ features.square(),
        with_bias * slopes.sum(0),
        with_bias * squares.sum(0),
        len(labels),
    )


def gradient_variance(
    features: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return v: the population variance of single records' gradients of the last linear layer.

    Attached to its arguments, so that a penalty on it trains the layer and, through the features,
    everything before.

    Args:
        features: f, (B, d), of all records.
        labels: (B,) integer; 0 or 1 for a layer of one row.
        weight: (C, d), or (1, d) for a layer whose one logit is that of class 1.
        bias: (C,) or (1,), or None.

    Returns:
        The variance of the weight's gradient, shaped as the weight, and of the bias's, (C,) (zero
        without a bias).

    >>> records, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])
    >>> gradient_variance(records, labels, torch.zeros(2, 1), torch.zeros(2))  # slopes -1/2, 1/2; 1/2, -1/2
    (tensor([[1.],
            [1.]]), tensor([0.2500, 0.2500]))
    """
    return gradient_moments(features, labels, weight, bias).variance()


def fishr_penalty(variances: torch.Tensor) -> torch.Tensor:
    """Return ``sum_k |v_k - vbar|^2``: over silos and coordinates, as the paper's weights of it assume.

    The original Fishr takes means instead of both sums, which is smaller by the factor K D.

    Args:
        variances: v_k of K silos, (K, D).

    >>> float(fishr_penalty(torch.tensor([[1.0, 0.0], [3.0, 0.0]])))
    2.0
    """
    return (variances - variances.mean(0)).square().sum()


@dataclass(frozen=True)
class SiloPenalty:
    """One silo's part ``|v - vbar|^2`` of the penalty, differentiable mini-batch by mini-batch.

    With ``u = 2 (v - vbar)`` and the mean gradient m, both over the *whole* set, the chain rule gives::

        d|v - vbar|^2 = (1/n) sum_i d( <u, delta_i^2 f_i^2> - 2 <u m, delta_i f_i> )

    with u and m as constants. So after one pass for v and m, each mini-batch's own graph yields its
    share of the exact gradient, and no more than one of them is ever held.

    Attributes:
        weight, bias: u of the weight (C, d) and of the bias (C,).
        weight_mean, bias_mean: u m, likewise.
        records: n.
        value: ``|v - vbar|^2``.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    weight_mean: torch.Tensor
    bias_mean: torch.Tensor
    records: int
    value: torch.Tensor

    @classmethod
    def of(cls, moments: GradientMoments, mean_weight: torch.Tensor, mean_bias: torch.Tensor) -> SiloPenalty:
        """Make the penalty from the moments of all records and vbar, (C, d) and (C,)."""
        variances = moments.variance()
        gaps = variances[0] - mean_weight, variances[1] - mean_bias
        # The variance of one record is zero wherever the parameters are.
        scale = 0.0 if moments.records == 1 else 2.0
        weight, bias = scale * gaps[0], scale * gaps[1]
        return cls(
            weight,
            bias,
            weight * moments.weight / moments.records,
            bias * moments.bias / moments.records,
            moments.records,
            gaps[0].square().sum() + gaps[1].square().sum(),
        )

    def share(
        self, features: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a scalar whose gradient is this mini-batch's share of that of ``|v - vbar|^2``.

        Its value means nothing. Arguments as for ``logit_slopes``, of one mini-batch.
        """
        slopes = logit_slopes(features, labels, weight, bias)
        squares = slopes.square()
        on_weight = ((squares @ self.weight) * features.square()).sum()
        on_weight = on_weight - 2 * ((slopes @ self.weight_mean) * features).sum()
        if bias is None:
            return on_weight / self.records
        on_bias = squares @ self.bias - 2 * (slopes @ self.bias_mean)
        return (on_weight + on_bias.sum()) / self.records


def last_layer(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight (C, d) and bias (C,) of a model's linear head, in float64 and attached to it.

    A head with one logit z for two classes, whose logits are (0, z), has the weight (1, d).

    Raises:
        ValueError: if the head is not linear.
    """
    head: Any = model.head
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not (
        isinstance(weight, torch.Tensor)
        and weight.ndim == 2
        and (bias is None or bias.shape == weight.shape[:1])
    ):
        raise ValueError(
            "Expected a linear head with a weight (C, d) and a bias (C,) or none, because the variance of "
            f"gradients is that of such a layer, but got {type(head).__name__}."
        )
    return weight.double(), None if bias is None else bias.double()


@torch.no_grad()
def fold_moments(silo: SiloView, model: nn.Module) -> tuple[GradientMoments, torch.Tensor]:
    """Return the moments of the last layer's gradients over the training fold, in float64.

    The layer is taken without dropout of its input. The model's running statistics change.

    Returns:
        The moments, and where few of the silo's records move the layer, bool (C, d + 1), the bias last: there
        a variance is one record's slope times its feature.

    Raises:
        TrainingError: TF-208 if there is no record, TF-305 if the model tells too few apart.
    """
    weight, bias = last_layer(model)
    total = None
    with silo.unit_records(model, passes=[range(1)], squared=True) as units:
        for inputs, labels in same_batches(silo, model):
            features = model.features(inputs)  # type: ignore[operator]
            with torch.enable_grad():
                head_inputs = features.detach().requires_grad_()
                logits = at_least_float32(model.head(head_inputs))  # type: ignore[operator]
                torch.autograd.grad(outputs.summed_loss(logits, labels), head_inputs)
            moments = gradient_moments(features.double(), labels, weight, bias)
            total = moments if total is None else total + moments
    if total is None:
        raise no_records()
    units.check()
    few = units.few()
    place = torch.zeros(len(weight), weight.shape[1] + 1, dtype=torch.bool)
    if "head.weight" in few:
        place[:, :-1] = few["head.weight"]
        place[:, -1] = few.get("head.bias", place[:, -1])
    return total, place
