"""NVFlare controller that runs every method; no method subclasses it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from tightframe.errors import TightframeError
from tightframe.files import waiting
from tightframe.flare import doors
from tightframe.flare.monitoring import consoles as monitor
from tightframe.flare.simulation import quickened, workspace
from tightframe.flare.transport import FlareTransport

WARM = ("NVFLARE_NVFLARE_DECOMPOSERS", "tightframe.flare.simulation.warm")
"""Environment variable that names a package for the engine to import early in a silo's process, and ours."""


def stopped_run(folders: Any, job_id: str) -> Path:
    """Return the path at which a resuming job carries the checkpoint of the run that it continues.

    It is ``app_server/config`` in the job's folder. In production too, although the engine there takes the
    app's folder itself for its configuration folder.
    """
    from tightframe.results.files import CHECKPOINT

    return Path(folders.get_app_dir(job_id)) / "config" / CHECKPOINT


def ended_jobs(folders: Any) -> Path | None:
    """Return the folder in which a production server keeps ended jobs; None if its kit does not say it.

    ``tightframe federation add-site`` writes it (``job_manager`` in the kit's ``resources.json``). The engine
    moves a job's results there when it ends, so that they no longer lie beside those of later jobs.
    """
    try:
        path = Path(folders.get_site_config_dir()) / "resources.json"
        components = json.loads(path.read_text(encoding="utf-8"))["components"]
        (root,) = [item["args"]["uri_root"] for item in components if item["id"] == "job_manager"]
        return Path(root)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def roster_mismatches(roster: Sequence[str], clients: Iterable[str]) -> list[str]:
    """Describe clients that do not match the job's roster; nothing if all do.

    Args:
        roster: the job's silos.
        clients: the sites at which the engine has started the job.
    """
    started = set(clients)
    mismatches = []
    if missing := [site for site in roster if site not in started]:
        mismatches.append(
            f"the engine has no client for the job's sites {', '.join(missing)}: not connected, not "
            "provisioned or misspelt; the job waits for them up to `fetch_timeout`"
        )
    if unlisted := sorted(started - set(roster)):
        mismatches.append(f"the job was also sent to {', '.join(unlisted)}, not in `sites`: they get no task")
    return mismatches


class FederationController(Controller):
    """Runs a job's rounds over NVFlare.

    The arguments are the values of ``config.job.JobConfig``; they are validated together before
    any task is sent, and every problem is named. When a run cannot go on, the controller panics
    and names the silos and codes, so that the engine's exit code shows the failure.
    """

    def __init__(self, **job: Any) -> None:
        super().__init__(task_check_period=0.1)
        # Here, and not as the run starts: the engine begins with the silos before that.
        quickened.run_side_by_side()
        quickened.shorten(quickened.SIMULATOR_PAUSES)
        self._values = job
        self._setup: Any = None
        self._entry: Any = None
        self._telemetry: Any = None
        self._run: Any = None  # set in simulations only

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Validate the job and the server's own file; end the run on an error, before any task is sent."""
        from tightframe.config.site import server_entry
        from tightframe.flare.monitoring.boards import Telemetry
        from tightframe.rounds.setup import prepare, set_threads

        if not fl_ctx.get_prop(FLContextKey.SECURE_MODE, True):
            os.environ.setdefault(*WARM)  # inherited by the processes that the simulator starts
        try:
            if fl_ctx.get_prop(FLContextKey.SECURE_MODE, True):
                doors.require("server")
            setup = prepare(self._values)
            if not fl_ctx.get_prop(FLContextKey.SECURE_MODE, True):
                run_dir = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
                self._run = workspace.Run(run_dir.parents[1], setup.job.job_name)
            set_threads(setup.job.threads)
            self._entry = server_entry(Path(fl_ctx.get_engine().get_workspace().get_site_config_dir()))
            self._telemetry = Telemetry(self, self._entry, setup.job.job_name, fl_ctx)
            self._setup = setup
        except TightframeError as error:
            self.system_panic(str(error), fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Enrol, train, close; panic with a named reason when that is not possible."""
        if self._setup is None:
            return
        from tightframe.report import writing
        from tightframe.rounds.server.coordinator import Coordinator

        folders = fl_ctx.get_engine().get_workspace()
        run_dir = Path(folders.get_run_dir(fl_ctx.get_job_id()))
        job, entry = self._setup.job, self._entry
        transport = FlareTransport(
            self,
            fl_ctx,
            abort_signal,
            site_timeout=job.site_timeout,
            fetch_timeout=job.fetch_timeout,
            log=self.logger,
            failed=lambda site, code, rules: coordinator.record.failed(site, code, rules),
            check=lambda: None if self._run is None else self._run.check(),
        )
        clients = [client.name for client in fl_ctx.get_engine().get_clients()]
        for mismatch in roster_mismatches(job.roster, clients):
            self.logger.warning("%s", mismatch)
        ended = ended_jobs(folders) if fl_ctx.get_prop(FLContextKey.SECURE_MODE, True) else None
        if job.withdraw is not None and ended is None and self._run is None:
            self.logger.warning(
                "the server's local/resources.json names no folder of ended jobs, so that models which "
                "continue from the run are not listed: make the kit ready by `tightframe federation add-site`"
            )
        try:
            coordinator = Coordinator(
                self._setup,
                run_dir,
                identity=self._identity(fl_ctx, folders, entry.central_provisioning),
                initial_model=entry.initial_model,
                job_id=fl_ctx.get_job_id(),
                stopped=stopped_run(folders, fl_ctx.get_job_id()),
                ended_jobs=ended,
                log=self.logger,
                write_page=writing.leave,
            )
            monitor.watch(fl_ctx.get_engine(), fl_ctx.get_job_id(), lambda: coordinator.record.status)
            self._telemetry.watch(coordinator.record)
            with waiting(bool(fl_ctx.get_prop(FLContextKey.SECURE_MODE, True))):
                coordinator.run(transport)
        except TightframeError as error:
            self.system_panic(str(error), fl_ctx)
        except Exception as error:
            self.logger.exception("the server stopped the run on an unexpected error")
            self.system_panic(f"TF-500: the server failed with {type(error).__name__}", fl_ctx)

    def _identity(self, fl_ctx: FLContext, folders: Any, central: bool) -> Any:
        """Return the run's id and certificate anchor for secure sums; None for plain sums."""
        from tightframe.flare.identity import server_anchor
        from tightframe.rounds.sums.simulated_identity import simulated_anchor
        from tightframe.rounds.sums.transcripts import ServerIdentity

        if self._setup.job.summation == "plain":
            return None
        production = bool(fl_ctx.get_prop(FLContextKey.SECURE_MODE, True))
        job_id = fl_ctx.get_job_id()
        if production:
            startup = Path(folders.get_startup_kit_dir())
            anchor = server_anchor(startup, production=True, missing_role=central)
        else:
            anchor = simulated_anchor(job_id, production=False)
        return ServerIdentity(job_id, anchor, simulated=not production)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Report the run's status to consoles that ask for statistics, and to the telemetry."""
        super().handle_event(event_type, fl_ctx)
        monitor.add_stats(event_type, fl_ctx)
        if self._telemetry is not None:
            self._telemetry.handle_event(event_type, fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Stop the run's status answers and telemetry, and release the simulation's workspace."""
        monitor.forget(fl_ctx.get_job_id())
        if self._telemetry is not None:
            self._telemetry.end()
        if self._run is not None:
            self._run.end()
