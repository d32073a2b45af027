"""The local loop against a loop written by hand, bit for bit, and its refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightframe import models
from tightframe.errors import TrainingError
from tightframe.learning import loop as training
from tightframe.learning.batches import merge_single_tail
from tightframe.learning.loop import fit
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import BatchView, ParameterTerm, Stage, Term, cross_entropy

SGD = OptimizerSettings("sgd", learning_rate=0.05, momentum=0.9, weight_decay=1e-3)


def _network(seed: int = 0, name: str = "small_cnn", shape: tuple[int, ...] = (3, 8, 8)) -> Any:
    spec = models.get(name)
    options = spec.options(widths=(8, 16)) if name == "small_cnn" else spec.options()
    torch.manual_seed(seed)
    return spec.build(options, shape, 3)


def _records(count: int, shape: tuple[int, ...] = (3, 8, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(4)
    return torch.randn(count, *shape, generator=stream), torch.randint(0, 3, (count,), generator=stream)


def _batches(inputs: torch.Tensor, labels: torch.Tensor, size: int) -> Callable[[int], Iterator[Any]]:
    def epoch(number: int) -> Iterator[Any]:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(number))
        for chosen in merge_single_tail(order, size):
            yield inputs[chosen], labels[chosen]

    return epoch


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


@pytest.mark.whole
@pytest.mark.parametrize("name", ["small_cnn", "resnet20"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_loop_by_hand(name: str, optimizer: Any) -> None:
    epochs = 3 if name == "small_cnn" else 1  # of three steps
    inputs, labels = _records(25)
    batches = _batches(inputs, labels, 8)
    ours, theirs = _network(name=name), _network(name=name)
    settings = OptimizerSettings(optimizer, 0.01, 0.9 if optimizer == "sgd" else 0.0, 1e-3)
    report = fit(ours, batches, [Stage([cross_entropy()], settings, epochs=epochs)], device="cpu")

    if optimizer == "sgd":
        by_hand: Any = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    else:
        by_hand = torch.optim.Adam(theirs.parameters(), lr=0.01, weight_decay=1e-3)
    losses = []
    theirs.train()
    for epoch in range(epochs):
        for x, y in batches(epoch):
            by_hand.zero_grad()
            loss = torch.nn.functional.cross_entropy(theirs(x), y)
            loss.backward()
            by_hand.step()
            losses.append(loss.item())
    assert _same(ours, theirs)
    assert (report.steps, report.records) == (3 * epochs, 25 * epochs)
    assert report.terms["loss"] == report.terms["cross_entropy"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert not ours.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in ours.parameters())


def test_terms_are_weighted_and_reported_unweighted() -> None:
    inputs, labels = _records(16)
    batches = _batches(inputs, labels, 8)
    ours, theirs = _network(), _network()
    start = [parameter.detach().clone() for parameter in ours.parameters()]

    def near(model: torch.nn.Module) -> torch.Tensor:
        pairs = zip(model.parameters(), start, strict=True)
        return torch.stack([(parameter - before).square().sum() for parameter, before in pairs]).sum()

    def width(view: BatchView) -> torch.Tensor:
        assert view.features.dtype == view.logits.dtype == torch.float32
        assert view.inputs.shape[0] == view.labels.shape[0] == view.features.shape[0]
        assert view.model is ours
        return view.features.square().mean()

    def only_reported(view: BatchView) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return view.logits.amax()

    stage = Stage(
        terms=[cross_entropy(), Term("width", 0.25, width, True), Term("largest", 0.0, only_reported, True)],
        parameter_terms=[ParameterTerm("near", 0.5, near)],
        optimizer=SGD,
        epochs=2,
    )
    report = fit(ours, batches, [stage], device="cpu")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    parts = []
    for x, y in itertools.chain(batches(0), batches(1)):
        optimizer.zero_grad()
        features = theirs.features(x)
        terms = [
            torch.nn.functional.cross_entropy(theirs.head(features), y),
            features.square().mean(),
            near(theirs),
        ]
        (terms[0] + 0.25 * terms[1] + 0.5 * terms[2]).backward()
        optimizer.step()
        parts.append([term.item() for term in terms])
    assert _same(ours, theirs)
    means = np.mean(parts, axis=0)
    found = [report.terms[name] for name in ("cross_entropy", "width", "near")]
    np.testing.assert_allclose(found, means, rtol=1e-6)
    assert report.terms["loss"] == pytest.approx(means @ [1, 0.25, 0.5], rel=1e-6)
    assert set(report.terms) == {"loss", "cross_entropy", "width", "near", "largest"}


def test_stages_follow_each_other() -> None:
    """Head only, then the body only for three steps; epochs count on, optimisers start anew."""
    inputs, labels = _records(16)
    batches = _batches(inputs, labels, 8)
    seen: list[int] = []

    def watched(epoch: int) -> Iterator[Any]:
        seen.append(epoch)
        return batches(epoch)

    model = _network()
    model.get_parameter("backbone.0.weight").requires_grad_(False)  # frozen by the model itself
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    middle: dict[str, torch.Tensor] = {}

    def between(view: BatchView) -> torch.Tensor:
        if not middle:
            middle.update({name: tensor.clone() for name, tensor in view.model.state_dict().items()})
        return view.features.sum() * 0

    stages = [
        Stage([cross_entropy()], SGD, epochs=2, trainable=lambda name: name.startswith("head.")),
        Stage(
            [cross_entropy(), Term("between", 1.0, between, True)],
            SGD,
            steps=3,
            trainable=lambda name: not name.startswith("head."),
        ),
    ]
    report = fit(model, watched, stages, device="cpu")
    after = model.state_dict()
    assert seen == [0, 1, 2, 3]
    assert (report.steps, report.records) == (7, 56)
    for name in before:
        head = name.startswith("head.")
        assert torch.equal(before[name], middle[name]) == (not head)
        assert torch.equal(middle[name], after[name]) == (head or name == "backbone.0.weight")
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        "backbone.0.weight"
    ]


def test_corrections_change_gradients() -> None:
    inputs, labels = _records(8)
    model = _network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def zero(corrected: torch.nn.Module) -> None:
        for parameter in corrected.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()

    stage = Stage([cross_entropy()], OptimizerSettings("sgd", 0.1), epochs=1, corrections=[zero])
    fit(model, _batches(inputs, labels, 8), [stage], device="cpu")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_seed_fixes_dropout_and_leaves_the_callers_stream() -> None:
    spec = models.get("small_cnn")

    def run(seed: int) -> torch.nn.Module:
        torch.manual_seed(0)
        model = spec.build(spec.options(widths=(8,), dropout=0.5), (3, 8, 8), 3)
        torch.manual_seed(99)
        state = torch.get_rng_state()
        inputs, labels = _records(16)
        fit(
            model,
            _batches(inputs, labels, 8),
            [Stage([cross_entropy()], SGD, epochs=1)],
            device="cpu",
            seed=seed,
        )
        assert torch.equal(torch.get_rng_state(), state)
        return model

    assert _same(run(1), run(1))
    assert not _same(run(1), run(2))


@pytest.mark.parametrize("count", [1, 9, 17])
def test_a_single_last_record_does_not_break_batch_norm(count: int) -> None:
    """At 8 x 8 pixels ResNet18 ends in one value a channel, which BatchNorm cannot train on alone."""
    inputs, labels = _records(count)
    model = _network(name="resnet18")
    report = fit(model, _batches(inputs, labels, 8), [Stage([cross_entropy()], SGD, epochs=1)], device="cpu")
    assert report.records == count
    assert report.steps == max(1, count // 8)
    assert not any(module.training for module in model.modules())


@given(count=st.integers(0, 60), size=st.integers(1, 12))
def test_batches_hold_every_record_once(count: int, size: int) -> None:
    indices = list(range(count))
    batches = merge_single_tail(indices, size)
    assert list(itertools.chain(*batches)) == indices
    assert all(len(batch) == size for batch in batches[:-1])
    if batches:
        assert 1 <= len(batches[-1]) <= size + 1
    if size > 1 and count > 1:
        assert all(len(batch) > 1 for batch in batches)
    for kind in (np.array, torch.tensor):
        assert [batch.tolist() for batch in merge_single_tail(kind(indices), size)] == batches


def test_batches_need_a_size() -> None:
    with pytest.raises(ValueError, match="positive, but got 0"):
        merge_single_tail([1], 0)


def test_a_loss_that_is_not_finite_names_the_step_and_the_term() -> None:
    inputs, labels = _records(40)
    calls = itertools.count(1)

    def breaks(view: BatchView) -> torch.Tensor:
        return view.features.sum() * (torch.nan if next(calls) == 3 else 0)

    stage = Stage([cross_entropy(), Term("reshaping", 1.0, breaks, False)], SGD, epochs=1)
    model = _network()
    with pytest.raises(TrainingError, match=r"^TF-301: .*'reshaping'.*step 3"):
        fit(model, _batches(inputs, labels, 8), [stage], device="cpu")
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_that_are_not_finite_after_the_last_step() -> None:
    inputs, labels = _records(8)
    stage = Stage([cross_entropy()], OptimizerSettings("sgd", 1e38, weight_decay=1e10), steps=1)
    with pytest.raises(TrainingError, match=r"TF-301.*after step 1"):
        fit(_network(), _batches(inputs, labels, 8), [stage], device="cpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_on_a_cpu_suggests_half(error: RuntimeError) -> None:
    def fails(view: BatchView) -> torch.Tensor:
        raise error

    inputs, labels = _records(12)
    stage = Stage([Term("greedy", 1.0, fails, True)], SGD, epochs=1)
    with pytest.raises(TrainingError, match=r"^TF-302: .*12 records.*`training.batch_size` of 6"):
        fit(_network(), _batches(inputs, labels, 12), [stage], device="cpu")


def test_other_runtime_errors_stay_as_they_are() -> None:
    def fails(view: BatchView) -> torch.Tensor:
        raise RuntimeError("a mistake")

    inputs, labels = _records(4)
    with pytest.raises(RuntimeError, match="a mistake"):
        fit(
            _network(),
            _batches(inputs, labels, 4),
            [Stage([Term("t", 1.0, fails, True)], SGD, epochs=1)],
            device="cpu",
        )


@pytest.mark.parametrize(("limit", "expected"), [(20, 16), (3, 2), (0, 0)])
def test_the_size_that_fits_is_found_by_halving(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search of a GPU, on a CPU: a term that fails above ``limit`` records."""

    def greedy(view: BatchView) -> torch.Tensor:
        if len(view.labels) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return view.features.sum()

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    inputs, labels = _records(64)
    loop = training._Loop(_network(), torch.device("cpu"), amp=False, progress=None)
    loop.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    monkeypatch.setattr(loop, "_fits", lambda stage, x, y: _on_cpu(loop, stage, x, y))
    stage = Stage([Term("greedy", 1.0, greedy, True)], SGD, epochs=1)
    assert loop._largest_fitting(stage, inputs, labels) == expected
    advice = training._memory_advice(64, torch.device("cpu"), expected, "reason")
    assert (f"to {expected}, which went through" in advice) == bool(expected)
    assert ("smaller model" in advice) == (not expected)


