"""A silo's own state: begun at the start of a run, proposed and committed with each sum.

It is empty at first, or copied from the stopped job that the run continues: the method's state (control
variates, the last model, a personal head) and the noise that was solved and drawn once. It begins at
enrolment, which does not need torch; only reading and writing tensors imports it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tightframe.errors import RunError
from tightframe.files import drop_torn_line, link_over, write_atomically
from tightframe.phases import Tensors
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import RESUMED, VERIFIED, WITHDRAWS, Notes, note, summed_word
from tightframe.rounds.state_files import (
    BEFORE_REQUEST,
    COMMITTED,
    DECLARATION,
    EARLIER,
    FOLLOWED,
    PROPOSED,
    REHEARSAL,
    SALT,
    START,
    STATE,
    TOLD,
)
from tightframe.rounds.sums.vault import read_journal
from tightframe.rounds.withdrawn_list import LIST, LIST_LOCK, NAMES
from tightframe.securesum.messages import SumId
from tightframe.securesum.site.journal import (
    Advertised,
    Entry,
    Revealed,
    SlotUsed,
    StateMasked,
    StateSummed,
)

RUN = "run.json"
"""File that names the job of a state folder."""
_TOTAL = "total"
_UNCHANGED = "unchanged"
LOST = "lost"
"""File that marks a resumed run without the earlier state; in plain sums empty until the server says who took
part."""
TOOK_PART = b"took part"


class NeedsStateError(Exception):
    """The server must send the state: this silo missed an exchange, or its processor rounds differently."""


def begin(context: SiloContext) -> None:
    """Create a run's state folder: empty, or with the state of the job that it continues.

    Raises:
        RunError: TF-521 if that state belongs to another job, TF-522 if it has only later rounds.
    """
    folder, job = context.state_folder, context.job
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    if (continued := job.continues) is not None:
        previous = context.previous_state
        for earlier in _of_chain(context):  # whichever job is named as the previous one
            _check(context, earlier)
        if previous is not None and (previous / RUN).is_file():
            _check(context, previous)
            # The salt is not copied, so that no two jobs repeat a silo's updates bit for bit.
            removed = () if job.resume is not None else (NAMES, PROPOSED, START)
            left_out = shutil.ignore_patterns(
                *(SALT, DECLARATION, RUN, FOLLOWED, LIST, LIST_LOCK, TOLD, f"{REHEARSAL}*"),
                f"{BEFORE_REQUEST}*",
                *removed,
            )
            shutil.copytree(previous, partial, ignore=left_out, dirs_exist_ok=True)
            if (partial / VERIFIED).is_file():
                drop_torn_line(partial / VERIFIED)
                note(partial, [RESUMED] if job.resume is not None else [WITHDRAWS, RESUMED])
            _rewind(partial, job.rounds if job.resume is None else job.resume.after_round)
            context.log.info(
                "%s: continuing with this silo's state of job %s", context.name, continued.previous
            )
        elif job.resume is None:
            raise RunError(
                f"Expected this silo's own state of job {continued.previous}, from whose total it withdraws "
                "records, but there is none: restore it from a backup, or start a new job without them.",
                code="TF-522",
            )
        else:
            _begin_without(context, partial, continued.previous, job.resume.after_round)
    values = {"job_sha256": job.origin.sha256(), "lineage": job.lineage(context.job_id)}
    write_atomically(partial / RUN, json.dumps(values).encode(), mode=0o600)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def _of_chain(context: SiloContext) -> Iterator[Path]:
    """Yield the state folders at this site of all jobs of a job's chain; outside of production none."""
    lineage = context.job.lineage(context.job_id)
    every = () if context.ledger_dir is None else context.ledger_dir.glob(f"*/{context.name}/{STATE}/{RUN}")
    for path in sorted(every):
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            if json.loads(path.read_bytes()).get("lineage") == lineage:
                yield path.parent


