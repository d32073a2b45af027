"""What a silo's tasks share: its name, job, configuration, folders and records."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tightframe.config.job import JobConfig
from tightframe.config.policy import Policy
from tightframe.config.site import SiteEntry, open_data
from tightframe.data.base import SiloData
from tightframe.files import write_atomically
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.results.files import TRANSCRIPT, WritePage
from tightframe.rounds.lasting import KIT_HEAD, Lasting, Places, lasting_journal
from tightframe.securesum.identity import Anchor, Signer

__all__ = ["DECLARATION", "SALT", "STATE", "Message", "SiloContext", "lasting_journal"]

STATE = "silo_state"
COMMITTED, EARLIER, PROPOSED = "committed.safetensors", "earlier.safetensors", "proposed.safetensors"
DECLARATION = "declaration.json"
SALT = "salt"
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
        previous_state: the ``state_folder`` of the job that this one continues, if it does.
        records: the silo's records, if the caller has opened them already.
        job_id: the run's id, as engine and silos know it.
        submitter: who submitted the job, where that is known.
        production: whether the engine runs in secure mode, with provisioned identities.
        memory_only: keep the secrets of the secure sum in memory. False only in the simulator, whose
            silos are one process a task.
        journal_dir: folder of the lock of the site's secure sums, which outlives runs in production.
        ledger_dir: folder of the ledger: the site's lasting state in production; by default among this run's
            own.
        kit: the startup kit's own folder, where a copy of the ledger's head is kept in production.
        identity: gives the silo's signer and what it trusts; asked for when secure sums need it.
        write_page: makes the page of the silo's own report; without it there is none.
        at_work: told what the silo does, and how many batches of how many are done; for who watches.
        stopped: tells that the run was aborted.
        log: the silo's own log.
    """

    name: str
    job: JobConfig
    entry: SiteEntry | None
    run_dir: Path
    state_dir: Path | None = None
    previous_state: Path | None = None
    records: SiloData | None = None
    job_id: str = ""
    submitter: str | None = None
    production: bool = False
    memory_only: bool = True
    journal_dir: Path | None = None
    ledger_dir: Path | None = None
    kit: Path | None = None
    identity: Callable[[], tuple[Signer, Anchor]] | None = None
    write_page: WritePage | None = None
    at_work: Callable[[str, int, int], None] = lambda what, done, of: None
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
    def policy(self) -> Policy:
        """The site's rules."""
        return self.site.policy.resolve(production=self.production)

    def untold_folds(self) -> tuple[Literal["validation", "test"], ...]:
        """The folds that this silo leaves out of exact evaluations: too few records, by its policy."""
        if self.job.privacy is not None:
            return ()
        folds: tuple[Literal["validation", "test"], ...] = ("validation", "test")
        return tuple(fold for fold in folds if len(self.data.labels(fold)) < self.policy.min_test_count)

    def salt(self) -> tuple[str, ...]:
        """What keys this silo's random streams beside the job's seed: nothing but in production.

        There it is a secret of this job at this silo, so that no other job repeats its updates.
        """
        if not self.production:
            return ()
        path = self.state_folder / SALT
        if not path.is_file():
            write_atomically(path, secrets.token_hex(16).encode(), mode=0o600)
        return (path.read_text(encoding="ascii"),)

    @property
    def state_folder(self) -> Path:
        """Where the silo's own state lies."""
        return (self.state_dir or self.run_dir) / STATE

    @property
    def secure_folder(self) -> Path:
        """Where this run's part of the secure sum lies: the transcript, and the simulator's secrets."""
        return (self.state_dir or self.run_dir) / "secure_sum"

    @property
    def transcript(self) -> Path:
        """This silo's own view of the run's secure sums; in production it outlives the run's folder."""
        return (self.state_dir or self.run_dir) / TRANSCRIPT

    @property
    def places(self) -> Places:
        """Where what this silo must remember of its sums lies."""
        lasting = self.ledger_dir if self.production else None
        # A simulated site is one for one job: it could not check what it signed under the root of another.
        memory = self.ledger_dir or self.secure_folder / (self.job_id or "run")
        return Places(
            self.name,
            ledger_path(memory, self.name),
            self.journal_dir or self.secure_folder,
            lasting,
            None if lasting is None or self.kit is None else self.kit / KIT_HEAD,
        )

    @cached_property
    def lasting(self) -> Lasting:
        """Opens the ledger of that memory; what it has checked once, it need not check again."""
        return Lasting(self.places, self.site, self.identity, self.log)
