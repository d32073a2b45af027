"""Where the controller looks, on the engine's own workspace."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvflare.apis.fl_constant import SiteType
from nvflare.apis.workspace import Workspace

from tightframe.flare.controller import stopped_run
from tightframe_app.job_folders import CHECKPOINT_FILE


@pytest.mark.parametrize("config_folder", ["config", ""], ids=["simulator", "production"])
def test_the_checkpoint_of_a_resumed_job_is_found_where_the_job_brought_it(
    tmp_path: Path, config_folder: str
) -> None:
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    workspace = Workspace(str(tmp_path), SiteType.SERVER, config_folder)
    # The engine unpacks a job's app for a site as `app_SITE` in the job's own folder.
    brought = Path(workspace.get_run_dir("a-job")) / CHECKPOINT_FILE
    brought.parent.mkdir(parents=True)
    brought.touch()
    assert stopped_run(workspace, "a-job") == brought
    assert stopped_run(workspace, "a-job").is_file()
