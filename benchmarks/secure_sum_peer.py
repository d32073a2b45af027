"""Measurement of Flower's SecAgg+, in its own environment. Used by ``secure_sum.py``."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEER = Path(__file__).resolve().parent / "peers" / "flower"


class PeerError(Exception):
    """The peer could not be installed or run."""


def default_environment() -> Path:
    """Return the folder in which the peer's environment is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tightframe-benchmarks" / "flower"


def make_environment(folder: Path) -> Path:
    """Create the environment unless it exists with the same requirements; return its Python.

    Raises:
        PeerError: if it cannot be created.
    """
    requirements, mark = PEER / "requirements.txt", folder / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    python = folder / "bin" / "python"
    if not (mark.exists() and mark.read_text() == wanted and python.exists()):
        print(f"creating the peer's environment in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        _run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements])
        mark.write_text(wanted)
    return python


def measure(
    python: Path,
    *,
    sites: int,
    size: int,
    threshold: int,
    drops: Sequence[int],
    repeats: int,
    light: int,
    seed: int,
) -> dict[str, Any]:
    """Return Flower's costs in one case, as ``peers/flower/run.py`` writes them.

    Raises:
        PeerError: if it does not succeed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "flower.json"
        options = {
            "sites": sites,
            "size": size,
            "threshold": threshold,
            "repeats": repeats,
            "light": light,
            "seed": seed,
        }
        listed = [item for name, value in options.items() for item in (f"--{name}", str(value))]
        _run([python, PEER / "run.py", *listed, "--out", out, "--drops", *map(str, drops)])
        report: dict[str, Any] = json.loads(out.read_text())
    return report


def _run(command: Sequence[object]) -> None:
    # This process's module path must not reach the other environment.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(item) for item in command], env=inherited, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).splitlines()[-5:])
        raise PeerError(
            f"Expected {Path(str(command[1])).name} to succeed, but got {done.returncode}:\n{last}"
        )
