"""``tightframe site check``: every problem at once, each with what to do, and nothing is changed."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from nvflare.security.security import FLAuthorizer
from PIL import Image
from tests.conftest import ROOT
from tests.privacy.ledgers import SiteKeys, open_ledger
from tests.securesum.certificates import issue, make_root
from typer.testing import CliRunner

from tightframe.data.isic_folder import IMAGES
from tightframe.securesum.identity import public_key_hash
from tightframe_app import site_engine, site_machine
from tightframe_app.cli import app
from tightframe_app.site_check import look
from tightframe_app.site_findings import Asked, Finding

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=30), "end": NOW + timedelta(days=300)}
PROJECT = make_root(**DATES)
SITE = issue(PROJECT, "hospital-a", **DATES)
TEMPLATES = ROOT / "provisioning"


def _records(folder: Path) -> dict[str, Any]:
    """Thirty made images of centre 3."""
    (folder / IMAGES).mkdir(parents=True)
    with (folder / "train_test_split").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "target", "center", "fold", "fold2"])
        for index in range(30):
            name, fold = f"ISIC_{index:03d}", "train" if index < 24 else "test"
            writer.writerow([name, index % 3, 3, fold, f"{fold}_3"])
            noise = np.random.default_rng(index).integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / IMAGES / f"{name}.jpg")
    return {"root": str(folder), "center": 3}


def _kit(folder: Path, site: Any = SITE) -> None:
    folder.mkdir(parents=True)
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    (folder / "fed_client.json").write_text(json.dumps({"servers": [], "client": client}))
    (folder / "client.crt").write_bytes(site.x509.public_bytes(Encoding.PEM))
    (folder / "rootCA.pem").write_bytes(PROJECT.x509.public_bytes(Encoding.PEM))
    key = site.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / "client.key").write_bytes(key)
    (folder / "client.key").chmod(0o600)


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """A site as the templates make it, with everything in order; returns its configuration."""
    _kit(tmp_path / "startup")
    local = tmp_path / "local"
    shutil.copytree(TEMPLATES / "local", local)
    (tmp_path / "state").mkdir(mode=0o700)
    policy = json.loads((TEMPLATES / "policies" / "standard.json").read_text())
    values = {
        "state_dir": str(tmp_path / "state"),
        "device": "cpu",
        "data": {"fed_isic2019": _records(tmp_path / "records")},
        "policy": policy,
    }
    (local / "tightframe.json").write_text(json.dumps(values))
    (local / "tightframe.json").chmod(0o600)
    return local / "tightframe.json"


def _change(config: Path, **changes: Any) -> None:
    values = json.loads(config.read_text())
    for dotted, value in changes.items():
        part, *names = dotted.split("__")
        place = values
        for name in names:
            place, part = place.setdefault(part, {}), name
        place[part] = value
    config.write_text(json.dumps(values))


def _found(config: Path, **how: Any) -> list[Finding]:
    return list(look(Asked(config, **{"production": True} | how)))


def _problems(config: Path, **how: Any) -> list[str]:
    return [f"{item.area}: {item.text}" for item in _found(config, **how) if item.state == "problem"]


def test_a_site_made_from_the_templates_has_no_problem(hospital: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    line = ["site", "check", "-c", str(hospital), "--production"]
    done = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "no problem was found"
    for part in (
        "configuration",
        "policy",
        "data",
        "device",
        "identity",
        "disk",
        "ledger",
        "engine",
        "package",
        "clock",
    ):
        assert any(row.split()[1:2] == [part] for row in done.output.splitlines()[:-1]), part
    pin = public_key_hash(SITE.certificate).hex()
    text = "".join(done.output.split())
    assert pin in text and "profilestandard" in text and "21train" in text
    assert "hospital-a:certificate,keyandroot" in text, "the name comes from the certificate"
    assert str(tmp_path / "state" / "privacy" / "hospital-a" / "ledger.sqlite") in text
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert set(after) == set(before)
    assert {path for path in after if after[path] != before[path]} <= {tmp_path / "state"}


def test_all_problems_are_told_at_once(hospital: Path, tmp_path: Path) -> None:
    """One of each area, and the exit code says so."""
    _change(
        hospital,
        device="cuda:7",
        data__fed_isic2019__root=str(tmp_path / "nowhere"),
        policy__profile="strict",
        policy__pinned_only=True,
    )
    hospital.chmod(0o666)
    (tmp_path / "state").chmod(0o755)
    (tmp_path / "startup" / "client.key").chmod(0o644)
    (hospital.parent / "privacy.json").unlink()
    problems = _problems(hospital)
    for part in (
        "configuration: .* can be changed by others",
        "policy: pinned_only without any pin",
        "data: fed_isic2019: TF-20",
        "device: TF-303",
        "identity: TF-615.*mode 0644",
        "disk: .* is open to others \\(mode 0755\\): chmod 0700",
        "engine: no egress guard",
    ):
        assert any(re.search(part, text) for text in problems), (part, problems)
    done = CliRunner().invoke(app, ["site", "check", "-c", str(hospital), "--production"])
    assert done.exit_code == 1 and f"{len(problems)} problems" in done.output


def test_every_wrong_key_of_the_configuration_is_told_and_the_rest_is_looked_at(hospital: Path) -> None:
    _change(hospital, devise="cpu", loader_workers=-1, policy__epsilon_cap=-1.0, policy__log_streaming=True)
    problems = _problems(hospital)
    for key in ("devise", "loader_workers", "policy.epsilon_cap", "policy.log_streaming"):
        assert any(text.startswith(f"configuration: TF-202: {key}") for text in problems)
    assert len(problems) == 4
    assert any(item.area == "identity" and item.state == "ok" for item in _found(hospital))


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("privacy.json", {"default_scope": "other"}, "no egress guard"),
        ("privacy.json", {"components": []}, "a job's filter would have the last word"),
        (
            "privacy.json",
            {"scopes": [{"name": "tightframe"}, {"name": "b"}]},
            "the scopes tightframe, b lack",
        ),
        ("resources.json", {"allow_log_streaming": True}, '"allow_log_streaming": false'),
        ("resources.json", {"class_allow_list": ["*"]}, "build other classes than ours"),
        ("resources.json", {"class_allow_list": ["tightframe."]}, "build other classes than ours"),
        ("resources.json", {"class_list_enforcement_mode": "warn"}, "only warns of other classes"),
        ("authorization.json", {"permissions": {"project_admin": "any"}}, "shell_commands"),
        ("authorization.json", {"permissions": {"lead": {"shell_commands": "o:site"}}}, "shell_commands"),
        ("authorization.json", None, "shell_commands"),
        ("resources.json", None, "no readable local/resources.json"),
    ],
)
def test_the_engines_own_files(
    hospital: Path, file: str, change: Mapping[str, Any] | None, told: str
) -> None:
    path = hospital.parent / file
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (problem,) = _problems(hospital, records=False)
    assert problem.startswith("engine: ") and told in problem


def test_without_a_guard_where_the_policy_does_without_it(hospital: Path) -> None:
    _change(hospital, policy__egress_guard=False)
    (hospital.parent / "privacy.json").unlink()
    assert _problems(hospital, records=False) == []
    assert any(item.state == "note" and "no egress guard" in item.text for item in _found(hospital))


def test_the_permissions_of_the_template_are_what_the_engine_makes_of_them() -> None:
    """The engine's own authoriser: nobody runs a shell command at a site, a lead submits jobs."""
    from nvflare.fuel.sec.authz import AuthzContext, Person

    authorizer = FLAuthorizer("hospital", json.loads((TEMPLATES / "local/authorization.json").read_text()))

    def allowed(role: str, right: str, submitter: str = "somebody") -> bool:
        user = Person("somebody", "hospital", role)
        granted, error = authorizer.authorize(
            AuthzContext(right, user, Person(submitter, "hospital", "lead"))
        )
        return bool(granted) and not error

    roles = ("project_admin", "org_admin", "lead", "member")
    assert [role for role in roles if allowed(role, "shell_commands") or allowed(role, "cat")] == []
    assert [role for role in roles if allowed(role, "byoc")] == []
    assert [role for role in roles if allowed(role, "submit_job")] == ["project_admin", "lead"]
    assert all(allowed(role, "view") and allowed(role, "show_stats") for role in roles)
    # A command to a running job is for whoever may abort it.
    assert [role for role in roles if allowed(role, "app_command")] == ["project_admin", "org_admin", "lead"]
    assert all(
        allowed(role, "app_command", other) == allowed(role, "abort_job", other)
        for role in roles
        for other in ("somebody", "somebody else")
    )
    assert not allowed("lead", "app_command", "somebody else")


