"""Ledgers with real keys, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.support.securesum.certificates import AT, Issued, issue, make_root

from tightframe.privacy.events import Gaussian
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.entries import Cap, Charge
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.rows import Check
from tightframe.rounds.site_ledger.keys import signature_check
from tightframe.securesum.identity import KeySigner

DELTA = 1e-5
CAP = Cap(epsilon=8.0, delta=DELTA, retries=3)
DATA = "ward-7"


class SiteKeys:
    """A root, a site's signer under it, and what checks its signatures."""

    def __init__(self) -> None:
        self.root: Issued = make_root("project")
        self.signer: KeySigner = issue(self.root, "site-1").signer()

    @property
    def check(self) -> Check:
        """Trusts this root."""
        return signature_check([self.root.anchor()])


def ticking() -> Callable[[], datetime]:
    """A clock that moves on by a second at each look."""
    count = itertools.count()
    return lambda: AT + timedelta(seconds=next(count))


def open_ledger(path: Path, keys: SiteKeys, *, create: bool = False, **changes: Any) -> Ledger:
    """A ledger of these keys."""
    options: dict[str, Any] = {"check": keys.check, "clock": ticking(), **changes}
    return Ledger(path, options.pop("signer", keys.signer), create=create, **options)


def charges_in(path: Path) -> list[Charge]:
    """The charges of a ledger, signatures unchecked."""
    return [entry.charge for entry in read_ledger(path, check=None).entries if entry.charge is not None]


def charges_of(folder: Path, site: str) -> list[Charge]:
    """The charges of a silo's ledger in a simulated run's folder."""
    return charges_in(folder / site / "silo_state" / "privacy" / site / "ledger.sqlite")


def charge(purpose: str = "round 0 class sums", **changes: Any) -> Charge:
    """A small charge."""
    values: dict[str, Any] = {
        "job_id": "a1b2",
        "job_name": "fedmr_isic_dp",
        "purpose": purpose,
        "attempt": 0,
        "dataset_id": DATA,
        "neighbours": "record",
        "event": Gaussian(6.0),
        "cohort": ("site-1", "site-2", "site-3"),
    }
    return Charge(**{**values, **changes})
