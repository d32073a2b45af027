"""``tightframe simulate`` around the engine: site configuration, threads, an end by Ctrl-C."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from tightframe import federation
from tightframe.config.site import MARKER
from tightframe.data.isic.folder import IMAGES, SPLIT
from tightframe.errors import (
    JobError,
    JobFolderError,
    RunError,
    SiteConfigError,
    TrainingError,
    WorkspaceError,
)
from tightframe.flare.simulation import simulator, workspace
from tightframe.rounds.riders import failures
from tightframe.rounds.setup import prepare
from tightframe_app.cli import app
from tightframe_app.jobs import folders as job_folders
from tightframe_app.jobs import recipes, simulation

NAMES = ["site-1", "site-2", "site-3"]


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Any]:
    """A site configuration of three centres, whose folder is there as far as opening it looks."""
    root = tmp_path / "isic"
    (root / IMAGES).mkdir(parents=True)
    rows = [f"ISIC_{i}{fold},0,{i},{fold}" for i in (1, 2, 3) for fold in ("train", "test")]
    (root / SPLIT).write_text("\n".join(["image,target,center,fold", *rows]))
    return {
        "sites": {
            f"site-{i}": {"data": {"fed_isic2019": {"root": str(root), "center": i}}} for i in (1, 2, 3)
        }
    }


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    job_folders.write_job(job_folders.job_files(recipes.get("fedmr_isic").job(sites=NAMES)), folder)
    return folder


@pytest.fixture
def given(tmp_path: Path, sites: dict[str, Any]) -> Path:
    path = tmp_path / "given[1].json"
    path.write_text(json.dumps(sites))
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What each run would have been started with; nothing runs."""
    runs: list[dict[str, Any]] = []

    def fake(command: Sequence[str]) -> int:
        own = tmp_path / "ws" / "local" / "tightframe.json"
        text = own.read_text() if own.exists() else None
        runs.append({"threads": command[command.index("-t") + 1], "sites": text and json.loads(text)})
        return 0

    monkeypatch.setattr(simulator, "run_apart", fake)
    return runs


@pytest.fixture
def simulate(job: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["simulate", str(job), "-w", str(tmp_path / "ws"), *arguments])

    return run


def local(tmp_path: Path) -> list[str]:
    folder = tmp_path / "ws" / "local"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_given_site_configuration_is_there_for_one_run(
    simulate: Callable[..., Result],
    started: list[dict[str, Any]],
    given: Path,
    sites: dict[str, Any],
    tmp_path: Path,
) -> None:
    first = simulate("-s", str(given))
    assert first.exit_code == 0, first.output
    assert f"site configuration: {given}\n" in first.output
    assert "starting a server and 3 silos; without a terminal, a line every minute\n" in first.output
    assert local(tmp_path) == []
    second = simulate()
    assert (
        "site configuration: none, every silo trains on the synthetic twin of Fed-ISIC2019" in second.output
    )
    assert [run["sites"] for run in started] == [sites, None]


def test_it_is_taken_back_from_a_run_that_fails(
    simulate: Callable[..., Result], given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(command: Sequence[str]) -> int:
        assert local(tmp_path) == ["tightframe.json", MARKER]
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator, "run_apart", broken)
    done = simulate("-s", str(given))
    assert done.exit_code == 130 and "interrupted" in done.output
    assert local(tmp_path) == []


def test_what_a_crash_left_behind_is_taken_back_first(
    simulate: Callable[..., Result], started: list[dict[str, Any]], given: Path, tmp_path: Path
) -> None:
    crash = (
        "import os, sys\nfrom pathlib import Path\nfrom tightframe.flare.simulation import simulator\n"
        "with simulator.site_configuration(Path(sys.argv[1]), Path(sys.argv[2])):\n    os._exit(9)"
    )
    command = [sys.executable, "-c", crash, str(tmp_path / "ws"), str(given)]
    assert subprocess.run(command, check=False).returncode == 9
    assert local(tmp_path) == ["tightframe.json", MARKER]
    done = simulate()
    assert done.exit_code == 0 and "site configuration: none" in done.output
    assert started[0]["sites"] is None and local(tmp_path) == []


