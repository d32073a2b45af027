"""``tightframe federation``: request files that the engine takes, kits made ready, pins kept."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.lighter.entity import participant_from_dict
from nvflare.security.security import COMMAND_CATEGORIES, FLAuthorizer
from tests.support import ROOT
from tests.support.outputs import checked
from tests.support.securesum.certificates import issue, make_root
from typer import BadParameter
from typer.testing import CliRunner, Result

from tightframe.config.site import parse_single
from tightframe.errors import SiteConfigError
from tightframe_app.cli import app
from tightframe_app.federation import kits
from tightframe_app.federation.commands import records
from tightframe_app.site.checks import engine as site_engine
from tightframe_app.site.checks.findings import Scope

TEMPLATES = ROOT / "provisioning"
NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=30), "end": NOW + timedelta(days=300)}
PROJECT = make_root(**DATES)
SITE = issue(PROJECT, "hospital-1", **DATES)
INIT = [
    "init",
    "consortium",
    *("--server", "flare.example.org=university"),
    *(part for i in (1, 2, 3) for part in ("--site", f"hospital-{i}=hospital_{i}")),
    *("--lead", "lead@example.org=university"),
]


def federation(*arguments: str, code: int | None = 0) -> Result:
    done = CliRunner().invoke(app, ["federation", *arguments])
    assert code is None or done.exit_code == code, done.output
    return done


def _pem(folder: Path, stem: str, issued: Any) -> None:
    (folder / f"{stem}.crt").write_bytes(issued.x509.public_bytes(Encoding.PEM))
    key = issued.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / f"{stem}.key").write_bytes(key)
    (folder / f"{stem}.key").chmod(0o600)
    (folder / "rootCA.pem").write_bytes(PROJECT.x509.public_bytes(Encoding.PEM))


def make_kit(folder: Path, issued: Any = SITE) -> Path:
    """A site's startup kit as packaging makes it."""
    (folder / "startup").mkdir(parents=True)
    (folder / "local").mkdir()
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    (folder / "startup/fed_client.json").write_text(json.dumps({"servers": [], "client": client}))
    _pem(folder / "startup", "client", issued)
    return folder


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return make_kit(tmp_path / "hospital[1]")


@pytest.fixture
def add_site(kit: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(*more: str, name: str = "hospital-1", code: int | None = 0) -> Result:
        state = str(tmp_path / "state")
        return federation("add-site", name, "--kit", str(kit), "--state-dir", state, *more, code=code)

    return run


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def own_pin(issued: Any) -> str:
    """The pin by ``cryptography`` alone."""
    public = issued.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()


def test_templates_are_what_the_command_writes(tmp_path: Path) -> None:
    made = {
        "local/resources.json": kits.site_resources(),
        "local/privacy.json": kits.PRIVACY,
        "local/authorization.json": kits.AUTHORIZATION,
        "server/resources.json": kits.server_resources(Path("/var/lib/tightframe-server")),
        "server/authorization.json": kits.AUTHORIZATION,
    }
    for name, values in made.items():
        assert json.loads((TEMPLATES / name).read_text()) == values, name
    federation(*INIT, "-o", str(tmp_path))
    assert hashes(tmp_path) == hashes(TEMPLATES / "federation")


def test_the_engine_takes_every_request_file(tmp_path: Path) -> None:
    federation(*INIT, "--member", "eve@example.org=university", "-o", str(tmp_path))
    profile = yaml.safe_load((tmp_path / "project.yml").read_text())
    assert profile == {
        "name": "consortium",
        "scheme": "grpc",
        "connection_security": "mtls",
        "server": {"host": "flare.example.org", "fed_learn_port": 8002, "admin_port": 8002},
    }
    found = {}
    for path in (tmp_path / "requests").iterdir():
        values = yaml.safe_load(path.read_text())
        assert values["name"] == "consortium"
        (one,) = values["participants"]
        participant_from_dict(dict(one))  # the engine's own reading; raises
        found[one["name"]] = (one["type"], one["org"], one.get("role"))
    assert found == {
        "flare.example.org": ("server", "university", None),
        "hospital-1": ("client", "hospital_1", None),
        "hospital-2": ("client", "hospital_2", None),
        "hospital-3": ("client", "hospital_3", None),
        "lead@example.org": ("admin", "university", "lead"),
        "eve@example.org": ("admin", "university", "member"),
    }


def test_a_hospital_that_joins_later_adds_one_file(tmp_path: Path) -> None:
    federation(*INIT, "-o", str(tmp_path))
    before = hashes(tmp_path)
    told = federation(*INIT, "--site", "hospital-4", "-o", str(tmp_path)).output
    after = hashes(tmp_path)
    assert set(after) - set(before) == {"requests/hospital-4.yml"}
    assert {name: after[name] for name in before} == before
    assert f"written: {tmp_path}/requests/hospital-4.yml" in told
    assert f"exists already: {tmp_path}/project.yml" in told


def test_two_hospitals_are_told_that_secure_sums_need_three(tmp_path: Path) -> None:
    two = federation(*INIT[:6], *INIT[8:], "-o", str(tmp_path / "two")).output
    assert "note: secure sums need at least 3 hospitals, got 2" in two
    assert "at least 3" not in federation(*INIT, "-o", str(tmp_path / "three")).output


def test_other_values_replace_nothing(tmp_path: Path) -> None:
    federation(*INIT, "-o", str(tmp_path))
    before = hashes(tmp_path)
    done = federation(*INIT, "--port", "9000", "--site", "hospital-4", "-o", str(tmp_path), code=1)
    assert isinstance(done.exception, FileExistsError)
    assert "project.yml" in str(done.exception)
    assert hashes(tmp_path) == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--site", "hospital 4"], "letters, digits, - and _"),
        (["--site", "hospital-1"], "'hospital-1' twice"),
        (["--site", "hospital-4=St. Mary"], "an organisation of letters, digits and _"),
        (["--lead", "somebody"], "an e-mail address"),
        (["--port", "0"], "--port"),
    ],
)
def test_names_that_provisioning_would_refuse_are_told_at_once(
    tmp_path: Path, wrong: list[str], told: str
) -> None:
    output = federation(*INIT, *wrong, "-o", str(tmp_path), code=2).output
    assert told in " ".join(output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["lead", "org_admin", "member"])
