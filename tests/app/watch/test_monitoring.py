"""``tightframe watch`` as it is typed: sessions of the FLARE API, startup kits, messages and exit codes."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.hci.client import file_transfer
from nvflare.tool.kit import kit_config
from tests.support import ROOT
from tests.support.live_pages import Visitor
from tests.support.securesum import transcripts
from tests.support.watched_jobs import JOB, OUTCOME, trained_so_far
from typer.testing import CliRunner

from tightframe.securesum.messages import GROUPS
from tightframe_app import cli
from tightframe_app.jobs import commands as jobs
from tightframe_app.live import server
from tightframe_app.watch import monitoring, terminal, web
from tightframe_app.watch.status import WatchError

COMPLETED = "FINISHED:COMPLETED"
HEARD = 1795331543.25
"""When the server heard of its sites, by its clock."""


def flat(text: str) -> str:
    return " ".join(text.split())


class Session:
    """The FLARE API's session, with values recorded from a production run."""

    def __init__(
        self, *metas: dict[str, Any], stats: Any = None, result: Any = None, heard: Any = None
    ) -> None:
        self.metas, self.stats, self.result = list(metas), stats, result
        self.heard = {f"hospital-{number}": HEARD for number in (1, 2, 3)} if heard is None else heard
        self.api = self
        self.closed = 0
        self.submitted, self.transcript = JOB, b""
        self.others: dict[str, str] = {}  # files in its result -> what is in them

    def submit_job(self, folder: str) -> str:
        return self.submitted

    def get_job_meta(self, job_id: str) -> dict[str, Any]:
        print("Connecting to FLARE ...")  # as the engine does
        meta = self.metas.pop(0) if len(self.metas) > 1 else self.metas[0]
        if isinstance(meta, BaseException):
            raise meta
        return {"name": "fedmr_isic", "job_id": job_id, **meta}

    def show_stats(self, job_id: str, target_type: str) -> Any:
        assert target_type == "server"
        if isinstance(self.stats, BaseException):
            raise self.stats
        return self.stats

    def get_system_info(self) -> api_spec.SystemInfo:
        sites = [api_spec.ClientInfo(name, last) for name, last in self.heard.items()]
        return api_spec.SystemInfo(api_spec.ServerInfo("started", 0), sites, [])

    @property
    def download_dir(self) -> str:
        return str(Path("kits/consortium/prod_00/lead@example.org/transfer").resolve())

    def download_job_result(self, job_id: str) -> str:
        if isinstance(self.result, BaseException):
            raise self.result
        folder = Path(self.download_dir) / job_id
        (folder / "workspace").mkdir(parents=True)
        if self.result is not None:
            (folder / "workspace" / "outcome.json").write_text(json.dumps(self.result))
        for name, text in self.others.items():
            (folder / name).write_text(text)
        if self.transcript:
            (folder / "workspace" / "transcript.jsonl").write_bytes(self.transcript)
        return str(folder)

    def close(self) -> None:
        self.closed += 1


def make_kit(folder: Path, kind: str = "fed_admin.json") -> Path:
    """As much of a startup kit as the engine's own command looks at."""
    (folder / "startup").mkdir(parents=True)
    (folder / "startup" / kind).write_text(json.dumps({"admin": {"username": folder.name}}))
    for name in ("client.crt", "rootCA.pem"):
        (folder / "startup" / name).write_text("")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine's command keeps what it knows of kits; nothing yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(kit_config.NVFLARE_STARTUP_KIT_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Connect = Callable[..., Session]


