"""Commands to a hospital's engine by the server, another hospital, a person (r01, r12, r12b).

NVFlare's client asks for a right only where the sender asks it to, and serves whoever its messages are from.
Each attack is tried with the doors open, where it works, and with the doors shut.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import ROOT, forking

pytestmark = pytest.mark.whole
JOB = "0f8fad5b-d9cb-469f-a165-70867728950e"
Case = dict[str, Any]


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """A kit with a key, and a record beside it."""
    for name in ("startup", "local", JOB):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").write_text("a private key")
    (tmp_path / "patients.csv").write_text("Jane Doe,melanoma\n")
    return tmp_path


def heard(hospital: Path, cases: list[Case], *, shut: bool = True) -> dict[str, Any]:
    """Let a hospital's engine hear messages, in a process of its own; what came of it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "custom")])
    values = forking.environment(os.environ | {"PYTHONPATH": path})
    done = subprocess.run(
        [
            forking.executable(values),
            "-m",
            "tests.support.attacks.engine_site",
            str(hospital),
            *([] if shut else ["--open"]),
        ],
        input=json.dumps(cases),
        env=values,
        cwd=hospital,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**told, "log": done.stderr}


def raw(told: dict[str, Any]) -> bytes:
    return b"".join(bytes.fromhex(one["raw"]) for found in told["answers"] for one in found)


def shell(hospital: Path, **changes: Any) -> Case:
    return {"command": "sys.shell", "body": f"cat {hospital}/patients.csv {hospital}/startup/kept", **changes}


SENDERS: dict[str, Case] = {
    "r01: the server": {},
    "the same under the topic that commands have": {"headers": {"cn__topic": "admin"}},
    "r12: another hospital, by its name": {"headers": {"cn__origin": "hospital-2"}},
    "another hospital's job": {"headers": {"cn__origin": f"hospital-2.{JOB}"}},
    "r12b: a person's console": {"headers": {"cn__origin": f"_admin_{JOB}"}},
    "a job of the server": {"headers": {"cn__origin": f"server.{JOB}"}},
    "the server, as the hospital's own job": {"headers": {"cn__origin": f"hospital-1.{JOB}"}},
    "the server, named as the hospital's own job": {
        "neighbour": f"hospital-1.{JOB}",
        "headers": {"cn__origin": f"hospital-1.{JOB}"},
    },
    "another account of the machine, as a job": {
        "neighbour": f"hospital-1.{JOB}",
        "connector": "CH-inside",
        "headers": {"cn__origin": f"hospital-1.{JOB}"},
    },
    "another account of the machine, as the server": {"connector": "CH-inside"},
    "a connection of no connector": {"connector": "CH-other"},
}


def test_nobody_runs_shell_commands_at_a_hospital(hospital: Path) -> None:
    cases = [shell(hospital, **changes) for changes in SENDERS.values()]
    opened = heard(hospital, cases, shut=False)
    for name, (answer,) in zip(SENDERS, opened["answers"], strict=True):
        assert b"melanoma" in bytes.fromhex(answer["raw"]), f"the engine alone answers {name}"
    told = heard(hospital, cases)
    assert b"melanoma" not in raw(told) and b"a private key" not in raw(told)
    for changes in SENDERS.values():
        origin = changes.get("headers", {}).get("cn__origin", "server")
        assert f"of origin {origin}, by" in told["log"]
    assert told["log"].count("TF-733: the doors refused admin:") == len(SENDERS)


@pytest.mark.whole
def test_nothing_is_deleted_stopped_or_told(hospital: Path) -> None:
    """One message for each command and each debugging topic that the engine has."""
    told = heard(hospital, [{"command": "sys.nothing"}], shut=False)
    topics = [key.split(":", 1) for key in told["registry"]]
    assert len(topics) > 20
    cases: list[Case] = [
        {"headers": {"cn__channel": channel, "cn__topic": topic}, "payload": "server"}
        for channel, topic in topics
        if topic not in ("*", "bye", "stop", "stop_cell", "stress", "start_route")
    ]
    commands = ["train.delete_run", "train.shutdown", "train.restart", "train.get_scopes", "sys.report_env"]
    for command in commands:
        for outer in (command, "admin"):
            values = {"job_id": "startup"}
            cases.append({"command": command, "values": values, "headers": {"cn__topic": outer}})
    control = heard(hospital, cases, shut=False)
    assert control["stopped"] and not (hospital / "startup").exists(), "the engine alone does all of it"
    (hospital / "startup").mkdir()
    (hospital / "startup" / "kept").write_text("a private key")
    told = heard(hospital, cases)
    assert not told["stopped"] and (hospital / "startup" / "kept").exists()
    assert told["registry"] == ["admin:admin", "admin:train.notify_job_status", "cellnet.channel:bye"]
    for found in told["answers"]:
        assert all(one["raw"] == "" or b"refused" in bytes.fromhex(one["raw"]) for one in found), found
    assert len(told["answers"]) == len(cases)


def test_a_job_is_deployed_into_a_new_folder_of_its_own_only(hospital: Path) -> None:
    """The engine deletes the folder of that name first: `startup` holds the hospital's key."""
    names: list[Any] = ["startup", "../x", "/", "", None, 7, ["a"], JOB + "/..", JOB.upper(), JOB]
    cases: list[Case] = [
        {
            "command": command,
            "headers": {"cn__topic": "admin"},
            "values": {"job_id": name, "job_meta": {"job_id": name}, "app_name": "app"},
        }
        for command in ("train.deploy", "train.start_job", "train.abort", "scheduler.check_resource")
        for name in names
        if command == "train.deploy" or name != JOB
    ]
    told = heard(hospital, cases)
    for case, (answer,) in zip(cases, told["answers"], strict=True):
        assert b"refused" in bytes.fromhex(answer["raw"]), case
        assert f"TF-733: the doors refused admin:{case['command']} of origin server" in told["log"]
    assert (hospital / "startup" / "kept").exists() and (hospital / JOB / "kept").exists()


