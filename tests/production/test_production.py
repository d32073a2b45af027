"""A production federation on this machine: real processes, provisioned identities, mutual TLS over loopback.

One server, three hospitals, one lead and one member; later a hospital that joins, one of another root
and one whose certificate has ended. The tests share them, in the order in which they stand.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from nvflare.fuel.flare_api.api_spec import (
    AuthorizationError,
    InternalError,
    JobNotDone,
    NoConnection,
)
from nvflare.fuel.flare_api.flare_api import new_secure_session
from safetensors.numpy import load_file
from tests.support.flare.boards import Daemon, expected_points, listening, read_events
from tests.support.production.doors import bad_values, by, by_console, cases, contents, empty
from tests.support.production.federation import (
    EXPIRED,
    LEAD,
    MEMBER,
    NEWCOMER,
    PROJECT,
    SERVER,
    SITES,
    START,
    STRANGER,
    Federation,
    expire,
    greet,
    running,
)
from tests.support.production.private import every_file
from tests.support.production.reach import private_values, reachable, told_to_the_lead
from tests.support.production.spy.sitecustomize import noted
from tests.support.production.watching import (
    held,
    kill,
    look_and_leave,
    process_of,
    wait_round,
    watched,
    watching,
)

from tightframe.config import job_manifest
from tightframe.config.job import parse_job
from tightframe.flare.doors import rules
from tightframe.flare.doors.rules import Role, Sender, shown
from tightframe.flare.identity import person_identity
from tightframe.flare.monitoring.consoles import COMMAND, GROUP
from tightframe.results.words import sentence
from tightframe_app.federation.kits import Kit
from tightframe_app.jobs import folders
from tightframe_app.site.page import Looker
from tightframe_app.site.page import content as page_content
from tightframe_app.site.stop import running as running_of

HERE = "-c kits/consortium/prod_00/hospital-1/local/tightframe.json --site hospital-1"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def pin(federation: Federation, name: str) -> str:
    """NAME=PIN, as the site tells it."""
    return federation.run_here("federation", "pins", "--kit", str(federation.kit(name))).strip()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with running(tmp_path_factory.mktemp("federation"), later=True) as made:
        yield made


@pytest.fixture(scope="module")
def export(federation: Federation) -> Callable[..., Path]:
    """Export a job for some sites, small enough for seconds."""

    def run(name: str, sites: tuple[str, ...] = SITES, rounds: int = 2, patience: int = 0) -> Path:
        values = ["dataset_options.image_size=16", "model_options.widths=[8,8,8]", "training.epochs=1"]
        values += ["evaluation.models=2"]  # so that all these jobs stay within `max_evaluations`
        mine = {",".join(SITES): ",".join(sites), r"-o job": f"-o {name}"}
        if patience:
            values += [f"{name}_timeout={patience}" for name in ("site", "fetch")]
        more = f"--rounds {rounds} " + " ".join(f"--set {value}" for value in values)
        federation.follow(federation.operations, "7. Lead", mine, only=slice(1), more=more)
        return federation.folder / name

    return run


@pytest.fixture(scope="module")
def daemon(federation: Federation) -> Iterator[Daemon]:
    """Gets what the server tells StatsD; its operator asks for that, and for TensorBoard events."""
    with listening() as made:
        asked = {"server": {"tensorboard": True, "statsd": {"port": made.port}}}
        (federation.kit(SERVER) / "local" / "tightframe.json").write_text(json.dumps(asked))
        yield made


@pytest.fixture(scope="module")
def done(federation: Federation, export: Callable[..., Path], daemon: Daemon) -> Path:
    """The result of a job that the lead submitted by the engine's own command, as downloaded."""
    config = federation.kit("hospital-1") / "local" / "tightframe.json"
    values = json.loads(config.read_text())
    values["policy"]["allowed_submitters"] = [LEAD]  # whom the job's signature has to name
    config.write_text(json.dumps(values))
    guide, heading = federation.operations, "In single"
    export("job", patience=600)  # it is held and attacked later, which takes minutes where much else runs
    told = federation.follow(guide, heading, only=slice(3))
    assert "Registered clients: 3" in told
    told = federation.follow(guide, heading, only=slice(3, 5))
    (job_id,) = [line.split()[1] for line in told.splitlines() if line.startswith("job_id:")]
    ended = federation.follow(guide, heading, {"JOB_ID": job_id}, only=slice(5, None))
    assert "FINISHED:COMPLETED: over\nTRAINED, 2 of 2 rounds in" in ended, (
        ended + federation.said(SERVER)[-5000:]
    )
    assert re.search("RUNNING: (silos are being|training|the last model|trained)", ended), "seen while it ran"
    return federation.folder / "results" / job_id


