"""Records for private training: loaded as drawn, with gradients in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tightframe.errors import TrainingError
from tightframe.learning.batches import reading_processes
from tightframe.learning.loop import is_out_of_memory
from tightframe.learning.stages import Batch, Stage
from tightframe.privacy.os_randomness import MaskSeeds
from tightframe.privacy.training.per_sample import (
    COMPARED,
    Engine,
    EngineName,
    RecordLoss,
    choose_engine,
    draws,
    gives_the_loops,
    running,
)
from tightframe.privacy.training.probe import check_per_record, made_up

Records = Callable[[int], Dataset[Any]]
"""Step -> the training records in that step, a map-style data set of (input, int label)."""

CHOSEN_ON_CPU: EngineName | None = "loop"  # fastest for EfficientNet-b0 by a factor of 13 over hooks


class Portions:
    """Gradients of a batch's records, as many records at a time as memory holds.

    The engine is chosen on made-up records: for a record with huge values two engines give different clipped
    gradients. If real records decided, one record could change what others add to the sum (0.38 of C was
    measured).

    Args:
        engine: of per-sample gradients; by default the fastest on a GPU, and on a CPU the loop, or ``vmap``
            where only a head on computed features trains.
        batch_size: number of records to choose on, which is public.
        masks: of dropout. On a CPU a model that draws masks uses the loop, where each record has its own.
        tell: called with a line about the choice.
    """

    def __init__(
        self,
        device: torch.device,
        engine: EngineName | None,
        batch_size: int,
        masks: MaskSeeds,
        tell: Callable[[str], None] | None,
    ) -> None:
        self._device, self._tell, self._masks, self._rows = device, tell, masks, batch_size
        self._chosen = engine or (None if device.type == "cuda" else CHOSEN_ON_CPU)
        self._may_change = engine is None and self._chosen == "loop"
        self._most: int | None = None  # records at a time, once memory has shown a limit

    def running(self, loss: RecordLoss, trained: Sequence[nn.Parameter], like: Batch) -> Any:
        """Return the engine's context for records of this shape; the first call chooses."""

        def sample(rows: int) -> Batch:
            inputs, labels = made_up(like, rows=rows)
            return inputs.to(self._device), labels.to(self._device)

        if self._chosen is None:
            self._chosen = choose_engine(loss, trained, *sample(self._rows), tell=self._tell)
        if self._may_change and getattr(loss.model, "takes_features", False):
            self._may_change = False
            self._chosen = "vmap" if gives_the_loops("vmap", loss, trained, *sample(COMPARED)) else "loop"
        on_cpu = self._device.type == "cpu"
        if on_cpu and self._chosen != "loop" and draws(self._chosen, loss, trained, *sample(1)):
            self._chosen = "loop"
        if self._chosen == "loop":
            self._most = 1
        return running(self._chosen, loss, trained)

    def of(
        self,
        engine: Engine,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        reduce: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> Iterator[torch.Tensor]:
        """Yield the results of ``reduce`` on the records' gradients, portion by portion.

        Raises:
            TrainingError: TF-302 if not even one record's gradient fits into memory.
        """
        start = 0
        while start < len(labels):
            size = len(labels) - start if self._most is None else min(self._most, len(labels) - start)
            self._masks.start_next()
            part = self._reduced(engine, inputs[start : start + size], labels[start : start + size], reduce)
            if part is None:
                # Outside the handler: the exception would keep the failed step's tensors alive.
                self._most = max(1, size // 2)
                torch.cuda.empty_cache()
                continue
            yield part
            start += size

    def _reduced(
        self,
        engine: Engine,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        reduce: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor | None:
        """Return ``reduce`` of some records' gradients; None if they did not fit into memory together."""
        try:
            return reduce(engine(inputs, labels))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(labels) == 1:
                raise TrainingError(
                    f"Expected the gradient of one record to fit into the memory of {self._device}, but it "
                    "did not. Choose a smaller model or input.",
                    code="TF-302",
                ) from None
        return None


def probe_with_made_up(
    model: nn.Module, records: Dataset[Any], stages: Sequence[Stage], device: torch.device
) -> None:
    """Refuse stages in which records meet, measured on made-up records of the same shape.

    Raises:
        PrivacyError: TF-711, see ``probe``.
    """
    first = default_collate([records[0]])
    with torch.no_grad():
        classes = _classes(model.eval(), torch.zeros_like(first[0]).to(device))
    check_per_record(model, stages, made_up(first, classes), device=device)


def _classes(model: Any, inputs: torch.Tensor) -> int:
    """Return the width of the model's logits."""
    return int(model.head(model.features(inputs)).shape[1])


class _Views(Dataset[Any]):
    """Records addressed by (step, place), so that one loader serves all steps of a stage."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.step = -1
        self.current: Any = None

    def __getitem__(self, key: tuple[int, int]) -> Any:
        step, place = key
        if step != self.step:
            self.current, self.step = self.records(step), step
        return self.current[place]


def loaded(
    records: Records,
    first: int,
    chosen: Sequence[list[int]],
    workers: int,
    device: torch.device,
    views: int = 1,
) -> Iterator[Batch | None]:
    """Yield the batch of each step, None for an empty one.

    With K > 1 ``views`` a batch has K of each record, inputs (b, K, ...) and labels (b, K): those that the
    steps K s to K s + K - 1 of ``records`` would see. Records with findings always have this axis.
    """
    keys = [
        [(views * (first + step) + view, place) for view in range(views) for place in places]
        for step, places in enumerate(chosen)
    ]
    loader: DataLoader[Any] = DataLoader(
        _Views(records),
        batch_sampler=[item for item in keys if item],
        **reading_processes(workers),
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),  # keeps the loader off the global stream
    )
    batches = iter(loader)
    for places in chosen:
        if not places:
            yield None
            continue
        inputs, labels = next(batches)
        if views > 1:  # loaded view by view; each opens the records once
            inputs, labels = (
                item.unflatten(0, (views, len(places))).transpose(0, 1).contiguous()
                for item in (inputs, labels)
            )
        elif labels.dim() == 2:  # findings: one view each, with the axis of views
            inputs, labels = inputs.unsqueeze(1), labels.unsqueeze(1)
        yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
