"""All engines of per-sample gradients give those of the loop, which are torch's own of single records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.few_blocks import few_blocks
from torch import nn

from tightframe import models
from tightframe.learning.stages import BatchView, Term, cross_entropy
from tightframe.models.geometry_heads import EtfHead
from tightframe.privacy.training import per_sample
from tightframe.privacy.training.normalisation import make_private
from tightframe.privacy.training.per_sample import (
    ENGINES,
    EngineName,
    RecordLoss,
    choose_engine,
    running,
    same_masks,
)

SMALL_CNN = ("small_cnn", {"widths": [8, 16]}, (3, 16, 16))
MLP = ("mlp", {"widths": [12]}, (7,))
EFFICIENTNET = ("efficientnet_b0", {"dropout": 0.0}, (3, 32, 32))


def build(name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int = 3) -> nn.Module:
    spec = models.get(name)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make_private(spec.build(spec.options.model_validate(options), shape, classes))


def batch(shape: tuple[int, ...], size: int = 5, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(2)
    inputs = torch.randn(size, *shape, generator=stream)
    return inputs, torch.randint(classes, (size,), generator=stream)


def by_autograd(
    loss: RecordLoss, trained: list[nn.Parameter], inputs: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    """Without any code of the engines: one backward pass a record, into ``grad``."""
    rows = []
    for place in range(len(labels)):
        loss.zero_grad(set_to_none=True)
        with same_masks():  # EfficientNet's stochastic depth draws while it trains
            loss(inputs[place : place + 1], labels[place : place + 1]).backward()
        rows.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained])
    loss.zero_grad(set_to_none=True)
    return [torch.stack(items) for items in zip(*rows, strict=True)]


@pytest.mark.whole
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "options", "shape"), [SMALL_CNN, MLP, EFFICIENTNET], ids=lambda x: str(x)[:9]
)
def test_every_engine_gives_the_gradients_of_single_records(
    engine: EngineName, name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Of EfficientNet with each of its kinds of blocks."""
    with few_blocks():
        model = build(name, options, shape).train().double()
    inputs, labels = batch(shape, size=2)
    inputs = inputs.double()
    loss = RecordLoss(model, [cross_entropy(), Term("norm", 0.1, lambda v: v.features.square().mean(), True)])
    trained = [item for item in model.parameters() if item.requires_grad]
    expected = by_autograd(loss, trained, inputs, labels)
    with running(engine, loss, trained) as found:
        if engine == "loop":
            rows = []
            for place in range(len(labels)):
                with same_masks():
                    rows.append(found(inputs[place : place + 1], labels[place : place + 1]))
            result = [torch.cat(items) for items in zip(*rows, strict=True)]
        else:
            with same_masks():
                result = found(inputs, labels)
    scale = max(float(item.abs().max()) for item in expected)
    for (place, _), one, other in zip(model.named_parameters(), result, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-5, atol=1e-9 * scale, msg=lambda m, p=place: f"{p}: {m}"
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_may_lie_innermost(engine: EngineName) -> None:
    """As jobs have them on a CPU; Opacus' own hooks then have wrong gradients of all but the first layer."""
    model = build(*SMALL_CNN).train().double().to(memory_format=torch.channels_last)
    inputs, labels = batch(SMALL_CNN[2], size=3)
    inputs = inputs.double().contiguous(memory_format=torch.channels_last)
    loss = RecordLoss(model, [cross_entropy()])
    trained = list(model.parameters())
    expected = by_autograd(loss, trained, inputs, labels)
    with running(engine, loss, trained) as found:
        result = found(inputs, labels)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_engines_leave_nothing_behind() -> None:
    model = build(*MLP)
    trained = list(model.parameters())
    loss = RecordLoss(model, [cross_entropy()])
    inputs, labels = batch((7,))
    for name in ENGINES:
        with running(name, loss, trained) as engine:
            engine(inputs, labels)
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    assert all(item.grad is None and not hasattr(item, "grad_sample") for item in trained)
    modules = list(model.modules())
    assert not any(item._forward_hooks or item._backward_hooks or item._forward_pre_hooks for item in modules)


def test_frozen_parameters_and_unused_ones() -> None:
    model = build(*MLP)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.backbone[1].bias.requires_grad_(False)  # type: ignore[union-attr, index]
    trained = [item for item in model.parameters() if item.requires_grad]
    loss = RecordLoss(model, [cross_entropy()])
    inputs, labels = batch((7,))
    expected = by_autograd(loss, trained, inputs, labels)
    for name in ("loop", "vmap"):
        with running(name, loss, trained) as engine:
            for one, other in zip(engine(inputs, labels), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_dropout_differs_between_records_of_a_batch() -> None:
    model = build("mlp", {"widths": [64], "dropout": 0.5}, (7,)).train()
    loss = RecordLoss(model, [cross_entropy()])
    trained = [model.head.weight]  # type: ignore[union-attr]
    inputs, labels = batch((7,), size=1)
    inputs, labels = inputs.expand(6, 7).clone(), labels.expand(6).clone()
    for name in ("loop", "vmap"):
        with running(name, loss, trained) as engine:
            (found,) = engine(inputs, labels)
        masks = (found != 0).any(1)
        assert len({tuple(mask.tolist()) for mask in masks}) == 6


def test_the_chosen_engine_is_the_fastest_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of forward passes, as seconds on a busy machine say nothing of an engine."""
    passes, forward = [0], RecordLoss.forward

    def counted(self: RecordLoss, *given: Any) -> Any:
        passes[0] += 1
        return forward(self, *given)

    monkeypatch.setattr(RecordLoss, "forward", counted)
    monkeypatch.setattr(per_sample, "time", SimpleNamespace(perf_counter=lambda: float(passes[0])))
    inputs, labels = batch((7,), size=64)
    model = build(*MLP)
    trained = list(model.parameters())
    told: list[str] = []
    chosen = choose_engine(RecordLoss(model, [cross_entropy()]), trained, inputs, labels, told.append)
    assert chosen in ("vmap", "hooks")  # 64 passes against one
    assert "loop 64000 ms" in told[0] and f"{chosen} 1000 ms" in told[0]
    assert all(name in told[0] for name in ENGINES)


def test_engines_that_cannot_or_are_wrong_are_left_out() -> None:
    """Data-dependent control flow stops vmap; hooks do not see a temperature beside a layer."""
    inputs, labels = batch((7,), size=8)
    model = build(*MLP)
    model.head = EtfHead(12, 3, projection=True, normalise=True, temperature=2.0)

    def branching(view: BatchView) -> torch.Tensor:
        value = view.logits.square().mean()
        return value if float(value.detach()) > 0 else 2 * value

    trained = [item for item in model.parameters() if item.requires_grad]
    told: list[str] = []
    loss = RecordLoss(model, [cross_entropy(), Term("branching", 1.0, branching, True)])
    expected = by_autograd(loss, trained, inputs, labels)
    chosen = choose_engine(loss, trained, inputs, labels, told.append)
    assert "vmap" not in told[0]
    with running(chosen, loss, trained) as engine:
        for one, other in zip(engine(inputs, labels), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    def coupled(view: BatchView) -> torch.Tensor:
        return (view.features - view.features.mean(0)).square().mean()

    told.clear()
    loss = RecordLoss(model, [cross_entropy(), Term("coupled", 1.0, coupled, True)])
    assert choose_engine(loss, trained, inputs, labels, told.append) in ("loop", "vmap")
    assert "hooks" not in told[0]  # they would let the records meet


def test_unknown_engines_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="Expected one of the engines loop, vmap, hooks"),
        running("fast", RecordLoss(nn.Linear(1, 1), [cross_entropy()]), []),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its generator is seeded, too")
def test_masks_begin_anew_without_a_traceback_for_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which PyTorch takes to seed CUDA once it starts, at up to 20 ms each."""

    def seeding(seed: int) -> None:
        raise AssertionError("a GPU is seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeding)
    with same_masks():
        drawn = torch.rand(1, 4)
    with same_masks():
        assert torch.equal(torch.rand(1, 4), drawn)
