"""The training account's side: a service that starts the processes of jobs at the engine's request.

It builds a job's command, environment and folder itself, from its own kit: the request gives only the
job, its signed configuration, and how to reach the engine's client. The configuration must be signed by
a person whom the project's root certified to submit jobs, so that not even the engine's account can
invent a job; the site's policy and allow list in the kit's ``local/`` apply to it as usual.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from nvflare.apis.job_launcher_spec import JobProcessEnv
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

from tightframe.config.site import FILE_NAME, SiteEntry, site_entry
from tightframe.errors import JobError, ManifestError, TightframeError
from tightframe.files import quoted
from tightframe.flare import doors
from tightframe.flare.accounts import permissions
from tightframe.flare.accounts.request import KILL, META, SOCKET, AccountError, Start, peer, receive, send
from tightframe.flare.identity import SITE_FILE, site_identity
from tightframe.flare.submitter import verify_app

WORKER = "nvflare.private.fed.app.client.worker_process"
REQUEST_SECONDS = 10.0
"""Seconds within which a request must have arrived."""
ACCEPT_PAUSE = 1.0
"""Seconds to wait after a connection could not be accepted."""
GRACE = 5.0
"""Seconds from asking a job's process to end to killing it."""
MAX_CONNECTIONS = 8
"""Most jobs and requests at a time; further ones are refused."""
ROOT_FILE = "rootCA.pem"
AUTHORIZATION = "authorization.json"
_RETURN_CODE = "_process_rc.txt"
"""File in which a job's process leaves its return code if its threads would not end."""
_ENGINES = ("NVFLARE_", "NVFL_", "LISTEN_", "NOTIFY_")
"""Prefixes of the service's environment variables that are not passed to a job's process."""
log = logging.getLogger("tightframe.learning.loop")


