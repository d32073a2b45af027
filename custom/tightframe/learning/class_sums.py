"""Sums over the records of each class: within a batch, and over a fold whatever the order of its records."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tightframe.errors import ContributionError, TrainingError
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Phase,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)

# Each record's feature is rounded to this grid and summed in integers, so that the sum does not
# depend on the order of records; 2**28 * 2**24 leaves every total exact in float64.
GRID = 2.0**24
SUM_BOUND = 2.0**28
# 2**24 records of a class (more are refused by the bound of their count) of features up to 2**14 come to
# 2**24 * 2**14 * 2**24 = 2**62 units at most, so that the int64 sum never wraps; SUM_BOUND is checked on it.
FEATURE_BOUND = 2.0**14
COUNT_BOUND = 2.0**24


@dataclass(frozen=True)
class BatchClasses:
    """Classes of a batch's records, as a (B, B) mask or as (B, K) membership.

    The mask costs B^2 d and needs no number of classes; membership costs K d^2 a record and asks
    the device how many classes there are. The mask is cheaper unless B > K d, which cannot happen
    while the batch is smaller than the feature width; so only larger batches ask.

    Attributes:
        same: of equal labels, or None.
        member: of each record in its class, or None; one of the two is given.
    """

    same: torch.Tensor | None
    member: torch.Tensor | None

    @classmethod
    def of(cls, features: torch.Tensor, labels: torch.Tensor) -> BatchClasses:
        """Choose the cheaper form for features (B, d) and labels (B,)."""
        batch, width = features.shape
        if batch > width:
            classes, slots = torch.unique(labels, return_inverse=True)
            if batch > len(classes) * width:
                return cls(None, nn.functional.one_hot(slots, len(classes)).to(features.dtype))
        return cls((labels[:, None] == labels[None, :]).to(features.dtype), None)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each record the sum of ``values`` (B, k) over the records of its class, (B, k)."""
        if self.same is not None:
            return self.same @ values
        assert self.member is not None  # noqa: S101  (one of the two is given)
        return self.member @ (self.member.T @ values)

    def products(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each record ``z Z_c^T Z_c`` of its class's Z: ``values`` (B, d) -> (B, d)."""
        if self.same is not None:
            return (values @ values.T).mul_(self.same) @ values
        assert self.member is not None  # noqa: S101  (one of the two is given)
        by_class = self.member.T[:, :, None] * values  # (K, B, d), zero outside of the class
        return (by_class @ (by_class.transpose(1, 2) @ values)).sum(0)


class ClassSums:
    """Per class the sum of a silo's features and the number of records, float64 on the CPU.

    Args:
        width: of a feature.
    """

    def __init__(self, classes: int, width: int) -> None:
        self.sums = torch.zeros(classes, width, dtype=torch.float64)
        self.counts = torch.zeros(classes, dtype=torch.float64)

    def add(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: features (B, width), labels (B,)."""
        # A product, because adding by index has no fixed order on a GPU.
        member = nn.functional.one_hot(labels, len(self.counts)).to(torch.float64)
        self.sums += (member.T @ features.detach().to(torch.float64)).cpu()
        self.counts += member.sum(0).cpu()

    @torch.no_grad()
    def add_pass(self, encoded: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Count batches of features and labels, as ``SiloView.encoded`` yields them."""
        for features, labels in encoded:
            self.add(features, labels)

    def totals(self, *, least: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums (C, width) and numbers of records (C,); zero for classes with fewer than ``least``.

        Raises:
            TrainingError: TF-301 if a feature is not finite.
        """
        if not bool(self.sums.isfinite().all()):
            raise TrainingError("Expected finite features of local training, but some are NaN or infinite.")
        held = self.counts >= max(least, 1)
        return torch.where(held[:, None], self.sums, 0), torch.where(held, self.counts, 0)

    def means(self, *, least: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return class means (C, width) and which classes have one (C,), as ``totals``.

        Raises:
            TrainingError: TF-301 if a feature is not finite.
        """
        sums, counts = self.totals(least=least)
        return sums / counts.clamp_min(1)[:, None], (counts > 0).double()


def ratio_of_sums(
    previous: torch.Tensor, sums: torch.Tensor, shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return class vectors as the ratio of two sums; a class without records keeps its old vector.

    Args:
        previous: (C, d).
        sums: over holders or records, (C, d).
        shares: how many these are, (C,); below 1/2 counts as none.

    Returns:
        (C, d) in the type of ``previous``, and which classes are in these sums, (C,) bool.

    >>> means, held = ratio_of_sums(torch.ones(2, 1), torch.tensor([[6.0], [0.0]]), torch.tensor([2, 0]))
    >>> means.tolist(), held.tolist()
    ([[3.0], [1.0]], [True, False])
    """
    held = shares >= 0.5
    divisor = torch.where(held, shares, 1).to(torch.float64)
    ratio = (sums.to(torch.float64) / divisor[:, None]).to(previous.dtype)
    return torch.where(held[:, None], ratio, previous), held


@torch.no_grad()
def class_feature_sums(
    encoded: Iterable[tuple[torch.Tensor, torch.Tensor]],
    num_classes: int,
    width: int,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per class the sum of features and the number of records, independent of their order.

    Args:
        encoded: (features, labels) of the training fold, without augmentation.
        width: feature width d.
        device: of these; the CPU by default.

    Returns:
        Sums (C, d) float64, multiples of 2^-24, and counts (C,) float64, on the CPU.

    Raises:
        TrainingError: TF-301 if a feature is not finite.
        ContributionError: TF-402 if a feature is over ``FEATURE_BOUND``.
    """
    sums = torch.zeros(num_classes, width, dtype=torch.int64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)  # |feature|; read once, after all batches
    for rows, labels in encoded:
        features = rows.to(torch.float64)
        largest = torch.maximum(largest, features.abs().max())
        # The conversion of what is refused below would be arbitrary, so it never happens.
        safe = features.nan_to_num(nan=0.0).clamp(-FEATURE_BOUND, FEATURE_BOUND)
        sums.index_add_(0, labels, (safe * GRID).round().to(torch.int64))
        counts.index_add_(0, labels, torch.ones_like(labels))
    if not math.isfinite(most := float(largest)):
        raise TrainingError("Expected finite features after local training, but some are NaN or infinite.")
    if most > FEATURE_BOUND:
        raise ContributionError(
            f"Expected features of at most {FEATURE_BOUND:g} in absolute value after local training, but got "
            f"{most:g}: lower the learning rate or the weights of the method's terms, or check the records.",
            code="TF-402",
        )
    return sums.cpu().to(torch.float64) / GRID, counts.cpu().to(torch.float64)


def class_sum_fields(
    sums: str, counts: str, classes: int, width: int, *, static: bool = True
) -> tuple[Field, Field]:
    """Return the fields of ``class_feature_sums``, under these names.

    Args:
        sums: name of the sums (C, d).
        counts: name of the numbers of records (C,).
        width: d.
        static: whether they are opened for one cohort only; not where noise is what protects them.
    """
    return (
        Field(
            sums,
            (classes, width),
            ring=64,
            bound=SUM_BOUND,
            static=static,
            per_class=True,
            mechanism="class_sums",
        ),
        Field(
            counts,
            (classes,),
            ring=64,
            bound=COUNT_BOUND,
            static=static,
            per_class=True,
            sensitivity=1.0,
            mechanism="class_sums",
        ),
    )


def holders_phase(counts: Field) -> Phase:
    """Return the exchange that tells who holds which class, on which the class rules rest.

    Args:
        counts: field for the numbers of records (C,).
    """

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        own = silo.class_counts("train").to(torch.float64)
        return Contribution({counts.name: own if silo.offers_prototypes else torch.zeros_like(own)}, None)

    def keep(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        return state

    return Phase("holders", Schema((counts,)), lambda state: {}, contribute, keep)


def silo_class_sums(silo: SiloView, model: nn.Module, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``class_feature_sums`` of a silo's training fold; zeros where it submits no prototypes.

    Args:
        model: in evaluation mode.
        width: feature width d.
    """
    encoded = silo.encoded(model, "train") if silo.offers_prototypes else ()
    return class_feature_sums(encoded, silo.setting.num_classes, width, silo.device)
