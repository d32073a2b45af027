"""``tightframe jobs export NAME --resume DIR``: what it writes, and what it refuses."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import MARKER
from tightframe.errors import JobError
from tightframe.flare.simulation import simulator
from tightframe.results.rows import Row
from tightframe.rounds.server import resume
from tightframe_app.jobs import folders, recipes, simulation

Typed = Callable[..., tuple[object, str, str]]


class PulledPlugError(Exception):
    """The server is gone."""


def _stop(row: Row) -> None:
    if row.kind == "train" and row.round == 2:
        raise PulledPlugError


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's results of a run of two rounds that was stopped in the second."""
    folder = tmp_path_factory.mktemp("stopped")
    job = recipes.get("fedetf_heart").job(
        sites=["a", "b", "c"], changes={"rounds": 2, "training.epochs": 1, "job_name": "our_study"}
    )
    with pytest.raises(PulledPlugError):
        federation.run_job(job, folder=folder, on_round=_stop)
    return folder / "server"


@pytest.mark.parametrize("name", ["our_study", "fedetf_heart"])
def test_it_writes_the_stopped_job_with_its_checkpoint(
    name: str, stopped: Path, tmp_path: Path, typed: Typed
) -> None:
    code, out, err = typed("jobs", "export", name, "--resume", str(stopped), "-o", "next", "--gpus", "1")
    assert (code, err) == (0, "")
    lineage = resume.read(stopped / "checkpoint.safetensors")[1].job_id
    assert "after round 1 of 2" in out and "1 round done, 1 round left" in out and lineage in out
    assert "tightframe simulate next" in out
    files = sorted(
        path.relative_to(tmp_path / "next").as_posix() for path in (tmp_path / "next").rglob("*.*")
    )
    assert files == [
        "app/config/config_fed_client.json",
        "app_server/config/checkpoint.safetensors",
        "app_server/config/config_fed_server.json",
        "meta.json",
    ]
    meta = json.loads((tmp_path / "next" / "meta.json").read_text())
    assert meta["deploy_map"] == {"app_server": ["server"], "app": ["a", "b", "c"]}
    assert meta["resource_spec"]["a"]["num_of_gpus"] == 1
    assert typed("jobs", "check", "next")[0] == 0
    job = parse_job(folders.read_job(tmp_path / "next"))
    found, kept = resume.continued(job, tmp_path / "next" / folders.CHECKPOINT_FILE) or (None, None)
    assert found is not None and kept is not None and kept.job == job.anew.model_dump(mode="json")


def test_the_engine_takes_the_folder_for_a_job_without_code(
    stopped: Path, tmp_path: Path, typed: Typed
) -> None:
    """By the engine's own validator, which every submitted job goes through."""
    from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

    typed("jobs", "export", "our_study", "--resume", str(stopped), "-o", "next")
    valid, problem, meta = JobMetaValidator().validate("next", zip_directory_to_bytes(str(tmp_path), "next"))
    assert valid and not problem and "byoc" not in meta


def test_a_folder_with_another_checkpoint_or_none_is_not_valid(
    stopped: Path, tmp_path: Path, typed: Typed
) -> None:
    typed("jobs", "export", "our_study", "--resume", str(stopped), "-o", "next")
    path = tmp_path / "next" / folders.CHECKPOINT_FILE
    path.write_bytes(path.read_bytes() + b"\0")
    code, _, err = typed("jobs", "check", "next")
    assert code == 2 and "TF-521" in err
    path.unlink()
    code, _, err = typed("jobs", "check", "next")
    assert code == 2 and "TF-521" in err
    plain = recipes.get("fedetf_heart").job()
    with pytest.raises(ValueError, match="checkpoint"):
        folders.job_files(plain, checkpoint=b"")
    folders.write_job(folders.job_files(plain), tmp_path / "plain")
    stranger = tmp_path / "plain" / folders.CHECKPOINT_FILE
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"")
    assert any("does not belong" in line for line in folders.check_folder(tmp_path / "plain"))


