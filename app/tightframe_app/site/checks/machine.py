"""Checks of a site's machine: the state folder's disk, the device, the clock."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from tightframe.config.site import SiteEntry
from tightframe.errors import TrainingError
from tightframe.files import quoted
from tightframe.rounds.silo.contribute import choose_device
from tightframe_app.site.checks.findings import Finding, area_of

LEAST_FREE, LITTLE_FREE = 2**30, 10 * 2**30
"""Free bytes on the state folder's disk below which there is a problem, and a note."""
JUMP_SECONDS = 0.05
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def disk(entry: SiteEntry) -> Iterator[Finding]:
    """Check that the state folder exists, is private to this account and writable, and has free space."""
    area = "disk"
    if entry.state_dir is None:
        return
    folder = Path(entry.state_dir)
    if not folder.is_dir():
        text = f"{folder} does not exist: run  install -d -m 0700 {quoted(folder)}  as the client's account"
        yield Finding(area, "problem", text)
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OTHERS:
        text = f"{folder} is open to others (mode {mode:04o}): chmod 0700 {quoted(folder)}"
        yield Finding(area, "problem", text)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as probe:
            probe.write(b"x")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield Finding(area, "problem", f"{folder} cannot be written: {error.strerror}")
        return
    free = shutil.disk_usage(folder).free
    shown = f"{folder}: {free / 2**30:.1f} GiB free"
    if free < LITTLE_FREE:
        yield Finding(area, "problem" if free < LEAST_FREE else "note", f"{shown}, which is little")
    else:
        yield Finding(area, "ok", f"{shown}, writable, mode {mode:04o}")


def device(entry: SiteEntry, label: str) -> Iterator[Finding]:
    """Check that the configured device exists."""
    area = area_of("device", label)
    try:
        chosen = choose_device(entry.device)
    except TrainingError as error:
        yield Finding(area, "problem", str(error))
        return
    if chosen.type == "cuda":
        properties = torch.cuda.get_device_properties(chosen)
        yield Finding(area, "ok", f"{chosen}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        yield Finding(area, "ok", f"{entry.device}: trains on the CPU, {os.cpu_count()} cores")


def clock() -> Iterator[Finding]:
    """Check that wall clock and monotonic clock agree; report the date for a person to check."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(2 * JUMP_SECONDS)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    now = datetime.now(UTC)
    if drift > JUMP_SECONDS:
        text = f"the clock jumped by {drift:.2f} s during the check: check its synchronisation (NTP)"
        yield Finding("clock", "problem", text)
    else:
        yield Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC; is that right?")
