"""Gradients of a silo's whole training fold, of which only one mini-batch's graph exists at a time.

For methods that share gradients. Every pass of a round, in whatever phase, sees the same mini-batches,
augmentation and dropout, so that what one phase measured holds in the next one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tightframe.errors import TrainingError
from tightframe.learning import outputs
from tightframe.learning.model_update import trained_parameters
from tightframe.learning.stages import at_least_float32
from tightframe.phases import SiloView

Penalty = Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]
"""(features (B, d) float64, labels (B,), model) -> a scalar whose gradient is a mini-batch's share of that of
a penalty."""


class RunningMean(Protocol):
    """A mean of gradients in the making."""

    def add(self, gradient: torch.Tensor) -> None:
        """Add one more gradient (P,)."""

    def result(self) -> torch.Tensor:
        """Return the mean (P,)."""


def same_batches(
    silo: SiloView, model: nn.Module, *, share: float = 1.0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the round's mini-batches, with the model in training mode, the same in every pass.

    The stream of dropout begins anew with each mini-batch. BatchNorm uses its running statistics where
    a mini-batch has one record, because the variance of one record is undefined.

    Args:
        silo: whose training fold.
        model: whose mode is set.
        share: the part of the fold's records that is drawn; 1 takes all.
    """
    seed = silo.generator("gradients").initial_seed()
    augment = silo.setting.local.augment
    on_gpu = silo.device.type == "cuda"
    # On a machine without a GPU, torch.manual_seed takes a traceback each time, which costs milliseconds.
    start_stream = torch.manual_seed if on_gpu else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[silo.device] if on_gpu else []):
        for index, batch in enumerate(silo.batches("train", augment=augment, shuffle=True, share=share)):
            model.train()
            if len(batch[1]) == 1:
                for module in model.modules():
                    if isinstance(module, _BatchNorm):
                        module.eval()
            start_stream(seed + index)
            yield batch


@dataclass(frozen=True)
class FoldGradients:
    """Gradients of one pass over the training fold; vectors are (P,) in float64, on the CPU.

    Attributes:
        gradient: of the cross-entropy: the mean over records, or over mini-batches of their means.
        penalty: of the penalty; zero without one.
        cross_entropy: its mean over records.
    """

    gradient: torch.Tensor
    penalty: torch.Tensor
    cross_entropy: float
    batches: int
    records: int


def fold_gradients(
    silo: SiloView,
    model: nn.Module,
    *,
    mini_batches: bool = False,
    running: RunningMean | None = None,
    penalty: Penalty | None = None,
    share: float = 1.0,
) -> FoldGradients:
    """Return the gradients of a silo, in the model's own precision, summed in float64.

    Args:
        silo: whose training fold.
        model: as it was broadcast; its running statistics change.
        mini_batches: mean over mini-batches of their mean gradients, instead of over records.
        running: takes that mean over mini-batches; without it, it is arithmetic.
        penalty: the silo's own part of a penalty.
        share: the part of the fold's records that is drawn; 1 takes all.

    Raises:
        TrainingError: TF-301 if a gradient is not finite, naming parameters; TF-208 without a record.
        ContributionError: TF-402 if a gradient is too large for ``running``.
    """
    trained = trained_parameters(model)
    size = sum(item.numel() for item in trained.values())
    total, bend = torch.zeros(2, size, dtype=torch.float64, device=silo.device)
    loss = torch.zeros((), dtype=torch.float64, device=silo.device)
    records = batches = 0
    with silo.unit_records(model, passes=[range(1)]) as units:
        for inputs, labels in same_batches(silo, model, share=share):
            features = model.features(inputs)  # type: ignore[operator]
            logits = at_least_float32(model.head(features))  # type: ignore[operator]
            entropy = outputs.summed_loss(logits, labels)
            own = entropy / len(labels) if mini_batches else entropy
            slope = _slope(own, trained, keep_graph=penalty is not None)
            if penalty is not None:
                bend += _slope(penalty(features.double(), labels, model), trained)
            if running is not None:
                _check_finite(slope, trained)
                running.add(slope)
            else:
                total += slope
            loss += entropy.detach()
            records, batches = records + len(labels), batches + 1
    if not batches:
        raise no_records()
    mean = total / (batches if mini_batches else records) if running is None else running.result()
    shapes = {name: item.shape for name, item in trained.items()}
    for vector in (mean, bend):
        units.clear(by_name(shapes, "", vector))
    _check_finite(mean + bend, trained)
    return FoldGradients(mean.cpu(), bend.cpu(), float(loss) / records, batches, records)


def by_name(shapes: Mapping[str, torch.Size], prefix: str, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split a vector (P,) into tensors of the given shapes, named ``<prefix><name>``.

    >>> by_name({"a": torch.Size([2]), "b": torch.Size([])}, "x/", torch.tensor([1, 2, 3]))
    {'x/a': tensor([1, 2]), 'x/b': tensor(3)}
    """
    parts = vector.split([shape.numel() for shape in shapes.values()])
    return {
        prefix + name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _slope(
    scalar: torch.Tensor, trained: Mapping[str, nn.Parameter], *, keep_graph: bool = False
) -> torch.Tensor:
    """Return the gradient by all trained parameters as one vector (P,) in float64."""
    slopes = torch.autograd.grad(
        scalar, list(trained.values()), retain_graph=keep_graph, materialize_grads=True
    )
    return torch.cat([slope.reshape(-1).double() for slope in slopes])


def _check_finite(vector: torch.Tensor, trained: Mapping[str, nn.Parameter]) -> None:
    # The sum is a tenth of the work: where it is finite, all entries are.
    if bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all()):
        return
    parts = by_name({name: item.shape for name, item in trained.items()}, "", vector)
    bad = [name for name, part in parts.items() if not bool(torch.isfinite(part).all())]
    raise TrainingError(
        f"Expected a finite gradient, but that of {', '.join(bad[:5])} has NaN or infinite entries. Lower "
        "the learning rate or the penalty's weight, or check the records.",
        code="TF-301",
    )


def no_records() -> TrainingError:
    """Return the error of a silo without training records."""
    return TrainingError("Expected records in the training fold, but it is empty.", code="TF-208")
