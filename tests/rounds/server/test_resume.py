"""A stopped run, gone on with: the same model bit for bit; what is refused; what the silos keep and lose."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from tests.support.jobs import HEART
from tests.support.ledgers import charges_of
from tests.support.runs import heart

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.errors import JobError, RunError
from tightframe.files import file_sha256
from tightframe.privacy import accounting
from tightframe.privacy.ledger.entries import Charge
from tightframe.results.files import CHECKPOINT
from tightframe.results.rows import Row
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import RESUMED, VERIFIED, Notes, note_verified
from tightframe.rounds.server import resume
from tightframe.rounds.server.record import RunRecord
from tightframe.rounds.silo import own_state as state
from tightframe.rounds.silo.own_state import SiloStateStore
from tightframe.rounds.state_files import PACE, REHEARSAL
from tightframe.rounds.sums.secure_server import SecureSums
from tightframe.securesum import transcript
from tightframe.securesum.identity import Anchor
from tightframe.securesum.messages import SumId

SITES = ["site-1", "site-2", "site-3", "site-4"]
JOB = {**HEART, "job_name": "stopped", "rounds": 4}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The runs that are stopped here on purpose fill no screen."""
    caplog.set_level(logging.CRITICAL, logger="tightframe.run")


class PulledPlugError(Exception):
    """What a server that is killed does not even get to raise."""


def stop_in(number: int) -> Callable[[Row], None]:
    """Stops a run in a round: its sum is opened and the model made, but no checkpoint written."""

    def stop(row: Row) -> None:
        if row.kind == "train" and row.round == number:
            raise PulledPlugError

    return stop


def job(**changes: Any) -> JobConfig:
    return parse_job({**JOB, **changes})


def run_job(wanted: JobConfig, **named: Any) -> federation.Result:
    """A run of few records."""
    return federation.run_job(wanted, data={site: heart(site) for site in wanted.roster}, **named)


def stopped(wanted: JobConfig, folder: Path, *, number: int = 3) -> JobConfig:
    """A run that is stopped in a round, and the job that goes on with it."""
    with pytest.raises(PulledPlugError):
        run_job(wanted, folder=folder, on_round=stop_in(number))
    return resume.next_job(folder / "server" / CHECKPOINT)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "server" / "metrics.jsonl").read_text().splitlines()
    unlike = ("seconds", "bytes_down", "bytes_up")
    return [{key: value for key, value in json.loads(line).items() if key not in unlike} for line in lines]


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def job_id(folder: Path) -> str:
    return resume.read(folder / "server" / CHECKPOINT)[1].job_id


@dataclass
class Stopped:
    """A run of FedMR that was stopped in round 3."""

    job: JobConfig
    next: JobConfig
    folder: Path


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    return Stopped(job(), stopped(job(), folder), folder)


@dataclass
class Both:
    """The unbroken run of a job and the resumed one, in folders of these names, with what is watched."""

    whole: federation.Result
    resumed: federation.Result
    folder: Path
    courses: list[Any]


def both(wanted: JobConfig, next_job: JobConfig, before: Path, folder: Path) -> Both:
    courses: list[Any] = []
    finish = RunRecord.finish

    def finished(self: RunRecord, reason: str | None) -> Any:
        courses.append(self.status.course)
        return finish(self, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecord, "finish", finished)
        whole = run_job(wanted, folder=folder / "whole")
        resumed = run_job(next_job, folder=folder / "resumed", stopped=before)
    return Both(whole, resumed, folder, courses)