def test_the_users_own_file_is_used_and_never_touched(
    simulate: Callable[..., Result],
    started: list[dict[str, Any]],
    given: Path,
    sites: dict[str, Any],
    tmp_path: Path,
) -> None:
    own = tmp_path / "ws" / "local" / "tightframe.json"
    own.parent.mkdir(parents=True)
    text = json.dumps(sites, indent=3)
    own.write_text(text)
    for arguments in ([], ["-s", str(own)]):
        done = simulate(*arguments)
        assert done.exit_code == 0 and f"site configuration: {own}\n" in done.output
    assert len(started) == 2
    done = simulate("-s", str(given))
    assert isinstance(done.exception, SiteConfigError)
    assert str(own) in str(done.exception) and str(given) in str(done.exception)
    assert len(started) == 2 and own.read_text() == text and local(tmp_path) == ["tightframe.json"]


def test_a_lent_file_that_was_edited_since_is_the_users_own(given: Path, tmp_path: Path) -> None:
    own = tmp_path / "ws" / "local" / "tightframe.json"
    with simulator.site_configuration(tmp_path / "ws", given) as used:
        assert used == given
        own.write_text("{}")
    assert own.read_text() == "{}" and local(tmp_path) == ["tightframe.json"]


def test_a_site_that_is_not_configured_is_named_before_anything_runs(
    simulate: Callable[..., Result],
    started: list[dict[str, Any]],
    sites: dict[str, Any],
    tmp_path: Path,
) -> None:
    some = {site: sites["sites"][site] for site in ("site-1", "site-3")}
    (tmp_path / "some.json").write_text(json.dumps({"sites": some}))
    done = simulate("-s", str(tmp_path / "some.json"))
    assert isinstance(done.exception, SiteConfigError) and "but not site-2" in str(done.exception)
    assert started == [] and local(tmp_path) == []


def test_records_that_cannot_be_opened_are_named_of_all_sites_before_anything_runs(
    simulate: Callable[..., Result], started: list[dict[str, Any]], sites: dict[str, Any], tmp_path: Path
) -> None:
    folders = sites["sites"]
    folders["site-1"]["data"]["fed_isic2019"]["root"] = "/nowhere"
    folders["site-2"]["data"]["fed_isic2019"]["center"] = 5
    del folders["site-3"]
    (tmp_path / "wrong.json").write_text(json.dumps(sites))
    done = simulate("-s", str(tmp_path / "wrong.json"))
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-202"
    told = str(done.exception)
    assert "site-1: TF-203: Expected the images of Fed-ISIC2019 in /nowhere/" in told
    assert "site-2: TF-208: Expected images of centre 5" in told
    assert f"site-3: TF-201: {tmp_path / 'wrong.json'} names site-1, site-2, " in told, "the user's own file"
    assert started == [] and local(tmp_path) == []


