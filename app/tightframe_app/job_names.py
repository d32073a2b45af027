"""What people call the jobs that a site keeps a folder of."""

from __future__ import annotations

import json
from pathlib import Path

LONGEST = 300
"""Characters of a name."""


def job_name(folder: Path, site: str) -> str | None:
    """Return the name in a job's folder at a site, and whether it is a withdrawal; None if there is none."""
    try:
        path = folder / f"app_{site}" / "config" / "config_fed_client.json"
        (executor,) = json.loads(path.read_bytes())["executors"]
        values = executor["executor"]["args"]
        name = str(values["job_name"])[:LONGEST]
        return f"{name}, a withdrawal" if values.get("withdraw") else name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def with_id(job: str, folder: Path | None, site: str) -> str:
    """Return a job's name with its id, ``name (id)``; the id alone where no folder has the name."""
    name = None if folder is None else job_name(folder, site)
    return f"{name} ({job})" if name else job
