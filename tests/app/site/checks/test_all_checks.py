"""``tightframe site check``: every problem at once, each with what to do, and nothing is changed."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from nvflare.security.security import FLAuthorizer
from tests.support import ROOT
from tests.support.jobs import SMALL
from tests.support.ledgers import SiteKeys, open_ledger
from tests.support.made_isic import write_centre
from tests.support.outputs import checked
from tests.support.securesum.certificates import issue, make_root
from typer.testing import CliRunner

from tightframe.config.job import parse_job
from tightframe.learning import model_update
from tightframe.rounds.checkpoint import tensor_bytes
from tightframe.rounds.setup import prepare
from tightframe.securesum.identity import public_key_hash
from tightframe_app.cli import app
from tightframe_app.federation.kits import LAUNCHER
from tightframe_app.site.checks import all_checks, engine
from tightframe_app.site.checks.all_checks import check_site
from tightframe_app.site.checks.findings import Finding, Scope

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=30), "end": NOW + timedelta(days=300)}
PROJECT = make_root(**DATES)
SITE = issue(PROJECT, "hospital-a", **DATES)
TEMPLATES = ROOT / "provisioning"


def _records(folder: Path) -> dict[str, Any]:
    write_centre(folder, 20, 30)
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
    return list(check_site(Scope(config, **{"production": True} | how)))


def _problems(config: Path, **how: Any) -> list[str]:
    return [f"{item.area}: {item.text}" for item in _found(config, **how) if item.state == "problem"]


def test_of_a_set_that_jobs_divide_the_default_is_said_to_be_one(hospital: Path) -> None:
    _change(hospital, data={"digits": {"silo": 0}})
    (text,) = [item.text for item in _found(hospital, records=False) if item.text.startswith("digits: ")]
    assert "silo 0 of 10" in text
    assert text.endswith("; 10 silos are the default, and a job may divide otherwise (--job)")


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


def test_as_json(hospital: Path) -> None:
    _change(hospital, state_dir=None)
    options = ["-c", str(hospital), "--production", "--no-records", "--format", "json"]
    done = CliRunner().invoke(app, ["site", "check", *options])
    told = checked("site check", done.stdout)
    assert done.exit_code == 1 and not told["valid"]
    assert any("state_dir" in item["text"] for item in told["findings"] if item["state"] == "problem")


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
        "configuration: others can change ",
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
        ("privacy.json", {"components": []}, "a job's filter would run after it"),
        (
            "privacy.json",
            {"scopes": [{"name": "tightframe"}, {"name": "b"}]},
            "the scopes tightframe, b lack",
        ),
        ("resources.json", {"allow_log_streaming": True}, '"allow_log_streaming": false'),
        ("resources.json", {"class_allow_list": ["*"]}, "build classes other than ours"),
        ("resources.json", {"class_allow_list": ["tightframe."]}, "build classes other than ours"),
        ("resources.json", {"class_list_enforcement_mode": "warn"}, "only warns about other classes"),
        ("resources.json", {"components": []}, '"path": "tightframe.flare.doors.SiteDoors", "args": {}} to'),
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


def test_a_version_of_the_engine_that_was_not_tested(hospital: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.metadata.version
    monkeypatch.setattr(engine.metadata, "version", lambda name: "2.9.1" if name == "nvflare" else real(name))
    (problem,) = _problems(hospital, records=False)
    assert problem.startswith("engine: NVFlare 2.9.1 is installed") and "TF-732" in problem


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
    assert any("each site has its own file" in text for text in _problems(hospital))
    _change(hospital, state_dir=str(tmp_path / "none"))


def test_the_state_folder_must_be_there_and_writable(hospital: Path, tmp_path: Path) -> None:
    _change(hospital, state_dir=str(tmp_path / "none"))
    (problem,) = _problems(hospital, records=False)
    assert f"install -d -m 0700 {tmp_path / 'none'}" in problem and "restore its backup" in problem


def test_a_full_disk_and_a_read_only_one(
    hospital: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(all_checks.shutil, "disk_usage", lambda _: usage._replace(free=2**29))
    assert ["disk" in text and "which is little" in text for text in _problems(hospital)] == [True]
    monkeypatch.setattr(all_checks.shutil, "disk_usage", lambda _: usage._replace(free=2**32))
    assert _problems(hospital) == []

    def full(**_: Any) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(all_checks.tempfile, "NamedTemporaryFile", full)
    (problem,) = _problems(hospital)
    assert "cannot be written: No space left on device" in problem


def test_a_clock_that_jumps(hospital: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 130.0))
    monkeypatch.setattr(all_checks.time, "time", lambda: next(times))
    (finding,) = all_checks.clock()
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
    assert problem.startswith(f"ledger: {path}: TF-702") and "add that root to `ledger_roots`" in problem
    root = tmp_path / "earlier.pem"
    values = json.loads(hospital.read_text()) | {"ledger_roots": [str(root)]}
    hospital.write_text(json.dumps(values))
    (problem,) = _problems(hospital, records=False)
    assert "was not checked: TF-202" in problem and f"{root} gave No such file" in problem
    root.write_bytes(earlier.x509.public_bytes(Encoding.PEM))
    assert _problems(hospital, records=False) == []
    found = _found(hospital, records=False)
    assert any(item.area == "ledger" and "0 entries, whole; left: epsilon" in item.text for item in found)


def test_the_simulators_file_is_looked_at_site_by_site(hospital: Path, tmp_path: Path) -> None:
    data = json.loads(hospital.read_text())["data"]
    sites = {
        "site-1": {"data": data, "device": "cpu", "policy": {"profile": "research", "minimum_cohort": 7}},
        "site-2": {"device": "cpu", "policy": {"profile": "strict"}},
    }
    path = tmp_path / "simulator.json"
    path.write_text(json.dumps({"sites": sites}))
    found = _found(path, production=False)
    assert [item for item in found if item.state == "problem"] == []
    areas = {item.area for item in found}
    assert {"data of site-1", "policy of site-2", "device of site-2"} <= areas
    of_profile, own = [item.text for item in found if (item.area, item.state) == ("policy of site-1", "note")]
    assert "rules of the profile" in of_profile and "\nsigned_jobs off\n" in of_profile
    assert own == "minimum_cohort: 7 (differs from standard)"
    assert any(item.area == "data of site-2" and "no records are configured" in item.text for item in found)
    areas = {item.area for item in _found(path, production=False, site="site-2")}
    assert "policy of site-2" in areas and "policy of site-1" not in areas, (
        "the site that was asked for alone"
    )
    (problem,) = _problems(path, production=False, site="site-9")
    assert problem == "configuration: TF-201: the file has no entry for site-9; it has site-1, site-2"


def test_a_file_of_many_sites_is_a_line_a_site_and_what_is_wrong(hospital: Path, tmp_path: Path) -> None:
    data = json.loads(hospital.read_text())["data"]
    sites: dict[str, Any] = {f"site-{number}": {"device": "cpu"} for number in range(1, 7)}
    sites["site-4"]["data"] = {"fed_isic2019": {**data["fed_isic2019"], "root": str(tmp_path / "absent")}}
    path = tmp_path / "simulator.json"
    path.write_text(json.dumps({"sites": sites}))
    lines: dict[bool, list[list[str]]] = {}
    for verbose in (False, True):
        line = ["site", "check", "-c", str(path), "--no-records", *(["--verbose"] if verbose else [])]
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 1 and "1 problem: correct it" in done.output, done.output
        lines[verbose] = [row.split() for row in done.output.splitlines()]
    short, whole = lines[False], lines[True]
    for name in sites:
        ((state, *_),) = [row for row in short if row[1:2] == [name]]
        assert state == ("problem" if name == "site-4" else "ok"), name
    ((*_, name),) = [row[:4] for row in short if row[:2] == ["problem", "data"]]
    assert name == "site-4" and len(short) < len(whole)
    assert [row for row in short if row[2:3] == ["of"] and row[0] != "problem"] == []
    assert {("ok", "policy", "of", "site-1")} <= {tuple(row[:4]) for row in whole}


def test_a_simulation_is_told_which_sites_and_which_start_it_lacks(tmp_path: Path) -> None:
    start = model_update.initial_model(prepare(parse_job(SMALL)).setting, 0)
    (tmp_path / "start.safetensors").write_bytes(tensor_bytes(start))
    given = hashlib.sha256((tmp_path / "start.safetensors").read_bytes()).hexdigest()
    job, path = {**SMALL, "initial_model_sha256": given}, tmp_path / "simulator.json"

    def problems(sites: Sequence[str], **server: str) -> list[str]:
        entries = {site: {"device": "cpu", "policy": {"profile": "research"}} for site in sites}
        path.write_text(json.dumps({"sites": entries, "server": server}))
        path.chmod(0o600)
        return _problems(path, production=False, job=job)

    right = {"initial_model": str(tmp_path / "start.safetensors")}
    assert problems(SMALL["sites"], **right) == []
    (absent,) = problems(SMALL["sites"])
    assert absent.startswith("job: TF-505: ") and '{"server": {"initial_model": ' in absent
    (nowhere,) = problems(SMALL["sites"], initial_model=str(tmp_path / "none.safetensors"))
    assert "none.safetensors" in nowhere
    (fewer,) = problems(SMALL["sites"][:2], **right)
    assert fewer.startswith("job: TF-201: the file has no entry for site-3")
    more = [*SMALL["sites"], "site-4"]
    assert problems(more, **right) == [], "one that the job does not name has no part in it"
    assert problems([], initial_model=right["initial_model"]) == [], "the server's entry alone: twins train"


def test_a_file_that_is_no_json_is_named_with_one_code(tmp_path: Path) -> None:
    path = tmp_path / "tightframe.json"
    path.write_text('{"data": {')
    path.chmod(0o600)
    (problem,) = _problems(path, production=False)
    assert problem.startswith(f"configuration: TF-202: {path} is not readable JSON")


def test_no_file_is_no_check(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["site", "check", "-c", str(tmp_path / "none.json")])
    assert isinstance(done.exception, FileNotFoundError)


def test_one_site_is_checked_by_its_file_or_its_kit(hospital: Path, tmp_path: Path) -> None:
    both = [tuple(_lines("-c", str(place))) for place in (hospital, tmp_path)]
    assert both[0] == both[1] and ("ok", "configuration") in both[0]
    for several in (["-c", str(hospital), "-c", str(tmp_path)], ["-c", str(hospital), str(tmp_path)]):
        done = CliRunner().invoke(app, ["site", "check", *several], env={"COLUMNS": "300"})
        assert done.exit_code == 2
        assert f"got 2: call this once for each of {hospital}, {tmp_path}" in " ".join(done.output.split())


def _lines(*line: str) -> list[tuple[str, ...]]:
    """State and area of each finding."""
    done = CliRunner().invoke(app, ["site", "check", "--no-records", *line])
    return [tuple(row.split()[:2]) for row in done.output.splitlines()]


def test_the_guard_is_called_by_its_right_name() -> None:
    from tightframe.flare.guard import EgressGuard

    assert f"{EgressGuard.__module__}.{EgressGuard.__qualname__}" == engine.GUARD


@pytest.fixture
def entered(hospital: Path) -> Iterator[Path]:
    """The same hospital in a folder that every account may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="tightframe-hospital-") as folder:
        made = Path(folder)
        for one in hospital.parent.parent.iterdir():
            shutil.copytree(one, made / one.name)
        config = made / "local" / hospital.name
        _change(config, state_dir=str(made / "state"), data__fed_isic2019__root=str(made / "records"))
        config.chmod(0o600)
        made.chmod(0o711)
        yield made


