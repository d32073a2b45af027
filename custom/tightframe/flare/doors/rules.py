"""Rules for the engine's messages: each process accepts what is listed here, and refuses the rest.

The engine (NVFlare 2.9) routes messages between *cells*, one in each process, and serves a request to
any sender. All headers of a message are its sender's claims. The only thing that a process knows by
itself is through which of its own connectors a message came, so every rule starts there:

========= ======================== =====================================================================
role      cell                     connectors
========= ======================== =====================================================================
SITE      ``hospital-1``           UP to the server (TLS, the server's certificate), INSIDE for its jobs
SITE_JOB  ``hospital-1.JOB``       UP to the server, PARENT to the site's own process on this machine
SERVER    ``server``               OUTSIDE for sites and consoles (TLS, both certificates), INSIDE
SERVER_JOB ``server.JOB``          PARENT to the server's own process on this machine
========= ======================== =====================================================================

Nothing here imports the engine: ``engine.py`` puts these rules into effect.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tightframe.config import job_manifest

TESTED = ("2.9.0",)
"""Versions of the engine in which every topic was listed and tried."""
ROOT = "server"
"""The cell of the server's own process."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CONSOLE = re.compile(rf"_admin_{_UUID.pattern}")
_NAME = re.compile(r"[A-Za-z0-9_~-]+")
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PREFIX = "cn__"
MSG_TYPE, CHANNEL, TOPIC = _PREFIX + "msg_type", _PREFIX + "channel", _PREFIX + "topic"
ORIGIN, DESTINATION, CONN_URL = _PREFIX + "origin", _PREFIX + "destination", _PREFIX + "conn_url"
REQ_ID, ENCRYPTED = _PREFIX + "req_id", _PREFIX + "encrypted"
STREAM, DATA, ACK, ERROR = "sm__STREAM", "sm__DATA", "sm__ACK", "sm__ERROR"
_STREAM_CHANNEL, _STREAM_TOPIC = "sm__ch", "sm__tp"


class Role(StrEnum):
    """Kind of process."""

    SITE = "site"
    SITE_JOB = "site's job"
    SERVER = "server"
    SERVER_JOB = "server's job"


class Side(StrEnum):
    """Connector of a process through which a message came."""

    UP = "up"
    PARENT = "parent"
    INSIDE = "inside"
    OUTSIDE = "outside"


SIDES: Mapping[Role, frozenset[Side]] = {
    Role.SITE: frozenset({Side.UP, Side.INSIDE}),
    Role.SITE_JOB: frozenset({Side.UP, Side.PARENT}),
    Role.SERVER: frozenset({Side.OUTSIDE, Side.INSIDE}),
    Role.SERVER_JOB: frozenset({Side.PARENT}),
}
"""Connectors of each role; the engine's "ad hoc" connections between sites are not among them."""


class Sender(StrEnum):
    """Kind of process that sent a message, once its origin has been checked against the connector."""

    SITE = "site"
    SITE_JOB = "site's job"
    SERVER = "server"
    SERVER_JOB = "server's job"
    CONSOLE = "console"


Topics = Mapping[tuple[str, str], frozenset[Sender]]


def _topics(*rows: tuple[str, str, Sender | tuple[Sender, ...]]) -> Topics:
    """Return senders by channel and topic, from rows of channel, topics separated by blanks, and senders."""
    return {
        (channel, topic): frozenset(senders if isinstance(senders, tuple) else (senders,))
        for channel, topics, senders in rows
        for topic in topics.split()
    }


BYE = ("cellnet.channel", "bye")
"""Topic that tells a neighbour that a process ends; meaningful between neighbours only."""
ADMIN = ("admin", "admin")
"""Topic that carries a command from the server to a site; the payload names the command."""
STATUS = "train.notify_job_status"

