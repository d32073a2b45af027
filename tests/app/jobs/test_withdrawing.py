"""``tightframe jobs export NAME --withdraw-from DIR``, and what ``tightframe site check`` says of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.rounds.server import resume
from tightframe.rounds.state_files import STATE
from tightframe_app.jobs import folders
from tightframe_app.site.checks.findings import Scope
from tightframe_app.site.checks.job import check_history

Typed = Callable[..., tuple[object, str, str]]
JOB = {
    "job_name": "our_study",
    "dataset": "digits",
    "dataset_options": {"silos": 3, "subset": 300},
    "model": "mlp",
    "model_options": {"widths": []},
    "sites": ["a", "b", "c"],
    "min_sites": 3,
    "rounds": 1,
}


def ended_run(folder: Path, method: str) -> Path:
    federation.run_job(parse_job({**JOB, "method": method}), folder=folder)
    return folder / "server"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's results of a run of one sum."""
    return ended_run(tmp_path_factory.mktemp("ended"), "fedncm")


@pytest.mark.whole
def test_it_writes_the_ended_job_with_its_checkpoint(ended: Path, typed: Typed, tmp_path: Path) -> None:
    code, out, err = typed(
        *("jobs", "export", "our_study", "--withdraw-from", str(ended), "-o", "next"),
        *("--set", "withdraw.min_withdrawn=25"),
    )
    assert (code, err) == (0, "")
    previous = resume.read(ended / "checkpoint.safetensors")[1].job_id
    assert previous in out and "at least 25 must be withdrawn" in out
    assert "tightframe simulate next --previous-run" in out
    job = parse_job(folders.read_job(tmp_path / "next"))
    assert job.withdraw is not None and job.withdraw.min_withdrawn == 25
    assert job.origin.sha256() == parse_job(json.loads((ended / "model.json").read_text())["job"]).sha256()
    assert (tmp_path / "next" / "app_server" / "config" / "checkpoint.safetensors").is_file()
    assert not (tmp_path / "next" / "app" / "config" / "checkpoint.safetensors").exists(), (
        "no silo may see it"
    )
    assert typed("jobs", "check", "next")[0] == 0
    (tmp_path / "next" / "app_server" / "config" / "checkpoint.safetensors").write_bytes(b"another")
    code, _, err = typed("jobs", "check", "next")
    assert code and "SHA-256" in err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--rounds", "2"), "--rounds"),
        (("--set", "seed=3"), "--set seed"),
        (("--resume", "elsewhere"), "--withdraw-from"),
    ],
)
def test_nothing_else_of_the_job_can_be_changed(
    more: tuple[str, ...], expected: str, ended: Path, typed: Typed
) -> None:
    code, _, err = typed("jobs", "export", "our_study", "--withdraw-from", str(ended), *more)
    assert code and expected in err


def test_another_name_and_a_run_that_trains_are_refused(ended: Path, typed: Typed, tmp_path: Path) -> None:
    code, _, err = typed("jobs", "export", "your_study", "--withdraw-from", str(ended))
    assert code and "is of 'our_study'" in err
    trained = ended_run(tmp_path / "trained", "fedavg")
    code, _, err = typed("jobs", "export", "our_study", "--withdraw-from", str(trained))
    assert code and "TF-521" in err and "holds none" in err and not (tmp_path / "exported").exists()


def test_a_site_is_told_what_it_would_withdraw(ended: Path, tmp_path: Path) -> None:
    """Before the job begins, with its own state of the run; wrong names are a problem then."""
    job = resume.withdrawal_job(ended / "checkpoint.safetensors")
    file = tmp_path / "withdrawn.csv"
    entry = SiteEntry(
        data={"digits": {"silo": 0}}, state_dir=str(tmp_path / "state"), withdrawn={"digits": str(file)}
    )
    scope = Scope(tmp_path / "local" / "tightframe.json")

    def said() -> list[tuple[str, str]]:
        return [
            (item.state, item.text)
            for item in check_history(job, "a", entry, None, scope)
            if "withdraw" in item.text
        ]

    file.write_text("record,train-0\nrecord,train-7\nrecord,test-1\n")
    ((state, text),) = said()
    assert state == "problem" and "no state here (TF-522)" in text
    assert job.withdraw is not None
    (tmp_path / "state" / job.withdraw.previous / "a" / STATE).mkdir(parents=True)
    ((state, text),) = said()
    assert state == "problem" and "fewer than 5 (of class " in text and "TF-523" in text
    entry = entry.model_copy(update={"policy": PolicyBlock(min_class_count=1)})
    assert [(state, "2 training, 0 validation and 1 test records" in text) for state, text in said()] == [
        ("ok", True)
    ]
    file.write_text("record,train-4711\n")
    ((state, text),) = said()
    assert state == "problem" and "TF-214" in text and "4711" in text


@pytest.mark.whole
def test_a_later_job_warns_of_records_that_are_still_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the silo's own log: the file says what leaves one run, not what a job may use."""
    file = tmp_path / "withdrawn.csv"
    file.write_text("record,train-0\nrecord,train-7\nrecord,long-gone\n")
    job = parse_job({**JOB, "method": "fedncm"})
    federation.run_job(
        job, entries={"a": SiteEntry(data={"digits": {"silo": 0}}, withdrawn={"digits": str(file)})}
    )
    assert "2 records that `withdrawn` names are still among" in caplog.text


def test_the_export_lists_models_that_continue_from_the_run(ended: Path, typed: Typed) -> None:
    """Of those whose results were downloaded beside the run's."""
    model = hashlib.sha256((ended / "model.safetensors").read_bytes()).hexdigest()
    beside = ended.parent.parent / "downloaded" / "workspace"
    beside.mkdir(parents=True)
    job = {"job_name": "tuned", "initial_model_sha256": model}
    (beside / "model.json").write_text(json.dumps({"job": job, "model_sha256": "0" * 64}))
    code, out, _ = typed("jobs", "export", "our_study", "--withdraw-from", str(ended), "-o", "listed")
    assert code == 0
    assert f"will NOT be covered: tuned in {beside} (starts from its model)" in out.replace("\n", " ")


def test_an_export_says_if_nothing_can_be_withdrawn_later(typed: Typed, tmp_path: Path) -> None:
    said = "no record can be taken out of its model later"
    for values, warned in (([], True), (["--set", "model_options.standardise=false"], False)):
        code, _, err = typed("jobs", "export", "fedncm_heart", "-o", f"job-{warned}", *values)
        assert code == 0 and (said in " ".join(err.split())) == warned, err
    *_, err = typed("jobs", "export", "fedavg_heart", "-o", "trained")
    assert said not in err, "of which nothing can be taken out anyway"
