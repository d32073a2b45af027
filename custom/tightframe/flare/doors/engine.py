"""Enforcement of the rules in a process of the engine. Nothing else in this package changes the engine.

The engine builds the components of a site's or the server's own ``resources.json`` before it creates its
cell, both in its parent process and in each job's process. So the changes made here are in effect before
any message can arrive, and the doors are never open.

1. *Removal.* Commands that a run does not need are removed from the engine's own lists, and callbacks
   registered with a cell afterwards are kept only for the topics named in ``rules.SERVED``: a callback
   for ``*`` is registered for the listed topics of its channel and for no others.
2. *Checks.* Every message arrives at ``CoreCell.process_message`` before it is decoded: for this process or
   another, request or answer. It is judged there; an error while judging refuses it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import tempfile
import threading
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvflare
import psutil
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessageType, ReturnCode, ReturnReason
from nvflare.fuel.f3.cellnet.identity import is_mtls_connection
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.sfm.conn_manager import ConnManager
from nvflare.fuel.f3.streaming.byte_receiver import ByteReceiver
from nvflare.fuel.sec.audit import Auditor
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.utils.app_deployer import AppDeployer

from tightframe.config.site import FILE_NAME, site_entry
from tightframe.errors import SiteConfigError, TightframeError
from tightframe.flare import reach
from tightframe.flare.doors import rules
from tightframe.flare.doors.rules import Place, Role, Side, Topics, Verdict
from tightframe.flare.submitter import verify_app

PARENT = "TIGHTFRAME_DOORS"
"""Environment variable that tells a job's process which parent process has shut its doors."""
MAX_REFUSALS = 2048
"""Most kinds of refusal that are counted separately; all others are counted together."""

log = logging.getLogger("tightframe.doors")


class _Engine:
    """The engine's own functions, as they were before the doors replaced them."""

    process = staticmethod(CoreCell.process_message)
    register = staticmethod(CoreCell.register_request_cb)
    register_stream = staticmethod(ByteReceiver.register_callback)
    handshake = staticmethod(ConnManager.update_endpoint)
    command = staticmethod(FedAdminAgent._dispatch_request)
    deploy = staticmethod(AppDeployer.deploy)
    audit = staticmethod(Auditor.add_event)
    audit_job = staticmethod(Auditor.add_job_event)


class _State:
    """State of this process's doors."""

    shut: str = ""
    """"site" or "server" once the doors are shut."""
    parent = False
    """True if a parent process has shut its own doors."""
    offered: set[tuple[str, str, str, str]]
    """Registrations that the engine asked for: kind of process, message or stream, channel, topic."""


_state = _State()
_state.offered = set()
_refusals: Counter[tuple[str, ...]] = Counter()
_counting = threading.Lock()


