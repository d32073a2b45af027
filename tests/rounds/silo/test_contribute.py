"""A silo's tasks that need torch: its device, its batches, its streams, how it is stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.runs import asked, missed
from torch import nn

from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry, open_data
from tightframe.errors import RunError, TrainingError
from tightframe.methods import fedmr
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.riders import class_rules
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.contribute import Contributor, choose_device, deterministic, repeatable
from tightframe.rounds.silo.view import LocalSilo, guarded
from tightframe.rounds.sums.common import Peers
from tightframe.rounds.sums.plain import PlainServer
from tightframe.securesum.messages import SumId, Total

CPU = torch.device("cpu")
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _context(job: JobConfig, folder: Path, site: str = "site-2", **changes: Any) -> SiloContext:
    """A silo of the twin; ``stopped`` is the context's own, all others are the site's entry."""
    stopped = changes.pop("stopped", lambda: False)
    entry = SiteEntry(device="cpu", **changes)
    return SiloContext(site, job, entry, folder, records=open_data(job, site, None), stopped=stopped)


def _silo(job: JobConfig, folder: Path, site: str = "site-2", round_number: int = 1, **changes: Any) -> Any:
    return LocalSilo(_context(job, folder, site, **changes), prepare(job), CPU, round_number)


def _train(silo: Any, epoch: int = 0) -> Batches:
    return list(silo.batches("train", augment=True, shuffle=True, epoch=epoch))


def _same(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        torch.equal(inputs, others) and torch.equal(labels, other_labels)
        for (inputs, labels), (others, other_labels) in zip(one, other, strict=True)
    )


# ---------------------------------------------------------------- the device


def test_a_site_gets_the_device_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of the test")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.filterwarnings("error")
def test_a_block_on_a_gpu_is_deterministic_and_what_follows_it_as_before() -> None:
    with pytest.raises(ZeroDivisionError), deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        raise ZeroDivisionError
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_the_same_bits_twice() -> None:
    """``benchmarks/devices.py`` shows it for every method."""
    gpu, found = choose_device("cuda"), []
    for _ in range(2):
        with repeatable(3, gpu):
            layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout()
            network = nn.Sequential(*layers, nn.Linear(64 * 15 * 15, 10)).to(gpu)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            for _ in range(20):
                optimizer.zero_grad()
                network(torch.rand(64, 3, 32, 32, device=gpu)).square().mean().backward()
                optimizer.step()
            found.append(torch.cat([item.detach().flatten() for item in network.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("wanted", "available", "count"),
    [("cuda", False, 0), ("cuda:0", False, 0), ("cuda:2", True, 2), ("cuda", True, 0), ("cuda", False, 1)],
)
def test_a_gpu_that_is_not_there_is_no_reason_to_train_elsewhere(
    monkeypatch: pytest.MonkeyPatch, wanted: str, available: bool, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = count if available else 0
    said = rf'Expected the device {wanted} .* torch finds {found} GPUs: set "device" to "cpu" or "auto"'
    with pytest.raises(TrainingError, match=rf"^TF-303: [\s\S]*{said}"):
        choose_device(wanted)


def test_a_silo_without_its_gpu_does_not_start(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = parse_job(small)
    entry = SiteEntry(device="cuda:0")
    with pytest.raises(TrainingError, match="TF-303"):
        Contributor(SiloContext("site-1", job, entry, tmp_path, records=open_data(job, "site-1", None)))


def test_no_seal_is_answered_behind_a_total_that_the_job_does_not_plan(
    small: dict[str, Any], tmp_path: Path
) -> None:
    silo = Contributor(_context(parse_job(small), tmp_path))
    total = Total(0, SumId(99, "train-0"), "", ("site-1",), {}, bytes(32))
    with pytest.raises(RunError, match=r"^TF-505: "):
        message, peers = {"state": "0" * 64, "before": "1" * 64}, Peers({"site-2": 1.0})
        silo.seal(message, peers, total=total, check=lambda *_: None)


# ---------------------------------------------------------------- batches


def test_batches_are_those_of_seed_silo_round_and_epoch(small: dict[str, Any], tmp_path: Path) -> None:
    job = parse_job(small)
    batches = _train(_silo(job, tmp_path), epoch=1)
    torch.manual_seed(99)  # the global stream has no part in it
    assert _same(batches, _train(_silo(parse_job(small), tmp_path / "elsewhere"), epoch=1))
    order = torch.cat([labels for _, labels in batches])
    others = {
        "seed": _train(_silo(parse_job(small | {"seed": 4}), tmp_path), epoch=1),
        "round": _train(_silo(job, tmp_path, round_number=2), epoch=1),
        "epoch": _train(_silo(job, tmp_path), epoch=0),
    }
    for what, other in others.items():
        again = torch.cat([labels for _, labels in other])
        assert not torch.equal(again, order), f"another {what} gives another order"
        assert torch.equal(again.sort().values, order.sort().values), "of the same records"
        assert not _same(batches, other)


def test_silos_with_the_same_records_draw_different_orders(small: dict[str, Any], tmp_path: Path) -> None:
    job = parse_job(small)
    records = open_data(job, "site-1", None)

    def order(site: str) -> torch.Tensor:
        context = SiloContext(site, job, SiteEntry(device="cpu"), tmp_path, records=records)
        return torch.cat([labels for _, labels in _train(LocalSilo(context, prepare(job), CPU, 1))])

    assert not torch.equal(order("site-1"), order("site-2"))
    assert torch.equal(order("site-1").sort().values, order("site-2").sort().values)


def test_augmentation_changes_with_the_epoch_though_the_order_does_not(
    small: dict[str, Any], tmp_path: Path
) -> None:
    silo = _silo(parse_job(small), tmp_path)

    def first(epoch: int, *, augment: bool) -> torch.Tensor:
        inputs: torch.Tensor
        inputs, _ = next(silo.batches("train", augment=augment, shuffle=False, epoch=epoch))
        return inputs

    assert torch.equal(first(0, augment=True), first(0, augment=True))
    assert not torch.equal(first(0, augment=True), first(1, augment=True))
    assert torch.equal(first(0, augment=False), first(1, augment=False))


def test_workers_change_no_batch_and_no_stream(small: dict[str, Any], tmp_path: Path) -> None:
    job = parse_job(small)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    alone = _train(_silo(job, tmp_path, loader_workers=0))
    two = _train(_silo(job, tmp_path, loader_workers=2))
    assert len(alone) > 2, "each worker must have something to do"
    assert _same(alone, two)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_record_is_in_one_batch_and_none_is_alone(small: dict[str, Any], tmp_path: Path) -> None:
    count = len(open_data(parse_job(small), "site-2", None).labels("train"))
    size = next(size for size in range(3, count) if count % size == 1)  # a single record would be left
    job = parse_job(small | {"training": small["training"] | {"batch_size": size}})
    sizes = [len(labels) for _, labels in _train(_silo(job, tmp_path))]
    assert sizes == [size] * (count // size - 1) + [size + 1]


def test_evaluation_has_its_own_batch_size_and_the_records_in_order(
    small: dict[str, Any], tmp_path: Path
) -> None:
    silo = _silo(parse_job(small | {"evaluation": {"batch_size": 5}}), tmp_path)
    labels = [labels for _, labels in silo.batches("test", augment=False, shuffle=False)]
    assert len(labels[0]) == 5
    expected = open_data(parse_job(small), "site-2", None).labels("test")
    np.testing.assert_array_equal(torch.cat(labels).numpy(), expected)
    counts = silo.class_counts("test")
    assert counts.dtype == torch.int64 and counts.tolist() == np.bincount(expected, minlength=8).tolist()


def test_streams_are_keyed_by_their_purpose(small: dict[str, Any], tmp_path: Path) -> None:
    job = parse_job(small)

    def draw(silo: Any, purpose: str) -> float:
        return float(torch.rand((), generator=silo.generator(purpose)))

    silo = _silo(job, tmp_path)
    assert draw(silo, "lite") == draw(silo, "lite")
    others = [
        draw(silo, "other"),
        draw(_silo(job, tmp_path, round_number=2), "lite"),
        draw(_silo(job, tmp_path, site="site-3"), "lite"),
    ]
    assert len({draw(silo, "lite"), *others}) == 4


def test_global_streams_are_left_as_they_were() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with repeatable(7, CPU):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with repeatable(7, CPU):
        assert torch.equal(torch.rand(3), inside)


# ---------------------------------------------------------------- being stopped


def test_an_aborted_run_takes_no_further_batch() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    seen = []
    with pytest.raises(RunError, match=r"^TF-504: .*aborted"):
        for number in guarded(source(), lambda: len(taken) > 3):
            seen.append(number)
    assert seen == [0, 1, 2] and taken == [0, 1, 2, 3]
    assert list(guarded(iter([1, 2]), lambda: False)) == [1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_local_training_ends_when_the_run_is_aborted(
    small: dict[str, Any], tmp_path: Path, workers: int
) -> None:
    questions = []

    def stopped() -> bool:
        questions.append(True)
        return len(questions) > 5

    training = small["training"] | {"epochs": 1000, "batch_size": 8}
    job = parse_job(small | {"training": training, "rounds": 2})
    context = _context(job, tmp_path, stopped=stopped, loader_workers=workers)
    with pytest.raises(RunError, match=r"^TF-504: "):
        message, total, _ = _message(job, "site-2")
        Contributor(context).contribute(message, Peers({"site-2": 1.0}), total=total)
    assert len(questions) == 6, "asked once a batch, and never again after the word"


# ---------------------------------------------------------------- prototypes that stay at home


def _message(job: JobConfig, site: str) -> tuple[dict[str, Any], Total, Any]:
    """A message of round 2 as the coordinator makes it, the total that the silo missed, and the schema."""
    setup = prepare(job)
    (exchange,) = setup.plan.round(2)
    state = class_rules.with_holders(setup.initial_state(), np.full(8, 6.0))
    return asked(setup, exchange, state), missed(setup, exchange), exchange.carrying(True).schema


@pytest.mark.parametrize(
    ("by_site", "by_job", "offered"),
    [
        (True, None, True),
        (False, None, False),  # the site's own word is enough
        (True, ["site-1", "site-2"], True),
        (True, ["site-1"], False),
        (False, ["site-2"], False),  # and no job overrules it
    ],
)
def test_a_site_or_the_job_keeps_prototypes_at_home(
    small: dict[str, Any], tmp_path: Path, by_site: bool, by_job: list[str] | None, offered: bool
) -> None:
    job = parse_job(small | {"method": "fedmr", "prototype_sites": by_job, "rounds": 2})
    message, total, schema = _message(job, "site-2")
    context = _context(job, tmp_path, offer_prototypes=by_site)
    assert LocalSilo(context, prepare(job), CPU, 1).offers_prototypes is offered
    term = Contributor(context).contribute(message, Peers({"site-2": 1.0}), total=total).term
    sums = PlainServer(schema)
    sums.add("site-2", term)
    totals = codec.decode(schema, sums.open(), parties=1)
    counts = np.bincount(context.data.labels("train"), minlength=8)
    assert totals[fedmr.COUNTS].tolist() == (counts.tolist() if offered else [0] * 8)
    assert totals[fedmr.SUMS].any() == offered
    assert totals[class_rules.HOLDERS].tolist() == [float(offered and count > 0) for count in counts]
    assert any(totals[name].any() for name in totals if name.startswith("update/")), "it trains all the same"
