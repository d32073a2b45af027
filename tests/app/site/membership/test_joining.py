"""``tightframe site join``, ``start``, ``leave``, ``federation certify``, with the engine's provisioning."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from tests.support import ROOT, forking
from tests.support.production.guides import ONE_MACHINE, Guide
from typer.testing import CliRunner, Result

from tightframe.data.image_sets import open_silos
from tightframe.errors import JoinError, SiteConfigError
from tightframe_app.cli import app
from tightframe_app.site.membership import leaving

NAMES = ("hospital-1", "hospital-2", "hospital-3")
SERVER, LEAD = "flare.example.org", "lead@example.org"
OPERATIONS = Guide(ROOT / "docs" / "operations.md")
SITE_GUIDE = Guide(ROOT / "docs" / "site-guide.md")
ISIC = 'fed_isic2019={"root": "/data/isic", "center": 0}'


def run(*words: str, code: int | type = 0, said: str | None = None) -> Result:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "300"}, input=said)
    if isinstance(code, int):
        assert done.exit_code == code, f"{words}\n{done.output}{done.exception!r}"
    else:
        assert isinstance(done.exception, code), f"{words}\n{done.output}{done.exception!r}"
    return done


def fails(code: str, *words: str, said: str | None = None) -> str:
    error = run(*words, code=JoinError, said=said).exception
    assert isinstance(error, JoinError) and error.code == code, error
    return str(error)


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    """Commands of the engine are forked from a process that has imported it, the program's own too."""
    values = forking.environment(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        for name in values.keys() & {"PATH", forking.SOCKET}:
            patch.setenv(name, values[name])
        patch.setattr(sys, "executable", forking.executable(values))
        yield


def engine(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "nvflare.cli", *words], check=True, capture_output=True)


def code_of(folder: Path) -> str:
    """What the sender reads out, by ``cryptography`` alone and from the private key itself."""
    key = load_pem_private_key((folder / f"{folder.name}.key").read_bytes(), None)
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()[:32]


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def fingerprint(root: Path) -> str:
    """By ``cryptography`` alone."""
    return x509.load_pem_x509_certificate(root.read_bytes()).fingerprint(hashes.SHA256()).hex()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation whose keeper has certified hospital-1; nobody has a kit yet."""
    folder = tmp_path_factory.mktemp("consortium")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder / "home"))
        (folder / "home").mkdir()
        (line,) = OPERATIONS.commands("1. Lead", {})
        run(*shlex.split(line)[1:])
        (line,) = OPERATIONS.commands("2. Keeper", {})
        engine(*shlex.split(line)[1:])
        shutil.copy("federation/requests/hospital-1.yml", folder)
        told = run("site", "join", "hospital-1.yml", "--data", ISIC).output
        assert "hospital-1.key, which stays here" in told
        certify(folder)
    return folder


def certify(folder: Path, name: str = "hospital-1", *more: str) -> str:
    words = [f"{name}/{name}.request.zip", "-c", "ca", "--profile", "federation/project.yml"]
    return run("federation", "certify", *words, "--key", code_of(folder / name), *more).output


def nobody_certified() -> None:
    """Go back to before the keeper has certified anybody."""
    Path(ANSWER).unlink()
    Path("ca/issued.json").unlink()


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder."""
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    return folder


@pytest.fixture
def told(here: Path) -> str:
    """The root's fingerprint, as the keeper tells it."""
    return fingerprint(here / "ca" / "rootCA.pem")


KIT = Path("kits/consortium/prod_00/hospital-1")
ANSWER = "hospital-1.signed.zip"


