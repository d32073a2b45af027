"""Test whether the records of a batch are coupled; run at start, before any charge.

DP-SGD clips the gradient of each record. That bounds what a record can change only if its gradient
does not depend on the other records, which no library checks: Opacus accepts a loss that couples the
records of a batch and reports an epsilon that does not hold. So a term that declares coupling is refused, and
one that declares none is tested.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tightframe.learning.stages import Batch, Stage, Term
from tightframe.privacy.training.per_sample import (
    PrivacyError,
    RecordLoss,
    exact_convolutions,
    gradients,
    same_masks,
)

ROWS = 4
# Float32 sums in another order differ by some 1e-6 of the gradients' size, a coupled term by its own. Weaker
# coupling is not detected; the loop and vmap, which show records alone, bound that, too.
TOLERANCE = 1e-4
SEED = 20240229
OUTPUT_TOLERANCE = 1e-3  # relative to a layer's largest output

Gradient = list[torch.Tensor]


def check_per_record(
    model: nn.Module, stages: Sequence[Stage], batch: Batch, *, device: torch.device | str
) -> None:
    """Refuse stages for which the gradient of a record depends on other records.

    The terms' declarations are checked first. Then, for each stage and each weighted term alone, gradients
    are measured on four records with their own labels, with one label, and with two: B times the gradient of
    a batch must be the sum of the gradients of its records alone, for all four and without the last one. That
    catches BatchNorm, class statistics, weights by the class counts of a batch, sums in place of means;
    measuring the first record again afterwards catches terms that remember records. Every random draw of
    dropout gives all records the same mask here, so that its randomness does not look like coupling. Terms
    without a weight are not tested: training under privacy never computes them. Parameter terms and gradient
    corrections must not change with earlier records.

    The model, its buffers and modes, and torch's streams are restored afterwards. A refusal must not depend
    on records, so ``private_fit`` passes made-up ones (``made_up``).

    Args:
        model: with ``features`` and ``head``, on ``device``.
        batch: inputs (B, ...) and labels (B,) of at least one record; four of them are used, and fewer are
            repeated, faded.

    Raises:
        ValueError: if the batch is empty.
        PrivacyError: TF-711, naming the term, the correction or the module.
    """
    device = torch.device(device)
    inputs, labels = batch[0].to(device), batch[1].to(device)
    if not len(labels):
        raise ValueError("Expected a batch of at least one record to probe with, but got none.")
    for stage in stages:
        for term in stage.terms:
            if term.weight and not term.per_record:
                raise PrivacyError(
                    f"Expected every term of the loss to depend on one record at a time, but {term.name!r} "
                    "couples the records of a batch, so that clipping single gradients bounds nothing. "
                    "Use the method's form for differential privacy, or set the term's weight to 0."
                )
    inputs, labels = _rows(inputs, labels)
    with _as_found(model, device), exact_convolutions():
        # In double precision no activation changes its sign between a record alone and in a batch, which
        # would change a gradient by far more than rounding.
        wide = copy.deepcopy(model).double() if inputs.is_floating_point() else model
        wide.train()
        _check_modules(wide)
        try:
            _Probe(wide, inputs.to(torch.float64) if wide is not model else inputs, labels).check(stages)
        except PrivacyError:
            raise
        except RuntimeError:
            # A term may hold constants in single precision and refuse to mix.
            model.train()
            _Probe(model, inputs, labels).check(stages)


def made_up(like: Batch, classes: int = 2, rows: int = ROWS) -> Batch:
    """Make records in the shape of real ones, the same at every silo: noise, and labels from 0 on.

    Integer inputs (indices) are zeros.
    """
    inputs, labels = like
    shape = (rows, *inputs.shape[1:])
    drawn = torch.zeros(shape, dtype=inputs.dtype)
    if inputs.is_floating_point():
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(inputs.dtype)
    if labels.dim() == 2:
        return drawn, ((torch.arange(rows)[:, None] + torch.arange(labels.shape[1])) % 2).to(labels.dtype)
    return drawn, (torch.arange(rows) % classes).to(labels.dtype)


def _rows(inputs: torch.Tensor, labels: torch.Tensor) -> Batch:
    """Return exactly four records; where there are fewer, faded copies of them follow."""
    inputs, labels = inputs[:ROWS], labels[:ROWS]
    fade = 1.0
    while (missing := ROWS - len(labels)) > 0:
        fade *= 0.8
        inputs = torch.cat([inputs, fade * inputs[:missing]])
        labels = torch.cat([labels, labels[:missing]])
    return inputs, labels


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise PrivacyError(
                f"Expected a model without batch statistics, but {name or 'the model'} "
                f"({type(module).__name__}) normalises each record by the others of its batch. "
                "Apply `privacy.normalisation.make_private` to the model."
            )


@contextmanager
def _as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers, modes, flags and gradients of the model, and torch's streams."""
    buffers = {name: item.detach().clone() for name, item in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    flags = [(item, item.requires_grad, item.grad) for item in model.parameters()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, item in model.named_buffers():
                    item.copy_(buffers[name])
            for module, mode in modes:
                module.training = mode
            for item, flag, gradient in flags:
                item.requires_grad_(flag)
                item.grad = gradient


class _Probe:
    """Four records, and the model in training mode."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.model = model
        self.inputs = inputs
        self.labels = labels
        self.flags = {name: item.requires_grad for name, item in model.named_parameters()}
        self.trained: list[nn.Parameter] = []

    def check(self, stages: Sequence[Stage]) -> None:
        """Run every test."""
        self._forward()
        for stage in stages:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(self.flags[name] and stage.trainable(name))
            self.trained = [item for item in self.model.parameters() if item.requires_grad]
            before = self._steered(stage)
            for term in stage.terms:
                if term.weight:
                    self._term(term)
            self._steering(stage, before)

    def _forward(self) -> None:
        """Test the network itself: each record's logits alone are those in the batch; buffers stay."""
        model: Any = self.model
        buffers = {name: item.detach().clone() for name, item in model.named_buffers()}
        together = self._outputs(self.inputs)
        for place in range(ROWS):
            alone = self._outputs(self.inputs[place : place + 1])
            for name, whole_batch in together.items():
                row = whole_batch[place : place + 1]
                if name not in alone or alone[name].shape != row.shape or _far(alone[name], row):
                    self._refuse_module(name, "gives a record other values in a batch than alone")
        for name, item in model.named_buffers():
            if not torch.equal(item, buffers[name]):
                self._refuse_module(name.rpartition(".")[0], "keeps statistics of the records in its buffers")

    def _outputs(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output of each innermost layer, in order, and the logits last."""
        model: Any = self.model
        outputs: dict[str, torch.Tensor] = {}

        def remember(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor) and output.dim() and len(output) == len(inputs):
                    outputs.setdefault(name, output.detach().clone())

            return hook

        handles = [
            module.register_forward_hook(remember(name))
            for name, module in model.named_modules()
            if not any(module.children())
        ]
        try:
            with torch.no_grad(), same_masks():
                logits = model.head(model.features(inputs))
        finally:
            for handle in handles:
                handle.remove()
        return {**outputs, "": logits.detach()}

    def _refuse_module(self, name: str, reason: str) -> None:
        module = self.model.get_submodule(name)
        raise PrivacyError(
            f"Expected a model in which records do not meet, but {name or 'the model'} "
            f"({type(module).__name__}) {reason}. Apply `privacy.normalisation.make_private` to the "
            "model, or choose another backbone."
        )

    def _term(self, term: Term) -> None:
        loss = RecordLoss(self.model, [term])
        first = self._gradient(loss, self.labels[:1], 0, 1)
        cached: dict[tuple[int, bytes], Gradient] = {}  # by record and label; labellings share them
        for labels in self._labellings():
            keys = [(place, labels[place].cpu().numpy().tobytes()) for place in range(ROWS)]
            for key in keys:
                if key not in cached:
                    cached[key] = self._gradient(loss, labels, key[0], key[0] + 1)
            alone = [cached[key] for key in keys]
            for end in (ROWS, ROWS - 1):
                batch = [end * item for item in self._gradient(loss, labels, 0, end)]
                self._compare(term, batch, alone[:end])
        repeated = self._gradient(loss, self.labels[:1], 0, 1)
        self._compare(term, repeated, [first])

    def _labellings(self) -> tuple[torch.Tensor, ...]:
        """Return the records' own labels, one label for all, and two: terms may compare labels."""
        model: Any = self.model
        with torch.no_grad(), same_masks():
            classes = model.head(model.features(self.inputs[:1])).shape[1]
        one = self.labels[:1].expand(ROWS, *self.labels.shape[1:]).clone()
        two = one.clone()
        two[-1] = (one[-1] + 1) % (classes if one.dim() == 1 else 2)
        return self.labels, one, two

    def _gradient(self, loss: RecordLoss, labels: torch.Tensor, start: int, end: int) -> Gradient:
        with same_masks():
            value = loss(self.inputs[start:end], labels[start:end])
            return [item.detach() for item in gradients(value, self.trained)]

    def _compare(self, term: Term, together: Gradient, alone: Sequence[Gradient]) -> None:
        size = sum(_norm(item) for item in alone) + _norm(together)
        joint = together
        for gradient in alone:
            joint = [one - other for one, other in zip(joint, gradient, strict=True)]
        difference = _norm(joint)
        # A term with almost no gradient (a saturated softmax) has only rounding errors.
        rounding = torch.finfo(together[0].dtype).eps * abs(term.weight)
        # Not "greater": a NaN is no evidence of uncoupled records.
        if not difference <= TOLERANCE * size + rounding:
            raise PrivacyError(
                "Expected the gradient of a batch to be the mean of those of its records alone, but for "
                f"{term.name!r} it is not: the term couples the records of a batch, remembers records, or is "
                "no mean over them. Mark it `per_record=False` and give it a form for differential privacy, "
                "or set its weight to 0."
            )

    def _steered(self, stage: Stage) -> dict[str, Gradient]:
        """Apply parameter terms and corrections to a fixed gradient."""
        steered = {}
        for part in stage.parameter_terms:
            if part.weight:
                steered[f"parameter term {part.name!r}"] = gradients(part.fn(self.model), self.trained)
        for place, correct in enumerate(stage.corrections):
            for parameter in self.trained:
                parameter.grad = torch.full_like(parameter, 1e-3)
            correct(self.model)
            steered[f"gradient correction {place + 1}"] = [
                torch.zeros_like(item) if item.grad is None else item.grad.detach().clone()
                for item in self.trained
            ]
        return steered

    def _steering(self, stage: Stage, before: dict[str, Gradient]) -> None:
        """Test terms that are added after the noise: what they know of records would leave without any."""
        for name, after in self._steered(stage).items():
            if not all(torch.equal(one, other) for one, other in zip(after, before[name], strict=True)):
                raise PrivacyError(
                    f"Expected the {name} to depend on the parameters alone, but it changes with the records "
                    "that were trained on. It is added after the noise and must not read records."
                )


def _norm(gradient: Gradient) -> float:
    norms = [torch.linalg.vector_norm(item, dtype=torch.float64) for item in gradient]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _far(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two outputs of a layer differ by more than rounding; NaN differs from everything."""
    size = torch.maximum(one.abs().max(), other.abs().max()) if one.numel() else one.new_zeros(())
    return not bool(((one - other).abs() <= OUTPUT_TOLERANCE * size).all())
