"""FedMR's two terms with their gradients, in few operations: on a GPU each costs its launch, not its work.

Both values are scalars, so that the gradient is made with the value and needs no second pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tightframe.learning.class_sums import BatchClasses


class _Scalar(torch.autograd.Function):
    """A value whose gradient in the first argument is known with it."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Return the kept gradient times the one of the value."""
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None, None


class IntraClass(_Scalar):
    """Equation (3), see ``intra_class_loss``.

    There is no loop over classes. With Z the standardised records of a class, ``|Z^T Z|_F^2`` is the sum over
    its records of ``z^T Z^T Z z``, and its gradient ``4 Z^T Z z``: both take ``Z^T Z z`` of each record.
    """

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, labels: torch.Tensor, form: str, eps: float
    ) -> torch.Tensor:
        """Return the term of features (B, d) of float32 or wider."""
        width = features.shape[1]
        classes = BatchClasses.of(features, labels)
        count = classes.sum(features.new_ones(len(labels), 1))  # N_c of each record's class, (B, 1)
        used = (count - 1).clamp_(0, 1)  # 1 where the class has at least two records
        freedom = (count - 1).clamp_(min=1)
        centred = torch.addcdiv(features, classes.sum(features), count, value=-1)
        variance = classes.sum(centred.square()).div_(freedom)
        inverse = torch.rsqrt(variance + eps).mul_(used)  # of the deviation; 0 where the class is not used
        if eps == 0:  # a feature without any spread
            inverse = torch.where(variance > 0, inverse, 0)
        standardised = centred * inverse
        products = classes.products(standardised)
        if form == "official":
            weight = 1 / used.sum().clamp_(min=1) * used
        else:
            weight = 1 / (freedom.square() * (used / count).sum().clamp_(min=1))  # of (N_c - 1)^2 |R_c|_F^2
        shares = products * standardised
        if form != "paper":
            entries = width * (width - 1)  # off the diagonal
            weight = weight / entries if entries else weight * 0
            # The diagonal of R_c is var / (var + eps); a record has 1 / N_c of the class's.
            own = weight * freedom.square() / count
            diagonal = variance * inverse.square()
            value = torch.addcmul(shares * weight, own, diagonal.square(), value=-1).sum()
        else:
            value = (shares * weight).sum()
        if ctx.needs_input_grad[0]:
            slope = products * (4 * weight)  # in the standardised records
            spread = slope * standardised * -0.5  # in the variance, over inverse^2
            if form != "paper":
                spread = torch.addcmul(spread, own * diagonal, inverse.square(), value=-2 * eps)
            through = classes.sum(spread.mul_(inverse.square())).div_(freedom)
            back = torch.addcmul(slope * inverse, centred, through, value=2)  # in the centred records
            ctx.save_for_backward(torch.addcdiv(back, classes.sum(back), count, value=-1))
        return value


class Margins(_Scalar):
    """Equation (4) of distances, see ``inter_class_loss``."""

    @staticmethod
    def forward(
        ctx: Any, distance: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, observed: bool
    ) -> torch.Tensor:
        """Return the term of the records' distances to all anchors (B, C); valid is bool (C,)."""
        own = (labels[:, None] == torch.arange(distance.shape[1], device=labels.device)).to(distance.dtype)
        counts = own.sum(0)
        sources = valid * counts.clamp(max=1)
        targets = sources if observed else valid.to(distance.dtype)
        pairs = (sources.sum() * (targets.sum() - 1)).clamp_(min=1)
        weight = own @ (sources / (counts.clamp(min=1) * pairs))  # of each record's margins, (B,)
        margin = torch.relu_(distance.gather(1, labels[:, None]) - distance).mul_(targets)
        if ctx.needs_input_grad[0]:
            beyond = torch.sign(margin).mul_(weight[:, None])  # those with a slope
            ctx.save_for_backward(torch.addcmul(-beyond, own, beyond.sum(1, keepdim=True)))
        return margin.sum(1) @ weight