def test_a_job_trains_with_provisioned_identities_and_is_verified(federation: Federation, done: Path) -> None:
    outcome = json.loads((done / "workspace" / "outcome.json").read_text())
    assert outcome["trained"] is True and outcome["rounds_done"] == 2
    assert outcome["roster"] == list(SITES) and outcome["dropped"] == []
    assert outcome["synthetic"] is False and outcome["summation"] == "secure"
    assert outcome["evaluation"]["test"]["records"] == 3 * 12
    assert load_file(done / "workspace" / "model.safetensors")
    told = federation.follow(federation.operations, "8. Lead", {"JOB_ID": done.name})
    assert "identities  provisioned" in told and "complete    yes" in told
    for name in SITES:
        assert pin(federation, name).split("=")[1] in told
    mine = {"JOB_ID": done.name, "/var/lib/tightframe": str(federation.state("hospital-1"))}
    told = federation.follow(federation.site_guide, "8. After", mine)
    assert "valid: " in told and "complete    NO" in told
    verify = ["tightframe", "transcript", "verify", str(done / "workspace" / "transcript.jsonl"), "--root"]
    assert "TF-616" in federation.run(*verify, str(federation.folder / "other" / "rootCA.pem"), code=1)


def test_one_command_signs_submits_waits_fetches_and_verifies(federation: Federation, done: Path) -> None:
    told = federation.follow(federation.operations, "7. Lead", only=slice(1, None))
    (job_id,) = [line.split()[1] for line in told.splitlines() if line.startswith("job_id:")]
    assert told.index(f"signed by {LEAD}") < told.index(job_id) < told.index("TRAINED, 2 of 2 rounds in")
    place = federation.folder / "results" / job_id / "workspace"
    assert f"results: {place}" in told and told.index("valid: ") > told.index("results: ")
    assert "identities  provisioned" in told and json.loads((place / "outcome.json").read_text())["trained"]
    submit = ["tightframe", "jobs", "submit", "job", "--kit", str(federation.kit(MEMBER))]
    told = federation.run(*submit, code=2)
    assert f"TF-615: Expected the role in the certificate of {MEMBER} to be" in told


def test_the_hospitals_page_tells_what_left_and_changes_nothing(federation: Federation, done: Path) -> None:
    """The number of sums by the server's transcript, whose signatures are checked elsewhere."""
    kit, state = Kit.open(federation.kit("hospital-1")), federation.state("hospital-1")

    def written() -> dict[str, str]:
        files = contents(kit.startup, kit.local, state)
        return {path: found for path, found in files.items() if not path.endswith(("-shm", "-wal"))}

    before = written()
    known = Looker(kit).look()
    assert written() == before
    lines = [json.loads(line) for line in (done / "workspace" / "transcript.jsonl").read_text().splitlines()]
    opened = [line for line in lines if line["line"] == "sum" and line["groups"]]
    (mine,) = [one for one in known.released if one.job == done.name]
    assert (mine.sums, mine.fewest, mine.groups) == (len(opened), 3, ("changes", "features", "static"))
    assert known.policy is not None and known.policy.allowed_submitters == (LEAD,)
    assert "the engine's client" in known.running[0] and SITES in known.cohorts.values()
    page = str(page_content(known).parts)
    assert done.name in page
    assert "PRIVATE" not in page and known.findings and not known.problems


def test_boards_were_told_and_the_events_came_along(done: Path, daemon: Daemon) -> None:
    rows = [json.loads(line) for line in (done / "workspace" / "metrics.jsonl").read_text().splitlines()]
    found, expected = read_events(done / "workspace" / "tb_events"), expected_points(rows)
    assert found.keys() == expected.keys() and ("tightframe/balanced_accuracy", 2) in expected
    assert found == pytest.approx(expected, rel=1e-6, abs=6e-4)  # seconds are rounded in the file
    of_job = [value for name, _, value, tags in daemon.own() if tags["job_id"] == done.name]
    assert of_job and daemon.gauges()["tightframe_trained", None] == 1
    assert daemon.gauges()["tightframe_run_bytes_up", None] == sum(row["bytes_up"] for row in rows)
    assert not [name for name in SITES if name in "".join(daemon.lines)]


def test_the_model_of_the_run_is_at_every_hospital(federation: Federation, done: Path) -> None:
    final = (done / "workspace" / "model.safetensors").read_bytes()
    for name in SITES:
        model = federation.kit(name) / done.name / "model.safetensors"
        mine, theirs = load_file(model), load_file(done / "workspace" / "model.safetensors")
        assert mine.keys() == theirs.keys() and final
        assert all((mine[key] == theirs[key]).all() for key in mine)


def test_the_server_listens_on_loopback_only(federation: Federation) -> None:
    process = federation.engine_process(SERVER)
    listening = [item.laddr for item in process.net_connections() if item.status == psutil.CONN_LISTEN]
    assert federation.port in [address.port for address in listening]
    assert {address.ip for address in listening} <= LOOPBACK


