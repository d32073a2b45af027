"""Withdraw a silo's records from an ended run, and refuse two withdrawals that differ by a few records.

Two totals from which this silo withdrew sets of records that differ by one record disclose that record. So a
site has one growing list for a data set: a withdrawal takes out exactly the records of the last one, in any
run, or more, from a run from which all of those are already withdrawn. With each increment the numbers are
checked again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe.data import withdrawn
from tightframe.data.base import FOLDS, SiloData
from tightframe.data.withdrawn import Remaining
from tightframe.errors import DataError, RunError
from tightframe.files import locked_file, write_atomically

if TYPE_CHECKING:
    from tightframe.rounds.context import SiloContext

NAMES = "withdrawn.json"
"""File in a silo's state: names of the records that are, or after this run will be, out of the run's
total."""
LIST = "withdrawn_list.json"
"""File that outlives runs: the names that this site has withdrawn so far, by data set."""
LIST_LOCK = "withdrawn_list.lock"
OTHER = "TF-524"
CLASSES, SUMS = ("before", 1), ("before", 2)
"""Exchanges of a withdrawal after that of the numbers."""


class Withdrawn:
    """The records that one silo withdraws in one run.

    Args:
        context: of the silo, in a job with ``withdraw``.
        data: all its records.

    Raises:
        DataError, RunError: see ``names``.
    """

    def __init__(self, context: SiloContext, data: SiloData) -> None:
        self._context, self._data = context, data
        previous = context.previous_state
        resumed = context.job.resume is not None
        self._gone = frozenset() if previous is None or resumed else _read(previous / NAMES)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all records withdrawn from the total after this run.

        Once the run has begun they are those of the enrolment, even if the file changes.

        Raises:
            DataError: TF-214 for an unreadable file, or names that the records do not have.
            RunError: TF-522 if a resumed job has no names of the enrolment; TF-524 if the site has withdrawn
                other records before.
        """
        begun = self._context.state_folder / NAMES
        if begun.is_file():
            return _read(begun)
        context, listed = self._context, self._noted
        if context.job.resume is not None:
            raise RunError(
                f"Expected the records that job {context.job.resume.previous} withdraws in this silo's state "
                f"of it, but {begun} is missing: restore it from a backup, or withdraw them anew.",
                code="TF-522",
            )
        path = context.site.withdrawn.get(context.job.dataset)
        named = withdrawn.read_file(None if path is None else Path(path))
        names = self._gone | withdrawn.find(self._data, named, self._gone | (listed or frozenset()))
        self._check(names, listed)
        return names

    @cached_property
    def before(self) -> SiloData:
        """The records whose sums are in the total that this run begins with."""
        return Remaining(self._data, self._gone)

    @cached_property
    def remaining(self) -> Remaining:
        """The records that stay, from which everything else of the run is computed.

        Raises:
            DataError: TF-214 if fewer than two training records would stay.
        """
        stays = Remaining(self._data, self.names)
        if len(stays.labels("train")) < 2:
            raise DataError(
                "Expected at least 2 training records to stay at this site, but fewer would: start a new job "
                "without this site instead.",
                code=withdrawn.WRONG,
            )
        return stays

    def begin(self) -> None:
        """Keep the names in the run's state, and log their number at this silo."""
        context, stays = self._context, self.remaining
        _write(context.state_folder / NAMES, self.names)
        removed = {fold: len(self.before.labels(fold)) - len(stays.labels(fold)) for fold in FOLDS}
        context.log.info(
            "%s: withdraws %d training, %d validation and %d test records from run %s",
            context.name,
            *(removed[fold] for fold in ("train", "validation", "test")),
            context.job.withdraw.previous if context.job.withdraw is not None else "",
        )

    def check_again(self) -> None:
        """Refuse the names if others were added to the list since the run was enrolled.

        Raises:
            RunError: TF-524.
        """
        self._check(self.names, self._noted)

    def note(self) -> None:
        """Add the names to the site's list, before anything computed from them leaves.

        A concurrent withdrawal may have added others since.

        Raises:
            RunError: TF-524 if the site has withdrawn other records since this run was enrolled.
        """
        if (path := self._list) is None:
            return
        with locked_file(path.with_name(LIST_LOCK)):
            self.check_again()
            lists, dataset = _lists(path), self._dataset
            lists[dataset] = sorted(self.names | set(lists.get(dataset, ())))
            write_atomically(path, json.dumps(lists).encode(), mode=0o600)

    @property
    def _dataset(self) -> str:
        return self._context.site.records_id(self._context.job.dataset)

    @property
    def _list(self) -> Path | None:
        """Path of the site's list; in a simulation, whose silos have no memory, in the continued state."""
        context = self._context
        folder = context.journal_dir or context.previous_state
        return None if folder is None else folder / LIST

    @property
    def _noted(self) -> frozenset[str] | None:
        """The names on the site's list; None if it has withdrawn nothing so far."""
        lists = {} if self._list is None else _lists(self._list)
        return frozenset(lists[self._dataset]) if self._dataset in lists else None

    def _check(self, names: frozenset[str], listed: frozenset[str] | None) -> None:
        """Refuse names that are neither those withdrawn last, nor a superset of them."""
        if listed is None:
            return
        record_names = {
            name for fold in FOLDS for name in withdrawn.record_ids(self._data, fold)
        } | self._gone
        last = listed & record_names
        if names == last or (self._gone >= last and names >= last):
            return
        raise RunError(
            f"Expected the {len(last)} records that this site has withdrawn before, from this run or "
            f"another, but its file names {len(names - last)} others, and {len(last - names)} of those not: "
            "the difference of two totals would disclose these few. Name the same first; more can then be "
            "withdrawn from the run that this makes.",
            code=OTHER,
        )


