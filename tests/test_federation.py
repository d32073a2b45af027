"""A whole run in one process: reproducible, k of n, files, best round, silo state."""

from __future__ import annotations

import gc
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.runs import Few, few_twins

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import DataError, JobError, RunError, SiteConfigError, TrainingError
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession

SMALL: dict[str, Any] = {
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "model_options": {"widths": [8, 8, 8]},
    "seed": 3,
    "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.05},
}
PLAIN: dict[str, Any] = {**SMALL, "summation": "plain"}
"""Where the sums are not the subject; secure ones have the same bits."""
SILOS = ["site-2", "site-3", "site-4", "site-5"]


def _models_equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", autouse=True)
def few_records() -> Iterator[None]:
    """Silos that are named have every fifth record of their twins."""
    with few_twins():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[federation.Result, Path]:
    folder = tmp_path_factory.mktemp("run")
    return federation.run("fedmr", SILOS, 2, folder=folder, **SMALL), folder


@pytest.mark.whole
def test_same_seed_same_model_other_seed_other_model(finished: tuple[federation.Result, Path]) -> None:
    first = finished[0].state.model
    assert _models_equal(first, federation.run("fedmr", SILOS, 2, **PLAIN).state.model)
    assert not _models_equal(first, federation.run("fedmr", SILOS, 2, **(PLAIN | {"seed": 4})).state.model)


@pytest.mark.whole
def test_files_of_the_server(finished: tuple[federation.Result, Path]) -> None:
    result, folder = finished
    server = folder / "server"
    assert _models_equal(load_file(server / "model.safetensors"), dict(sorted(result.state.model.items())))
    card = json.loads((server / "model.json").read_text())
    assert card["synthetic"] is True and "SYNTHETIC" in card["data"]
    assert card["best_round_by_validation"] in (1, 2)
    rows = [json.loads(line) for line in (server / "metrics.jsonl").read_text().splitlines()]
    assert [(row["round"], row["kind"]) for row in rows] == [
        (0, "start"),
        (1, "train"),
        (2, "train"),
        (2, "closing"),
    ]
    for row in rows[:3]:
        assert 0 <= row["balanced_accuracy"] <= 1 and 0 <= row["auroc"] <= 1
        assert set(row["recall"]) == {"MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"}
    assert rows[1]["training"]["loss"] > 0 and rows[1]["bytes_up"] > 0 and rows[1]["silos"] == SILOS
    validation = [row["evaluation"]["validation"]["balanced_accuracy"] for row in rows[1:3]]
    assert card["best_round_by_validation"] == int(np.argmax(validation)) + 1
    best = load_file(server / "best_model.safetensors")
    if card["best_round_by_validation"] == 2:
        assert _models_equal(best, dict(sorted(result.state.model.items())))
    else:
        assert not _models_equal(best, dict(sorted(result.state.model.items())))


@pytest.mark.whole
def test_files_of_a_silo(finished: tuple[federation.Result, Path]) -> None:
    result, folder = finished
    report = json.loads((folder / "site-2" / "local_report.json").read_text())
    assert _models_equal(
        load_file(folder / "site-2" / "model.safetensors"), dict(sorted(result.state.model.items()))
    )
    assert report["local_only"] is None
    assert report["global"]["test"]["records"] == sum(report["records"]["test"].values())
    assert (folder / "site-2" / "local_report.json").stat().st_mode & 0o077 == 0


