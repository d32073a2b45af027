"""One hospital of a production federation in two accounts: real system accounts, and probes as them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from nvflare.fuel.flare_api.flare_api import new_secure_session
from tests.support.processes import gone
from tests.support.production.federation import ACCOUNTS, LEAD, SERVER, SITES
from tests.support.production.private import every_file
from tests.support.production.two_accounts import SERVICE, SITE, TwoAccounts, running
from tests.support.production.watching import process_of

from tightframe_app.site.stop import running as processes_of

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: makes two system accounts and removes them"
)

# What an account can do to each path of a list, by trying.
TRY = """
import json, os, sys
done = {}
for path in json.load(open(sys.argv[1])):
    able = []
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        able.append("read")
    except OSError:
        pass
    if os.access(path, os.W_OK):
        able.append("write")
    done[path] = able
print(json.dumps(done))
"""

# What the service answers an account that sends requests: a job of the engine's kit, and changed ones.
ASK = """
import base64, json, pathlib, socket, sys, uuid
from tightframe.flare.accounts.request import receive, send
path, run, certificate = map(pathlib.Path, sys.argv[1:])
def encoded(raw):
    return base64.b64encode(raw).decode()
def ask(**changes):
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        send(connection, json.dumps(good | changes).encode())
        return json.loads(receive(connection, 60))
    except Exception as error:
        return {"refused": type(error).__name__}