def test_no_person_operates_the_engine_of_an_organisation_of_theirs(role: str) -> None:
    """In the guide's example lead and server are the university's: a lead could lock a hospital out there."""
    authorizer = FLAuthorizer("university", dict(kits.AUTHORIZATION))
    person, other = Person("a@b.org", "university", role), Person("other@b.org", "hospital_1", "lead")

    def may(right: str) -> bool:
        told = authorizer.authorize(AuthzContext(user=person, submitter=other, right=right))
        return bool(told[0])

    rights = [*COMMAND_CATEGORIES, "submit_job", "clone_job", "app_command"]
    viewed = {"check_status", "get_job_meta", "list_jobs", "reset_errors", "show_errors", "show_scopes"}
    assert {right for right in rights if may(right)} == {
        *(viewed | {"show_stats"}),
        *(["submit_job"] if role == "lead" else []),
    }


def test_a_kit_is_made_ready(kit: Path, add_site: Callable[..., Result], tmp_path: Path) -> None:
    startup = hashes(kit / "startup")
    records = {"root": "/data/isic", "center": 2}
    told = add_site(
        *("--policy", "strict", "--dataset-id", "skin", "--device", "cpu", "--gpus", "2"),
        *("--gpu-memory", "16", "--data", f"fed_isic2019={json.dumps(records)}"),
    ).output
    local = kit / "local"
    assert json.loads((local / "privacy.json").read_text()) == kits.PRIVACY
    assert json.loads((local / "authorization.json").read_text()) == kits.AUTHORIZATION
    resources = json.loads((local / "resources.json").read_text())
    assert resources["allow_log_streaming"] is False
    components = {item["id"]: item for item in resources["components"]}
    assert components["resource_manager"]["args"]["num_of_gpus"] == 2
    assert components["doors"]["path"] == "tightframe.flare.doors.SiteDoors"
    config = local / "tightframe.json"
    entry, _ = parse_single(json.loads(config.read_text()))
    assert entry.data == {"fed_isic2019": records}
    assert (entry.dataset_id, entry.device, entry.state_dir) == ("skin", "cpu", str(tmp_path / "state"))
    written = json.loads(config.read_text())["policy"]
    assert written == json.loads((TEMPLATES / "policies/strict.json").read_text())
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert hashes(kit / "startup") == startup, "what provisioning gave is never changed"
    assert f"hospital-1={own_pin(SITE)}" in told
    engine = list(site_engine.files(Scope(config, production=True), guarded=True))
    assert [item.state for item in engine] == ["ok", "ok", "ok"]


