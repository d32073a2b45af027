"""A site's lasting memory: one ledger, for its privacy budgets and for what its secure sums must remember.

A ledger that is lost would allow again what it forbids, so that a new one begins only where nothing tells
of an earlier one. In production that is told by what lies elsewhere: a copy of the ledger's head in the
startup kit's own folder, the lock that its jobs have used, the transcripts of earlier jobs. If all of these
are gone with it, a site cannot be told from a fresh one; then only a head that somebody wrote down shows it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tightframe.config.site import SiteEntry
from tightframe.errors import SecureSumError
from tightframe.files import drop_torn_line, write_atomically
from tightframe.privacy.ledger.chain import Chain, Verified, read_ledger
from tightframe.privacy.ledger.entries import Begun, Entry, LedgerError, LostError, Remembered, TamperError
from tightframe.privacy.ledger.ledger import Ledger, ledger_expected, ledger_path
from tightframe.privacy.ledger.rows import Check
from tightframe.privacy.ledger.store import head_file, read_head_file
from tightframe.results.files import TRANSCRIPT
from tightframe.rounds.ledger_keys import signature_check, trusted_roots
from tightframe.securesum.identity import Anchor, Signer

LOCK = "sums.lock"
OLD_JOURNAL, TAKEN_OVER = "journal.jsonl", "journal.jsonl.taken-over"
KIT_HEAD = "ledger-head.json"
BEGIN = "tightframe ledger begin"


def lasting_journal(state_dir: Path, site: str) -> Path:
    """Folder of a site's lock and, from earlier versions, journal in production: of all its jobs."""
    return state_dir / "secure_sum" / site


@dataclass(frozen=True)
class Places:
    """Where what a site must remember lies, and what would tell of it if that were lost.

    Attributes:
        site: the site's name.
        ledger: the ledger's file.
        journal: folder of the lock and of the journal that earlier versions kept.
        jobs: folder with one folder a job; None where the memory lasts one run, so that nothing is missed.
        witness: copy of the ledger's head, outside of the site's state; None where there is no kit.
    """

    site: str
    ledger: Path
    journal: Path
    jobs: Path | None = None
    witness: Path | None = None

    @classmethod
    def of_site(cls, state_dir: Path, site: str, kit: Path | None) -> Places:
        """In production: of all jobs of a site."""
        return cls(
            site,
            ledger_path(state_dir, site),
            lasting_journal(state_dir, site),
            state_dir,
            None if kit is None else kit / KIT_HEAD,
        )

    @property
    def lock(self) -> Path:
        """Held while a step of a secure sum reads and writes."""
        return self.journal / LOCK

    @property
    def old_journal(self) -> Path:
        """Where earlier versions kept what is in the ledger now."""
        return self.journal / OLD_JOURNAL

    def traces(self) -> list[Path]:
        """What is there only if there was a ledger."""
        if self.jobs is None:
            return []
        kept = (head_file(self.ledger), self.witness, self.lock, self.journal / TAKEN_OVER)
        return [path for path in kept if path is not None and path.exists()]

    def transcripts(self) -> list[Path]:
        """Of jobs with secure sums, which have always kept a journal."""
        return [] if self.jobs is None else sorted(self.jobs.glob(f"*/{self.site}/{TRANSCRIPT}"))


def lost(places: Places, entries: tuple[Entry, ...] | None) -> str | None:
    """Describe what a site has lost of its memory; None if nothing tells of a loss.

    Args:
        places: of the site.
        entries: of its ledger; None if there is none.
    """
    if entries is None and (traces := places.traces()):
        return f"no ledger at {places.ledger}, but there was one: {traces[0]} is still there"
    known = any(isinstance(entry.content, Remembered | Begun) for entry in entries or ())
    if not known and not places.old_journal.exists() and (transcripts := places.transcripts()):
        return f"nothing is known of earlier secure sums, but there were some: {transcripts[0]}"
    return None


def check_lost(places: Places, entries: tuple[Entry, ...] | None) -> None:
    """Refuse to go on where a site has lost its memory.

    Raises:
        LostError: TF-620.
    """
    if (gone := lost(places, entries)) is not None:
        raise LostError(
            f"Expected what this site remembers of its privacy budget and its earlier sums, but {gone}. "
            f"Restore the newest backup of `state_dir`. If there is none, a person decides: `{BEGIN}` says "
            "what is forgotten, and begins anew."
        )