@pytest.fixture
def connect(home: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Let the sessions of a watch be these, one after the other."""
    make_kit(home / "kits/consortium/prod_00/lead@example.org")

    def use(*sessions: Any) -> Session:
        left = list(sessions)

        def new(user: str, kit: str, **options: Any) -> Session:
            assert user == "lead@example.org" and kit.endswith("prod_00/lead@example.org")
            session = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(session, BaseException):
                raise session
            return session

        monkeypatch.setattr(monitoring, "new_secure_session", new)
        return sessions[-1]

    return use


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = terminal.follow

    def pass_by(seconds: float) -> None:
        assert seconds >= 0.5

    monkeypatch.setattr(
        terminal, "follow", lambda *given, **named: follow(*given, **{"sleep": pass_by} | named)
    )


def call(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["watch", *arguments])


STATS = {"server": {"tightframe": trained_so_far().as_json(), "ServerRunner": {"job_id": JOB}}}
GOING, OVER = {"status": "RUNNING"}, {"status": COMPLETED}


def test_as_it_is_typed_without_a_terminal_a_line_for_each_change(connect: Connect) -> None:
    waiting = {
        "status": "SUBMITTED",
        "schedule_history": ["1: scheduled", "2: connected sites (2) are too few"],
    }
    session = connect(Session(waiting, waiting, GOING, GOING, OVER, stats=STATS, result=OUTCOME))
    done = call(JOB.upper())
    assert done.exit_code == 0, done.output
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines()[:-3]]
    assert [line.partition(";")[0] for line in lines] == [
        f"{JOB}: asking the server",
        "SUBMITTED: waiting to be sent to its sites",
        "RUNNING: training",
        "FINISHED:COMPLETED: over",
    ]
    assert lines[1].endswith("; 2: connected sites (2) are too few")
    assert "answered 1 of 3; not yet: hospital-2, hospital-3; late hospital-2" in lines[2], "all are heard of"
    assert done.stdout.splitlines()[-3:] == [
        "TRAINED, 4 of 4 rounds in 53 s",
        "  balanced accuracy on the test records: 0.412",
        f"  its result: tightframe jobs fetch {JOB}",
    ]
    assert "Connecting" not in done.output and session.closed == 1


def test_with_web_the_page_is_there_while_it_watches_and_gone_with_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(Session(GOING, GOING, OVER, stats=STATS, result=OUTCOME))
    plain = call(JOB)
    visitors: list[Visitor] = []
    pages: list[str] = []
    show = web.WatchPage.show

    def looked_at(page: web.WatchPage, view: terminal.View) -> None:
        show(page, view)
        if not visitors:
            visitors.append(Visitor(page.live))
            visitors[0].opened()
        pages.append(visitors[0].ask(visitors[0].path).body)

    monkeypatch.setattr(web.WatchPage, "show", looked_at)
    monkeypatch.setattr(server, "LEAVE", 0.1)
    connect(Session(GOING, GOING, OVER, stats=STATS, result=OUTCOME))
    done = call(JOB, "--web")
    untimed = [re.sub(r"^\d\d:\d\d:\d\d ", "", one.stdout, flags=re.MULTILINE) for one in (plain, done)]
    assert done.exit_code == 0 and untimed[0] == untimed[1]
    link, hint, opened = done.stderr.splitlines()
    assert link == f"page: {visitors[0].live.link}" and hint.endswith("THIS_MACHINE")
    assert opened == "page: the page was opened; its link is used up"
    assert "asking the server" in pages[0] and "hospital-2" in pages[1]
    with pytest.raises(ConnectionRefusedError):
        visitors[0].ask("/")


def test_a_port_needs_a_page_and_an_address_cannot_be_asked_for(connect: Connect) -> None:
    connect(Session(OVER, result=OUTCOME))
    assert "expected --web with it" in flat(call(JOB, "--port", "8765").output)
    for wrong in (["--port", "80"], ["--address", "0.0.0.0"], ["--host", "0.0.0.0"]):  # noqa: S104
        assert call(JOB, "--web", *wrong).exit_code == 2


def test_a_silo_that_nothing_is_heard_of_is_told_with_the_time(connect: Connect) -> None:
    """hospital-1 has answered already, so nobody waits for it."""
    last = HEARD - 47
    heard = {"hospital-1": HEARD - 500, "hospital-2": last, "hospital-9": HEARD}
    connect(Session(GOING, OVER, stats=STATS, result=OUTCOME, heard=heard))
    at = time.strftime("%H:%M:%S", time.localtime(last))
    wanted = f"; silent hospital-2, nothing heard since {at}; hospital-3, not connected: stopped"
    assert wanted in call(JOB).stdout
    heard = {"hospital-1": None, "hospital-2": None, "hospital-3": None}
    connect(Session(GOING, OVER, stats=STATS, result=OUTCOME, heard=heard))
    assert "silent" not in call(JOB).stdout


def test_a_job_that_waits_for_a_site_names_it(connect: Connect) -> None:
    """One that is not registered, and one that the server still has but does not hear."""
    waiting = {
        "status": "SUBMITTED",
        "min_clients": 3,
        "deploy_map": {"app": ["server", "hospital-1", "hospital-2", "hospital-3"]},
        "schedule_history": ["1: not enough sites have enough resources (ok sites 2 < min sites 3)"],
    }
    wanted = "; hospital-3 is not connected; the job waits until 3 of its 3 sites are; 1: not enough"
    for heard in (HEARD - 500, None):
        sites = {"hospital-1": HEARD, "hospital-2": HEARD} | ({} if heard is None else {"hospital-3": heard})
        connect(Session(waiting, OVER, result=OUTCOME, heard=sites))
        assert wanted in call(JOB).stdout
        connect(Session({**waiting, "min_clients": 2}, OVER, result=OUTCOME, heard=sites))
        assert "not connected" not in call(JOB).stdout, "the job does not wait for it"


@pytest.mark.parametrize(
    "stats",
    [
        api_spec.NoReply("no result"),
        api_spec.JobNotFound("no such job"),
        api_spec.JobNotRunning("not running"),
        {},
        {"server": {}},
        {"server": "?"},
    ],
)
def test_a_run_that_tells_nothing_yet_is_starting(connect: Connect, stats: Any) -> None:
    connect(Session(GOING, OVER, stats=stats, result=OUTCOME))
    done = call(JOB)
    assert done.exit_code == 0 and "RUNNING: starting\n" in done.stdout


@pytest.mark.parametrize(
    ("meta", "result", "code", "expected"),
    [
        (OVER, {**OUTCOME, "trained": False, "reason": "TF-501: too few"}, 1, "reason: TF-501: too few"),
        (OVER, api_spec.AuthorizationError("no"), 3, "lead@example.org may not download it"),
        (OVER, None, 3, "there is no outcome.json in its result"),
        (
            OVER,
            {"trained": "maybe"},
            3,
            "its outcome cannot be read: Expected outcome.json as",
        ),
        ({"status": "FINISHED:ABORTED"}, None, 1, "ABORTED"),
        (
            {"status": "FINISHED:CAN_NOT_SCHEDULE", "schedule_history": ["1: later", "2: too few sites"]},
            AssertionError("asked for a result that cannot be there"),
            1,
            "the engine did not find the sites that it needs\n  2: too few sites\n",
        ),
        (
            {
                "status": "FINISHED:FAILED_TO_RUN",
                "job_deploy_detail": ["a: OK", "server: BYOC not permitted"],
            },
            AssertionError("asked for a result that cannot be there"),
            1,
            "NOT STARTED\n  FINISHED:FAILED_TO_RUN: it could not be sent to its sites, or not be started "
            "there\n  server: BYOC not permitted\n",
        ),
    ],
)
def test_ends_and_exit_codes(
    connect: Connect, meta: dict[str, Any], result: Any, code: int, expected: str
) -> None:
    connect(Session(meta, result=result))
    done = call(JOB)
    assert done.exit_code == code and expected in done.stdout, done.output


@pytest.mark.parametrize(
    ("session", "code", "expected"),
    [
        (Session(api_spec.JobNotFound("no such job")), "TF-813", f"does not know {JOB}"),
        (Session(api_spec.AuthorizationError("no view")), "TF-814", "lead@example.org to have the right"),
        (
            api_spec.AuthenticationError("certificate\x1b[2J unknown"),
            "TF-812",
            "it says: certificate\\x1b[2J unk",
        ),
        (api_spec.NoConnection("cannot connect\x07"), "TF-812", "but: cannot connect\\x07."),
        (RuntimeError("runtime error encountered"), "TF-812", "runtime error encountered"),
        (
            Session(GOING, stats={"server": {"tightframe": {"state": 1}}}),
            "TF-815",
            "job_name: Field required",
        ),
    ],
)
def test_what_cannot_be_watched_has_a_code(connect: Connect, session: Any, code: str, expected: str) -> None:
    connect(session)
    done = call(JOB)
    assert isinstance(done.exception, WatchError) and done.exception.code == code
    assert expected in str(done.exception)


def test_a_server_that_was_never_reached_is_named_with_its_address(connect: Connect) -> None:
    admin = {"username": "lead@example.org", "host": "localhost", "port": 1}
    admin |= {"ca_cert": "rootCA.pem", "client_cert": "client.crt", "client_key": "client.key"}
    startup = Path("kits/consortium/prod_00/lead@example.org/startup")
    connect(api_spec.NoConnection("cannot connect"))
    (startup / "fed_admin.json").write_text(json.dumps({"admin": admin}))
    assert "but: the server localhost:1 does not answer (Connection refused)" in str(call(JOB).exception)
    connect(Session(GOING, api_spec.SessionClosed("closed"), stats=STATS), api_spec.NoConnection("no"))
    lost = str(call(JOB, "--patience", "0").exception)
    assert "for 0:00:00: closed." in lost, "once there was a connection, the engine's own words"


def test_an_expired_certificate_is_named_since_the_server_does_not(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"findings": [{"severity": "error", "message": "Startup kit certificate expired at 2021-01-01."}]}
    monkeypatch.setattr(kit_config, "inspect_startup_kit_metadata", lambda path: found)
    connect(api_spec.NoConnection("cannot connect"))
    assert "cannot connect; Startup kit certificate expired at 2021-01-01" in str(call(JOB).exception)


def test_a_server_that_was_restarted_gets_a_new_session(connect: Connect) -> None:
    first = Session(GOING, api_spec.SessionClosed("the session is closed on server"), stats=STATS)
    last = connect(first, api_spec.NoConnection("no"), Session({"status": "FINISHED:ABANDONED"}))
    done = call(JOB)
    assert done.exit_code == 1 and "the session is closed on server; trying again" in done.stdout
    assert first.closed == 1 == last.closed


def test_ctrl_c_leaves_the_job_alone(connect: Connect) -> None:
    session = connect(Session(GOING, KeyboardInterrupt(), stats=STATS))  # type: ignore[arg-type]
    done = call(JOB)
    assert done.exit_code == 130 and session.closed == 1
    assert f"no longer watching; the job goes on. Again: tightframe watch {JOB}" in done.stdout


@pytest.mark.parametrize("job", ["latest", "", "abort_job all", "3ff24333"])
def test_only_ids_of_jobs_are_sent(connect: Connect, job: str) -> None:
    connect(AssertionError("asked"))
    done = call("--", job)
    assert done.exit_code == 2 and "expected the id of a job" in flat(done.output.replace("│", ""))


def test_help_says_what_is_needed() -> None:
    done = CliRunner().invoke(cli.app, ["watch", "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    for expected in ("JOB", "--kit", "--every", "--patience", "Ctrl-C", "Exit code 0: it trained", "130"):
        assert expected in done.stdout


def test_the_kit_is_the_given_one_the_configured_one_or_the_only_one(home: Path) -> None:
    with pytest.raises(WatchError, match=r"TF-811: .* but found 0\. Give its folder with --kit"):
        monitoring.find_kit(None)
    lead = make_kit(home / "kits/consortium/prod_00/lead@example.org")
    assert monitoring.find_kit(None) == lead
    assert monitoring.Server(lead).user == "lead@example.org"
    other = make_kit(home / "kits/consortium/prod_00/member@example.org")
    with pytest.raises(WatchError, match=r"TF-811: .* found 2: kits/.*lead@example.org, kits/.*member@"):
        monitoring.find_kit(None)
    assert monitoring.find_kit(other / "startup") == other
    config = kit_config.add_startup_kit_entry(kit_config.load_cli_config(), "mine", str(other))
    kit_config.save_cli_config(config)
    with pytest.raises(WatchError, match="found 2"):
        monitoring.find_kit(None)  # known to the engine's command, but not in use
    kit_config.save_cli_config(kit_config.set_active_startup_kit(config, "mine"))
    assert monitoring.find_kit(None) == other
    other.rename(home / "elsewhere")
    with pytest.raises(WatchError, match=r"TF-811: .*'mine' points to a missing path"):
        monitoring.find_kit(None)  # and not silently the only one that is left


def test_a_sites_kit_is_none_of_a_person(home: Path) -> None:
    site = make_kit(home / "hospital-1", "fed_client.json")
    with pytest.raises(WatchError, match=r"TF-811: .* path is not an admin startup kit"):
        monitoring.find_kit(site)
    with pytest.raises(WatchError, match=r"TF-811: .* path does not exist"):
        monitoring.find_kit(home / "nowhere")


class Attacker:
    """A server that answers the engine's download with names of its own."""

    def __init__(self, folder: Path, tx_id: str, name: str) -> None:
        self.module = file_transfer.FileTransferModule(upload_dir=str(folder), download_dir=str(folder))
        self.meta = {"files": [[name, "ref"]], "tx_id": tx_id, "source_fqcn": "server"}
        self.receiver: Any = None

    def server_execute(self, command: str, cmd_ctx: Any = None) -> dict[str, Any]:
        if self.receiver is None:
            return {"status": "SUCCESS", "meta": self.meta}
        self.receiver.send_request(self, None, self)
        return {"status": "SUCCESS"}

    def download_file(self, source: str, ref_id: str, path: str) -> int:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).write_bytes(b"of the server")

    def do_command(self, command: str) -> Any:
        return self.module.pull_binary_file(shlex.split(command), self)

    def fetch(self) -> Any:
        return self.module.pull_folder(["pull_folder", JOB], self)

    def get_api(self) -> Attacker:
        return self

    def set_command_result(self, result: Any) -> None: ...

    def set_requester(self, receiver: Any) -> None:
        self.receiver = receiver

    def get_command_entry(self) -> Any:
        return self

    def full_command_name(self) -> str:
        return "download"

    def get_command(self) -> str:
        return "download"

    def fire_session_event(self, *_: Any) -> None: ...

    def debug(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("tx_id", "name"),
    [
        ("a", "../../../victim"),
        ("a", "results/../../../../victim"),
        ("a", "{victim}"),
        ("x/../../..", "victim"),
        ("x/../OTHER", "victim"),  # a sibling in the folder of all downloads
        ("a", ".."),
    ],
)
def test_a_server_writes_nowhere_but_into_the_folder_of_a_result(
    tx_id: str, name: str, tmp_path: Path
) -> None:
    """The engine itself would: with its own class each of these writes, moves or deletes."""
    victim, downloads = tmp_path / "victim", tmp_path / "kit" / "transfer"
    victim.write_text("mine")
    downloads.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(WatchError, match=r"^TF-817: "):
        Attacker(downloads, tx_id, name.format(victim=victim)).fetch()
    assert sorted(tmp_path.rglob("*")) == before and victim.read_text() == "mine"


