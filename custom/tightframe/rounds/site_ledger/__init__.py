"""The ledger of a site across jobs: it records privacy budgets and the steps of secure sums.

Losing the ledger would allow again what it forbids. A new one is therefore created only where no trace of an
earlier one exists. In production the evidence lies elsewhere: a copy of the ledger's head in the startup
kit's folder, the lock file of earlier jobs, and the transcripts of earlier jobs. If all of these are lost
together, the site looks like a new one, and only a head that somebody wrote down reveals the loss.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tightframe.config.site import SiteEntry
from tightframe.data.columns import marked
from tightframe.errors import SecureSumError
from tightframe.files import write_atomically
from tightframe.privacy.ledger.chain import Chain, Verified, read_ledger
from tightframe.privacy.ledger.entries import Begun, Entry, LedgerError, LostError, Remembered, TamperError
from tightframe.privacy.ledger.ledger import Ledger, ledger_expected, ledger_path
from tightframe.privacy.ledger.rows import Check
from tightframe.privacy.ledger.rules import secret_ids
from tightframe.privacy.ledger.store import head_file, read_head_file, read_secret, secret_file
from tightframe.results.files import TRANSCRIPT
from tightframe.rounds.site_ledger.keys import signature_check, trusted_roots
from tightframe.securesum.identity import Anchor, Signer

LOCK = "sums.lock"
OLD_JOURNAL = "journal.jsonl"
"""File of a build before ledgers, never read: its existence shows that something was recorded."""
KIT_HEAD = "ledger-head.json"
BEGIN = "tightframe ledger begin"


def journal_folder(state_dir: Path, site: str) -> Path:
    """Return the folder that a site's production jobs share, with the lock of secure sums."""
    return state_dir / "secure_sum" / site


@dataclass(frozen=True)
class LedgerPaths:
    """Paths of a site's ledger, and of the files that reveal its loss.

    Attributes:
        site: the site's name.
        ledger: the ledger's file.
        journal: folder of the lock.
        jobs: folder with one folder per job; None where the ledger lasts for one run only, so that its loss
            does not matter.
        witness: copy of the ledger's head, outside the site's state; None without a startup kit.
    """

    site: str
    ledger: Path
    journal: Path
    jobs: Path | None = None
    witness: Path | None = None

    @classmethod
    def of_site(cls, state_dir: Path, site: str, kit: Path | None) -> LedgerPaths:
        """Return the paths that all production jobs of a site share."""
        return cls(
            site,
            ledger_path(state_dir, site),
            journal_folder(state_dir, site),
            state_dir,
            None if kit is None else kit / KIT_HEAD,
        )

    @property
    def lock(self) -> Path:
        """Lock file that is held while a step of a secure sum reads and writes the ledger."""
        return self.journal / LOCK

    def traces(self) -> list[Path]:
        """Return the existing files that only a site with a ledger has."""
        if self.jobs is None:
            return []
        candidates = (head_file(self.ledger), self.witness, self.lock, self.journal / OLD_JOURNAL)
        return [path for path in candidates if path is not None and path.exists()]

    def transcripts(self) -> list[Path]:
        """Return the transcripts of earlier secure sums, each of which a ledger or journal recorded."""
        return [] if self.jobs is None else sorted(self.jobs.glob(f"*/{self.site}/{TRANSCRIPT}"))


def describe_loss(paths: LedgerPaths, entries: tuple[Entry, ...] | None) -> str | None:
    """Describe which records a site has lost; None if there is no evidence of a loss.

    Args:
        entries: of its ledger; None if there is none.
    """
    if entries is None and (traces := paths.traces()):
        return f"no ledger at {paths.ledger}, but there was one: {traces[0]} is still there"
    if entries and (ids := secret_ids(entries)):
        secret = read_secret(paths.ledger)
        if secret is None or ids != {marked((), secret)}:
            return f"{secret_file(paths.ledger)}, by which it knows tables again, is missing or another"
    known = any(isinstance(entry.content, Remembered | Begun) for entry in entries or ())
    if not known and (leftovers := [*paths.journal.glob(OLD_JOURNAL), *paths.transcripts()]):
        by = " (an earlier build's, which this one does not read)" if leftovers[0].name == OLD_JOURNAL else ""
        return f"there is no record of earlier secure sums, but there were some: {leftovers[0]}{by}"
    return None


def check_not_lost(paths: LedgerPaths, entries: tuple[Entry, ...] | None) -> None:
    """Refuse to use the ledger of a site that has lost records.

    Raises:
        LostError: TF-620.
    """
    if (loss := describe_loss(paths, entries)) is not None:
        raise LostError(
            f"Expected the ledger with this site's privacy budget and earlier sums, but {loss}. Restore the "
            f"newest backup of `state_dir`. If there is none, a person must decide: `{BEGIN}` says what is "
            "forgotten, and begins a new ledger."
        )


def check_witness(paths: LedgerPaths, ledger: str, verify: Callable[[int, str], object]) -> None:
    """Compare a ledger with the copy of its head in the startup kit's folder.

    Args:
        ledger: the ledger's id.
        verify: raises if the ledger's entry of this number does not have this hash.

    Raises:
        TamperError: TF-702 if it is another ledger, or an older copy of it.
        LedgerError: TF-704 if the copy cannot be read.
    """
    head = None if paths.witness is None else read_head_file(paths.witness)
    if head is None:
        return
    if head.ledger != ledger:
        raise TamperError(
            f"Expected the ledger {paths.ledger} to be the one whose head is in {paths.witness}, but it is "
            f"another: it was copied from elsewhere, or created without `{BEGIN}`. Restore the right one "
            "from a backup."
        )
    verify(head.count, head.hash)