@pytest.mark.whole
def test_pooled_test_metrics_are_the_sum_of_the_silos(finished: tuple[federation.Result, Path]) -> None:
    """The evaluation through sums equals the evaluation of the final model on all test records."""
    from sklearn.metrics import accuracy_score, balanced_accuracy_score

    from tightframe.data import get

    result, _ = finished
    spec = get("fed_isic2019")
    options = spec.options.model_validate({"image_size": 16})
    setup = prepare(
        parse_job(
            {
                "job_name": "x",
                "method": "fedmr",
                "model": "small_cnn",
                "sites": SILOS,
                "min_sites": 4,
                "rounds": 2,
                **SMALL,
            }
        )
    )
    model = setup.setting.build_model()
    model.load_state_dict(dict(result.state.model))
    model.eval()
    truth, predicted = [], []
    for centre in range(len(SILOS)):
        records = Few(spec.twin(centre, options)).records("test")  # type: ignore[misc]
        for x, y in records:
            truth.append(int(y))
            predicted.append(int(model(x[None]).argmax()))
    final = result.outcome.final()
    assert final is not None and final.evaluation is not None and final.evaluated_by == SILOS
    test = final.evaluation.test
    assert test.accuracy == pytest.approx(accuracy_score(truth, predicted), abs=1e-12)
    assert test.balanced_accuracy == pytest.approx(balanced_accuracy_score(truth, predicted))


@pytest.mark.whole
def test_fedavg_is_the_weighted_mean_of_the_silos_models(tmp_path: Path) -> None:
    """One round over all silos equals averaging one-silo runs by their numbers of records.

    Only plain sums are open for one silo, so those ask for them; the round over all is a secure sum.
    """
    together = federation.run("fedavg", SILOS, 1, **SMALL)
    weights = together.outcome.rows[1]
    job = parse_job(
        {
            "job_name": "x",
            "method": "fedavg",
            "model": "small_cnn",
            "sites": SILOS,
            "min_sites": 1,
            "rounds": 1,
            "summation": "plain",
            **SMALL,
        }
    )
    alone: dict[str, Mapping[str, torch.Tensor]] = {}
    sizes: dict[str, float] = {}
    for site in SILOS:
        transport = _Failing(job, {other: RunError("off", code="TF-503") for other in SILOS if other != site})
        coordinator = Coordinator(prepare(job), tmp_path / site)
        alone[site] = coordinator.run(transport).state.model
        sizes = dict(coordinator.weights)
    assert len(weights.silos) == len(SILOS)
    total = sum(sizes.values())
    for name, value in together.state.model.items():
        expected = sum(alone[site][name].double() * sizes[site] / total for site in SILOS)
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=5e-7)


class _Failing(federation.LocalTransport):
    """Some silos fail in ``contribute``; from a given round on, or in all.

    Over plain sums: what secure sums do about drop-outs is tested in ``tests/rounds/secure``.
    """

    def __init__(
        self, job: JobConfig, errors: Mapping[str, Exception], rounds: tuple[int, ...] | None = None
    ) -> None:
        import logging
        import tempfile

        folder = Path(tempfile.mkdtemp())
        sessions = {s: SiloSession(SiloContext(s, job, None, run_dir=folder / s)) for s in job.roster}
        super().__init__(sessions, logging.getLogger("test"))
        self._errors, self._rounds = errors, rounds
        self.job = job

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Any) -> Mapping[str, str]:
        kept = dict(requests)
        failed = {}
        if task == "contribute":
            for site, error in self._errors.items():
                number = next(iter(requests.values()))["round"]
                kind = next(iter(requests.values()))["kind"]
                if self._rounds is None or (number in self._rounds and kind == "train"):
                    kept.pop(site, None)
                    failed[site] = getattr(error, "code", "TF-503")
        return {**super().exchange(task, kept, accept), **failed}


def _job(**changes: Any) -> JobConfig:
    """A job of plain sums, as ``_Failing`` serves them."""
    return parse_job(
        {
            "job_name": "x",
            "method": "fedmr",
            "model": "small_cnn",
            "sites": SILOS,
            "min_sites": 3,
            "rounds": 2,
            "summation": "plain",
        }
        | SMALL
        | changes
    )


@pytest.mark.whole
def test_a_round_goes_on_without_a_silo_and_it_comes_back(tmp_path: Path) -> None:
    job = _job()
    transport = _Failing(job, {"site-3": TrainingError("nan")}, rounds=(1,))
    result = Coordinator(prepare(job), tmp_path).run(transport)
    rows = result.outcome.rows
    assert rows[1].dropped == {"site-3": "TF-301"} and "site-3" not in rows[1].silos
    assert rows[2].dropped == {} and "site-3" in rows[2].silos
    assert "site-3 was left out of round 1: TF-301" in result.outcome.screen()


