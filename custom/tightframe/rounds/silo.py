"""The silo's half of a run: enrol, contribute, close; whatever carries the messages.

Messages are plain values and bytes. Everything that fails has a code, which may leave the silo;
the details stay in the silo's own log. Torch is imported by the tasks that train, not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe import __version__
from tightframe.data.base import SiloData, class_counts, count_table
from tightframe.errors import JobError, RunError, TightframeError
from tightframe.rounds.job import JobConfig
from tightframe.rounds.site import SiteEntry, dataset_of, open_data

if TYPE_CHECKING:
    from tightframe.rounds.contribution import Contributor

Message = dict[str, Any]

TASKS = ("enroll", "contribute")


class SiloSession:
    """One silo in one job. Holds nothing between tasks that a new process could not rebuild.

    Args:
        name: the silo's provisioned name.
        job: the job that this silo was given; compared with the server's.
        entry: the site's own configuration; None means the simulator's synthetic twin.
        run_dir: the job's folder at this silo; the final model and the report go there.
        data: the records, if the caller has opened them already.
        stopped: tells that the run was aborted.
    """

    def __init__(
        self,
        name: str,
        job: JobConfig,
        *,
        entry: SiteEntry | None,
        run_dir: Path,
        data: SiloData | None = None,
        stopped: Callable[[], bool] = lambda: False,
        log: logging.Logger | None = None,
    ) -> None:
        if name not in job.sites:
            raise JobError([f"this silo is {name}, but the job is for {list(job.roster)}"])
        self.name = name
        self.job = job
        self.entry = entry
        self.run_dir = run_dir
        self.stopped = stopped
        self.log = log or logging.getLogger(f"tightframe.silo.{name}")
        self._data = data
        self._contributor: Contributor | None = None

    @property
    def data(self) -> SiloData:
        """The silo's records, opened on first use."""
        if self._data is None:
            self._data = open_data(self.job, self.name, self.entry)
        return self._data

    def handle(self, task: str, message: Message) -> Message:
        """Answer one task.

        Raises:
            TightframeError: named; its code is what the server may learn.
        """
        if task == "enroll":
            return self._enroll(message)
        if task == "contribute":
            return self._contribute(message)
        raise RunError(f"Expected a task of {list(TASKS)}, but got {task!r}.", code="TF-505")

    def _enroll(self, message: Message) -> Message:
        """Check job, configuration and every record; answer with the public weight."""
        self._check_job(message)
        data = self.data
        self.log.info("%s: checking the records of %s", self.name, data.source)
        data.check(lambda text: self.log.info("%s: %s", self.name, text))
        spec, _ = dataset_of(self.job)
        labels = data.labels("train")
        counts = class_counts(labels, spec.num_classes)
        self.log.info(
            "%s: %d training, %d validation and %d test records of %s (training: %s)",
            self.name,
            len(labels),
            len(data.labels("validation")),
            len(data.labels("test")),
            data.source,
            count_table(dict(zip(spec.class_names, counts.tolist(), strict=True))),
        )
        return {"weight": public_weight(len(labels), self.job.weights), "synthetic": data.synthetic}

    def _contribute(self, message: Message) -> Message:
        if self._contributor is None:
            # Imports torch, which costs seconds: only tasks that train pay for it.
            from tightframe.rounds.contribution import Contributor

            self._contributor = Contributor(self)
        return self._contributor.contribute(message)

    def _check_job(self, message: Message) -> None:
        mine, theirs = self.job.sha256(), message.get("job_sha256")
        if mine != theirs:
            raise RunError(
                f"Expected the server to run this silo's job (SHA-256 {mine}), but it runs {theirs}: "
                "every site must get the same exported job folder.",
                code="TF-505",
            )
        if message.get("version") != __version__:
            raise RunError(
                f"Expected tightframe {__version__} at the server, but it has {message.get('version')}: "
                "install the same version everywhere.",
                code="TF-505",
            )


def public_weight(records: int, how: str) -> float:
    """The weight that the silo makes public: exact count, power-of-two bucket, or uniform.

    >>> public_weight(300, "exact"), public_weight(300, "power_of_two"), public_weight(300, "uniform")
    (300.0, 256.0, 1.0)
    """
    if how == "uniform":
        return 1.0
    if how == "power_of_two":
        return float(2 ** (max(records, 1).bit_length() - 1))
    return float(records)


def failure_code(error: BaseException) -> str:
    """What may be said outside of an error: its code; TF-503 for anything unnamed."""
    return error.code if isinstance(error, TightframeError) else "TF-503"


def guarded(batches: Iterator[Any], stopped: Callable[[], bool]) -> Iterator[Any]:
    """The same batches, ended by TF-504 as soon as the run is aborted."""
    for batch in batches:
        if stopped():
            raise RunError("the run was aborted during local training.", code="TF-504")
        yield batch
