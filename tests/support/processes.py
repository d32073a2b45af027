"""Programs in a process of their own, with nothing imported before."""

from __future__ import annotations

import os
import subprocess
import sys

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
