"""A preset for every method: its paper's setting, and its effects measured here.

``tightframe jobs export --method`` applies it to a data set's setting. Rounds, epochs, batches and learning
rate are the data set's, because the papers chose them for theirs. ``tightframe methods NAME`` shows it with
the comparisons in ``effects.json`` and ``clinical_effects.json``, which ``--effects`` of
``benchmarks/papers.py`` and ``benchmarks/which.py`` write from runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import chain
from typing import Any

FILE, CLINICAL = "effects.json", "clinical_effects.json"
ELSEWHERE = dict.fromkeys(
    ("fed3r", "fedcgs", "fedncm"), "with five seeds: docs/which.txt; docs/benchmarks.md, Models of one sum"
)
"""Method -> place of its comparisons on other data."""
_FROZEN = {"model": "scattering (of volumes random_features, of tables identity)"}
_SGD = "SGD with momentum 0.9"


@dataclass(frozen=True)
class Preset:
    """Values that a method sets in a job.

    Attributes:
        printed: the published setting, as far as known to us.
        training: values of the job's ``training``.
        options: values of its ``method_options``.
        own_models: whether each hospital gets its own model (``personalise``), also in exported jobs.
        other: further values, by key, in words.
    """

    printed: str
    source: str = "the paper"
    training: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    own_models: bool = True
    other: Mapping[str, str] = field(default_factory=dict)

    @property
    def sets(self) -> str:
        """List the values, such as ``training.momentum 0.0``, or say that there are none."""
        values: dict[str, Any] = {"personalise": "true"} if self.own_models else {}
        values |= self.other
        values |= {f"training.{key}": value for key, value in self.training.items()}
        values |= {f"method_options.{key}": value for key, value in self.options.items()}
        return ", ".join(f"{key} {value}" for key, value in values.items()) or "nothing beyond its defaults"


PRESETS: Mapping[str, Preset] = {
    "fedavg": Preset("plain local training, mean weighted by records", own_models=False),
    "fedmr": Preset(
        f"CIFAR-10: ResNet18, 100 rounds of 10 epochs, batch 128, {_SGD}, rate 0.01, weight decay 1e-5",
        "the paper; its weights stand in an appendix that we have not seen",
        {"weight_decay": 1e-5, "momentum": 0.9},
        own_models=False,
    ),
    "fedetf": Preset(
        f"CIFAR-10: ResNet20, 20 silos, 200 rounds of 3 epochs, batch 128, {_SGD}, rate 0.04, decay 5e-4",
        "the paper and its published code",
        {"weight_decay": 5e-4, "momentum": 0.9},
    ),
    "fednh": Preset(
        "Conv2Cifar (scale 1) or ResNet (scale 20), 100 silos, a tenth a round, 200 rounds of 5 epochs, "
        f"batch 64, {_SGD}, rate 0.01 times 0.99 a round, decay 1e-5",
        "the paper and its published code",
        {"weight_decay": 1e-5, "momentum": 0.9},
        {"lr_decay": 0.99},
        own_models=False,
    ),
    "fedavg_etf": Preset(
        "VGG11, 100 silos, a tenth a round, 1,000 rounds of 2 or 5 epochs, "
        f"batch 64, {_SGD}, rate 0.03, decay 5e-4",
        "the paper, tables 1 and 3",
        {"weight_decay": 5e-4, "momentum": 0.9},
        own_models=False,
    ),
    "fedilc": Preset(
        "301 rounds; eICU: Adam 2e-4, decay 1e-3, lambda 0.1, batch 64",
        "the paper, and its published code for the scale of lambda",
        {"epochs": 1},
    ),
    "fedsgd": Preset("one gradient of all records and one step a round", "FedAvg's paper", {"epochs": 1}),
    "fedrod": Preset("balanced softmax, personal head linear or of a hyper-network"),
    "fedprox": Preset("mu of 0.001, 0.01, 0.1 and 1 tried; 0.01 here"),
    "fednova": Preset("any local optimiser; momentum enters its normaliser"),
    "fedopt": Preset("Adam with beta 0.9 and 0.99, tau 1e-3; server rates of 0.001 to 0.1 tried, 0.01 here"),
    "scaffold": Preset(
        "plain SGD: with momentum its control variates are no mean gradients",
        "the paper, algorithm 1, option II",
        {"momentum": 0.0},
    ),
    "moon": Preset("mu of 0.1, 1, 5 and 10 tried, 1 here; temperature 0.5"),
    "ditto": Preset("lambda 0.05 to 2; 0.75 here", "the paper; FedNH's comparison for 0.75"),
    "fedper": Preset("body and head train together, the body is averaged"),
    "fedrep": Preset("ten epochs of the head, then the body's", "the paper; FedNH's comparison for ten"),
    "fedbabu": Preset(
        "the head stays as drawn; five epochs of fine-tuning at the end",
        "the paper; FedNH's comparison for five",
    ),
    "ccvr": Preset("100 to 2,000 virtual features of each class after FedAvg; 1,000 here"),
    "creff": Preset(
        "100 features of each class, 100 matching steps, 300 epochs of the head at 0.01",
        "the paper and its published code; steps of 0.1 as in a published configuration",
    ),
    "fedproto": Preset("lambda 1; 0.1 here", "the paper; FedNH's and FedETF's comparisons for 0.1"),
    "local_only": Preset("the same rounds and epochs, alone", "no paper"),
    "fedrs": Preset("logits of missing classes times 0.5"),
    "feddyn": Preset("alpha of 0.001, 0.01 and 0.1 tried; 0.01 here"),
    "feddc": Preset("plain SGD, as for SCAFFOLD", "the paper, algorithm 1", {"momentum": 0.0}),
    "fedproc": Preset(
        "a projection of two layers, temperature 0.5, alpha falling from 1 to 0", own_models=False
    ),
    "fedmmd": Preset("a mixture of five Gaussian kernels; weight 0.1 here"),
    "fedaws": Preset(
        "silos of one class", "the paper; cross-entropy and distance as in FedAvg_ETF's published code"
    ),
    "fedcurv": Preset("a diagonal Fisher penalty; weight 0.01 here"),
    "fed3r": Preset(
        "ridge regression on frozen features, from one sum",
        options={"priors": "balanced"},
        own_models=False,
        other=_FROZEN,
    ),
    "fedcgs": Preset(
        "class-wise Gaussians of frozen features, from one sum",
        options={"priors": "balanced", "shrinkage": 0.4},
        own_models=False,
        other=_FROZEN,
    ),
    "fedncm": Preset("class means of frozen features, from one sum", own_models=False, other=_FROZEN),
    "combine": Preset("its parts' own", "the papers of its parts"),
}
"""By method."""


def of(method: str) -> Preset:
    """Return a method's preset; an empty one for a method of another package."""
    return PRESETS.get(method, Preset("not known here", "its own package", own_models=False))


