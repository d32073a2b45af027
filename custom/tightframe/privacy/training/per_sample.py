"""Gradients of single records: one slow oracle and two fast engines that must equal it.

``loop`` runs one record at a time. It is the definition, needs only a backward pass of the model, and on a
CPU it is also the fastest for convolutional networks. ``vmap`` (torch.func) and ``hooks`` (Opacus) handle a
whole batch: ``vmap`` is for a head that trains alone, on a CPU too, and both are for GPUs, where
``choose_engine`` measures at start which of those that give the oracle's gradients is fastest.

``loop`` and ``vmap`` show each record to the model and to the terms alone, so each gradient depends on one
record, for any term; ``hooks`` needs uncoupled records in a batch, which ``probe`` tests.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightframe.errors import TightframeError
from tightframe.learning.stages import BatchView, Term, at_least_float32

EngineName = Literal["loop", "vmap", "hooks"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

Engine = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
"""(inputs, labels) of b records -> for each trained parameter, a gradient a record, (b, *shape).

Labels are (b,); or, with K views of each record, (b, K), and inputs (b, K, ...): then a record's gradient is
the mean of its views' gradients. Findings always have views: (b, K, number of findings)."""

MASK_SEED = 20240229
TIMED = 8  # records by which the loop is timed
COMPARED = 4  # records on which engines are compared with the oracle
TOLERANCE = 1e-4  # relative to the largest entry of a parameter's gradient, in float32


class PrivacyError(TightframeError):
    """Training cannot be made private unchanged: TF-711 a loss couples records, TF-712 a layer."""

    code = "TF-711"


