"""A hash of the records in a job's exact sums, by which a site's release profile knows them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from tightframe.data.base import FOLDS
from tightframe.rounds.context import SiloContext
from tightframe.rounds.site_ledger.known_records import fingerprint

if TYPE_CHECKING:
    from tightframe.rounds.setup import JobSetup


def summed_sha256(context: SiloContext, setup: JobSetup) -> str:
    """Return a SHA-256 (hex) of the records in exact sums: other records make other totals.

    For pictures it covers the files, which were read already, and labels in order; otherwise inputs and
    labels of each fold, in any order. The evaluation's records count, too: it is of nearly the same model.
    """
    if not context.has_rows and context.content is not None:
        own = json.dumps([context.content.digest, fingerprint(context.job.dataset, context.data)])
        return hashlib.sha256(own.encode()).hexdigest()
    import torch

    from tightframe.learning.few_records.distinct_rows import row_digests
    from tightframe.rounds.silo.view import LocalSilo

    digest, silo = hashlib.sha256(), LocalSilo(context, setup, torch.device("cpu"), 0)
    for fold in FOLDS:
        each = [
            json.dumps(label).encode() + row
            for inputs, labels in silo.batches(fold, augment=False, shuffle=False)
            for row, label in zip(row_digests(inputs), labels.tolist(), strict=True)
        ]
        digest.update(b"".join([f"{fold} {len(each)}\n".encode(), *sorted(each)]))
    return digest.hexdigest()
