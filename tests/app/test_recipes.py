"""Recipes for NVFlare's environments write what the command exports, and run it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvflare.recipe import SimEnv
from nvflare.recipe.session_mgr import SessionManager
from tests.support import ROOT, forking
from typer.testing import CliRunner

from tightframe.config.job import JobConfig
from tightframe.errors import JobError
from tightframe.flare.recipe_job import FolderJob
from tightframe_app.cli import app
from tightframe_app.jobs import folders
from tightframe_app.jobs import recipes as named
from tightframe_app.recipes import Recipe, results

SITES = ["site-1", "site-2", "site-3"]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_files_are_those_of_the_command(tmp_path: Path) -> None:
    Recipe("fedmr_isic", rounds=2, sites=SITES, training={"epochs": 1}).export(tmp_path / "ours")
    command = ["jobs", "export", "fedmr_isic", "--rounds", "2", "--sites", ",".join(SITES)]
    command += ["--set", "training.epochs=1", "-o", str(tmp_path / "theirs")]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert _files(tmp_path / "ours") == _files(tmp_path / "theirs") != {}


def test_what_a_session_submits_is_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, bytes]] = []

    class Session:
        def submit_job(self, path: str) -> str:
            taken.append(_files(Path(path)))
            return "id"

        def close(self) -> None: ...

    monkeypatch.setattr(SessionManager, "_get_session", lambda self: Session())
    recipe = Recipe("fedmr_isic", sites=SITES)
    recipe.export(tmp_path / "job")
    job = FolderJob(recipe.job.job_name, recipe.job.sites, recipe.job.min_sites, recipe.export)
    assert SessionManager({}).submit_job(job) == "id"
    assert taken == [_files(tmp_path / "job")]


def test_keywords_are_the_values_of_a_job() -> None:
    assert list(inspect.signature(Recipe).parameters) == ["name", "preset", *JobConfig.model_fields]
    with pytest.raises(TypeError, match="round"):
        Recipe("fedmr_isic", round=2)


def test_a_silos_name_may_have_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(named.Recipe, "job", lambda self, *_, changes, **__: given.append(changes))
    monkeypatch.setattr(named, "for_production", lambda job, given: job)
    Recipe("fedmr_isic", site_models={"b.org": {"model": "small_cnn"}}, training={"epochs": 2})
    assert given == [{"site_models": {"b.org": {"model": "small_cnn"}}, "training.epochs": 2}]


def test_other_clients_are_refused_before_anything_runs(tmp_path: Path) -> None:
    env = SimEnv(num_clients=2, workspace_root=str(tmp_path / "root"))
    with pytest.raises(JobError, match="SimEnv"):
        Recipe("fedmr_isic", sites=SITES).execute(env)
    assert not (tmp_path / "root").exists()


@pytest.mark.whole
def test_the_script_of_a_committed_folder_exports_what_the_command_does(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "jobs/fedncm_heart/job.py"), "--export", "--export-dir", "scripts"]
    subprocess.run(script, cwd=tmp_path, check=True)
    command = ["jobs", "export", "fedncm_heart", "-o", str(tmp_path / "theirs")]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert _files(tmp_path / "scripts/fedncm_heart") == _files(tmp_path / "theirs") != {}


def test_the_script_is_never_signed_and_so_never_submitted(tmp_path: Path) -> None:
    job = named.get("fedncm_heart").job()
    folders.write_job(folders.committed_files(job), tmp_path / "job")
    assert folders.check_folder(tmp_path / "job") == []
    with pytest.raises(JobError, match=r"job\.py does not belong"):
        folders.sign(tmp_path / "job", signer=None)  # type: ignore[arg-type]
    (tmp_path / "job" / folders.SCRIPT).write_text("print()")
    assert "differs" in folders.check_folder(tmp_path / "job")[0]


@pytest.mark.whole
def test_a_recipe_runs_in_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = forking.environment(os.environ)
    for name in values.keys() & {"PATH", forking.SOCKET}:
        monkeypatch.setenv(name, values[name])
    monkeypatch.setattr(sys, "executable", forking.executable(values))
    recipe = Recipe(
        "fedmr_isic",
        sites=SITES,
        rounds=1,
        training={"epochs": 1},
        dataset_options={"image_size": 16},
        model_options={"widths": [8, 8, 8]},
    )
    run = recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path)))
    done = results(run.get_result())
    assert done.outcome.trained and done.outcome.rounds_done == 1