class RecordLoss(nn.Module):
    """The weighted total of a stage's terms as a module, so that its parameters can be substituted.

    Args:
        model: with ``features(x) -> (B, d)`` and ``head``.
        terms: of the stage; those without a weight are left out, because their values would be statistics of
            the records without noise.
    """

    def __init__(self, model: nn.Module, terms: Sequence[Term]) -> None:
        super().__init__()
        self.model = model
        self.terms = tuple(term for term in terms if term.weight)

    def values(self, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """Return each term's value without its weight."""
        model: Any = self.model
        features = model.features(inputs)
        logits = model.head(features)
        view = BatchView(inputs, labels, at_least_float32(features), at_least_float32(logits), self.model)
        return [term.fn(view) for term in self.terms]

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, a scalar."""
        weighted = [
            term.weight * value for term, value in zip(self.terms, self.values(inputs, labels), strict=True)
        ]
        return torch.stack(weighted).sum()


def gradients(
    value: torch.Tensor, trained: Sequence[nn.Parameter], *, keep_graph: bool = False
) -> list[torch.Tensor]:
    """Return the gradient of a scalar, zero for parameters that it does not depend on."""
    if not value.requires_grad:
        return [torch.zeros_like(parameter) for parameter in trained]
    slopes = torch.autograd.grad(value, list(trained), retain_graph=keep_graph, allow_unused=True)
    return [
        torch.zeros_like(parameter) if item is None else item
        for parameter, item in zip(trained, slopes, strict=True)
    ]


@contextmanager
def running(name: EngineName, loss: RecordLoss, trained: Sequence[nn.Parameter]) -> Iterator[Engine]:
    """Provide an engine within the context, with exact convolutions.

    Args:
        trained: its trained parameters, all of them part of ``loss.model``.
    """
    with exact_convolutions():
        if name == "hooks":
            with _hooked(loss, trained) as engine:
                yield engine
        elif name == "vmap":
            yield _vmapped(loss, trained)
        elif name == "loop":
            yield _looped(loss, trained)
        else:
            raise ValueError(f"Expected one of the engines {', '.join(ENGINES)}, but got {name!r}.")


def _looped(loss: RecordLoss, trained: Sequence[nn.Parameter]) -> Engine:
    def engine(inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        batches = zip(*_alone(inputs, labels), strict=True)
        alone = [gradients(loss(*batch), trained) for batch in batches]
        if len(alone) == 1:
            return [item.unsqueeze(0) for item in alone[0]]
        return [torch.stack(items) for items in zip(*alone, strict=True)]

    return engine


def _alone(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs (b, K, ...) and labels (b, K) of b batches, each of one record's K views."""
    return (inputs, labels) if labels.dim() >= 2 else (inputs.unsqueeze(1), labels.unsqueeze(1))


def _vmapped(loss: RecordLoss, trained: Sequence[nn.Parameter]) -> Engine:
    places = {id(parameter): name for name, parameter in loss.named_parameters()}
    names = [places[id(parameter)] for parameter in trained]

    def one(parameters: dict[str, torch.Tensor], views: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = torch.func.functional_call(loss, parameters, (views, labels))
        return value

    # Each record has dropout masks of its own, as in the loop.
    every = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), randomness="different")

    def engine(inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        current = {name: item.detach() for name, item in zip(names, trained, strict=True)}
        by_name = every(current, *_alone(inputs, labels))
        return [by_name[name] for name in names]

    return engine


@contextmanager
def _hooked(loss: RecordLoss, trained: Sequence[nn.Parameter]) -> Iterator[Engine]:
    from opacus.grad_sample import GradSampleHooks

    def engine(inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        try:
            with warnings.catch_warnings():
                # The first layer's inputs need no gradient, of which torch warns at each step.
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                views, of = _alone(inputs, labels)
                loss(views.flatten(0, 1), of.flatten(0, 1)).backward()
            samples = [getattr(parameter, "grad_sample", None) for parameter in trained]
            if any(
                not isinstance(item, torch.Tensor) or len(item) != len(of) * of.shape[1] for item in samples
            ):
                raise NotImplementedError("hooks do not see every trained parameter of this model")
            return [item.unflatten(0, of.shape[:2]).mean(1) for item in samples]  # type: ignore[union-attr]
        finally:
            hooks.set_grad_sample_to_none()
            for parameter in trained:
                parameter.grad = None

    # Opacus 1.6 unfolds a convolution's input as if its channels were outermost, and silently computes wrong
    # gradients where they are innermost, as on a CPU here.
    before = [
        module.register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))
        for module in loss.model.modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    hooks = GradSampleHooks(loss.model, loss_reduction="mean")
    try:
        yield engine
    finally:
        hooks.cleanup()
        for handle in before:
            handle.remove()


def choose_engine(
    loss: RecordLoss,
    trained: Sequence[nn.Parameter],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    tell: Callable[[str], None] | None = None,
) -> EngineName:
    """Choose the fastest engine on this batch among those that give the loop's gradients.

    Engines are compared with the same dropout mask for every record, otherwise no two runs would be equal.

    Args:
        inputs: a batch (B, ...), not empty, on the device of the model.
        labels: (B,).
        tell: called with a line on the measurements, without any value of a record.

    Returns:
        Its name; ``loop`` if no other one works.
    """
    expected = _by_loop(loss, trained, inputs, labels)
    seconds: dict[EngineName, float] = {"loop": math.inf}
    for name in ENGINES:
        try:
            with running(name, loss, trained) as engine:
                if name == "loop" or _right(engine, inputs, labels, expected):
                    seconds[name] = _seconds(engine, inputs, labels, one_by_one=name == "loop")
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
            # Limits of a batched engine (data-dependent control flow, layers without a rule, too little
            # memory) are no fault of the model: the loop remains.
            continue
    chosen = min(seconds, key=lambda name: seconds[name])
    if tell is not None:
        timings = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in seconds.items())
        tell(f"per-sample gradients by {chosen} ({timings})")
    return chosen


