"""An own training loop: a function installed at a site, which trains the model received in our loop's place.

Everything else stays as it is: order and augmentation of the records, weights, the update's norm, masks,
evaluation, class rules. What the function raises is a failure inside the sum (``rounds.riders.failures``).
Another package offers one by an entry point of the group ``tightframe.training``, and a site lists by name
those that a job may ask for (``training_loops`` of its own configuration). Torch-free.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightframe.errors import TrainingError
from tightframe.registry import find

if TYPE_CHECKING:
    import torch

    from tightframe.learning.stages import FitReport

ENTRY_POINTS = "tightframe.training"
CODE = "TF-304"


@dataclass(frozen=True)
class LocalTraining:
    """One silo's training in one round, as an own loop gets it.

    Attributes:
        model: the one received, on ``device`` and in training mode; to be trained in place.
        batches: epoch, from 0 -> mini-batches (inputs (B, ...), labels int64 (B,)) on ``device``, in this
            round's order and augmented as the job says.
        settings: the job's ``training``: epochs, batch size, optimiser; a loop may follow them.
        num_classes: C.
        round: from 1.
        seed: of this silo and round; torch's own streams are seeded already.
        log: the silo's own.
    """

    model: torch.nn.Module
    batches: Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]]
    settings: Any
    num_classes: int
    round: int
    seed: int
    device: torch.device
    log: logging.Logger


@dataclass(frozen=True)
class TrainingLoop:
    """A registry entry.

    Attributes:
        name: what a job calls it (``training.loop``).
        train: trains ``LocalTraining.model`` in place, and returns the mean loss of its steps.
    """

    name: str
    train: Callable[[LocalTraining], float]


def get(name: str) -> TrainingLoop:
    """Return the training loop that a job calls ``name``.

    Raises:
        JobError: if none is installed here, listing the known names, or if an entry point is no loop.
    """
    return find((), name, group=ENTRY_POINTS, kind=TrainingLoop, what="an installed training loop")


def run(loop: TrainingLoop, training: LocalTraining, stopped: Callable[[], bool]) -> FitReport:
    """Let an own loop train, and check what it leaves.

    Args:
        training: what it gets; its model is in evaluation mode afterwards, without gradients.
        stopped: whether the run was aborted meanwhile.

    Returns:
        Steps unknown (0), and its mean loss.

    Raises:
        TrainingError: TF-304 if it raises, returns no finite number, leaves a tensor that is not finite, or
            changes names, shapes, types or what does not train.
    """
    import torch

    from tightframe.learning.stages import FitReport

    model = training.model
    before = {name: (item.shape, item.dtype) for name, item in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    flags = {name: item.requires_grad for name, item in parameters.items()}
    fixed = {name: item.detach().clone() for name, item in parameters.items() if not item.requires_grad}
    model.train()
    try:
        loss: Any = loop.train(training)
    except (Exception, SystemExit) as error:
        if stopped():
            raise
        training.log.exception("the training loop %s failed", loop.name)
        raise TrainingError(
            f"Expected the training loop {loop.name} to train, but it raised {type(error).__name__}.",
            code=CODE,
        ) from None
    after = {name: (item.shape, item.dtype) for name, item in model.state_dict().items()}
    if after != before or any(item is not parameters.get(name) for name, item in model.named_parameters()):
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        raise _unexpected(loop, f"to train the model in place, but it replaced {changed or 'its parameters'}")
    now = {name: parameters[name].detach().to(item.device) for name, item in fixed.items()}
    if moved := [name for name, item in fixed.items() if not torch.equal(item, now[name])]:
        raise _unexpected(loop, f"to leave what does not train, but it changed {moved[:3]}")
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise _unexpected(loop, f"to leave finite values, but {name} has NaN or infinite entries")
    if isinstance(loss, bool) or not isinstance(loss, int | float) or not math.isfinite(loss):
        raise _unexpected(loop, f"to return the mean loss of its steps, a finite number, but got {loss!r}")
    for name, item in parameters.items():
        item.requires_grad_(flags[name])
        item.grad = None
    model.eval()
    return FitReport(terms={"loss": float(loss)})


def _unexpected(loop: TrainingLoop, what: str) -> TrainingError:
    return TrainingError(f"Expected the training loop {loop.name} {what}.", code=CODE)
