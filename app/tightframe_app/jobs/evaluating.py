"""Export of the job that evaluates a finished model, of a run or from a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightframe.config.job import JobConfig
from tightframe.data.contract import Contract
from tightframe.errors import JobError
from tightframe.files import quoted
from tightframe.inference.model import load_model
from tightframe.models.pretrained import read_weights
from tightframe.results.files import PERSONAL
from tightframe.rounds.run_state import start_state
from tightframe.rounds.setup import prepare
from tightframe_app.jobs import recipes
from tightframe_app.jobs.folders import prepared

NOT_OF_IT = (
    *("resume", "withdraw", "start", "personalise", "local_baseline_epochs", "site_models"),
    *("sites_per_round", "prototype_sites"),
)
"""Values of a training run that its evaluation lacks."""
ENDING = "-evaluation"
LONGEST = 63


@dataclass(frozen=True)
class Evaluation:
    """A job that evaluates a model.

    Attributes:
        job: validated.
        title: in one line.
    """

    job: JobConfig
    model: Path
    title: str

    def lines(self, folder: Path) -> list[str]:
        """Describe the written folder, and how to run it."""
        job = self.job
        noise = "exact" if job.privacy is None else f"noisy, epsilon {job.privacy.epsilon:g}"
        return [
            f"{folder}: evaluation of {self.title}, {noise}, over {', '.join(job.roster)}; no training",
            f"the model: SHA-256 {job.initial_model_sha256}",
            *named_model(self.model.absolute(), folder),
        ]


def named_model(model: Path, folder: Path) -> list[str]:
    """Say where to name the file of a job's model, and how to run the job."""
    entry, where = json.dumps({"server": {"initial_model": str(model)}}), quoted(folder)
    return [
        "each hospital is asked for it first:  tightframe site model accept (TF-626)",
        f"name its file at the server, in local/tightframe.json or --site-config:  {entry}",
        f"run it here:  tightframe simulate {where} --site-config FILE",
        f"or at a federation:  tightframe jobs submit {where}",
    ]


def network(job: JobConfig, content: bytes | None = None) -> list[str]:
    """List the tensors of a job's initial model, and a table's inputs in order.

    Args:
        content: of the file; None if there is none yet.

    Raises:
        JobError: if the file does not fit the network, listing every difference.
    """
    setup = prepare(job)
    if content is not None:
        start_state(setup, content)
    tensors = setup.initial_state().model
    if setup.dataset.name != "table":
        return []
    shapes = (f"{name} ({', '.join(map(str, item.shape))})" for name, item in tensors.items())
    inputs = Contract.model_validate(job.dataset_options["contract"]).features
    return [
        f"the file's tensors: {', '.join(shapes)}",
        f"the network's inputs, in order: {', '.join(inputs)}",
    ]


def of_run(place: Path, sites: Sequence[str] | None, changes: Mapping[str, Any]) -> Evaluation:
    """Return the job that evaluates a run's global model.

    Args:
        place: as in ``tightframe.load_model``.
        sites: silos; those of the run by default.
        changes: dotted key -> value, for example ``{"privacy.epsilon": 2}``.

    Raises:
        ModelError: TF-821, TF-822 if there is no such model.
        JobError: if the model is a silo's own, or a value is wrong.
    """
    model = load_model(place)
    if model.path.name == PERSONAL:
        raise JobError([f"evaluate_only: {model.path} is a silo's personal model, which does not leave it"])
    ran = model.setup.job
    evaluation = from_job(ran, model.hash, sites or ran.sites, ran.normalisation or "batch", changes)
    title = f"{model.setup.method.title} on {model.setup.dataset.title} with {ran.models}"
    return Evaluation(evaluation, model.path, title)


def of_file(path: Path, job: JobConfig, changes: Mapping[str, Any]) -> Evaluation:
    """Return the job that evaluates a model from elsewhere.

    Args:
        path: safetensors file with the tensors of the job's network.
        job: with data set, network and silos.
        changes: as in ``of_run``.

    Raises:
        JobError: if the file does not fit the network, listing every difference.
    """
    content = read_weights(path)
    evaluation = from_job(
        job, hashlib.sha256(content).hexdigest(), job.sites, job.normalisation or "batch", changes
    )
    start_state(prepare(evaluation), content)  # refuses a file that does not fit
    return Evaluation(evaluation, path, f"{path.name} on {job.dataset} with {job.models}")


def from_job(
    job: JobConfig, sha256: str, sites: Sequence[str], normalisation: str, changes: Mapping[str, Any]
) -> JobConfig:
    """Return a training job's evaluation.

    Args:
        job: with the network and the data set.
        sha256: of the model's file.
        normalisation: of the network, see ``config.job.EvaluateOnly``.
        changes: as in ``of_run``.

    Raises:
        JobError: listing every problem.
    """
    values = {key: value for key, value in job.model_dump(mode="json").items() if key not in NOT_OF_IT}
    name = str(values["job_name"]).removesuffix(ENDING)
    values |= {
        "job_name": f"{name[: LONGEST - len(ENDING)]}{ENDING}",
        "rounds": 0,
        "sites": list(sites),
        "min_sites": recipes.minimum(len(sites)),
        "initial_model_sha256": sha256,
        "evaluate_only": {"normalisation": normalisation},
    }
    if values.get("encoder") == "random":
        values["encoder"] = "frozen"  # its weights are in the file
    for key, value in changes.items():
        recipes.set_value(values, key, value)
    if isinstance(values.get("privacy"), dict) and "privacy.evaluation" not in changes:
        values["privacy"] = {**values["privacy"], "evaluation": "noisy", "evaluations": 1}
    if values.get("privacy") is not None and "weights" not in changes:
        values["weights"] = "uniform"
    return prepared(json.loads(json.dumps(values)))
