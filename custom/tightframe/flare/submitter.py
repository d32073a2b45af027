"""Identification of a job's submitter without trusting the server."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig
from tightframe.config.policy import Policy
from tightframe.securesum.identity import Anchor

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