def test_one_account_is_told_and_what_everybody_can_reach_in_it(hospital: Path, entered: Path) -> None:
    (note,) = [item.text for item in _found(hospital) if item.area == "accounts" and item.state == "note"]
    assert "engine and training run in one account" in note and "Two accounts" in note
    assert _problems(hospital) == []
    config, folder = entered / "local" / hospital.name, entered / "records"
    folder.chmod(0o755)
    config.parent.chmod(0o777)
    texts = {item.text: item.state for item in _found(config) if item.area == "accounts"}
    assert texts[f"any account on this machine can read records in {folder}"] == "note"
    changed = [text for text, state in texts.items() if state == "problem"]
    assert any(f"can change or replace {config}: policy" in text for text in changed)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another account")
def test_root_is_told_what_the_kits_own_account_cannot_read(entered: Path) -> None:
    config = entered / "local" / "tightframe.json"
    shutil.chown(entered, user="nobody")
    told = f"{config} belongs to root, and nobody, which has the kit, cannot read it: chown nobody"
    assert any(told in text for text in _problems(config, records=False))
    shutil.chown(config, user="nobody")
    assert not any("TF-202" in text for text in _problems(config, records=False))


def test_two_accounts_are_held_apart_by_what_the_files_say(hospital: Path, tmp_path: Path) -> None:
    launcher = {"path": LAUNCHER, "args": {"account": pwd.getpwuid(os.geteuid()).pw_name}}
    _change(hospital, engine_account="nobody")
    assert any("names the launchers ['nvflare." in text for text in _problems(hospital))
    resources = json.loads((hospital.parent / "resources.json").read_text())
    resources["components"][-1] = {"id": "training_launcher", **launcher}
    (hospital.parent / "resources.json").write_text(json.dumps(resources))
    tmp_path.chmod(0o700)
    assert _problems(hospital) == []
    ok = [item.text for item in _found(hospital) if item.area == "accounts" and item.state == "ok"]
    assert any(text.startswith("nobody can read neither records, state folder nor key of") for text in ok)
    assert any(text.endswith("mode 0700") and "state folder" in text for text in ok)
    launcher["args"] = {"account": "daemon"}
    resources["components"][-1] = {"id": "training_launcher", **launcher}
    (hospital.parent / "resources.json").write_text(json.dumps(resources))
    assert any("says that daemon trains" in text for text in _problems(hospital))