@dataclass(frozen=True)
class Effect:
    """A measured comparison of a method with another.

    Attributes:
        method, options: of the compared method.
        measure: of the difference; a lower ``loss`` or ``spread`` is better.
        baseline: title of the other method.
        mean, low, high: of the paired differences over seeds, with the 95 % t interval.
    """

    method: str
    options: str
    setting: str
    measure: str
    baseline: str
    mean: float
    low: float
    high: float
    seeds: int
    command: str

    @property
    def seen(self) -> bool:
        """True if at least five seeds show the method ahead, with an interval that excludes zero."""
        return self.seeds >= 5 and (self.high < 0 if self.measure in ("loss", "spread") else self.low > 0)

    @property
    def numbers(self) -> str:
        """Return the difference and its interval."""
        digits = {"accuracy, %": 1, "spread": 2}.get(self.measure, 3)
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"

    @property
    def line(self) -> str:
        """Return the comparison in one line."""
        note = f" ({self.options})" if self.options else ""
        return (
            f"{self.setting}{note}: {self.measure} {self.numbers} less {self.baseline}'s, {self.seeds} seeds"
        )


def effects(method: str) -> Iterator[Effect]:
    """Yield a method's comparisons, those that show an effect first."""
    folder = files("tightframe_app.jobs")
    tables = [json.loads((folder / name).read_text(encoding="utf-8")) for name in (FILE, CLINICAL)]
    matching = [Effect(**values) for values in chain(*tables) if values["method"] == method]
    yield from sorted(matching, key=lambda effect: not effect.seen)


def described(method: str) -> dict[str, Any]:
    """Return a method's preset and comparisons as plain values."""
    compared = [asdict(effect) | {"seen": effect.seen} for effect in effects(method)]
    for effect in compared:
        del effect["method"]
    return {"preset": asdict(of(method)), "effects": compared}


def lines(method: str) -> list[str]:
    """Describe a method's preset and effects for ``tightframe methods NAME``."""
    preset, compared = of(method), list(effects(method))
    shown = [f"preset (`tightframe jobs export --method {method} --data DATASET`): {preset.sets}"]
    if method in PRESETS:
        shown += [f"  in print: {preset.printed}", f"  source: {preset.source}"]
    if not compared:
        place = ELSEWHERE.get(method)
        summary = "not measured here against a baseline" if place is None else f"measured here {place}"
        return [*shown, f"effect: {summary}"]
    if not any(effect.seen for effect in compared):
        shown.append("effect: none found with five seeds; tried:")
    else:
        shown.append("effect:")
    for effect in compared:
        shown.append(f"  {'seen' if effect.seen else 'not seen'}: {effect.line}")
        shown.append(f"    in a clone: {effect.command}")
    return shown
