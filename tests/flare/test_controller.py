"""Where the controller looks, on the engine's own workspace, and what it says before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, SiteType
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from tightframe.flare.controller import (
    WARM,
    FederationController,
    ended_jobs,
    roster_mismatches,
    stopped_run,
)
from tightframe.flare.monitoring import consoles as monitor
from tightframe_app.federation.kits import server_resources
from tightframe_app.jobs.folders import CHECKPOINT_FILE


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


def test_the_folder_of_ended_jobs_is_the_one_that_the_servers_kit_names(tmp_path: Path) -> None:
    class Folders:
        def get_site_config_dir(self) -> str:
            return str(tmp_path)

    assert ended_jobs(Folders()) is None
    made = tmp_path / "resources.json"
    made.write_text(json.dumps(server_resources(Path("/var/lib/kept"))))
    assert ended_jobs(Folders()) == Path("/var/lib/kept/jobs")
    for other in ("{", "[]", '{"components": [{"id": "job_manager"}]}', '{"components": []}'):
        made.write_text(other)
        assert ended_jobs(Folders()) is None


def test_sites_without_a_client_and_clients_beside_the_sites_are_named() -> None:
    roster = ["hospital-1", "hospital-2", "hospital-9"]
    assert roster_mismatches(roster, roster) == []
    missing, unlisted = roster_mismatches(roster, ["hospital-2", "hospital-1", "hospital-4"])
    assert "no client for the job's sites hospital-9: not connected" in missing
    assert "also sent to hospital-4, not in `sites`" in unlisted


def test_a_run_begins_with_them_in_the_servers_log(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the controller itself, whose run is aborted while it waits for the silos."""
    monkeypatch.setenv(WARM[0], "")  # so that what the controller sets is taken back
    monkeypatch.delenv(WARM[0])
    signal, panics = Signal(), list[str]()
    controller = FederationController(**small, summation="plain")
    monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: panics.append(reason))
    monkeypatch.setattr(controller, "send", lambda **_: signal.trigger(True))
    monkeypatch.setattr(controller, "cancel_task", lambda *_, **__: None)
    engine = SimpleNamespace(
        get_workspace=lambda: SimpleNamespace(
            get_run_dir=lambda job_id: str(tmp_path),
            get_app_dir=lambda job_id: str(tmp_path),
            get_site_config_dir=lambda: str(tmp_path),
        ),
        get_clients=lambda: [Client("site-1", ""), Client("site-2", ""), Client("site-7", "")],
        register_app_command=lambda *_: None,
    )
    monkeypatch.setattr(monitor, "_with_engine", [])
    context = FLContextManager(engine, "server", "a-job", {}, {}).new_context()  # type: ignore[arg-type]
    context.set_prop(FLContextKey.SECURE_MODE, False, private=True, sticky=True)
    controller.start_controller(context)
    controller.control_flow(signal, context)
    controller.stop_controller(context)
    assert "no client for the job's sites site-3:" in caplog.text
    assert "also sent to site-7, not in `sites`" in caplog.text
    (reason,) = panics
    assert reason.startswith("TF-504")
