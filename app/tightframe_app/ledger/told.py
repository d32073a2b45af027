"""A ledger as ``--format json`` tells it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightframe.privacy.ledger.chain import Verified
    from tightframe.privacy.ledger.summary import Spending
    from tightframe_app.ledger.query import Query
    from tightframe_app.outputs import LedgerShown, LedgerVerified


def shown_as_json(query: Query, whole: Verified, spent: list[Spending]) -> LedgerShown:
    """Return what was spent, by data set."""
    from tightframe.privacy.ledger.entries import Charge
    from tightframe.privacy.ledger.summary import event_text
    from tightframe_app.outputs import ChargeLine, DatasetSpending, LedgerShown, Spent

    data_sets = []
    for spending in spent:
        charges = [
            ChargeLine(
                entry=entry.sequence,
                time=entry.time,
                job=charge.job_name,
                job_id=charge.job_id,
                purpose=charge.purpose,
                retry=entry.retry,
                event=event_text(charge.event),
                epsilon=total,
            )
            for entry, total in spending.entries
            if isinstance(charge := entry.content, Charge)
        ]
        told = DatasetSpending(
            dataset=spending.dataset_id,
            neighbours=spending.neighbours,
            charges=tuple(charges),
            spent=Spent.model_validate(spending.spent),
            alone=spending.alone,
            fingerprints=spending.fingerprints,
            left=None if query.epsilon is None else query.epsilon - spending.spent.guaranteed,
        )
        data_sets.append(told)
    return LedgerShown(
        ledger=str(query.path),
        entries=len(whole.entries),
        signatures_checked=whole.signatures,
        delta=query.delta,
        epsilon_cap=query.epsilon,
        data_sets=tuple(data_sets),
    )


def verified_as_json(path: Path, whole: Verified, secure_sums: int, known: int) -> LedgerVerified:
    """Return what is known of a whole ledger.

    Args:
        secure_sums: number of its entries that are about secure sums.
        known: number of heads that it continues.
    """
    from tightframe.rounds.site_ledger.keys import signer_name
    from tightframe_app.ledger.commands import does_not_prove, proves
    from tightframe_app.outputs import LedgerVerified, Signer

    signers = [
        Signer(
            name=signer_name(certificate),
            certificate=name,
            entries=sum(entry.signer == name for entry in whole.entries),
        )
        for name, certificate in sorted(whole.certificates.items())
    ]
    return LedgerVerified(
        valid=True,
        ledger=str(path),
        id=whole.head.ledger,
        entries=len(whole.entries),
        secure_sum_entries=secure_sums,
        first=whole.entries[0].time if whole.entries else None,
        last=whole.entries[-1].time if whole.entries else None,
        signers=tuple(signers),
        head=f"{whole.head.count}:{whole.head.hash}",
        proves=tuple(proves(known)),
        does_not_prove=tuple(does_not_prove(known)),
    )
