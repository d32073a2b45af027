"""``tightframe site stop``: the processes of one kit end, nothing else does, and nothing comes back.

The engine is played by two small modules under its names; the script that starts them anew is its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from nvflare import lighter
from tests.app.site.checks.test_all_checks import _kit
from tests.support import ROOT
from typer.testing import CliRunner, Result

from tightframe.errors import JoinError, SiteConfigError
from tightframe_app.cli import app
from tightframe_app.federation.kits import Kit
from tightframe_app.site import stop as site_stop
from tightframe_app.site.membership import starting

CLIENT = """
import os, signal, subprocess, sys, time
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
kit = sys.argv[sys.argv.index("-m") + 1]
if job := os.environ.get("JOB"):
    subprocess.Popen(
        [sys.executable, "-m", "nvflare.private.fed.app.client.worker_process", "-m", kit, "-n", job],
        start_new_session=True,
        env=os.environ | {"PARENT": str(os.getpid())},
    )
print("up", flush=True)
time.sleep(600)
"""
WORKER = """
import os, time
parent, until = int(os.environ["PARENT"]), time.monotonic() + 600
while os.getppid() == parent and time.monotonic() < until and not os.path.exists(os.environ.get("DONE", "")):
    time.sleep(0.05)
"""

Start = Callable[..., psutil.Process]


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A site's kit with the engine's own script in it."""
    folder = tmp_path / "kits" / "hospital-a"
    _kit(folder / "startup")
    templates = Path(lighter.__file__).parent / "templates" / "master_template.yml"
    script = yaml.safe_load(templates.read_text())["sub_start_sh"]
    values = {"type": "client", "app_name": "client_train", "cln_uid": "uid=hospital-a", "org_name": "a"}
    for name, value in {**values, "config_folder": "config"}.items():
        script = script.replace(f"{{~~{name}~~}}", value)
    assert "{~~" not in script
    (folder / "startup" / "sub_start.sh").write_text(script)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start what the engine would, or another command; all are ended afterwards."""
    package = tmp_path / "engine" / "nvflare" / "private" / "fed" / "app" / "client"
    package.mkdir(parents=True)
    for folder in package.relative_to(tmp_path / "engine").parents[::-1][1:]:
        (tmp_path / "engine" / folder / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "client_train.py").write_text(CLIENT)
    (package / "worker_process.py").write_text(WORKER)
    shutil.copytree(package, package.with_name("server"))
    (package.with_name("server") / "server_train.py").write_text(
        CLIENT.replace("client.worker", "server.runner")
    )
    (package.with_name("server") / "runner_process.py").write_text(WORKER)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    started: list[subprocess.Popen[str]] = []

    def run(kit: Path, *command: str, **environment: str) -> psutil.Process:
        module = [sys.executable, "-m", "nvflare.private.fed.app.client.client_train", "-m", str(kit)]
        process = subprocess.Popen(
            command or module,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "engine"), "PATH": path, **environment},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        if not command:
            assert process.stdout.readline() == "up\n"
        made = psutil.Process(process.pid)
        _until(lambda: bool(made.cmdline()))  # none for a moment of exec
        return made

    yield run
    for process in started:
        for child in site_stop._children(psutil.Process(process.pid)) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def stop(kit: Path, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["site", "stop", "--kit", str(kit), *arguments], input=answer)


def alive(process: psutil.Process) -> bool:
    return site_stop._lives(process)


def roles(kit: Path) -> list[str]:
    return [one.role for one in site_stop.running(kit)]


def test_the_client_of_this_kit_ends_and_that_of_another_does_not(
    kit: Path, start: Start, tmp_path: Path
) -> None:
    mine, other = start(kit), start(tmp_path / "kits" / "hospital-b")
    reader = start(kit, "tail", "-f", str(kit / "startup" / "client.crt"))
    done = stop(kit)
    assert done.exit_code == 0, done.output
    assert f"hospital-a: the engine's client (process {mine.pid})" in done.output
    assert done.output.splitlines()[-1] == "stopped: no process of this kit is left"
    assert not alive(mine) and alive(other) and alive(reader)
    again = stop(kit)
    assert again.exit_code == 0 and "no process of this kit runs" in again.output


def test_it_asks_before_a_job_is_cut_off(kit: Path, start: Start) -> None:
    client = start(kit, JOB="job-1")
    _until(lambda: roles(kit) == ["client", "job"])
    declined = stop(kit, answer="n\n")
    assert declined.exit_code == 1 and alive(client)
    assert "Job job-1 runs here" in declined.output and "--when-idle" in declined.output
    assert roles(kit) == ["client", "job"], "no answer, no change"
    done = stop(kit, answer="y\n")
    assert done.exit_code == 0, done.output
    assert "killed" not in done.output, "the job's process ends by itself"
    assert roles(kit) == []


def test_when_idle_waits_for_the_job_and_asks_nothing(
    kit: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(kit, JOB="job-2", DONE=str(tmp_path / "done"))
    _until(lambda: roles(kit) == ["client", "job"])

    def sleep(seconds: float) -> None:
        """The job ends while it is waited for."""
        (tmp_path / "done").touch()
        time.sleep(seconds)

    monkeypatch.setattr(site_stop, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    done = stop(kit, "--when-idle")
    assert done.exit_code == 0, done.output
    assert "waiting for job job-2 to end" in done.output and "runs here" not in done.output
    assert roles(kit) == []


def test_what_does_not_end_is_killed_and_said(kit: Path, start: Start) -> None:
    client = start(kit, STUBBORN="1")
    done = stop(kit, "--timeout", "1")
    assert done.exit_code == 0, done.output
    text = f"did not end in 1 seconds and was killed: the engine's client (process {client.pid})"
    assert text in done.output and not alive(client)


def test_a_site_that_systemd_runs_is_said_to_be_its_service(
    kit: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client's control group, in either version; a login's or a terminal's is none of ours."""
    monkeypatch.setattr(site_stop, "PROC", tmp_path / "proc")

    def stopped(*groups: str, **environment: str) -> str:
        client = start(kit, **environment)
        folder = tmp_path / "proc" / str(client.pid)
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text("".join(f"{group}\n" for group in groups))
        done = stop(kit, "--timeout", "1")
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    killed = stopped("0::/system.slice/tightframe-site.service", STUBBORN="1")
    assert killed.count("`sudo systemctl stop tightframe-site`") == 2, "before, and once it was killed"
    assert killed.index("runs it as tightframe-site.service") < killed.index("was killed")
    assert killed.index("was killed") < killed.index("restart it unless")
    asked = stopped("4:memory:/", "1:name=systemd:/system.slice/tightframe-b.service")
    assert asked.count("`sudo systemctl stop tightframe-b`") == 1, "it ended when asked to, so it stays ended"
    for other in (
        "/system.slice/ssh.service",
        "/user.slice/session-3.scope",
        "/tightframe.service/x.scope",
        "/user.slice/user-7.slice/user@7.service/app.slice/tightframe-site.service",
    ):
        assert "systemctl" not in stopped(f"0::{other}")