def test_a_second_time_changes_nothing_and_own_files_are_never_replaced_unasked(
    kit: Path, add_site: Callable[..., Result]
) -> None:
    add_site()
    before = hashes(kit)
    assert add_site().output.count("exists already") == 4
    assert hashes(kit) == before
    own = json.loads((kit / "local/resources.json").read_text()) | {"class_allow_list": ["mine."]}
    (kit / "local/resources.json").write_text(json.dumps(own))
    (kit / "local/privacy.json").unlink()
    done = add_site(code=1)
    assert isinstance(done.exception, FileExistsError) and "resources.json" in str(done.exception)
    assert not (kit / "local/privacy.json").exists(), "nothing was written"
    add_site("--force")
    assert hashes(kit) == before | {
        "local/resources.json.before": hashlib.sha256(json.dumps(own).encode()).hexdigest()
    }


def test_a_kit_of_another_or_of_nobody_is_refused(
    kit: Path, add_site: Callable[..., Result], tmp_path: Path
) -> None:
    assert "the kit of hospital-2, got that of" in " ".join(
        add_site(name="hospital-2", code=2).output.replace("│", " ").split()
    )
    (tmp_path / "empty").mkdir()
    for command in (["add-site", "hospital-1"], ["pins"]):
        nobody = federation(*command, "--kit", str(tmp_path / "empty"), code=1).exception
        assert isinstance(nobody, SiteConfigError) and nobody.code == "TF-615"
    late = {"start": NOW - timedelta(days=30), "end": NOW - timedelta(days=1)}
    old = make_kit(tmp_path / "old", issue(PROJECT, "hospital-1", **late))
    ended = federation("add-site", "hospital-1", "--kit", str(old), code=1).exception
    assert isinstance(ended, SiteConfigError) and ended.code == "TF-615"
    stranger = make_kit(tmp_path / "stranger", issue(make_root("project", **DATES), "hospital-1", **DATES))
    other = federation("add-site", "hospital-1", "--kit", str(stranger), code=1).exception
    assert isinstance(other, SiteConfigError) and other.code == "TF-615"
    assert [path for path in (old, stranger, kit) if list((path / "local").iterdir())] == []


def test_a_file_as_data_is_the_entry_that_it_suggests(tmp_path: Path) -> None:
    file = tmp_path / "ward.csv"
    file.write_bytes("Größe;Befund\n1,5;gut\n2,5;böse\n".encode("cp1252"))
    entry = {"file": str(file), "encoding": "cp1252", "delimiter": ";", "decimal": ","}
    with pytest.raises(BadParameter, match="DATASET="):
        records(["digits={" + "x" * 300])
    assert records([str(file), 'digits={"silo": 0}']) == {"table": entry, "digits": {"silo": 0}}


def test_what_a_site_cannot_mean_is_told_before_anything_is_written(
    kit: Path, add_site: Callable[..., Result]
) -> None:
    assert "expected one of" in add_site("--policy", "lax", code=2).output
    assert "DATASET={JSON object}" in add_site("--data", "fed_isic2019=/data", code=2).output
    wrong = add_site("--data", 'fed_isic2019={"root": "data", "centre": 0}', code=1).exception
    assert isinstance(wrong, SiteConfigError) and "centre" in str(wrong) and "root" in str(wrong)
    absent = kit / "no" / "such"
    done = add_site("--state-dir", str(absent), code=1).exception
    assert isinstance(done, SiteConfigError) and "install -d -m 0700" in str(done)
    assert list((kit / "local").iterdir()) == []


def test_two_accounts_have_a_kit_each_and_no_launcher_of_the_engine(kit: Path, tmp_path: Path) -> None:
    state, socket = tmp_path / "state", tmp_path / "s"
    both = ["add-site", "hospital-1", "--training-account", "trainer", "--socket", str(socket)]
    engine = make_kit(tmp_path / "engine")
    told = federation(*both, "--kit", str(engine)).output
    assert "the training account, trainer, starts jobs, through" in told
    assert {path.name for path in (engine / "local").iterdir()} == {
        *("resources.json", "privacy.json", "authorization.json")
    }
    assert not state.exists()
    federation(*both, "--kit", str(kit), "--engine-account", "engine", "--state-dir", str(state))
    assert json.loads((kit / "local" / "tightframe.json").read_text())["engine_account"] == "engine"
    for folder in (engine, kit):
        components = json.loads((folder / "local" / "resources.json").read_text())["components"]
        launchers = [item for item in components if "aunch" in item["id"]]
        arguments = {"account": "trainer", "socket_path": str(socket)}
        assert launchers == [{"id": "training_launcher", "path": kits.LAUNCHER, "args": arguments}]
    for wrong in (
        ["add-site", "hospital-1", "--engine-account", "engine"],
        [*both, "--engine-account", "trainer"],
        [*both, "--state-dir", str(state)],
        [*both, "--data", "eicu={}"],
    ):
        before = hashes(tmp_path)
        assert "expected" in federation(*wrong, "--kit", str(kit), code=2).output.lower()
        assert hashes(tmp_path) == before


