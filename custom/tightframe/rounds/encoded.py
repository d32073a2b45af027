"""Features of a frozen encoder: computed once for each record, and kept in memory for the run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from tightframe.data.base import with_progress
from tightframe.errors import RunError
from tightframe.learning import loop
from tightframe.models.frozen import FrozenEncoder, encoder_sha256
from tightframe.models.heads import feature_width
from tightframe.phases import Fold

if TYPE_CHECKING:
    from tightframe.rounds.context import SiloContext


class EncodedFold(Dataset[tuple[torch.Tensor, int]]):
    """The records of one fold as the encoder sees them.

    Args:
        features: (n, d), on the CPU.
        labels: (n,) int64.
    """

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return self.features[place], int(self.labels[place])

    def batches(
        self, indices: list[int], size: int, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield these records in batches: (B, d) and (B,)."""
        for chosen in loop.merge_single_tail(indices, size):
            yield self.features[chosen].to(device), self.labels[chosen].to(device)


@dataclass(frozen=True)
class LoadedEncoder:
    """A model with a frozen encoder, and the hash by which features of it are known.

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


class FeatureCache:
    """Features of a silo's folds, of one encoder at a time; part of its context."""

    def __init__(self) -> None:
        self._encoder = ""
        self._folds: dict[tuple[Fold, bool], EncodedFold] = {}
        self._told = False
        self.seconds = 0.0  # that computing features has taken

    def tell_once(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` the first time."""
        if not self._told:
            self._told = True
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
        """Return a fold's features by this model's encoder, computed if they are not here yet.

        They are computed in the order of the records and in batches of one size, so that they are the same
        to the bit in each process that computes them.

        Args:
            context: of the silo.
            encoder: on ``device``.
            fold: of the records.
            device: on which features are computed.
            exact: compute in float64.

        Raises:
            RunError: TF-504 if the run is aborted.
        """
        if encoder.sha256 != self._encoder:
            self._encoder, self._folds = encoder.sha256, {}
        if (fold, exact) not in self._folds:
            started = time.monotonic()
            model = copy.deepcopy(encoder.model).double() if exact else encoder.model
            self._folds[fold, exact] = _encoded(context, model, fold, device, exact=exact)
            self.seconds += time.monotonic() - started
        return self._folds[fold, exact]


def _encoded(
    context: SiloContext, model: FrozenEncoder, fold: Fold, device: torch.device, *, exact: bool
) -> EncodedFold:
    count, log = len(context.data.labels(fold)), context.log
    log.info("%s: computing features of %d %s records, once", context.name, count, fold)
    batches = loop.merge_single_tail(list(range(count)), context.job.evaluation.batch_size)
    loader: Any = DataLoader(
        context.data.records(fold),
        batch_sampler=batches,
        num_workers=context.site.loader_workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),  # keeps the loader off the global stream
    )
    line = f"{context.name}: features of {fold} records, batch {{done}} of {{total}}"
    features, labels = [], []
    for done, (inputs, classes) in enumerate(with_progress(loader, log.info, line)):
        if context.stopped():
            raise RunError("the run was aborted while features were computed.", code="TF-504")
        context.at_work(f"features, {fold} records", done, len(batches))
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        given = inputs.to(device, torch.float64 if exact else inputs.dtype, non_blocking=True)
        features.append(model.encode(given).cpu())
        labels.append(classes)
    if not features:
        return EncodedFold(torch.zeros(0, feature_width(model)), torch.zeros(0, dtype=torch.int64))
    return EncodedFold(torch.cat(features), torch.cat(labels))