def test_the_server_lets_in_whom_the_root_certified_and_nobody_else(federation: Federation) -> None:
    root = federation.kit(LEAD) / "startup" / "rootCA.pem"
    assert greet(federation.port, root, federation.kit("hospital-1") / "startup")
    assert greet(federation.port, root, None) == b""
    federation.wait_said(SERVER, "PEER_DID_NOT_RETURN_A_CERTIFICATE")


@dataclass
class Held:
    """A job at its last evaluation, whose last silo is held still.

    Attributes:
        job: its id.
        silo: the process of hospital-3.
        now: what the run tells.
    """

    job: str
    silo: psutil.Process
    now: dict[str, Any]


@pytest.fixture(scope="class")
def live(federation: Federation, done: Path) -> Iterator[Held]:
    """The same job again, through the API, held so that it can be looked at, and attacked, at leisure."""
    with _lead(federation) as session:
        job = session.submit_job(str(federation.signed(federation.folder / "job")))
        silo = process_of(federation, "hospital-3", job)
        try:
            yield Held(job, silo, held(session, job, silo))
        finally:
            if silo.is_running():
                silo.send_signal(signal.SIGCONT)


class TestARunningJob:
    """All on one job, in this order; whatever was tried, it trains to its end."""

    def test_it_is_seen_from_outside(self, federation: Federation, live: Held) -> None:
        job_id, now = live.job, live.now
        with _lead(federation) as session, _session(federation, MEMBER) as member:
            assert (now["state"], now["round"], now["joined"]) == ("summing", 2, list(SITES))
            assert now["evaluated_round"] in (0, 1) and 0 <= now["balanced_accuracy"] <= 1
            server = session.show_stats(job_id, "server")["server"]
            assert server[GROUP] == now and "ServerRunner" in server
            assert member.show_stats(job_id, "server")["server"][GROUP] == now
            with pytest.raises(AuthorizationError, match=f"'{MEMBER}' is not authorized for 'app_command'"):
                member.do_app_command(job_id, COMMAND, None)
        told = federation.run("nvflare", "job", "stats", job_id, "--site", "server", "--format", "json")
        (stats, _) = json.JSONDecoder().raw_decode(told[told.index("{") :])
        assert stats["data"]["stats"]["server"][GROUP] == now
        monitor = ["nvflare", "job", "monitor", job_id, "--interval", "1", "--timeout", "3"]
        told = federation.run(*monitor, "--metric", "balanced_accuracy", code=3)
        assert f"round=2 loss={now['loss']} balanced_accuracy={now['balanced_accuracy']}" in told
        look_and_leave(federation, MEMBER, job_id, now)

    def test_the_lead_neither_changes_its_log_nor_removes_it(
        self, federation: Federation, live: Held
    ) -> None:
        with _lead(federation) as session:
            with pytest.raises(InternalError, match="hospital-1: refused"):
                session.configure_job_log(live.job, "DEBUG", "hospital-1")
            session.set_timeout(3.0)
            with pytest.raises(NoConnection):
                session.configure_job_log(live.job, "DEBUG", "server")
            with pytest.raises(JobNotDone):
                session.delete_job(live.job)
            assert session.get_job_status(live.job) == "RUNNING"
        federation.wait_said(SERVER, "refused server_command:configure_job_log")

    def test_the_engine_registers_what_is_documented_and_nothing_else(
        self, federation: Federation, live: Held
    ) -> None:
        """A change of the engine is noticed here; the README of `flare/doors` has the same rows."""
        source = "from tightframe.flare.doors.engine import offered\nanswer = sorted(map(list, offered()))\n"
        ask = source + "from nvflare.fuel.f3.cellnet.core_cell import CoreCell\n"
        ask += "(cell,) = CoreCell.ALL_CELLS.values()\nanswer = [answer, sorted(cell.req_reg.reg)]\n"
        places = {
            Role.SITE: federation.engine_process("hospital-1"),
            Role.SITE_JOB: process_of(federation, "hospital-1", live.job),
            Role.SERVER: federation.engine_process(SERVER),
            Role.SERVER_JOB: process_of(federation, SERVER, live.job),
        }
        for role, process in places.items():
            offered, kept = federation.ordered(process.pid, ask)
            messages = {(channel, topic) for _, kind, channel, topic in offered if kind == "message"}
            streams = {(channel, topic) for _, kind, channel, topic in offered if kind == "stream"}
            known = rules.SERVED[role].keys() | rules.WITHHELD[role]
            assert {key for key in messages | streams if key[1] != "*"} <= known, role
            assert {channel for channel, _ in messages} <= {channel for channel, _ in known}, role
            idle = {key for key in known if key not in messages and (key[0], "*") not in messages}
            assert {channel for channel, _ in idle} <= {"download_service__"}, role  # once it is needed
            assert {tuple(key.split(":")) for key in kept} == set(rules.SERVED[role]) - idle, role

    def test_no_raw_message_gets_anything_of_a_hospital_or_stops_it(
        self, federation: Federation, done: Path, live: Held
    ) -> None:
        """By the server's owner, a hospital, a member and the lead, on every topic, under every name.

        The old way to ask, by the lead's own commands, is in the tests of what server and lead can reach.
        """
        first = federation.kit("hospital-1")
        record = federation.folder / "patients.csv"
        record.write_text("patient,diagnosis\nJane Doe,melanoma\n")
        read = (
            f"cat {record} {first}/startup/client.key {first}/local/tightframe.json; touch {first}/was-here"
        )
        secrets = ["melanoma", "PRIVATE KEY", str(first), str(federation.state("hospital-1"))]
        before = contents(first / "startup", first / "local", first / done.name)
        with _lead(federation) as session, _session(federation, MEMBER) as member:
            job, silo = live.job, live.silo
            site, half = "hospital-1", f"hospital-1.{job}"
            names = [
                "server",
                f"server.{job}",
                site,
                half,
                "hospital-2",
                f"hospital-2.{job}",
                "",
                "x\ny\x1b[2J",
            ]
            # Who owns the server may deploy, start and abort; nothing else, and of no other job's folder.
            own = cases(site, names[:1], read, rights=(Sender.SERVER,)) + bad_values(site, done.name)
            own += cases(site, [name for name in names[1:] if name], read)
            own += cases(half, names[:2], read, rights=(Sender.SERVER, Sender.SERVER_JOB))
            own += cases(half, [name for name in names[2:] if name], read)
            answers = by(federation, federation.engine_process(SERVER).pid, own, secrets)
            assert sum(map(len, answers)) > 50 and empty(answers)
            # A hospital and a person may say nothing to a site, whatever they call themselves.
            theirs = [case for target in (site, half) for case in cases(target, names, read)]
            abort = {
                "command": "train.abort",
                "values": {"job_id": job},
                "topic": "admin",
                "channel": "admin",
            }
            theirs += [{**abort, "target": site, "origin": name} for name in names]
            ours = cases("server", ("server", site, f"server.{job}"), read)
            ours += cases("server", ("",), read, rights=(Sender.SITE, Sender.SITE_JOB, Sender.CONSOLE))
            ours += cases(f"server.{job}", ("server", half, f"server.{job}"), read)
            # A quarter each, at once; all for each kind of sender: `tests/flare/test_doors.py`.
            others = theirs + ours
            order = np.random.default_rng(4).permutation(len(others))
            quarters = [[others[index] for index in order[place::4]] for place in range(4)]
            processes = federation.engine_process("hospital-2"), process_of(federation, "hospital-2", job)
            with ThreadPoolExecutor() as pool:
                asked = [
                    pool.submit(by, federation, process.pid, some, secrets)
                    for process, some in zip(processes, quarters[:2], strict=True)
                ]
                for one, some in zip((session, member), quarters[2:], strict=True):
                    console = one.api.cell.core_cell
                    console.in_filter_reg.reg.clear()  # a person's own client refuses nothing
                    asked.append(pool.submit(by_console, console, some, secrets))
            assert all(empty(one.result()) for one in asked)
            held(session, job, silo)
            silo.send_signal(signal.SIGCONT)
            assert _ended(session, job)["status"] == "FINISHED:COMPLETED"
        assert contents(first / "startup", first / "local", first / done.name) == before
        assert not (first / "was-here").exists() and not list(first.glob("*.fl"))
        for name in (SERVER, *SITES):
            assert federation.processes[name].poll() is None
            assert federation.said(SERVER).count(f"New client {name}@") == (name != SERVER)
        told = federation.said("hospital-1")
        for case in own:
            if case["target"] == site:
                assert _refusal(case) in told, _refusal(case)
        assert _refusal({**theirs[0], "origin": "server"}) in federation.said(SERVER)
        assert "\x1b" not in told and "melanoma" not in told

    def test_its_end_is_told_to_everybody_as_far_as_they_may_know(
        self, federation: Federation, live: Held
    ) -> None:
        assert "TRAINED, 2 of 2 rounds" in watched(federation, LEAD, live.job, code=0)
        told = watched(federation, MEMBER, live.job, code=3)
        assert "whether it trained is not known here\n  the engine says FINISHED:COMPLETED" in told
        assert f"{MEMBER} may not download it" in told
        unknown = "00000000-0000-4000-8000-000000000000"
        watch = ["tightframe", "watch", unknown]  # with the kit that the guide has put in use
        assert (
            f"error: TF-813: Expected a job of this federation, but the server does not know {unknown}"
            in (federation.run(*watch, code=2))
        )


