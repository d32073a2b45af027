"""Jobs as recipes: ``Recipe(NAME, rounds=5, ...).execute(SimEnv(...))`` with NVFlare's environments.

The files are those of ``tightframe jobs export NAME``, byte for byte.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe.config.job import JobConfig
from tightframe.options import unknown_name
from tightframe.report.reading import ServerResults, only_run, read
from tightframe.results.files import ResultsError
from tightframe_app.jobs import folders
from tightframe_app.jobs import recipes as named

if TYPE_CHECKING:
    from nvflare.recipe import Run
    from nvflare.recipe.spec import ExecEnv


class Recipe:
    """A named job, with values changed by keyword, to execute in an environment of NVFlare.

    Keywords are the values of ``config.job.JobConfig``; a block such as ``training`` is a dictionary of the
    values to change.

    Args:
        name: of ``tightframe jobs list``.
        preset: ``rehearsal`` or ``full``.

    Raises:
        JobError: listing every problem.
        KeyError: if no job has the name.
        TypeError: for an unknown keyword.
    """

    def __init__(self, name: str, /, preset: str = "rehearsal", **values: Any) -> None:
        for key in values:
            if key not in JobConfig.model_fields:
                raise TypeError(unknown_name("job value", key, list(JobConfig.model_fields)))
        sites = values.pop("sites", None)
        changes: dict[str, Any] = {}
        for key, value in values.items():
            # A silo's name may contain a dot, which would separate a block from its key.
            block = isinstance(value, dict) and value and key != "site_models"
            changes |= {f"{key}.{part}": item for part, item in value.items()} if block else {key: value}
        job = named.get(name).job(preset, sites=sites, changes=changes)
        self.job = named.for_production(job, values)
        self._gpus = int(preset == "full")

    def export(self, folder: Path) -> None:
        """Write the job folder."""
        folders.write_job(folders.job_files(self.job, gpus=self._gpus), folder)

    def execute(self, env: ExecEnv) -> Run:
        """Run the job in an environment, or submit it there; return NVFlare's ``Run``.

        Production sites take signed jobs only: export, ``tightframe jobs sign`` and submit there.
        """
        from tightframe.flare.recipe_job import FolderJob

        return FolderJob(self.job.job_name, self.job.sites, self.job.min_sites, self.export).deploy(env)


def results(folder: str | Path) -> ServerResults:
    """Return the server's results below a folder, such as that of ``Run.get_result``.

    Raises:
        ResultsError: if it has none, or those of several runs.
    """
    loaded = read(only_run(Path(folder)))
    if not isinstance(loaded, ServerResults):
        raise ResultsError(f"Expected a server's results in {folder}, but got a silo's.", code="TF-801")
    return loaded


def _signature() -> inspect.Signature:
    """Return the signature with all values of a job, from its model."""
    fixed = list(inspect.signature(Recipe.__init__, eval_str=False).parameters.values())[1:3]
    return inspect.Signature(
        fixed
        + [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=field.annotation)
            for key, field in JobConfig.model_fields.items()
        ]
    )


Recipe.__signature__ = _signature()  # type: ignore[attr-defined]
