"""Features of a frozen encoder: computed once for each record, and kept in memory, or also on disk."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tightframe.data.base import own_patients, with_progress
from tightframe.errors import RunError
from tightframe.learning.batches import merge_single_tail, reading_processes
from tightframe.learning.few_records.unit_sides import UnitSides
from tightframe.models.frozen import FrozenEncoder, encoder_sha256
from tightframe.models.heads import feature_width
from tightframe.phases import Fold
from tightframe.rounds.encoded.files import FeatureFiles, RecordsDigest, StoredFeatures

if TYPE_CHECKING:
    from tightframe.data.table.common_values import CommonPixels, CommonValues
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.setup import JobSetup


Part = tuple[Fold, bool]
"""A fold, and whether its features are in float64."""
PROBED = 4
"""Records of a fold whose stored features are compared with the encoder's."""


class EncodedFold(Dataset[tuple[torch.Tensor, int | torch.Tensor]]):
    """The records of one fold as the encoder sees them.

    Args:
        features: (n, d), on the CPU.
        labels: int64, classes (n,) or findings (n, K).
    """

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int | torch.Tensor]:
        label = self.labels[place]
        return self.features[place], label if label.dim() else int(label)

    def batches(
        self, indices: list[int], size: int, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield these records in batches: (B, d) and (B,)."""
        for chosen in merge_single_tail(indices, size):
            yield self.features[chosen].to(device), self.labels[chosen].to(device)


@dataclass(frozen=True)
class LoadedEncoder:
    """A model with a frozen encoder, and the hash that identifies its features.

    Attributes:
        model: of which only the encoder is used.
        sha256: see ``encoder_sha256``.
    """

    model: FrozenEncoder
    sha256: str

    @classmethod
    def of(cls, model: FrozenEncoder) -> LoadedEncoder:
        """Hash the encoder of a model."""
        return cls(model, encoder_sha256(model.state_dict()))


def used_parts(setup: JobSetup) -> tuple[Part, ...]:
    """Return the folds whose frozen features a run computes once."""
    job = setup.job
    parts: list[Part] = []
    if setup.trains and (setup.method.one_sum is not None or setup.start is not None):
        parts.append(("train", True))
        if job.privacy is None:
            parts.append(("validation", True))
    if not job.training.augment:
        several = setup.method.one_sum is None or job.personalise or job.local_baseline_epochs
        if setup.trains and several:
            parts.append(("train", False))
        parts += [("validation", False), ("test", False)]
    return tuple(parts)


class FeatureCache:
    """Features of a silo's folds, of one encoder at a time; part of its context."""

    def __init__(self) -> None:
        self._encoder = ""
        self._folds: dict[Part, EncodedFold] = {}
        self._reported = False
        self.seconds = 0.0  # spent on computing features

    def lent(self) -> FeatureCache:
        """Return a cache with the same features, whose additions do not reach this one."""
        lent = FeatureCache()
        lent._encoder, lent._folds, lent._reported = self._encoder, dict(self._folds), self._reported
        return lent

    def has(self, parts: Iterable[Part]) -> bool:
        """Check whether the features of these folds were computed."""
        return all(part in self._folds for part in parts)

    def tell_once(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` the first time."""
        if not self._reported:
            self._reported = True
            tell()

    def fold(
        self,
        context: SiloContext,
        encoder: LoadedEncoder,
        fold: Fold,
        device: torch.device,
        *,
        exact: bool = False,
    ) -> EncodedFold:
        """Return a fold's features by this model's encoder; compute them on first use.

        They are computed in the order of the records and in batches of one size, so that they are the same
        to the bit in each process that computes them.

        Args:
            encoder: on ``device``.
            exact: compute in float64.

        Raises:
            RunError: TF-504 if the run is aborted.
        """
        if encoder.sha256 != self._encoder:
            self._encoder, self._folds = encoder.sha256, {}
        if (fold, exact) not in self._folds:
            started = time.monotonic()
            model = copy.deepcopy(encoder.model).double() if exact else encoder.model
            sides = unit_sides(context, model, fold)
            encoding = _Encoding(context, model, fold, device, exact=exact, sides=sides)
            # Which units have few records on a side depends on all records, and a table's features are cheap.
            storable = not sides.looks
            files = FeatureFiles.of(context, encoder.sha256, device, exact=exact) if storable else None
            features = encoding.computed() if files is None else _through(files, encoding, context.log)
            self._folds[fold, exact] = EncodedFold(features.features, features.labels)
            self.seconds += time.monotonic() - started
        return self._folds[fold, exact]


def unit_sides(context: SiloContext, model: torch.nn.Module, fold: Fold) -> UnitSides:
    """Return the hook that moves few training records of a table to the others' side of a model's units.

    It is off in a job with privacy, and where the site's policy has no ``records_per_feature``.
    """
    policy, data = context.policy, context.data
    limited = (
        fold == "train" and context.has_rows and context.job.privacy is None and policy.records_per_feature
    )
    least = context.min_class_count if limited else 0
    labels = data.labels(fold)
    if least < 2 or labels.ndim > 1:
        return UnitSides(model, torch.zeros(0), torch.zeros(0, dtype=torch.int64), least=0)
    of_class = own_patients(data) * (labels.max(initial=0) + 1) + labels
    _, which, times = np.unique(of_class, return_inverse=True, return_counts=True)
    return UnitSides(model, torch.from_numpy(times[which]), torch.from_numpy(labels), least=least)


def common_inputs(
    context: SiloContext, model: torch.nn.Module, fold: Fold
) -> CommonValues | CommonPixels | None:
    """Return the values that replace a silo's training records before an untrained model sees them.

    For pictures only where there are as many features as pixels, which then count as the pixels, and the
    site's policy has ``records_per_feature``.
    """
    as_they_are = feature_width(model) == math.prod(context.input_shape)
    limited = as_they_are and context.policy.records_per_feature > 0
    return context.common(float(limited)) if fold == "train" else None


def _through(files: FeatureFiles, encoding: _Encoding, log: logging.Logger) -> StoredFeatures:
    """Return a fold's features from its file if that is of these records; else compute and store them."""
    stored = files.read(encoding.fold)
    if stored is not None:
        if encoding.confirms(stored):
            return stored
        log.info("the stored features of %s records are of others: deleted", encoding.fold)
        files.forget(encoding.fold)
    stored = encoding.computed(digest=True)
    files.write(encoding.fold, stored)
    return stored


@dataclass(frozen=True)
class _Encoding:
    """Passes over the records of one fold, in order.

    Attributes:
        model: the encoder, on ``device`` and of the requested type.
        fold: of the records.
        device: on which features are computed.
        exact: whether to compute in float64.
        sides: keeps few records from being alone on a side of the encoder's units, in one pass.
    """

    context: SiloContext
    model: FrozenEncoder
    fold: Fold
    device: torch.device
    exact: bool
    sides: UnitSides

    def computed(self, *, digest: bool = False) -> StoredFeatures:
        """Return the features, and on request the digest of the records."""
        features, labels, digested = [], [], RecordsDigest()

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return self._batches("computing features", "features")

        def run(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return self._features(batch[0]), *batch

        with self.sides:
            for encoded, inputs, classes in self.sides.passes(batches, run):
                if digest:
                    digested.add(inputs, classes)
                features.append(encoded)
                labels.append(classes)
        records = digested.hexdigest() if digest else ""
        if not features:
            empty = torch.zeros(0, feature_width(self.model))
            return StoredFeatures(empty, torch.zeros(0, dtype=torch.int64), records)
        return StoredFeatures(torch.cat(features), torch.cat(labels), records)

    def confirms(self, stored: StoredFeatures) -> bool:
        """Check that all records are those of the stored features, and recompute the features of a few.

        Neither tensors nor versions show a change in the code of an encoder from another package.
        """
        digest, probed = RecordsDigest(), False
        for inputs, classes in self._batches("reading records for stored features", "records of features"):
            digest.add(inputs, classes)
            if not probed:
                probed, encoded = True, self._features(inputs[:PROBED])
                expected = stored.features[: len(encoded)]
                if encoded.shape != expected.shape or not torch.allclose(
                    encoded, expected, rtol=1e-3, atol=1e-5
                ):
                    return False
        return digest.hexdigest() == stored.records

    def _features(self, inputs: torch.Tensor) -> torch.Tensor:
        batch = inputs.to(self.device, torch.float64 if self.exact else inputs.dtype, non_blocking=True)
        if batch.dim() == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        return self.model.encode(batch).cpu()

    def _batches(self, doing: str, short: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        context, fold = self.context, self.fold
        count, log = len(context.data.labels(fold)), context.log
        how = ", in float64" if self.exact else ""
        log.info("%s: %s of %d %s records, once%s", context.name, doing, count, fold, how)
        batches = merge_single_tail(list(range(count)), context.job.evaluation.batch_size)
        loader: Any = DataLoader(
            context.data.records(fold),
            batch_sampler=batches,
            **reading_processes(context.site.loader_workers),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # keeps the loader off the global stream
        )
        line = f"{context.name}: {short} of {fold} records, batch {{done}} of {{total}}"
        common = common_inputs(context, self.model, fold)
        for done, (inputs, labels) in enumerate(with_progress(loader, log.info, line)):
            if context.stopped():
                raise RunError("the run was aborted while features were computed.", code="TF-504")
            context.at_work(f"{short}, {fold} records", done, len(batches))
            yield inputs if common is None else common.apply(inputs, batches[done]), labels