def _refusal(case: dict[str, Any]) -> str:
    """The line about it in the log of who refused it."""
    channel, topic = case["channel"], case["topic"]
    if "sm__ch" in case.get("headers", {}):
        channel, topic = case["headers"]["sm__ch"], case["headers"]["sm__tp"]
    elif topic == "admin" and case.get("origin", "server") == "server" and "headers" not in case:
        topic = case["command"]
    return (
        f"TF-733: the doors refused {channel}:{topic} of origin {shown(case.get('origin') or 'server')}, by"
    )


def test_a_site_of_another_root_is_refused(federation: Federation) -> None:
    """By the server, and by its own packaging if it knows the root's fingerprint."""
    root = federation.kit(LEAD) / "startup" / "rootCA.pem"
    kit = federation.folder / "kits-other" / PROJECT / "prod_01" / STRANGER
    assert greet(federation.port, root, kit / "startup") == b""
    federation.wait_said(SERVER, "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate")
    package = ["nvflare", "package", f"{STRANGER}.signed.zip", "--request-dir", STRANGER]
    told = federation.run(*package, "-w", "wrong", "--fingerprint", federation.fingerprint, code=4)
    assert "ROOTCA_FINGERPRINT_MISMATCH" in told


def test_a_site_that_says_to_be_another_is_refused(federation: Federation) -> None:
    """By its certificate, which is good; the other one stays connected."""
    federation.start_as(NEWCOMER, "hospital-2")
    reason = f"authenticated as '{NEWCOMER}' but claimed endpoint 'hospital-2'"
    federation.wait_said(SERVER, reason, START)
    assert federation.said(SERVER).count("New client hospital-2@") == 1