SERVED: Mapping[Role, Topics] = {
    Role.SITE: _topics(
        (*ADMIN, Sender.SERVER),
        (ADMIN[0], STATUS, Sender.SITE_JOB),
        (*BYE, (Sender.SERVER, Sender.SITE_JOB)),
    ),
    Role.SITE_JOB: _topics(
        ("client_command", "abort", Sender.SITE),
        ("aux_communication", "__end_run__", Sender.SERVER_JOB),
        ("download_service__", "download_service__download", Sender.SERVER_JOB),
        ("download_service__", "download_service__source_failure", Sender.SERVER_JOB),
        (STREAM, f"{DATA} {ACK}", Sender.SERVER_JOB),
        (STREAM, ERROR, (Sender.SERVER, Sender.SERVER_JOB)),
        (*BYE, (Sender.SERVER, Sender.SITE)),
    ),
    Role.SERVER: _topics(
        ("task", "challenge register", (Sender.SITE, Sender.CONSOLE)),
        ("task", "quit heart_beat report_job_failure", Sender.SITE),
        ("server_parent_listener", "get_clients update_run_status heartbeat", Sender.SERVER_JOB),
        ("hci_channel", "command", Sender.CONSOLE),
        ("aux_communication", "ObjectStreamer.Request ObjectStreamer.Abort", Sender.CONSOLE),
        ("download_service__", "download_service__download", Sender.CONSOLE),
        (STREAM, f"{DATA} {ACK} {ERROR}", (Sender.CONSOLE, Sender.SERVER_JOB)),
        (*BYE, (Sender.SITE, Sender.SITE_JOB, Sender.CONSOLE, Sender.SERVER_JOB)),
    ),
    Role.SERVER_JOB: _topics(
        ("server_command", "get_task submit_update", Sender.SITE_JOB),
        (
            "server_command",
            "abort shutdown get_run_info show_stats get_errors reset_errors handle_dead_job app_command",
            Sender.SERVER,
        ),
        ("aux_communication", "__sync_runner__ __job_heartbeat__ __task_check__", Sender.SITE_JOB),
        ("download_service__", "download_service__download", Sender.SITE_JOB),
        ("download_service__", "download_service__source_failure", Sender.SITE_JOB),
        (STREAM, f"{DATA} {ACK} {ERROR}", (Sender.SERVER, Sender.SITE_JOB)),
        (*BYE, Sender.SERVER),
    ),
}
"""Requests that a process serves: channel and topic -> accepted senders."""


def _returns(*rows: tuple[str, str, Sender]) -> Topics:
    """Return the streams that answer requests of a process; the engine names them by channel and topic."""
    return {
        ("return_only", f"{channel}:{topic}"): frozenset((sender,))
        for channel, topics, sender in rows
        for topic in topics.split()
    }


_DOWNLOAD = "download_service__download download_service__source_failure"
_STREAMED = {"aux_communication", "server_command", "hci_channel", "download_service__"}
"""Channels whose requests the engine sends as streams; the others it sends as single messages."""
STREAMS: Mapping[Role, Topics] = {
    role: {**{key: senders for key, senders in SERVED[role].items() if key[0] in _STREAMED}, **more}
    for role, more in {
        Role.SITE: {},
        Role.SITE_JOB: _returns(
            ("server_command", "get_task submit_update", Sender.SERVER_JOB),
            ("aux_communication", "__sync_runner__ __job_heartbeat__ __task_check__", Sender.SERVER_JOB),
            ("download_service__", _DOWNLOAD, Sender.SERVER_JOB),
        ),
        Role.SERVER: _returns(
            (
                "server_command",
                "abort shutdown get_run_info show_stats get_errors reset_errors handle_dead_job app_command",
                Sender.SERVER_JOB,
            ),
            ("aux_communication", "ObjectStreamer.Request ObjectStreamer.Abort", Sender.CONSOLE),
        ),
        Role.SERVER_JOB: _returns(
            ("aux_communication", "__end_run__", Sender.SITE_JOB),
            ("download_service__", _DOWNLOAD, Sender.SITE_JOB),
        ),
    }.items()
}
"""Streams that a process accepts: their own channel and topic -> accepted senders."""

