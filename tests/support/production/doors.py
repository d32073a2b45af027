"""Raw messages for every topic of the engine, by everybody who has a place in the federation."""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from tests.support.production import raw
from tests.support.production.federation import Federation

from tightframe.flare.doors import rules
from tightframe.flare.doors.rules import Place, Role, Sender

COMMANDS = sorted(topic for one in ClientRequestProcessors.request_processors for topic in one.get_topics())
"""All that the engine's client does for whoever asks it: nothing is taken out in this process."""
Case = dict[str, Any]
WAIT = 6
"""Seconds for what comes back."""


def cases(target: str, origins: Iterable[str], body: str, *, rights: Iterable[Sender] = ()) -> list[Case]:
    """Every topic that the engine serves in a process, under every origin, as a message and as a stream.

    Args:
        target: the process.
        origins: whom the sender says to be; empty for its own name.
        body: what the shell is to run.
        rights: as what the sender may indeed speak to it; that is left out.
    """
    place = Place.of(target)
    assert place is not None
    role = place.role
    made: list[dict[str, Any]] = []
    topics = {*rules.SERVED[role], *rules.WITHHELD[role], ("client_command", "show_stats"), ("mine", "mine")}
    for origin in origins:
        for channel, topic in sorted(topics):
            if set(rules.SERVED[role].get((channel, topic), ())) & set(rights) or channel == "admin":
                continue
            made.append({"target": target, "channel": channel, "topic": topic, "origin": origin})
            made.append({**made[-1], "channel": rules.STREAM, "topic": rules.DATA})
            made[-1]["headers"] = stream(channel, topic)
        if role is not Role.SITE:
            continue
        for command in COMMANDS:
            if command in rules.COMMANDS and Sender.SERVER in rights:
                continue
            values = {"job_id": "startup", "job_meta": {"job_id": "startup"}, "app_name": "app"}
            case = {"target": target, "channel": "admin", "command": command, "values": values, "body": body}
            made += [
                {**case, "topic": command, "origin": origin},
                {**case, "topic": "admin", "origin": origin},
            ]
    return made


def stream(channel: str, topic: str) -> dict[str, Any]:
    """Headers of a stream of one frame."""
    return {
        "sm__id": uuid.uuid4().int % 2**60,
        "sm__ch": channel,
        "sm__tp": topic,
        "sm__sq": 0,
        "sm__dt": 2,
        "sm__ri": str(uuid.uuid4()),
        "sm__pe": "fobs",
        "cn__reply_expected": False,
    }


def bad_values(target: str, job: str) -> list[Case]:
    """Commands of the server that a run needs, about something else than a job that it may touch."""
    made = []
    for name in (
        "startup",
        "local",
        "../startup",
        "/",
        ".",
        "",
        None,
        7,
        ["startup"],
        job + "/..",
        job.upper(),
    ):
        for command in sorted(rules.COMMANDS - {"scheduler.cancel_resource"}):
            values = {"job_id": name, "job_meta": {"job_id": name}, "app_name": "app"}
            made.append({"command": command, "values": values})
    meta = {"job_id": job}
    made.append({"command": "train.deploy", "values": {"job_id": job, "job_meta": meta, "app_name": "app"}})
    new = str(uuid.uuid4())
    for name in ("../startup", "a/b", "", None):
        values = {"job_id": new, "job_meta": {"job_id": new}, "app_name": name}
        made.append({"command": "train.deploy", "values": values})
    made.append({"command": "train.start_job", "values": {"job_id": job, "job_meta": {"job_id": new}}})
    status = {"command": rules.STATUS, "values": {"job_id": job, "job_status": 3}}
    made += [status, {"command": "sys.shell", "headers": {"cn__secure": True, "cn__encrypted": True}}]
    return [{"target": target, "channel": "admin", "topic": "admin", "body": "", **one} for one in made]


def by(federation: Federation, pid: int, asked: list[Case], secrets: list[str]) -> list[list[str]]:
    """Have a process send them; what came back, in which there is no secret."""
    source = inspect.getsource(raw) + raw.orders(asked, secrets, WAIT)
    told = federation.ordered(pid, source, timeout=120)
    assert told["found"] == []
    answers: list[list[str]] = told["answers"]
    return answers


def by_console(console: Any, asked: list[Case], secrets: list[str]) -> list[list[str]]:
    """The same of a person's console in this process."""
    told = raw.attack(asked, secrets, WAIT, cell=console)
    assert told["found"] == []
    answers: list[list[str]] = told["answers"]
    return answers


def empty(answers: list[list[str]]) -> bool:
    """Whether all that came back says that it was refused, and nothing else."""
    refused = [answer for found in answers for answer in found]
    wrong = [one for one in refused if not one.startswith("invalid_request: b''") and "refused" not in one]
    assert not wrong, wrong
    return True


def contents(*folders: Path) -> dict[str, str]:
    """File -> SHA-256."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