TRANSFER = "kits/consortium/prod_00/lead@example.org/transfer"


@pytest.mark.parametrize(
    "named", ["victim", "kits", TRANSFER, f"{TRANSFER}/another-job", f"{TRANSFER}/{JOB}-mine"]
)
def test_a_server_moves_no_folder_but_that_of_a_result(
    connect: Connect, tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the comparison the folder is moved into one that is then deleted."""
    session = connect(Session(OVER))
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    Path(session.download_dir).mkdir(parents=True)
    (tmp_path / named).mkdir(exist_ok=True)
    monkeypatch.setattr(session, "download_job_result", lambda job_id: str(tmp_path / named))
    before = sorted(tmp_path.rglob("*"))
    held = monitoring.Server(monitoring.find_kit(None))
    for fetch in (lambda: held.outcome(JOB), lambda: held.download(JOB, tmp_path / "victim")):
        with pytest.raises(WatchError, match="TF-817"):
            fetch()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_result_is_fetched_and_its_transcript_asked_for(connect: Connect, tmp_path: Path) -> None:
    connect(Session(OVER, result=OUTCOME))
    result = CliRunner().invoke(cli.app, ["jobs", "fetch", JOB, "-o", "results"])
    assert result.exit_code == 1 and "no transcript" in result.stderr
    assert (tmp_path / "results" / JOB / "workspace" / "outcome.json").is_file()


@pytest.mark.parametrize("outcome", ["whole", "broken"])
def test_no_page_of_a_servers_own_is_left_for_a_browser(
    connect: Connect, outcome: str, tmp_path: Path
) -> None:
    """A page that a run writes has no scripts. A server's own could have, and runs at whoever looks."""
    session = connect(Session(OVER, result=OUTCOME if outcome == "whole" else {"rounds": "x"}))
    evil = "<script>alert(1)</script>"
    session.others = {"workspace/report.html": evil, "index.HTM": evil, "workspace/picture.svg": evil}
    done = CliRunner().invoke(cli.app, ["jobs", "fetch", JOB, "-o", "results"])
    left = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not [path for path in left if evil in path.read_text()]
    assert ("no page of these results: TF-802" in done.stderr) == (outcome == "broken")
    pages = [path.name for path in left if path.name != "outcome.json"]
    assert pages == (["report.html"] if outcome == "whole" else [])


def test_a_second_fetch_into_the_same_folder_is_refused(connect: Connect, tmp_path: Path) -> None:
    connect(Session(OVER, result=OUTCOME))
    held = monitoring.Server(monitoring.find_kit(None))
    held.download(JOB, tmp_path / "results")
    before = sorted((tmp_path / "results").rglob("*"))
    with pytest.raises(FileExistsError, match="name another folder, or delete it"):
        held.download(JOB, tmp_path / "results")
    assert sorted((tmp_path / "results").rglob("*")) == before


def test_a_servers_job_id_is_no_command(connect: Connect, tmp_path: Path) -> None:
    """The engine puts it into command lines, split at blanks: a second word was a path to write to."""
    session = connect(Session(OVER, result=OUTCOME))
    session.submitted = f"{JOB} ../../victim"
    held = monitoring.Server(monitoring.find_kit(None))
    with pytest.raises(WatchError, match="TF-815"):
        held.submit(tmp_path)
    for ask in (held.look, held.outcome, lambda job: held.download(job, tmp_path / "results")):
        with pytest.raises(WatchError, match="TF-815"):
            ask(session.submitted)
    session.submitted = JOB
    assert held.submit(tmp_path) == JOB


@pytest.mark.parametrize("words", [[JOB, "../victim"], [JOB, "mine"], ["../victim"], [".."], ["a\\b"]])
def test_a_result_is_fetched_under_its_own_name_only(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "transfer").mkdir()
    attacker = Attacker(tmp_path / "transfer", "a", "outcome.json")
    with pytest.raises(WatchError, match="TF-817"):
        attacker.module.pull_folder(["pull_folder", *words], attacker)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "transfer"]


