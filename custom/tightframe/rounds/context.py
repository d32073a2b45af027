"""Context that all tasks of a silo share: its name, job, configuration, folders and records."""

from __future__ import annotations

import logging
import math
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tightframe.config.job import OWN_MODELS, JobConfig, Training
from tightframe.config.policy import Policy
from tightframe.config.site import SiteEntry, dataset_of, open_data
from tightframe.data.base import SiloData, class_patients, in_steps, own_labels, own_patients, too_few
from tightframe.data.content import Content, content_of
from tightframe.data.forms import TableForm
from tightframe.errors import DataError
from tightframe.files import write_atomically
from tightframe.phases import Fold, OwnRows
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.results.files import TRANSCRIPT, WritePage
from tightframe.rounds.declaration import EVALUATED, OWN
from tightframe.rounds.pace import Pace
from tightframe.rounds.site_ledger import KIT_HEAD, LedgerPaths, SiteLedger
from tightframe.rounds.state_files import FEATURES, PACE, SALT, SECURE_FOLDER, STATE
from tightframe.securesum.identity import Anchor, Signer

if TYPE_CHECKING:
    from tightframe.data.table.common_values import CommonPixels, CommonValues
    from tightframe.rounds.encoded import FeatureCache
    from tightframe.rounds.withdrawn_list import Withdrawn

NAMED = 8
"""Most columns that a warning names; it counts the rest."""
Message = dict[str, Any]
"""Content of a message: plain values and bytes."""
NEEDS_STATE = "needs_state"
"""Key of a silo's answer if it cannot compute the run's state: the server sends it, and asks again."""