@dataclass
class TrainingService:
    """Starts jobs of one kit for one caller.

    Attributes:
        kit: the training account's own.
        name: the site's.
        organisation: the site's, from its certificate.
        engine: the account that may ask for jobs.
        server: scheme and address of the federation's server, from the kit.
        public_key: of the kit's certificate, in DER.
    """

    kit: Path
    name: str
    organisation: str
    engine: permissions.Account
    server: tuple[str, str]
    public_key: bytes
    _free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_CONNECTIONS))
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: bool = False

    @classmethod
    def of(cls, kit: Path) -> TrainingService:
        """Return the service of a kit, from the kit's own files.

        Raises:
            SiteConfigError: TF-201, TF-202 or TF-615, if the kit is not ready for production.
            AccountError: TF-742, if its configuration names no account for the engine, or one that can
                reach the training account's files.
        """
        kit = kit.resolve()
        config = json.loads((kit / "startup" / SITE_FILE).read_text(encoding="utf-8"))
        certificate = x509.load_pem_x509_certificate(
            (kit / "startup" / config["client"]["ssl_cert"]).read_bytes()
        )
        name, organisation = (
            _subject(certificate, oid) for oid in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
        )
        entry = _entry(kit, name)
        if entry.engine_account is None:
            raise AccountError(
                f"Expected `engine_account` in {kit}/local/{FILE_NAME} to name the account of the engine's "
                "client, the only one that may start jobs here, but the key is missing: add it.",
                code="TF-742",
            )
        permissions.require(kit, entry)
        site_identity(
            kit / "startup",
            name,
            production=True,
            missing_role=entry.policy.resolve(production=True).central_provisioning,
        )
        service = config["servers"][0]["service"]
        return cls(
            kit,
            name,
            organisation,
            permissions.Account.named(entry.engine_account),
            (str(service.get("scheme", "grpc")), str(service["target"])),
            _public_key(certificate),
        )

    def serve(self, listener: socket.socket) -> None:
        """Answer until the listener is shut down or closed.

        Log any other failure to accept a connection and wait for the next one: a caller that exhausts this
        account's file descriptors must not end the service.
        """
        while True:
            try:
                connection, _ = listener.accept()
                # The kernel names the caller, before a byte is read.
                caller = peer(connection)
            except OSError as error:
                # EINVAL: the listener is shut down; EBADF: it is closed.
                if error.errno in (errno.EINVAL, errno.EBADF) or listener.fileno() < 0:
                    return
                log.warning("a connection could not be accepted: %s", error.strerror)
                time.sleep(ACCEPT_PAUSE)
                continue
            if caller != self.engine.uid:
                log.warning("TF-744: refused the account with id %d: it is not %s", caller, self.engine.name)
                connection.close()
            elif not self._free.acquire(blocking=False):
                log.warning("TF-743: refused a connection: %d are open", MAX_CONNECTIONS)
                connection.close()
            else:
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """End all jobs, and start no more."""
        with self._lock:
            self._closing = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)
        for process in running:
            _end(process)

    def command(self, request: Start) -> list[str]:
        """Return a job's command line: all from this kit, except for the job's id and a port."""
        scheme, target = self.server
        return [
            *(sys.executable, "-m", WORKER, "-m", str(self.kit), "-w", str(self.kit / "startup")),
            *("-n", request.job, "-c", self.name, "-p", f"tcp://localhost:{request.port}"),
            *("--parent_conn_sec", "clear", "-g", target, "-scheme", scheme, "-s", SITE_FILE),
            *("--set", "secure_train=true", f"uid={self.name}", f"org={self.organisation}"),
            *("config_folder=config", "print_conf=True"),
        ]

    @staticmethod
    def environment(request: Start, own: Mapping[str, str]) -> dict[str, str]:
        """Return a job's environment: the service's own variables and the engine's credentials."""
        inherited = {name: value for name, value in own.items() if not name.startswith(_ENGINES)}
        return inherited | {
            doors.PARENT: str(os.getpid()),  # this service is not reachable over the engine's network
            JobProcessEnv.AUTH_TOKEN: request.token,
            JobProcessEnv.TOKEN_SIGNATURE: request.token_signature,
            JobProcessEnv.SSID: request.ssid,
        }

    def prepare(self, request: Start) -> Path:
        """Create a job's folder, once its signatures are verified; a refused job leaves nothing behind.

        Raises:
            AccountError: TF-742 to TF-745.
            ManifestError: TF-633 to TF-636. The job's process records the nonce.
            JobError: if the job's values are not valid.
        """
        entry = _entry(self.kit, self.name)
        permissions.require(self.kit, entry)
        self._check_certificate(request)
        run = self.kit / request.job
        with tempfile.TemporaryDirectory(dir=self.kit, prefix=".request-") as folder:
            staged = Path(folder) / "run"
            app = staged / f"app_{self.name}"
            for name, content in request.files.items():
                path = app / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            self._check_signed(app)
            verify_app(app, self.name, self.kit / "startup", entry)
            meta = {key: value for key, value in request.meta.items() if key in META}
            (staged / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            with self._lock:
                if run.exists() or run.is_symlink():
                    raise AccountError(
                        f"Expected a job that has not run here, but {request.job} has: each job starts once. "
                        "Submit it again."
                    )
                staged.rename(run)
        return run

    def _check_signed(self, app: Path) -> None:
        root = self.kit / "startup" / ROOT_FILE
        valid, signers = verify_folder_signature_and_get_signers(str(app), str(root))
        if not valid or len(signers) != 1:
            raise AccountError(
                "Expected a job that is signed by one person under the project's root, but its signatures do "
                "not verify: submit it again with the kit of a person who may submit jobs."
            )
        # The engine accepts a job signed with a site's certificate as well as with a person's.
        (_, _, role), *_ = signers
        if not _may_submit(self.kit, str(role)):
            raise AccountError(
                "Expected a job that is signed by a person with a role to which this account's "
                f"local/{AUTHORIZATION} gives `submit_job`, but got the role {str(role)[:40]!r}."
            )

    def _check_certificate(self, request: Start) -> None:
        try:
            theirs = _public_key(x509.load_pem_x509_certificate(request.certificate.encode()))
        except ValueError:
            raise AccountError("Expected the engine's certificate in PEM, but got something else.") from None
        if theirs == self.public_key:
            raise AccountError(
                "Expected the engine's account to have a key of its own, but it has the key with which this "
                "account signs secure sums: ask for a second certificate, as the site guide says.",
                code="TF-745",
            )

    def _answer(self, connection: socket.socket) -> None:
        process: subprocess.Popen[bytes] | None = None
        try:
            with connection:
                request = self._request(connection)
                if request is None:
                    return
                try:
                    process = self._start(request)
                except TightframeError as error:
                    _refuse(connection, error)
                    return
                send(connection, b'{"started": true}')
                self._follow(connection, request, process)
        except OSError:
            log.warning("the engine's client disconnected during an answer")
        finally:
            if process is not None:
                _end(process)
                with self._lock:
                    self._running.discard(process)
            self._free.release()

    def _request(self, connection: socket.socket) -> Start | None:
        try:
            return Start.from_bytes(receive(connection, REQUEST_SECONDS))
        except AccountError as error:
            _refuse(connection, error)
            return None

    def _start(self, request: Start) -> subprocess.Popen[bytes]:
        run: Path | None = None
        process: subprocess.Popen[bytes] | None = None
        try:
            run = self.prepare(request)
            with self._lock:
                if self._closing:
                    raise AccountError("Expected the training service to run, but it is being stopped.")
                process = subprocess.Popen(  # noqa: S603 - arguments as a list, of the kit's own values
                    self.command(request),
                    env=self.environment(request, os.environ),
                    cwd=self.kit,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    umask=0o077,
                )
                self._running.add(process)
        except OSError as error:
            raise AccountError(
                f"Expected to start job {request.job}, but this account could not: {error.strerror}."
            ) from None
        finally:
            if run is not None and process is None:
                shutil.rmtree(run, ignore_errors=True)  # so that the job can be requested again
        log.info("job %s: started as process %d", request.job, process.pid)
        return process

    def _follow(self, connection: socket.socket, request: Start, process: subprocess.Popen[bytes]) -> None:
        """Report how a job ended; end it when the engine's client asks for that or disconnects."""
        over = threading.Event()

        def listen() -> None:
            with contextlib.suppress(OSError):
                connection.settimeout(None)
                byte = connection.recv(1)
                if not over.is_set():
                    log.info("job %s: %s", request.job, "killed" if byte else "ended: the engine is gone")
                    if byte == KILL:
                        _signal(process, signal.SIGKILL)
                    _end(process)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        code = process.wait()
        over.set()
        log.info("job %s: process %d ended with %d", request.job, process.pid, code)
        answer = {"ended": code, "recorded": _recorded(self.kit / request.job / _RETURN_CODE)}
        with contextlib.suppress(OSError):
            send(connection, json.dumps(answer).encode())
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        listener.join(GRACE)


def run(kit: Path, path: Path = Path(SOCKET)) -> None:
    """Serve until SIGTERM or SIGINT; then end all jobs.

    Args:
        kit: the training account's.
        path: of the socket, in a folder that no other account can write to.

    Raises:
        AccountError: TF-741, if another account can write to that folder; otherwise as
            ``TrainingService.of``.
        OSError: if the socket cannot be created.
    """
    service = TrainingService.of(kit)
    if path.parent.stat().st_mode & 0o022 or service.engine.may_change(path.parent):
        raise AccountError(
            f"Expected only this account to be able to write to the socket's folder {path.parent}, but "
            f"others can replace the socket there: run `chmod go-w {quoted(path.parent)}`.",
            code="TF-741",
        )
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)  # the kernel identifies whoever connects
        listener.listen(MAX_CONNECTIONS)

        def stop(number: int, frame: FrameType | None) -> None:
            # `accept` continues after a signal; it fails once the listener is shut down.
            listener.shutdown(socket.SHUT_RDWR)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        log.info("%s: waiting for %s at %s", service.name, service.engine.name, path)
        try:
            service.serve(listener)
        finally:
            service.close()
            path.unlink(missing_ok=True)
    log.info("%s: ended", service.name)