@pytest.mark.whole
def test_fewer_than_the_minimum_end_the_run_with_names(tmp_path: Path) -> None:
    job = _job()
    transport = _Failing(
        job, {"site-3": TrainingError("nan"), "site-5": RunError("late", code="TF-502")}, rounds=(2,)
    )
    with pytest.raises(
        RunError, match=r"round 2.*at least 3.*got 2.*site-3: TF-301.*site-5: TF-502"
    ) as caught:
        Coordinator(prepare(job), tmp_path).run(transport)
    assert caught.value.code == "TF-501"
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["trained"] is False and outcome["rounds_done"] == 1
    assert (tmp_path / "checkpoint.safetensors").is_file(), "what was trained until then is kept"


def test_a_silo_that_refuses_at_enrolment_ends_the_run_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job()
    transport = _Failing(job, {})

    def broken(*_: object) -> None:
        raise DataError("17 images are missing", code="TF-205")

    monkeypatch.setattr(transport._sessions["site-4"].context.data, "check", broken)
    with pytest.raises(RunError, match="TF-509: before any training, site-4 refused: TF-205"):
        Coordinator(prepare(job), tmp_path).run(transport)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_another_job_at_a_silo_is_refused(tmp_path: Path) -> None:
    transport = _Failing(_job(seed=5), {})
    with pytest.raises(RunError, match="TF-505"):
        Coordinator(prepare(_job()), tmp_path).run(transport)


@pytest.mark.whole
def test_nothing_of_a_failing_silo_but_a_flag_is_in_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job()
    private = "patient Mustermann"
    transport = _Failing(job, {})
    records = transport._sessions["site-3"].context.data.records

    def broken(fold: Any, *, augment_seed: int | None = None) -> Any:
        if augment_seed is not None and not (tmp_path / "checkpoint.safetensors").exists():
            raise RuntimeError(private)
        return records(fold, augment_seed=augment_seed)

    monkeypatch.setattr(transport._sessions["site-3"].context.data, "records", broken)
    result = Coordinator(prepare(job), tmp_path).run(transport)
    assert [row.dropped for row in result.outcome.rows] == [{}] * len(result.outcome.rows)
    assert [row.counts.get("failed_silos") for row in result.outcome.rows[:3]] == [None, 1, None]
    screen = result.outcome.screen()
    assert f"{len(SILOS)} of {len(SILOS)} answered in every round" in screen
    assert "contributed nothing: 1 in round 1; which, and why, is in their own logs" in screen
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or private.encode() not in path.read_bytes()


@pytest.mark.whole
def test_metrics_say_who_counted_them_and_partial_ones_choose_no_best_model(tmp_path: Path) -> None:
    """The model of round 1 is counted in round 2, where a silo drops out."""
    job = _job(rounds=3)
    result = Coordinator(prepare(job), tmp_path).run(
        _Failing(job, {"site-4": RunError("late", code="TF-502")}, rounds=(2,))
    )
    rows = result.outcome.rows
    assert rows[1].silos == SILOS and rows[1].evaluated_by == [s for s in SILOS if s != "site-4"]
    assert rows[2].evaluated_by == SILOS
    assert result.outcome.best_round_by_validation in (2, 3), "round 1 was not counted by everybody"


def test_a_closing_without_enough_silos_keeps_the_model_and_says_so(tmp_path: Path) -> None:
    job = _job(rounds=1)

    class NobodyCloses(_Failing):
        def exchange(self, task: str, requests: Mapping[str, Message], accept: Any) -> Mapping[str, str]:
            if next(iter(requests.values())).get("kind") == "closing":
                return dict.fromkeys(requests, "TF-502")
            return super().exchange(task, requests, accept)

    Coordinator(prepare(job), tmp_path).run(NobodyCloses(job, {}))
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["status"] == "trained, not measured" and outcome["trained"] is True
    assert outcome["evaluation"] is None
    assert any("TF-501: too few silos in closing" in note for note in outcome["notes"])
    assert outcome["dropped"][-1] == {"round": 1, "kind": "closing", "silos": dict.fromkeys(SILOS, "TF-502")}
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.whole
def test_an_abort_during_the_baselines_takes_nothing_back(tmp_path: Path) -> None:
    job = _job(rounds=1, local_baseline_epochs=1)

    class AbortedLate(_Failing):
        def exchange(self, task: str, requests: Mapping[str, Message], accept: Any) -> Mapping[str, str]:
            if task == "baseline":
                raise RunError("aborted", code="TF-504")
            return super().exchange(task, requests, accept)

    assert Coordinator(prepare(job), tmp_path).run(AbortedLate(job, {})).outcome.trained
    assert json.loads((tmp_path / "outcome.json").read_text())["reason"] is None