def test_a_workspace_or_a_downloaded_job_will_do(stopped: Path, tmp_path: Path, typed: Typed) -> None:
    for place in ("download/workspace", "simulator/server/simulate_job", "next_one/app_server/config"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(stopped / "checkpoint.safetensors", tmp_path / place)
        folder = place.partition("/")[0]
        code, _, _ = typed("jobs", "export", "our_study", "--resume", folder, "-o", f"from_{folder}")
        assert code == 0


@pytest.mark.parametrize("lent", ["of another folder", "of the workspace", None])
def test_its_line_names_the_simulation_and_the_records_that_this_had(
    lent: str | None, stopped: Path, tmp_path: Path, typed: Typed
) -> None:
    """As the engine leaves a workspace: its ``local`` folder is copied to every site."""
    shutil.copytree(stopped, tmp_path / "my run" / "server" / "simulate_job")
    local = tmp_path / "my run" / "b" / "local"
    local.mkdir(parents=True)
    if lent is not None:
        (local / "tightframe.json").write_text("{}")
    if lent == "of another folder":
        with simulator.site_configuration(tmp_path / "lending", local / "tightframe.json"):
            shutil.copy(tmp_path / "lending" / "local" / MARKER, local)
    code, out, _ = typed("jobs", "export", "our_study", "--resume", "my run", "-o", "next")
    (line,) = [row for row in out.splitlines() if row.startswith("run it here:")]
    options = {
        "of another folder": ["--site-config", str(local / "tightframe.json")],
        "of the workspace": ["--site-config", "my run/local/tightframe.json"],
        None: [],
    }[lent]
    expected = ["tightframe", "simulate", "next", "--previous-run", "my run", *options]
    assert code == 0 and shlex.split(line.removeprefix("run it here:")) == expected


def test_a_resumed_run_that_did_no_round_is_run_again_with_the_same_state(
    stopped: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stopped run was in the same workspace, which has moved since."""

    def cut_off(command: Sequence[str]) -> int:
        simulator.prepare_workspace(tmp_path / "old")
        (tmp_path / "old" / "server" / "simulate_job").mkdir(parents=True, exist_ok=True)
        raise KeyboardInterrupt

    shutil.copytree(stopped, tmp_path / "old" / "server" / "simulate_job")
    simulator.prepare_workspace(tmp_path / "old")
    typed("jobs", "export", "our_study", "--resume", "old", "-o", "next")
    monkeypatch.setattr(simulator, "run_apart", cut_off)
    monkeypatch.setenv(simulator.PREVIOUS_RUN, "")
    code, _, err = typed("simulate", "next", "-w", "old", "--previous-run", "old")
    assert code == 130, err
    line = " ".join(err.split()).partition("no new round was completed, so run it again: ")[2]
    words = shlex.split(line)
    assert words[:6] == ["tightframe", "simulate", "next", "-w", "old", "--previous-run"], err
    place = tmp_path / words[6] / "server" / "simulate_job" / "checkpoint.safetensors"
    assert place.is_file(), "the first run's, wherever it is kept"

    monkeypatch.setattr(simulation, "_cause", lambda results: "TF-523")
    code, _, err = typed("simulate", "next", "-w", "old", "--previous-run", str(words[6]))
    assert "correct the cause first (tightframe explain TF-523), then run it again: " in " ".join(err.split())


def test_what_it_refuses(stopped: Path, tmp_path: Path, typed: Typed) -> None:
    def told(name: str, folder: Path, *more: str) -> str:
        code, _, err = typed("jobs", "export", name, "--resume", str(folder), *more)
        assert code == 2 and not (tmp_path / "exported").exists()
        return " ".join(err.replace("│", " ").split())

    assert "is of 'our_study'" in told("fedmr_isic", stopped)
    assert "checkpoint.safetensors" in told("our_study", tmp_path)
    for more in (["--rounds", "9"], ["--set", "seed=1"], ["--preset", "full"], ["--sites", "a,b,c"]):
        assert f"omit {more[0]}" in told("our_study", stopped, *more)
    shutil.copytree(stopped, tmp_path / "done")
    values = json.loads((stopped / "outcome.json").read_text())
    (tmp_path / "done" / "outcome.json").write_text(json.dumps(values | {"trained": True, "reason": None}))
    assert "nothing left to do" in told("our_study", tmp_path / "done")
    (tmp_path / "done" / "checkpoint.safetensors").write_bytes(b"torn")
    assert "TF-507" in told("our_study", tmp_path / "done")


def test_a_simulation_does_not_wipe_what_it_goes_on_with(stopped: Path, tmp_path: Path, typed: Typed) -> None:
    typed("jobs", "export", "our_study", "--resume", str(stopped), "-o", "next")
    code, _, err = typed("simulate", "next", "-w", "old", "--previous-run", "old")
    assert code == 2 and "another --workspace" in err


def test_a_job_cannot_name_a_folder(stopped: Path) -> None:
    job = resume.next_job(stopped / "checkpoint.safetensors")
    assert job.resume is not None
    values = job.model_dump()
    values["resume"]["lineage"] = "../../elsewhere"
    with pytest.raises(JobError, match=r"resume\.lineage"):
        parse_job(values)
