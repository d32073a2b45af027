"""The state that silos compute from totals: the same as the server's, on other processors too."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tightframe import methods
from tightframe.config.job import parse_job
from tightframe.errors import JobError, RunError, TightframeError
from tightframe.learning.one_sum.feature_sums import COUNTS, RECORDS
from tightframe.methods import METHODS
from tightframe.phases import RING_DTYPE, ServerState
from tightframe.rounds import codec
from tightframe.rounds.codec import pack
from tightframe.rounds.plan import Exchange
from tightframe.rounds.run_state import (
    ABSOLUTE,
    differences,
    read_state,
    start_state,
    state_bytes,
    state_sha256,
)
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.followed_state import next_state
from tightframe.securesum.messages import GROUPS, SumId, Total

WEIGHTS = {"a": 3.0, "b": 2.0, "c": 2.0}


def job(method: str = "fedavg", **values: Any) -> JobSetup:
    momentum = {"scaffold": 0.0, "feddc": 0.0}.get(method, 0.9)
    return prepare(
        parse_job(
            {
                "job_name": "small",
                "method": method,
                "dataset": "digits",
                "model": "small_cnn",
                "model_options": {"widths": [2, 4]} if "widths" in values else {},
                "sites": sorted(WEIGHTS),
                "min_sites": 3,
                "rounds": methods.get(method).rounds or 2,
                "summation": "plain",
                "training": {"momentum": momentum},
            }
            | values
        )
    )


def made_total(setup: JobSetup, exchange: Exchange, state: ServerState, seed: int) -> Total:
    """A total of small values, as three silos could have sent them."""
    generator = np.random.default_rng(seed)
    phase = exchange.phase_for(exchange.phase.broadcast(state))
    integers = {}
    for item in phase.schema.fields:
        if item.name == "failed":
            values = np.zeros(item.shape)
        elif item.name == RECORDS:
            values = integers[COUNTS].view(np.int64).sum() / 2.0 ** codec.bits_of(phase.schema[COUNTS], 3)
        elif item.static and item.bound == 1:  # a flag of each silo
            values = np.full(item.shape, 3.0)
        elif item.static:
            values = generator.integers(3, 9, item.shape).astype(np.float64)
        else:
            values = generator.normal(0, 0.05, item.shape)
        units = np.rint(values * 2.0 ** codec.bits_of(item, 3)).astype(np.int64)
        integers[item.name] = units.astype(RING_DTYPE[item.ring])
    groups = {group: pack(phase.schema, group, integers) for group in GROUPS}
    sum_id = exchange.sum_id()
    return Total(0, sum_id, "a schema", ("a", "b", "c"), groups, bytes(32))


def chain(setup: JobSetup) -> list[tuple[bytes, bytes]]:
    """State and total before each update, and the last state with an empty total."""
    state, _ = start_state(setup, None)
    steps = []
    for number, exchange in enumerate(setup.plan):
        total = made_total(setup, exchange, state, number)
        steps.append((state_bytes(state), total.to_bytes()))
        state = next_state(setup, state, total, WEIGHTS)
    return [*steps, (state_bytes(state), b"")]


QUICK: Mapping[str, dict[str, Any]] = {
    "ccvr": {"virtual_features": 20, "epochs": 1},
    "creff": {"features": 4, "match_steps": 2, "epochs": 2},
}
METHOD_NAMES = [method.name for method in METHODS]
REPLAY = """
import pickle, sys, torch
from tests.rounds.test_run_state import WEIGHTS, job, QUICK
from tightframe.rounds.run_state import read_state, start_state, state_bytes
from tightframe.rounds.silo.followed_state import next_state
from tightframe.securesum.messages import Total

torch.set_num_threads(2)
made = {}
for name, steps in pickle.load(sys.stdin.buffer).items():
    setup = job(name, method_options=QUICK.get(name, {}))
    start = state_bytes(start_state(setup, None)[0])
    after = [
        state_bytes(next_state(setup, read_state(before), Total.from_bytes(total), WEIGHTS))
        for before, total in steps[:-1]
    ]
    made[name] = [start, *after]
