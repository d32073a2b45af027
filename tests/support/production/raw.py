"""Sends messages of the engine with any headers, from a process that already has a place in the federation.

Its source is run inside a hospital's or the server's process, or imported for a person's console; so it
knows nothing but the engine. What comes back is noted before anything in that process can judge it.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
from nvflare.fuel.f3.cellnet.utils import encode_payload
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.private.admin_defs import Message

if "HEARD" not in vars(CoreCell):
    CoreCell.HEARD = []
    before = CoreCell.process_message

    def heard(cell: Any, endpoint: Any, connection: Any, app_id: int, message: Any) -> None:
        CoreCell.HEARD.append(message)
        before(cell, endpoint, connection, app_id, message)

    CoreCell.process_message = heard


def core() -> Any:
    """The cell of this process; a console's is the last one."""
    return list(CoreCell.ALL_CELLS.values())[-1]


def payload(case: dict[str, Any]) -> Any:
    """A command for a site, or what is given."""
    if "command" not in case:
        return case.get("body", {})
    made = Message(topic=case["command"], body=case.get("body", ""))
    for name, value in case.get("values", {}).items():
        made.set_header(name, value)
    return made


def send(cell: Any, case: dict[str, Any]) -> str:
    """Send one message; the identifier by which its answer is known, or how sending ended."""
    asked, target = str(uuid.uuid4()), case["target"]
    message = CellMessage({}, payload(case))
    encode_payload(message, fobs_ctx=cell.get_fobs_context())
    error, endpoint = cell._find_endpoint(target, None)
    if endpoint is None:
        return f"no way: {error}"
    message.add_headers(
        {
            Key.CHANNEL: case["channel"],
            Key.TOPIC: case["topic"],
            Key.FROM_CELL: cell.get_fqcn(),
            Key.TO_CELL: endpoint.name,
            Key.ORIGIN: cell.get_fqcn(),
            Key.DESTINATION: target,
            Key.MSG_TYPE: case.get("kind", "req"),
            Key.REQ_ID: asked,
            Key.REPLY_EXPECTED: True,
            Key.ROUTE: [(cell.get_fqcn(), time.time())],
        }
    )
    for one in cell.out_req_filter_reg.find(case["channel"], case["topic"]) or ():
        one.cb(message, *one.args, **one.kwargs)  # who may speak shows its token
    origin = case.get("origin") or cell.get_fqcn()
    message.add_headers({Key.ORIGIN: origin, Key.FROM_CELL: origin, Key.ROUTE: [(origin, time.time())]})
    message.add_headers(case.get("headers", {}))
    cell.communicator.send(endpoint, CoreCell.APP_ID, message)
    return asked


def attack(
    cases: list[dict[str, Any]], secrets: list[str], seconds: float, cell: Any = None
) -> dict[str, Any]:
    """Send all, then collect what came back: for each case its answers, and the secrets in anything heard."""
    cell, start = cell or core(), len(CoreCell.HEARD)
    asked = [send(cell, case) for case in cases]
    time.sleep(seconds)
    answers: dict[str, list[str]] = {}
    found: list[str] = []
    for message in CoreCell.HEARD[start:]:
        known, body = message.get_header(Key.REQ_ID), message.payload
        raw = bytes(body) if isinstance(body, bytes | bytearray | memoryview) else str(body or "").encode()
        found += [one for one in secrets if one.encode() in raw or one in str(message.headers)]
        for name in known if isinstance(known, list) else [known]:
            code = message.get_header(Key.RETURN_CODE)
            answers.setdefault(str(name), []).append(f"{code}: {raw!r}"[:2000])
    return {"answers": [answers.get(one, []) for one in asked], "found": found}


def orders(cases: list[dict[str, Any]], secrets: list[str], seconds: float) -> str:
    """The source that makes another process do that."""
    given = json.dumps(json.dumps([cases, secrets, seconds]))
    return f"import json\nanswer = attack(*json.loads({given}))\n"
