"""The doors: who is believed to be whom, what passes, and what refuses to run without them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvflare
import pytest
from nvflare.private.defs import ControlCommandTopic, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from tests.support import ROOT

from tightframe.flare.doors import rules
from tightframe.flare.doors.rules import Place, Role, Sender, Side, judge

J, K = "0f8fad5b-d9cb-469f-a165-70867728950e", "7c9e6679-7425-40de-944b-e07fc1f90ae7"
CONSOLE = f"_admin_{K}"
NAMES = (
    *(
        "server",
        f"server.{J}",
        f"server.{K}",
        "hospital-1",
        f"hospital-1.{J}",
        f"hospital-1.{K}",
        "hospital-2",
    ),
    *(
        f"hospital-2.{J}",
        CONSOLE,
        "server.x",
        "hospital-1.x",
        f"hospital-1.{J}.x",
        "",
        "a b",
        f"{CONSOLE}.{J}",
    ),
)
BELIEVED: dict[str, dict[tuple[Side, str, str], Sender]] = {
    "hospital-1": {
        (Side.UP, "server", "server"): Sender.SERVER,
        (Side.UP, "server", f"server.{J}"): Sender.SERVER_JOB,
        (Side.UP, "server", f"server.{K}"): Sender.SERVER_JOB,
        (Side.INSIDE, f"hospital-1.{J}", f"hospital-1.{J}"): Sender.SITE_JOB,
        (Side.INSIDE, f"hospital-1.{K}", f"hospital-1.{K}"): Sender.SITE_JOB,
    },
    f"hospital-1.{J}": {
        (Side.UP, "server", "server"): Sender.SERVER,
        (Side.UP, "server", f"server.{J}"): Sender.SERVER_JOB,
        (Side.PARENT, "hospital-1", "hospital-1"): Sender.SITE,
        (Side.PARENT, "hospital-1", "server"): Sender.SERVER,
        (Side.PARENT, "hospital-1", f"server.{J}"): Sender.SERVER_JOB,
    },
    "server": {
        (Side.OUTSIDE, "hospital-1", "hospital-1"): Sender.SITE,
        (Side.OUTSIDE, "hospital-1", f"hospital-1.{J}"): Sender.SITE_JOB,
        (Side.OUTSIDE, "hospital-1", f"hospital-1.{K}"): Sender.SITE_JOB,
        (Side.OUTSIDE, "hospital-2", "hospital-2"): Sender.SITE,
        (Side.OUTSIDE, "hospital-2", f"hospital-2.{J}"): Sender.SITE_JOB,
        (Side.OUTSIDE, f"hospital-1.{J}", f"hospital-1.{J}"): Sender.SITE_JOB,
        (Side.OUTSIDE, f"hospital-1.{K}", f"hospital-1.{K}"): Sender.SITE_JOB,
        (Side.OUTSIDE, f"hospital-2.{J}", f"hospital-2.{J}"): Sender.SITE_JOB,
        (Side.OUTSIDE, CONSOLE, CONSOLE): Sender.CONSOLE,
        (Side.INSIDE, f"server.{J}", f"server.{J}"): Sender.SERVER_JOB,
        (Side.INSIDE, f"server.{K}", f"server.{K}"): Sender.SERVER_JOB,
    },
    f"server.{J}": {
        (Side.PARENT, "server", "server"): Sender.SERVER,
        (Side.PARENT, "server", f"hospital-1.{J}"): Sender.SITE_JOB,
        (Side.PARENT, "server", f"hospital-2.{J}"): Sender.SITE_JOB,
    },
}
"""Cell -> connector, neighbour and origin -> whom it takes that for; nobody is believed otherwise."""


def place(cell: str) -> Place:
    made = Place.of(cell)
    assert made is not None
    return made


@pytest.mark.parametrize("cell", BELIEVED)
def test_an_origin_is_believed_where_it_can_come_from_and_nowhere_else(cell: str) -> None:
    found = {
        (side, neighbour, origin): sender
        for side, neighbour, origin in itertools.product(Side, NAMES, NAMES)
        if (sender := rules.sender_of(place(cell), side, neighbour, origin)) is not None
    }
    assert found == BELIEVED[cell]


def _command(command: str, **values: Any) -> str:
    """Return the reason to refuse a command of the server's; empty if there is none."""
    given = {"job_id": J, "job_meta": {"job_id": J}, "app_name": "app", **values}
    return rules.judge_command(
        {rules.TOPIC: "admin", rules.ORIGIN: "server"}, command, given, lambda _: False
    )


def test_a_site_carries_out_the_commands_of_a_run_and_no_other_that_the_engine_names() -> None:
    """Log levels, environment, resources, job numbers and shell included."""
    names = {
        value
        for kind in (TrainingTopic, SysCommandTopic, ControlCommandTopic)
        for key, value in vars(kind).items()
        if key.isupper()
    }
    assert {"train.configure_job_log", "sys.configure_site_log", "resource_manager.report_resources"} <= names
    assert {name for name in names if not _command(name)} == rules.COMMANDS


