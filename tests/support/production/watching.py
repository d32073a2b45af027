"""A running job of a federation, held still while it is looked at, and looked at as a person does."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
from tests.support import forking
from tests.support.production.federation import SERVER, SITES, Federation
from typer.testing import CliRunner

from tightframe.flare.monitoring.consoles import COMMAND
from tightframe_app import cli
from tightframe_app.watch.view import KINDS


def process_of(federation: Federation, name: str, job_id: str) -> psutil.Process:
    """The process in which a site runs a job."""
    parent, until = federation.engine_process(name), time.monotonic() + 120
    while time.monotonic() < until:
        for process in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if job_id in " ".join(process.cmdline()) and "python" in process.name():
                    return forking.forked(process)
        time.sleep(0.1)
    raise AssertionError(federation.said(name)[-3000:])


def held(session: Any, job_id: str, silo: psutil.Process) -> dict[str, Any]:
    """Hold a silo once a run is at its last evaluation and all others have answered; what the run then tells.

    It goes on telling it: the run cannot end without the silo, and nobody else is at work. Not in a round
    before: answers to the exchanges that follow would take as long as this one does.
    """
    until, now = time.monotonic() + 200, {}
    while time.monotonic() < until:
        time.sleep(0.1)
        now = told(session, job_id)
        if now.get("state") != "summing" or now["evaluated_round"] is None:
            continue  # the first round takes a silo long, which has to import torch in it
        # From here on the silo gets on in small steps only, so that the end cannot be missed.
        silo.send_signal(signal.SIGSTOP)
        while time.monotonic() < until and len(now.get("answered", ())) < len(now.get("joined", SITES)) - 1:
            time.sleep(0.5)
            now = told(session, job_id)
        before = told(session, job_id)
        time.sleep(1)
        now = told(session, job_id)
        waiting = now.get("state") == "summing" and len(now["answered"]) == len(now["joined"]) - 1
        if waiting and now == before and now["kind"] == "closing":
            return now
        silo.send_signal(signal.SIGCONT)
    raise AssertionError(now)


def told(session: Any, job_id: str) -> dict[str, Any]:
    """What a running job answers the console; nothing before it can."""
    try:
        answer: dict[str, Any] = session.do_app_command(job_id, COMMAND, None)
    except Exception as error:
        assert "not authorized" not in str(error)
        return {}
    return answer


def watched(federation: Federation, name: str, job_id: str, *, code: int) -> str:
    """What ``tightframe watch`` says of a job that is over."""
    done = CliRunner().invoke(cli.app, ["watch", job_id, "--kit", str(federation.kit(name))])
    assert done.exit_code == code, done.output
    return done.output


def _heeds_ctrl_c() -> None:
    """A process that a shell put into the background ignores Ctrl-C, and so do those that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def look_and_leave(federation: Federation, name: str, job_id: str, now: dict[str, Any]) -> None:
    """Watch in a terminal of 80 columns, see what there is to see, and leave with Ctrl-C."""
    ours, theirs = pty.openpty()
    command = f"stty cols 80 rows 40 && exec tightframe watch {job_id} --kit {federation.kit(name)}"
    watcher = subprocess.Popen(
        ["bash", "-c", command],
        cwd=federation.folder,
        env={key: value for key, value in federation.environment.items() if key != "COLUMNS"}
        | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_heeds_ctrl_c,
    )
    os.close(theirs)
    seen, left = "", False
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as screen:  # EIO at its end
        while chunk := screen.read(65536):
            seen += chunk.decode(errors="replace")
            if "so far" in seen and not left:
                watcher.send_signal(signal.SIGINT)
                left = True
    assert watcher.wait(timeout=60) == 130, seen
    assert "the job goes on. Again: tightframe watch" in seen
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", seen).split())
    assert f"state {KINDS[now['kind']]} round 2 of 2" in text, text
    assert f"answered {len(now['answered'])} of 3" in text, text


def kill(federation: Federation, name: str) -> None:
    """`kill -9` of everything of a site, as where its machine loses its power."""
    process = federation.engine_process(name)
    process.suspend()  # so that it does not tell the server of the death of its job, as it would in between
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    federation.processes[name].wait(timeout=60)


def wait_round(federation: Federation, job_id: str, number: int) -> None:
    """Wait until a round of a job is done, by the log of its process at the server."""
    log, until = federation.kit(SERVER) / job_id / "log.txt", time.monotonic() + 180
    while not log.is_file() or f"round {number} of" not in log.read_text(errors="replace"):
        assert time.monotonic() < until, federation.said(SERVER)[-3000:]
        time.sleep(0.05)


@dataclass
class Lines:
    """What ``tightframe watch`` has said without a terminal, and its exit code."""

    text: str = ""
    code: int | None = None

    @property
    def timed(self) -> list[tuple[int, str]]:
        """(seconds of the day, line) while it ran."""
        stamped = [re.match(r"(\d\d):(\d\d):(\d\d) (.*)", line) for line in self.text.splitlines()]
        parts = [found.groups() for found in stamped if found is not None]
        return [
            (int(hour) * 3600 + int(minute) * 60 + int(second), line) for hour, minute, second, line in parts
        ]

    @property
    def closing(self) -> str:
        """What it said at the end."""
        lines = self.text.splitlines()
        last = max(i for i, line in enumerate(lines) if re.match(r"\d\d:\d\d:\d\d ", line))
        return "\n".join(lines[last + 1 :])

    def since(self, words: str, *, of: str) -> bool:
        """Whether lines about something have some words."""
        return any(words in line for _, line in self.timed if of in line)

    def gaps(self) -> list[int]:
        """Seconds between one line and the next."""
        times = [seconds for seconds, _ in self.timed]
        return [(later - before) % 86400 for before, later in pairwise(times)]

    def seconds(self, first: str, last: str) -> int:
        """Seconds from the first line with some words to the first with others."""
        begin, end = (next(when for when, line in self.timed if words in line) for words in (first, last))
        return (end - begin) % 86400


@contextlib.contextmanager
def watching(federation: Federation, name: str, job_id: str) -> Iterator[Lines]:
    """Watch a job without a terminal until it is over."""
    said = Lines()
    watcher = subprocess.Popen(
        ["tightframe", "watch", job_id, "--kit", str(federation.kit(name))],
        cwd=federation.folder,
        env=forking.environment(federation.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield said
        said.text = watcher.communicate(timeout=60)[0]
        said.code = watcher.returncode
    finally:
        if watcher.poll() is None:
            watcher.kill()
            watcher.wait()