def check_witness(places: Places, ledger: str, verify: Callable[[int, str], object]) -> None:
    """Hold a ledger against the copy of its head in the startup kit's folder.

    Args:
        places: of the site.
        ledger: the ledger's own name.
        verify: raises if the ledger does not hold that many entries, the last with that hash.

    Raises:
        TamperError: TF-702 if it is another ledger, or an older copy of it.
        LedgerError: TF-704 if the copy cannot be read.
    """
    head = None if places.witness is None else read_head_file(places.witness)
    if head is None:
        return
    if head.ledger != ledger:
        raise TamperError(
            f"Expected the ledger {places.ledger} to be the one whose head lies in {places.witness}, but it "
            f"is another: it was put there from elsewhere, or begun anew without `{BEGIN}`. Put the right "
            "one back from a backup."
        )
    verify(head.count, head.hash)


@dataclass
class Lasting:
    """Opens a site's ledger, and begins one where the site has none.

    Attributes:
        places: of the site.
        entry: of the site, for the roots that its ledger's signatures may rest on.
        identity: gives the site's signer and what it trusts.
        log: the site's own.
    """

    places: Places
    entry: SiteEntry
    identity: Callable[[], tuple[Signer, Anchor]] | None
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("tightframe.silo"))
    _keys: tuple[Signer, Check, Chain] | None = None
    _settled: bool = False
    _unwitnessed: bool = False

    def open(self) -> Ledger:
        """The site's ledger, whole and the newest that is known of.

        Raises:
            LostError: TF-620 if there was one.
            TamperError, LedgerError: TF-702, TF-704.
            SecureSumError: TF-615 without an identity; TF-621 if an old journal lies beside it.
        """
        ledger = self._opened()
        try:
            self._settle(ledger)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def begin_anew(self, said: str) -> None:
        """Begin what is lost anew, as a person decided; what was before is moved aside, and never deleted."""
        path = self.places.ledger
        _move_aside([self.places.old_journal])
        try:
            ledger = self._ledger(create=not path.exists() and not ledger_expected(path))
        except (LedgerError, TamperError) as error:
            if path.exists() and not isinstance(error, TamperError):
                raise  # it may be whole, and only out of reach
            _move_aside([path, head_file(path), Path(f"{path}-wal"), Path(f"{path}-shm")])
            _make_folder(path.parent)
            ledger = self._ledger(create=True)
        with ledger:
            ledger.remember(Begun(said))
        if self.places.witness is not None:
            self.places.witness.unlink(missing_ok=True)
        self.keep_witness()

    def keep_witness(self) -> None:
        """Copy the head into the startup kit's folder, which a loss of the state folder does not reach."""
        witness, head = self.places.witness, head_file(self.places.ledger)
        if witness is None or not head.is_file():
            return
        raw = head.read_bytes()
        try:
            if not witness.is_file() or witness.read_bytes() != raw:
                write_atomically(witness, raw, mode=0o600)
        except OSError as error:
            if not self._unwitnessed:
                self._unwitnessed = True
                self.log.warning(
                    "%s: the ledger's head cannot be copied to %s (%s): nothing would tell of a loss of the "
                    "whole state folder",
                    self.places.site,
                    witness,
                    error.strerror,
                )

    def _signs(self) -> tuple[Signer, Check, Chain]:
        if self._keys is None:
            if self.identity is None:
                raise SecureSumError(
                    "this silo was given no identity to sign its ledger with.", code="TF-615"
                )
            signer, anchor = self.identity()
            check = signature_check(trusted_roots(self.entry, anchor), name=self.places.site)
            self._keys = signer, check, Chain(check)
        return self._keys

    def _ledger(self, *, create: bool = False) -> Ledger:
        signer, check, chain = self._signs()
        return Ledger(self.places.ledger, signer, check=check, chain=chain, create=create)

    def _opened(self) -> Ledger:
        self._signs()  # nothing is made, and nothing said, where there is no identity
        path = self.places.ledger
        if not path.exists():
            check_lost(self.places, None)
        if not ledger_expected(path):
            _make_folder(path.parent)
            if self.places.jobs is not None:
                self.log.warning(
                    "%s: a new ledger begins at %s. If this site had one before, stop, and put it back: what "
                    "was spent, and for whom counts were opened, would be forgotten.",
                    self.places.site,
                    path,
                )
            # Another job of this site may make it at the same moment.
            with suppress(LedgerError):
                return self._ledger(create=True)
        return self._ledger()

    def _settle(self, ledger: Ledger) -> None:
        """See that the ledger is the newest known, and that nothing of earlier versions is left out of it."""
        whole = ledger.verify()
        check_witness(
            self.places, whole.head.ledger, lambda count, hashed: ledger.verify(known=[(count, hashed)])
        )
        if self.places.old_journal.exists():
            self._take_over(ledger, whole.entries)
        elif not self._settled:
            check_lost(self.places, whole.entries)
        self._settled = True
        self.keep_witness()

    def _take_over(self, ledger: Ledger, entries: tuple[Entry, ...]) -> None:
        """Bring an earlier version's journal into the ledger, once; the file is kept under another name."""
        path = self.places.old_journal
        try:
            drop_torn_line(path)
            raw = path.read_bytes()
        except FileNotFoundError:
            return  # another job of this site has taken it over at the same moment
        source = hashlib.sha256(raw).hexdigest()
        if not taken_over(entries, source, path):
            facts = read_old_journal(path, raw)
            ledger.remember(Remembered(facts, source), once=True)
            self.log.warning(
                "%s: took over %d entries of the journal %s into the ledger %s",
                self.places.site,
                len(facts),
                path,
                self.places.ledger,
            )
        with suppress(FileNotFoundError):
            os.replace(path, path.with_name(TAKEN_OVER))