def gives_the_loops(
    name: EngineName,
    loss: RecordLoss,
    trained: Sequence[nn.Parameter],
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> bool:
    """Check that an engine supports these terms, and gives the loop's gradients of the first few records."""
    try:
        with running(name, loss, trained) as engine:
            return _right(engine, inputs, labels, _by_loop(loss, trained, inputs, labels))
    except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
        return False


def draws(
    name: EngineName,
    loss: RecordLoss,
    trained: Sequence[nn.Parameter],
    inputs: torch.Tensor,
    labels: torch.Tensor,
) -> bool:
    """Return True if the gradient of a record takes random numbers from the CPU's generator."""
    before = torch.default_generator.get_state()
    with running(name, loss, trained) as engine:
        engine(inputs[:1], labels[:1])
    return not before.equal(torch.default_generator.get_state())


def _by_loop(
    loss: RecordLoss, trained: Sequence[nn.Parameter], inputs: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """Return the oracle's gradients of the first few records, each with the same dropout mask."""
    with running("loop", loss, trained) as oracle:
        rows = []
        for place in range(min(len(labels), COMPARED)):
            with same_masks():
                rows.append(oracle(inputs[place : place + 1], labels[place : place + 1]))
    return [torch.cat(items) for items in zip(*rows, strict=True)]


def _right(
    engine: Engine, inputs: torch.Tensor, labels: torch.Tensor, expected: Sequence[torch.Tensor]
) -> bool:
    with same_masks():
        return _equal(engine(inputs[:COMPARED], labels[:COMPARED]), expected)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Run a GPU's convolutions in full float32.

    TensorFloat-32 has three digits: too few to compare, or for a record's gradient to depend on its batch.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Compare each gradient up to the rounding of sums in another order."""
    largest = torch.stack([item.abs().max() for item in second]).max()
    return all(
        bool(((one - other).abs().max() <= TOLERANCE * (other.abs().max() + 1e-3 * largest)).item())
        for one, other in zip(first, second, strict=True)
    )


def _seconds(engine: Engine, inputs: torch.Tensor, labels: torch.Tensor, *, one_by_one: bool) -> float:
    """Time a batch: the faster of two runs, after one that warms up; the loop by its first few records."""
    count = min(len(labels), TIMED) if one_by_one else len(labels)
    size = 1 if one_by_one else count
    measured = []
    for _ in range(3):
        _wait(inputs.device)
        start = time.perf_counter()
        for place in range(0, count, size):
            engine(inputs[place : place + size], labels[place : place + size])
        _wait(inputs.device)
        measured.append(time.perf_counter() - start)
    return min(measured[1:]) * len(labels) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def same_masks() -> Iterator[None]:
    """Give every random draw a fixed seed, and the same values for all records of a batch."""
    # Without a GPU, torch.manual_seed takes a traceback each time, which costs a probe half of its time.
    start_stream = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    start_stream(MASK_SEED)
    with _FirstRowForAll():  # type: ignore[no-untyped-call]
        yield


class _FirstRowForAll(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the first row only and repeats it, so that a record gets the same mask alone and in a batch.

    Other operations that draw are not changed: their records then differ, and are refused.
    """

    SIZED = frozenset({"rand", "randn"})
    LIKE = frozenset({"rand_like", "randn_like", "bernoulli"})
    IN_PLACE = frozenset({"bernoulli_", "uniform_", "normal_", "exponential_"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in self.SIZED and args and args[0]:
            size = list(args[0])
            return func([1, *size[1:]], *args[1:], **kwargs).expand(size).clone()
        if name not in self.LIKE | self.IN_PLACE | {"native_dropout"} or not args[0].dim():
            return func(*args, **kwargs)
        values = args[0]
        row = values[:1].clone()
        if name in self.IN_PLACE:
            return values.copy_(func(row, *args[1:], **kwargs).expand_as(values))
        if name in self.LIKE:
            return func(row, *args[1:], **kwargs).expand_as(values).clone()
        _, mask = func(torch.ones_like(row), *args[1:], **kwargs)
        keep = 1.0 - args[1] if args[2] else 1.0
        return values * mask / max(keep, 1e-30), mask.expand_as(values).clone()