def test_an_expired_certificate_is_refused_and_named_at_the_site(federation: Federation) -> None:
    root, kit = federation.kit(LEAD) / "startup" / "rootCA.pem", federation.kit(EXPIRED)
    expire(kit / "startup" / "client.crt", federation.folder / "ca" / "rootCA.key")
    assert greet(federation.port, root, kit / "startup") == b""
    federation.wait_said(SERVER, "CERTIFICATE_VERIFY_FAILED: certificate has expired")
    told = federation.run("tightframe", "federation", "add-site", EXPIRED, "--kit", str(kit), code=2)
    assert "TF-615" in told and "2021-01-01" in told
    assert list((kit / "local").glob("*.json")) == []


def test_a_member_may_not_submit(federation: Federation, done: Path) -> None:
    submit = ["nvflare", "job", "submit", "-j", "job", "--startup-kit", str(federation.kit(MEMBER))]
    told = federation.run(*submit, code=2)
    assert f"user '{MEMBER}' is not authorized for 'submit_job'" in told


def test_the_engine_s_own_job_commands_and_studies(federation: Federation, done: Path) -> None:
    """What docs/operations.md says of them; and a signature is good for one submission."""
    with _lead(federation) as session:
        clone = session.clone_job(done.name)
        _ended(session, clone)
        outcome = Path(session.download_job_result(clone)) / "workspace" / "outcome.json"
        reason = json.loads(outcome.read_text())["reason"]
        assert f"{sentence(SITES)} refused: TF-637" in reason, "its signature was used before"
        listed = {one["job_id"]: one for one in session.list_jobs()}
        assert {done.name, clone} <= listed.keys()
        assert {one["study"] for one in listed.values()} == {"default"}
        assert session.wait_for_job(done.name, 10)["status"] == "FINISHED:COMPLETED"
        with pytest.raises(AuthorizationError, match="not authorized for 'get_job_log'"):
            session.get_job_logs(clone)
        session.delete_job(clone)
        assert clone not in {one["job_id"] for one in session.list_jobs()}
        assert session.list_studies()["studies"] == []
        with pytest.raises(AuthorizationError, match="register_study"):
            session.register_study("trial", ["hospital-1"])
    refused = [
        line for line in federation.said(SERVER).splitlines() if f"run={clone}" in line and "TF-637" in line
    ]
    assert f"{sentence(SITES)} refused: TF-637" in refused[0]
    with pytest.raises(Exception, match="study 'trial' is not configured on the server"):
        new_secure_session(LEAD, str(federation.kit(LEAD)), study="trial")


def test_a_job_with_code_is_not_deployed(federation: Federation, done: Path) -> None:
    job = federation.folder / "code"
    shutil.copytree(federation.folder / "job", job)
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "mine.py").write_text("value = 1\n")
    with _lead(federation) as session:
        # The engine writes why after it has written that the job is over.
        meta = _ended(session, session.submit_job(str(job)), told="job_deploy_detail")
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    refused = "server: refused: it deploys an app with files other than a job's configuration"
    assert meta["job_deploy_detail"] == [refused]
    told = watched(federation, LEAD, meta["job_id"], code=1)
    assert "NOT STARTED" in told and refused in " ".join(told.split())


