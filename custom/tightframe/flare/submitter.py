"""Verification of a job's manifest at a site, and with it of its submitter, without trusting the server.

A deployed app's manifest is verified before any process of its job is started. The job's process verifies it
again and records its nonce: only there is the signature used up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import Policy
from tightframe.config.site import SiteEntry
from tightframe.errors import ManifestError
from tightframe.files import each_once
from tightframe.flare.identity import site_identity
from tightframe.securesum.identity import Anchor

CLIENT_FILE = "config/config_fed_client.json"
TAKEN_UP = "signed_jobs"
"""Folder in a site's lasting state that records the signed jobs it has accepted, one file per site."""


def signed_submitter(
    fl_ctx: FLContext, job: JobConfig, policy: Policy, anchor: Callable[[], Anchor], state_dir: Path
) -> str | None:
    """Return the provisioned name of the person who signed a production job, after verifying its manifest.

    None if the job has no manifest and the policy allows that.

    Args:
        job: the values that this site was given.
        policy: this site's.
        anchor: returns the project's root; called only if the job has, or must have, a manifest.
        state_dir: this site's lasting state.

    Raises:
        ManifestError: TF-633 to TF-637, if the manifest is missing or does not verify.
    """
    name, job_id = fl_ctx.get_identity_name(), fl_ctx.get_job_id()
    app = Path(fl_ctx.get_engine().get_workspace().get_app_dir(job_id))
    if not (policy.signed_jobs or os.path.lexists(app / job_manifest.PLACE)):
        return job_submitter(fl_ctx, production=True)
    now = datetime.now(UTC)
    manifest = job_manifest.verify(app, job, name, anchor(), now=now)
    job_manifest.take_up(manifest, job_id, state_dir / TAKEN_UP / f"{name}.jsonl", now=now)
    return manifest.signer


def job_submitter(fl_ctx: FLContext, *, production: bool) -> str | None:
    """Return the submitter's name of an unsigned job in a simulation; None in production.

    The name is the server's claim in the job's metadata, so production does not use it. Nor does it use the
    engine's signature, which covers each file by itself, so that files of two jobs can be mixed.

    Args:
        production: whether the engine runs in its secure mode.
    """
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    name = meta.get(JobMetaKey.SUBMITTER_NAME.value) if isinstance(meta, dict) else None
    return name if isinstance(name, str) and not production else None


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
    manifest = job_manifest.verify(app, _job(app), site, anchor, now=now)
    job_manifest.check_time(manifest, now=now)


def _job(app: Path) -> JobConfig:
    """Return the job in an app's configuration.

    Raises:
        ManifestError: TF-635, if the configuration does not have the one executor of an exported job.
        JobError: if the job's values are not valid.
    """
    try:
        values = json.loads((app / CLIENT_FILE).read_bytes(), object_pairs_hook=each_once)
        (executor,) = values["executors"]
        arguments: dict[str, Any] = dict(executor["executor"]["args"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ManifestError(
            f"Expected {CLIENT_FILE} to hold one executor with the job's values, but got something else: "
            f"{job_manifest.SIGN}.",
            code="TF-635",
        ) from None
    return parse_job(arguments)