@pytest.fixture(scope="module")
def mended(broken: Stopped, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return both(broken.job, broken.next, broken.folder, tmp_path_factory.mktemp("mended"))


def _check_ends_alike(made: Both) -> None:
    found, whole = made.resumed, made.whole
    assert same(found.state.model, whole.state.model) and same(found.state.extra, whole.state.extra)
    assert rows(made.folder / "resumed") == rows(made.folder / "whole")
    assert found.outcome.best_round_by_validation == whole.outcome.best_round_by_validation
    for name in ("model.safetensors", "best_model.safetensors"):
        ours, theirs = (made.folder / run / "server" / name for run in ("resumed", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_resumed_run_ends_as_the_unbroken_one_bit_for_bit(mended: Both) -> None:
    _check_ends_alike(mended)


@pytest.mark.parametrize(("method", "summation"), [("scaffold", "secure"), ("moon", "plain")])
def test_so_does_one_whose_silos_keep_a_state_of_their_own(
    method: str, summation: str, tmp_path: Path
) -> None:
    wanted = job(method=method, summation=summation)
    _check_ends_alike(both(wanted, stopped(wanted, tmp_path / "broken"), tmp_path / "broken", tmp_path))


def test_whoever_watches_a_resumed_run_sees_its_earlier_rounds(mended: Both) -> None:
    whole, resumed = mended.courses
    assert resumed == whole and [item.round for item in whole] == [0, 1, 2, 3, 4]


def test_a_chain_keeps_its_lineage_and_the_silos_may_be_a_phase_ahead(tmp_path: Path) -> None:
    """Stopped twice, and once more before the resumed run has done a round."""
    wanted = job(method="scaffold")
    whole = run_job(wanted, folder=tmp_path / "whole")
    second = stopped(wanted, tmp_path / "1", number=2)
    with pytest.raises(PulledPlugError):
        run_job(second, folder=tmp_path / "2", stopped=tmp_path / "1", on_round=stop_in(2))
    assert not (tmp_path / "2" / "server" / CHECKPOINT).exists()
    with pytest.raises(PulledPlugError):
        run_job(second, folder=tmp_path / "3", stopped=tmp_path / "1", on_round=stop_in(4))
    third = resume.next_job(tmp_path / "3" / "server" / CHECKPOINT)
    assert second.resume is not None and third.resume is not None
    assert third.resume.lineage == second.resume.lineage == job_id(tmp_path / "1")
    assert (third.resume.previous, third.resume.after_round) == (job_id(tmp_path / "3"), 3)
    found = run_job(third, folder=tmp_path / "4", stopped=tmp_path / "3")
    assert same(found.state.model, whole.state.model)


def test_the_transcript_of_a_resumed_run_is_valid_and_names_the_first_job(
    broken: Stopped, tmp_path: Path
) -> None:
    run_job(broken.next, folder=tmp_path, stopped=broken.folder)
    pem = (tmp_path / "server" / "simulated_root.pem").read_bytes()
    from cryptography.hazmat.primitives.serialization import Encoding

    anchor = Anchor(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))
    for path in (tmp_path / "server" / "transcript.jsonl", tmp_path / "site-1" / "transcript.jsonl"):
        report = transcript.verify(path.read_bytes().splitlines(keepends=True), anchor)
        assert [epoch.params.lineage for epoch in report.epochs] == [job_id(broken.folder)]
        assert report.job != job_id(broken.folder)
    rounds = [item.sum_id.round for item in report.sums if not item.sum_id.phase.startswith("seal")]
    assert min(rounds) == 3, "what was done is not asked for again"


def test_a_server_that_lies_about_the_lineage_is_refused(
    broken: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    honest = SecureSums._params
    monkeypatch.setattr(
        SecureSums, "_params", lambda self, roster: replace(honest(self, roster), lineage="another")
    )
    for wanted, before in ((broken.job, None), (broken.next, broken.folder)):
        with pytest.raises(RunError, match="TF-601"):
            run_job(wanted, folder=tmp_path, stopped=before)


def test_counts_stay_shut_for_another_cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = federation.LocalTransport.exchange

    def without_the_fourth(self: Any, task: str, requests: Any, accept: Any) -> Any:
        kept = {site: request for site, request in requests.items() if site != "site-4"}
        lost = {"site-4": "TF-502"} if "site-4" in requests else {}
        return {**exchange(self, task, kept, accept), **lost}

    wanted = job(sites=SITES, rounds=3, min_sites=3)
    going_on = stopped(wanted, tmp_path / "again", number=2)
    monkeypatch.setattr(federation.LocalTransport, "exchange", without_the_fourth)
    found = run_job(going_on, folder=tmp_path / "resumed", stopped=tmp_path / "again")
    assert not any(row.static_opened for row in found.outcome.rows if row.round > 1)
    assert found.outcome.final() is None, "the evaluation is a count, too"


def test_a_silo_that_was_not_enrolled_stays_out_and_counts_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the unbroken run, although the silo is back by then."""
    exchange, away = federation.LocalTransport.exchange, ["site-4"]

    def without(self: Any, task: str, requests: Any, accept: Any) -> Any:
        kept = {site: request for site, request in requests.items() if site not in away}
        return {**exchange(self, task, kept, accept), **{site: "TF-502" for site in requests if site in away}}

    monkeypatch.setattr(federation.LocalTransport, "exchange", without)
    wanted = job(sites=SITES, rounds=3)
    whole = run_job(wanted, folder=tmp_path / "whole")
    going_on = stopped(wanted, tmp_path / "broken", number=2)
    away.clear()
    found = run_job(going_on, folder=tmp_path / "resumed", stopped=tmp_path / "broken")
    assert same(found.state.model, whole.state.model)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    assert found.outcome.not_enrolled == whole.outcome.not_enrolled == {"site-4": "TF-502"}
    assert found.outcome.final() is not None


@pytest.mark.parametrize("wrong", ["other hash", "torn", "missing", "other job", "done more"])
def test_a_wrong_checkpoint_is_named_before_any_task(wrong: str, broken: Stopped, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    shutil.copytree(broken.folder, folder)
    path, going_on, code = folder / "server" / CHECKPOINT, broken.next, "TF-521"
    assert going_on.resume is not None
    if wrong == "missing":
        path.unlink()
    elif wrong == "other job":
        going_on = going_on.model_copy(update={"seed": 4})
    elif wrong == "done more":
        later = going_on.resume.model_copy(update={"after_round": 3})
        going_on = going_on.model_copy(update={"resume": later})
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    if wrong == "torn":
        code = "TF-507"
        named = going_on.resume.model_copy(update={"checkpoint_sha256": file_sha256(path)})
        going_on = going_on.model_copy(update={"resume": named})
    with pytest.raises(RunError, match=code):
        run_job(going_on, folder=tmp_path / "resumed", stopped=folder)
    assert not any((tmp_path / "resumed").glob("site-*")), "no silo was asked for anything"


def test_a_cut_checkpoint_and_one_of_another_format_are_named(broken: Stopped, tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    data = (broken.folder / "server" / CHECKPOINT).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RunError, match="TF-507"):
        resume.next_job(path)
    for other in (b"1", b"4"):
        path.write_bytes(data.replace(b'\\"format\\": 3', b'\\"format\\": ' + other, 1))
        with pytest.raises(RunError, match=r"TF-521.*format 3, but got " + other.decode()):
            resume.next_job(path)


def test_a_job_goes_on_with_rounds_that_it_has(broken: Stopped) -> None:
    assert broken.next.resume is not None
    values = broken.next.model_dump()
    with pytest.raises(JobError, match=r"resume\.after_round"):
        parse_job({**values, "resume": {**values["resume"], "after_round": 5}})
    for name in ("../elsewhere", "/etc", "", ".", "a/b"):
        with pytest.raises(JobError, match=r"resume\.previous"):
            parse_job({**values, "resume": {**values["resume"], "previous": name}})


def test_a_silo_that_lost_its_state_is_refused_not_begun_anew(tmp_path: Path) -> None:
    wanted = job(method="moon")
    going_on = stopped(wanted, tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "site-2" / "silo_state")
    with pytest.raises(RunError, match=r"site-2: TF-522"):
        run_job(going_on, folder=tmp_path / "resumed", stopped=tmp_path / "broken")


def test_a_silo_without_state_goes_on_where_the_method_keeps_none(broken: Stopped, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    shutil.copytree(broken.folder, folder)
    shutil.rmtree(folder / "site-2" / "silo_state")
    assert run_job(broken.next, folder=tmp_path / "resumed", stopped=folder).outcome.trained


def test_a_silo_that_had_no_part_before_begins_without_state(tmp_path: Path) -> None:
    store = SiloStateStore(tmp_path, "new")
    (tmp_path / state.LOST).write_bytes(b"")
    store.settle({"0/statistics-0/0": ["new"], "1/train-0/0": ["a"], "2/train-0/0": ["a"]})
    store.propose(SumId(3, "train-0"), {"c": torch.tensor([1.0])})
    store.settle({"3/train-0/0": ["a", "new"]})
    assert store.committed()["c"].tolist() == [1.0]


def _state(folder: Path, wanted: JobConfig, name: str = "first") -> tuple[SiloContext, SiloStateStore]:
    context = SiloContext("a", wanted, None, run_dir=folder, job_id=name)
    state.begin(context)
    return context, SiloStateStore(context.state_folder, "a")


def _commit(store: SiloStateStore, *sums: SumId) -> None:
    for sum_id in sums:
        store.propose(sum_id, {"c": torch.tensor([sum_id.round + sum_id.phase.endswith("1") / 2])})
        store.settle({str(sum_id): ["a"]})


def _later(folder: Path, first: SiloContext, after: int) -> SiloContext:
    """The silo in the job that goes on behind a round."""
    values = {"lineage": "first", "previous": "first", "after_round": after, "checkpoint_sha256": "0" * 64}
    going_on = parse_job({**JOB, "resume": values})
    return SiloContext("a", going_on, None, folder, previous_state=first.state_folder, job_id="second")


@pytest.mark.parametrize(
    ("after", "expected"), [(3, 3.5), (2, 2.0), (1, None)], ids=["as far", "a round ahead", "two ahead"]
)
def test_a_silo_goes_back_to_where_the_checkpoint_is(
    after: int, expected: float | None, tmp_path: Path
) -> None:
    """Two sums a round: the state kept beside the newest is of the round before, not of the sum before."""
    first, store = _state(tmp_path / "first", job())
    _commit(store, SumId(2, "train-0"), SumId(3, "train-0"), SumId(3, "train-1"))
    store.propose(SumId(4, "train-0"), {"c": torch.tensor([4.0])})
    later = _later(tmp_path / "next", first, after)
    if expected is None:
        with pytest.raises(RunError, match="TF-522"):
            state.begin(later)
        return
    state.begin(later)
    resumed = SiloStateStore(later.state_folder, "a")
    # The stopped job has summed round 4, too; the resumed one must not take that for its own.
    resumed.settle({"4/train-0/0": ["a"]})
    assert resumed.committed()["c"].item() == expected
    assert store.committed()["c"].item() == 3.5, "the stopped job's own state is as it was"


@pytest.mark.parametrize("step", [1, 2])
def test_a_silo_that_is_killed_while_it_commits_keeps_its_state(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, store = _state(tmp_path / "first", job())
    _commit(store, SumId(2, "train-0"))
    store.propose(SumId(3, "train-0"), {"c": torch.tensor([3.0])})
    renamed = []

    def die(*names: Path) -> None:
        renamed.append(names)
        if len(renamed) == step:
            raise PulledPlugError
        os.rename(*names)

    with monkeypatch.context() as patched, pytest.raises(PulledPlugError):
        patched.setattr(os, "replace", die)
        store.settle({"3/train-0/0": ["a"]})
    later = _later(tmp_path / "next", first, after=2)
    state.begin(later)
    assert SiloStateStore(later.state_folder, "a").committed()["c"].item() == 2.0
    store.settle({"3/train-0/0": ["a"]})
    assert store.committed()["c"].item() == 3.0, "told once more"
    assert not list(first.state_folder.glob(".*"))


def test_a_note_that_a_crash_left_torn_does_not_hide_where_a_resumed_job_begins(tmp_path: Path) -> None:
    first, _ = _state(tmp_path / "first", job())
    note_verified(first.state_folder, bytes(32), SumId(1, "train-0"))
    noted = Notes.read(first.state_folder)
    with (first.state_folder / VERIFIED).open("a") as stream:
        stream.write("total:00")
    later = _later(tmp_path / "next", first, after=1)
    state.begin(later)
    assert Notes.read(later.state_folder).jobs == (noted, Notes())


def test_a_silos_state_is_for_the_same_job_alone_and_the_salt_for_none(tmp_path: Path) -> None:
    first, _ = _state(tmp_path / "first", job())
    (first.state_folder / "salt").write_text("secret")
    (first.state_folder / f"{REHEARSAL}left" / "silo_state").mkdir(parents=True)
    (first.state_folder / PACE).write_text("how long trainings took")
    note_verified(first.state_folder, bytes(32), SumId(1, "train-0"))
    values = {"lineage": "first", "previous": "first", "after_round": 1, "checkpoint_sha256": "0" * 64}
    for changes in ({"seed": 4}, {"resume": {**values, "lineage": "another"}}):
        changed = parse_job({**JOB, "resume": values, **changes})
        later = SiloContext("a", changed, None, tmp_path / "next", previous_state=first.state_folder)
        with pytest.raises(RunError, match="TF-521"):
            state.begin(later)
    later = SiloContext(
        "a",
        parse_job({**JOB, "resume": values}),
        None,
        tmp_path / "next",
        previous_state=first.state_folder,
        production=True,
    )
    state.begin(later)
    assert later.salt() != ("secret",), "no two jobs repeat a silo's updates bit for bit"
    assert (later.state_folder / PACE).read_text() == "how long trainings took"
    verified = (later.state_folder / VERIFIED).read_text().splitlines()
    assert len(verified) == 2 and verified[-1] == RESUMED
    assert not list(later.state_folder.glob(f"{REHEARSAL}*")), "nor what a killed process has left"


def test_what_is_done_is_not_charged_again_and_what_is_repeated_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    privacy = {"epsilon": 60.0, "noise_multiplier": 1.5, "spare_rounds": 1}
    training = {**JOB["training"], "batch_size": 512}  # every record in every step: cheap to account for
    plain = {"summation": "plain", "weights": "uniform", "model_options": {"widths": [4]}}
    plain |= {"sites": SITES[:1], "min_sites": 1}  # each asks a ledger of its own
    wanted = job(method="fedetf", rounds=3, privacy=privacy, training=training, **plain)
    going_on = stopped(wanted, tmp_path / "broken", number=2)
    run_job(going_on, folder=tmp_path / "resumed", stopped=tmp_path / "broken")
    charges = charges_of(tmp_path / "resumed", "site-1")
    assert {item.job_id for item in charges} == {job_id(tmp_path / "broken")}

    def attempts(purpose: str) -> list[int]:
        found: list[Charge] = [item for item in charges if item.purpose == purpose]
        return [item.attempt for item in found]

    assert attempts("class counts") == [0], "drawn once, for the whole chain"
    assert [attempts(f"round {number} training") for number in (1, 2, 3)] == [[0], [0, 1], [0]]