def test_a_hospital_joins_later_and_an_unpinned_newcomer_is_refused(
    federation: Federation, export: Callable[..., Path], done: Path
) -> None:
    """Nothing of the other kits changes; but who keeps pins sums only with whom it has pinned."""
    first = federation.kit("hospital-1")
    config = first / "local" / "tightframe.json"
    values = json.loads(config.read_text())
    values["policy"]["pinned_only"] = True
    config.write_text(json.dumps(values))
    peers = {rf"{name}=[0-9a-f]{{64}}": pin(federation, name) for name in ("hospital-2", "hospital-3")}
    told = federation.follow(federation.site_guide, "6. Exchange", peers)
    assert "kept: hospital-3, 1 pin" in told and "`pinned_only` is off" not in told
    mine = {"hospital-1": NEWCOMER}
    assert "no problem was found" in federation.follow(federation.site_guide, "5. Look", mine)
    check = ["tightframe", "site", "check", "--production", "--no-records", "-c"]
    check += [str(federation.kit(NEWCOMER) / "local" / "tightframe.json")]
    told = federation.run(*check, "--job", "job", code=1)
    assert f"the job is for {', '.join(SITES)}, not for {NEWCOMER}" in " ".join(told.split())
    federation.start(NEWCOMER)
    larger = (*SITES, NEWCOMER)
    for name in SITES:  # their counts were opened for three
        mine = {r"(?<=prod_00/)hospital-1|(?<=--site )hospital-1": name}
        leak = federation.follow(federation.site_guide, "A hospital joins", mine, only=slice(1), more="--yes")
        assert f"the counts of {NEWCOMER} together" in leak
    federation.wait_joined(NEWCOMER)
    job = federation.signed(export("larger", larger))
    with _lead(federation) as session:
        job_id = session.submit_job(str(job))
        meta = _ended(session, job_id)
        result = Path(session.download_job_result(job_id))
    assert meta["status"] == "FINISHED:EXECUTION_EXCEPTION"
    outcome = json.loads((result / "workspace" / "outcome.json").read_text())
    assert outcome["trained"] is False and outcome["rounds_done"] == 0
    assert "hospital-1 refused: TF-602 (an identity is not proved)" in outcome["reason"]
    told = watched(federation, LEAD, job_id, code=1)
    assert "STOPPED" in told and "hospital-1 refused: TF-602 (an identity is not proved)" in told
    reason = f"Expected the key of {NEWCOMER} to be pinned at this site, but found no pin"
    assert reason in (first / job_id / "log.txt").read_text()
    assert federation.kit_hashes() == federation.packaged and len(federation.packaged) > 6 * 4


def test_a_site_that_the_job_is_not_for_deploys_nothing_and_says_so(
    federation: Federation, done: Path
) -> None:
    """A job for three hospitals that is sent to four. It ends soon: their counts are open for four now."""
    job = federation.folder / "beside"
    shutil.copytree(federation.folder / "job", job)
    meta = json.loads((job / "meta.json").read_text())
    for places in meta["deploy_map"].values():
        places.extend([NEWCOMER] if "hospital-1" in places else [])
    (job / "meta.json").write_text(json.dumps(meta))
    # `jobs sign` refuses what was changed by hand.
    lead, _ = person_identity(federation.kit(LEAD) / "startup")
    values = parse_job(folders.read_job(job))
    job_manifest.sign(job / "app", values, lead, now=datetime.now(UTC))
    with _lead(federation) as session:
        job_id = session.submit_job(str(job))
        _ended(session, job_id)
        result = Path(session.download_job_result(job_id))
    outcome = json.loads((result / "workspace" / "outcome.json").read_text())
    assert outcome["roster"] == list(SITES) and NEWCOMER not in outcome["reason"]
    assert f"{sentence(SITES)} refused: TF-612" in outcome["reason"]
    assert not (federation.kit(NEWCOMER) / job_id).exists(), "no process of the job was started there"
    log = (federation.kit(NEWCOMER) / "log.txt").read_text()
    assert "TF-635: Expected the sites to be" in log and f"with {NEWCOMER}, but got" in log


def test_nothing_of_a_hospital_can_be_reached_by_server_or_lead(
    federation: Federation, done: Path, tmp_path: Path
) -> None:
    """Vectors, secrets, keys, counts, records, their places: after jobs that trained and one that failed."""
    search = private_values(federation)
    first = federation.kit("hospital-1")
    reason = "to be pinned at this site"  # of the failed job, for the hospital's own log
    search.text("reason", reason)
    with _lead(federation) as session:
        known = {one["job_id"] for one in session.list_jobs()}
        jobs = [path.name for path in first.glob("*-*") if path.is_dir() and path.name in known]
        assert done.name in jobs and len(jobs) == 5
        for job in jobs:
            told, refused = told_to_the_lead(session, job)
            assert search.within("\n".join(told).encode()) == set(), told
            shell = {"get_working_directory", "ls_target", "tail_target_log", "cat_target"}
            assert {"get_job_logs", *shell} <= refused, told
            assert job in told[0] and not {"get_job_meta", "list_jobs"} & refused, told
    files = reachable(federation)
    found, searched = search.files(files)
    assert found == {} and searched > 40
    for part in (done, federation.state(SERVER) / "jobs"):
        assert any(path.is_relative_to(part) for path in files), part
    # And the search does find them, where they belong.
    at_home, _ = search.files(every_file(first, federation.state("hospital-1")))
    kinds = {name.removeprefix("hospital-1: ") for name in at_home}
    assert {"key", "place", "salt", "counts", "reason"} <= kinds
    planted = tmp_path / "planted"
    updates = [item for item in noted(federation.spied("hospital-1")) if item[0].startswith("tensor update")]
    what, value = max(updates, key=lambda item: len(item[1]))
    planted.write_bytes(b"log " + value[200:300].hex().encode())
    assert search.files([planted])[0] == {f"hospital-1: {what}": {str(planted)}}


