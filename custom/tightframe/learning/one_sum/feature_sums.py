"""Sums of a frozen feature map over records, as exact integers: second moments, class sums, class counts.

With a feature map phi that no silo trains, a ridge classifier, a linear discriminant and class means are
functions of three sums over all silos' records::

    phi = h / max(R, |h|)                       features h of the model as it was broadcast; R is public
    G = sum phi phi^T   (d, d)     B_c = sum of phi over class c   (C, d)     n_c   (C,)

Every record's phi is rounded to multiples of 2^-24, once, and its products are not rounded at all: the sums
are sums of integers, so that a total is the same bits for one silo and for ten, for any partition and any
order of the records. Features are computed in float64, because a record's float32 features differ in their
last bits with the batch that it is in.

G has 48 fraction bits, of which the encoding of one field has 24. So two fields carry it: with each feature
split as ``phi = a + b``, a in multiples of 2^-15, one has sum a a^T, the other all products with b. Both are
sums over records, too. Only upper triangles travel. No factor sqrt(2) is on the off-diagonal entries: it
would round each silo's sum once more. A noise that is to hide the Frobenius norm puts it on its deviation.
The constant for an intercept does not travel either: its products are in B and n already.

Features that hardly differ from record to record, as cosines at a bandwidth of 10^6, are steps by rounding:
of a searched seed some is one step off at a single record, so that its row of G is that record's features
(two of 216 were read to 0.06 deviations). So a feature that is within ``NARROW`` steps at all of a silo's
records is taken for their rounded mean there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tightframe.errors import RunError, TrainingError
from tightframe.learning import model_update
from tightframe.learning.few_records.distinct_rows import BITS, units
from tightframe.models import feature_width
from tightframe.phases import (
    ADMITTED,
    Field,
    SiloView,
    Tensors,
    Totals,
)

COARSE, FINE = "frozen/products", "frozen/fine_products"
SUMS, COUNTS, RECORDS = "frozen/sums", "frozen/counts", "frozen/records"
PREFIX = "frozen/"

FINE_BITS = 9
"""The last of a feature's, those of b. Products of a have 2 (24 - 9) = 30 fraction bits."""
NARROW = 2.0**8
"""Steps of 2^-24 that a silo's records are apart at least in a feature that is summed as it is."""
RECORD_BOUND = 2.0**20
"""Most records of a silo. No entry of phi exceeds 1, so that all sums are integers of at most 2^53, which
float64 holds exactly: of products of a 2^20 * 2^30, of those with b 2^20 * 2^33."""
COARSE_BOUND, FINE_BOUND = 2.0 ** (50 - BITS), 2.0 ** (53 - BITS)


@dataclass(frozen=True)
class FrozenSums:
    """Pooled sums over the records of the known classes.

    Attributes:
        gram: G, (d, d) float64; None where it was not summed.
        sums: B, (C, d) float64.
        counts: n, (C,) float64; zero for classes that are not known.
        noise: the spectral norm that noise alone gives G, a public number; 0 where the sums are exact.
    """

    gram: torch.Tensor | None
    sums: torch.Tensor
    counts: torch.Tensor
    noise: float = 0.0

    @property
    def known(self) -> torch.Tensor:
        """Classes with records in these sums, (C,) bool."""
        return self.counts >= 0.5

    @property
    def records(self) -> float:
        """N, their number of records."""
        return float(self.counts.sum())

    @property
    def length(self) -> float:
        """Root mean square length of the class means, a record's each: at most that of the records."""
        squares = self.sums.square().sum(1) / self.counts.clamp_min(1)
        return max(math.sqrt(float(squares.sum()) / self.records), 1e-12)

    def over(self, length: float) -> FrozenSums:
        """Return the sums of ``phi / length``."""
        gram = None if self.gram is None else self.gram / length**2
        return FrozenSums(gram, self.sums / length, self.counts, self.noise / length**2)