def test_a_job_whose_client_is_gone_is_found(kit: Path, start: Start) -> None:
    module = [sys.executable, "-m", site_stop.JOB, "--workspace", str(kit), "-n", "job-3"]
    process = start(kit, *module, PARENT=str(os.getpid()))
    _until(lambda: roles(kit) == ["job"])
    assert stop(kit, "--yes", "--timeout", "1").exit_code == 0
    assert not alive(process)


@pytest.mark.whole
def test_the_engines_own_script_does_not_start_the_client_anew(kit: Path, start: Start) -> None:
    """Without ``--once`` it starts a client that has ended within five seconds."""
    script = start(kit, "bash", "-c", f"cd {kit}; exec bash startup/sub_start.sh")
    _until(lambda: roles(kit)[:2] == ["script", "client"])
    # It is the true script: it does bring a client back that was only killed.
    first = next(one.process for one in site_stop.running(kit) if one.role == "client")
    first.send_signal(signal.SIGKILL)
    _until(lambda: "client" in roles(kit) and not alive(first))
    assert (kit / "daemon_pid.fl").read_text() == f"{script.pid}\n"
    done = stop(kit)
    assert done.exit_code == 0, done.output
    assert roles(kit) == [] and not alive(script)
    assert list(kit.glob("*.fl")) == [], "a stale number would keep the script from starting"


def test_a_process_that_only_has_the_number_is_left_alone(kit: Path, start: Start) -> None:
    stranger = start(kit, "sleep", "60")
    for name in ("pid.fl", "daemon_pid.fl"):
        (kit / name).write_text(f"{stranger.pid}\n")
    assert "no process of this kit runs" in stop(kit).output
    assert alive(stranger)


