"""Verification of a deployed app's manifest before any process of its job is started.

The job's process verifies the manifest again and records its nonce: only there is the signature used up.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.errors import ManifestError
from tightframe.flare.identity import site_identity

CLIENT_FILE = "config/config_fed_client.json"


def verify_app(app: Path, site: str, startup: Path, entry: SiteEntry) -> None:
    """Refuse an app whose manifest does not verify at a site, if it has one or the policy requires one.

    Args:
        app: the app's folder, unpacked.
        startup: the kit's ``startup`` folder, which holds the project's root.
        entry: the site's configuration.

    Raises:
        ManifestError: TF-633 to TF-636, as ``config.job_manifest``. No nonce is recorded.
        JobError: if the job's values are not valid.
        SiteConfigError: TF-615, if the kit is not valid.
    """
    policy = entry.policy.resolve(production=True)
    if not (policy.signed_jobs or os.path.lexists(app / job_manifest.PLACE)):
        return
    job_manifest.read(app)  # first, so that an unsigned job is refused as unsigned, whatever its values
    _, anchor = site_identity(startup, site, production=True, missing_role=policy.central_provisioning)
    now = datetime.now(UTC)
    made = job_manifest.verify(app, _job(app), site, anchor, now=now)
    job_manifest.check_time(made, now=now)


def _job(app: Path) -> JobConfig:
    """Return the job in an app's configuration.

    Raises:
        ManifestError: TF-635, if the configuration does not have the one executor of an exported job.
        JobError: if the job's values are not valid.
    """
    try:
        values = json.loads((app / CLIENT_FILE).read_bytes())
        (executor,) = values["executors"]
        arguments: dict[str, Any] = dict(executor["executor"]["args"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ManifestError(
            f"Expected {CLIENT_FILE} to hold one executor with the job's values, but got something else: "
            f"{job_manifest.SIGN}.",
            code="TF-635",
        ) from None
    return parse_job(arguments)