def test_a_site_is_stopped_by_its_own_command_and_comes_back(federation: Federation) -> None:
    name = "hospital-3"
    told = federation.follow(federation.site_guide, "7. Start", {"hospital-1": name}, only=slice(1, None))
    assert "the engine's client" in told and "stopped: no process of this kit is left" in told
    assert federation.processes[name].wait(timeout=10) == -signal.SIGTERM
    assert all(federation.processes[other].poll() is None for other in (SERVER, "hospital-1", "hospital-2"))
    federation.start(name)
    until = time.monotonic() + START
    while federation.said(SERVER).count(f"New client {name}@") < 2:
        assert time.monotonic() < until, federation.said(name)[-2000:]
        time.sleep(0.5)


PATIENCE = 15
"""Seconds that a silo has for a task, and to fetch it, in the job that loses one."""


def test_a_hospital_that_is_lost_in_the_third_round_is_told_of_the_same_everywhere(
    federation: Federation, export: Callable[..., Path]
) -> None:
    """All its processes are killed. The others train on; watch, page, outcome and silos tell one story."""
    first = str(federation.kit("hospital-1"))
    federation.run_here("federation", "pins", "--kit", first, "--add", pin(federation, NEWCOMER))
    four = (*SITES, NEWCOMER)
    job = federation.signed(export("losing", four, rounds=4, patience=PATIENCE))
    with _lead(federation) as session:
        job_id = session.submit_job(str(job))
        with watching(federation, LEAD, job_id) as lines:
            wait_round(federation, job_id, 2)
            kill(federation, NEWCOMER)
            meta = _ended(session, job_id)
        result = Path(session.download_job_result(job_id)) / "workspace"
    assert meta["status"] == "FINISHED:COMPLETED"

    outcome = json.loads((result / "outcome.json").read_text())
    assert (outcome["status"], outcome["trained"], outcome["measured"]) == (
        "trained, not measured",
        True,
        False,
    )
    assert outcome["rounds_done"] == 4 and outcome["reason"] is None and outcome["evaluation"] is None
    lost = outcome["lost"]
    assert list(lost) == [NEWCOMER] and (lost[NEWCOMER]["kind"], lost[NEWCOMER]["round"]) == ("train", 3)
    who, rounds, final, classes = outcome["notes"]
    assert classes.startswith("no class sum of")
    assert who.startswith(f"{NEWCOMER} is missing since round 3 (20") and who.endswith("TF-502 (late).")
    assert rounds.startswith("No loss and no metric from round 3 on: counts are opened for all 4 enrolled")
    assert final.startswith("The final model was not measured for the same reason;")

    assert lines.code == 0
    assert [text for text in outcome["notes"] if text not in lines.closing] == [], lines.closing
    assert lines.closing.startswith("TRAINED, NOT MEASURED, 4 of 4 rounds in")
    assert lines.since("missing since round 3", of="round 4 of 4"), "while it ran"
    assert max(lines.gaps()) <= 40, "never silent for long"
    assert lines.seconds("the last model is evaluated", "FINISHED:COMPLETED") < 60

    page = (result / "report.html").read_text()
    assert 'class="said warn"><p><b>Trained, not measured.</b>' in page and "ended as planned" not in page
    assert all(html.escape(text) in page for text in outcome["notes"])
    assert "3 of 4" in page and "silos there at the end" in page
    log = (result / "log.txt").read_text()
    assert "TRAINED, NOT MEASURED: " in log and all(text in log for text in outcome["notes"])
    told = federation.run_here("report", str(result))
    assert "TRAINED, NOT MEASURED\n" in told and all(text in told for text in outcome["notes"])
    for name in SITES:
        own = federation.kit(name) / job_id
        report = json.loads((own / "local_report.json").read_text())
        assert report["lost"] == lost and report["notes"][0] == f"The server says: {who}"
        until = time.monotonic() + 60
        while not (own / "report.html").exists():  # it comes last, perhaps after the job's end
            assert time.monotonic() < until, federation.said(name)[-3000:]
            time.sleep(0.1)
        assert "So the final model is not measured over all silos" in (own / "report.html").read_text()


def _session(federation: Federation, name: str) -> Any:
    return contextlib.closing(new_secure_session(name, str(federation.kit(name))))


def _lead(federation: Federation) -> Any:
    return _session(federation, LEAD)