def test_one_question_each_and_the_kit_is_shut_and_filled(here: Path, told: str) -> None:
    shutil.rmtree(here / "hospital-1")
    asked = run("site", "join", "hospital-1.yml", said="later\n").output
    assert asked.count("?") == 1 and "Where do the records lie?" in asked
    key = here / "hospital-1" / "hospital-1.key"
    assert key.stat().st_mode & 0o077 == 0 and b"PRIVATE" in key.read_bytes()
    with zipfile.ZipFile(here / "hospital-1" / "hospital-1.request.zip") as sent:
        assert not any(b"PRIVATE" in sent.read(name) for name in sent.namelist())
    assert "TF-755" in str(
        run(
            "federation",
            "certify",
            "hospital-1/hospital-1.request.zip",
            "-c",
            "ca",
            "--profile",
            "federation/project.yml",
            code=JoinError,
        ).exception.code
    )
    nobody_certified()
    certify(here)
    assert f"certified: hospital-1; return {here / ANSWER}" in certify(here), "again is no error"
    made = run("site", "join", ANSWER, said=":".join(re.findall("..", told)) + "\n", code=1).output
    assert "The root's fingerprint" in made and "?" not in made.partition("SHA256")[0]
    assert f"start it:  tightframe site start {(here / KIT)}" in made or "problem" in made
    config = json.loads((KIT / "local" / "tightframe.json").read_text())
    assert config["data"] == {} and config["state_dir"] == str(here / "state" / "hospital-1")
    for folder in (here / "state" / "hospital-1", here / KIT):
        assert folder.stat().st_mode & 0o777 == 0o700
    doors = json.loads((KIT / "local" / "resources.json").read_text())
    assert "tightframe.flare.doors.SiteDoors" in [item["path"] for item in doors["components"]]
    assert "next_step" not in asked + made and "start.sh" not in asked + made


def test_another_root_makes_nothing(here: Path, told: str) -> None:
    before = everything(here)
    for wrong in (told[:-1] + ("0" if told[-1] != "0" else "1"), "SHA256:ab", "", told + "00", told[:32]):
        assert "Nothing was made" in fails("TF-753", "site", "join", ANSWER, "--fingerprint", wrong)
    other = x509.load_pem_x509_certificate((here / "ca" / "rootCA.pem").read_bytes())
    assert other.fingerprint(hashes.SHA256()).hex() == told
    assert everything(here) == before


@pytest.mark.parametrize(
    "form", [str, str.upper, lambda x: "SHA256:" + x, lambda x: "sha-256 fingerprint: " + x]
)
def test_a_fingerprint_is_taken_as_people_write_it(here: Path, told: str, form: Callable[[str], str]) -> None:
    from tightframe_app.site.membership.joining import Answer

    answer = Answer.read(here / ANSWER)
    answer.check_root(form(told))
    answer.check_root(form(":".join(re.findall("..", told))))
    answer.check_root(form(" ".join(re.findall("....", told))))


def test_an_answer_of_another_root_is_found_by_its_fingerprint(here: Path, told: str) -> None:
    """A man in the middle has exchanged the root and re-signed everything, for the right key."""
    engine("cert", "init", "--profile", "federation/project.yml", "-o", "evil")
    words = ["hospital-1/hospital-1.request.zip", "-c", "evil", "--profile", "federation/project.yml"]
    run("federation", "certify", *words, "--key", code_of(Path("hospital-1")), "-o", "evil-answer")
    fails("TF-753", "site", "join", f"evil-answer/{ANSWER}", "-o", "hospital-1", "--fingerprint", told)
    assert not KIT.exists()


