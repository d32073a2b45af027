"""All silos in one process: for tests, benchmarks and notebooks.

A thin transport; everything else is what the engine runs too, so that a run here equals a run
through NVFlare bit for bit (same seeds, same thread setting).
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tightframe import data as datasets
from tightframe import methods
from tightframe.config.job import JobConfig
from tightframe.config.refusals import BelowPolicyError, in_words
from tightframe.config.site import SiteEntry
from tightframe.data.base import DatasetSpec, SiloData
from tightframe.data.objects import from_objects, is_opened
from tightframe.errors import JobError, TightframeError, failure_code
from tightframe.files import waiting
from tightframe.learning.model_update import build_template
from tightframe.learning.own_loop import LocalTraining, TrainingLoop
from tightframe.models.own_modules import check_output, from_module
from tightframe.models.pretrained import read_weights
from tightframe.phases import Method
from tightframe.registry import OBJECT, Named, object_name, offering
from tightframe.report import writing
from tightframe.results.files import CHECKPOINT
from tightframe.results.rows import Row
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.server.coordinator import Coordinator, Result
from tightframe.rounds.setup import JobSetup, look_up, options_of, prepare, set_threads
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.state_files import STATE
from tightframe.rounds.sums.common import Accept, Failed
from tightframe.rounds.sums.simulated_identity import simulated_anchor, simulated_identity
from tightframe.rounds.sums.transcripts import ServerIdentity


class LocalTransport:
    """Hands each request to its session, one after the other, in roster order."""

    def __init__(
        self, sessions: Mapping[str, SiloSession], log: logging.Logger, failed: Failed | None = None
    ) -> None:
        self._sessions = sessions
        self._log = log
        self._failed = failed

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """See ``rounds.server.coordinator.Transport``."""
        failed: dict[str, str] = {}
        for site in sorted(requests):
            try:
                accept(site, self._sessions[site].handle(task, requests[site]))
            except TightframeError as error:
                self._log.error("%s: %s", site, error)
                failed[site] = failure_code(error)
                self._tell(site, failed[site], error)
            except Exception as error:
                # As through the engine: one silo's own error is its own, and only a code leaves it.
                self._log.exception("%s: the task %s failed", site, task)
                failed[site] = failure_code(error)
                self._tell(site, failed[site], error)
        return failed

    def _tell(self, site: str, code: str, error: Exception) -> None:
        if self._failed is not None:
            refusals = error.outside() if isinstance(error, BelowPolicyError) else None
            self._failed(site, code, in_words(refusals))


def run(
    method: str | Method,
    silos: Mapping[str, SiloData] | Mapping[str, Any] | Sequence[str],
    rounds: int,
    *,
    dataset: str | None = None,
    class_names: Sequence[str] | None = None,
    model: str | nn.Module = "small_cnn",
    training_loop: Callable[[LocalTraining], float] | None = None,
    summation: str = "secure",
    min_sites: int | None = None,
    folder: Path | None = None,
    on_round: Callable[[Row], None] | None = None,
    **job_values: Any,
) -> Result:
    """Train one model over several silos in this process.

    A first look takes half a minute (at the data set's own 200 px it takes far longer)::

        result = run("fedmr", ["a", "b", "c"], 2, dataset="fed_isic2019",
                     dataset_options={"image_size": 48}, training={"epochs": 2, "batch_size": 16})
        result.outcome.final().test.balanced_accuracy             # of the last model
        result.state.model                                        # its tensors by name

    Args:
        method: a registered method's name, or a ``Method``, registered or not.
        silos: name -> records, opened or as objects: ``(X, y)``, a torch data set, or one for each fold
            (``data.objects.from_objects``); or names alone, which then get the data set's synthetic twin.
        dataset: a registered data set: class names, input shape, and the twin. Records as objects need none.
        class_names: of records as objects without ``dataset``; by default the numbers of their labels.
        model: a registered backbone's name, or a module that returns logits (B, C) and is the start of the
            run; see ``models.own_modules`` for what it must have.
        training_loop: trains the model in place of our local loop (``learning.own_loop``); by default ours.
        summation: ``secure`` (three silos or more), or ``plain``.
        min_sites: fewer contributions end the run; all by default.
        folder: where results go; by default a temporary folder that is removed with the outcome.
        on_round: called with each finished exchange.
        **job_values: other keys of ``config.job.JobConfig``, for example ``seed=1`` or
            ``training={"epochs": 2}``.

    Returns:
        The final server state and the outcome with a row of metrics for each round.

    Raises:
        JobError: listing everything that is wrong: values, names and their options together.
        DataError: TF-206, TF-208, TF-212 or TF-213 for records as objects that do not fit.
        RunError: if fewer than ``min_sites`` silos contribute.

    The job calls objects ``object:NAME:NUMBER``, with a number of its own for each run: no other job has its
    hash, and no other process takes it or its model (TF-101).
    """
    own: list[Named] = []
    name = method if isinstance(method, str) else method.name
    asked = name
    if isinstance(method, Method) and not _is_registered(method):
        own.append(replace(method, name=object_name(name)))
        asked = own[-1].name
    data = silos if isinstance(silos, Mapping) else None
    if data and not all(map(is_opened, data.values())):
        spec, data = _records(data, dataset, class_names, job_values)
        own.append(spec)
        dataset = spec.name
    elif class_names is not None:
        raise JobError(["class_names: Expected them with records as objects only; the data set has its own"])
    elif dataset is None:
        raise JobError(["dataset: Expected the name of a data set, or records as objects such as (X, y)"])
    if isinstance(model, nn.Module):
        own.append(from_module(model, object_name(type(model).__name__)))
        model = own[-1].name
    if training_loop is not None:
        if "loop" in (values := dict(job_values.pop("training", None) or {})):
            raise JobError(["training.loop: Expected none with `training_loop`"])
        own.append(TrainingLoop(object_name(getattr(training_loop, "__name__", "loop")), training_loop))
        job_values["training"] = {**values, "loop": own[-1].name}
    with offering(own):
        setup = prepare(
            {
                "job_name": f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-in-process",
                "method": asked,
                "dataset": dataset,
                "model": model,
                "sites": sorted(silos),
                "min_sites": len(silos) if min_sites is None else min_sites,
                "rounds": rounds,
                "summation": summation,
                **job_values,
            }
        )
        if model.startswith(OBJECT):
            check_output(build_template(setup.setting), setup.setting.input_shape, setup.setting.num_classes)
        return _run(setup, data, None, folder, None, on_round)


def _is_registered(method: Method) -> bool:
    """Check whether a job that names this method gets this very object."""
    try:
        return methods.get(method.name) is method
    except JobError:
        return False


def _records(
    silos: Mapping[str, Any],
    dataset: str | None,
    class_names: Sequence[str] | None,
    job_values: dict[str, Any],
) -> tuple[DatasetSpec, Mapping[str, SiloData]]:
    """Return the data set of records as objects, which has a registered one's form if that is named."""
    if opened := sorted(site for site, records in silos.items() if is_opened(records)):
        raise JobError(
            [f"silos: Expected all records opened or all as objects, but only {opened} are opened"]
        )
    problems: list[str] = []
    options = job_values.pop("dataset_options", {})
    if dataset is None:
        if options:
            raise JobError(["dataset_options: Expected none for records as objects without `dataset`"])
        return from_objects(silos, object_name("records"), class_names=class_names)
    if class_names is not None:
        problems.append("class_names: Expected none with `dataset`, which has its own")
    spec = look_up(datasets.get, dataset, "dataset", problems)
    chosen = options_of(spec, "options", {"dataset_options": options}, "dataset_options", problems)
    if problems or chosen is None:
        raise JobError(problems or ["dataset_options: Expected a block of keys"])
    form = spec.of(chosen)
    return from_objects(
        silos,
        object_name(f"records_like_{dataset}"),
        class_names=form.class_names,
        input_shape=tuple(form.input_shape(chosen)),
    )


def run_job(
    job: JobConfig,
    *,
    data: Mapping[str, SiloData] | None = None,
    entries: Mapping[str, SiteEntry] | None = None,
    folder: Path | None = None,
    initial_model: str | None = None,
    on_round: Callable[[Row], None] | None = None,
    stopped: Path | None = None,
) -> Result:
    """Run a whole job in this process.

    Args:
        data: records by silo, already opened.
        entries: site configurations by silo; a silo with neither gets the synthetic twin.
        folder: results of the server, and of each silo in a folder of its name; by default a temporary
            one that is removed with the outcome.
        initial_model: safetensors file of a pretrained start; a job that does not name its SHA-256 gets it.
        on_round: called with each finished exchange.
        stopped: ``folder`` of the run that the job goes on with, if it does (``rounds.server.resume``).

    Raises:
        JobError, RunError: see ``run``.
    """
    if initial_model is not None and job.initial_model_sha256 is None:
        job = job.model_copy(
            update={"initial_model_sha256": hashlib.sha256(read_weights(initial_model)).hexdigest()}
        )
    return _run(prepare(job), data, entries, folder, initial_model, on_round, stopped)


@waiting(False)
def _run(
    setup: JobSetup,
    data: Mapping[str, SiloData] | None,
    entries: Mapping[str, SiteEntry] | None,
    folder: Path | None,
    initial_model: str | None,
    on_round: Callable[[Row], None] | None,
    stopped: Path | None = None,
) -> Result:
    """Run in a folder, or in a temporary one that lasts as long as the outcome does."""
    place = Path(tempfile.mkdtemp(prefix="tightframe-") if folder is None else folder)
    job, log = setup.job, logging.getLogger("tightframe.run")
    set_threads(job.threads)
    if set(job.sites) - {*(data or ()), *(entries or ())}:
        log.info(
            "silos without records get what %s has for them; for your own, hand over a mapping from silo "
            "names to opened records",
            setup.dataset.name,
        )
    job_id = f"in-process-{secrets.token_hex(8)}"  # so that no run takes another's journal for its own
    root_of = job.lineage(job_id)
    sessions = {
        site: SiloSession(
            SiloContext(
                site,
                job,
                (entries or {}).get(site),
                run_dir=place / site,
                previous_state=None if stopped is None else stopped / site / STATE,
                records=(data or {}).get(site),
                job_id=job_id,
                identity=partial(simulated_identity, root_of, site, production=False),
                write_page=writing.leave,
            )
        )
        for site in job.roster
    }
    coordinator = Coordinator(
        setup,
        place / "server",
        identity=ServerIdentity(job_id, simulated_anchor(root_of, production=False), True, root_of),
        initial_model=initial_model,
        stopped=None if stopped is None else stopped / "server" / CHECKPOINT,
        on_round=on_round,
        write_page=writing.leave,
    )
    coordinator.record.temporary = folder is None
    try:
        result = coordinator.run(LocalTransport(sessions, log, coordinator.record.failed))
    except BaseException:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        for session in sessions.values():
            session.end()
    if folder is None:
        # Not at once: the log has told where the files are, and a notebook's user goes and looks.
        weakref.finalize(result.outcome, shutil.rmtree, place, ignore_errors=True)
    return result
