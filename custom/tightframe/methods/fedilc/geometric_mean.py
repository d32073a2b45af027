"""Geometric means of signed numbers, coordinate by coordinate, and the sums that they come from.

Source: Zhu et al., Weighted Geometric Mean and Invariant Gradient Covariance for Federated Learning
on Non-IID Data, arXiv 2205.09305. Over K gradients, with n+ positive and n- negative entries in a
coordinate::

    weighted:    (n+/K) exp((1/n+) sum_{a>0} ln a) - (n-/K) exp((1/n-) sum_{a<0} ln |a|)
    substitute:  entries off the majority's sign become 0.001; then the geometric mean of all absolute
                 values, with the sign of the arithmetic mean

Both are functions of sums over the gradients, so that no single one need be known: counts of each
sign and sums of logarithms. Where only one entry has a sign, its sum of logarithms *is* that entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tightframe.errors import ContributionError

ZeroRule = Literal["neutral", "official"]
"""``neutral``: zeros are on neither side, but count in K. ``official``: as in the authors' experiments,
what is not positive is negative, and logarithms are those of |a| + 1e-10."""

POSITIVE, NEGATIVE = "positive", "negative"
LOG_POSITIVE, LOG_NEGATIVE = "log_positive", "log_negative"
NEGATIVE_SUM = "negative_sum"

LOG_LOWEST, LOG_HIGHEST = -50.0, 10.0
RANGES: Mapping[str, tuple[Literal[32, 64], float]] = {
    POSITIVE: (32, 1.0),
    NEGATIVE: (32, 1.0),
    LOG_POSITIVE: (64, -LOG_LOWEST),
    LOG_NEGATIVE: (64, -LOG_LOWEST),
    NEGATIVE_SUM: (64, math.exp(LOG_HIGHEST)),
}
"""Ring and largest magnitude of each term. With 24 fraction bits, logarithms are known to 2^-25, so that a
mean of any number of them is, too: 3e-8 relative in what it is the logarithm of."""
OFFICIAL_EPS = 1e-10
SUBSTITUTE = 1e-3


def term_names(*, zero: ZeroRule = "neutral", threshold: float = 0.0) -> tuple[str, ...]:
    """Return the names of ``sign_log_terms``: four, or three with the official rule and no threshold."""
    with_negative = zero == "neutral" or threshold > 0
    return (POSITIVE, *((NEGATIVE,) if with_negative else ()), LOG_POSITIVE, LOG_NEGATIVE)


def sign_log_terms(
    gradient: torch.Tensor, *, zero: ZeroRule = "neutral", threshold: float = 0.0
) -> dict[str, torch.Tensor]:
    """Return one gradient's terms of the sums of ``weighted_geometric_mean_from_sums``.

    ``positive`` and ``negative`` are 1 where the entry has that sign, ``log_positive`` and
    ``log_negative`` its logarithm there. ``neutral``: magnitudes below e^-50 count as zero.
    ``official``: zeros are part of ``log_negative``, and ``negative`` (strictly below zero) is there
    only if a threshold, whose mean sign counts no zeros, needs it.

    Args:
        gradient: any shape.
        zero: see ``ZeroRule``.
        threshold: that of the mean.

    Returns:
        Terms of the gradient's shape by the names of ``term_names``, in float64; logarithms lie in
        [-50, 10].

    Raises:
        ContributionError: TF-401 if an entry is not finite (NaN has no sign, and would pass for a
            zero); TF-402 if one is larger than e^10.
        ValueError: if ``zero`` is neither rule.
    """
    _check_rule(zero)
    values = _checked(gradient)
    eps, floor = _guards(zero)
    positive, strictly_negative = (values > floor).double(), (values < -floor).double()
    negative = strictly_negative if zero == "neutral" else 1 - positive
    logarithms = _logarithms(values, eps)
    terms = {
        POSITIVE: positive,
        NEGATIVE: strictly_negative,
        LOG_POSITIVE: _where(positive, logarithms),
        LOG_NEGATIVE: _where(negative, logarithms),
    }
    return {name: terms[name] for name in term_names(zero=zero, threshold=threshold)}


def weighted_geometric_mean_from_sums(
    sums: Mapping[str, torch.Tensor],
    num_silos: int,
    *,
    zero: ZeroRule = "neutral",
    threshold: float = 0.0,
) -> torch.Tensor:
    """Return the weighted geometric mean of K gradients from the sums of their ``sign_log_terms``.

    Args:
        sums: the summed terms, each of shape (...).
        num_silos: K, the number of gradients in the sums.
        threshold: coordinates whose mean sign ``|n+ - n-| / K`` is smaller become zero.

    Returns:
        The mean (...), float64. A side without entries contributes nothing.

    Raises:
        ValueError: if ``zero`` is neither rule or ``num_silos`` is not positive.
    """
    _check_rule(zero)
    _check_number(num_silos)
    plus = sums[POSITIVE].round()
    minus = sums[NEGATIVE].round() if zero == "neutral" else num_silos - plus
    log_plus, log_minus = sums[LOG_POSITIVE], sums[LOG_NEGATIVE]
    if zero == "official":
        # There, entries of the other side stand as ones in the product, and get their 1e-10, too.
        placeholder = math.log1p(OFFICIAL_EPS)
        log_plus, log_minus = log_plus + minus * placeholder, log_minus + plus * placeholder
    mean = _side(plus, log_plus, num_silos) - _side(minus, log_minus, num_silos)
    if threshold > 0:
        signs = (plus - sums[NEGATIVE].round()).abs() / num_silos
        mean = torch.where(signs >= threshold, mean, 0.0)
    return mean


def weighted_geometric_mean(
    gradients: Iterable[torch.Tensor], *, zero: ZeroRule = "neutral", threshold: float = 0.0
) -> torch.Tensor:
    """Return the weighted geometric mean of gradients, one at a time.

    Args:
        gradients: K tensors of one shape (...), or one tensor (K, ...).
        zero: see ``ZeroRule``.
        threshold: see ``weighted_geometric_mean_from_sums``.

    Returns:
        The mean (...), float64. Of one gradient it is the gradient, up to rounding.

    Raises:
        ContributionError, ValueError: see ``sign_log_terms``; without a gradient.

    >>> mean = weighted_geometric_mean(torch.tensor([[1.0, 2.0, 0.0], [4.0, -3.0, 0.0]]))
    >>> [round(value, 6) for value in mean.tolist()]
    [2.0, -0.5, 0.0]
    """
    mean = RunningMean(Rule("weighted", zero, threshold))
    for gradient in gradients:
        mean.add(gradient)
    return mean.result()


SUBSTITUTE_TERMS = (POSITIVE, NEGATIVE, LOG_POSITIVE, LOG_NEGATIVE, NEGATIVE_SUM)


def substitute_terms(gradient: torch.Tensor, *, zero: ZeroRule = "neutral") -> dict[str, torch.Tensor]:
    """Return one gradient's terms of the sums of ``substitute_mean_from_sums``.

    As ``sign_log_terms``, but zeros are on neither side under both rules, and there is the sum of
    negative entries, which decides the result's sign.

    Raises:
        ContributionError, ValueError: see ``sign_log_terms``.
    """
    _check_rule(zero)
    values = _checked(gradient)
    eps, floor = _guards(zero)
    positive, negative = (values > floor).double(), (values < -floor).double()
    logarithms = _logarithms(values, eps)
    return {
        POSITIVE: positive,
        NEGATIVE: negative,
        LOG_POSITIVE: _where(positive, logarithms),
        LOG_NEGATIVE: _where(negative, logarithms),
        NEGATIVE_SUM: _where(negative, values),
    }


def substitute_mean_from_sums(
    sums: Mapping[str, torch.Tensor],
    num_silos: int,
    *,
    zero: ZeroRule = "neutral",
    substitute: float = SUBSTITUTE,
) -> torch.Tensor:
    """Return the geometric mean with minority entries substituted, from the sums of ``substitute_terms``.

    The majority is the sign of ``n+ - n-``, a tie counting as positive. Whatever is not of that sign,
    zeros included, becomes ``+substitute``; the result is the geometric mean of the absolute values
    with the sign of the arithmetic mean, in which the substitutes count as they stand. So a negative
    majority of magnitudes far below ``substitute`` comes out positive, as in the authors' experiments.

    Args:
        sums: the summed terms, each of shape (...).
        num_silos: K, the number of gradients in the sums.
        substitute: positive.

    Returns:
        The mean (...), float64.

    Raises:
        ValueError: if ``zero`` is neither rule or ``num_silos`` is not positive.
    """
    _check_rule(zero)
    _check_number(num_silos)
    plus, minus = sums[POSITIVE].round(), sums[NEGATIVE].round()
    upward = plus >= minus
    others = num_silos - torch.where(upward, plus, minus)
    logarithms = torch.where(upward, sums[LOG_POSITIVE], sums[LOG_NEGATIVE])
    logarithms = logarithms + others * math.log(substitute + _guards(zero)[0])
    sign = torch.where(upward, 1.0, torch.sign(sums[NEGATIVE_SUM] + others * substitute))
    return sign * torch.exp(logarithms / num_silos)


def substitute_geometric_mean(
    gradients: Iterable[torch.Tensor], *, zero: ZeroRule = "neutral", substitute: float = SUBSTITUTE
) -> torch.Tensor:
    """Return ``substitute_mean_from_sums`` of gradients: K tensors (...), or one (K, ...).

    >>> round(float(substitute_geometric_mean(torch.tensor([-4.0, -2.0, 5.0]))), 6)  # -(8 * 0.001)^(1/3)
    -0.2
    """
    mean = RunningMean(Rule("substitute", zero, substitute=substitute))
    for gradient in gradients:
        mean.add(gradient)
    return mean.result()


@dataclass(frozen=True)
class Rule:
    """A kind of geometric mean: the terms that are summed, and the mean of their sums.

    Attributes:
        kind: ``weighted`` or ``substitute``, as above.
        zero: see ``ZeroRule``.
        threshold: of the weighted mean.
        substitute: of the other.
    """

    kind: Literal["weighted", "substitute"] = "weighted"
    zero: ZeroRule = "neutral"
    threshold: float = 0.0
    substitute: float = SUBSTITUTE

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its terms."""
        if self.kind == "substitute":
            return SUBSTITUTE_TERMS
        return term_names(zero=self.zero, threshold=self.threshold)

    def terms(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return one gradient's terms; see ``sign_log_terms`` and ``substitute_terms``."""
        if self.kind == "substitute":
            return substitute_terms(gradient, zero=self.zero)
        return sign_log_terms(gradient, zero=self.zero, threshold=self.threshold)

    def mean(self, sums: Mapping[str, torch.Tensor], num_silos: int) -> torch.Tensor:
        """Return the mean of so many gradients from the sums of their terms."""
        if self.kind == "substitute":
            return substitute_mean_from_sums(sums, num_silos, zero=self.zero, substitute=self.substitute)
        return weighted_geometric_mean_from_sums(sums, num_silos, zero=self.zero, threshold=self.threshold)


class RunningMean:
    """A geometric mean in the making, which keeps sums only."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def add(self, gradient: torch.Tensor) -> None:
        """Add one more gradient (...); see ``sign_log_terms`` for what it raises."""
        terms = self._rule.terms(gradient)
        for name, term in terms.items():
            if self._count:
                self._sums[name].add_(term)
            else:
                self._sums[name] = term
        self._count += 1

    def result(self) -> torch.Tensor:
        """Return the mean (...), float64.

        Raises:
            ValueError: without a gradient.
        """
        _check_number(self._count)
        return self._rule.mean(self._sums, self._count)


def _side(count: torch.Tensor, logarithms: torch.Tensor, num_silos: int) -> torch.Tensor:
    """Return ``(n/K) exp(sum ln |a| / n)``, zero where n is."""
    return count / num_silos * torch.exp(logarithms / count.clamp_min(1))


def _guards(zero: ZeroRule) -> tuple[float, float]:
    """Return the guard added to magnitudes, and the magnitude up to which an entry counts as zero."""
    return (0.0, math.exp(LOG_LOWEST)) if zero == "neutral" else (OFFICIAL_EPS, 0.0)


def _logarithms(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``ln(|a| + eps)``, of zeros some number that is finite."""
    magnitudes = values.abs()
    if eps:
        magnitudes += eps
    return magnitudes.clamp_min_(math.exp(LOG_LOWEST)).log_().clamp_min_(LOG_LOWEST)


def _where(chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return finite values where ``chosen`` is 1, and zero where it is 0: a ``torch.where`` that is fast."""
    return torch.mul(chosen, values).add_(0.0)  # which makes -0.0 to 0.0


def _checked(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient in float64, if its logarithms have bounds."""
    values = gradient.detach().to(torch.float64)
    # NaN passes through the maximum, so one number read from the device settles the usual case.
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        raise ContributionError(
            "Expected a finite gradient for the geometric mean, but got NaN or infinite entries.",
            code="TF-401",
        )
    if largest > math.exp(LOG_HIGHEST):
        limit = f"e^{LOG_HIGHEST:g} = {math.exp(LOG_HIGHEST):.0f}"
        raise ContributionError(
            f"Expected gradients of at most {limit} for the geometric mean, but got {largest:g}: lower the "
            "learning rate or the penalty's weight, or check the records.",
            code="TF-402",
        )
    return values


def _check_rule(zero: str) -> None:
    if zero not in ("neutral", "official"):
        raise ValueError(f"Expected `zero` to be 'neutral' or 'official', but got {zero!r}.")


def _check_number(num_silos: int) -> None:
    if num_silos < 1:
        raise ValueError(f"Expected at least one gradient, but got {num_silos}.")