class _Doors(FLComponent):
    def __init__(self, kind: str) -> None:
        super().__init__()
        shut(kind)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log that the doors are shut, once the process runs; before, why no server answers."""
        if event_type == EventType.BEFORE_CLIENT_REGISTER:
            workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
            reach.watching(Path(workspace.get_startup_kit_dir()), _connected)
        if event_type in (EventType.SYSTEM_START, EventType.START_RUN):
            served = {channel for channel, _ in _registered()}
            log.info(
                "doors shut: %d channels of the engine are served here (%s); docs/threat-model.md lists the "
                "messages accepted from each sender.",
                len(served),
                ", ".join(sorted(served)),
            )


class SiteDoors(_Doors):
    """Shuts the engine's command channel at a site: a component of its ``local/resources.json``.

    Raises:
        SiteConfigError: TF-732, for an untested version of the engine.
    """

    def __init__(self) -> None:
        super().__init__("site")


class ServerDoors(_Doors):
    """Confines sites and consoles to their own messages: a component of ``local/resources.json``.

    A message whose origin is not the neighbour that the certificate names is neither accepted nor
    forwarded; nothing is forwarded between sites, or from a console to a site.

    Raises:
        SiteConfigError: TF-732, for an untested version of the engine.
    """

    def __init__(self) -> None:
        super().__init__("server")


def shut(kind: str) -> None:
    """Shut the doors of this process, before the engine has created its cell.

    Args:
        kind: "site" or "server".

    Raises:
        SiteConfigError: TF-732, for an untested version of the engine; TF-731, if a cell exists already.
    """
    _check_version()
    if _state.shut == kind:
        return
    if _state.shut or CoreCell.ALL_CELLS:
        raise SiteConfigError(
            "Expected this process to shut its doors first, but the engine has created its cell already: "
            "name the doors in local/resources.json alone, once.",
            code="TF-731",
        )
    above = os.environ.get(PARENT)
    _state.parent = above in {str(one.pid) for one in psutil.Process().parents()}
    os.environ[PARENT] = str(os.getpid())
    CoreCell.process_message = _process
    CoreCell.register_request_cb = _register
    ByteReceiver.register_callback = _register_stream
    ConnManager.update_endpoint = _handshake
    AppDeployer.deploy = _deploy
    Auditor.add_event = _audit
    Auditor.add_job_event = _audit_job
    if kind == "site":
        FedAdminAgent._dispatch_request = _command
        ClientRequestProcessors.request_processors[:] = [
            one
            for one in ClientRequestProcessors.request_processors
            if set(one.get_topics()) <= rules.COMMANDS | {rules.STATUS}
        ]
        AdminCommands.commands[:] = [
            one for one in AdminCommands.commands if one.get_command_name() in rules.JOB_COMMANDS
        ]
    _state.shut = kind


def _check_version() -> None:
    if nvflare.__version__ not in rules.TESTED:
        raise SiteConfigError(
            f"Expected NVFlare {' or '.join(rules.TESTED)}, whose commands are all listed, but got "
            f"{nvflare.__version__}: install the expected version (constraints.txt pins it).",
            code="TF-732",
        )


def require(kind: str) -> None:
    """Refuse to run a production job unless the doors of this process and of its parent are shut.

    Called in a job's process.

    Args:
        kind: "site" or "server".

    Raises:
        SiteConfigError: TF-732, for an untested version of the engine; TF-731, if the doors are not shut.
    """
    _check_version()
    name = "SiteDoors" if kind == "site" else "ServerDoors"
    line = f'{{"id": "doors", "path": "tightframe.flare.doors.{name}", "args": {{}}}}'
    if _state.shut != kind:
        raise SiteConfigError(
            f"Expected the doors of this process to be shut, but local/resources.json does not name them: "
            f"without them anybody with a startup kit can read this machine's files. Add {line} to its "
            '"components", and restart the engine.',
            code="TF-731",
        )
    if not _state.parent:
        raise SiteConfigError(
            "Expected the engine's own process to have its doors shut too, but it was started before "
            f"local/resources.json named them ({line}): restart the engine.",
            code="TF-731",
        )
    served = _registered()
    if not served or not served <= rules.SERVED[Role.SITE_JOB if kind == "site" else Role.SERVER_JOB].keys():
        raise SiteConfigError(
            "Expected only listed topics in the engine's own registry, but got others: something on this "
            "machine changes the engine. Check what local/ and the environment add to it.",
            code="TF-731",
        )


def offered() -> set[tuple[str, str, str, str]]:
    """Return the registrations that the engine asked for: kind of process and of entry, channel, topic."""
    return set(_state.offered)


def _connected() -> bool:
    """Return whether this site's process has a connection to the server."""
    cells = list(CoreCell.ALL_CELLS.values())
    return any(cell.communicator.conn_manager.get_connections(Role.SERVER.value) for cell in cells)


def _registered() -> set[tuple[str, str]]:
    """Return the topics that this process's only cell serves; none if there are more, or it was changed."""
    cells = list(CoreCell.ALL_CELLS.values())
    if len(cells) != 1 or "process_message" in vars(cells[0]) or CoreCell.process_message is not _process:
        return set()
    return {(channel, topic) for channel, _, topic in (key.partition(":") for key in cells[0].req_reg.reg)}


def _place(cell: Any) -> Place:
    """Return a cell's place.

    Raises:
        SiteConfigError: TF-731, for a cell of another kind than the kit's, or behind a relay.
    """
    place = Place.of(cell.my_info.fqcn)
    if place is None or (place.site == "") != (_state.shut == "server"):
        raise SiteConfigError(
            f"Expected a process of a {_state.shut}, but the engine calls it "
            f"{rules.shown(cell.my_info.fqcn)}: relays and other kinds of process are not supported.",
            code="TF-731",
        )
    return place


