"""Who submitted a job, as far as a site can know it without the server's word."""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

ROOT_FILE = "rootCA.pem"


def job_submitter(fl_ctx: FLContext, *, production: bool) -> str | None:
    """The provisioned name of who submitted the job of a context; None if nobody can tell.

    A signed job names its signer, by a certificate that is held against the project's root here, at
    the site. The name in the job's metadata is the server's word: it counts in the simulator alone.

    Args:
        fl_ctx: of a task.
        production: whether the engine runs in its secure mode.
    """
    workspace = fl_ctx.get_engine().get_workspace()
    app = Path(workspace.get_app_dir(fl_ctx.get_job_id()))
    if (app / NVFLARE_SIG_FILE).is_file():
        root = workspace.get_file_path_in_startup(ROOT_FILE)
        valid, signers = verify_folder_signature_and_get_signers(str(app), root)
        names = {str(name) for name, *_ in signers}
        return names.pop() if valid and len(names) == 1 else None
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    name = meta.get(JobMetaKey.SUBMITTER_NAME.value) if isinstance(meta, dict) else None
    return name if isinstance(name, str) and not production else None