class FeatureSums:
    """A silo's sums, in integers.

    Args:
        width: d.
        products: whether G is summed.
        radius: R.
        device: on which products are computed.
        narrow: steps that records are apart in a feature, else it is taken for their mean; 0 takes all.
    """

    def __init__(
        self,
        classes: int,
        width: int,
        *,
        products: bool,
        radius: float = 1.0,
        device: torch.device | None = None,
        narrow: float = 0.0,
    ) -> None:
        shapes = {"sums": (classes, width), "counts": (classes,)}
        if products:
            shapes |= dict.fromkeys(("coarse", "cross", "fine"), (width, width))
            shapes |= dict.fromkeys(("coarse_sum", "fine_sum"), (width,))
        # Float64, whose products and sums of integers below 2^53 are exact in whatever order.
        self._parts = {
            name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()
        }
        self._classes, self._products, self._radius = classes, products, radius
        self._unusable = torch.zeros((), dtype=torch.bool, device=device)
        self._narrow = narrow
        self._low = torch.full((width,), math.inf, dtype=torch.float64, device=device)
        self._high = -self._low

    def add(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: features h (B, d), labels (B,)."""
        self._unusable |= ~features.isfinite().all()
        rounded = units(features, self._radius)
        if len(rounded):
            self._low = torch.minimum(self._low, rounded.amin(0))
            self._high = torch.maximum(self._high, rounded.amax(0))
        member = nn.functional.one_hot(labels, self._classes).to(torch.float64)
        parts = self._parts
        parts["sums"] += member.T @ rounded
        parts["counts"] += member.sum(0)
        if self._products:
            unit = 2.0**FINE_BITS
            coarse = (rounded / unit).round()
            fine = rounded - coarse * unit
            parts["coarse_sum"] += coarse.sum(0)
            parts["fine_sum"] += fine.sum(0)
            parts["coarse"] += coarse.T @ coarse
            parts["cross"] += coarse.T @ fine
            parts["fine"] += fine.T @ fine

    def constants(self) -> torch.Tensor:
        """Return what narrow features are taken for at all records, in steps, and NaN for others, (d,)."""
        mean = (self._parts["sums"].sum(0) / self._parts["counts"].sum()).round()
        return torch.where(self._high - self._low < self._narrow, mean, math.nan).cpu()

    def tensors(self, constants: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of ``sum_fields``, float64 on the CPU, all exact.

        Args:
            constants: of sums over more records, which these are to be subtracted from; by default their own.

        Raises:
            TrainingError: TF-301 if a feature is not finite.
        """
        if bool(self._unusable):
            raise TrainingError("Expected finite features of the frozen model, but some are NaN or infinite.")
        parts = {name: value.cpu().clone() for name, value in self._parts.items()}
        _take(parts, self.constants() if constants is None else constants)
        tensors = {
            SUMS: parts["sums"] / 2.0**BITS,
            COUNTS: parts["counts"],
            RECORDS: parts["counts"].sum(),
        }
        if self._products:
            rows, columns = _triangle(len(parts["coarse"]))
            fine = (parts["cross"] + parts["cross"].T) * 2.0**FINE_BITS + parts["fine"]
            tensors[COARSE] = parts["coarse"][rows, columns] / 2.0**BITS
            tensors[FINE] = fine[rows, columns] / 2.0**BITS
        return tensors


def _take(parts: dict[str, torch.Tensor], constants: torch.Tensor) -> None:
    """Take features for constants (d,) in sums, in place, where these are not NaN."""
    chosen, records = ~constants.isnan(), parts["counts"].sum()
    value = constants[chosen]
    parts["sums"][:, chosen] = parts["counts"][:, None] * value
    if "coarse" not in parts or not len(value):
        return
    unit = 2.0**FINE_BITS
    coarse = (value / unit).round()
    own = {"coarse": coarse, "fine": value - coarse * unit}
    sums = {name: parts[f"{name}_sum"] for name in own}
    for name, item in own.items():
        sums[name][chosen] = records * item
    for name, rows, columns in (("coarse",) * 3, ("cross", "coarse", "fine"), ("fine",) * 3):
        parts[name][chosen] = own[rows][:, None] * sums[columns]
        parts[name][:, chosen] = sums[rows][:, None] * own[columns]


def _triangle(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.triu_indices(width, width)
    return rows, columns


def sum_fields(classes: int, width: int, *, products: bool) -> tuple[Field, ...]:
    """Return the fields of ``FeatureSums.tensors``.

    All are static: of the same records and the same model they are the same in every job, so that totals over
    two cohorts would differ by one silo's own sums. They are in no job with differential
    privacy, whose sums are those of ``learning.one_sum.noisy_sums``.

    Args:
        width: d.
        products: whether G is summed.
    """
    fields = [
        Field(SUMS, (classes, width), bound=RECORD_BOUND, static=True, per_class=True, features=width),
        counts_field(classes),
        Field(RECORDS, (), bound=RECORD_BOUND, static=True),
    ]
    if products:
        size = (width * (width + 1) // 2,)
        fields.append(Field(COARSE, size, bound=COARSE_BOUND, static=True, products=width))
        fields.append(Field(FINE, size, bound=FINE_BOUND, static=True, products=width))
    return tuple(fields)


def pooled(totals: Totals) -> FrozenSums:
    """Return the pooled sums from opened totals.

    Raises:
        RunError: TF-510 if fewer than two classes are known, or if records are in G whose class is not in B:
            a silo failed meanwhile, and left the class with fewer than three holders.
    """
    sums, counts = (torch.as_tensor(totals[name], dtype=torch.float64) for name in (SUMS, COUNTS))
    records = float(totals[RECORDS])
    if abs(records - float(counts.sum())) >= 0.5:
        raise RunError(
            "Expected three holders of each class whose records were summed, but a class lost one while its "
            "records were summed: start the job again.",
            code="TF-510",
        )
    gram = None
    if COARSE in totals:
        width = sums.shape[1]
        rows, columns = _triangle(width)
        gram = torch.zeros(width, width, dtype=torch.float64)
        coarse, fine = totals[COARSE] * 2.0 ** (FINE_BITS * 2), totals[FINE]
        gram[rows, columns] = torch.as_tensor((coarse + fine) * 2.0**-BITS)
        gram[columns, rows] = gram[rows, columns]
    pooled_sums = FrozenSums(gram, sums, counts)
    if (known := int(pooled_sums.known.sum())) < 2:
        raise RunError(
            f"Expected sums of two classes at least, but got {known}: three silos must hold enough records "
            "of a class (`min_class_count` of each site), or `class_rules` be off.",
            code="TF-510",
        )
    return pooled_sums


def frozen(silo: SiloView, received: Tensors) -> nn.Module:
    """Return the model received as a frozen map: in evaluation mode, its head in float64, on the device."""
    model = silo.load(model_update.received_model(received)).eval()
    model.get_submodule("head").double()
    return model


def no_sums(silo: SiloView, width: int, *, products: bool, radius: float = 1.0) -> FeatureSums:
    """Return sums of none of a silo's records yet, with the rule on narrow features where it has rules."""
    return FeatureSums(
        silo.setting.num_classes,
        width,
        products=products,
        radius=radius,
        device=silo.device,
        narrow=NARROW if silo.records_per_feature else 0.0,
    )


def contribute_sums(
    silo: SiloView, received: Tensors, *, products: bool, radius: float
) -> dict[str, torch.Tensor]:
    """Return a silo's tensors for ``sum_fields``, of the records of the classes that it contributes to.

    G has no axis of classes that rules could zero afterwards, so that records of a withheld class are left
    out before they are summed.
    """
    model = frozen(silo, received)
    own = no_sums(silo, feature_width(model), products=products, radius=radius)
    admitted = admitted_classes(silo, received).to(silo.device)
    if bool(admitted.any()):
        for features, labels in silo.encoded(model, "train", exact=True):
            kept = admitted[labels]
            own.add(features[kept], labels[kept])
    return own.tensors()


def admitted_classes(silo: SiloView, received: Tensors) -> torch.Tensor:
    """Return the classes that a silo contributes to, bool (C,): by the class rules, or all or none."""
    everything = torch.full((silo.setting.num_classes,), silo.offers_prototypes)
    return received.get(ADMITTED, everything).bool()


def counts_field(classes: int) -> Field:
    """Return the field of the numbers of records of C classes."""
    return Field(COUNTS, (classes,), bound=RECORD_BOUND, static=True, per_class=True)