@dataclass
class SiteLedger:
    """Opens a site's ledger, and creates one where the site has none.

    Attributes:
        entry: the site's configuration, for the roots under which its ledger may be signed.
        identity: returns the site's signer and its trust anchor.
        log: the site's own log.
    """

    paths: LedgerPaths
    entry: SiteEntry
    identity: Callable[[], tuple[Signer, Anchor]] | None
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("tightframe.silo"))
    _keys: tuple[Signer, Check, Chain] | None = None
    _checked: bool = False
    _witness_warned: bool = False

    def open(self) -> Ledger:
        """Open the site's ledger after checking that it is complete and the newest known version.

        Raises:
            LostError: TF-620 if the ledger or its records are lost.
            TamperError, LedgerError: TF-702, TF-704.
            SecureSumError: TF-615 without an identity.
        """
        ledger = self._open_or_create()
        try:
            self._check_newest(ledger)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def begin_anew(self, code: str) -> None:
        """Begin a new ledger by a person's decision; old files are moved aside, never deleted.

        Args:
            code: of the error that led to the decision, recorded in the new ledger.
        """
        path = self.paths.ledger
        self._keys = None  # verify again, without the cache of an earlier opening
        try:
            ledger = self._ledger(create=not path.exists())
        except (LedgerError, TamperError) as error:
            if path.exists() and not isinstance(error, TamperError):
                raise  # it may be intact, and only unreachable
            _move_aside([path, head_file(path), Path(f"{path}-wal"), Path(f"{path}-shm")])
            ledger = self._ledger(create=True)
        with ledger:
            ledger.remember(Begun(code))
        if self.paths.witness is not None:
            self.paths.witness.unlink(missing_ok=True)
        self.keep_witness()

    def keep_witness(self) -> None:
        """Copy the ledger's head into the startup kit's folder, which survives a loss of the state folder."""
        witness, head = self.paths.witness, head_file(self.paths.ledger)
        if witness is None or not head.is_file():
            return
        raw = head.read_bytes()
        try:
            if not witness.is_file() or witness.read_bytes() != raw:
                write_atomically(witness, raw, mode=0o600)
        except OSError as error:
            if not self._witness_warned:
                self._witness_warned = True
                self.log.warning(
                    "%s: the ledger's head cannot be copied to %s (%s): a loss of the whole state folder "
                    "would go unnoticed",
                    self.paths.site,
                    witness,
                    error.strerror,
                )

    def _signing_keys(self) -> tuple[Signer, Check, Chain]:
        if self._keys is None:
            if self.identity is None:
                raise SecureSumError("this silo has no identity to sign its ledger with.", code="TF-615")
            signer, anchor = self.identity()
            check = signature_check(trusted_roots(self.entry, anchor), name=self.paths.site)
            self._keys = signer, check, Chain(check)
        return self._keys

    def _ledger(self, *, create: bool = False) -> Ledger:
        signer, check, chain = self._signing_keys()
        return Ledger(self.paths.ledger, signer, check=check, chain=chain, create=create)

    def _open_or_create(self) -> Ledger:
        self._signing_keys()  # first: without an identity nothing may be created
        path = self.paths.ledger
        if path.exists():
            return self._ledger()
        check_not_lost(self.paths, None)
        if not ledger_expected(path):
            _make_folder(path.parent)
            if self.paths.jobs is not None:
                self.log.warning(
                    "%s: a new ledger begins at %s. If this site had one before, stop and restore it: "
                    "otherwise its spent budget and the cohorts of its opened counts are forgotten.",
                    self.paths.site,
                    path,
                )
            # Another job of this site may create it at the same moment.
            with suppress(LedgerError):
                return self._ledger(create=True)
        return self._ledger()

    def _check_newest(self, ledger: Ledger) -> None:
        """Check that the ledger is the newest known version."""
        contents = ledger.seen

        def verify(count: int, hashed: str) -> None:
            if (count, hashed) != (contents.head.count, contents.head.hash):
                ledger.verify(known=[(count, hashed)])

        check_witness(self.paths, contents.head.ledger, verify)
        if not self._checked:
            check_not_lost(self.paths, contents.entries)
        self._checked = True
        self.keep_witness()


def read_contents(paths: LedgerPaths, *, check: Check | None) -> Verified | None:
    """Read a site's ledger without changing it; a job may be writing at the same time. None without one.

    Args:
        check: verifies signatures; None to verify hashes only.

    Raises:
        LostError: TF-620.
        TamperError, LedgerError: TF-702, TF-704.
    """
    path = paths.ledger
    contents = read_ledger(path, check=check) if path.exists() else None
    check_not_lost(paths, None if contents is None else contents.entries)
    if contents is not None:
        check_witness(
            paths,
            contents.head.ledger,
            lambda count, hashed: read_ledger(path, check=None, known=[(count, hashed)]),
        )
    return contents


def _make_folder(folder: Path) -> None:
    """Create a ledger's folder and its parent, readable by their owner alone."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder.parent, folder):
        path.mkdir(exist_ok=True, mode=0o700)


def _move_aside(paths: Sequence[Path]) -> None:
    """Rename files that are no longer used, all with the same number in their new names."""
    number = 1
    while any(path.with_name(f"{path.name}.lost-{number}").exists() for path in paths):
        number += 1
    for path in paths:
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.lost-{number}"))
