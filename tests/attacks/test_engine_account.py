"""Whoever owns the engine's account of a site sends the training service whatever it likes.

The class: requests over the launcher's socket that would make the training account run, read or write
anything but a signed job of this site, once, by its own kit. The service here is the real one, over a real
socket; only the program that it starts is a stand-in that waits.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from nvflare.lighter.utils import sign_folders
from tests.support.attacks.malicious_server import HEART
from tests.support.processes import gone
from tests.support.securesum.certificates import issue, make_root

from tightframe.config import job_manifest
from tightframe.config.job import parse_job
from tightframe.flare.accounts import service as module
from tightframe.flare.accounts.permissions import Account
from tightframe.flare.accounts.request import KILL, MAX_MESSAGE, AccountError, Start, receive, send
from tightframe.flare.accounts.service import TrainingService
from tightframe_app.federation.kits import AUTHORIZATION
from tightframe_app.jobs import folders

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=9), "end": NOW + timedelta(days=9)}
ROOT, OTHER = make_root(**DATES), make_root("other", **DATES)
TRAINING, ENGINE = issue(ROOT, "site-1", **DATES), issue(ROOT, "site-1", **DATES)
LEAD = issue(ROOT, "lead@hospital", role="lead", key="rsa", **DATES)
JOB = "0f8fad5b-d9cb-469f-a165-70867728950e"
NEXT = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
CONFIG = "config/config_fed_client.json"
TOKEN = "5b8e3b4c"  # noqa: S105 - nobody's
NO_ANSWER = r"connection ended|reset|Broken pipe"


def pem(issued: Any) -> bytes:
    made = issued.x509.public_bytes(Encoding.PEM)
    assert isinstance(made, bytes)
    return made


class Service(TrainingService):
    """Starts a stand-in, which waits as a job does."""

    def command(self, request: Start) -> list[str]:
        self.asked = super().command(request)
        return [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other accounts may enter, which those of the tests are not."""
    with tempfile.TemporaryDirectory(prefix="tightframe-attack-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def kit(place: Path) -> Path:
    """The training account's; ``nobody`` is the engine's account by its file."""
    made = place / "kit"
    for name in ("startup", "local"):
        (made / name).mkdir(parents=True)
    made.chmod(0o700)
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    servers = [
        {"name": "project", "identity": "server", "service": {"scheme": "grpc", "target": "server:8002"}}
    ]
    (made / "startup" / "fed_client.json").write_text(json.dumps({"servers": servers, "client": client}))
    (made / "startup" / "client.crt").write_bytes(pem(TRAINING))
    (made / "startup" / "rootCA.pem").write_bytes(pem(ROOT))
    key = TRAINING.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (made / "startup" / "client.key").write_bytes(key)
    (made / "startup" / "client.key").chmod(0o600)
    (made / "local" / "authorization.json").write_text(json.dumps(dict(AUTHORIZATION)))
    (place / "state").mkdir(mode=0o700)
    values = {"state_dir": str(place / "state"), "engine_account": "nobody"}
    (made / "local" / "tightframe.json").write_text(json.dumps(values))
    return made


@pytest.fixture
def service(kit: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Takes this account for the engine's, so that the tests' own connections come through."""
    monkeypatch.setattr(module, "GRACE", 1.0)
    made = Service.of(kit)
    assert made.engine.name == "nobody"
    made.engine = replace(made.engine, uid=os.geteuid())
    return made


@pytest.fixture
def connect(service: Service, tmp_path: Path) -> Iterator[Callable[[], socket.socket]]:
    """Connect to the running service."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(64)
    thread = threading.Thread(target=service.serve, args=(listener,), daemon=True)
    thread.start()
    opened: list[socket.socket] = []

    def made() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(tmp_path / "s"))
        opened.append(connection)
        return connection

    try:
        yield made
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        service.close()
        for connection in opened:
            connection.close()
        thread.join(10)
        listener.close()


def app(folder: Path, signer: Any = LEAD, **manifest: Any) -> dict[str, bytes]:
    """The files of a deployed app with its lead's manifest, signed by the engine's own tool."""
    sites = manifest.pop("sites", ["site-1", "site-2", "site-3"])
    job = parse_job({**HEART, "sites": sites, "min_sites": 3})
    folders.write_job(folders.job_files(job), folder)
    path = folder / "app"
    change, lead = manifest.pop("change", None), manifest.pop("lead", LEAD)
    if manifest.pop("manifest", True):
        job_manifest.sign(path, job, lead.signer(), **{"now": NOW, **manifest})
    if change is not None:
        change(path)
    certificate = folder / "signer.crt"
    certificate.write_bytes(pem(signer))
    sign_folders(str(path), signer.key, str(certificate))
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A request as the launcher makes it, as the values of its message."""
    request = Start(
        job=JOB,
        port=40000,
        token=TOKEN,
        token_signature=f"{TOKEN}/+==",
        ssid="7d1a",
        certificate=pem(ENGINE).decode(),
        meta={"job_id": JOB, "job_clients": [], "scope": "", "stats_pool_config": {"a": 1}},
        files=app(tmp_path / "deployed"),
    )
    values: dict[str, Any] = json.loads(request.to_bytes())
    return values


def asked(connection: socket.socket, values: Any) -> dict[str, Any]:
    send(connection, values if isinstance(values, bytes) else json.dumps(values).encode())
    answer: dict[str, Any] = json.loads(receive(connection, 30))
    return answer


def started(service: TrainingService) -> list[psutil.Process]:
    return [psutil.Process(one.pid) for one in service._running]


def untouched(kit: Path) -> bool:
    return {path.name for path in kit.iterdir()} == {"startup", "local"}


def test_a_signed_job_starts_by_the_kits_own_values_and_nothing_of_the_request(
    connect: Any, good: Any, service: Service, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVFL_WORKSPACE_OWNER_FQCN", "server")
    connection = connect()
    assert asked(connection, good) == {"started": True}
    module_and_kit = [sys.executable, "-m", module.WORKER, "-m", str(kit), "-w", f"{kit}/startup"]
    assert service.asked[: len(module_and_kit)] == module_and_kit
    rest = service.asked[len(module_and_kit) :]
    assert rest[:8] == [
        "-n",
        JOB,
        "-c",
        "site-1",
        "-p",
        "tcp://localhost:40000",
        "--parent_conn_sec",
        "clear",
    ]
    assert rest[8:14] == ["-g", "server:8002", "-scheme", "grpc", "-s", "fed_client.json"]
    assert rest[14:] == [
        *("--set", "secure_train=true", "uid=site-1", f"org={service.organisation}"),
        *("config_folder=config", "print_conf=True"),
    ]
    (process,) = started(service)
    until = time.monotonic() + 60
    while not (environment := process.environ()) and time.monotonic() < until:
        time.sleep(0.05)  # the kernel shows none in the moment in which a program begins
    assert environment["NVFLARE_JOB_AUTH_TOKEN"] == TOKEN
    assert [name for name in environment if name.startswith("NVFL_")] == []
    assert process.cwd() == str(kit)
    run = kit / JOB
    assert json.loads((run / "meta.json").read_text()).keys() == {"job_id", "job_clients", "scope"}
    assert sorted(str(one.relative_to(run)) for one in run.rglob("*") if one.is_file()) == sorted(
        ["meta.json", *(f"app_site-1/{name}" for name in good["files"])]
    )
    # The connection's end is the job's.
    connection.close()
    assert gone(process, 60)


def _without(name: str) -> Callable[[Any], Any]:
    return lambda good: {key: value for key, value in good.items() if key != name}


def _with(**values: Any) -> Callable[[Any], Any]:
    return lambda good: {**good, **values}


def _file(name: str, content: bytes = b"x") -> Callable[[Any], Any]:
    encoded = base64.b64encode(content).decode()
    return lambda good: {**good, "files": {**good["files"], name: encoded}}


MALFORMED: dict[str, Callable[[Any], Any]] = {
    "no JSON": lambda good: b"\x80\x04K\x01.",
    "empty": lambda good: b"",
    "a list": lambda good: [good],
    "null": lambda good: b"null",
    "nested deeply": lambda good: b"[" * 100_000,
    "a key twice": lambda good: json.dumps(good).encode()[:-1] + b', "port": 40001}',
    "NaN": _with(port=float("nan")),
    "no token": _without("token"),
    "a command": _with(command=["/bin/sh"]),
    "arguments": _with(args=["--set", "config_folder=/var"]),
    "an environment": _with(env={"LD_PRELOAD": "/var/x.so"}),
    "a workspace": _with(workspace="/var"),
    "an interpreter": _with(python="/var/python"),
    "another server": _with(target="elsewhere:1"),
    "a path as job": _with(job="../../state"),
    "an absolute path as job": _with(job="/var/x"),
    "no id as job": _with(job="local"),
    "an id and a line": _with(job=JOB + "\n"),
    "an id and an option": _with(job=JOB + " --set"),
    "capitals": _with(job=JOB.upper()),
    "a list as job": _with(job=[JOB]),
    "another job's metadata": _with(job=NEXT),
    "a URL as port": _with(port="40000/../x"),
    "true as port": _with(port=True),
    "port 0": _with(port=0),
    "port 65536": _with(port=65536),
    "a token of lines": _with(token=f"{TOKEN}\nLD_PRELOAD=x"),
    "a token with NUL": _with(token=f"{TOKEN}\0b"),
    "no token at all": _with(token=""),
    "a long token": _with(token="a" * 5000),
    "a certificate of bytes": _with(certificate="\x00"),
    "code by its metadata": lambda good: {**good, "meta": {**good["meta"], "byoc": True}},
    "metadata as text": _with(meta="{}"),
    "code": _file("custom/mine.py"),
    "the site's own file": _file("../../local/tightframe.json"),
    "the key": _file("../../startup/client.key"),
    "an absolute path": _file("/var/x"),
    "up and down": _file("config/../config/config_fed_client.json"),
    "a name with NUL": _file("config/config_fed_client.json\0"),
    "another configuration": _file("config/config_fed_client.conf"),
    "an empty name": _file(""),
    "no base64": lambda good: {**good, "files": {CONFIG: "*"}},
    "files as a list": _with(files=[]),
}


@pytest.mark.parametrize("attack", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_request_that_asks_for_anything_else_is_refused_by_name_and_leaves_nothing(
    attack: Callable[[Any], Any], connect: Any, good: Any, service: Service, kit: Path
) -> None:
    answer = asked(connect(), attack(good))
    assert answer.keys() == {"refused", "reason"} and answer["refused"] == "TF-743", answer
    assert started(service) == [] and untouched(kit)
    assert TOKEN not in answer["reason"] and str(kit) not in answer["reason"]


def test_other_accounts_get_no_answer(connect: Any, good: Any, service: Service, kit: Path) -> None:
    """Before a byte is read, by the kernel's word; the account that trains is no exception."""
    service.engine = Account("somebody", os.geteuid() + 1, frozenset())
    connection = connect()
    with pytest.raises((AccountError, OSError), match=NO_ANSWER):
        asked(connection, good)
    assert started(service) == [] and untouched(kit)


@pytest.mark.parametrize(
    "change",
    [
        lambda files, folder: {CONFIG: b"{}"},
        lambda files, folder: {**files, CONFIG: b'{"executors": []}'},
        lambda files, folder: {**files, "config/config_fed_server.json": b"{}"},
        lambda files, folder: {name: value for name, value in files.items() if not name.endswith(".crt")},
        lambda files, folder: app(folder, issue(OTHER, "lead@hospital", role="lead", key="rsa", **DATES)),
        # What the engine's account has: a certificate of the project, for this very site.
        lambda files, folder: app(folder, issue(ROOT, "site-1", key="rsa", **DATES)),
        lambda files, folder: app(folder, issue(ROOT, "server", role="server", key="rsa", **DATES)),
        lambda files, folder: app(folder, issue(ROOT, "m@hospital", role="member", key="rsa", **DATES)),
    ],
    ids=[
        "unsigned",
        "changed",
        "one more file",
        "no certificate",
        "of another root",
        "by the site",
        "by the server",
        "by a member",
    ],
)
def test_a_job_that_nobody_may_submit_is_refused(
    change: Any, connect: Any, good: Any, service: Service, kit: Path, tmp_path: Path
) -> None:
    files = {name: base64.b64decode(text) for name, text in good["files"].items()}
    changed = change(files, tmp_path / "forged")
    values = {name: base64.b64encode(content).decode() for name, content in changed.items()}
    answer = asked(connect(), {**good, "files": values})
    assert answer["refused"] == "TF-743" and "signed" in answer["reason"]
    assert started(service) == [] and untouched(kit)


def _of_the_engine(path: Path) -> None:
    """Values that nobody signed, under the engine's own signature of each file."""
    values = json.loads((path / CONFIG).read_text())
    values["executors"][0]["executor"]["args"]["rounds"] += 1
    (path / CONFIG).write_text(json.dumps(values))


MANIFESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("TF-633", {"manifest": False}),
    "of another root": ("TF-634", {"lead": issue(OTHER, "l", role="lead", key="rsa", **DATES)}),
    "by a member": ("TF-634", {"lead": issue(ROOT, "m", role="member", key="rsa", **DATES)}),
    "other values": ("TF-635", {"change": _of_the_engine}),
    "no values": ("TF-635", {"change": lambda path: (path / CONFIG).write_text("[]")}),
    "other sites": ("TF-635", {"sites": ["site-2", "site-3", "site-4"]}),
    "expired": ("TF-636", {"now": NOW - timedelta(days=8), "days": 1}),
    "of the future": ("TF-636", {"now": NOW + timedelta(days=1)}),
}


