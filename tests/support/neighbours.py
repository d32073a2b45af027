"""One silo's run on two neighbouring data sets without noise: what leaves, and what it was charged as.

The first run is recorded: each request with its answer, each draw of noise, each noisy step of training. The
second gets the very same requests. What noise covers is compared with the noise that was drawn and charged,
and then *replaced by the first run's*; all else must be the same to the bit, because a release is private
given all earlier ones. Records take part in a step if the same ones do in the first run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ledgers import charges_in

from tightframe import federation
from tightframe.config.job import JobConfig
from tightframe.config.site import SiteEntry
from tightframe.data.base import SiloData
from tightframe.phases import Schema
from tightframe.privacy.events import Gaussian, SubsampledGaussian
from tightframe.privacy.ledger.entries import Charge
from tightframe.privacy.releases import class_sums, noise
from tightframe.privacy.training import dp_sgd, gradient_sum
from tightframe.rounds import codec
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.simulated_identity import simulated_identity

SITE = "site-1"
RELEASED = {
    "class_sums": "class sums",
    "frozen_sums": "feature sums",
    "gradient_sum": "training",
    "evaluation": "evaluation",
}
"""Mechanism -> how the purpose of its charge ends."""


@dataclass(frozen=True)
class Records:
    """A silo's records, and the name of each unit (record or patient) of the training fold, in order."""

    data: SiloData
    units: Sequence[int]


