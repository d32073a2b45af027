"""The command as people type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def tightframe(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tightframe_app.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_list_names_every_job(tmp_path: Path) -> None:
    done = tightframe("jobs", "list", cwd=tmp_path)
    assert done.returncode == 0
    assert "fedmr_isic" in done.stdout and "fedavg_isic" in done.stdout


def test_export_writes_what_was_asked_for(tmp_path: Path) -> None:
    done = tightframe(
        "jobs", "export", "fedmr_isic", "--preset", "full", "--rounds", "7",
        "--sites", "hospital-a, hospital-b,hospital-c",
        "--set", "method_options.intra_form=official", "-o", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    server = json.loads((tmp_path / "out/app/config/config_fed_server.json").read_text())
    job = server["workflows"][0]["args"]
    assert job["rounds"] == 7 and job["model"] == "efficientnet_b0"
    assert job["sites"] == ["hospital-a", "hospital-b", "hospital-c"]
    assert job["method_options"]["intra_form"] == "official"
    assert (
        json.loads((tmp_path / "out/meta.json").read_text())["resource_spec"]["hospital-b"]["num_of_gpus"]
        == 1
    )
    assert tightframe("jobs", "check", "out", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["jobs", "export", "fedxyz"], "fedmr_isic"),
        (["jobs", "export", "fedmr_isic", "--preset", "huge"], "rehearsal"),
        (["jobs", "export", "fedmr_isic", "--set", "rounds=many"], "TF-101"),
        (["jobs", "export", "fedmr_isic", "--set", "nonsense"], "KEY=VALUE"),
        (["simulate", "nowhere"], "nowhere"),
        (["jobs", "check", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(arguments: list[str], named: str, tmp_path: Path) -> None:
    done = tightframe(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert named in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_check_finds_a_changed_job_and_restores_the_allow_list(tmp_path: Path) -> None:
    for name in ("fedmr_isic", "fedavg_isic"):
        assert tightframe("jobs", "export", name, "--committed", cwd=tmp_path).returncode == 0
    assert tightframe("jobs", "check", cwd=tmp_path).returncode == 0
    allowed = json.loads((tmp_path / "simulator_workspace/local/resources.json").read_text())
    assert allowed["class_allow_list"] == ["nvflare.", "tightframe."]
    path = tmp_path / "jobs/fedmr_isic/app/config/config_fed_client.json"
    path.write_text(path.read_text().replace("fedmr", "fedavg"))
    done = tightframe("jobs", "check", cwd=tmp_path)
    assert done.returncode == 1 and "config_fed_client.json differs" in done.stderr


def test_simulate_checks_the_site_file_before_anything_runs(tmp_path: Path) -> None:
    tightframe("jobs", "export", "fedmr_isic", "-o", "job", cwd=tmp_path)
    (tmp_path / "sites.json").write_text(json.dumps({"sites": {"site-1": {"dta": {}}}}))
    done = tightframe("simulate", "job", "-s", "sites.json", cwd=tmp_path)
    assert done.returncode == 2 and "sites.site-1.dta" in done.stderr
    assert not (tmp_path / "simulator_workspace").exists()