def _at(site: Any, tmp_path: Path, hospital: Path) -> list[Finding]:
    _kit(tmp_path / "other", site)
    return [
        item for item in _found(hospital, kit=tmp_path / "other", records=False) if item.area == "identity"
    ]


def test_certificates_that_are_over_or_nearly(hospital: Path, tmp_path: Path) -> None:
    soon = issue(PROJECT, "hospital-a", start=NOW - timedelta(days=9), end=NOW + timedelta(days=9))
    assert any(
        item.state == "note" and "ask for a new kit in time" in item.text
        for item in _at(soon, tmp_path, hospital)
    )
    shutil.rmtree(tmp_path / "other")
    over = issue(PROJECT, "hospital-a", start=NOW - timedelta(days=9), end=NOW - timedelta(days=1))
    (problem,) = [item for item in _at(over, tmp_path, hospital) if item.state == "problem"]
    assert "TF-615" in problem.text
    shutil.rmtree(tmp_path / "other")
    foreign = issue(make_root("other", **DATES), "hospital-a", **DATES)
    (problem,) = [item for item in _at(foreign, tmp_path, hospital) if item.state == "problem"]
    assert "TF-615" in problem.text


def test_production_needs_a_kit_a_state_folder_and_records(hospital: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "startup")
    hospital.write_text("{}")
    problems = _problems(hospital)
    assert any("no startup kit" in text for text in problems)
    assert sum("TF-201" in text for text in problems) == 2
    hospital.write_text(json.dumps({"sites": {}}))
    assert any("each has a file of its own" in text for text in _problems(hospital))
    _change(hospital, state_dir=str(tmp_path / "none"))


