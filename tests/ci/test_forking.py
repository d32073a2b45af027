"""A program that the tests fork behaves as one that an interpreter of its own runs, which is the oracle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.support import forking
from tests.support.processes import gone

PROBE = """
import json, os, random, signal, sys, threading
import numpy as np

def main():
    ignored = [n for n in (1, 2, 13, 15) if signal.getsignal(n) == signal.SIG_IGN]
    os.umask(umask := os.umask(0))
    told = [sys.argv, os.getcwd(), os.environ["MINE"], "HOME" in os.environ, umask, sys.stdin.read()]
    told += [__name__, ignored, threading.active_count(), sys.stdout.encoding, sys.path[:2]]
    drawn = [random.random(), float(np.random.random())]
    print(json.dumps([told, drawn, os.path.basename(sys.executable)]), flush=True)
    how = sys.argv[1]
    if how == "wait":
        threading.Event().wait(60)
    if how == "raise":
        raise ValueError("so it is")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit({"text": "in words", "code": 3}.get(how))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    if forking.started() is None:
        pytest.skip("nothing is forked here")
    (tmp_path / "probe.py").write_text(PROBE)
    kept = {"PATH": os.environ["PATH"], "MINE": "of the test", "PYTHONPATH": str(tmp_path)}
    return forking.environment(kept)


@pytest.mark.whole
@pytest.mark.parametrize("how", ["code", "text", "raise", "kill", "end"])
def test_it_gets_says_and_returns_what_a_real_one_does(
    how: str, environment: dict[str, str], tmp_path: Path
) -> None:
    told, drawn = [], set()
    for program in ("python3", sys.executable):
        command = ["bash", "-c", f"umask 027; exec {program} -m probe {how} 'two words'"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input="given", capture_output=True, text=True, check=False
        )
        same, numbers, name = json.loads(done.stdout)
        assert name.startswith("python")
        drawn |= set(numbers)
        told.append((same, done.returncode, done.stderr.splitlines()[-1:]))
    assert told[0] == told[1]
    assert len(drawn) == 4, "each draws numbers of its own"


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_as_it_does_a_real_one(
    number: signal.Signals, environment: dict[str, str], tmp_path: Path
) -> None:
    command = ["python3", "-m", "probe", "wait"]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # The tests themselves may run where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert started.stdout is not None and started.stdout.readline()
    (forked,) = [
        one
        for one in psutil.process_iter(["cwd"])
        if one.info["cwd"] == str(tmp_path) and one.pid != started.pid
    ]
    started.send_signal(number)
    assert started.wait(timeout=60) == -number
    assert gone(forked, 60)
    started.stdout.close()


SITE = """
import json, os, subprocess, sys, time

if __name__ == "__main__":
    job = subprocess.Popen([sys.executable, "-m", "probe", "wait"], stdout=subprocess.PIPE)
    job.stdout.readline()
    print(json.dumps([os.getpid(), "torch" in sys.modules]), flush=True)
    time.sleep(60)
"""


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_sites_job_is_below_the_site_and_ends_with_it(
    number: signal.Signals, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "site_train.py").write_text(SITE)
    imported = []
    for values, program in ((forking.environment(environment, sites=True), "python3"), ({}, sys.executable)):
        started = subprocess.Popen(
            [program, "-m", "site_train"],
            cwd=tmp_path,
            env=values or environment | {forking.SOCKET: ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert started.stdout is not None
        own, torch = json.loads(started.stdout.readline())
        imported.append(torch)
        site = forking.forked(psutil.Process(started.pid))
        assert site.pid == own and (site.pid == started.pid) == (program != "python3")
        (job,) = {
            forking.forked(one) for one in site.children(recursive=True) if "probe" in " ".join(one.cmdline())
        }
        assert site in job.parents()
        started.send_signal(number)
        assert started.wait(timeout=60) == -number and gone(site, 60)
        if program != "python3":
            job.kill()
        assert gone(job, 60)
        started.stdout.close()
    assert imported == [True, False], "one began where torch is there already"