def test_files_that_are_looked_into_only_when_asked_are_looked_into(
    started: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Image sets are opened without reading; three silos with one wrong folder are one problem."""
    changes = {"dataset": "mnist", "dataset_options.silos": 3}
    job = recipes.get("fedavg_isic").job(sites=NAMES, changes=changes)
    job_folders.write_job(job_folders.job_files(job), tmp_path / "mnist")
    entries = {
        site: {"data": {"mnist": {"root": str(tmp_path), "silo": index}}} for index, site in enumerate(NAMES)
    }
    (tmp_path / "wrong.json").write_text(json.dumps({"sites": entries}))
    arguments = [str(tmp_path / "mnist"), "-w", str(tmp_path / "ws"), "-s", str(tmp_path / "wrong.json")]
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(done.exception, SiteConfigError)
    assert "  - site-1, site-2, site-3: TF-205: Expected train-images-idx3-ubyte" in str(done.exception)
    assert started == []


@pytest.mark.parametrize("silos", [3, 2])
def test_digits_are_announced_as_the_real_records_that_they_are(
    started: list[dict[str, Any]], tmp_path: Path, silos: int
) -> None:
    changes = {"dataset": "digits", "dataset_options.silos": silos}
    job = recipes.get("fedavg_isic").job(sites=NAMES, changes=changes)
    job_folders.write_job(job_folders.job_files(job), tmp_path / "digits")
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "digits"), "-w", str(tmp_path / "ws")])
    if silos == 3:
        assert "its share of scikit-learn's handwritten digits: real records" in done.output
        assert "twin" not in done.output and len(started) == 1
    else:
        assert isinstance(done.exception, JobError) and "dataset_options.silos" in str(done.exception)
        assert started == []


def test_a_file_for_the_server_alone_says_that_silos_have_the_twin(
    simulate: Callable[..., Result], started: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "server.json").write_text(json.dumps({"sites": {}, "server": {}}))
    done = simulate("-s", str(tmp_path / "server.json"))
    assert "for the server only; every silo trains on the synthetic twin" in done.output


def test_policies_alone_are_rehearsed_on_the_twin_and_said_so(
    started: list[dict[str, Any]], given: Path, sites: dict[str, Any], simulate: Callable[..., Result]
) -> None:
    for site in NAMES:
        sites["sites"][site] = {"policy": {"profile": "strict"}}
    given.write_text(json.dumps(sites))
    done = simulate("--site-config", str(given))
    assert done.exit_code == 0 and len(started) == 1
    assert "each of site-1, site-2, site-3 trains on the synthetic twin of Fed-ISIC2019" in done.output


@pytest.mark.parametrize("text", ["not json", "[]"])
def test_a_site_configuration_that_is_none_is_a_named_error(
    simulate: Callable[..., Result], started: list[dict[str, Any]], tmp_path: Path, text: str
) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = simulate("-s", str(tmp_path / "bad.json"))
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-202"
    assert started == []


@pytest.mark.parametrize(("asked", "given_threads"), [(None, "3"), (1, "1"), (3, "3"), (7, "3")])
def test_threads_are_at_most_the_sites_and_a_cut_is_said(
    simulate: Callable[..., Result], started: list[dict[str, Any]], asked: int | None, given_threads: str
) -> None:
    done = simulate(*([] if asked is None else ["-t", str(asked)]))
    assert started[0]["threads"] == given_threads
    assert ("threads: 3 instead of 7" in done.output) == (asked == 7)


@pytest.mark.parametrize("threads", ["0", "-3"])
def test_no_threads_are_refused(
    simulate: Callable[..., Result], started: list[dict[str, Any]], threads: str
) -> None:
    done = simulate("-t", threads)
    assert done.exit_code == 2 and started == []
    assert "--threads" in done.output and f"expected at least 1, got {threads}" in done.output


GROUP = """
import os, signal, subprocess, sys, time
from pathlib import Path
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_whole_group(
    job: Path, tmp_path: Path, kind: str, number: signal.Signals, code: int
) -> None:
    pids = tmp_path / "pids"
    script = (
        # a shell starts background jobs, such as a whole test run, with SIGINT ignored
        "import signal, sys, types\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        # to check the job needs torch, which takes seconds
        "checked = types.SimpleNamespace(job=types.SimpleNamespace(roster=('site-1',), job_name='j'))\n"
        "setup = types.SimpleNamespace(prepare=lambda values: checked)\n"
        "sys.modules['tightframe.rounds.setup'] = setup\n"
        "from tightframe.flare.simulation import simulator\nfrom tightframe_app import cli\n"
        "from tightframe_app.jobs import simulation\n"
        "simulation.records = simulation.check_start = lambda *given: ''\n"
        "simulator._GRACE = 1.0\nreal, group = simulator.run_apart, sys.argv[1:4]\n"
        "simulator.run_apart = lambda command: real([sys.executable, '-c', *group])\n"
        "sys.argv[1:4] = []\ncli.main()"
    )
    command = [sys.executable, "-c", script, GROUP, str(pids), kind]
    command += ["simulate", str(job), "-w", str(tmp_path / "ws")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in output + errors
    for pid in map(int, pids.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_folder_that_is_no_workspace_is_never_wiped(job: Path, tmp_path: Path, started: list[Any]) -> None:
    precious = tmp_path / "precious"
    (precious / "sub").mkdir(parents=True)
    (precious / "sub" / "thesis.txt").write_text("years of work")
    result = CliRunner().invoke(app, ["simulate", str(job), "-w", str(precious)])
    assert result.exit_code != 0 and isinstance(result.exception, FileExistsError)
    assert "sub" in str(result.exception) and started == []
    assert (precious / "sub" / "thesis.txt").read_text() == "years of work"


def test_a_free_folder_and_an_earlier_workspace_are_used(
    job: Path, tmp_path: Path, started: list[Any]
) -> None:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    assert CliRunner().invoke(app, ["simulate", str(job), "-w", str(workspace)]).exit_code == 0
    simulator.prepare_workspace(workspace)
    (workspace / "server").mkdir()
    assert CliRunner().invoke(app, ["simulate", str(job), "-w", str(workspace)]).exit_code == 0
    assert len(started) == 2


def test_an_unknown_log_mode_is_refused(job: Path, tmp_path: Path, started: list[Any]) -> None:
    result = CliRunner().invoke(app, ["simulate", str(job), "-w", str(tmp_path / "ws"), "-l", "loud"])
    assert result.exit_code == 2 and started == []


def test_a_provisioned_kit_is_never_wiped(job: Path, tmp_path: Path, started: list[Any]) -> None:
    kit = tmp_path / "kit"
    for name in ("startup/fed_client.json", "local/resources.json", "state/secret"):
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text('{"allow_log_streaming": false}')
    result = CliRunner().invoke(app, ["simulate", str(job), "-w", str(kit)])
    assert isinstance(result.exception, FileExistsError) and "provisioned" in str(result.exception)
    (kit / "startup" / "fed_client.json").unlink()
    result = CliRunner().invoke(app, ["simulate", str(job), "-w", str(kit)])
    assert isinstance(result.exception, FileExistsError) and "state" in str(result.exception)
    assert started == []


def test_an_earlier_run_is_kept_and_said(
    simulate: Callable[..., Result], started: list[dict[str, Any]], tmp_path: Path
) -> None:
    results = tmp_path / "ws" / "server" / "simulate_job"
    results.mkdir(parents=True)
    (results / "outcome.json").write_text('{"job_name": "mine", "trained": true}')
    simulator.prepare_workspace(tmp_path / "ws")
    done = simulate()
    (kept,) = (tmp_path / "ws.runs").iterdir()
    assert f"kept the earlier run as {kept}" in done.output and len(started) == 1
    assert kept.name.endswith("_mine"), "a run is found by its job"
    outcome = (kept / "server" / "simulate_job" / "outcome.json").read_text()
    assert outcome == '{"job_name": "mine", "trained": true}'


def test_a_workspace_in_use_is_refused_before_anything_is_touched(
    simulate: Callable[..., Result], started: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "ws").mkdir()
    other = workspace.Lock(tmp_path / "ws", "their_job")
    assert other.take()
    done = simulate()
    assert isinstance(done.exception, WorkspaceError) and "their_job" in str(done.exception)
    assert started == [] and list((tmp_path / "ws").iterdir()) == []
    other.give_back()


@pytest.mark.whole
@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupted_run_leaves_its_page_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """The very commands that are printed go on with the run."""
    monkeypatch.chdir(tmp_path)
    sites = ["site-1", "site-2", "site-3"]
    made = recipes.get("fedetf_heart").job(sites=sites, changes={"rounds": 3, "personalise": False})
    job_folders.write_job(job_folders.job_files(made), tmp_path / "heart")
    results = tmp_path / "ws" / "server" / "simulate_job"

    class StopError(Exception):
        pass

    def stop(row: Any) -> None:
        if row.kind == "train" and row.round == 2:
            raise StopError

    def cut_off(command: Sequence[str]) -> int:
        simulator.prepare_workspace(tmp_path / "ws")
        results.mkdir(parents=True)
        if begun:
            with pytest.raises(StopError):
                federation.run_job(made, folder=tmp_path / "run", on_round=stop)
            for name in ("checkpoint.safetensors", "metrics.jsonl", "transcript.jsonl"):
                (results / name).write_bytes((tmp_path / "run" / "server" / name).read_bytes())
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator, "run_apart", cut_off)
    (tmp_path / "our sites.json").write_text('{"sites": {}}')
    options = ["--site-config", "our sites.json", "--threads", "2"]
    done = CliRunner().invoke(app, ["simulate", "heart", "-w", "ws", *options])
    assert done.exit_code == 130, done.output
    outcome = json.loads((results / "outcome.json").read_text())
    assert outcome["trained"] is False and "TF-105: interrupted: stopped by Ctrl-C" in outcome["reason"]
    assert outcome["synthetic"] is True and outcome["rounds_done"] == int(begun)
    assert "Not trained" in (results / "report.html").read_text()
    commands = [line.strip() for line in done.output.splitlines() if line.startswith("  tightframe")]
    if not begun:
        anew = f"start again:  tightframe simulate heart -w ws {shlex.join(options)}\n"
        assert anew in done.output and commands == [], "with the records that the first run had"
        return
    assert commands[1].endswith(f" -w ws --previous-run ws {shlex.join(options)}")
    exported, again = (CliRunner().invoke(app, shlex.split(commands[0])[1:]), shlex.split(commands[1])[1:])
    assert exported.exit_code == 0, exported.output
    monkeypatch.setattr(simulator, "run_apart", lambda command: 0)
    monkeypatch.setenv(simulator.PREVIOUS_RUN, "")
    assert CliRunner().invoke(app, again).exit_code == 0
    assert (Path(os.environ[simulator.PREVIOUS_RUN]) / "server" / "simulate_job" / "outcome.json").is_file()


@pytest.mark.parametrize("entry", [None, "another"])
def test_a_named_model_that_is_not_at_the_server_is_refused_before_anything_runs(
    started: list[dict[str, Any]], tmp_path: Path, entry: str | None
) -> None:
    job = recipes.get("fedetf_heart").job(changes={"initial_model_sha256": "ab" * 32})
    job_folders.write_job(job_folders.job_files(job), tmp_path / "job")
    arguments = [str(tmp_path / "job"), "-w", str(tmp_path / "ws")]
    if entry is not None:
        (tmp_path / entry).write_bytes(b"other weights")
        server = {"server": {"initial_model": str(tmp_path / entry)}, "sites": {}}
        (tmp_path / "given.json").write_text(json.dumps(server))
        arguments += ["-s", str(tmp_path / "given.json")]
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(done.exception, RunError) and done.exception.code == "TF-505"
    assert started == [] and local(tmp_path) == []


def test_an_export_from_a_finished_model_prints_the_servers_line(
    started: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = tmp_path / "model.safetensors"
    setup = prepare(recipes.get("fedetf_heart").job().model_dump(mode="json"))
    save_file(dict(setup.initial_state().model), model)
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    named, folder = f"initial_model_sha256={sha256}", str(tmp_path / "next")
    done = CliRunner().invoke(app, ["jobs", "export", "fedetf_heart", "--set", named, "-o", folder])
    (line,) = (line for line in done.output.splitlines() if "name its file at the server" in line)
    assert f"tightframe simulate {folder} --site-config FILE\n" in done.output
    text = line[line.index("{") :].replace("/path/to/model.safetensors", str(model))
    (tmp_path / "server.json").write_text(text[:-1] + ', "sites": {}}')
    arguments = [folder, "-w", str(tmp_path / "ws"), "-s", str(tmp_path / "server.json")]
    assert CliRunner().invoke(app, ["simulate", *arguments]).exit_code == 0 and len(started) == 1


def test_an_export_checks_a_given_model_and_names_its_tensors_and_inputs(tmp_path: Path) -> None:
    crp = {"column": "crp", "kind": "number", "low": 0, "high": 9, "missing": "indicator"}
    columns = [{"column": "drug", "kind": "boolean"}, crp]
    label = {"column": "ill", "classes": [{"code": "0"}, {"code": "1"}]}
    (tmp_path / "c.json").write_text(json.dumps({"title": "Ward", "columns": columns, "label": label}))
    good = {"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)}

    def export(*more: str) -> Result:
        job = ["--method", "fedavg", "--contract", str(tmp_path / "c.json"), "--force"]
        job += ["--output", str(tmp_path / "job")]
        job += ["--set", 'model_options={"widths": [], "standardise": false}']
        return CliRunner().invoke(app, ["jobs", "export", *job, *more])

    def given(tensors: dict[str, torch.Tensor]) -> Result:
        save_file(tensors, tmp_path / "model.safetensors")
        return export("--initial-model", str(tmp_path / "model.safetensors"))

    done = given(good)
    assert done.exit_code == 0, done.output
    sha256 = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert job_folders.read_job(tmp_path / "job")["initial_model_sha256"] == sha256
    told = "the network's inputs, in order: drug, crp, crp missing\n"
    assert told in done.output and str(tmp_path / "model.safetensors") in done.output
    assert "head.weight (2, 3)" in done.output
    assert told in export("--set", f"initial_model_sha256={sha256}").output
    refused = given({**good, "head.weight": torch.zeros(2, 4)}).exception
    assert isinstance(refused, JobError) and "head.weight" in str(refused)


@pytest.mark.parametrize("code", ["TF-505", "TF-105"])
def test_a_run_is_started_again_as_it_is_only_if_it_was_interrupted(tmp_path: Path, code: str) -> None:
    results = tmp_path / "server" / "simulate_job"
    results.mkdir(parents=True)
    setup = prepare(recipes.get("fedetf_heart").job().model_dump(mode="json"))
    simulation._write_outcome(setup, results, f"{code}: for a reason.", tmp_path / "local")
    (line,) = simulation.left_behind(setup, tmp_path, tmp_path / "job", None)[1:]
    assert ("start again:  tightframe simulate" in line) == (code == "TF-105")
    assert ("tightframe explain TF-505" in line) == (code == "TF-505")


def test_after_a_refusal_the_sites_own_codes_are_explained(tmp_path: Path) -> None:
    results = tmp_path / "server" / "simulate_job"
    results.mkdir(parents=True)
    setup = prepare(recipes.get("fedetf_heart").job().model_dump(mode="json"))
    simulation._write_outcome(setup, results, "TF-509: before any training.", tmp_path / "local")
    file = results / "outcome.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "not_enrolled": {"site-1": "TF-628", "site-2": "TF-625"}}))
    (first, line) = simulation.left_behind(setup, tmp_path, tmp_path / "job", None)
    assert first.endswith("report.html") and line.endswith("(tightframe explain TF-625 TF-628)")
    (results / "report.html").unlink()  # as where the disk was full
    assert simulation.left_behind(setup, tmp_path, tmp_path / "job", None)[0].endswith("outcome.json")


def test_where_silos_fail_the_codes_of_their_own_logs_are_explained(tmp_path: Path) -> None:
    results = tmp_path / "server" / "simulate_job"
    results.mkdir(parents=True)
    setup = prepare(recipes.get("fedetf_heart").job().model_dump(mode="json"))
    simulation._write_outcome(setup, results, "TF-513: 1 of 4 silos failed.", tmp_path / "local")
    (_, line) = simulation.left_behind(setup, tmp_path, tmp_path / "job", None)
    assert line.endswith("(tightframe explain TF-513)"), "no log has it"
    for site, code in (("site-1", "TF-305"), ("site-2", "TF-305"), ("site-3", "TF-402")):
        context: Any = SimpleNamespace(log=logging.getLogger(site), name=site)
        (tmp_path / site).mkdir()
        handler = logging.FileHandler(tmp_path / site / "log.txt")
        context.log.addHandler(handler)
        failures.note(context, TrainingError("why", code=code))
        context.log.removeHandler(handler)
        handler.close()
    (_, line) = simulation.left_behind(setup, tmp_path, tmp_path / "job", None)
    assert line.endswith("(tightframe explain TF-305 TF-402)")
    (results / "checkpoint.safetensors").touch()
    assert "the cause corrected (tightframe explain TF-305 TF-402):" in "".join(
        simulation.left_behind(setup, tmp_path, tmp_path / "job", None)
    )


@pytest.mark.parametrize(
    ("recipe", "profile", "answer", "told"),
    [
        ("fedetf_heart", "research", {"class": "disease", "share": 1.0}, True),
        ("fedetf_heart", "standard", {"class": "disease", "share": 1.0}, False),
        ("fedetf_heart", "research", {"class": "disease", "share": 1.0, "certain": False}, False),
        ("fedetf_heart", "research", None, False),
        ("fedncm_heart", "research", {"class": "disease", "share": 1.0}, False),
        ("fedetf_isic_dp", "research", {"class": "NV", "share": 1.0}, False),
    ],
)
def test_of_a_model_with_one_answer_it_is_said_that_hospitals_may_end_such_a_run(
    tmp_path: Path, recipe: str, profile: str, answer: dict[str, Any] | None, told: bool
) -> None:
    results = tmp_path / "server" / "simulate_job"
    results.mkdir(parents=True)
    setup = prepare(recipes.get(recipe).job().model_dump(mode="json"))
    simulation._write_outcome(setup, results, "", tmp_path / "local")
    file = results / "outcome.json"
    test = {"records": 9, "one_answer": answer}
    values = json.loads(file.read_text()) | {"evaluation": {"validation": {"records": 0}, "test": test}}
    file.write_text(json.dumps(values))
    (tmp_path / "local").mkdir(exist_ok=True)
    sites = {name: {"policy": {"profile": profile}} for name in setup.job.roster}
    (tmp_path / "local" / "tightframe.json").write_text(json.dumps({"sites": sites}))
    assert ("TF-305" in (simulation.one_answer_hint(setup, tmp_path) or "")) == told
    (tmp_path / "local" / "tightframe.json").unlink()
    without = simulation.one_answer_hint(setup, tmp_path)
    assert (without is not None) == (told or profile == "standard"), "research is a simulation's profile"


def test_an_export_hints_at_fewer_evaluations_only_where_there_are_several(tmp_path: Path) -> None:
    column, label = (
        {"column": "drug", "kind": "boolean"},
        {"column": "ill", "classes": [{"code": "0"}, {"code": "1"}]},
    )
    (tmp_path / "c.json").write_text(json.dumps({"title": "Ward", "columns": [column], "label": label}))
    for method, hinted in (("fedavg", True), ("fedncm", False), ("local_only", False)):
        job = ["--method", method, "--contract", str(tmp_path / "c.json"), "-o", str(tmp_path / method)]
        done = CliRunner().invoke(app, ["jobs", "export", *job])
        assert done.exit_code == 0 and "exact evaluations: " in done.output, done.output
        assert ("evaluation.models=1" in done.output) == hinted


def test_a_job_path_that_does_not_exist_suggests_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    job_folders.write_job(job_folders.job_files(recipes.get("fedetf_heart").job()), Path("jobs/fedetf_heart"))
    config = tmp_path / "site.json"
    config.write_text("{}")
    for given in ("jobs/fedetf_hart", "fedetf_heart", "jobs"):
        for command in (
            ["simulate", given],
            ["jobs", "check", given],
            ["site", "check", "-c", str(config), "--job", given],
        ):
            done = CliRunner().invoke(app, command)
            assert isinstance(done.exception, JobFolderError) and done.exception.code == "TF-106", command
            assert "Did you mean jobs/fedetf_heart?" in str(done.exception), command
    done = CliRunner().invoke(app, ["jobs", "export", "fedetf_hart"])
    assert done.exit_code == 2 and "did you mean" in done.output and started == []