def test_the_state_folder_must_be_there_and_writable(hospital: Path, tmp_path: Path) -> None:
    _change(hospital, state_dir=str(tmp_path / "none"))
    (problem,) = _problems(hospital, records=False)
    assert f"install -d -m 0700 {tmp_path / 'none'}" in problem


def test_a_full_disk_and_a_read_only_one(
    hospital: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(site_machine.shutil, "disk_usage", lambda _: usage._replace(free=2**29))
    assert ["disk" in text and "which is little" in text for text in _problems(hospital)] == [True]
    monkeypatch.setattr(site_machine.shutil, "disk_usage", lambda _: usage._replace(free=2**32))
    assert _problems(hospital) == []

    def full(**_: Any) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(site_machine.tempfile, "NamedTemporaryFile", full)
    (problem,) = _problems(hospital)
    assert "cannot be written: No space left on device" in problem


def test_a_clock_that_jumps(hospital: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 130.0))
    monkeypatch.setattr(site_machine.time, "time", lambda: next(times))
    (finding,) = site_machine.clock()
    assert finding.state == "problem" and re.search(r"jumped by (29|30)\.", finding.text)


def test_a_ledger_that_others_can_read(hospital: Path, tmp_path: Path) -> None:
    from tightframe.privacy.ledger.ledger import ledger_path

    path = ledger_path(tmp_path / "state", "hospital-a")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    path.chmod(0o640)
    (problem,) = _problems(hospital, records=False)
    assert problem.startswith("ledger: ") and f"chmod 0600 {path}" in problem
    path.chmod(0o600)
    (problem,) = _problems(hospital, records=False)
    assert problem.startswith("ledger: TF-704") and "another file" in problem
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b""


def test_a_ledger_of_an_earlier_project_is_whole_once_its_root_is_named(
    hospital: Path, tmp_path: Path
) -> None:
    from tightframe.privacy.ledger.ledger import ledger_path

    earlier = make_root("the project before", **DATES)
    keys = SiteKeys()
    keys.root, keys.signer = earlier, issue(earlier, "hospital-a", **DATES).signer()
    path = ledger_path(tmp_path / "state", "hospital-a")
    open_ledger(path, keys, create=True, clock=lambda: NOW).close()
    (problem,) = _problems(hospital, records=False)
    assert (
        problem.startswith(f"ledger: {path}: TF-702") and "name that one's root in `ledger_roots`" in problem
    )
    root = tmp_path / "earlier.pem"
    values = json.loads(hospital.read_text()) | {"ledger_roots": [str(root)]}
    hospital.write_text(json.dumps(values))
    (problem,) = _problems(hospital, records=False)
    assert "was not looked at: TF-202" in problem and f"{root} gave No such file" in problem
    root.write_bytes(earlier.x509.public_bytes(Encoding.PEM))
    assert _problems(hospital, records=False) == []
    found = _found(hospital, records=False)
    assert any(item.area == "ledger" and "0 entries, whole; left: epsilon" in item.text for item in found)


def test_the_simulators_file_is_looked_at_site_by_site(hospital: Path, tmp_path: Path) -> None:
    data = json.loads(hospital.read_text())["data"]
    sites = {
        "site-1": {"data": data, "device": "cpu"},
        "site-2": {"device": "cpu", "policy": {"profile": "strict"}},
    }
    path = tmp_path / "simulator.json"
    path.write_text(json.dumps({"sites": sites}))
    found = _found(path, production=False)
    assert [item for item in found if item.state == "problem"] == []
    areas = {item.area for item in found}
    assert {"data of site-1", "policy of site-2", "device of site-2"} <= areas
    assert any(item.area == "data of site-2" and "no records are configured" in item.text for item in found)


def test_no_file_is_no_check(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["site", "check", "-c", str(tmp_path / "none.json")])
    assert isinstance(done.exception, FileNotFoundError)


def test_the_guard_is_called_by_its_right_name() -> None:
    from tightframe.flare.guard import EgressGuard

    assert f"{EgressGuard.__module__}.{EgressGuard.__qualname__}" == site_engine.GUARD
