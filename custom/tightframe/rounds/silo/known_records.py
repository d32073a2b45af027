"""Names by which a site's ledger knows its records: under another name they would be without a past.

What a privacy budget has spent, for whom counts were opened, how terms were formed and what evaluations told
is kept under ``dataset_id``.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from tightframe.data.base import FOLDS, SiloData

if TYPE_CHECKING:
    from tightframe.privacy.ledger.ledger import Ledger
    from tightframe.rounds.context import SiloContext


def note_records(context: SiloContext, ledger: Ledger) -> None:
    """Record what a silo's records are, by which the ledger recognises them.

    Older ledgers have ``fingerprint`` alone, so that it is compared beside the content's hash.

    Raises:
        DatasetError: TF-703, if the same records, or most of them, are known by another name.
    """
    name, content = context.site.records_id(context.job.dataset), context.content
    described = fingerprint(context.job.dataset, context.data)
    if content is None:
        ledger.note_data(name, described)
    else:
        ledger.note_data(name, content.digest, content.sketch, also=[described])


def fingerprint(dataset: str, data: SiloData) -> str:
    """Return a SHA-256 (hex) of data set, source and all labels in order, where records have no hash."""
    digest = hashlib.sha256(json.dumps([dataset, data.source]).encode())
    for fold in FOLDS:
        labels = data.labels(fold)
        digest.update(len(labels).to_bytes(8, "big") + labels.astype("<i8").tobytes())
    return digest.hexdigest()