def _begin_without(context: SiloContext, folder: Path, previous: str, after_round: int) -> None:
    """Begin a resumed job without this silo's state, from its journal's entries of the earlier jobs.

    The journal has the states that it verified, for which sums, and whether it took part; a site without
    entries of the job may have taken part. Plain sums have no journal: the server's first request says it.
    """
    took_part = b""
    if context.job.summation == "secure":
        lineage = context.job.lineage(context.job_id)
        entries = _journal(context)
        note(folder, [*_summed(entries, lineage), RESUMED])
        if not _had_no_part(entries, {previous, lineage}, lineage, after_round):
            took_part = TOOK_PART
    if took_part or context.job.summation == "plain":
        write_atomically(folder / LOST, took_part, mode=0o600)
    context.log.warning(
        "%s: there is no state of job %s here; if the method keeps one and this silo took part, it "
        "cannot contribute",
        context.name,
        previous,
    )


def _summed(entries: Iterable[Entry], lineage: str) -> Iterator[str]:
    """Yield the words for the states that a journal records as summed, and for these sums.

    A state's entry precedes that of the slot for which shares were given with it.
    """
    used, state = {}, ""
    for item in entries:
        match item:
            case SlotUsed():
                used[item.job, item.epoch, item.slot] = item.sum_id
            case StateSummed():
                state = item.basis.hex() if item.lineage == lineage else ""
                if state:
                    yield state
            case Revealed():
                sum_id = used.get((item.job, item.epoch, item.slot))
                if state and sum_id is not None:
                    yield summed_word(state, sum_id)
                state = ""


def _journal(context: SiloContext) -> list[Entry]:
    """Return this site's journal of the earlier jobs; empty if there is none.

    Raises:
        TightframeError: as ``read_journal``.
    """
    return read_journal(context.earlier_ledger, check=None)


def _had_no_part(entries: Iterable[Entry], jobs: set[str], lineage: str, after_round: int) -> bool:
    """Check that a journal has these jobs, but no term for their rounds up to the checkpoint's."""
    known = False
    for item in entries:
        known |= isinstance(item, Advertised) and item.job in jobs
        if isinstance(item, SlotUsed):
            number = item.sum_id.round if item.job in jobs and is_training(str(item.sum_id)) else 0
        else:
            number = 0
            if isinstance(item, StateMasked | StateSummed) and item.lineage == lineage:
                number = item.round  # in any job of the chain
        if 0 < number <= after_round:
            return False
    return known


def checkpoint_round(sum_id: str) -> int:
    """Return the first round whose checkpoint includes a sum: its own in training, 0 before round 1.

    No checkpoint includes a sum after the last round: such a sum has a round one higher than its own.

    Raises:
        ValueError: if it is not the id of a sum.

    >>> checkpoint_round("0/before-0/0"), checkpoint_round("3/train-1/0"), checkpoint_round("4/after-0/0")
    (0, 3, 5)
    """
    number, kind, _ = sum_id.split("/")
    return int(number) + (kind.partition("-")[0] not in ("statistics", "before", "train"))


def is_training(sum_id: str) -> bool:
    """Check whether a sum belongs to a training round."""
    return sum_id.split("/")[1].startswith("train-")


def proposed_in(path: Path) -> str:
    """Return the id of the sum for which a stored state was proposed.

    Raises:
        RunError: TF-522 if the file is damaged or names no sum.
    """
    try:
        with safe_open(path, "numpy") as stream:
            sum_id = str((stream.metadata() or {}).get("sum_id"))
        checkpoint_round(sum_id)
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise damaged(path, error) from None
    return sum_id


def confirm_told(folder: Path, digest: str | None) -> None:
    """Commit the state that depends on a named total, which this silo has now verified.

    Args:
        folder: of the silo's state.
        digest: hex digits of the verified total; None if there is none. A state that depends on another total
            is kept, and dropped with the next named total.

    Raises:
        RunError: TF-522 if a file is damaged.
    """
    path = folder / TOLD
    if path.is_file() and _counts_with(path) == digest:
        _commit(folder, path)


def _counts_with(path: Path) -> str | None:
    """Return the digest of the total on which a stored state depends."""
    return _noted(path, _TOTAL)


def _noted(path: Path, key: str) -> str | None:
    """Return the metadata of a stored state.

    Raises:
        RunError: TF-522 if the file is damaged.
    """
    try:
        with safe_open(path, "numpy") as stream:
            return (stream.metadata() or {}).get(key)
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from None