def _ended(session: Any, job_id: str, *, told: str = "status") -> dict[str, Any]:
    """A job's metadata once it is over and has a value of that name."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        meta: dict[str, Any] = session.get_job_meta(job_id)
        if str(meta["status"]).startswith("FINISHED") and told in meta:
            return meta
        time.sleep(0.5)
    raise AssertionError(f"{job_id} is not over: {meta}")


def test_a_renewed_key_has_a_pin_beside_the_old_one(federation: Federation, done: Path) -> None:
    """As the guide says; the peer here is hospital-2, and the state folder stays."""
    old = pin(federation, "hospital-1").split("=")[1]
    guide, heading = federation.site_guide, "Renew"
    federation.follow(guide, heading, only=slice(1))
    shutil.copy(federation.folder / "hospital-1-2029" / "hospital-1.request.zip", federation.folder)
    federation.follow(federation.operations, "One at a time")
    new = federation.follow(guide, heading, only=slice(1, 4)).strip().splitlines()[-1].split("=")[1]
    assert new != old
    keys = {"NEW_PIN": new, "OLD_PIN": old}
    pins = ["federation", "pins", "--kit", str(federation.kit("hospital-2"))]
    federation.run_here(*pins, "--add", f"hospital-1={old}")
    told = federation.follow(guide, heading, keys, only=slice(4, 5))
    assert f"kept: hospital-1, 2 pins: {old}, {new}" in told
    assert f"kept: hospital-1, 1 pin: {new}" in federation.follow(guide, heading, keys, only=slice(5, None))
    kit = (
        federation.folder / "kits-2029" / federation.kit("hospital-1").relative_to(federation.folder / "kits")
    )
    check = ["tightframe", "site", "check", "--production", "--no-records", "-c"]
    assert "no problem was found" in federation.run(*check, str(kit / "local" / "tightframe.json"))


def test_a_hospital_leaves(federation: Federation, done: Path) -> None:
    """A running one is not taken apart; afterwards nothing starts it, and its ledger and key are there."""
    mine, kit = {"hospital-1": NEWCOMER}, federation.kit(NEWCOMER)
    process = federation.processes.get(NEWCOMER)
    if process is None or process.poll() is not None:
        federation.start(NEWCOMER)
    until = time.monotonic() + 60
    while not running_of(kit):
        assert time.monotonic() < until, federation.said(NEWCOMER)
        time.sleep(0.2)
    leave = ["tightframe", "site", "leave", str(kit), "--yes"]
    before = contents(kit / "startup", kit / "local")
    assert "TF-756" in federation.run(*leave, code=2)
    assert contents(kit / "startup", kit / "local") == before
    federation.run("tightframe", "site", "stop", "--kit", str(kit), "--yes")
    key, state = (kit / "startup" / "client.key").read_bytes(), contents(federation.state(NEWCOMER))
    told = federation.follow(
        federation.site_guide, "A hospital joins", mine, only=slice(1, None), more="--yes"
    )
    told = " ".join(told.split())
    assert f"{NEWCOMER} has left on this machine" in told and "`tightframe site cohort accept`" in told
    assert {path.name for path in (kit / "startup").iterdir()} == {"client.key", "client.crt", "rootCA.pem"}
    assert (kit / "startup" / "client.key").read_bytes() == key
    # SQLite leaves two files where a ledger was read, and the note of who runs the kit has gone.
    after = contents(federation.state(NEWCOMER))
    told = {path for path in state if path.endswith(f"/started-{NEWCOMER}.json")}
    after, state = (
        {path: item for path, item in found.items() if not path.endswith(("-wal", "-shm"))}
        for found in (after, state)
    )
    assert after == {path: item for path, item in state.items() if path not in told}
    federation.run("tightframe", "site", "start", str(kit), code=2)


def test_a_job_and_its_result_are_removed_from_the_server(federation: Federation, done: Path) -> None:
    kept = federation.state(SERVER) / "jobs" / done.name
    assert kept.is_dir()
    federation.follow(federation.operations, "How long", {"JOB_ID": done.name}, more="--force")
    assert not kept.exists()


def test_every_command_of_the_guides_was_run(federation: Federation, done: Path) -> None:
    """Installation apart, which this environment has behind it, what needs root, and a person's decisions."""
    install = "python3 -m venv .venv && .venv/bin/pip install -q -c {0}constraints.txt {1}"
    activate = ". .venv/bin/activate"
    assert federation.operations.not_run == {install.format("", "."), activate}
    assert federation.site_guide.not_run == {
        install.format("source/", "./source"),
        activate,
        "sudo install -d -m 0700 -o tightframe /var/lib/tightframe",
        f"tightframe site release accept {HERE} --job JOB",  # tests/app/site/test_commands.py
        # tests/app/site/test_models.py
        f"tightframe site model accept {HERE.partition(' --site')[0]} --file FILE --source MAKER",
        f"tightframe ledger begin {HERE}",  # tests/attacks/test_lost_memory.py
    }
