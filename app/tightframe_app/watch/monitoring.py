"""A person's connection to a federation's server, by the FLARE API: submit, watch and fetch jobs.

Only this module of the package depends on the engine.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.fuel.hci.client import file_transfer
from nvflare.tool.kit import kit_config

from tightframe.flare import reach
from tightframe.flare.monitoring.consoles import GROUP
from tightframe.results.files import OUTCOME
from tightframe.results.outcome import Outcome
from tightframe_app.screens import shown
from tightframe_app.watch.silos import Silences, missing
from tightframe_app.watch.status import (
    LostError,
    NoOutcomeError,
    Seen,
    WatchError,
    read_outcome,
    read_status,
)

KITS = "kits"
"""Folder of startup kits, below the current one, that the guides' ``nvflare package`` makes."""
RESULTS = "workspace"
"""Folder of the results in a downloaded job."""
_REFUSED = (api_spec.AuthenticationError, api_spec.AuthorizationError)
_GONE = (
    # ``RuntimeError`` and ``InternalError`` are the engine's unnamed failures, such as a truncated answer or
    # a restarting server. Asking again shows whether they last.
    OSError,
    FLCommunicationError,
    RuntimeError,
    api_spec.InternalError,
    api_spec.NoReply,
    api_spec.SessionClosed,
)
_NOT_YET = (api_spec.JobNotFound, api_spec.JobNotRunning, api_spec.NoReply)


def find_kit(folder: Path | None) -> Path:
    """Find the startup kit of the person who watches.

    Args:
        folder: of the kit; by default the engine's configured one (``nvflare config use``), else a person's
            only one below ``kits/``.

    Raises:
        WatchError: TF-811, if there is none, or more than one.
    """
    try:
        if folder is not None:
            return Path(kit_config.validate_admin_startup_kit(str(folder)))
        configured = os.environ.get(kit_config.NVFLARE_STARTUP_KIT_DIR, "").strip()
        if configured or kit_config.get_active_startup_kit_id(kit_config.load_cli_config()):
            return Path(kit_config.resolve_startup_kit_dir())
    except kit_config.StartupKitConfigError as error:
        raise WatchError(
            f"Expected a startup kit of a person (a lead, an admin, a member), but the engine says: {error}. "
            "Give its folder with --kit, for example kits/PROJECT/prod_00/lead@example.org.",
            code="TF-811",
        ) from None
    kits = sorted(path.parent.parent for path in Path(KITS).glob("*/prod_*/*/startup/fed_admin.json"))
    if len(kits) == 1:
        return Path(kit_config.validate_admin_startup_kit(str(kits[0])))
    listed = ": " + ", ".join(str(path) for path in kits) if kits else ""
    raise WatchError(
        f"Expected one startup kit of a person below {KITS}/, as `nvflare config use` names none, but found "
        f"{len(kits)}{listed}. Give its folder with --kit, or once and for all with `nvflare config add "
        "NAME KIT` and `nvflare config use NAME`.",
        code="TF-811",
    )


class HeldTransfers(file_transfer.FileTransferModule):
    """The engine's download of a result, with the server's file names confined to the result's folder.

    The engine joins them to paths unchecked: a server could write, rename or delete any of this person's
    files.
    """

    def pull_folder(self, args: list[str], ctx: Any) -> Any:
        """Fetch a result into the folder named after its job; the engine takes a third word for a folder."""
        if len(args) > 2 or not all(_is_name(name) for name in args[1:]):
            raise _outside()
        return super().pull_folder(args, ctx)

    def _tx_path(self, tx_id: str, folder_name: str) -> str:
        """Return a download's folder, which lies in that of all downloads."""
        if not (_is_name(tx_id) and _is_name(folder_name)):
            raise _outside()
        return str(super()._tx_path(tx_id, folder_name))

    def pull_binary_file(self, args: list[str], ctx: Any) -> Any:
        """Fetch one file into the folder of its download."""
        if len(args) > 5:
            folder = Path(os.path.abspath(self._tx_path(args[2], args[4])))
            if folder not in Path(os.path.abspath(folder / args[5])).parents:
                raise _outside()
        return super().pull_binary_file(args, ctx)


file_transfer.FileTransferModule = HeldTransfers  # the engine's sessions use this name


def _fetched(session: Any, job_id: str, into: Path) -> Path:
    """Fetch a job's result, move it to ``into/job_id``, and return that path.

    The server's answer says where the result is and may be forged: the engine would move any folder of this
    person.
    """
    place = into / job_id
    location = session.download_job_result(job_id)
    if not location:
        return place
    path = Path(os.path.abspath(location))
    if path.parent != Path(os.path.abspath(session.download_dir)) or path.is_symlink():
        raise _outside()
    if path.name != job_id and not path.name.startswith(f"{job_id}__"):  # numbered if it existed
        raise _outside()
    return Path(shutil.move(path, place))