BROKEN: dict[str, Case] = {
    "no origin": {"without": ["cn__origin"]},
    "no type": {"without": ["cn__msg_type"]},
    "no destination": {"without": ["cn__destination"]},
    "an origin that is a list": {"headers": {"cn__origin": ["server"]}},
    "an origin that is a number": {"headers": {"cn__origin": 5}},
    "a topic that is a dictionary": {"headers": {"cn__topic": {"a": 1}}},
    "a channel that is nothing": {"headers": {"cn__channel": None}},
    "an unknown type": {"headers": {"cn__msg_type": "event"}},
    "an answer to nothing": {"headers": {"cn__msg_type": "reply"}},
    "an answer whose question is a dictionary": {"headers": {"cn__msg_type": "reply", "cn__req_id": {}}},
    "a bulk of messages": {"headers": {"cn__channel": "cellnet.channel", "cn__topic": "bulk"}},
    "an encrypted one": {"headers": {"cn__secure": True, "cn__encrypted": True, "cn__topic": "admin"}},
    "one for a peer": {"headers": {"cn__destination": "hospital-2"}},
    "one for another site's job": {"headers": {"cn__destination": f"hospital-2.{JOB}"}},
    "a goodbye for another": {
        "headers": {"cn__channel": "cellnet.channel", "cn__topic": "bye", "cn__origin": f"server.{JOB}"}
    },
    "words for the log": {
        "headers": {"cn__origin": "a\n2026 - INFO - all is well\x1b[2J", "cn__topic": "x" * 999}
    },
}


def test_what_is_malformed_is_refused_and_nothing_of_it_gets_into_the_log(hospital: Path) -> None:
    told = heard(hospital, [shell(hospital, **case) for case in BROKEN.values()])
    assert raw(told) == b""
    assert told["log"].count("TF-733") >= len(BROKEN) - 3, (
        "two answers come late, and of three alike two are told"
    )
    assert "all is well\x1b" not in told["log"] and "\n2026 - INFO" not in told["log"]
    assert "x" * 100 not in told["log"] and "melanoma" not in told["log"]


def test_an_address_to_connect_to_is_taken_off_what_passes(hospital: Path) -> None:
    """The engine connects by itself to what a forwarded message says."""
    case: Case = {
        "command": "scheduler.cancel_resource",
        "headers": {"cn__topic": "admin", "cn__conn_url": "tcp://127.0.0.1:9", "cn__from": "elsewhere"},
    }
    assert heard(hospital, [case], shut=False)["connected"] == ["server"]
    assert heard(hospital, [case])["connected"] == []


def test_nothing_but_the_engine_writes_lines_of_the_sites_audit(hospital: Path) -> None:
    """Whose command it was is the server's word, and is written there as it came."""
    forged = "x]\n[E:1][T:2026-11-22 09:00:00][U:chief@hospital-1][A:byoc]"
    cases: list[Case] = [
        {"command": "scheduler.cancel_resource", "headers": {"cn__topic": "admin"}, "values": {name: forged}}
        for name in ("_userName", "_eventId")
    ]
    heard(hospital, cases, shut=False)
    lines = (hospital / "audit.txt").read_text()
    assert lines.count("\n[E:1]") == len(cases), "the engine alone writes what it is given"
    told = heard(hospital, cases)
    assert (hospital / "audit.txt").read_text() == lines
    assert all(b"refused" in bytes.fromhex(answer["raw"]) for (answer,) in told["answers"])


AUDIT = """
import sys
from tightframe.flare.doors import SiteDoors
if sys.argv[2] == "shut":
    SiteDoors()
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from nvflare.fuel.sec.audit import AuditService
forged = "x]\\n[E:5b8e3b4c][J:another job][A:nothing#1"
context = FLContext()
context.set_prop(ReservedKey.RUN_NUM, "0f8fad5b-d9cb-469f-a165-70867728950e", private=True)
context.set_prop(FLContextKey.TASK_NAME, "contribute" + forged, private=True)
context.set_prop(FLContextKey.TASK_ID, forged, private=True)
AuditService.initialize(sys.argv[1])
add_job_audit_event(context, ref=forged, msg="received task from server")
add_job_audit_event(context, ref="7c9e6679-7425-40de-944b-e07fc1f90ae7", msg=forged)
AuditService.add_event("lead@example.org" + forged, "submit_job", forged, "submit_job heart")
"""


def test_a_jobs_audit_has_one_line_an_event_whatever_the_server_writes(tmp_path: Path) -> None:
    """A task's name, its identifier and the reference to the server's own line come with the task."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "custom")])
    for doors in ("open", "shut"):
        line = [sys.executable, "-c", AUDIT, str(tmp_path / doors), doors]
        subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, timeout=60, check=True)
    assert len((tmp_path / "open").read_text().splitlines()) > 3, "the engine alone writes what it is told"
    first, second, third = (tmp_path / "shut").read_text().splitlines()
    assert f"[J:{JOB}]" in first and "[J:another job]" not in first and "[R:" not in first
    assert first.endswith("received task from server")
    assert "[R:7c9e6679-7425-40de-944b-e07fc1f90ae7]" in second and "[J:another job]" not in second
    assert "[U:lead@example.org" in third and third.endswith("[A:submit_job]submit_job heart")