def test_another_account_passes_no_program_off_as_this_kits(
    kit: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can give one the engine's command line; it kept the hospital from stopping its own (TF-618)."""
    mine, forged, whose = start(kit), start(kit), psutil.Process.uids
    other = namedtuple("uids", "real effective saved")(*[os.geteuid() + 4711] * 3)
    monkeypatch.setattr(psutil.Process, "uids", lambda one: other if one.pid == forged.pid else whose(one))
    done = stop(kit)
    assert done.exit_code == 0, done.output
    assert not alive(mine) and alive(forged)


def test_processes_of_another_account_are_not_touched(
    kit: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start(kit)
    monkeypatch.setattr(site_stop.os, "getuid", lambda: os.geteuid() + 12345)
    done = stop(kit, "--yes")
    assert isinstance(done.exception, SiteConfigError) and alive(client)
    assert done.exception.code == "TF-618" and f"Run the command as {client.username()}" in str(
        done.exception
    )


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"admin": {"username": "lead@example.org"}}, "the kit of a person, lead@example.org"),
        ([], "the kit of a person."),
    ],
)
def test_a_persons_kit_is_named_with_what_to_do_there(
    kit: Path, start: Start, values: object, found: str
) -> None:
    client = start(kit)
    (kit / "startup" / "fed_client.json").unlink()
    (kit / "startup" / "fed_admin.json").write_text(json.dumps(values))
    done = stop(kit)
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-619"
    told = str(done.exception)
    assert told.startswith(f"TF-619: Expected the kit of a site or of the server, but got {found}")
    assert "Nothing was changed." in told and "`nvflare job abort JOB_ID`" in told
    assert "Ctrl-C ends `tightframe watch`" in told and "service" not in told
    assert told.endswith("run `tightframe site stop --kit KIT` with its own kit, on its machine.")
    assert alive(client)


def test_the_servers_kit_is_stopped_too_and_is_no_sites(kit: Path, start: Start, tmp_path: Path) -> None:
    own = kit / "startup" / "fed_client.json"
    server = {"servers": [json.loads(own.read_text())["client"]]}
    (kit / "startup" / "fed_server.json").write_text(json.dumps(server))
    own.unlink()
    process = start(kit, sys.executable, "-m", site_stop.SERVER, "-m", str(kit), JOB="job-4")
    other = start(tmp_path / "b", sys.executable, "-m", site_stop.SERVER, "-m", str(tmp_path / "b"))
    _until(lambda: roles(kit) == ["server", "job"])
    with pytest.raises(JoinError, match=f"process {process.pid} runs it.*two servers would write"):
        starting.claim(Kit.open(kit))  # though its script is gone
    done = stop(kit, answer="n\n")
    assert done.exit_code == 1 and alive(process), done.output
    assert f"the engine's server (process {process.pid})" in done.output
    assert "Job job-4 runs here. Stopping the server ends it for all sites" in done.output
    assert stop(kit, "--yes").exit_code == 0 and not alive(process) and alive(other)
    page = CliRunner().invoke(app, ["site", "page", str(kit)]).exception
    assert isinstance(page, SiteConfigError) and page.code == "TF-619"
    assert f"tightframe site stop --kit {kit}" in str(page)


def test_a_kit_that_runs_is_not_started_again_nor_a_copy_of_it(
    kit: Path, start: Start, tmp_path: Path
) -> None:
    """A copy is found by the state folder; what a process that ended has left is not in the way."""
    state = tmp_path / "state"
    state.mkdir()
    (kit / "local").mkdir()
    (kit / "local" / "tightframe.json").write_text(json.dumps({"state_dir": str(state)}))
    copy = tmp_path / "a copy"
    shutil.copytree(kit, copy)
    starting.claim(Kit.open(kit))
    client = start(kit)
    for place in (kit, copy):
        with pytest.raises(JoinError) as refused:
            starting.claim(Kit.open(place))
        assert refused.value.code == "TF-758" and f"process {client.pid} runs" in str(refused.value)
        assert str(refused.value).endswith(f"tightframe site stop --kit {kit}")
    client.kill()
    client.wait()
    starting.claim(Kit.open(copy))  # the notes of the killed one are stale
    running = start(copy)
    with pytest.raises(JoinError, match=r"TF-758.*site stop --kit '.*/a copy'"):
        starting.claim(Kit.open(kit))
    assert alive(running)
    again = [sys.executable, "-c", "import time; time.sleep(60)", "site", "start", str(copy)]
    starts = start(copy, *again)  # not the engine yet
    running.kill()
    running.wait()
    (state / "started-hospital-a.json").write_text(json.dumps({"kit": str(copy), "process": starts.pid}))
    with pytest.raises(JoinError, match=f"process {starts.pid} runs"):
        starting.claim(Kit.open(kit))