@pytest.mark.whole
def test_after_a_lasting_loss_the_best_round_is_chosen_among_the_others(tmp_path: Path) -> None:
    job = _job(rounds=5)
    gone = _Failing(job, {"site-4": RunError("dead", code="TF-502")}, rounds=(2, 3, 4, 5, 6))
    result = Coordinator(prepare(job), tmp_path).run(gone)
    # Round 1 is counted in round 2, so by three silos from the start; round 5 by all in the closing.
    validation = {
        row.round: row.evaluation.validation.balanced_accuracy
        for row in result.outcome.rows
        if row.evaluation and row.kind == "train"
    }
    assert result.outcome.best_round_by_validation == 5, "counted by more silos than any before"
    partial = {number: value for number, value in validation.items() if number < 5}
    assert len(partial) == 4


@pytest.mark.whole
def test_a_failing_baseline_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightframe.rounds.silo.contribute import Contributor

    def broken(self: Contributor) -> Message:
        raise TrainingError("diverged")

    monkeypatch.setattr(Contributor, "baseline", broken)
    result = federation.run("fedavg", SILOS[:3], 1, folder=tmp_path, local_baseline_epochs=1, **PLAIN)
    assert result.outcome.trained
    assert json.loads((tmp_path / "site-2" / "local_report.json").read_text())["local_only"] is None


@pytest.mark.whole
def test_a_silo_that_keeps_its_prototypes_changes_only_them(
    finished: tuple[federation.Result, Path],
) -> None:
    """Under the class rules the first sum tells who holds which class, and the second has class sums."""
    all_in = finished[0]
    without = federation.run("fedmr", SILOS, 2, prototype_sites=SILOS[:3], **PLAIN)
    assert _models_equal(all_in.state.model, without.state.model), "both rounds train without prototypes"
    assert not torch.equal(all_in.state.extra["prototypes"], without.state.extra["prototypes"])
    assert without.state.extra["prototypes"].any(), "three silos are enough for a class"
    too_few = federation.run("fedmr", SILOS, 2, prototype_sites=SILOS[:2], **PLAIN)
    assert _models_equal(all_in.state.model, too_few.state.model)
    assert not too_few.state.extra["prototypes"].any(), "two are not: a class sum would be nearly one's own"


@pytest.mark.whole
def test_without_the_class_rules_two_silos_prototypes_are_used_and_at_once() -> None:
    all_in, without = (
        federation.run("fedmr", SILOS, 1, prototype_sites=sites, class_rules="off", **PLAIN)
        for sites in (None, SILOS[:2])
    )
    assert _models_equal(all_in.state.model, without.state.model), "round 1 trains without prototypes"
    assert not torch.equal(all_in.state.extra["prototypes"], without.state.extra["prototypes"])
    assert without.state.extra["prototypes"].any()


@pytest.mark.whole
def test_local_only_baseline_is_reported_at_the_silo(tmp_path: Path) -> None:
    federation.run("fedavg", SILOS[:3], 1, folder=tmp_path, local_baseline_epochs=1, **PLAIN)
    report = json.loads((tmp_path / "site-2" / "local_report.json").read_text())
    assert report["local_only"]["epochs"] == 1
    assert report["local_only"]["test"]["records"] == report["global"]["test"]["records"]
    assert report["local_only"]["test"]["loss"] != report["global"]["test"]["loss"]


