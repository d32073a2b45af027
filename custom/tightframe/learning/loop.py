"""The local loop: ``fit(model, batches, stages)``, one for all methods. It knows no method.

A stage says what is trained, for how long, and by which terms; the cross-entropy is a term like
any other. The forward pass may run in reduced precision on a GPU; terms always see float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tightframe.errors import TrainingError
from tightframe.learning.optimizers import Optimizer
from tightframe.learning.stages import (
    Batch,
    Batches,
    BatchView,
    FitReport,
    NoFeatures,
    Stage,
    Term,
    at_least_float32,
)
from tightframe.models.heads import gives_features

PROGRESS_SECONDS = 20.0
CHECK_EVERY_ON_GPU = 50


def fit(
    model: nn.Module,
    batches: Batches,
    stages: Sequence[Stage],
    *,
    device: torch.device | str,
    amp: bool = False,
    progress: Callable[[str], None] | None = None,
    seed: int | None = None,
) -> FitReport:
    """Train ``model`` in place by the stages, one after another.

    Args:
        model: with ``features(x) -> (B, d)`` and ``head``, or logits alone; then in evaluation mode,
            without gradients.
        batches: makes the mini-batches (inputs, labels) of an epoch; epochs count on over stages.
        stages: what to train, see ``Stage``.
        amp: forward pass in bfloat16, or float16 with loss scaling where the GPU has no bfloat16;
            without effect on a CPU.
        progress: gets a line of epoch, step and loss, at most every 20 seconds.
        seed: of torch's global stream (dropout) while training; the caller's streams are left
            untouched. None uses the global stream as it is.

    Returns:
        Steps, records and the mean of every term.

    Raises:
        TrainingError: TF-301 if a loss or a parameter is not finite, naming the step; TF-302 if a
            batch does not fit into memory, naming a size that would.
    """
    device = torch.device(device)
    if seed is None:
        fork: Any = nullcontext()
    else:
        fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with fork:
        if seed is not None:
            # On a machine without a GPU, torch.manual_seed takes three tracebacks.
            on_gpu = device.type == "cuda"
            (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(seed)
        loop = _Loop(model, device, amp, progress)
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        try:
            model.train()
            for stage in stages:
                loop.run(stage, batches, flags)
        finally:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(flags[name])
                parameter.grad = None
            model.eval()
    loop.check_parameters()
    return loop.report()


def passes(stages: Sequence[Stage], batches: int) -> list[range]:
    """Return the epochs of each stage; of one that counts steps each epoch by itself.

    Args:
        batches: of an epoch.

    >>> from tightframe.learning.optimizers import OptimizerSettings
    >>> adam = OptimizerSettings("adam", 0.1)
    >>> terms = [Term("loss of a batch", 1.0, lambda view: view.logits.sum(), per_record=True)]
    >>> two, five = Stage(terms, adam, epochs=2), Stage(terms, adam, steps=5)
    >>> passes([two, five, two], 4)
    [range(0, 2), range(2, 3), range(3, 4), range(3, 5)]
    """
    epochs, first = list[range](), 0
    for stage in stages:
        if stage.epochs is not None:
            epochs.append(range(first, first + stage.epochs))
            first += stage.epochs
        elif stage.steps is not None and batches:
            epochs += (range(first + place, first + place + 1) for place in range(-(-stage.steps // batches)))
            first += stage.steps // batches
    return epochs


class _Loop:
    """One call of ``fit``: what is counted over all stages."""

    def __init__(
        self, model: nn.Module, device: torch.device, amp: bool, progress: Callable[[str], None] | None
    ) -> None:
        self.model = model
        self.device = device
        on_gpu = device.type == "cuda"
        self.amp = amp and on_gpu
        self.amp_dtype = torch.bfloat16 if not on_gpu or torch.cuda.is_bf16_supported() else torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp and self.amp_dtype == torch.float16)
        # Reading a value from a GPU waits for it; so losses are looked at together, now and then.
        self.check_every = CHECK_EVERY_ON_GPU if on_gpu else 1
        self.progress = progress
        self.last_progress = time.monotonic()
        self.epoch = 0
        self.steps = 0
        self.records = 0
        self.looked = 0
        self.last_loss = math.nan
        self.pending: list[torch.Tensor] = []
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def run(self, stage: Stage, batches: Batches, flags: dict[str, bool]) -> None:
        """Train one stage; ``flags`` says which parameters the model itself lets train."""
        trained = stage.select(self.model, flags)
        optimizer = stage.optimizer.build(trained)
        for inputs, labels in self._stage_batches(stage, batches):
            self._step_or_explain(stage, optimizer, inputs, labels)
            self.steps += 1
            self.records += len(labels)
            self._tell(stage)
        self._look(stage)

    def _stage_batches(self, stage: Stage, batches: Batches) -> Iterator[Batch]:
        """Yield the stage's batches: ``epochs`` passes, or as many passes as ``steps`` need."""
        last_epoch = None if stage.epochs is None else self.epoch + stage.epochs
        end = None if stage.steps is None else self.steps + stage.steps
        while self.epoch != last_epoch and self.steps != end:
            before = self.steps
            for inputs, labels in batches(self.epoch):
                if self.steps == end:
                    return
                yield inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            self.epoch += 1
            if self.steps == before and end is not None:
                return

    def _step_or_explain(
        self, stage: Stage, optimizer: Optimizer, inputs: torch.Tensor, labels: torch.Tensor
    ) -> None:
        try:
            self._step(stage, optimizer, inputs, labels)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Outside of the handler: the exception would keep the failed step's tensors alive.
        optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            _memory_advice(len(labels), self.device, self._largest_fitting(stage, inputs, labels), reason),
            code="TF-302",
        )

    def _step(self, stage: Stage, optimizer: Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        total, values = self._objective(stage, inputs, labels)
        self.pending.append(torch.stack([total.detach(), *values]))
        if len(self.pending) >= self.check_every:
            self._look(stage)
        self.scaler.scale(total).backward()
        if stage.corrections:
            self.scaler.unscale_(optimizer)  # type: ignore[arg-type]
            for correct in stage.corrections:
                correct(self.model)
        self.scaler.step(optimizer)  # type: ignore[arg-type]
        self.scaler.update()

    def _objective(
        self, stage: Stage, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the weighted total, and each unweighted term, detached, in the order of ``stage.names``."""
        model: Any = self.model
        with (
            torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=self.amp),
            _running_statistics(self.model, only_if=len(labels) == 1),
        ):
            if gives_features(model):
                features = model.features(inputs)
                logits = model.head(features)
            else:
                features, logits = None, model(inputs)
        used_features: Any = NoFeatures() if features is None else at_least_float32(features)
        view = BatchView(inputs, labels, used_features, at_least_float32(logits), self.model)
        weighted = []
        values = []
        for part in stage.parts:
            with nullcontext() if part.weight else torch.no_grad():
                value = part.fn(view) if isinstance(part, Term) else part.fn(self.model)
            values.append(value.detach().to(view.logits.dtype))
            if part.weight:
                weighted.append(part.weight * value)
        total = weighted[0]
        for value in weighted[1:]:
            total = total + value
        return total, values

    def _look(self, stage: Stage) -> None:
        """Read the losses kept back, check and count them."""
        if not self.pending:
            return
        rows = torch.stack(self.pending).double().tolist()
        self.pending = []
        for row in rows:
            self.looked += 1
            for name, value in zip(("loss", *stage.names), row, strict=True):
                if not math.isfinite(value):
                    raise TrainingError(_divergence(stage.names, row, self.looked), code="TF-301")
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        self.last_loss = rows[-1][0]

    def _tell(self, stage: Stage) -> None:
        now = time.monotonic()
        if self.progress is not None and now - self.last_progress >= PROGRESS_SECONDS:
            self._look(stage)
            self.progress(f"epoch {self.epoch + 1}, step {self.steps}, loss {self.last_loss:.4f}")
            self.last_progress = time.monotonic()

    def _largest_fitting(self, stage: Stage, inputs: torch.Tensor, labels: torch.Tensor) -> int | None:
        """Return the largest halving of the batch that goes through once; None on a CPU, 0 if none does."""
        if self.device.type != "cuda":
            # A CPU's allocator fails for the whole machine; trying again could end other processes.
            return None
        size = len(labels) // 2
        while size and not self._fits(stage, inputs[:size].clone(), labels[:size].clone()):
            size //= 2
        return size

    def _fits(self, stage: Stage, inputs: torch.Tensor, labels: torch.Tensor) -> bool:
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        try:
            self.scaler.scale(self._objective(stage, inputs, labels)[0]).backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def check_parameters(self) -> None:
        """Check the parameters themselves: the last step's result is seen by no loss."""
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise TrainingError(
                    f"Expected finite parameters after step {self.steps}, but {name} has NaN or infinite "
                    "entries. Lower the learning rate or the weights of the method's terms.",
                    code="TF-301",
                )

    def report(self) -> FitReport:
        """Return means over the steps looked at, which are all."""
        means = {name: self.sums[name] / self.counts[name] for name in self.sums}
        return FitReport(self.steps, self.records, means)


@contextmanager
def _running_statistics(model: nn.Module, *, only_if: bool) -> Iterator[None]:
    """Let BatchNorm layers use their running statistics: the variance of one record is undefined."""
    modules = model.modules() if only_if else ()
    layers = [module for module in modules if isinstance(module, _BatchNorm) and module.training]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error is of a GPU or CPU allocator that ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _memory_advice(size: int, device: torch.device, fitting: int | None, reason: str) -> str:
    problem = (
        f"Expected a batch of {size} records to fit into the memory of {device}, but it did not ({reason})."
    )
    if fitting:
        return f"{problem} Set `training.batch_size` to {fitting}, which went through, or less."
    if fitting is None and size > 1:
        return f"{problem} Try a `training.batch_size` of {size // 2}."
    return f"{problem} No smaller batch fits either: choose a smaller model or input."


def _divergence(names: Sequence[str], row: Sequence[float], step: int) -> str:
    bad = [name for name, value in zip(names, row[1:], strict=True) if not math.isfinite(value)]
    what = f"the terms {bad}" if bad else "the loss"
    return (
        f"Expected a finite loss, but {what} became NaN or infinite at step {step}. "
        "Lower the learning rate or the weights of the method's terms, or check the records."
    )