@pytest.mark.parametrize(
    "more",
    [
        {"launcher_spec": {"hospital-1": {"docker": {"image": "evil", "volumes": ["/:/host"]}}}},
        {"launcher_spec": {"default": {"process": {"env": {"LD_PRELOAD": "/var/x.so"}}}}},
        {"stats_pool_config": {"request": {"save_config": {"*": "*"}}}},
    ],
    ids=["an image", "variables", "files of statistics"],
)
def test_a_jobs_metadata_chooses_nothing_of_its_process(more: dict[str, Any]) -> None:
    for command in ("train.deploy", "train.start_job"):
        meta = {"job_id": J, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}, "study": "default"}
        assert _command(command, job_meta=meta) == ""
        assert "starts programs or writes files" in _command(command, job_meta={**meta, **more})


def test_a_clone_or_a_study_gives_a_job_no_other_folder() -> None:
    """A job's folder is named by its identifier alone, and an app by a short name."""
    for name in ("..", ".", "a/b", "../x", "a\\b", "", "x" * 65, f"{J}/../startup"):
        assert _command("train.deploy", app_name=name) != "", name
        assert _command("train.deploy", job_id=name, job_meta={"job_id": name}) != "", name
    assert _command("train.deploy", job_meta={"job_id": K}) != ""


def _passed(cell: str, side: Side, neighbour: str, **headers: Any) -> bool:
    values = {rules.MSG_TYPE: "req", rules.DESTINATION: cell, rules.CHANNEL: "", rules.TOPIC: "", **headers}
    return not judge(place(cell), side, neighbour, values, lambda _: ()).reason


@pytest.mark.parametrize("cell", BELIEVED)
def test_nothing_passes_that_is_not_listed(cell: str) -> None:
    """Every topic of every process, from everybody who is believed, as a message and as a stream."""
    role = place(cell).role
    topics = {key for one in Role for key in (*rules.SERVED[one], *rules.WITHHELD[one], *rules.STREAMS[one])}
    for (side, neighbour, origin), sender in BELIEVED[cell].items():
        for channel, topic in topics:
            named = {rules.ORIGIN: origin, rules.CHANNEL: channel, rules.TOPIC: topic}
            listed = sender in rules.SERVED[role].get((channel, topic), ())
            if (channel, topic) == rules.BYE:
                listed = listed and origin == neighbour
            if (channel, topic) == (rules.STREAM, rules.DATA):
                listed = False  # without a channel and topic inside
            assert _passed(cell, side, neighbour, **named) is listed, (side, origin, channel, topic)
            inside = {rules.ORIGIN: origin, rules.CHANNEL: rules.STREAM, rules.TOPIC: rules.DATA}
            inside |= {"sm__ch": channel, "sm__tp": topic}
            listed = sender in rules.STREAMS[role].get((channel, topic), ())
            assert _passed(cell, side, neighbour, **inside) is listed, (
                "stream",
                side,
                origin,
                channel,
                topic,
            )
    for side, neighbour, origin in itertools.product(Side, NAMES, NAMES):
        if (side, neighbour, origin) not in BELIEVED[cell]:
            for channel, topic in topics:
                named = {rules.ORIGIN: origin, rules.CHANNEL: channel, rules.TOPIC: topic}
                assert not _passed(cell, side, neighbour, **named)


def test_the_server_forwards_between_the_two_halves_of_a_job_and_nothing_else() -> None:
    task = {rules.CHANNEL: "server_command", rules.TOPIC: "get_task"}
    end = {rules.CHANNEL: "aux_communication", rules.TOPIC: "__end_run__"}
    passed = set()
    for (side, neighbour, origin), _ in BELIEVED["server"].items():
        for target in set(NAMES) - {"server"}:
            for topic in (task, end, {rules.CHANNEL: "admin", rules.TOPIC: "admin"}):
                if _passed(
                    "server", side, neighbour, **topic, **{rules.ORIGIN: origin, rules.DESTINATION: target}
                ):
                    passed.add((neighbour, origin, target, topic[rules.TOPIC]))
    assert passed == {
        ("hospital-1", f"hospital-1.{J}", f"server.{J}", "get_task"),
        ("hospital-1", f"hospital-1.{K}", f"server.{K}", "get_task"),
        (f"hospital-1.{J}", f"hospital-1.{J}", f"server.{J}", "get_task"),
        (f"hospital-1.{K}", f"hospital-1.{K}", f"server.{K}", "get_task"),
        ("hospital-2", f"hospital-2.{J}", f"server.{J}", "get_task"),
        (f"hospital-2.{J}", f"hospital-2.{J}", f"server.{J}", "get_task"),
        (f"server.{J}", f"server.{J}", f"hospital-1.{J}", "__end_run__"),
        (f"server.{J}", f"server.{J}", f"hospital-2.{J}", "__end_run__"),
        (f"server.{K}", f"server.{K}", f"hospital-1.{K}", "__end_run__"),
    }