@pytest.mark.parametrize("command", ["fetch", "submit"])
def test_a_valid_transcript_of_another_job_is_refused(
    connect: Connect, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = connect(Session(OVER, result=OUTCOME))
    startup = tmp_path / "kits/consortium/prod_00/lead@example.org/startup"
    monkeypatch.setattr(jobs, "_sign", lambda folder, kit, days: startup)
    shutil.copytree(ROOT / "jobs" / "fedetf_heart", tmp_path / "job")
    typed = ["fetch", JOB, "-o"] if command == "fetch" else ["submit", "job", "--results"]
    ours = dataclasses.replace(transcripts.PARAMS, job=JOB, lineage=JOB)
    for params, code in ((transcripts.PARAMS, 1), (ours, 0)):
        monkeypatch.setattr(transcripts, "PARAMS", params)
        run = transcripts.Run()
        run.opened(run.record(run.epoch(params), 0), GROUPS)
        run.end("too few silos")
        session.transcript = b"".join(run.lines)
        (startup / "rootCA.pem").write_bytes(run.root.x509.public_bytes(Encoding.PEM))
        done = CliRunner().invoke(cli.app, ["jobs", *typed, f"results-{code}"], env={"COLUMNS": "100"})
        assert done.exit_code == code, done.output
        assert ("valid:" in done.stdout) == (code == 0) and "jobs fetch" not in done.output
        said = f"expected a transcript of job {JOB}, but it is of {transcripts.PARAMS.job}"
        assert (said in flat(done.stderr)) == (code == 1)


def test_a_transcript_that_nobody_has_signed_is_refused(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one line says the job's id, by the server's word alone."""
    session = connect(Session(OVER, result=OUTCOME))
    monkeypatch.setattr(transcripts, "PARAMS", dataclasses.replace(transcripts.PARAMS, job=JOB))
    run = transcripts.Run()
    run.end()
    session.transcript = b"".join(run.lines)
    root = tmp_path / "kits/consortium/prod_00/lead@example.org/startup/rootCA.pem"
    root.write_bytes(run.root.x509.public_bytes(Encoding.PEM))
    done = CliRunner().invoke(cli.app, ["jobs", "fetch", JOB, "-o", "results"], env={"COLUMNS": "100"})
    assert done.exit_code == 1 and "valid:" not in done.stdout
    assert "signed by nobody:" in done.stderr and "TF-616" in done.stderr


def test_an_honest_servers_result_is_fetched(tmp_path: Path) -> None:
    reply = Attacker(tmp_path, "a", "workspace/outcome.json").fetch()
    assert (Path(reply["meta"]["location"]) / "workspace" / "outcome.json").read_bytes() == b"of the server"