COMMANDS = frozenset(
    {
        "scheduler.check_resource",
        "scheduler.cancel_resource",
        "train.deploy",
        "train.start_job",
        "train.abort",
    }
)
"""Commands of the server that a run needs at a site. All others are removed from the process."""
APP_FILES: Mapping[Role, frozenset[str]] = {
    Role.SITE: job_manifest.APP_FILES,
    Role.SERVER: job_manifest.APP_FILES | {"config/checkpoint.safetensors"},
}
"""Files that a deployed app may contain, relative to its folder. Others could act as engine configuration.

The engine searches the whole workspace, jobs' folders included, for its ``comm_config``, in the job's process
and, after a restart, in the parent's. That file names a folder of Python files, all of which are run.
"""
MAX_APP_BYTES: Mapping[Role, int] = {Role.SITE: 4 * 2**20, Role.SERVER: 2**40}
"""Largest size of an app's files together, unpacked, in bytes; only the server's may include a checkpoint."""
LAUNCH_META = ("launcher_spec", "stats_pool_config")
"""Keys of a job's metadata that choose images, variables and files of its process.

Code (``byoc``) is judged by the app's files at its deployment, where the refusal is reported to the lead.
"""
JOB_COMMANDS = frozenset({"abort"})
"""Commands that a site's job accepts from the site's own process."""

_NETWORK = (
    "peers cells route start_route stop stop_cell url_use conns speed echo stress change_root bulk_test "
    "bulk_item msg_stats list_pools show_pool comm_config config_vars process_info heartbeat"
)
_WITHHELD_EVERYWHERE = (
    ("cellnet.channel", "bulk"),
    ("credential_manager", "key_exchange"),
    *(("_net_manager", topic) for topic in _NETWORK.split()),
)
WITHHELD: Mapping[Role, frozenset[tuple[str, str]]] = {
    role: frozenset((*_WITHHELD_EVERYWHERE, *more))
    for role, more in {
        Role.SITE: (
            ("server_command", "get_task"),
            ("server_command", "submit_update"),
            ("aux_communication", "*"),
            (STREAM, DATA),
            (STREAM, ACK),
            (STREAM, ERROR),
        ),
        Role.SITE_JOB: (("server_command", "get_task"), ("server_command", "submit_update")),
        Role.SERVER: (("download_service__", "download_service__source_failure"),),
        Role.SERVER_JOB: (),
    }.items()
}
"""Topics that the engine offers and a process does not serve; ``*`` stands for a channel's unlisted topics.

With ``SERVED`` these are all topics that a process of the engine registers: any other one means that the
engine was changed.
"""


@dataclass(frozen=True)
class Place:
    """One process's place in the federation.

    Attributes:
        cell: the engine's name for it.
        job: the job that it runs; empty in a parent process.
        site: the site that it belongs to; empty at the server.
    """

    role: Role
    cell: str
    job: str = ""
    site: str = ""

    @classmethod
    def of(cls, cell: str) -> Place | None:
        """Return the place of a cell by its name; None where this package does not know the kind."""
        site, dot, job = cell.partition(".")
        if not _NAME.fullmatch(site) or (dot and not is_job(job)):
            return None
        if site.startswith("_") and not _CONSOLE.fullmatch(cell):
            return None  # only a console's name begins so, and it runs no job
        if site == ROOT:
            return cls(Role.SERVER_JOB if dot else Role.SERVER, cell, job)
        return cls(Role.SITE_JOB if dot else Role.SITE, cell, job, site)


@dataclass(frozen=True)
class Verdict:
    """Result of judging a message.

    Attributes:
        sender: the kind of process that sent it; None if its origin is not credible.
        reason: why it is refused; empty if it passes.
        late: whether it answers no open request, which happens without an attack too.
    """

    sender: Sender | None
    reason: str = ""
    late: bool = False


def is_job(value: object) -> bool:
    """Check whether a value has the form of a job's identifier: a UUID, because it names a folder."""
    return isinstance(value, str) and _UUID.fullmatch(value) is not None


def may_be_called(place: Place, side: Side, name: object) -> bool:
    """Check whether a neighbour may take a name in the handshake, given the connector through which it came.

    On OUTSIDE the engine has checked the name against the certificate; elsewhere it may not have.
    """
    if not isinstance(name, str) or side not in SIDES[place.role]:
        return False
    if side is Side.UP:
        return name == ROOT
    if side is Side.PARENT:
        return name == place.cell.rpartition(".")[0]
    if side is Side.INSIDE:
        parent, dot, job = name.rpartition(".")
        return bool(dot) and parent == place.cell and is_job(job)
    known = Place.of(name)
    return known is not None and known.role in (Role.SITE, Role.SITE_JOB)