def test_what_is_no_request_and_no_answer_is_refused(here: Path, told: str) -> None:
    before = everything(here)
    bad = here.parent / "bad"
    bad.mkdir()
    texts = {
        "empty": b"",
        "text": b"hello",
        "list": b"- a\n- b\n",
        "two": b"name: c\nparticipants: [{name: a, org: b, type: client}, {name: d, org: b, type: client}]\n",
        "outside": b"name: c\nparticipants:\n- {name: ../../x, org: b, type: client}\n",
        "kind": b"name: c\nparticipants:\n- {name: x, org: b, type: relay}\n",
        "bytes": bytes(range(256)),
        "code": b"!!python/object/apply:os.system ['touch pwned']\n",
    }
    for name, content in texts.items():
        (bad / name).write_bytes(content)
        fails("TF-751", "site", "join", str(bad / name), "--data", "later")
    assert "request itself" in fails("TF-751", "site", "join", "hospital-1/hospital-1.request.zip")
    with zipfile.ZipFile(here / ANSWER) as packed:
        whole = {name: packed.read(name) for name in packed.namelist()}
    values = json.loads(whole["signed.json"])
    changes: list[dict[str, Any]] = [
        {"name": "../hospital-1"},
        {"name": "/etc"},
        {"project": "../.."},
        {"request_id": "../x"},
        {"name": 3},
        {"ca_info": {"provision_version": "../00"}},
        {"ca_info": None},
    ]
    for index, change in enumerate(changes):
        with zipfile.ZipFile(bad / f"{index}.zip", "w") as packed:
            for name, content in whole.items():
                mine = json.dumps(values | change).encode() if name == "signed.json" else content
                packed.writestr(name, mine)
        fails("TF-751", "site", "join", str(bad / f"{index}.zip"), "--fingerprint", told)
    with zipfile.ZipFile(bad / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("signed.json", b" " * (50 << 20))
        packed.writestr("rootCA.pem", whole["rootCA.pem"])
    fails("TF-751", "site", "join", str(bad / "bomb.zip"), "--fingerprint", told)
    assert everything(here) == before


def test_an_answer_that_was_changed_is_refused_by_the_engine(here: Path, told: str) -> None:
    """The keeper's signature covers what the answer says; here the organisation is another."""
    with zipfile.ZipFile(here / ANSWER) as packed:
        whole = {name: packed.read(name) for name in packed.namelist()}
    values = json.loads(whole["signed.json"]) | {"org": "attackers"}
    with zipfile.ZipFile("changed.zip", "w") as packed:
        for name, content in whole.items():
            packed.writestr(name, json.dumps(values).encode() if name == "signed.json" else content)
    fails("TF-752", "site", "join", "changed.zip", "--fingerprint", told)
    assert not KIT.exists()


def test_a_second_request_and_a_lost_one(here: Path, told: str) -> None:
    before = everything(here)
    fails("TF-755", "site", "join", "hospital-1.yml", "--data", "later")
    assert everything(here) == before
    Path("hospital-1").rename("elsewhere")
    assert "hospital-1.key" in fails("TF-754", "site", "join", ANSWER, "--fingerprint", told)
    assert not KIT.exists()
    run("site", "join", ANSWER, "--fingerprint", told, "-o", "elsewhere", code=1)
    assert (KIT / "local" / "tightframe.json").is_file()


def test_records_named_later_have_their_name_from_the_start(tmp_path: Path) -> None:
    from tightframe_app.site.membership import joining

    who = joining.Participant("consortium", "hospital-1", "hospital_1", "site")
    later, one = joining.Settings(data={}), joining.Settings(data={"digits": {"silo": 0}})
    assert joining.configuration(who, tmp_path / "hospital-1", later)["dataset_id"] == "hospital-1"
    assert joining.configuration(who, tmp_path / "hospital-1", one)["dataset_id"] == "digits"


def test_wrong_settings_make_no_key(here: Path) -> None:
    shutil.rmtree("hospital-1")
    for more in (["--policy", "lax"], ["--data", "isic"], ["--device", "tpu"], ["--state-dir", "no/state"]):
        done = CliRunner().invoke(app, ["site", "join", "hospital-1.yml", *["--data", "later"], *more])
        assert done.exit_code != 0, more
    assert not Path("hospital-1").exists()
    done = run("site", "join", "hospital-1.yml", code=2)
    assert "--data" in done.output and not Path("hospital-1").exists(), "nobody there to answer"


def test_the_kit_is_made_once_and_what_is_in_it_stays(here: Path, told: str) -> None:
    run("site", "join", ANSWER, "--fingerprint", told, code=1)
    config = KIT / "local" / "tightframe.json"
    config.write_text(config.read_text().replace('"standard"', '"standard" '))
    before = everything(KIT)
    assert "was not changed" in run("site", "join", ANSWER, "--fingerprint", told, code=1).output
    assert everything(KIT) == before
    crt = KIT / "startup" / "client.crt"
    crt.write_text(crt.read_text().replace("A", "B", 3))
    fails("TF-755", "site", "join", ANSWER, "--fingerprint", told)


def test_only_what_was_read_out_is_certified(here: Path) -> None:
    nobody_certified()
    words = ["federation", "certify", "hospital-1/hospital-1.request.zip", "-c", "ca"]
    words += ["--profile", "federation/project.yml"]
    for said, more in (("n\n", []), ("", []), (None, ["--key", "0" * 32])):
        done = run(*words, *more, code=1, said=said)
        assert "not certified: hospital-1" in done.output and not Path(ANSWER).exists()
    shutil.copy("hospital-1/hospital-1.request.zip", "twice.request.zip")
    assert "several of hospital-1" in fails("TF-751", *words[:3], "twice.request.zip", *words[3:])
    fails("TF-751", *words[:2], "hospital-1.yml", *words[3:])
    assert "certified: hospital-1" in run(*words, said="y\n").output and Path(ANSWER).is_file()


def test_a_second_key_of_a_name_is_not_certified_unnoticed(here: Path) -> None:
    """Also into another folder: the root key's folder knows whom it has certified."""
    run("site", "join", "hospital-1.yml", "--data", "later", "-o", "thief/hospital-1")
    words = ["federation", "certify", "thief/hospital-1/hospital-1.request.zip", "-c", "ca"]
    words += ["--profile", "federation/project.yml", "-o", "other"]
    words += ["--key", code_of(Path("thief/hospital-1"))]
    told = fails("TF-755", *words)
    first = code_of(Path("hospital-1"))
    assert " ".join(re.findall("....", first)) in told and "`nvflare cert approve`" in told
    assert list(Path("other").iterdir()) == []
    assert "certified: hospital-1" in certify(here, "hospital-1", "-o", "again"), "the same key is no second"
    Path("ca/issued.json").write_text("[]")
    assert "cannot be read" in fails("TF-755", *words)


def test_a_request_that_was_exchanged_on_its_way_has_another_code(here: Path) -> None:
    """Who carries the zip knows its id and puts it over a key of their own; the engine alone takes that."""
    nobody_certified()
    victim = json.loads(Path("hospital-1/request.json").read_text())
    engine("cert", "request", "-p", "hospital-1.yml", "--out", "thief")
    with zipfile.ZipFile("thief/hospital-1.request.zip") as packed:
        whole = {name: packed.read(name) for name in packed.namelist()}
    values = json.loads(whole["request.json"]) | {"request_id": victim["request_id"]}
    with zipfile.ZipFile("exchanged.zip", "w") as packed:
        for name, content in whole.items():
            packed.writestr(name, json.dumps(values).encode() if name == "request.json" else content)
    where = ["-c", "ca", "--profile", "federation/project.yml"]
    engine("cert", "approve", "exchanged.zip", *where, "--out", "control.zip")  # by the id alone
    done = run("federation", "certify", "exchanged.zip", *where, "--key", code_of(Path("hospital-1")), code=1)
    assert "not certified: hospital-1" in done.output and not Path(ANSWER).exists()
    with zipfile.ZipFile("unsigned.zip", "w") as packed:  # a request that its key has not signed
        for name, content in whole.items():
            packed.writestr(name, content[:-120] + content[-60:] if name.endswith(".csr") else content)
    fails("TF-751", "federation", "certify", "unsigned.zip", *where)


def test_a_kit_with_open_doors_is_not_started(here: Path, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    run("site", "join", ANSWER, "--fingerprint", told, code=1)
    run("site", "start", str(KIT))
    ((script, words, environment),) = started
    assert words == [script, "--once"] and script == str(here / KIT / "startup" / "sub_start.sh")
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    resources = KIT / "local" / "resources.json"
    values = json.loads(resources.read_text())
    doors = [item for item in values["components"] if "doors" not in item["path"]]
    resources.write_text(json.dumps(values | {"components": doors}))
    fails("TF-757", "site", "start", str(KIT))
    resources.unlink()
    fails("TF-757", "site", "start", str(KIT))
    assert len(started) == 1


def test_leaving_removes_what_joining_made_and_nothing_else(here: Path, told: str) -> None:
    before = everything(here)
    run("site", "join", ANSWER, "--fingerprint", told, code=1)
    (KIT / "job" / "app").mkdir(parents=True)
    (KIT / "job" / "model.safetensors").write_bytes(b"weights")
    ledger = here / "state" / "hospital-1" / "ledger"
    other = here / "state" / "hospital-1" / "of-another-site"
    other.write_text("stays")
    joined = everything(here)
    asked = run("site", "leave", str(KIT), said="n\n", code=1).output
    assert "nothing was removed" in asked and "Would be removed on this machine" in asked
    assert "nothing was removed" in run("site", "leave", str(KIT), code=1).output
    assert everything(here) == joined
    told_duties = run("site", "leave", str(KIT), "--yes").output
    after = everything(here)
    assert after[str(KIT / "job" / "model.safetensors")] == b"weights"
    assert after[str(KIT / "startup" / "client.key")] == joined[str(KIT / "startup" / "client.key")]
    assert after["hospital-1/hospital-1.key"] == before["hospital-1/hospital-1.key"]
    assert other.read_text() == "stays" and not ledger.exists()
    assert not (KIT / "startup" / "fed_client.json").exists()
    assert {name: content for name, content in after.items() if name in before} == {
        name: content for name, content in before.items() if name in after
    }
    gone = {name for name in before if name not in after}
    assert all(name.startswith(("hospital-1/", "home/.nvflare")) for name in gone), gone
    assert "TF-612" in told_duties and "revocation" in told_duties
    assert "Removed on this machine" in told_duties and "how many remain is not known here" in told_duties
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    again = run("site", "start", str(KIT), code=SiteConfigError).exception
    assert "TF-615" in str(again) and f"left its federation on {today}" in str(again)
    assert f"left its federation on {today}" in fails("TF-754", "site", "join", ANSWER, "--fingerprint", told)


def test_who_remains_is_counted_by_the_last_cohort() -> None:
    def told(*cohort: str) -> str:
        going = leaving.Departure((), (), (), "c", "hospital-1", "", None, None, cohort)
        return leaving.duties(going)[0]

    assert told(*NAMES).endswith("remain 2, hospital-2, hospital-3; a third has to join first.")
    assert told(*NAMES, "hospital-4").endswith("remain 3, hospital-2, hospital-3, hospital-4.")


def test_leaving_with_keys_and_ledger(here: Path, told: str) -> None:
    run("site", "join", ANSWER, "--fingerprint", told, code=1)
    run("site", "leave", str(KIT), "--yes", "--delete-keys", "--delete-ledger")
    keys = [name for name, content in everything(here).items() if content and b"PRIVATE KEY" in content]
    assert all(name.startswith("ca/") for name in keys), keys


@pytest.mark.whole
def test_three_hospitals_of_digits_accept_the_guides_job(here: Path, told: str) -> None:
    """As the guide says to one who tries everything on one machine: all but the engine's own start."""
    join, export = OPERATIONS.commands(ONE_MACHINE, {})
    shutil.rmtree("hospital-1")
    silos = open_silos("digits", **json.loads(re.findall(r"dataset_options=(\{.*?\})", export)[0]))
    run(*shlex.split(export)[1:])
    run("jobs", "export", "fedmr_isic", "--sites", ",".join(NAMES), "-o", "images")
    numbers: list[str] = []
    for number, name in enumerate(NAMES):
        line = join.replace("hospital-1", name).replace('"silo": 0', f'"silo": {number}')
        run(*shlex.split(line)[1:])
        numbers += ["--key", code_of(Path(name))]
    nobody_certified()
    zips = [str(path) for path in Path().glob("*/*.request.zip")]
    words = ["-c", "ca", "--profile", "federation/project.yml", *numbers]
    assert run("federation", "certify", *zips, *words).output.count("certified: ") == 3
    for number, name in enumerate(NAMES):
        done = run("site", "join", f"{name}.signed.zip", "--fingerprint", told)
        mine = silos[f"silo-{number}"]
        assert "no problem was found" in done.output
        check = [
            "site",
            "check",
            "-c",
            f"kits/consortium/prod_00/{name}/local/tightframe.json",
            "--production",
        ]
        told_all = run(*check, "--job", "job").output
        assert "no problem was found" in told_all and f"{len(mine.labels('train'))} train" in told_all
        assert "problem" in run(*check, "--job", "images", code=1).output, (
            "of a data set that it does not have"
        )


def test_the_whole_way_is_as_many_commands_as_the_guide_says() -> None:
    """From nothing to a verified job of three hospitals: not more than twenty."""
    text = (ROOT / "docs" / "operations.md").read_text()
    (said,) = re.findall(r"The whole way, for three hospitals and a server, is (\d+) commands", text)
    everybody = ("3. Everybody", "5. Everybody")
    mine = [OPERATIONS.commands(heading, {}) for heading in ("1. Lead", "2. Keeper", "4. Keeper", "7. Lead")]
    theirs = [
        OPERATIONS.commands(heading, {}) for heading in everybody
    ]  # the lead, and the server's operator
    sites = [SITE_GUIDE.commands(heading, {}) for heading in ("2. Ask", "3. Make", "7. Start")]
    sites = [[line for line in lines if " site stop" not in line and "sudo" not in line] for lines in sites]
    count = sum(map(len, mine)) + 2 * sum(map(len, theirs)) + 3 * sum(map(len, sites))
    count += len(OPERATIONS.commands("6. Server", {}))
    assert count == int(said) <= 20


def test_what_the_guide_says_to_install_brings_the_digits() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    (extra,) = re.findall(r"`pip install -q -c constraints.txt '\.\[(\w+)\]'`", guide)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(item.startswith("scikit-learn") for item in project["optional-dependencies"][extra])
