"""Apps that bring more than a job's configuration: the engine reads its own from all jobs' folders.

Before any manifest is looked at, NVFlare searches the whole workspace for a ``comm_config``, which names a
folder of Python files that it runs: in the job's process, and in the site's own when that is started anew.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.utils.app_deployer import AppDeployer
from tests.attacks.test_engine_commands import JOB, Case, heard
from tests.attacks.test_manifest import DATES, NOW, PROJECT, exported, job
from tests.support import ROOT
from tests.support.attacks.malicious_server import HEART
from tests.support.securesum.certificates import issue, make_root

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.job_manifest import APP_FILES
from tightframe.flare.doors import engine, rules
from tightframe.flare.doors.rules import Role, judge_app
from tightframe.results.files import CHECKPOINT
from tightframe_app.jobs import folders

CLIENT = "config/config_fed_client.json"
SIGNED = [f"{place}{name}" for place in ("", "config/") for name in sorted(job_manifest.ENGINE_FILES)]


def zipped(*entries: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return made.getvalue()


def plain(**more: bytes) -> bytes:
    return zipped(("config/", b""), (CLIENT, b"{}"), *more.items())


HOSTILE: dict[str, bytes] = {
    "a comm_config": plain(**{"config/comm_config.json": b"{}"}),
    "the same as HOCON": plain(**{"config/comm_config.conf": b""}),
    "the same as a default": plain(**{"comm_config.json.default": b"{}"}),
    "resources of a site": plain(**{"config/resources.json": b"{}"}),
    "a startup configuration": plain(**{"fed_client.json": b"{}"}),
    "another configuration of the job": plain(**{"config/config_fed_client.conf": b""}),
    "the same name deeper": plain(**{"config/a/config_fed_client.json": b"{}"}),
    "code": plain(**{"config/driver.py": b""}),
    "code where the engine looks for it": plain(**{"custom/tightframe.py": b""}),
    "an empty folder for code": plain(**{"custom/": b""}),
    "a way out": plain(**{"../../local/resources.json": b"{}"}),
    "an absolute name": plain(**{"/config/config_fed_client.json": b"{}"}),
    "backslashes": plain(**{"config\\config_fed_client.json": b"{}"}),
    "files of a great size": plain(**{"config/config_fed_server.json": bytes(5 * 2**20)}),
    "no archive": b"PK\x03\x04",
    "nothing": b"",
}


def test_what_people_submit_is_deployed() -> None:
    """Every file of an exported and signed job, with what the engine adds to it."""
    submitted = parse_job({**HEART, "sites": ["hospital-1", "hospital-2", "hospital-3"], "min_sites": 3})
    files = folders.job_files(submitted)
    apps = {name.partition("/")[2] for name in files if "/" in name}
    deployed = zipped(*((name, b"") for name in [*apps, job_manifest.PLACE, *SIGNED]))
    assert judge_app(Role.SITE, deployed) == judge_app(Role.SERVER, deployed) == ""
    assert {job_manifest.PLACE, *apps, *SIGNED} <= APP_FILES, "two accounts take it, too"
    going_on = plain(**{f"config/{CHECKPOINT}": b""})
    assert judge_app(Role.SERVER, going_on) == "" and judge_app(Role.SITE, going_on) != ""


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_app_of_anything_else_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile: dict[str, Any] = {
        **HOSTILE,
        "a name twice": zipped((CLIENT, b"{}"), (CLIENT, b"[]")),
        "text": "",
    }
    for name, data in hostile.items():
        assert judge_app(Role.SITE, data) != "", name
        if name != "files of a great size":
            assert judge_app(Role.SERVER, data) != "", name
    monkeypatch.setattr(engine._state, "shut", "server")
    monkeypatch.setattr(AppDeployer, "deploy", engine._deploy)
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    told = AppDeployer().deploy(
        Workspace(str(tmp_path), "server"), JOB, {}, "app", HOSTILE["code"], SimpleNamespace()
    )
    assert "files other than" in told and sorted(one.name for one in tmp_path.iterdir()) == [
        "local",
        "startup",
    ]
    assert rules.APP_FILES.keys() == {Role.SITE, Role.SERVER}


@pytest.mark.whole
def test_a_site_unpacks_no_app_with_code_or_settings_of_the_engine(tmp_path: Path) -> None:
    """As the server sends it. With the doors open the engine says what is missing, once it has unpacked."""
    for name in ("startup", "local"):
        (tmp_path / name).mkdir()
    (tmp_path / "startup" / "rootCA.pem").write_text("no certificate")
    values = {"job_id": JOB, "job_meta": {"job_id": JOB}, "app_name": "app"}
    case: Case = {"command": "train.deploy", "headers": {"cn__topic": "admin"}, "values": values}
    cases = [{**case, "zip": data.hex()} for data in (*HOSTILE.values(), plain())]
    told = heard(tmp_path, cases)
    for (answer,), name in zip(told["answers"], HOSTILE, strict=False):
        assert b"refused" in bytes.fromhex(answer["raw"]), name
    ((last,),) = told["answers"][-1:]
    assert b"unsigned job rejected" in bytes.fromhex(last["raw"]), "a plain app is judged by the engine"
    assert not (tmp_path / JOB).exists()


@pytest.mark.whole
def test_a_site_deploys_no_job_whose_manifest_does_not_hold(tmp_path: Path) -> None:
    """By the site's own policy and root, before the engine has a folder for the job."""
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    own = issue(PROJECT, "hospital-1", **DATES)
    key = own.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    for folder, name, content in (
        ("startup", "fed_client.json", json.dumps({"servers": [], "client": client}).encode()),
        ("startup", "client.crt", own.x509.public_bytes(Encoding.PEM)),
        ("startup", "rootCA.pem", PROJECT.x509.public_bytes(Encoding.PEM)),
        ("startup", "client.key", key),
        ("local", "tightframe.json", json.dumps({"state_dir": str(tmp_path / "state")}).encode()),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(content)
    (tmp_path / "startup" / "client.key").chmod(0o600)

    def crafted(name: str, values: JobConfig | None = None, **options: Any) -> bytes:
        app = exported(tmp_path / "jobs" / name, job(), **options)
        if values is not None:
            shutil.copy(exported(tmp_path / "jobs" / f"{name}-2", values) / CLIENT, app / CLIENT)
        if name == "unsigned":
            (app / job_manifest.PLACE).unlink()
        files = [one for one in app.rglob("*") if one.is_file()]
        return zipped(*((one.relative_to(app).as_posix(), one.read_bytes()) for one in files))

    stranger = issue(make_root("project", **DATES), "lead@example.org", role="lead", key="rsa", **DATES)
    attacks = {
        "TF-633": crafted("unsigned"),
        "TF-634": crafted("stranger", signer=stranger),
        "TF-635": crafted("mixed", job(rounds=2)),
        "TF-636": crafted("expired", now=NOW - timedelta(days=8), days=1),
    }
    values = {"job_id": JOB, "job_meta": {"job_id": JOB}, "app_name": "app"}
    case: Case = {"command": "train.deploy", "headers": {"cn__topic": "admin"}, "values": values}
    cases = [{**case, "zip": data.hex()} for data in (*attacks.values(), crafted("good"))]
    told = heard(tmp_path, cases)
    for (answer,), code in zip(told["answers"], attacks, strict=False):
        assert f"refused: {code}".encode() in bytes.fromhex(answer["raw"]), code
        assert f"{code}: Expected" in told["log"]
    ((last,),) = told["answers"][-1:]
    assert b"refused" not in bytes.fromhex(last["raw"]) and b"signature" in bytes.fromhex(last["raw"])
    assert not (tmp_path / JOB).exists() and not (tmp_path / "state").exists(), "no nonce is taken up"
    (tmp_path / "local" / "tightframe.json").write_text("{")
    told = heard(tmp_path, cases[-1:])
    assert b"refused: TF-202" in bytes.fromhex(told["answers"][0][0]["raw"]), "no policy, no job"


PROOF = """
import sys
from nvflare.fuel.utils.config_service import ConfigService
ConfigService.initialize({}, [sys.argv[1]])
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.communicator import load_comm_drivers
load_comm_drivers()
"""


@pytest.mark.whole
def test_the_engine_alone_runs_what_lies_in_a_jobs_configuration(tmp_path: Path) -> None:
    """Why: if this fails, the engine looks for its own settings elsewhere."""
    config = tmp_path / JOB / "app_hospital-1" / "config"
    config.mkdir(parents=True)
    (config / "comm_config.json").write_text(json.dumps({"comm_driver_path": str(config)}))
    (config / "driver.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    line = [sys.executable, "-c", PROOF, str(tmp_path)]
    subprocess.run(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=True)
    assert (tmp_path / "ran").exists()
