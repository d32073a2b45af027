"""What a silo's tasks share: its name, job, configuration, folders and records."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightframe.config.job import JobConfig
from tightframe.config.site import SiteEntry, open_data
from tightframe.data.base import SiloData

Message = dict[str, Any]
"""What travels: plain values and bytes."""


@dataclass
class SiloContext:
    """One silo in one run. Holds nothing that a new process could not rebuild.

    Attributes:
        name: the silo's provisioned name.
        job: the job that this silo was given; compared with the server's at enrolment.
        entry: the site's own configuration; None means the simulator's synthetic twin.
        run_dir: the run's folder at this silo: final model, report.
        state_dir: folder of the silo's own state, this run's alone; in ``run_dir`` by default.
        records: the silo's records, if the caller has opened them already.
        stopped: tells that the run was aborted.
        log: the silo's own log.
    """

    name: str
    job: JobConfig
    entry: SiteEntry | None
    run_dir: Path
    state_dir: Path | None = None
    records: SiloData | None = None
    stopped: Callable[[], bool] = lambda: False
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("tightframe.silo"))

    @property
    def data(self) -> SiloData:
        """The silo's records, opened on first use.

        Raises:
            SiteConfigError, DataError: see ``config.site.open_data``.
        """
        if self.records is None:
            self.records = open_data(self.job, self.name, self.entry)
        return self.records

    @property
    def site(self) -> SiteEntry:
        """The site's configuration, defaults where the simulator has none."""
        return self.entry or SiteEntry()

    @property
    def state_folder(self) -> Path:
        """Where the silo's own state lies."""
        return (self.state_dir or self.run_dir) / "silo_state"