@pytest.mark.parametrize(("code", "options"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_job_whose_manifest_does_not_hold_is_launched_by_no_service(
    code: str, options: Any, connect: Any, good: Any, service: Service, kit: Path, tmp_path: Path
) -> None:
    """Each is signed by a lead in the engine's way, file by file."""
    files = app(tmp_path / "crafted", **options)
    values = {name: base64.b64encode(content).decode() for name, content in files.items()}
    answer = asked(connect(), {**good, "files": values})
    assert answer["refused"] == code and code in answer["reason"]
    assert started(service) == [] and untouched(kit)


def test_a_site_that_asks_for_no_manifest_launches_without_one_and_never_with_a_wrong_one(
    connect: Any, good: Any, service: Service, kit: Path, tmp_path: Path
) -> None:
    config = kit / "local" / "tightframe.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "policy": {"signed_jobs": False}}))
    for name, options, expected in (
        ("wrong", {"change": _of_the_engine}, "refused"),
        ("none", {"manifest": False}, "started"),
    ):
        files = app(tmp_path / name, **options)  # type: ignore[arg-type]
        values = {name: base64.b64encode(content).decode() for name, content in files.items()}
        assert expected in asked(connect(), {**good, "files": values})


def test_the_service_leaves_the_nonce_to_the_jobs_process(
    connect: Any, good: Any, service: Service, place: Path
) -> None:
    assert asked(connect(), good) == {"started": True}
    assert list((place / "state").iterdir()) == []


def test_a_job_that_cannot_be_launched_leaves_no_folder(
    connect: Any, good: Any, service: Service, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "command", lambda self, request: ["/nonexistent/python"])
    answer = asked(connect(), good)
    assert answer["refused"] == "TF-743" and "could not" in answer["reason"]
    assert started(service) == [] and untouched(kit)


def test_a_failure_to_accept_ends_no_service(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that leaves this process without file descriptors, and one that is gone at once."""
    monkeypatch.setattr(module, "ACCEPT_PAUSE", 0.01)
    errors = [errno.EMFILE, errno.ECONNABORTED, errno.ENOMEM, errno.EINVAL]
    left = list(errors)

    class Listener:
        def accept(self) -> Any:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))

        def fileno(self) -> int:
            return 3

    service.serve(Listener())  # type: ignore[arg-type]
    assert left == [], "the last alone says that the listener is shut down"


def test_a_job_is_started_once_and_its_results_are_never_written_over(
    connect: Any, good: Any, service: Service, kit: Path
) -> None:
    connection = connect()
    assert asked(connection, good) == {"started": True}
    (process,) = started(service)
    (kit / JOB / "model.safetensors").write_bytes(b"model")
    answer = asked(connect(), good)
    assert answer["refused"] == "TF-743" and "has not run here" in answer["reason"]
    connection.close()
    assert gone(process, 60)
    assert asked(connect(), good)["refused"] == "TF-743"
    assert (kit / JOB / "model.safetensors").read_bytes() == b"model"


def test_one_key_for_both_accounts_is_refused(connect: Any, good: Any, service: Service) -> None:
    answer = asked(connect(), {**good, "certificate": pem(TRAINING).decode()})
    assert answer["refused"] == "TF-745" and started(service) == []


def test_a_connection_ends_its_own_job_only(connect: Any, good: Any, service: Service) -> None:
    first, second = connect(), connect()
    assert asked(first, good) == {"started": True}
    (one,) = started(service)
    assert asked(second, {**good, "job": NEXT, "meta": {"job_id": NEXT}}) == {"started": True}
    (other,) = [process for process in started(service) if process != one]
    second.sendall(KILL)
    assert gone(other, 60) and json.loads(receive(second, 60))["ended"] == -signal.SIGKILL
    assert one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    first.close()
    assert gone(one, 60)


def test_a_job_that_ignores_being_asked_is_killed_and_so_are_its_children(
    connect: Any, good: Any, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(Service, "command", lambda self, request: [sys.executable, "-c", stubborn])
    connection = connect()
    assert asked(connection, good) == {"started": True}
    (process,) = started(service)
    until = time.monotonic() + 60
    while not (children := process.children()):
        assert time.monotonic() < until
        time.sleep(0.05)
    connection.close()
    assert gone(process, 60) and gone(children[0], 60)


def test_silent_and_slow_callers_do_not_keep_others_out_for_long(
    connect: Any, good: Any, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 2.0)
    held = [connect() for _ in range(module.MAX_CONNECTIONS)]
    for connection in held[1:]:
        connection.sendall(struct.pack(">I", 100) + b"{")
    # Connections are accepted in the order in which they were made.
    with pytest.raises(AccountError, match=NO_ANSWER):
        receive(connect(), 60)
    for connection in held:
        assert json.loads(receive(connection, 60))["refused"] == "TF-743"
    assert service._free.acquire(timeout=60), "an answer comes before its place is free"
    service._free.release()
    assert asked(connect(), good) == {"started": True}


def test_a_message_longer_than_any_job_is_not_read(connect: Any, service: Service) -> None:
    connection = connect()
    connection.sendall(struct.pack(">I", MAX_MESSAGE + 1))
    assert json.loads(receive(connection, 60))["refused"] == "TF-743"


@pytest.mark.parametrize("what", ["state", "kit", "key", "policy", "allow list"])
def test_what_the_engines_account_reaches_stops_every_job_and_is_not_told_to_it(
    what: str, connect: Any, good: Any, service: Service, kit: Path, place: Path
) -> None:
    """As after a `chmod` by mistake while the service runs."""
    path, mode = {
        "state": (place / "state", 0o711),
        "kit": (kit, 0o711),
        "key": (kit / "startup" / "client.key", 0o644),
        "policy": (kit / "local" / "tightframe.json", 0o666),
        "allow list": (kit / "local", 0o777),
    }[what]
    if what in ("key", "policy", "allow list"):
        kit.chmod(0o711)
    path.chmod(mode)
    answer = asked(connect(), good)
    assert answer == {"refused": "TF-742", "reason": "TF-742: the two accounts are not apart."}
    assert started(service) == [] and untouched(kit)


def test_the_service_does_not_begin_with_accounts_that_are_not_apart(kit: Path) -> None:
    config = kit / "local" / "tightframe.json"
    values = json.loads(config.read_text())
    del values["engine_account"]
    config.write_text(json.dumps(values))
    with pytest.raises(AccountError, match="TF-742: Expected `engine_account`"):
        TrainingService.of(kit)
    for name in ("root", "no-such-account"):
        config.write_text(json.dumps(values | {"engine_account": name}))
        with pytest.raises(AccountError, match="TF-742"):
            TrainingService.of(kit)


@pytest.mark.whole
def test_stopping_the_service_ends_its_jobs(kit: Path, tmp_path: Path) -> None:
    """The program itself, by the command's name, with no job; its socket goes with it."""
    command = [sys.executable, "-c", "from tightframe_app.cli import main; main()", "site", "serve"]
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    process = subprocess.Popen(
        [*command, "--kit", str(kit), "--socket", str(folder / "s")], stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not (folder / "s").exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.1)
        process.terminate()
        _, told = process.communicate(timeout=30)
        assert process.returncode == 0 and not (folder / "s").exists(), told
    finally:
        process.kill()