def test_a_start_that_becomes_the_engine_meanwhile_is_seen(
    kit: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[psutil.Process] = []

    class Starting:
        def __init__(self, number: int) -> None:
            pass

        def create_time(self) -> float:
            return 0.0

        def cmdline(self) -> list[str]:
            """Become the engine while the command line is read."""
            became.append(start(kit))
            return ["python", "-m", "other"]

    monkeypatch.setattr(starting, "psutil", SimpleNamespace(Process=Starting, Error=psutil.Error))
    assert starting._running({"kit": str(kit), "process": 1}) == became[0].pid


def test_another_start_that_got_an_ended_ones_number_is_not_it(tmp_path: Path, start: Start) -> None:
    """It is of another kit."""
    other = start(tmp_path, sys.executable, "-c", "import time; time.sleep(60)", "site", "start")
    note = {"kit": str(tmp_path / "kit"), "process": other.pid}
    begun = other.create_time()
    assert starting._running({**note, "started": begun}) == other.pid
    assert starting._running({**note, "started": begun - 60}) is None


def test_no_kit_at_all_is_told_apart(tmp_path: Path) -> None:
    done = stop(tmp_path)
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-615"


def _until(true: Callable[[], bool], *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_service_starts_the_site_as_the_guide_does(tmp_path: Path) -> None:
    """And the guide's excerpt is the file's; systemd itself reads the file where there is one."""
    unit = (ROOT / "provisioning" / "systemd" / "tightframe-site.service").read_text()
    guide = (ROOT / "docs" / "site-guide.md").read_text()
    excerpt = next(block for block in guide.split("```") if block.startswith("text\n[Service]"))
    shown = excerpt.splitlines()[2:]
    assert shown and [line for line in shown if line not in unit.splitlines()] == []
    (command,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    home = "/home/tightframe/"
    assert "TimeoutStopSec=30" in unit.splitlines() and "after thirty seconds, and either way" in guide
    run = command.removeprefix(f"ExecStart={home}.venv/bin/").replace(home, "")
    assert f"\n{run}\n```" in guide, "the command that is run in step 7"
    if (analyze := shutil.which("systemd-analyze")) is None:
        return
    kit = tmp_path / "kits" / "consortium" / "prod_00" / "hospital-1" / "startup"
    kit.mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "tightframe").touch(mode=0o755)
    path = tmp_path / "tightframe-site.service"
    mine = unit.replace(home, f"{tmp_path}/").replace("=tightframe\n", f"={psutil.Process().username()}\n")
    for text, wrong in ((mine, False), (mine.replace("RestartSec=", "RestartSecs="), True)):
        path.write_text(text)
        done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
        assert (str(path) in done.stderr) == wrong, done.stderr


@pytest.mark.parametrize(("name", "closed"), [("engine", "-/data -/var/lib/tightframe"), ("training", "")])
def test_the_units_of_two_accounts_are_closed_and_systemd_reads_them(
    name: str, closed: str, tmp_path: Path
) -> None:
    unit = (ROOT / "provisioning" / "systemd" / f"tightframe-{name}.service").read_text()
    lines = unit.splitlines()
    other = {"engine": "training", "training": "engine"}[name]
    assert f"User=tightframe-{name}" in lines
    assert f"InaccessiblePaths={closed} -/home/tightframe-{other}".replace("= ", "=") in lines
    for rule in ("NoNewPrivileges=yes", "ProtectSystem=strict", "PrivateTmp=yes", "CapabilityBoundingSet="):
        assert rule in lines
    guide = (ROOT / "docs" / "site-guide.md").read_text()
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    short = command.removeprefix("ExecStart=").replace("/opt/tightframe/.venv/bin/", "")
    # The kit's script finds the engine's modules by the PATH, which sudo resets.
    path = "env PATH=/opt/tightframe/.venv/bin:/usr/bin:/bin \\\n  " if name == "engine" else ""
    assert f"sudo -u tightframe-{name} {path}{short.replace(f'/home/tightframe-{name}/', '')}\n" in guide
    if (analyze := shutil.which("systemd-analyze")) is None:
        return
    for one in ("engine", "training"):
        text = (ROOT / "provisioning" / "systemd" / f"tightframe-{one}.service").read_text()
        lines = [
            f"ExecStart={sys.executable}" if row.startswith("ExecStart=") else row
            for row in text.splitlines()
        ]
        (tmp_path / f"tightframe-{one}.service").write_text("\n".join(lines) + "\n")
    path = tmp_path / f"tightframe-{name}.service"
    done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
    assert str(path) not in done.stderr, done.stderr
