"""Programs in a process of their own, and whether a process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
from tests.support import ROOT


def printed(code: str) -> list[str]:
    """Run Python with the package alone; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "custom")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ended(process: psutil.Process) -> bool:
    """Check whether a process has ended, also where nobody has asked for its exit code."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return True


def gone(process: psutil.Process, seconds: float) -> bool:
    """Wait until a process has ended; return False if it has not after so many seconds."""
    until = time.monotonic() + seconds
    while not ended(process):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
