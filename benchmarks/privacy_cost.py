"""Cost of a step of DP-SGD relative to a plain one: the project's own loops, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tightframe import models
from tightframe.learning import loop
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.privacy.training.normalisation import make_private
from tightframe.privacy.training.per_sample import EngineName

ENGINES: tuple[EngineName, ...] = get_args(EngineName)
CLASSES = 8


@dataclass(frozen=True)
class Case:
    """A network and a batch."""

    model: str
    size: int
    batch: int
    turns: int


# EfficientNet's hooks take ten times as long as all other steps here.
CASES = (Case("small_cnn", 48, 16, 9), Case("efficientnet_b0", 64, 16, 3))


def cases_of(names: Sequence[str] | None, turns: int | None) -> list[Case]:
    """Return the cases of these networks, all if None; with ``turns`` in place of their own if given."""
    chosen = [case for case in CASES if names is None or case.model in names]
    return [replace(case, turns=case.turns if turns is None else turns) for case in chosen]


def build(name: str, size: int) -> nn.Module:
    """Return an untrained network for images of three channels."""
    torch.manual_seed(0)
    spec = models.get(name)
    model: nn.Module = spec.build(spec.options(), (3, size, size), CLASSES)
    return model


def step_of(case: Case, engine: EngineName | None, device: str = "cpu") -> Callable[[], None]:
    """Return a training step, a plain one without an engine; on a GPU it ends when the GPU has.

    A private step has every record in its batch, so that both kinds process equally many.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn((case.batch, 3, case.size, case.size), generator=generator)
    records = TensorDataset(inputs, torch.randint(CLASSES, (case.batch,), generator=generator))
    model = build(case.model, case.size).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = model.to(device)
    settings = OptimizerSettings(learning_rate=0.01, momentum=0.9)
    stages = [Stage((cross_entropy(),), settings, steps=1)]
    if engine is None:
        return lambda: void(
            loop.fit(
                model, lambda epoch: iter(DataLoader(records, case.batch)), stages, device=device, seed=0
            ),
            device,
        )
    model = make_private(model).to(device)
    private = PrivateSettings(1.0, 1.0, 1.0, case.batch)
    return lambda: void(
        private_fit(
            model, lambda step: records, stages, settings=private, device=device, engine=engine, probe=False
        ),
        device,
    )


def void(result: Any, device: str = "cpu") -> None:
    """Discard a result, once a GPU is done."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def measure(
    cases: Sequence[Case] = CASES,
    engines: Sequence[EngineName] = ENGINES,
    log: Callable[[str], None] = lambda text: None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the seconds of every kind of step in every case, in turns of all kinds; the first warms up."""
    place = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    return {"device": place, "cases": [_measure(case, engines, log, device) for case in cases]}


def _measure(
    case: Case, engines: Sequence[EngineName], log: Callable[[str], None], device: str
) -> dict[str, Any]:
    steps: dict[str, Callable[[], None]] = {"plain": step_of(case, None, device)}
    steps |= {name: step_of(case, name, device) for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    for turn in range(case.turns + 1):
        for name in list(steps):
            if name in failed:
                continue
            began = time.perf_counter()
            try:
                steps[name]()
            except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError) as error:
                failed[name] = type(error).__name__  # as in `choose_engine`: the engine cannot do it
                continue
            if turn:
                seconds[name].append(time.perf_counter() - began)
        log(f"{case.model}, turn {turn} of {case.turns}")
    rows = []
    for name in steps:
        if name in failed:
            rows.append({"step": name, "failed": failed[name]})
            continue
        ratios = [own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)]
        rows.append(
            {
                "step": name,
                "seconds": seconds[name],
                "median_seconds": statistics.median(seconds[name]),
                "ratio": statistics.median(ratios),
                "ratios": [min(ratios), max(ratios)],
            }
        )
    return {**vars(case), "rows": rows}