def _register(cell: Any, channel: str, topic: str, cb: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replace ``CoreCell.register_request_cb``."""
    place = _place(cell)
    for one in _listed(place, "message", rules.SERVED[place.role], channel, topic):
        _Engine.register(cell, channel, one, cb, *args, **kwargs)


def _register_stream(
    receiver: Any, channel: str, topic: str, cb: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Replace ``ByteReceiver.register_callback``."""
    place = _place(receiver.cell)
    for one in _listed(place, "stream", rules.STREAMS[place.role], channel, topic):
        _Engine.register_stream(receiver, channel, one, cb, *args, **kwargs)


def _listed(place: Place, kind: str, topics: Topics, channel: str, topic: str) -> list[str]:
    """Return the listed topics for which a callback is to be registered; possibly none."""
    _state.offered.add((place.role.value, kind, channel, topic))
    return [name for where, name in topics if where == channel and topic in ("*", name)]


def _side(cell: Any, connection: Any) -> Side | None:
    """Return the connector of a cell through which a connection was made; None for any other."""
    handle = getattr(getattr(connection, "connector", None), "handle", None)
    if handle is None:
        return None
    if handle == getattr(cell.bb_ext_connector, "handle", None):
        return Side.UP
    if handle == getattr(cell.bb_int_connector, "handle", None):
        return Side.PARENT
    if handle == getattr(cell.int_listener, "handle", None):
        return Side.INSIDE
    outside = handle in [one.handle for one in list(cell.ext_listeners.values())]
    return Side.OUTSIDE if outside and is_mtls_connection(connection.connector.params) else None


def _handshake(manager: Any, sfm_conn: Any, data: dict[str, Any]) -> None:
    """Replace ``ConnManager.update_endpoint``, to which a neighbour gives its name."""
    cell = manager.receivers.get(CoreCell.APP_ID)
    name = data.get("endpoint_name")
    try:
        side = _side(cell, sfm_conn.conn)
        good = side is not None and rules.may_be_called(_place(cell), side, name)
    except Exception:
        good = False
    if not good:
        _log_refusal("a connection", name, "", "", "takes a name that cannot come by it")
        sfm_conn.conn.close()
        raise CommError(CommError.BAD_DATA, "TF-733: the doors refused a neighbour's name")
    _Engine.handshake(manager, sfm_conn, data)


def _process(cell: Any, endpoint: Any, connection: Any, app_id: int, message: CellMessage) -> None:
    """Replace ``CoreCell.process_message``, where every message arrives."""
    if connection is not None and connection is cell.communicator.conn_manager.null_conn:
        _Engine.process(cell, endpoint, connection, app_id, message)  # a message to itself
        return
    try:
        verdict = rules.judge(
            _place(cell),
            _side(cell, connection),
            endpoint.name,
            message.headers,
            lambda request: getattr(cell.waiters.get(request), "targets", ()),
        )
    except Exception as error:
        verdict = Verdict(None, f"could not be judged ({type(error).__name__})")
    if verdict.reason:
        _refuse(cell, endpoint, message, verdict)
        return
    # The engine would connect to this address by itself.
    message.remove_header(rules.CONN_URL)
    _Engine.process(cell, endpoint, connection, app_id, message)


def _refuse(cell: Any, endpoint: Any, message: CellMessage, verdict: Verdict) -> None:
    """Log a refusal, and answer the sender if its origin is credible; never raise."""
    try:
        headers = message.headers if isinstance(message.headers, dict) else {}
        if verdict.late:
            log.debug("an answer came late")
            return
        origin, target = headers.get(rules.ORIGIN), headers.get(rules.DESTINATION)
        stream = headers.get("sm__ch"), headers.get("sm__tp")
        channel, topic = headers.get(rules.CHANNEL), headers.get(rules.TOPIC)
        if channel == rules.STREAM and isinstance(stream[0], str):
            channel, topic = stream
        requested = f"{rules.shown(channel)}:{rules.shown(topic)}"
        _log_refusal(endpoint.name, origin, requested, target, verdict.reason)
        if verdict.sender is None or headers.get(rules.MSG_TYPE) != MessageType.REQ:
            return
        if not headers.get(MessageHeaderKey.REPLY_EXPECTED):
            return
        reply = make_reply(ReturnCode.INVALID_REQUEST, error="refused")
        reply.add_headers(
            {
                MessageHeaderKey.ORIGINAL_HEADERS: {MessageHeaderKey.DESTINATION: target},
                MessageHeaderKey.FROM_CELL: cell.get_fqcn(),
                MessageHeaderKey.TO_CELL: endpoint.name,
                MessageHeaderKey.ORIGIN: cell.get_fqcn(),
                MessageHeaderKey.DESTINATION: origin,
                MessageHeaderKey.REQ_ID: [headers.get(rules.REQ_ID, "")],
                MessageHeaderKey.MSG_TYPE: MessageType.RETURN,
                MessageHeaderKey.ROUTE: [(cell.get_fqcn(), 0.0)],
                MessageHeaderKey.RETURN_REASON: ReturnReason.INTERCEPT,
            }
        )
        cell._send_reply(reply, endpoint)
    except Exception as error:
        log.error("TF-733: a refusal could not be logged or answered (%s).", type(error).__name__)


def _command(agent: Any, request: CellMessage) -> CellMessage:
    """Replace ``FedAdminAgent._dispatch_request``, which runs a command at a site."""
    command: object = None
    try:
        body, headers = request.payload, request.headers or {}
        if not isinstance(body, Message) or not isinstance(body.headers, dict):
            reason = "is no command"
        else:
            command = body.topic
            root = Path(agent.app_ctx.args.workspace)
            reason = rules.judge_command(
                headers, command, body.headers, lambda job: os.path.lexists(root / job)
            )
            if not reason and command == "train.deploy":
                # The engine unpacks the app to verify it.
                reason = rules.judge_app(Role.SITE, body.body) or _judge_manifest(
                    root, agent.app_ctx.get_client_name(), body.body
                )
    except Exception as error:
        reason = f"could not be judged ({type(error).__name__})"
    if not reason:
        return _Engine.command(agent, request)
    _log_refusal("a command", request.get_header(rules.ORIGIN), f"admin:{rules.shown(command)}", "", reason)
    code = re.search(r"TF-[0-9]+", reason)
    return new_cell_message({}, error_reply(f"refused: {code[0]}" if code else "refused"))


def _judge_manifest(kit: Path, site: str, data: bytes) -> str:
    """Judge an app by its lead's manifest under the site's policy; return why it is refused, or "".

    A kit without the site's file belongs to the engine's account of two; there the training service judges.

    Args:
        kit: folder of the site's kit.
        data: the app, already known to hold only files of ``rules.APP_FILES``.
    """
    if not os.path.lexists(kit / "local" / FILE_NAME):
        return ""
    try:
        entry = site_entry(kit / "local", site, production=True, alone=True)
        assert entry is not None  # noqa: S101 - production has one, or has raised
        with tempfile.TemporaryDirectory(prefix="tightframe-app-") as folder:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                archive.extractall(folder)
            verify_app(Path(folder), site, kit / "startup", entry)
    except TightframeError as error:
        log.warning("%s", error)
        return f"deploys a job that this site does not accept ({error.code})"
    return ""


def _deploy(
    deployer: Any, workspace: Any, job_id: str, job_meta: Any, app_name: str, app_data: Any, fl_ctx: Any
) -> str:
    """Replace ``AppDeployer.deploy``, which unpacks an app at a site and at the server."""
    reason = rules.judge_app(Role.SITE if _state.shut == "site" else Role.SERVER, app_data)
    if not reason:
        error: str = _Engine.deploy(deployer, workspace, job_id, job_meta, app_name, app_data, fl_ctx)
        return error
    _log_refusal("an app", job_id, "deploy", "", reason)
    return f"refused: it {reason}"


def _audit(auditor: Any, user: str, action: str, ref: str = "", msg: str = "") -> str:
    """Replace ``Auditor.add_event``: clean the values of a command's audit line, which come from outside."""
    event: str = _Engine.audit(
        auditor, rules.shown(user), rules.shown(action), rules.reference(ref), rules.one_line(msg)
    )
    return event


def _audit_job(
    auditor: Any,
    job_id: str,
    scope_name: str = "",
    task_name: str = "",
    task_id: str = "",
    ref: str = "",
    msg: str = "",
) -> str:
    """Replace ``Auditor.add_job_event``: clean the values of a job's audit line.

    The job is the process's own; reference, task and task's id are headers of the other side's message.
    """
    event: str = _Engine.audit_job(
        auditor,
        job_id=rules.shown(job_id),
        scope_name=rules.shown(scope_name) if scope_name else "",
        task_name=rules.shown(task_name) if task_name else "",
        task_id=rules.shown(task_id) if task_id else "",
        ref=rules.reference(ref),
        msg=rules.one_line(msg),
    )
    return event


def _log_refusal(by: object, origin: object, topic: str, target: object, reason: str) -> None:
    """Log a refusal if it is the 1st, 2nd, 4th, 8th ... of its kind, so that nobody can fill the log."""
    parts = (*(rules.shown(part) for part in (by, origin, topic, target or "")), reason)
    with _counting:
        if parts not in _refusals and len(_refusals) >= MAX_REFUSALS:
            parts = ("many", "many", "many", "", "too many kinds of refusal to count each")
        _refusals[parts] += 1
        count = _refusals[parts]
    if count & (count - 1) == 0:
        log.warning(
            "TF-733: the doors refused %s of origin %s, by %s%s: it %s (%d so far).",
            parts[2] or "a handshake",
            parts[1],
            parts[0],
            f", for {parts[3]}" if parts[3] else "",
            reason,
            count,
        )