def _is_name(name: Any) -> bool:
    """Check whether a name is of one file or folder, without a path."""
    return isinstance(name, str) and name not in ("", ".") and not any(p in name for p in ("/", "\\", ".."))


def _job_id(value: Any) -> str:
    """Return a job's id, validated, as the engine's commands are one line, split at blanks.

    Raises:
        WatchError: TF-815, if it is not a UUID.
    """
    try:
        return str(uuid.UUID(str(value)))
    except ValueError:
        raise WatchError(
            f"Expected the id of a job, a UUID, but got {shown(str(value))!r}: it is not sent to the server. "
            "If it came from the server, the server is not to be trusted. `nvflare job list` shows its jobs.",
            code="TF-815",
        ) from None


def _outside() -> WatchError:
    return WatchError(
        "Expected the server to name files of the job's result, but it names a path outside of its folder: "
        "nothing was written. The server is not to be trusted.",
        code="TF-817",
    )


class Server:
    """One person's access to a federation's server; connects at the first request.

    Args:
        kit: the person's startup kit.
        timeout: seconds to wait for a connection.

    Attributes:
        reached: whether there has been a connection.
    """

    def __init__(self, kit: Path, timeout: float = 10.0) -> None:
        self._timeout = timeout
        self._session: Any = None
        self.reached = False
        self._silences = Silences()
        try:
            self.user, folder = kit_config.resolve_admin_user_and_dir_from_startup_kit(str(kit))
        except kit_config.StartupKitConfigError as error:
            raise WatchError(f"Expected a startup kit in {kit}, but got: {error}.", code="TF-811") from None
        self.kit = Path(folder)
        # Without a handler the engine's threads would print warnings on the terminal.
        logging.getLogger("nvflare").addHandler(logging.NullHandler())

    def look(self, job_id: str) -> Seen:
        """Ask for a job's state.

        Raises:
            LostError: if the server did not answer.
            WatchError: if a retry is useless: TF-812, TF-813, TF-814, TF-815.
        """
        job_id = _job_id(job_id)
        with self._asking(job_id) as session:
            meta = session.get_job_meta(job_id)
        engine = str(meta.get("status"))
        details: list[str] = []
        if engine in ("SUBMITTED", "APPROVED", "FINISHED:CAN_NOT_SCHEDULE"):
            details = [
                *self._awaited(job_id, meta),
                *(str(x) for x in (meta.get("schedule_history") or [])[-1:]),
            ]
        elif engine not in ("DISPATCHED", "RUNNING"):
            details = [
                str(item) for item in meta.get("job_deploy_detail") or [] if not str(item).endswith(": OK")
            ]
        values = self._status(job_id) if engine == "RUNNING" else None
        status = None if values is None else read_status(values)
        silent = {} if status is None else self._silent(job_id, missing(status))
        return Seen(engine, str(meta.get("name")), tuple(details), status, silent)

    def _awaited(self, job_id: str, meta: Mapping[str, Any]) -> list[str]:
        """Name the unconnected sites that the engine needs to start a job."""
        apps = meta.get("deploy_map")
        needed = meta.get("min_clients")
        if not isinstance(apps, dict) or not isinstance(needed, int):
            return []
        listed = [name for sites in apps.values() if isinstance(sites, list) for name in sites]
        names = [name for name in dict.fromkeys(listed) if isinstance(name, str) and name != "server"]
        absent = self._silent(job_id, names)
        if len(names) - len(absent) >= needed:
            return []
        many = "is" if len(absent) == 1 else "are"
        return [
            f"{', '.join(absent)} {many} not connected; the job waits until {needed} of its {len(names)} "
            "sites are"
        ]

    def _silent(self, job_id: str, names: list[str]) -> dict[str, float | None]:
        """Return the silent ones of some sites, by the clients' heartbeats."""
        if not names:
            return {}
        with self._asking(job_id) as session:
            try:
                sites = session.get_system_info().client_info
            except (*_REFUSED, *_NOT_YET, *_GONE):
                return {}  # the job's state is shown all the same
        heard = {site.name: site.last_connect_time for site in sites}
        if not all(isinstance(last, int | float) for last in heard.values()):
            return {}  # a server of another version
        return self._silences.of(names, heard, time.monotonic())

    def _status(self, job_id: str) -> dict[str, Any] | None:
        """Ask for the run's own status, by the statistics, which everybody with access to the job may see."""
        with self._asking(job_id) as session:
            try:
                stats = session.show_stats(job_id, api_spec.TargetType.SERVER)
            except _NOT_YET:
                return None  # in the first two and the last seconds
        server = stats.get("server") if isinstance(stats, dict) else None
        values = server.get(GROUP) if isinstance(server, dict) else None
        return values if isinstance(values, dict) and values else None

    def outcome(self, job_id: str) -> Outcome:
        """Return the outcome of a finished run: fetch its result, read it and delete it.

        Raises:
            LostError: if the server did not answer.
            NoOutcomeError: if this person may not fetch it, or it has no outcome.
            WatchError: TF-815, if the id is invalid.
        """
        job_id = _job_id(job_id)
        with tempfile.TemporaryDirectory() as folder:
            with self._asking(job_id) as session:
                try:
                    result = _fetched(session, job_id, Path(folder))
                except _REFUSED:
                    raise NoOutcomeError(f"{self.user} may not download it", allowed=False) from None
                except (*_NOT_YET, api_spec.JobNotDone) as error:
                    raise NoOutcomeError(f"it cannot be downloaded: {shown(str(error))}") from None
            results = result / RESULTS
            if not (results / OUTCOME).is_file():
                raise NoOutcomeError(
                    f"there is no {OUTCOME} in its result: it did not get as far as Tightframe"
                )
            return read_outcome(results)

    def submit(self, folder: Path) -> str:
        """Submit a signed job folder; return the job's id.

        Raises:
            LostError: if the server did not answer, so that it may or may not have taken the job.
            WatchError: TF-812, if it does not accept this person; TF-814, if this person may not submit;
                TF-815, if its answer is no id.
        """
        with self._asking("the job", right="submit jobs") as session:
            return _job_id(session.submit_job(str(folder.resolve())))

    def download(self, job_id: str, into: Path) -> Path:
        """Fetch a job's result into a folder, and return its own folder there.

        Raises:
            LostError: if the server did not answer.
            WatchError: TF-814, if this person may not fetch it; TF-815, if the id is invalid.
            FileExistsError: if the result's own folder exists already.
        """
        job_id = _job_id(job_id)
        if os.path.lexists(into / job_id):
            raise FileExistsError(
                f"Expected a folder without results of this job, but {into / job_id} is there already: name "
                "another folder, or delete it, and fetch again."
            )
        into.mkdir(parents=True, exist_ok=True)
        with self._asking(job_id, right="download this job") as session:
            return _fetched(session, job_id, into.resolve())

    def close(self) -> None:
        """Close the connection, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            with _quiet(), contextlib.suppress(Exception):
                session.close()

    @contextlib.contextmanager
    def _asking(self, job_id: str, right: str = "look at jobs") -> Iterator[Any]:
        """Yield a connected session; translate its errors, and drop a lost connection."""
        try:
            with _quiet():
                if self._session is None:
                    self._session, self.reached = self._connected(), True
                yield self._session
        except api_spec.JobNotFound:
            raise WatchError(
                f"Expected a job of this federation, but the server does not know {job_id}. "
                "`nvflare job list` shows its jobs.",
                code="TF-813",
            ) from None
        except api_spec.AuthorizationError as error:
            raise WatchError(
                f"Expected {self.user} to have the right to {right}, but the server says: "
                f"{shown(str(error))}.",
                code="TF-814",
            ) from None
        except api_spec.AuthenticationError as error:
            raise WatchError(
                f"Expected the server to accept {self.user}, but it says: "
                f"{shown(str(error))}{self._expired()}"
            ) from None
        except _GONE as error:
            self._drop()
            why = None if self.reached else reach.unreached(self.kit / "startup")
            raise LostError(shown(f"{why or error}{self._expired()}")) from None

    def _connected(self) -> Any:
        # One try: the watcher retries, and says so meanwhile.
        return new_secure_session(self.user, str(self.kit), timeout=self._timeout, auto_login_max_tries=1)

    def _drop(self) -> None:
        """Drop a connection without a message to the server, which does not answer."""
        session, self._session = self._session, None
        if session is not None:
            with _quiet(), contextlib.suppress(Exception):
                session.api.close()

    def _expired(self) -> str:
        """Describe problems of the kit's certificate, as a server that refuses one gives no reason."""
        findings = kit_config.inspect_startup_kit_metadata(str(self.kit))["findings"]
        wrong = [str(item["message"]).rstrip(".") for item in findings if item["severity"] == "error"]
        return "".join(f"; {message}" for message in wrong)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the engine's prints, and tracebacks of errors that it reports anyway, off a live screen."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