def note_request(context: SiloContext, exchange: tuple[str, int], *, asked: bool, proven: bool) -> None:
    """Note the names before their sums leave; refuse classes and sums for a state that a server could choose.

    Once a term has left, the others can open it without this silo, so this must not wait for its shares.

    Args:
        exchange: kind and index of the phase.
        asked: whether numbers and classes were asked before, according to the state that the request rests
            on.
        proven: whether this silo vouches for that state, and has verified the total that it follows from.

    Raises:
        RunError: TF-523 if either is false, in a secure sum. TF-524 if other records were withdrawn
            meanwhile.
    """
    job = context.job
    if job.withdraw is None or job.resume is not None or exchange not in (CLASSES, SUMS):
        return
    if job.summation == "secure" and not proven:
        raise RunError(
            "Expected classes and sums of the withdrawn records to be asked on the state that follows from "
            "the exchange before, with a total that is verified, but this silo cannot vouch for it: nothing "
            "is taken out.",
            code="TF-523",
        )
    if exchange == CLASSES:
        context.withdrawn.check_again()
    if asked and exchange == SUMS:  # else these records are in no sum
        context.withdrawn.note()


def _read(path: Path) -> frozenset[str]:
    """Read names; none if there is no such file.

    Raises:
        RunError: TF-522 if it is damaged.
    """
    if not path.is_file():
        return frozenset()
    try:
        names = json.loads(path.read_bytes())["records"]
        if not all(isinstance(name, str) for name in names):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"Expected the names of withdrawn records in {path}, but it is damaged ({type(error).__name__}): "
            "restore it from a backup.",
            code="TF-522",
        ) from None
    return frozenset(names)


def _write(path: Path, names: Iterable[str]) -> None:
    write_atomically(path, json.dumps({"records": sorted(names)}).encode(), mode=0o600)


def _lists(path: Path) -> dict[str, list[str]]:
    """Read the site's lists by data set.

    Raises:
        RunError: TF-522 if the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        lists = json.loads(path.read_bytes())
        if not all(isinstance(name, str) for names in lists.values() for name in names):
            raise TypeError
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"Expected the records that this site has withdrawn in {path}, but it is damaged "
            f"({type(error).__name__}): restore it from a backup.",
            code="TF-522",
        ) from None
    return dict(lists)