def sender_of(place: Place, side: Side, neighbour: str, origin: object) -> Sender | None:
    """Return the kind of process that sent a message; None if its origin cannot come from that connector."""
    if not isinstance(origin, str) or not may_be_called(place, side, neighbour):
        return None
    known = Place.of(origin)
    if known is None:
        return None
    if side is Side.OUTSIDE:
        if origin != neighbour and not origin.startswith(neighbour + "."):
            return None
        return Sender.CONSOLE if _CONSOLE.fullmatch(origin) else Sender(known.role.value)
    if side is Side.INSIDE:
        return Sender(known.role.value) if origin == neighbour else None
    if origin == neighbour:
        return Sender(known.role.value)
    # Forwarded messages. The site's own process has judged them too; the server can claim any origin.
    wanted = (ROOT, f"{ROOT}.{place.job}") if place.site else ()
    if place.role is Role.SITE:
        return Sender.SERVER_JOB if known.role is Role.SERVER_JOB else None
    if origin in wanted:
        return Sender(known.role.value)
    if place.role is Role.SERVER_JOB and known.role is Role.SITE_JOB and known.job == place.job:
        return Sender.SITE_JOB
    return None


def judge(
    place: Place,
    side: Side | None,
    neighbour: str,
    headers: Mapping[str, Any] | None,
    waiting: Callable[[str], Collection[str]],
) -> Verdict:
    """Judge a message before any part of it is decoded.

    Args:
        place: the process that received it.
        side: the connector through which it came; None if that is not one of the process's own.
        neighbour: the name that the neighbour took in the handshake.
        headers: the message's own.
        waiting: a request's identifier -> the cells that are to answer it.
    """
    if side is None or headers is None:
        return Verdict(None, "came by no connector of this process")
    sender = sender_of(place, side, neighbour, headers.get(ORIGIN))
    if sender is None:
        return Verdict(None, f"claims an origin that cannot come from {side.value}")
    if headers.get(ENCRYPTED):
        return Verdict(sender, "is encrypted, which no message of a run is")
    kind, target = headers.get(MSG_TYPE), headers.get(DESTINATION)
    if target == place.cell:
        if kind == "req":
            return Verdict(sender, _request(place.role, sender, neighbour, headers))
        return _answer(sender, kind, headers, waiting)
    return Verdict(sender, _forwarded(place, side, sender, headers))


def _request(role: Role, sender: Sender, neighbour: str, headers: Mapping[str, Any]) -> str:
    key = _pair(headers, CHANNEL, TOPIC)
    if sender not in SERVED[role].get(key, ()):
        return "is not served to this sender"
    if key == BYE and headers[ORIGIN] != neighbour:
        return "says goodbye for another process"
    if key == (STREAM, DATA) and sender not in STREAMS[role].get(
        _pair(headers, _STREAM_CHANNEL, _STREAM_TOPIC), ()
    ):
        return "is a stream that is not accepted from this sender"
    return ""


def _answer(
    sender: Sender, kind: object, headers: Mapping[str, Any], waiting: Callable[[str], Collection[str]]
) -> Verdict:
    if kind not in ("reply", "return"):
        return Verdict(sender, "is neither request nor answer")
    requests = headers.get(REQ_ID)
    names = requests if isinstance(requests, list) else [requests]
    # The server may return, in its own name, a message that it could not forward.
    for name in names:
        targets = waiting(name) if isinstance(name, str) else ()
        if headers[ORIGIN] in targets or (kind == "return" and targets and sender is Sender.SERVER):
            return Verdict(sender)
    return Verdict(sender, "answers no request of this process", late=True)


