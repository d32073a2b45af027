"""A job folder as what the engine's environments of recipes (``SimEnv``, ``PocEnv``, ``ProdEnv``) deploy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nvflare.job_config.api import FedJob
from nvflare.recipe import Run, SimEnv
from nvflare.recipe.spec import ExecEnv, _peek_recipe_args

from tightframe.errors import JobError
from tightframe.flare.simulation import simulator


class FolderJob(FedJob):
    """A job whose folder is written by us, file for file, and not generated from components by the engine."""

    def __init__(
        self, name: str, sites: Sequence[str], min_sites: int, write: Callable[[Path], None]
    ) -> None:
        super().__init__(name=name, min_clients=min_sites)
        self._sites = tuple(sites)
        self._write = write

    def export_job(self, job_root: str) -> None:
        """Write the job into ``job_root/NAME``, from where the engine's session submits it."""
        self._write(Path(job_root, self.name))

    def simulator_run(self, workspace: str, *args: Any, threads: int | None = None, **options: Any) -> int:
        """Run the job as ``tightframe simulate`` does; return its exit code, 3 if nothing was trained."""
        with TemporaryDirectory(prefix="tightframe-") as folder:
            self.export_job(folder)
            command = [
                sys.executable,
                "-m",
                simulator.__name__,
                str(Path(folder, self.name)),
            ]
            command += ["-w", workspace, "-t", str(threads or len(self._sites))]
            command += ["--gpu", options["gpu"]] if options.get("gpu") else []
            command += ["-l", options["log_config"]] if options.get("log_config") else []
            return simulator.run_apart(command)

    def deploy(self, env: ExecEnv) -> Run:
        """Hand the job to an environment; with the engine's ``--export`` on the command line only write it.

        Raises:
            SystemExit: with 0, after an export.
            JobError: if the clients of a simulation are not the silos of the job.
            FileExistsError: if a simulation's workspace is something else, which the engine would wipe.
        """
        exports, folder = _peek_recipe_args()
        if exports:
            self.export_job(folder)
            sys.stdout.write(f"Job exported to: {Path(folder, self.name)}\n")
            raise SystemExit(0)
        if isinstance(env, SimEnv):
            clients = env.clients or [f"site-{number}" for number in range(1, env.num_clients + 1)]
            if sorted(clients) != sorted(self._sites):
                raise JobError(
                    [
                        f"sites: Expected the clients of SimEnv to be the job's, {sorted(self._sites)}, but "
                        f"got {sorted(clients)}: SimEnv(clients=[...]) names them"
                    ]
                )
            # Before SimEnv, which installs the engine's own, far wider, list of classes where none is.
            workspace = Path(env.workspace_root, self.name)
            simulator.check_workspace(workspace)
            simulator.prepare_workspace(workspace)
        return Run(env, env.deploy(self))