(app,) = run.glob("app_*") if len(run.parts) > 1 else [run]
config = "config/config_fed_client.json"
files = {str(one.relative_to(app)): encoded(one.read_bytes()) for one in app.rglob("*") if one.is_file()}
good = {
    "job": run.name, "port": 9, "token": "t", "token_signature": "t", "ssid": "t", "files": files,
    "certificate": certificate.read_text() if certificate.is_file() else "",
    "meta": {"job_id": run.name, "job_clients": []},
}
new = str(uuid.uuid4())
changed = json.loads(base64.b64decode(files.get(config, "e30=")))
changed["format_version"] = 3
asked = {
    "again": ask(),
    "changed": ask(
        job=new, meta={"job_id": new}, files=files | {config: encoded(json.dumps(changed).encode())}
    ),
    "path": ask(job="../../tmp"),
    "arguments": ask(args=["--set", "config_folder=/"]),
    "file": ask(job=new, meta={"job_id": new}, files=files | {"../../local/resources.json": encoded(b"{}")}),
}
print(json.dumps(asked))
"""


@pytest.fixture(scope="module")
def federation() -> Iterator[TwoAccounts]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def done(federation: TwoAccounts) -> Path:
    """The downloaded result of a job."""
    values = ["dataset_options.image_size=16", "model_options.widths=[8,8,8]", "training.epochs=1"]
    more = "--rounds 2 " + " ".join(f"--set {value}" for value in values)
    federation.follow(federation.operations, "7. Lead", only=slice(1), more=more)
    with _lead(federation) as session:
        job = session.submit_job(str(federation.signed(federation.folder / "job")))
        meta = _ended(session, job)
        said = "\n".join(federation.said(name) for name in (SERVER, SERVICE)).splitlines()
        wrong = "\n".join(line for line in said if "TF-" in line or "ERROR" in line or "Error" in line)
        assert meta["status"] == "FINISHED:COMPLETED", wrong
        return Path(session.download_job_result(job))


def test_a_job_trains_with_one_site_in_two_accounts(federation: TwoAccounts, done: Path) -> None:
    outcome = json.loads((done / "workspace" / "outcome.json").read_text())
    assert outcome["trained"] is True and outcome["rounds_done"] == 2
    assert outcome["roster"] == list(SITES) and outcome["dropped"] == []
    run = federation.training_kit / done.name
    files = [path for path in every_file(run) if path.name != "_process_rc.txt"]
    assert {"model.safetensors", "local_report.json", "log.txt"} <= {path.name for path in files}
    assert {path.stat().st_uid for path in files} == {_uid(federation.training)}
    left = {path.name for path in every_file(federation.kit(SITE) / done.name)}
    assert (
        "config_fed_client.json" in left and not {"model.safetensors", "local_report.json", "log.txt"} & left
    )
    assert f"job {done.name}: started as process" in federation.said(SERVICE)
    # Peers were shown the key of the training account, not the engine's.
    pins = ["federation", "pins", "--kit"]
    root = str(federation.kit(LEAD) / "startup" / "rootCA.pem")
    transcript = str(done / "workspace" / "transcript.jsonl")
    told = federation.run_here("transcript", "verify", transcript, "--root", root)
    own, engines = (
        federation.run_here(*pins, str(kit)).strip().split("=")[1]
        for kit in (federation.training_kit, federation.kit(SITE))
    )
    assert own in told and engines not in told


def test_the_engines_account_reads_nothing_of_the_other(federation: TwoAccounts, done: Path) -> None:
    folders = [federation.records(SITE), federation.state(SITE), federation.training_kit]
    private = sorted(str(path) for path in [*folders, *every_file(*folders)])
    kinds = {Path(path).name for path in private}
    assert {"client.key", "tightframe.json", "transcript.jsonl", "model.safetensors"} <= kinds, kinds
    assert len(private) > 80
    service = federation.processes[SERVICE].pid
    private += [f"/proc/{service}/{name}" for name in ("environ", "mem", "fd")]
    listed = federation.folder / "private.json"
    listed.write_text(json.dumps(private))
    found = json.loads(federation.as_account(federation.engine, TRY, str(listed)))
    assert {path: able for path, able in found.items() if able} == {}
    # The same probe finds them open to the account whose they are, and what the engine may read, open.
    found = json.loads(federation.as_account(federation.training, TRY, str(listed)))
    assert [path for path, able in found.items() if "read" not in able and "/mem" not in path] == []
    listed.write_text(json.dumps([str(federation.kit(SITE) / "startup" / "client.key")]))
    assert "read" in next(
        iter(json.loads(federation.as_account(federation.engine, TRY, str(listed))).values())
    )
    found = json.loads(federation.as_account(federation.training, TRY, str(listed)))
    assert list(found.values()) == [[]]


def test_the_service_refuses_other_callers_jobs_paths_and_arguments(
    federation: TwoAccounts, done: Path
) -> None:
    before = {path.name for path in federation.training_kit.iterdir()}
    kit = federation.kit(SITE)
    given = [str(federation.socket), str(kit / done.name), str(kit / "startup" / "client.crt")]
    asked = json.loads(federation.as_account(federation.engine, ASK, *given))
    assert {name: answer["refused"] for name, answer in asked.items()} == dict.fromkeys(asked, "TF-743")
    assert "has not run here" in asked["again"]["reason"] and "signed" in asked["changed"]["reason"]
    # To others it says nothing at all, root and the training account itself included.
    elsewhere = federation.folder / "elsewhere"
    elsewhere.mkdir()
    for account in ("root", "nobody", federation.training):
        given = [str(federation.socket), str(elsewhere), "-"]
        code = ASK.replace('(app,) = run.glob("app_*") if len(run.parts) > 1 else [run]', "app = run")
        asked = json.loads(federation.as_account(account, code, *given))
        # The connection is closed, and no answer of the service read.
        closed = {"AccountError", "BrokenPipeError", "ConnectionResetError"}
        assert {answer["refused"] for answer in asked.values()} <= closed, asked
        assert f"refused the account with id {_uid(account)}" in federation.said(SERVICE)
    assert {path.name for path in federation.training_kit.iterdir()} == before


def test_the_engine_reads_no_key_that_signs_and_the_check_says_so(
    federation: TwoAccounts, done: Path
) -> None:
    check = ["tightframe", "site", "check", "--production", "--no-records", "-c"]
    check += [str(federation.training_kit / "local" / "tightframe.json")]
    told = " ".join(federation.follow_two(slice(13, 14), more="--no-records").split())
    assert (
        f"{federation.engine} can read neither records, state folder nor key of {federation.training}" in told
    )
    records = federation.records(SITE)
    records.chmod(0o755)
    try:
        told = " ".join(federation.run(*check, code=1).split())
        assert f"TF-742: {federation.engine} can read records in {records}" in told
    finally:
        records.chmod(0o700)


def test_an_aborted_job_ends_in_the_other_account(federation: TwoAccounts, done: Path) -> None:
    """And at a hospital with one account."""
    with _lead(federation) as session:
        job, process = _running(federation, session)
        other = process_of(federation, next(name for name in SITES if name != SITE), job)
        session.abort_job(job)
        assert gone(process, 40), federation.said(SERVICE)[-2000:]
        assert gone(other, 60), "the lead's abort did not reach the hospital"
        assert str(_ended(session, job)["status"]).startswith("FINISHED:ABORTED")


def test_site_stop_ends_the_client_and_its_job_in_the_other_account(
    federation: TwoAccounts, done: Path
) -> None:
    kit = federation.kit(SITE)
    with _lead(federation) as session:
        job, process = _running(federation, session)
        roles = {one.role: one.account for one in processes_of(kit)}
        assert roles.keys() >= {"client", "job"} and roles["job"] == federation.training
        as_engine = [
            "setpriv",
            f"--reuid={federation.engine}",
            f"--regid={federation.engine}",
            "--init-groups",
        ]
        told = federation.run(*as_engine, "tightframe", "site", "stop", "--kit", str(kit), "--yes")
        assert f"job {job} (process {process.pid} of {federation.training})" in told
        assert "stopped: no process of this kit is left" in told
        assert gone(process, 1) and processes_of(kit) == []
        session.abort_job(job)
    # The service waits for the client's next start; its own kit's `site stop` ends it.
    (service,) = processes_of(federation.training_kit)
    assert service.role == "service"
    told = federation.run("tightframe", "site", "stop", "--kit", str(federation.training_kit), "--yes")
    assert "the training service" in told and federation.processes[SERVICE].wait(timeout=60) == 0


def test_every_command_of_the_section_was_run(federation: TwoAccounts, done: Path) -> None:
    assert federation.site_guide.not_run_under(ACCOUNTS) == set()


def _running(federation: TwoAccounts, session: Any) -> tuple[str, psutil.Process]:
    """A submitted job, and its process in the training account."""
    job = session.submit_job(str(federation.signed(federation.folder / "job")))
    until = time.monotonic() + 120
    while f"job {job}: started as process" not in federation.said(SERVICE):
        assert time.monotonic() < until, federation.said(SITE)[-2000:]
        time.sleep(0.2)
    number = federation.said(SERVICE).split(f"job {job}: started as process ")[1].split()[0]
    process = psutil.Process(int(number))
    assert process.username() == federation.training
    # Until it has joined, so that it is a job that is ended and not a start.
    federation.wait_log(job)
    return job, process


def _lead(federation: TwoAccounts) -> Any:
    return contextlib.closing(new_secure_session(LEAD, str(federation.kit(LEAD))))


def _uid(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _ended(session: Any, job_id: str) -> dict[str, Any]:
    until = time.monotonic() + 200
    while time.monotonic() < until:
        meta: dict[str, Any] = session.get_job_meta(job_id)
        if str(meta["status"]).startswith("FINISHED"):
            return meta
        time.sleep(0.5)
    raise AssertionError(f"{job_id} is not over: {meta}")
