"""A hospital's engine as far as it hears: its real cell, commands and debugging topics; no network, no job.

Run as a program: reads the messages to hear as JSON, and writes what was answered and what is left. With
``--open`` the doors stay open, as in a kit that does not name them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.fl_context import FLContextManager
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
from nvflare.fuel.f3.cellnet.net_agent import NetAgent
from nvflare.fuel.f3.cellnet.utils import encode_payload
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.sec.audit import AuditService
from nvflare.private.admin_defs import Message
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.utils.fed_utils import fobs_initialize

from tightframe.flare.doors import SiteDoors

UP, INSIDE = "CH-up", "CH-inside"


class Engine(ClientEngine):
    """The engine's own, with a workspace and no client of its own."""

    def __init__(self, workspace: Path) -> None:
        self.args = SimpleNamespace(workspace=str(workspace))
        self.fl_ctx_mgr = FLContextManager(self, "hospital-1", "", public_stickers={}, private_stickers={})
        self.client = SimpleNamespace(client_name="hospital-1")
        self.stopped = False

    def shutdown(self) -> str:
        self.stopped = True
        return "stopped"

    def restart(self) -> str:
        return self.shutdown()


def listening(workspace: Path) -> tuple[Any, Engine]:
    """A hospital's cell with all that the engine registers at a site."""
    AuditService.initialize(str(workspace / "audit.txt"))
    fobs_initialize()
    cell = Cell("hospital-1", "grpc://localhost:1", False, {}, auth_identity="hospital-1")
    core = cell.core_cell
    core.bb_ext_connector, core.int_listener = SimpleNamespace(handle=UP), SimpleNamespace(handle=INSIDE)
    NetAgent(cell)
    engine = Engine(workspace)
    agent = FedAdminAgent("admin_agent", cell, engine)
    for processor in ClientRequestProcessors.request_processors:
        agent.register_processor(processor)
    return core, engine


def hear(core: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Feed one message as it comes off a connection; what would be sent back."""
    answers: list[dict[str, Any]] = []

    def sent(to: Any, app: int, message: Any) -> None:
        body = message.payload or b""
        raw = b"".join(map(bytes, body)) if isinstance(body, list) else bytes(body)
        answers.append({"code": message.get_header(Key.RETURN_CODE), "raw": raw.hex()})

    core.communicator.send = sent
    body: Any = case.get("payload", {})
    if "command" in case:
        body = Message(case["command"], bytes.fromhex(case["zip"]) if "zip" in case else case.get("body", ""))
        body.headers.update(case.get("values", {}))
    message = CellMessage({}, body)
    encode_payload(message, fobs_ctx=core.get_fobs_context())
    message.add_headers(
        {
            Key.CHANNEL: "admin",
            Key.TOPIC: case.get("command", ""),
            Key.ORIGIN: "server",
            Key.DESTINATION: "hospital-1",
            Key.MSG_TYPE: "req",
            Key.REQ_ID: "1",
            Key.REPLY_EXPECTED: True,
        }
    )
    message.add_headers(case.get("headers", {}))
    for name in case.get("without", ()):
        message.remove_header(name)
    connector = SimpleNamespace(handle=case.get("connector", UP), params={})
    connection = SimpleNamespace(connector=connector, get_conn_properties=dict)
    core.process_message(Endpoint(case.get("neighbour", "server")), connection, CoreCell.APP_ID, message)
    return answers


def main(workspace: Path, shut: bool) -> None:
    if shut:
        SiteDoors()
    core, engine = listening(workspace)
    answers = [hear(core, case) for case in json.loads(sys.stdin.read())]
    registry = sorted(core.req_reg.reg)
    told = {"answers": answers, "stopped": engine.stopped, "registry": registry}
    print("\n" + json.dumps({**told, "connected": list(core.adhoc_connectors)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--open" not in sys.argv)