@dataclass(frozen=True)
class Looked:
    """What a site remembers, as a reader without its key finds it.

    Attributes:
        whole: the ledger; None if there is none yet.
        facts: of a journal of an earlier version that is still to be taken over.
    """

    whole: Verified | None
    facts: tuple[Mapping[str, object], ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of the ledger's."""
        return () if self.whole is None else self.whole.entries


def look(places: Places, *, check: Check | None) -> Looked:
    """Read what a site remembers, beside a job that may be writing; nothing is changed.

    Args:
        places: of the site.
        check: holds signatures against certificates; None to look at hashes only.

    Raises:
        LostError: TF-620.
        TamperError, LedgerError: TF-702, TF-704.
        SecureSumError: TF-604 if an old journal cannot be read, TF-621 if it should not be there.
    """
    path, old = places.ledger, places.old_journal
    whole = read_ledger(path, check=check) if path.exists() else None
    check_lost(places, None if whole is None else whole.entries)
    looked = Looked(whole, ())
    if whole is not None:
        check_witness(
            places,
            whole.head.ledger,
            lambda count, hashed: read_ledger(path, check=None, known=[(count, hashed)]),
        )
    if not old.exists():
        return looked
    raw = old.read_bytes()
    if taken_over(looked.entries, hashlib.sha256(raw).hexdigest(), old):
        return looked
    # A last line without its end is left out: nobody was told yet that it exists.
    return Looked(whole, read_old_journal(old, raw[: raw.rfind(b"\n") + 1]))


def taken_over(entries: Sequence[Entry], source: str, path: Path) -> bool:
    """Whether a ledger has a journal already.

    Args:
        entries: of the ledger.
        source: SHA-256 of the journal.
        path: of the journal.

    Raises:
        SecureSumError: TF-621 if it has what came after it.
    """
    before = [entry.content for entry in entries if isinstance(entry.content, Remembered | Begun)]
    if any(isinstance(item, Remembered) and item.source == source for item in before):
        return True
    if before:
        raise SecureSumError(
            f"Expected no {path.name} beside a ledger that has taken its place, but found {path}: it may be "
            "older than what the ledger says. Move it away once you know where it is from.",
            code="TF-621",
        )
    return False


def read_old_journal(path: Path, raw: bytes) -> tuple[Mapping[str, object], ...]:
    """The entries of an earlier version's journal: one JSON object a line.

    Raises:
        SecureSumError: TF-604 if a line cannot be read: what is missing would be allowed again.
    """
    try:
        facts = tuple(json.loads(line) for line in raw.splitlines())
        if not all(isinstance(fact, dict) for fact in facts):
            raise ValueError
    except (ValueError, RecursionError):
        raise SecureSumError(
            f"Expected one JSON object a line in the journal {path}, but found something else: restore it "
            "from a backup.",
            code="TF-604",
        ) from None
    return facts


def _make_folder(folder: Path) -> None:
    """Make a ledger's folder and the one above it for their owner alone."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for one in (folder.parent, folder):
        one.mkdir(exist_ok=True, mode=0o700)


def _move_aside(paths: Sequence[Path]) -> None:
    """Give files that are no longer used names of their own, all with the same number."""
    number = 1
    while any(path.with_name(f"{path.name}.lost-{number}").exists() for path in paths):
        number += 1
    for path in paths:
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.lost-{number}"))
