"""Who submitted a job, as far as a site can know it without the server's word."""

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
"""Folder of a site's lasting state: the signatures of jobs that it has taken up, by site."""


def signed_submitter(
    fl_ctx: FLContext, job: JobConfig, policy: Policy, anchor: Callable[[], Anchor], state_dir: Path
) -> str | None:
    """The provisioned name of who signed the job of a context, in production.

    That is the manifest's signer, and the manifest must hold. Without one, where the policy allows that, it
    is nobody.

    Args:
        fl_ctx: of a task.
        job: whose values this site was given.
        policy: this site's.
        anchor: gives the project's root; asked for where there is, or must be, a manifest.
        state_dir: this site's lasting state.

    Raises:
        ManifestError: TF-633 to TF-637.
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
    """The name of who submitted an unsigned job, as far as that can be believed; None if nobody can tell.

    It is the server's word, in the job's metadata, and counts in the simulator alone. Nor does the engine's
    signature count in production: it is of each file by itself, so that files of two jobs can be mixed.

    Args:
        fl_ctx: of a task.
        production: whether the engine runs in its secure mode.
    """
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    name = meta.get(JobMetaKey.SUBMITTER_NAME.value) if isinstance(meta, dict) else None
    return name if isinstance(name, str) and not production else None