sys.stdout.buffer.write(pickle.dumps(made))
"""


@pytest.mark.whole
def test_every_methods_server_half_gives_the_same_bits_on_another_processor() -> None:
    """Another processor: other vector instructions, other kernels of the matrix library, two threads."""
    steps = {name: chain(job(name, method_options=QUICK.get(name, {}))) for name in METHOD_NAMES}
    other = os.environ | {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    other["PYTHONPATH"] = os.pathsep.join(["custom", "app", "."])
    ended = subprocess.run(
        [sys.executable, "-c", REPLAY],
        input=pickle.dumps(steps),
        capture_output=True,
        env=other,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    rounded = {}
    for name, made in pickle.loads(ended.stdout).items():  # noqa: S301 - our own
        here = [before for before, _ in steps[name]]
        assert len(made) == len(here)
        for own, others in zip(here, made, strict=True):
            assert differences(read_state(own), read_state(others)) == [], name
        rounded[name] = made[1:] != here[1:]
    declared = {method.name for method in METHODS if method.rounded}
    assert {name for name, is_rounded in rounded.items() if is_rounded} <= declared


def test_a_state_goes_through_its_bytes_unchanged() -> None:
    state, _ = start_state(job("scaffold"), None)
    again = read_state(state_bytes(state))
    assert set(again.model) == set(state.model) and set(again.extra) == set(state.extra)
    assert all(torch.equal(again.extra[name], value) for name, value in state.extra.items())
    assert state_sha256(again) == state_sha256(state) == hashlib.sha256(state_bytes(state)).hexdigest()


@pytest.mark.parametrize("data", [b"", b"no tensors", save({"other": torch.zeros(1)})])
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(RunError, match=r"^TF-604: "):
        read_state(data)


def test_a_pretrained_start_is_the_one_that_the_job_names() -> None:
    plain = job()
    start, _ = start_state(plain, None)
    weights = save({name: value + 1 for name, value in start.model.items()})
    sha256 = hashlib.sha256(weights).hexdigest()
    named = job(initial_model_sha256=sha256)
    made, loaded = start_state(named, weights)
    assert loaded is not None and loaded.sha256 == sha256
    assert all(torch.equal(made.model[name], value + 1) for name, value in start.model.items())
    for setup, given in ((plain, weights), (named, None), (named, weights + b" ")):
        with pytest.raises(RunError) as caught:
            start_state(setup, given)
        assert caught.value.code == "TF-505"
        assert f"Expected {'a' if setup is named else 'no'} pretrained start" in str(caught.value)
        assert f"but got {'no' if given is None else 'a'} pretrained start" in str(caught.value)


def test_a_total_of_strangers_or_of_no_planned_exchange_gives_no_state() -> None:
    setup = job()
    state, _ = start_state(setup, None)
    total = made_total(setup, next(iter(setup.plan)), state, 0)
    for altered in (
        replace(total, survivors=("a", "b", "z")),
        replace(total, sum_id=SumId(99, "train-0")),
        replace(total, sum_id=SumId(1, "train-x")),
        replace(total, groups={**total.groups, "update": total.groups["update"][:-4]}),
    ):
        with pytest.raises(TightframeError) as caught:
            next_state(setup, state, altered, WEIGHTS)
        assert caught.value.code in ("TF-505", "TF-403")


def test_rounding_is_told_from_another_state() -> None:
    state, _ = start_state(job(), None)
    name = "head.weight"

    def with_values(values: torch.Tensor) -> ServerState:
        return state.evolve(model={**state.model, name: values})

    values = state.model[name]
    largest = float(values.abs().max())
    assert differences(state, with_values(values * (1 + 1e-6))) == []
    assert differences(state, with_values(values + 0.9e-4 * largest)) == []
    for other in (values + 1e-3 * largest, values * torch.nan, values[:1], values.double()):
        assert differences(state, with_values(other)), other.shape
    assert differences(state, state.evolve(extra={"more": torch.zeros(1)}))
    integers = state.evolve(extra={"count": torch.tensor(3)})
    assert differences(integers, state.evolve(extra={"count": torch.tensor(4)}))
    assert differences(integers, state.evolve(extra={"count": torch.tensor(3)})) == []
    many = state.evolve(extra={"count": torch.tensor(10**6)})
    assert differences(many, state.evolve(extra={"count": torch.tensor(10**6 + 1)})) == [
        "extra/count has other values"
    ]


def test_what_is_not_finite_is_close_to_nothing_but_itself() -> None:
    """A silo whose own values are infinite would else take over any."""

    def held(*values: float) -> ServerState:
        return ServerState({"value": torch.tensor(values, dtype=torch.float64)})

    diverged = held(1.0, torch.inf)
    assert differences(diverged, held(1.0, torch.inf)) == []
    for other in (held(1.0, 2.0), held(-5.0, torch.inf), held(1.0, -torch.inf), held(1.0, torch.nan)):
        assert (
            differences(diverged, other) == differences(other, diverged) == ["model/value has other values"]
        )


def test_how_far_two_machines_may_differ_is_exact() -> None:
    own = ServerState({"value": torch.zeros(1, dtype=torch.float64)})
    for far, problems in ((ABSOLUTE, []), (ABSOLUTE * (1 + 1e-9), ["model/value has other values"])):
        assert differences(own, own.evolve(model={"value": own.model["value"] + far})) == problems
    one, three = (ServerState({"value": torch.zeros(size)}) for size in (1, 3))
    assert differences(one, three) == ["model/value has another shape or type"]


def test_a_start_that_standardises_is_not_asked_for_again_by_a_private_job() -> None:
    """The job's own model must not standardise, so that the start has to be made without."""
    start = dict(start_state(job(), None)[0].model) | {"standardise.mean": torch.zeros(3)}
    weights = save(start)
    named = {"initial_model_sha256": hashlib.sha256(weights).hexdigest()}
    with pytest.raises(JobError, match=r"cannot start a job with `privacy`; train the .*standardise=false$"):
        start_state(job(**named, weights="uniform", privacy={"epsilon": 2}), weights)
    with pytest.raises(JobError, match=r"not in the model: --set model_options\.standardise=true$"):
        start_state(job(**named), weights)