def test_an_answer_passes_if_it_is_awaited_from_there() -> None:
    def answered(origin: str, asked: Any, kind: str = "reply") -> bool:
        headers = {rules.ORIGIN: origin, rules.MSG_TYPE: kind, rules.REQ_ID: asked}
        headers[rules.DESTINATION] = f"hospital-1.{J}"
        waiting = {"1": [f"server.{J}"]}
        cell = place(f"hospital-1.{J}")
        return not judge(cell, Side.UP, "server", headers, lambda name: waiting.get(name, ())).reason

    assert answered(f"server.{J}", "1") and answered(f"server.{J}", ["1"])
    assert (
        not answered("server", "1") and not answered(f"server.{J}", "2") and not answered("hospital-2", "1")
    )
    assert answered("server", ["1"], "return") and not answered("server", ["2"], "return")
    assert not answered(f"server.{J}", None) and not answered(f"server.{J}", [{}])


PROGRAM = """
import json, os, sys, nvflare
from tightframe.errors import SiteConfigError
from tightframe.flare import doors
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.net_agent import NetAgent
def told(call):
    try:
        call()
    except SiteConfigError as error:
        return str(error)
    return "fine"
def run(version, what, made, cell, parent):
    nvflare.__version__, os.environ["TIGHTFRAME_DOORS"] = version, parent
    if what != "none":
        yield told(doors.SiteDoors if what == "site" else doors.ServerDoors)
    if cell:
        yield told(lambda: NetAgent(Cell(cell, "grpc://localhost:1", False, {}, parent_url="tcp://localhost:2")))
    yield told(lambda: doors.require(made))
for number, case in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        print(json.dumps([number, list(run(*case))]), flush=True)
        os._exit(0)
    os.wait()
"""


def _ran(folder: Path, *cases: tuple[str, str, str, str, int]) -> list[list[str]]:
    """What processes say that have imported the doors: (version, doors, asked, cell, parent) each.

    A cell searches its working folder, and all below, for its configuration: here an empty one.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(*case[:4], str(case[4])) for case in cases])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    said = dict(json.loads(line) for line in done.stdout.splitlines())
    return [said[number] for number in range(len(cases))]


@pytest.mark.whole
def test_production_refuses_to_run_with_open_doors_or_another_engine(tmp_path: Path) -> None:
    version, here = nvflare.__version__, os.getpid()
    site, server, opened, other, above, none, relay, foreign, new, unasked = _ran(
        tmp_path,
        (version, "site", "site", f"hospital-1.{J}", here),
        (version, "server", "server", f"server.{J}", here),
        (version, "none", "site", "", here),
        (version, "site", "server", "", here),
        (version, "site", "site", f"hospital-1.{J}", 999999999),
        (version, "site", "site", "", here),
        (version, "site", "site", "relay.hospital-1", here),
        (version, "site", "site", f"server.{J}", here),
        ("2.9.1", "site", "site", "", here),
        ("2.9.1", "none", "site", "", here),
    )
    assert site == server == ["fine", "fine", "fine"]
    (open_doors,) = opened
    assert (
        open_doors.startswith("TF-731") and "SiteDoors" in open_doors and "local/resources.json" in open_doors
    )
    assert "ServerDoors" in other[-1]
    assert above[-1].startswith("TF-731") and "restart the engine" in above[-1]
    assert none[-1].startswith("TF-731"), "no cell at all"
    assert relay[1].startswith("TF-731"), "beyond a relay"
    assert foreign[1].startswith("TF-731"), "a server's cell"
    for told in (new[0], unasked[0]):
        assert told.startswith("TF-732") and "2.9.1" in told


def test_the_installed_engine_is_one_that_was_tested() -> None:
    assert nvflare.__version__ in rules.TESTED


def test_the_documents_list_is_the_engines_and_ours() -> None:
    """Of the commands that the installed engine has, and of the topics that we take."""
    table = (ROOT / "custom" / "tightframe" / "flare" / "doors" / "README.md").read_text()
    words = set(re.findall(r"`([^`]+)`", table))
    for topics in rules.SERVED.values():
        for channel, topic in topics:
            assert {channel, topic} <= words, (channel, topic)
    assert {channel for topics in rules.WITHHELD.values() for channel, _ in topics} <= words
    assert "all else is taken from nobody" in " ".join(table.split())
    commands = {topic for one in ClientRequestProcessors.request_processors for topic in one.get_topics()}
    assert rules.COMMANDS | {rules.STATUS} <= commands
    assert {name for name in commands if not name.startswith("info.")} <= words
    assert {name for name in words if re.match(r"(sys|train|scheduler|resource_manager)\.", name)} <= commands
    assert {one.get_command_name() for one in AdminCommands.commands} <= words | rules.JOB_COMMANDS
