"""Records that a training fold repeats count once wherever something is made public of a silo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.jobs import SMALL
from torch import nn

from tightframe import data
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.config.site import SiteEntry, open_data
from tightframe.learning.few_records.products import Sizes
from tightframe.learning.few_records.unit_records import UnitRecords
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.riders import class_rules
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.checks.enrolment import check_layers, own_records
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import LocalSilo

EICU: dict[str, Any] = {
    **SMALL,
    "summation": "plain",
    "dataset": "eicu",
    "dataset_options": {"drugs": 60, "twin_scale": 0.02, "oversample_minority": True},
    "model": "mlp",
    "model_options": {"widths": [6]},
}


def _context(job: JobConfig, folder: Path, least: int = 1) -> SiloContext:
    records = open_data(job, "site-1", None)
    entry = SiteEntry(policy=PolicyBlock(min_class_count=least))
    return SiloContext("site-1", job, entry, run_dir=folder, records=records)


def _once(job: JobConfig) -> np.ndarray[Any, Any]:
    """The same silo's labels without repetition."""
    options = {**job.dataset_options, "oversample_minority": False}
    plain = parse_job({**job.model_dump(), "dataset_options": options})
    return open_data(plain, "site-1", None).labels("train")


def test_the_public_weight_is_of_distinct_records(tmp_path: Path) -> None:
    """Twice the larger class, beside the number of records, would tell both classes."""
    job = parse_job(EICU)
    context, once = _context(job, tmp_path), _once(job)
    assert len(context.data.labels("train")) > len(once)
    assert SiloSession(context)._declare(again=False).weight == len(once)
    kept = Declaration.from_bytes((context.state_folder / "declaration.json").read_bytes(), "site-1")
    assert kept.weight == len(once)


def test_class_counts_can_be_of_distinct_records(tmp_path: Path) -> None:
    job = parse_job(EICU)
    silo = LocalSilo(_context(job, tmp_path), prepare(job), torch.device("cpu"), 1)
    once = np.bincount(_once(job), minlength=2)
    assert silo.class_counts("train", distinct=True).tolist() == once.tolist()
    repeated = silo.class_counts("train").tolist()
    assert repeated[0] == repeated[1] == once.max()


def test_each_batch_of_training_says_how_often_a_record_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rarer class alone would be half of those that are behind a layer."""
    job, seen = parse_job(EICU), list[float]()
    context = _context(job, tmp_path, least=5)
    silo = LocalSilo(context, prepare(job), torch.device("cpu"), 1)
    monkeypatch.setattr(UnitRecords, "next_batch", lambda _self, *told: seen.extend(1 / told[2]))
    monkeypatch.setattr(LocalSilo, "records_per_feature", 2)
    monkeypatch.setattr(LocalSilo, "min_class_count", 5)
    silo.unit_records(nn.Linear(60, 2), passes=[range(1)])
    for _ in silo.batches("train", augment=False, shuffle=True):
        pass
    assert len(seen) == len(context.data.labels("train"))
    assert round(sum(seen)) == len(_once(job))


@pytest.mark.parametrize(("accepted", "told"), [(("exact", "uniform"), 0), (("power_of_two", "uniform"), 1)])
def test_a_refusal_by_own_records_tells_no_more_than_a_declared_weight(
    tmp_path: Path, accepted: tuple[str, ...], told: int
) -> None:
    """Two refused jobs with uniform weights, one of repeated records, told both classes before any sum."""
    job = parse_job({**EICU, "weights": "uniform", "model_options": {"widths": [5000]}})
    entry = SiteEntry(policy=PolicyBlock(profile="standard", weights=accepted))
    records = open_data(job, "site-1", None)
    context = SiloContext("site-1", job, entry, run_dir=tmp_path, records=records, production=True)
    distinct = len(_once(job))
    number = (distinct, 1 << distinct.bit_length() - 1)[told]
    assert len(records.labels("train")) > distinct > 1 << distinct.bit_length() - 1
    assert own_records(context) == number
    alike = Sizes.of(dict.fromkeys(job.roster, 1.0), 1)
    with pytest.raises(BelowPolicyError) as error:
        check_layers(context, prepare(job), alike, "records")
    assert f"trained on {number * (len(job.roster) - 1)} records" in error.value.outside()[0][1]


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fednh", "fedmr"])
def test_repeating_a_record_does_not_make_it_a_class_that_may_be_summed(tmp_path: Path, method: str) -> None:
    job = parse_job({**EICU, "method": method})
    died = int((_once(job) == 1).sum())
    setup = prepare(job)
    (exchange,) = setup.plan.round(1)
    phase, state = exchange.phase, setup.initial_state()
    flags = {}
    for least in (died, died + 1):
        context = _context(job, tmp_path / str(least), least)
        silo = LocalSilo(context, setup, torch.device("cpu"), 1)
        received = {**phase.broadcast(state), class_rules.OFFERED: torch.ones(2, dtype=torch.uint8)}
        tensors = phase.contribute(silo, received, {}).tensors
        flags[least] = tensors[class_rules.HOLDERS].tolist()
        row = next(tensors[name] for name in tensors if name in ("prototype/sums", "prototype/feature_sums"))
        assert bool((row[1] != 0).any()) == (least == died)
    assert flags == {died: [1.0, 1.0], died + 1: [1.0, 0.0]}


def test_only_a_data_set_that_repeats_says_which_are_distinct() -> None:
    spec = data.get("fed_heart_disease")
    assert spec.twin is not None
    assert not hasattr(spec.twin(0, spec.options()), "distinct_labels")
    assert replace(spec).choosing == ()