@dataclass
class Heard:
    """A task's request and answer, and what happened at the silo meanwhile.

    Attributes:
        steps: of DP-SGD: the sum (P,) before noise, the noise's deviation.
        counts: class counts before noise, in units, and the variance of their noise.
        drawn: variance and size of each draw of discrete noise.
        rates: sampling rate of each draw of records.
        charged: what the ledger got.
    """

    task: str
    request: Message
    answer: Message = field(default_factory=dict)
    steps: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)
    drawn: list[tuple[int, int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    charged: list[Charge] = field(default_factory=list)


class Tap:
    """Takes noise off, and notes what it would have covered.

    Args:
        always: units that take part in each step, so that what they add is seen.
        never: units that take part in none.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, always: Sequence[int] = (), never: Sequence[int] = ()
    ) -> None:
        self._always, self._never = always, never
        self.units: Sequence[int] = ()
        self.now: Heard = Heard("", {})
        self.before: Heard | None = None
        self.taken: list[tuple[int, int]] = []  # draw and unit of each record taken, in order
        self._draws = 0
        set_gradients, read_counts = dp_sgd._Loop._set_gradients, class_sums.read_counts

        def gradients(loop: Any, trained: Any, total: torch.Tensor, drawn: Any) -> None:
            if self.units:
                zero, one = total * 0, _done(torch.ones_like(total))
                set_gradients(loop, trained, zero, one)
                deviation = float(trained[0].grad.flatten()[0]) * loop.settings.expected_batch
                self.now.steps.append((total.clone(), deviation))
                if self.before is not None:
                    total = self.before.steps[len(self.now.steps) - 1][0]
            set_gradients(loop, trained, total, _done(torch.zeros_like(total)))

        def counts(total: torch.Tensor) -> torch.Tensor:
            self.now.counts.append(total.clone())
            if self.units and self.before is not None:
                total = self.before.counts[len(self.now.counts) - 1]
            return read_counts(total)

        def drawn(variance: int, shape: Any) -> Any:
            self.now.drawn.append((variance, math.prod(shape)))
            return np.zeros(shape, np.int64)

        monkeypatch.setattr(dp_sgd._Loop, "_set_gradients", gradients)
        monkeypatch.setattr(class_sums, "read_counts", counts)
        for module in (noise, class_sums):
            monkeypatch.setattr(module, "discrete_gaussian", drawn)
        for module in (dp_sgd, gradient_sum):
            monkeypatch.setattr(module, "poisson_batch", self._batch)

    def _batch(self, count: int, rate: float, *_: Any) -> list[int]:
        """Take the same units of both data sets, by their names."""
        if not self.units:
            return list(range(count))
        assert count == len(self.units)
        self.now.rates.append(rate)
        self._draws += 1
        places = [
            place
            for place, unit in enumerate(self.units)
            if unit in self._always or (_share(self._draws, unit) < rate and unit not in self._never)
        ]
        self.taken += [(self._draws, self.units[place]) for place in places]
        return places

    def begin(self, records: Records) -> None:
        """Follow a run on these records."""
        self.units, self._draws = records.units, 0

    def end(self) -> None:
        """Follow no run."""
        self.units = ()


def _done(value: torch.Tensor) -> Future[torch.Tensor]:
    finished: Future[torch.Tensor] = Future()
    finished.set_result(value)
    return finished


def _share(draw: int, unit: int) -> float:
    digest = hashlib.sha256(f"{draw} {unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def recorded(
    job: JobConfig,
    records: Records,
    folder: Path,
    tap: Tap,
    monkeypatch: pytest.MonkeyPatch,
    entry: SiteEntry,
) -> list[Heard]:
    """Run the job in process with one silo and plain sums; return all that it was asked."""
    heard: list[Heard] = []
    handle = SiloSession.handle

    def noting(session: SiloSession, task: str, message: Message) -> Message:
        tap.now = Heard(task, dict(message))
        heard.append(tap.now)
        tap.now.answer = handle(session, task, message)
        tap.now.charged = _charged(session.context, heard[:-1])
        return tap.now.answer

    tap.begin(records)
    with monkeypatch.context() as patched:
        patched.setattr(SiloSession, "handle", noting)
        federation.run_job(job, data={SITE: records.data}, entries={SITE: entry}, folder=folder)
    tap.end()
    return heard


def replayed(
    job: JobConfig, records: Records, folder: Path, tap: Tap, first: Sequence[Heard], entry: SiteEntry
) -> list[Heard]:
    """Send the very same requests to a silo with other records."""
    identity = partial(simulated_identity, "run", SITE, production=False)
    session = SiloSession(
        SiloContext(SITE, job, entry, run_dir=folder, records=records.data, job_id="run", identity=identity)
    )
    heard: list[Heard] = []
    tap.begin(records)
    for before in first:
        tap.now, tap.before = Heard(before.task, before.request), before
        heard.append(tap.now)
        tap.now.answer = session.handle(before.task, dict(before.request))
        tap.now.charged = _charged(session.context, heard[:-1])
    tap.end()
    tap.before = None
    session.end()
    return heard


def _charged(context: SiloContext, earlier: Sequence[Heard]) -> list[Charge]:
    path = context.state_folder / "privacy" / SITE / "ledger.sqlite"
    known = sum(len(item.charged) for item in earlier)
    return charges_in(path)[known:] if path.is_file() else []


def compared(job: JobConfig, first: Sequence[Heard], second: Sequence[Heard]) -> dict[str, float]:
    """Hold what left in both runs against the charges.

    Returns:
        Release -> the largest L2 change, in parts of what the noise drawn and the charge allow.

    Raises:
        AssertionError: if anything that no noise covers differs.
    """
    setup, worst = prepare(job), dict[str, float]()
    for one, other in zip(first, second, strict=True):
        assert set(one.answer) == set(other.answer)
        assert [_public(item) for item in one.charged] == [_public(item) for item in other.charged]
        assert one.drawn == other.drawn and one.rates == other.rates
        for name, part in _moved(setup, one, other).items():
            worst[name] = max(worst.get(name, 0.0), part)
    return worst


def _public(charge: Charge) -> tuple[Any, ...]:
    return charge.purpose, charge.attempt, charge.event, charge.alone, charge.neighbours


def _moved(setup: JobSetup, one: Heard, other: Heard) -> dict[str, float]:
    if "term" not in one.answer:
        assert one.answer == other.answer, f"the answer to {one.task} tells of a record"
        return {}
    request = one.request
    exchange = setup.plan.find(request["kind"], request["round"], request["phase"])
    schema = next(item.schema for item in exchange.phases if _fits(item.schema, one.answer["term"]))
    moved = {}
    if one.steps:
        (charge,) = (item for item in one.charged if item.purpose.endswith("training"))
        event = charge.event
        assert isinstance(event, SubsampledGaussian)
        assert len(one.steps) == len(other.steps) <= event.steps and max(one.rates) <= event.sampling_rate
        moved["training"] = max(
            float((mine - theirs).norm()) / deviation * event.noise_multiplier
            for (mine, deviation), (theirs, _) in zip(one.steps, other.steps, strict=True)
        )
    if one.counts:
        (charge,) = (item for item in one.charged if item.purpose == "class counts")
        variance = next(value for value, size in one.drawn if size == one.counts[0].numel())
        moved["class counts"] = _part([(one.counts[0] - other.counts[0], variance)], charge)
    changes: dict[str, list[tuple[torch.Tensor, int]]] = {}
    for item in schema.fields:
        mine, theirs = (
            codec.decode(schema, _unpacked(schema, heard.answer["term"]), parties=1)[item.name]
            for heard in (one, other)
        )
        if item.mechanism not in RELEASED:
            assert np.array_equal(mine, theirs), f"{item.name} differs, and no noise covers it"
            continue
        config, shares = _config(setup, item.mechanism, item.name)
        change = torch.from_numpy(np.asarray((mine - theirs) * config.grid))
        variance = config.share_variance(shares)
        assert variance in [value for value, _ in one.drawn]
        changes.setdefault(RELEASED[item.mechanism], []).append((change, variance))
    for release, parts in changes.items():
        (charge,) = (item for item in one.charged if item.purpose.endswith(release))
        if isinstance(charge.event, SubsampledGaussian):
            assert max(one.rates) <= charge.event.sampling_rate
        moved[release] = _part(parts, charge)
    noised = sum(size for _, size in one.drawn)
    fields = sum(item.size for item in schema.fields if item.mechanism in RELEASED)
    assert noised == fields + sum(item.numel() for item in one.counts), "each number has a draw of its own"
    return moved


def _part(parts: Sequence[tuple[torch.Tensor, int]], charge: Charge) -> float:
    """Return the change in parts of what noise of these variances hides at the charged multiplier."""
    assert isinstance(charge.event, Gaussian | SubsampledGaussian)
    squared = sum(float(change.double().square().sum()) / variance for change, variance in parts)
    return math.sqrt(squared) * charge.event.noise_multiplier


def _config(setup: JobSetup, mechanism: str, name: str) -> tuple[Any, int]:
    plan = setup.privacy
    assert plan is not None
    if mechanism == "class_sums":
        return plan.class_sums, 1
    if mechanism == "frozen_sums":
        assert plan.frozen is not None
        return plan.frozen.config.part(name), 1
    if mechanism == "evaluation":
        assert plan.evaluation is not None
        return plan.evaluation.config, 1
    return plan.gradients, 1


def _fits(schema: Schema, term: dict[Any, bytes]) -> bool:
    return all(sum(item.bytes for item in schema.group(group)) == len(data) for group, data in term.items())


def _unpacked(schema: Schema, term: dict[Any, bytes]) -> dict[str, Any]:
    shapes = {item.name: item.shape for item in schema.fields}
    return {
        name: values.reshape(shapes[name])
        for group, data in term.items()
        for name, values in codec.unpack(schema, group, data).items()
    }
