"""Data set names by which a site's ledger knows its records: under another name they would have no history.

The spent privacy budget, the cohort of opened counts, the settings of terms and the disclosure of evaluations
are kept under ``dataset_id``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe.data.base import FOLDS, SiloData
from tightframe.data.columns import marked
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.entries import DataNoted, Entry
from tightframe.privacy.ledger.ledger import FILE, FOLDER
from tightframe.privacy.ledger.rules import check_name, known_by_rows
from tightframe.privacy.ledger.store import read_secret

if TYPE_CHECKING:
    from tightframe.privacy.ledger.ledger import Ledger
    from tightframe.rounds.context import SiloContext

BY_ROWS = (
    "an earlier version noted the records of {names} by whole rows or files: under another name, with a "
    "column more, less or changed, or pictures encoded anew, they are not recognised until a job has used "
    "{names} once more"
)


def note_records(context: SiloContext, ledger: Ledger) -> None:
    """Record the hashes by which the ledger recognises a silo's records.

    Raises:
        DatasetError: TF-703, if the same records, or most of them, are known by another name.
        LedgerError, TamperError: TF-704, TF-702, of another site's ledger in the same state folder.
    """
    noted, also = _noted(context, ledger.secret)
    with _one_site_at_a_time(context):
        _check_other_sites(context)
        new = ledger.note_data(noted.dataset_id, noted.fingerprint, noted.sketch, noted.columns, also=also)
    if new is not None and (text := not_compared(ledger.entries(), noted)):
        context.log.warning("%s: %s", context.name, text)


def check_records(context: SiloContext, entries: Sequence[Entry], secret: bytes | None) -> str:
    """Refuse what ``note_records`` would refuse, given the ledger's entries, without writing anything.

    Args:
        secret: the ledger's; None if it has none yet.

    Returns:
        Description of the entries that cannot be compared; empty if there are none.

    Raises:
        DatasetError, LedgerError, TamperError: as ``note_records``.
    """
    _check_other_sites(context)
    noted, also = _noted(context, lambda: secret or b"none yet")
    check_name(entries, noted, also)
    return not_compared(entries, noted)


@contextmanager
def _one_site_at_a_time(context: SiloContext) -> Iterator[None]:
    """Lock, so that two names of a site cannot note the same records at once without seeing each other."""
    if not context.production:
        yield
        return
    descriptor = os.open(
        context.site_ledger.paths.ledger.parents[1], os.O_RDONLY
    )  # over the ledgers of all names
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_other_sites(context: SiloContext) -> None:
    """Refuse records that another site's ledger in the same state folder knows.

    Leads give sites their names: under another name, in another federation or the same, a site has a new
    ledger.
    """
    state = context.site.state_dir
    if not context.production or state is None:
        return
    for path in sorted(Path(state).glob(f"{FOLDER}/*/{FILE}")):
        if path.parent.name != context.name:
            _check_other_site(context, path)


def _check_other_site(context: SiloContext, ledger: Path) -> None:
    secret = read_secret(ledger) or b"none yet"
    noted, also = _noted(context, lambda: secret)
    check_name(read_ledger(ledger, check=None).entries, noted, also, of=ledger.parent.name)


def not_compared(entries: Sequence[Entry], noted: DataNoted) -> str:
    """Describe the records whose older entries have no columns to compare with."""
    names = known_by_rows(entries, noted) if len(noted.columns or "") > len(noted.secret_id) else []
    return BY_ROWS.format(names=", ".join(names)) if names else ""


def _noted(context: SiloContext, secret: Callable[[], bytes]) -> tuple[DataNoted, list[str]]:
    """Return the entry of a silo's records, and other hashes by which older entries know them."""
    name, content = context.site.records_id(context.job.dataset), context.content
    described = fingerprint(context.job.dataset, context.data)
    if content is None:
        return DataNoted(name, described, columns=""), []
    columns = marked(content.combinations, secret()) if content.combinations else ""
    return DataNoted(name, content.digest, content.sketch, columns), [described]


def fingerprint(dataset: str, data: SiloData) -> str:
    """Return a SHA-256 (hex) of data set, source and all labels in order, where records have no hash."""
    digest = hashlib.sha256(json.dumps([dataset, data.source]).encode())
    for fold in FOLDS:
        labels = data.labels(fold)
        digest.update(len(labels).to_bytes(8, "big") + labels.astype("<i8").tobytes())
    return digest.hexdigest()