def test_the_engines_own_kit_is_looked_at(hospital: Path, tmp_path: Path) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    _change(hospital, engine_account="nobody")
    resources = json.loads((hospital.parent / "resources.json").read_text())
    ours = {"id": "training_launcher", "path": LAUNCHER, "args": {"account": me}}
    resources["components"][-1] = ours
    (hospital.parent / "resources.json").write_text(json.dumps(resources))
    tmp_path.chmod(0o700)
    assert any("engine's own kit was not checked" in item.text for item in _found(hospital, records=False))
    kit = tmp_path / "engine"
    _kit(kit / "startup", issue(PROJECT, "hospital-a", **DATES))
    (kit / "local").mkdir()
    (kit / "local" / "resources.json").write_text(json.dumps(resources))
    key = kit / "startup" / "client.key"

    def problems(place: Path = kit) -> list[str]:
        return _problems(hospital, records=False, engine_kit=place)

    if os.geteuid() == 0:
        assert any(
            f"TF-742: the engine's key {key} belongs to {me}: chown nobody" in text for text in problems()
        )
        shutil.chown(key, user="nobody")
        assert problems() == problems(kit / "startup") == []
    key.chmod(0o640)
    assert any(f"chmod 0600 {key}" in text for text in problems())
    key.chmod(0o600)
    (kit / "local").chmod(0o777)
    assert any(f"chmod go-w {kit / 'local'}" in text for text in problems())
    (kit / "local").chmod(0o755)
    (kit / "local" / "resources.json").write_text('{"components": []}')
    assert any(f"{kit / 'local'}/resources.json names the launchers []" in text for text in problems())
    shutil.copy(tmp_path / "startup" / "client.crt", kit / "startup" / "client.crt")
    assert any("TF-745: the engine's kit" in text for text in problems())
    assert any("TF-745" in text and "not a second one" in text for text in problems(tmp_path))
    key.unlink()
    assert any(f"TF-615: the engine's kit has no key at {key}" in text for text in problems())
    (kit / "startup" / "fed_client.json").unlink()
    assert any("holds no readable fed_client.json" in text for text in problems())