@dataclass
class SiloContext:
    """One silo in one run; holds nothing that a new process could not rebuild.

    Attributes:
        name: the silo's provisioned name.
        job: the job as this silo received it; compared with the server's at enrolment.
        entry: the site's own configuration; None means the simulator's synthetic twin.
        run_dir: the run's folder at this silo: final model, report.
        state_dir: folder of the silo's own state in this run; in ``run_dir`` by default.
        previous_state: ``state_folder`` of the job that this one continues; None if it continues none.
        records: the silo's records, if the caller has opened them already.
        job_id: the run's id in the engine.
        submitter: name of the job's submitter, where it is known.
        production: whether the engine runs in secure mode, with provisioned identities.
        memory_only: keep the secrets of the secure sum in memory. False only in the simulator, where each
            task of a silo is a process of its own.
        journal_dir: folder of the lock of the site's secure sums, which outlives runs in production.
        ledger_dir: folder of the ledger, which outlives runs in production; a folder of this run by default.
        kit: the startup kit's folder, where a copy of the ledger's head is kept in production.
        identity: returns the silo's signer and trust anchor; called when secure sums need them.
        write_page: writes the page of the silo's own report; without it there is none.
        at_work: receives the silo's current step, the batches done and their total, for monitoring.
        stopped: returns True once the run is aborted.
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
        """Records of the silo, opened on first use; in a withdrawal those that stay.

        Raises:
            SiteConfigError, DataError: see ``config.site.open_data``.
            DataError, RunError: see ``rounds.withdrawn_list.Withdrawn``.
        """
        if self.records is None:
            self.records = open_data(self.job, self.name, self.entry)
        return self.records if self.job.withdraw is None else self.withdrawn.remaining

    @cached_property
    def withdrawn(self) -> Withdrawn:
        """Records that this silo withdraws, in a job with ``withdraw``."""
        from tightframe.rounds.withdrawn_list import Withdrawn

        if self.records is None:
            self.records = open_data(self.job, self.name, self.entry)
        return Withdrawn(self, self.records)

    @cached_property
    def before_withdrawal(self) -> SiloContext:
        """The same silo with the records of the run from which it withdraws some."""
        return replace(self, job=self.job.origin, records=self.withdrawn.before)

    @cached_property
    def content(self) -> Content | None:
        """Digest by which the ledger recognises the records; their source is read once more on first use."""
        return content_of(self.data)

    @property
    def has_rows(self) -> bool:
        """Check that records are rows of numbers, not pictures."""
        return len(self.input_shape) == 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a record's inputs."""
        spec, options = dataset_of(self.job)
        return spec.input_shape(options)

    def common(self, units: float = 0, *, rounded: bool = False) -> CommonValues | CommonPixels | None:
        """Return the values that exact sums replace in training records, so that no small group stands out.

        Args:
            units: number of records that is too few, too; of pictures 0 if no unit sees each pixel by itself.
            rounded: round that number up to a power of two, for a check whose result others see.
        """
        if self.job.privacy is not None or not (self.has_rows or units):
            return None
        from tightframe.data.table.common_values import common_in, common_pixels  # which import torch

        least = self.min_class_count
        threshold = max(least, math.ceil(units)) if least > 1 else least
        wide = 1 << (threshold - 1).bit_length() if rounded and threshold > least else threshold
        if wide not in self._common and not self.has_rows:
            self._common[wide] = common_pixels(self.data, wide)
        elif wide not in self._common:
            self._common[wide] = values = common_in(self.data, least, wide)
            if values is not None and wide == threshold > least and values.lost:
                text = "%s: %d of %d columns say nothing in training: %s. In each fewer than %d patients "
                text += "stand out, as many as the first layer's units ask for. A narrower one keeps more."
                names = self._values_named(values.lost)
                self.log.warning(text, self.name, len(values.lost), values.varied, names, wide)
        return self._common[wide]

    def _values_named(self, places: Sequence[int]) -> str:
        """Name the first few of a record's values, or give their positions."""
        spec, options = dataset_of(self.job)
        form = None if spec.form is None else spec.form(options)
        names = form.values if isinstance(form, TableForm) else ()
        shown = [names[place] if names else f"column {place + 1}" for place in places[:NAMED]]
        return ", ".join([*shown, "..."] if len(places) > NAMED else shown)

    @cached_property
    def _common(self) -> dict[int, CommonValues | CommonPixels | None]:
        return {}

    @cached_property
    def own_rows(self) -> dict[tuple[bool, bytes | None], OwnRows]:
        """Numbers of distinct training records, by whether they stay and how the model scales them."""
        return {}

    @cached_property
    def own_bits(self) -> dict[tuple[bool, bytes | None], tuple[float, ...]]:
        """Bits of each column of a table, by how the model scales them."""
        return {}

    @cached_property
    def site(self) -> SiteEntry:
        """Configuration of the site; defaults where the simulator has none."""
        return self.entry or SiteEntry()

    @cached_property
    def policy(self) -> Policy:
        """Policy of the site, with its profile's values filled in."""
        return self.site.policy.resolve(production=self.production)

    @property
    def min_class_count(self) -> int:
        """Least number of patients of a class with which this silo takes part in that class."""
        return self.policy.class_count(synthetic=self.data.synthetic)

    def untold(self, *, without_withdrawn: bool = False) -> tuple[str, ...]:
        """Return the parts of fewer patients than ``min_test_count``, left out of exact evaluations.

        A part is a fold, or one finding of a fold, by its place: ``test/2``. In a withdrawal the parts are
        those of the earlier run, so that nobody sees which part has become too small.

        With secure sums and the class rules, ``OWN`` is one, too, where each silo has a model of its own:
        scores that a model gives all records of its silo alike are that silo's class counts in the total.

        Args:
            without_withdrawn: count only the records that stay, for a number that is summed.
        """
        if self.job.privacy is not None:
            return ()
        parts: list[str] = []
        least = self.policy.min_test_count
        then = self.job.withdraw is not None and not without_withdrawn
        data = self.withdrawn.before if then else self.data
        for fold in EVALUATED:
            labels, owners = data.labels(fold), own_patients(data, fold)
            if owners.max(initial=-1) + 1 < least:
                parts.append(fold)
            elif labels.ndim == 2:
                parts += [f"{fold}/{place}" for place in too_few(in_steps(labels, least), owners, least)]
        own = self.job.method in OWN_MODELS and self.job.summation == "secure"
        if own and not self.policy.class_rules_off:
            parts.append(OWN)
        return tuple(parts)

    def patients(self, folds: Sequence[Fold]) -> int:
        """Return the number of patients in these folds; of records where patients are unknown."""
        return sum(int(own_patients(self.data, fold).max(initial=-1)) + 1 for fold in folds)

    def counted_in_public(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the training records in public numbers and moments of inputs, bool (n,).

        Beside exact sums by class these leave out classes below ``min_class_count``: otherwise totals of all
        records less those by class would be of few records, and of one all its values.

        Args:
            labels: of these records, with repeats or without.
        """
        if (public := self._public_classes) is None:
            return np.ones(len(labels), dtype=np.bool_)
        counted: NDArray[np.bool_] = public[labels]
        return counted

    @cached_property
    def _public_classes(self) -> NDArray[np.bool_] | None:
        """A mask of the classes of which it has ``min_class_count`` patients; None if all records count."""
        data, labels = self.data, self.data.labels("train")
        if labels.ndim == 2 or self.job.privacy is not None or self.job.class_rules == "off":
            return None
        patients = class_patients(data, labels, int(labels.max(initial=-1)) + 1)
        return patients >= self.min_class_count

    @property
    def public_records(self) -> int:
        """Number of different training records by which this silo weighs; one at least if it has any."""
        own = own_labels(self.data)
        return max(int(self.counted_in_public(own).sum()), min(len(own), 1))

    @property
    def draws_batches(self) -> bool:
        """Return True if each batch is drawn from all training records, at most half of them.

        Then no update is a function of the records and the model alone. The update of an epoch that passes
        over every record once nearly is, however small its batches: at small steps their gradients add up to
        the gradient over all records.
        """
        return not (self.policy.full_batches or self.job.privacy is not None)

    @property
    def training(self) -> Training:
        """Local training: the job's; where batches are drawn, with at most half of the records in a batch.

        A silo lowers its batches by itself and reports it nowhere. A refusal would disclose whether it has
        fewer than twice as many records, and a series of jobs how many.

        Raises:
            DataError: TF-208 if it has a single training record, which has no half.
        """
        job = self.job
        if not self.draws_batches:
            return job.training
        records = len(own_labels(self.data))
        if records < 2:
            raise DataError(
                f"Expected at least 2 training records of {job.dataset}, but got {records}: without privacy "
                "this site trains on batches of at most half of them (`full_batches` of its policy).",
                code="TF-208",
            )
        if counted := int(self.counted_in_public(own_labels(self.data)).sum()):
            return job.training.by_halves(counted, self._drawn)
        size = min(job.training.batch_size, self.min_class_count, records // 2)
        return job.training.model_copy(update={"batch_size": size})

    @property
    def drawn_records(self) -> int:
        """Number of records that an epoch draws, repeats counted: as many as those of the public weight.

        A sum of steps tells how many batches that is. Where every class is of few patients, these are as many
        as at any other such silo.
        """
        if not self.draws_batches:
            return len(self.data.labels("train"))
        least = self.min_class_count
        alike = math.ceil(2 * least / min(self.job.training.batch_size, least))
        return self._drawn or self.training.batch_size * alike

    @property
    def _drawn(self) -> int:
        return int(self.counted_in_public(self.data.labels("train")).sum())

    @property
    def limits_evaluations(self) -> bool:
        """Return True if this site limits exact evaluations, and the job opens some in secure sums."""
        return self.production and self.would_limit_evaluations

    @property
    def would_limit_evaluations(self) -> bool:
        """Return True if a site in production with this policy would limit the job's evaluations."""
        if (self.policy.max_evaluations, self.policy.evaluated_share) == (None, None):
            return False
        return self.job.privacy is None and self.job.statistics is None and self.job.summation == "secure"

    @property
    def limits_rounds(self) -> bool:
        """Return True if this site adds up exact sums in training over all jobs, this one's too."""
        exact = self.job.privacy is None and self.job.summation == "secure"
        return self.production and exact and self.policy.records_per_feature > 0

    def salt(self) -> tuple[str, ...]:
        """Return the secret that keys this silo's random streams beside the job's seed, in production only.

        It is drawn once for each job and silo, so that no other job repeats the silo's updates. Outside
        production there is none, and runs are repeatable.
        """
        if not self.production:
            return ()
        path = self.state_folder / SALT
        if not path.is_file():
            write_atomically(path, secrets.token_hex(16).encode(), mode=0o600)
        return (path.read_text(encoding="ascii"),)

    @property
    def state_folder(self) -> Path:
        """Folder of the silo's own state."""
        return (self.state_dir or self.run_dir) / STATE

    @property
    def secure_folder(self) -> Path:
        """Folder of this run's secure sums: in the simulator of their secrets, replies and ledger."""
        return (self.state_dir or self.run_dir) / SECURE_FOLDER

    @property
    def transcript(self) -> Path:
        """File of this silo's transcript of the run's secure sums; in production it outlives the run."""
        return (self.state_dir or self.run_dir) / TRANSCRIPT

    @property
    def ledger_paths(self) -> LedgerPaths:
        """Paths of the ledger that records this silo's secure sums."""
        jobs = self.ledger_dir if self.production else None
        # A simulated site exists for one job: it could not check what it signed under another job's root.
        ledger_dir = self.ledger_dir or self.secure_folder / (self.job_id or "run")
        return LedgerPaths(
            self.name,
            ledger_path(ledger_dir, self.name),
            self.journal_dir or self.secure_folder,
            jobs,
            None if jobs is None or self.kit is None else self.kit / KIT_HEAD,
        )

    @property
    def earlier_ledger(self) -> LedgerPaths:
        """Paths of the ledger that recorded the job that this one continues: in production the site's one."""
        continued, folder = self.job.continues, self.previous_state
        if self.ledger_dir is not None or continued is None or folder is None:
            return self.ledger_paths
        secure = folder.parent / SECURE_FOLDER
        ledger = ledger_path(secure / (continued.previous or "run"), self.name)
        return LedgerPaths(self.name, ledger, secure, None, None)

    @property
    def answer_grid(self) -> float:
        """Time grid in seconds to which this silo's terms are held back; 0 for none."""
        grid = self.job.answer_grid
        return grid if grid is not None else 1.0 if self.production else 0.0

    @cached_property
    def pace(self) -> Pace:
        """Floor of this silo's answer times: for secure sums, in production or on a time grid."""
        on = (self.production or self.answer_grid > 0) and self.job.summation == "secure"
        return Pace(
            self.state_folder / PACE,
            on=on,
            limit=self.job.site_timeout,
            log=self.log,
            stopped=lambda: self.stopped(),
        )

    @property
    def feature_folder(self) -> Path | None:
        """Folder of features on disk (``feature_cache``); None if they are kept in memory only.

        Features of the records that stay in a withdrawal are never stored: the next job has other records, or
        the same as before.
        """
        kind = self.site.feature_cache
        if kind == "memory" or self.job.withdraw is not None:
            return None
        if kind == "run":
            return (self.state_dir or self.run_dir) / FEATURES
        lasting = self.ledger_dir or Path(self.site.state_dir or "")
        return lasting / FEATURES / self.name

    def delete_features(self) -> None:
        """Delete features that the site keeps for this run only; its log names what cannot be deleted."""
        folder = (self.state_dir or self.run_dir) / FEATURES
        if self.site.feature_cache != "run" or not folder.exists():
            return
        try:
            shutil.rmtree(folder)
        except OSError as error:
            self.log.error(
                "Features of records were to be kept for this run only, but could not be deleted (%s). "
                "Delete this folder by hand: %s",
                error.strerror,
                folder,
            )

    @cached_property
    def features(self) -> FeatureCache:
        """Features of the records by the job's frozen encoder, if it has one; imports torch."""
        from tightframe.rounds.encoded import FeatureCache

        return FeatureCache()

    @cached_property
    def site_ledger(self) -> SiteLedger:
        """Opener of that ledger; cached, because it verifies only new entries."""
        return SiteLedger(self.ledger_paths, self.site, self.identity, self.log)

    @cached_property
    def budget_ledger(self) -> SiteLedger:
        """Opener of the privacy budget's ledger: the same; in the simulator one in the silo's state.

        A resumed job copies that state.
        """
        paths = self.site_ledger.paths
        path = ledger_path(self.ledger_dir or self.state_folder, self.name)
        if paths.ledger == path:
            return self.site_ledger
        return SiteLedger(replace(paths, ledger=path), self.site, self.identity, self.log)
