"""All silos in one process: for tests, benchmarks and notebooks.

A thin transport; everything else is what the engine runs too, so that a run here equals a run
through NVFlare bit for bit (same seeds, same thread setting).
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tightframe import methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.base import SiloData
from tightframe.errors import JobError, TightframeError
from tightframe.phases import Method
from tightframe.rounds import outcome
from tightframe.rounds.context import SiloContext
from tightframe.rounds.coordinator import Accept, Coordinator, Message, Result
from tightframe.rounds.identity import simulated_anchor, simulated_identity
from tightframe.rounds.secure.server import ServerIdentity
from tightframe.rounds.setup import prepare, set_threads
from tightframe.rounds.silo import SiloSession, failure_code


class LocalTransport:
    """Hands each request to its session, one after the other, in roster order."""

    def __init__(self, sessions: Mapping[str, SiloSession], log: logging.Logger) -> None:
        self._sessions = sessions
        self._log = log

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """See ``rounds.coordinator.Transport``."""
        failed: dict[str, str] = {}
        for site in sorted(requests):
            try:
                accept(site, self._sessions[site].handle(task, requests[site]))
            except TightframeError as error:
                self._log.error("%s: %s", site, error)
                failed[site] = failure_code(error)
            except Exception as error:
                # As through the engine: one silo's own error is its own, and only a code leaves it.
                self._log.exception("%s: the task %s failed", site, task)
                failed[site] = failure_code(error)
        return failed


def run(
    method: str | Method,
    silos: Mapping[str, SiloData] | Sequence[str],
    rounds: int,
    *,
    dataset: str,
    model: str = "small_cnn",
    summation: str = "secure",
    min_sites: int | None = None,
    folder: Path | None = None,
    on_round: Callable[[outcome.Row], None] | None = None,
    **job_values: Any,
) -> Result:
    """Train one model over several silos in this process.

    A first look takes half a minute (at the data set's own 200 px it takes far longer)::

        result = run("fedmr", ["a", "b", "c"], 2, dataset="fed_isic2019",
                     dataset_options={"image_size": 48}, training={"epochs": 2, "batch_size": 16})
        result.outcome.rows[-2].as_json()["balanced_accuracy"]    # of the last model
        result.state.model                                        # its tensors by name

    Args:
        method: a registered method or its name.
        silos: name -> records; or names alone, which then get the data set's synthetic twin.
        rounds: training rounds.
        dataset: a registered data set: class names, input shape, and the twin.
        model: a registered backbone.
        summation: ``secure`` (three silos or more), or ``plain``.
        min_sites: fewer contributions end the run; all by default.
        folder: where results go; a temporary folder by default, removed afterwards.
        on_round: called with each finished exchange.
        **job_values: other keys of ``config.job.JobConfig``, for example ``seed=1`` or
            ``training={"epochs": 2}``.

    Returns:
        The final server state and the outcome with a row of metrics for each round.

    Raises:
        JobError: listing everything that is wrong with the values.
        RunError: if fewer than ``min_sites`` silos contribute.
    """
    name = method if isinstance(method, str) else method.name
    if isinstance(method, Method) and methods.get(name) is not method:
        raise JobError(
            [f"Expected a registered method, but {name!r} is another one: add yours to `methods.METHODS`"]
        )
    job = parse_job(
        {
            "job_name": f"{name}-in-process",
            "method": name,
            "dataset": dataset,
            "model": model,
            "sites": sorted(silos),
            "min_sites": len(silos) if min_sites is None else min_sites,
            "rounds": rounds,
            "summation": summation,
            **job_values,
        }
    )
    data = silos if isinstance(silos, Mapping) else None
    return run_job(job, data=data, folder=folder, on_round=on_round)


def run_job(
    job: JobConfig,
    *,
    data: Mapping[str, SiloData] | None = None,
    entries: Mapping[str, SiteEntry] | None = None,
    folder: Path | None = None,
    initial_model: str | None = None,
    on_round: Callable[[outcome.Row], None] | None = None,
) -> Result:
    """Run a whole job in this process.

    Args:
        job: validated job.
        data: records by silo, already opened.
        entries: site configurations by silo; a silo with neither gets the synthetic twin.
        folder: results of the server, and of each silo in a folder of its name.
        initial_model: safetensors file of a pretrained start.
        on_round: called with each finished exchange.

    Raises:
        JobError, RunError: see ``run``.
    """
    folder = None if folder is None else Path(folder)  # a notebook's user writes text
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="tightframe-") as temporary:
            return run_job(
                job,
                data=data,
                entries=entries,
                folder=Path(temporary),
                initial_model=initial_model,
                on_round=on_round,
            )
    setup = prepare(job)
    set_threads(job.threads)
    log = logging.getLogger("tightframe.run")
    job_id = f"in-process-{secrets.token_hex(8)}"  # so that no run takes another's journal for its own
    sessions = {
        site: SiloSession(
            SiloContext(
                site,
                job,
                (entries or {}).get(site),
                run_dir=folder / site,
                records=(data or {}).get(site),
                job_id=job_id,
                identity=partial(simulated_identity, job_id, site, production=False),
            )
        )
        for site in job.roster
    }
    coordinator = Coordinator(
        setup,
        folder / "server",
        identity=ServerIdentity(job_id, simulated_anchor(job_id, production=False), simulated=True),
        initial_model=initial_model,
        on_round=on_round,
    )
    return coordinator.run(LocalTransport(sessions, log))