def _commit(folder: Path, path: Path) -> None:
    """Make a stored state the committed one, and keep the previous round's.

    A process that is killed between two steps leaves a committed state: otherwise a resumed job could not
    tell that there was one.
    """
    committed = folder / COMMITTED
    if committed.is_file() and checkpoint_round(proposed_in(committed)) < checkpoint_round(proposed_in(path)):
        link_over(committed, folder / EARLIER)
    os.replace(path, committed)


def damaged(path: Path, error: Exception) -> RunError:
    """Return the error for a stored state that cannot be read."""
    return RunError(
        f"Expected this silo's own state in {path}, but it is missing or damaged ({type(error).__name__}): "
        "restore it from a backup, or run the job from the start.",
        code="TF-522",
    )


def _check(context: SiloContext, previous: Path) -> None:
    """Refuse the state of another job or chain of jobs: a resumed job is the stopped one, unchanged.

    Raises:
        RunError: TF-521; TF-522 if the folder's description is damaged.
    """
    try:
        described = json.loads((previous / RUN).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(previous / RUN, error) from None
    if not isinstance(described, dict):
        raise damaged(previous / RUN, TypeError())
    expected = {"job_sha256": context.job.origin.sha256(), "lineage": context.job.lineage(context.job_id)}
    for key, value in expected.items():
        if described.get(key) != value:
            raise RunError(
                f"Expected this silo's state in {previous} to have the {key} {value} of the job that this "
                f"one continues, but got {str(described.get(key))[:64]}: a job continues one that is the "
                "same but for `resume` and `withdraw`.",
                code="TF-521",
            )


def _rewind(folder: Path, after_round: int) -> None:
    """Rewind the state to the round of the server's checkpoint, dropping later states.

    Raises:
        RunError: TF-522 if the state of that round is no longer stored.
    """
    committed, earlier, proposed = (folder / name for name in (COMMITTED, EARLIER, PROPOSED))
    if proposed.is_file() and checkpoint_round(proposed_in(proposed)) > after_round:
        proposed.unlink()
    if not committed.is_file() or checkpoint_round(proposed_in(committed)) <= after_round:
        return
    if not earlier.is_file():
        committed.unlink()  # this silo's first
        return
    sum_id = proposed_in(earlier)
    if checkpoint_round(sum_id) > after_round:
        raise RunError(
            f"Expected a state of round {after_round} at most, as of the checkpoint, but the earliest one "
            f"stored is of the sum {sum_id}: resume from a later checkpoint.",
            code="TF-522",
        )
    os.replace(earlier, committed)


class SiloStateStore:
    """A silo's own state across rounds: proposed with a contribution, committed once its sum is opened.

    The state that ``contribute`` returns is only *proposed*. The next message lists the sums opened since
    and their cohorts; the proposal is committed only if this silo's term was in its sum. The previous round's
    state is kept beside it, for a server that lost the last round (``begin``).

    In secure sums a silo commits the state that it trained for a sum for which it gave its shares: otherwise
    a server could have it train on a state of the server's choice, and claim that the sum was opened. If it
    gave none, but is in the named total, the proposal is valid as long as exactly that total is named, and is
    committed once that is verified (``confirm_told``). A term that trains nothing, such as the closing's,
    leaves the state unchanged: it is valid with that sum's total, too, which silos open only after verifying
    the previous total.

    Args:
        folder: of the silo's state.
        secure: whether sums are secure.
    """

    def __init__(self, folder: Path, silo: str, *, secure: bool = False) -> None:
        self._folder = folder
        self._silo = silo
        self._secure = secure
        self._lost = folder / LOST

    def committed(self) -> Tensors:
        """Return the committed state, or the one valid with the named total; empty before the first.

        Raises:
            RunError: TF-522 if its file is damaged.
        """
        from safetensors.torch import load_file

        path = self._folder / TOLD
        if not path.is_file():
            path = self._folder / COMMITTED
        if not path.is_file():
            return {}
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged(path, error) from None

    def propose(self, sum_id: SumId, state: Tensors, basis: str = "") -> None:
        """Store a proposed state beside the committed one.

        Args:
            state: proposed; an empty one leaves this silo's own unchanged.
            basis: SHA-256 (hex) of the run's state that the sum rests on.

        Raises:
            RunError: TF-522 if this silo's state of earlier rounds is lost.
        """
        if not state:
            self._leave_as_it_is(str(sum_id))
            return
        if self._lost.is_file():
            raise RunError(
                "Expected this silo's own state of the job that this one continues, because the method keeps "
                "some and this silo took part, but it is missing: an empty one would change the training.",
                code="TF-522",
            )
        from tightframe.rounds.checkpoint import tensor_bytes

        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        jobs = str(len(Notes.read(self._folder).jobs) - 1)
        data = tensor_bytes(state, {"sum_id": str(sum_id), "basis": basis, "jobs": jobs})
        write_atomically(self._folder / PROPOSED, data, mode=0o600)

    def settle(
        self, opened: Mapping[str, Sequence[str]], told: str | None = None, digest: str | None = None
    ) -> None:
        """Commit or drop the proposed state.

        Args:
            opened: sum id -> cohort of the sums opened since the last message. A proposal whose sum is not
                among them is dropped, in secure sums only if this silo gave no shares of that sum.
            told: id of the sum whose total is named.
            digest: hex digits of that total.
        """
        if self._lost.is_file() and self._lost.stat().st_size == 0:
            self._check_participation(opened)
        path = self._folder / PROPOSED
        if path.is_file():
            sum_id = proposed_in(path)
            included = self._silo in opened.get(sum_id, [])
            # Given shares count as an opened sum, unless that same sum is named without this silo.
            if self._gave_shares(path, sum_id) and (included or (self._secure and sum_id != told)):
                _commit(self._folder, path)
            elif included and sum_id == told and digest is not None:
                self._count_with(digest, path, sum_id)
            path.unlink(missing_ok=True)
        self._drop_others(digest, told if self._silo in opened.get(told or "", []) else None)

    def commit(self, sum_id: str, cohort: Sequence[str], digest: str | None = None) -> None:
        """Commit the proposed state if it was made for this sum, and this silo is in it.

        Args:
            sum_id: of the sum whose total is named.
            digest: hex digits of that total.
        """
        path = self._folder / PROPOSED
        if self._silo in cohort and path.is_file() and proposed_in(path) == sum_id:
            self.settle({sum_id: cohort}, sum_id, digest)

    def _count_with(self, digest: str, path: Path, sum_id: str, unchanged: str = "") -> None:
        """Make a state valid while this total is named: another total can have the same sum's id.

        Args:
            path: of the state.
            sum_id: for which the state was trained.
            unchanged: sum whose term used the state, and left it unchanged.
        """
        from safetensors.torch import load_file

        from tightframe.rounds.checkpoint import tensor_bytes

        data = tensor_bytes(load_file(path), {"sum_id": sum_id, _TOTAL: digest, _UNCHANGED: unchanged})
        write_atomically(self._folder / TOLD, data, mode=0o600)

    def _leave_as_it_is(self, sum_id: str) -> None:
        """Note with a state that is valid with the named total that a sum's term used it."""
        path = self._folder / TOLD
        if path.is_file() and (digest := _counts_with(path)) is not None:
            self._count_with(digest, path, proposed_in(path), sum_id)

    def _drop_others(self, digest: str | None, included: str | None) -> None:
        """Drop a state that is valid with another total than the named one.

        Args:
            included: sum of the named total, if this silo is in it.
        """
        path = self._folder / TOLD
        if not path.is_file() or (digest is not None and _counts_with(path) == digest):
            return
        if digest is not None and included is not None and _noted(path, _UNCHANGED) == included:
            self._count_with(digest, path, proposed_in(path))
        else:
            path.unlink()

    def _gave_shares(self, path: Path, sum_id: str) -> bool:
        """Check whether this silo gave its shares of the sum for which a state was proposed.

        In the job that proposed it: another job of the chain can have a sum of that name on that state, too.
        """
        if not self._secure:
            return True
        with safe_open(path, "numpy") as stream:
            proposed = stream.metadata()  # `proposed_in` has read it
        jobs, job = Notes.read(self._folder).jobs, int(proposed.get("jobs", 0))
        return job < len(jobs) and jobs[job].have_sum(str(proposed.get("basis")), sum_id)

    def _check_participation(self, opened: Mapping[str, Sequence[str]]) -> None:
        """Note from a resumed job's first message whether this silo took part in the earlier jobs."""
        if any(is_training(sum_id) and self._silo in cohort for sum_id, cohort in opened.items()):
            write_atomically(self._lost, TOOK_PART, mode=0o600)
        else:
            self._lost.unlink()
