"""A job's values as they hold in a run: what it leaves out is what its method, data set and models take."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tightframe import models
from tightframe.rounds.setup import HEAD_OPTIONS, JobSetup, brings_head


def values(setup: JobSetup) -> dict[str, Any]:
    """The job's plain values with every option of its method, data set and models, defaults among them.

    For people to read: hashes are of what the job says itself. Options of a backbone's head are left out
    where the method replaces that.
    """
    job = setup.job
    whole = job.model_dump(mode="json")
    whole["method_options"] = _plain(setup.method.config, job.method_options)
    whole["dataset_options"] = _plain(setup.dataset.options, job.dataset_options)
    whole["model_options"] = _of_model(setup, job.model, job.model_options)
    for site, own in job.site_models.items():
        whole["site_models"][site]["model_options"] = _of_model(setup, own.model, own.model_options)
    return whole


def _of_model(setup: JobSetup, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    found = _plain(models.get(name).options, asked)
    unused = HEAD_OPTIONS if brings_head(setup.method, setup.setting) else ()
    return {key: value for key, value in found.items() if key not in unused}


def _plain(options: type[BaseModel], asked: dict[str, Any]) -> dict[str, Any]:
    return options.model_validate(asked).model_dump(mode="json")
