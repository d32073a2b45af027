"""A job of a kilobyte that asks for all memory of a hospital, or days of its time, is refused unbuilt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.attacks.malicious_server import HEART, Federation, hearts

from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.errors import JobError, PolicyError, TooLargeError
from tightframe.models.build_limit import build_within
from tightframe.rounds import setup

SITES = {"sites": ["s0", "s1", "s2", "s3"], "min_sites": 3}
STANDARD = PolicyBlock(profile="standard").resolve(production=True)
MEASURED = """
import json, resource, sys
from tightframe.errors import TooLargeError
from tightframe.rounds.setup import prepare
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plain, *hostile = json.loads(sys.argv[1])
prepare(plain)  # imports what any job needs
before, codes = peak(), []
for job in hostile:
    try:
        prepare(job)
        codes.append("built")
    except TooLargeError as error:
        codes.append(error.code)
print(json.dumps([codes, (peak() - before) // 1024]))
"""


@pytest.mark.whole
def test_hostile_models_take_no_memory() -> None:
    plain = {**HEART, **SITES, "method": "fedetf"}
    wide = {**plain, "model_options": {"widths": [16384, 16384]}}  # 1 GB
    vast = {**plain, "model_options": {"widths": [65536] * 8}}  # 112 GB
    head = {**plain, "model_options": {"widths": [65536]}, "method_options": {"dim": 65536}}  # 16 GB
    jobs = json.dumps([plain, wide, vast, head])
    command = [sys.executable, "-c", MEASURED, jobs]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    codes, megabytes = json.loads(run.stdout)
    assert codes == ["TF-632"] * 3
    assert megabytes < 100


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"rounds": 1001}, "max_rounds: the job asks for 1001 rounds, at most 1000"),
        ({"training": {"epochs": 501}}, "max_epochs: the job asks for 501 training.epochs"),
        ({"local_baseline_epochs": 100_000}, "max_epochs: the job asks for 100000 local_baseline"),
        (
            {"method": "fedbabu", "method_options": {"personal_epochs": 9999}},
            "max_epochs: the job asks for 9999 method_options.personal_epochs",
        ),
        (
            {"method": "fedetf", "method_options": {"personal_alternations": 10_000}},
            "max_epochs: the job asks for 10000 method_options.personal_alternations",
        ),
        (
            {
                "dataset": "fed_isic2019",
                "model": "small_cnn",
                "dataset_options": {"image_size": 512},
                "training": {"batch_size": 65_536},
            },
            "max_batch_values: the job asks for 51539607552 values",
        ),
        (
            {
                "dataset": "eicu",
                "dataset_options": {"drugs": 2000},
                "evaluation": {"batch_size": 65_536},
            },
            "max_batch_values",
        ),
        ({"sites": [f"s{i}" for i in range(101)]}, "max_sites: the job asks for 101 sites, at most 100"),
    ],
    ids=["rounds", "epochs", "baseline", "personal", "alternations", "images", "table", "sites"],
)
def test_the_policy_refuses_sizes_before_anything_is_built(
    changes: dict[str, Any], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse_job({**HEART, **SITES, **changes})

    def nothing(*args: Any, **more: Any) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(torch.nn.Module, "__init__", nothing)
    monkeypatch.setattr(setup.JobSetup, "training_phases", nothing)
    with pytest.raises(PolicyError, match="TF-614") as error:
        STANDARD.check(job)
    assert refused in str(error.value)


def test_a_silo_refuses_what_its_own_policy_finds_too_large(tmp_path: Path) -> None:
    """At enrolment, with the rule's name for the lead, and before a record is read."""
    data = hearts(4)
    policy = PolicyBlock(profile="standard", max_parameters=5000)
    values = {"model_options": {"widths": [400]}}  # 13 x 400 + 400 + 400 x 2 + 2
    federation = Federation(values, data, state=tmp_path, policy=policy)
    read: list[str] = []
    for name, records in data.items():
        records.check = lambda progress=None, name=name: read.append(name)  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match="max_parameters: the job asks for a model of") as refused:
        federation.enroll()
    assert refused.value.code == "TF-614"
    assert refused.value.outside()[0][0] == "max_parameters"  # type: ignore[attr-defined]
    assert not read


def test_terms_are_bounded_too(tmp_path: Path) -> None:
    data = hearts(4)
    policy = PolicyBlock(profile="standard", max_message_bytes=10_000)
    federation = Federation({"model_options": {"widths": [400]}}, data, state=tmp_path, policy=policy)
    with pytest.raises(PolicyError, match="max_message_bytes: the job asks for terms of"):
        federation.enroll()


def test_a_vast_number_of_rounds_is_refused_before_one_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    honest = setup.JobSetup.training_phases

    def counted(self: setup.JobSetup, number: int) -> Any:
        planned.append(number)
        return honest(self, number)

    monkeypatch.setattr(setup.JobSetup, "training_phases", counted)
    with pytest.raises(JobError, match="rounds"):
        setup.prepare({**HEART, **SITES, "rounds": 100_000})
    assert planned == []
    setup.prepare({**HEART, **SITES, "rounds": 10_000})
    assert len(planned) <= 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(4000, 4000),
        lambda: torch.nn.Embedding(4000, 4000),
        lambda: torch.nn.Conv2d(4000, 4000, 1),
        lambda: torch.nn.ParameterList([torch.eye(4000)]),
        lambda: torch.nn.ParameterList([torch.zeros(4000, 4000)]),
        lambda: torch.nn.ParameterList([torch.full((4000, 4000), 1.0)]),
        lambda: torch.nn.ParameterList([torch.ones(1).repeat(4000, 4000)]),
        lambda: torch.nn.ParameterList([torch.ones(1).new_zeros(4000, 4000)]),
        lambda: torch.nn.ParameterList([torch.randn(size=(4000, 4000))]),
        lambda: torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(40)]),
    ],
)
def test_every_way_to_make_a_large_model_is_seen_before_it_is_made(make: Any) -> None:
    made: list[torch.nn.Module] = []
    with pytest.raises(TooLargeError):
        build_within(lambda: made.append(make()) or made[0], 15_000_000)
    assert made == []


def test_a_model_is_counted_when_it_is_there_too() -> None:
    with pytest.raises(TooLargeError, match="a model of 16000000 numbers"):
        # Its size is not an argument, so it is counted once it is built.
        build_within(lambda: torch.nn.ParameterList([torch.arange(16_000_000.0)]), 15_000_000)
    build_within(lambda: torch.nn.Linear(10, 10), 110)
