"""Export of the job that sums statistics of the sites' tables before any training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe.errors import JobError
from tightframe.files import quoted
from tightframe_app.jobs import pairs, recipes
from tightframe_app.jobs.folders import prepared

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig

SITES = ("site-1", "site-2", "site-3", "site-4")
LONGEST = 50


def of_contract(path: Path, sites: Sequence[str] | None, changes: Mapping[str, Any]) -> JobConfig:
    """Return the job that sums statistics by a contract.

    Args:
        path: of the contract, as ``tightframe data init`` writes it.
        sites: silos; four by default.
        changes: dotted key -> value, for example ``{"privacy.epsilon": 2}``.

    Raises:
        JobError: listing every problem of contract and values.
    """
    from tightframe.config.job import STATISTICS_METHOD, STATISTICS_MODEL

    contract = pairs.read_contract(path)
    if "picture" in contract:
        raise JobError(
            [
                f"{path}: statistics are of tables only, but this contract is of pictures; for a site's own "
                "pictures take `tightframe data describe`"
            ]
        )
    named = list(sites or SITES)
    title = re.sub(r"[^A-Za-z0-9]+", "_", str(contract["title"])).strip("_").lower()[:LONGEST]
    values: dict[str, Any] = {
        "job_name": f"statistics_{title}".rstrip("_"),
        "method": STATISTICS_METHOD,
        "dataset": "table",
        "dataset_options": {"contract": contract},
        "model": STATISTICS_MODEL,
        "sites": named,
        "min_sites": recipes.minimum(len(named)),
        "rounds": 0,
        "weights": "uniform",
        "statistics": {},
        "threads": 1,
        "site_timeout": 120,
    }
    for key, value in changes.items():
        recipes.set_value(values, key, value)
    if isinstance(values.get("privacy"), dict):
        # One release, of all silos: nothing is kept back for a second, and each share of noise is smaller.
        values["privacy"] = {"spare_rounds": 0, **values["privacy"]}
        if values.get("summation", "secure") == "secure":
            values.setdefault("whole_sums", True)
    return prepared(json.loads(json.dumps(values)))


def lines(job: JobConfig, folder: Path) -> list[str]:
    """Say what was written, and how it is run."""
    where = quoted(folder)
    noise = "exact" if job.privacy is None else f"noisy, epsilon {job.privacy.epsilon:g}"
    title = job.dataset_options["contract"]["title"]
    return [
        f"{folder}: statistics of {title}, {noise}, over {', '.join(job.roster)}; no training",
        f"run it here:  tightframe simulate {where} --site-config FILE",
        "  (without --site-config on generated records)",
        f"or at a federation:  tightframe jobs submit {where}",
    ]