def _forwarded(place: Place, side: Side, sender: Sender, headers: Mapping[str, Any]) -> str:
    """Judge a message for another process: allowed only between the two halves of one job."""
    origin, target = str(headers[ORIGIN]), headers.get(DESTINATION)
    there, here = Place.of(target) if isinstance(target, str) else None, Place.of(origin)
    if there is None or here is None:
        return "is for an unknown process"
    if place.role is Role.SITE and side is Side.INSIDE:
        # Messages that leave this site's own job; the server judges them.
        return (
            "" if target in (ROOT, f"{ROOT}.{here.job}") else "is for a process other than the job's server"
        )
    halves = {
        Sender.SERVER_JOB: Role.SITE_JOB,
        Sender.SITE_JOB: Role.SERVER_JOB,
        Sender.SERVER: Role.SITE_JOB,
    }
    allowed = halves.get(sender) is there.role and (sender is Sender.SERVER or here.job == there.job)
    if place.role is Role.SITE:
        allowed = allowed and side is Side.UP and there.site == place.site
    elif place.role is Role.SERVER:
        allowed = allowed and sender is not Sender.SERVER
    else:
        allowed = False
    if not allowed:
        return "is for a process that its sender may not address"
    return _request(there.role, sender, origin, headers) if headers.get(MSG_TYPE) == "req" else ""


def _pair(headers: Mapping[str, Any], channel: str, topic: str) -> tuple[str, str]:
    pair = headers.get(channel), headers.get(topic)
    return (str(pair[0]), str(pair[1])) if all(isinstance(item, str) for item in pair) else ("", "")


def judge_command(
    headers: Mapping[str, Any], command: object, values: Mapping[str, Any], deployed: Callable[[str], bool]
) -> str:
    """Judge a command to a site by its decoded payload; return why it is refused, or "" if it may run.

    Args:
        headers: the message's own.
        command: the payload's topic.
        values: the payload's headers.
        deployed: a job -> whether its folder exists already.
    """
    if headers.get(TOPIC) != ADMIN[1]:
        own = str(headers.get(ORIGIN)).rpartition(".")[2]
        known = values.get("job_id") == own and values.get("job_status") in (1, 2, 3, 4)
        return "" if command == STATUS and known else "is not a status of the job that sent it"
    if command not in COMMANDS:
        return "is not a command that a run needs"
    if any(isinstance(value, str) and not value.isprintable() for value in values.values()):
        return "has values that would take more than one line of the site's audit"
    job, meta = values.get("job_id"), values.get("job_meta")
    if command == "scheduler.cancel_resource":
        return ""  # names no job
    if not is_job(job):
        return "does not name its job by a UUID"
    if command in ("train.deploy", "train.start_job") and (
        not isinstance(meta, Mapping) or meta.get("job_id", job) != job
    ):
        return "has metadata of another job"
    if isinstance(meta, Mapping) and any(meta.get(key) for key in LAUNCH_META):
        return "has settings by which the engine starts programs or writes files"
    if command == "train.deploy":
        app = values.get("app_name")
        if not isinstance(app, str) or not _APP.fullmatch(app):
            return "does not name its app by a short name"
        if deployed(str(job)):
            return "deploys a job that is already here, which would delete its folder"
    return ""


def judge_app(role: Role, data: object) -> str:
    """Judge an app before it is unpacked; return why it is refused, or "" if it is configuration alone.

    Args:
        role: of the process that is to deploy it.
        data: the app as received, a ZIP archive.
    """
    if not isinstance(data, bytes):
        return "deploys no app"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError, zlib.error):
        return "deploys no app"
    names = [one.filename for one in entries if one.filename != "config/"]
    if not set(names) <= APP_FILES[role] or len(set(names)) != len(names):
        return "deploys an app with files other than a job's configuration"
    if sum(one.file_size for one in entries) > MAX_APP_BYTES[role]:
        return "deploys an app too large for a job's configuration"
    return ""


def shown(value: object) -> str:
    """Return the part of a word from outside that is safe to log."""
    if not isinstance(value, str):
        return "?"
    cut = value[:80]
    return re.sub(r"[^A-Za-z0-9_.:@~*-]", "?", cut) + ("..." if len(value) > len(cut) else "")


def reference(value: object) -> str:
    """Return a value that is the UUID of another audit line; "" for anything else."""
    return str(value) if is_job(value) else ""


def one_line(text: object) -> str:
    """Return a text without brackets and unprintable characters, so that it is one field of an audit line."""
    return "".join(one if one.isprintable() and one not in "[]" else "?" for one in str(text or ""))