@pytest.mark.parametrize("named", [False, True], ids=["not named", "named by the job"])
def test_a_pretrained_start_that_is_not_there_is_told_by_name(tmp_path: Path, named: bool) -> None:
    job = _job(rounds=1, **({"initial_model_sha256": "0" * 64} if named else {}))
    with pytest.raises(SiteConfigError, match=r"TF-202.*no-such-file"):
        federation.run_job(job, folder=tmp_path / "run", initial_model=str(tmp_path / "no-such-file"))


@pytest.mark.whole
def test_pretrained_start_is_used_and_its_hash_recorded(tmp_path: Path, finished: tuple[Any, Path]) -> None:
    import hashlib

    start = finished[1] / "server" / "model.safetensors"
    job = _job(rounds=1, summation="secure")
    federation.run_job(job, folder=tmp_path, initial_model=str(start))
    card = json.loads((tmp_path / "server" / "model.json").read_text())
    assert card["initial_model"]["sha256"] == hashlib.sha256(start.read_bytes()).hexdigest()
    rows = [json.loads(line) for line in (tmp_path / "server" / "metrics.jsonl").read_text().splitlines()]
    finished_rows = finished[0].outcome.rows
    assert rows[0]["balanced_accuracy"] == finished_rows[2].as_json()["balanced_accuracy"]


@pytest.mark.whole
def test_update_norm_bounds_the_update() -> None:
    start = federation.run("fedavg", SILOS, 1, **PLAIN, update_norm=1e-9).state.model
    short = federation.run("fedavg", SILOS, 1, **PLAIN, update_norm=0.1).state.model
    moved = torch.cat([(short[name] - start[name]).double().reshape(-1) for name in short])
    assert 0.0 < float(moved.norm()) <= 0.1 * (1 + 2**-10) + 1e-6


def test_wrong_values_are_named() -> None:
    with pytest.raises(JobError, match="bogus"):
        federation.run("fedavg", SILOS, 1, bogus=1, **SMALL)


def test_all_problems_of_a_call_come_at_once() -> None:
    """Values, names and their options, as of a job folder."""
    with pytest.raises(JobError) as caught:
        wrong = SMALL | {"model_options": {"width": [8]}, "training": {"epochs": 0}}
        federation.run("fedxyz", SILOS, 0, bogus=1, **wrong)
    told = str(caught.value)
    for part in (
        "rounds:",
        "bogus:",
        "training.epochs:",
        "method: Expected a method of",
        "model_options.width",
    ):
        assert part in told


def test_a_run_in_one_process_does_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two rounds and four silos took three seconds, of which half were waits."""

    def wait(descriptor: int) -> None:
        raise AssertionError("waits for the disk")

    monkeypatch.setattr(os, "fsync", wait)
    opened: list[object] = []
    connect = sqlite3.connect

    class Connection(sqlite3.Connection):
        def close(self) -> None:
            opened.append(self.execute("PRAGMA synchronous").fetchone()[0])
            super().close()

    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **kwargs: connect(*args, **kwargs, factory=Connection)
    )
    federation.run("fedavg", SILOS, 1, **SMALL)
    assert set(opened) == {0}


@pytest.mark.whole
def test_a_temporary_folder_lasts_as_long_as_the_outcome(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        result = federation.run("fedavg", SILOS, 1, **SMALL)
    outcome = result.outcome
    del result
    folder = outcome.folder.parent
    assert f"Files: {folder / 'server'} (temporary: folder=... keeps them)" in outcome.screen()
    assert (folder / "site-2" / "local_report.json").is_file(), "the log has said so"
    assert str(folder / "site-2" / "local_report.json") in caplog.text
    assert "hand over a mapping from silo names to opened records" in caplog.text
    del outcome
    gc.collect()
    assert not folder.exists()


def test_a_temporary_folder_does_not_outlive_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RunError, match="TF-201"):  # no records, and nothing that could stand in for them
        federation.run("fedavg", SILOS, 1, dataset="mnist", dataset_options={"silos": 4})
    assert list(tmp_path.iterdir()) == []