@pytest.mark.parametrize(
    ("place", "mode", "told"),
    [
        ("records", 0o711, "can read records in"),
        ("state", 0o750, None),
        ("state", 0o705, "can read the ledger and journal in"),
        ("startup/client.key", 0o604, "can read the key"),
        (".", 0o711, "can read the jobs' results in"),
        ("startup", 0o757, "can change"),
        ("local/privacy.json", 0o646, "can change"),
    ],
)
def test_each_thing_that_the_engines_account_reaches_is_named(
    place: str, mode: int, told: str | None, hospital: Path, entered: Path
) -> None:
    config = entered / "local" / hospital.name
    _change(config, engine_account="nobody")
    for name in ("records", "state"):
        (entered / name).chmod(0o700)
    (entered / place).chmod(mode)
    found = [text for text in _problems(config) if "TF-742: nobody" in text and str(entered / place) in text]
    assert bool(found) == (told is not None)
    assert told is None or any(told in text for text in found), found


def test_engine_accounts_that_cannot_be_are_named(hospital: Path) -> None:
    _change(hospital, engine_account="no-such-account")
    assert any("TF-742: Expected the account 'no-such-account'" in text for text in _problems(hospital))
    _change(hospital, engine_account="root")
    assert any("root, which can read everything" in text for text in _problems(hospital))
    _change(hospital, engine_account="../x")
    assert any("TF-202" in text and "engine_account" in text for text in _problems(hospital))


def test_a_finding_of_two_checks_is_shown_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = Finding("job", "problem", "TF-214: unknown names")
    monkeypatch.setattr("tightframe_app.site.checks.all_checks.check_site", lambda scope: [twice, twice])
    done = CliRunner().invoke(app, ["site", "check", "-c", str(tmp_path / "tightframe.json")])
    assert done.output.count("TF-214") == 1 and "1 problem" in done.output, done.output