def test_the_server_gets_storage_of_its_own(tmp_path: Path) -> None:
    kit = tmp_path / "server"
    (kit / "startup").mkdir(parents=True)
    (kit / "local").mkdir()
    _pem(kit / "startup", "server", issue(PROJECT, "flare.example.org", role="server", **DATES))
    entry = {"name": "p", "ssl_cert": "server.crt", "ssl_root_cert": "rootCA.pem"}
    (kit / "startup/fed_server.json").write_text(json.dumps({"servers": [entry]}))
    storage = tmp_path / "storage"
    command = ["add-site", "flare.example.org", "--kit", str(kit), "--state-dir", str(storage)]
    federation(*command, "--data", "fed_isic2019={}", code=2)
    federation(*command)
    values = json.loads((kit / "local/resources.json").read_text())
    roots = [
        values["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"],
        *(one["args"]["uri_root"] for one in values["components"] if one["id"] == "job_manager"),
    ]
    assert roots == [str(storage / "snapshots"), str(storage / "jobs")]
    assert sorted(path.name for path in (kit / "local").iterdir()) == ["authorization.json", "resources.json"]
    assert stat.S_IMODE(storage.stat().st_mode) == 0o700
    federation("pins", "--kit", str(kit), code=2)


def test_pins_are_printed_merged_and_taken_back(kit: Path, add_site: Callable[..., Result]) -> None:
    old, new = "0a" * 32, "0b" * 32
    config = kit / "local/tightframe.json"
    assert federation("pins", "--kit", str(kit)).output == f"hospital-1={own_pin(SITE)}\n"
    no_file = federation("pins", "--kit", str(kit), "--add", f"hospital-2={old}", code=1).exception
    assert isinstance(no_file, FileNotFoundError) and "add-site hospital-1" in str(no_file)
    add_site()
    told = federation("pins", "--kit", str(kit), "--add", f"hospital-2={old.upper()}").output
    assert "`pinned_only` is off" in told
    add = ["--add", f"hospital-2={new}", "--add", f"hospital-3={old}", "--add", f"hospital-2={old}"]
    federation("pins", "--kit", str(kit), *add)
    kept = json.loads(config.read_text())["policy"]
    assert kept["pins"] == {"hospital-2": [old, new], "hospital-3": [old]}
    entry, _ = parse_single(json.loads(config.read_text()))
    pins = entry.policy.resolve(production=True).site_rules().pins
    assert pins["hospital-2"] == {bytes.fromhex(old), bytes.fromhex(new)}
    take = ["--remove", f"hospital-2={old}", "--remove", f"hospital-3={old}"]
    told = federation("pins", "--kit", str(kit), *take).output
    assert "hospital-3, no pin: it is refused until it has one" in told
    assert json.loads(config.read_text())["policy"] == kept | {
        "pins": {"hospital-2": [new], "hospital-3": []}
    }
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_pins_as_json(kit: Path, add_site: Callable[..., Result]) -> None:
    shown = ["pins", "--kit", str(kit), "--format", "json"]
    told = checked("federation pins", federation(*shown).output)
    assert told == {"format": 1, "site": "hospital-1", "pin": own_pin(SITE), "peers": None}
    add_site()
    federation("pins", "--kit", str(kit), "--add", f"hospital-2={'0a' * 32}")
    assert checked("federation pins", federation(*shown).output)["peers"] == {"hospital-2": ["0a" * 32]}
    federation(*shown, "--add", f"hospital-2={'0a' * 32}", code=2)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--add", "hospital-2"],
        ["--add", "hospital-2=abc"],
        ["--add", f"hospital 2={'0a' * 32}"],
        ["--add", f"hospital-1={'0a' * 32}"],
        ["--remove", f"hospital-2={'0a' * 32}"],
        ["--add", f"hospital-3={'0a' * 32}", "--remove", f"hospital-2={'0a' * 32}"],
    ],
)
def test_wrong_pins_change_nothing(kit: Path, add_site: Callable[..., Result], wrong: list[str]) -> None:
    add_site()
    before = hashes(kit)
    federation("pins", "--kit", str(kit), *wrong, code=2)
    assert hashes(kit) == before