def _entry(kit: Path, name: str) -> SiteEntry:
    entry = site_entry(kit / "local", name, production=True, alone=True)
    assert entry is not None  # noqa: S101 - production has one, or has raised
    return entry


def _subject(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> str:
    """Return a part of a certificate's subject; empty if it has none."""
    return next((str(item.value) for item in certificate.subject.get_attributes_for_oid(oid)), "")


def _public_key(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _refuse(connection: socket.socket, error: TightframeError) -> None:
    """Log a refusal and report it to the caller, without details of this account's files."""
    log.warning("%s", error)
    reason = str(error)
    if error.code == "TF-742":
        reason = "TF-742: the two accounts are not apart."
    elif not isinstance(error, AccountError | JobError | ManifestError):
        reason = f"{error.code}: this account's own configuration is not valid."
    send(connection, json.dumps({"refused": error.code, "reason": reason}).encode())


def _may_submit(kit: Path, role: str) -> bool:
    """Check whether the kit's own file lets a role submit jobs; without that file no role may."""
    try:
        values = json.loads((kit / "local" / AUTHORIZATION).read_text(encoding="utf-8"))
        rights = values["permissions"][role]
        return (rights["submit_job"] if isinstance(rights, dict) else rights) not in (
            "none",
            ["none"],
            [],
            "",
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _recorded(path: Path) -> int | None:
    try:
        code = int(path.read_text(encoding="ascii")[:8])
    except (OSError, ValueError):
        return None
    return code


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a job's process and those that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a job's processes, and kill those that do not end."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()