def test_a_method_without_a_global_model_has_no_pretrained_start() -> None:
    weights = save(dict(start_state(job(), None)[0].model))
    named = job("local_only", initial_model_sha256=hashlib.sha256(weights).hexdigest())
    with pytest.raises(RunError, match="which has no global model"):
        start_state(named, weights)


def test_a_head_for_other_classes_is_the_jobs_own_and_evaluates_nothing() -> None:
    """Its values follow from the seed, so that all silos have the same."""
    start = dict(start_state(job(), None)[0].model)
    weights = save(
        start | {"head.weight": torch.zeros(7, start["head.weight"].shape[1]), "head.bias": torch.zeros(7)}
    )
    sha256 = hashlib.sha256(weights).hexdigest()
    made, loaded = start_state(job(initial_model_sha256=sha256), weights)
    assert loaded is not None and loaded.fresh == ("head.bias", "head.weight")
    assert all(torch.equal(made.model[name], start[name]) for name in loaded.fresh)
    whole = save(start)
    for file in (weights, whole):
        named = job(
            initial_model_sha256=hashlib.sha256(file).hexdigest(),
            rounds=0,
            evaluate_only={},
        )
        with pytest.raises(RunError, match="Expected a model to evaluate with"):
            start_state(named, None)
        if file == whole:
            assert start_state(named, file)[1] is not None
            continue
        with pytest.raises(JobError, match="head of the file has another number"):
            start_state(named, file)
