"""The engine's side of two accounts: a launcher that asks the training service to start a job's process.

A site names it in the ``local/resources.json`` of both its kits, in place of the engine's own launcher.
It starts nothing itself: without the service no job runs, and there is no fallback to one account.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ConnectionSecurity, FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import (
    JobHandleSpec,
    JobLauncherSpec,
    JobProcessArgs,
    JobReturnCode,
    add_launcher,
)
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.process_launcher import JOB_RETURN_CODE_MAPPING

from tightframe.config.job_manifest import APP_FILES
from tightframe.flare.accounts.permissions import Account
from tightframe.flare.accounts.request import (
    KILL,
    MAX_MESSAGE,
    SOCKET,
    AccountError,
    Start,
    peer,
    receive,
    send,
)

ANSWER_SECONDS = 60.0
"""Seconds within which the service must report that a job was started or refused."""


class TrainingLauncher(JobLauncherSpec):
    """Starts jobs through the training service.

    Args:
        account: the training account; a service of any other account is refused.
        socket_path: of the socket on which that service listens.
    """

    def __init__(self, account: str, socket_path: str = SOCKET) -> None:
        super().__init__()
        self._account, self._socket_path = account, socket_path

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Offer to launch jobs; the engine refuses a site at which two launchers offer that."""
        if event_type == EventType.BEFORE_JOB_LAUNCH:
            add_launcher(self, fl_ctx)

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Ask the training account's service to start a job's process.

        Raises:
            AccountError: TF-741, if the service is not there or is not the training account's; TF-743
                or another code, if the service refuses the request.
        """
        request = _request(job_meta, fl_ctx)
        connection = self._connect()
        try:
            send(connection, request.to_bytes())
            answer = _answer(receive(connection, ANSWER_SECONDS))
        except (AccountError, OSError) as error:
            # The service closes the connection at once if it does not know the account.
            connection.close()
            raise AccountError(
                f"Expected an answer from the training service, but got: {error} Check that its "
                "`engine_account` names this account; the service's own log says why.",
                code="TF-741",
            ) from None
        if "started" not in answer:
            connection.close()
            raise AccountError(
                f"Expected the training service to start job {request.job}, but it refused: "
                f"{str(answer.get('reason'))[:500]} The service's own log says more.",
                code="TF-743",
            )
        return TrainingHandle(connection)

    def _connect(self) -> socket.socket:
        wanted = Account.named(self._account).uid
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(self._socket_path)
            uid = peer(connection)
        except OSError as error:
            connection.close()
            raise AccountError(
                f"Expected the training service at {self._socket_path}, but got: {error.strerror}. Start it "
                "(systemctl start tightframe-training). The job is not run in this account instead.",
                code="TF-741",
            ) from None
        if uid != wanted or uid == os.geteuid():
            connection.close()
            owner = "this account" if uid == os.geteuid() else f"the account with id {uid}"
            raise AccountError(
                f"Expected the training service at {self._socket_path} to run as the account "
                f"{self._account}, and not as the engine's, but it runs as {owner}.",
                code="TF-741",
            )
        return connection


class TrainingHandle(JobHandleSpec):
    """Handle by which the engine controls a job's process in the training account: the connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ended = threading.Event()
        self._code: int = JobReturnCode.UNKNOWN
        # A job takes hours, so the wait for its end has no timeout; the other side ends it.
        connection.settimeout(None)
        threading.Thread(target=self._wait_ended, name="training job", daemon=True).start()

    def terminate(self) -> None:
        """Kill the process and its whole session."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.sendall(KILL)

    def poll(self) -> int:
        """Return the job's return code in the engine's terms; ``UNKNOWN`` while the process runs."""
        return self._code

    def wait(self) -> None:
        """Wait until the process or its service has ended."""
        self._ended.wait()

    def _wait_ended(self) -> None:
        try:
            while not self._ended.is_set():
                if self._connection.recv(1, socket.MSG_PEEK) == b"":
                    raise AccountError("Expected the job's end, but the training service ended.")
                ended = _answer(receive(self._connection, ANSWER_SECONDS))
                code, recorded = ended.get("ended"), ended.get("recorded")
                mapped = JOB_RETURN_CODE_MAPPING.get(code, JobReturnCode.EXECUTION_ERROR)
                self._code = recorded if isinstance(recorded, int) else mapped
                self._ended.set()
        except (AccountError, OSError):
            self._code = JobReturnCode.EXECUTION_ERROR
        finally:
            self._connection.close()
            self._ended.set()


def _request(job_meta: dict[str, Any], fl_ctx: FLContext) -> Start:
    """Return the request to start a job, from the engine's own description of it.

    Raises:
        AccountError: TF-743, if the engine's settings or the job cannot be used with two accounts.
    """
    workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    arguments = {name: value for name, (_, value) in fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS).items()}
    url = urlparse(str(arguments[JobProcessArgs.PARENT_URL]))
    security = arguments.get(JobProcessArgs.PARENT_CONN_SEC, ConnectionSecurity.CLEAR)
    if url.scheme != "tcp" or url.hostname != "localhost" or security != ConnectionSecurity.CLEAR:
        raise AccountError(
            "Expected the engine's listener for its jobs to be the default one, plain TCP on localhost, but "
            f"got {url.scheme} on {url.hostname}: remove `internal` from this site's local/comm_config.json."
        )
    job = str(job_meta[JobConstants.JOB_ID])
    config = fl_ctx.get_prop(FLContextKey.CLIENT_CONFIG) or {}
    certificate = Path(workspace.get_file_path_in_startup(str(config.get("ssl_cert", "client.crt"))))
    app = Path(workspace.get_app_dir(job))
    files = {str(one.relative_to(app)): one for one in sorted(app.rglob("*")) if not one.is_dir()}
    if strange := sorted(set(files) - APP_FILES):
        raise AccountError(
            f"Expected a job of configuration files alone, as two accounts require, but got {strange[:5]}."
        )
    if sum(one.stat().st_size for one in files.values()) > MAX_MESSAGE // 2:
        raise AccountError("Expected a job folder of a few KiB, but got one of more than 2 MiB.")
    return Start(
        job=job,
        port=url.port or 0,
        token=arguments[JobProcessArgs.AUTH_TOKEN],
        token_signature=arguments[JobProcessArgs.TOKEN_SIGNATURE],
        ssid=arguments[JobProcessArgs.SSID],
        certificate=certificate.read_text(encoding="ascii"),
        meta=json.loads(json.dumps(job_meta)),
        files={name: one.read_bytes() for name, one in files.items()},
    )


def _answer(message: bytes) -> dict[str, Any]:
    try:
        values = json.loads(message)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise AccountError("Expected an answer from the training service, but got something else.")
    return values