def _on_cpu(loop: Any, stage: Stage, x: torch.Tensor, y: torch.Tensor) -> bool:
    device, loop.device = loop.device, torch.device("cpu")
    try:
        return training._Loop._fits(loop, stage, x, y)
    finally:
        loop.device = device


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 4.0)  # seconds; every step asks once, or twice if it tells
    monkeypatch.setattr(training.time, "monotonic", lambda: next(clock))
    inputs, labels = _records(32)
    lines: list[str] = []
    stage = Stage([cross_entropy()], SGD, epochs=3)
    fit(_network(), _batches(inputs, labels, 4), [stage], device="cpu", progress=lines.append)
    assert 3 <= len(lines) <= 5
    assert lines[0].startswith("epoch 1, step 5, loss ")
    assert lines[-1].startswith("epoch 3, ")


def test_a_silo_without_batches_takes_no_step() -> None:
    model = _network()
    for length in ({"epochs": 1}, {"steps": 3}):
        report = fit(model, lambda epoch: [], [Stage([cross_entropy()], SGD, **length)], device="cpu")
        assert (report.steps, report.records, report.terms) == (0, 0, {})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 1, "steps": 1}, "one of `epochs` and `steps`"),
        ({}, "one of `epochs` and `steps`"),
        ({"epochs": 1, "terms": [cross_entropy(), cross_entropy()]}, "to be unique"),
        ({"epochs": 1, "terms": [Term("loss", 1.0, lambda view: view.logits.sum(), True)]}, "'loss'"),
        ({"epochs": 1, "terms": [cross_entropy(0.0)]}, "at least one term"),
    ],
)
def test_stages_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stage(**{"terms": [cross_entropy()], "optimizer": SGD, **wrong})


def test_a_stage_must_train_something() -> None:
    stage = Stage([cross_entropy()], SGD, epochs=1, trainable=lambda name: False)
    with pytest.raises(ValueError, match="to train at least one parameter"):
        fit(_network(), lambda epoch: [], [stage], device="cpu")


def test_settings_of_a_job() -> None:
    local = SimpleNamespace(optimizer="adam", learning_rate=0.1, momentum=0.5, weight_decay=0.2)
    assert OptimizerSettings.of(local) == OptimizerSettings("adam", 0.1, 0.5, 0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reduced_precision_on_a_gpu() -> None:
    inputs, labels = _records(40)
    model = _network().cuda()
    kinds = set()

    def look(view: BatchView) -> torch.Tensor:
        kinds.add(view.features.dtype)
        return view.features.sum() * 0

    stage = Stage([cross_entropy(), Term("look", 1.0, look, True)], SGD, epochs=2)
    report = fit(model, _batches(inputs, labels, 8), [stage], device="cuda", amp=True)
    assert report.steps == 10
    assert kinds == {torch.float32}
