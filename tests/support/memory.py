"""A site's lasting memory with simulated keys, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tightframe.config.site import SiteEntry
from tightframe.rounds.site_ledger import LedgerPaths, SiteLedger
from tightframe.rounds.sums.simulated_identity import simulated_identity
from tightframe.rounds.sums.vault import locked_ledger, read_journal, remember
from tightframe.securesum.journal import Entry


def memory(folder: Path, site: str = "site-1") -> SiteLedger:
    """Of one run, in a folder of its own."""
    places = LedgerPaths(site, folder / "ledger.sqlite", folder / "secure_sum")
    return SiteLedger(places, SiteEntry(), partial(simulated_identity, "a-run", site, production=False))


def write(lasting: SiteLedger, entries: Sequence[Entry]) -> None:
    """Add one step's entries."""
    with locked_ledger(lasting) as ledger:
        remember(ledger, entries)


def read(lasting: SiteLedger) -> list[Entry]:
    """All entries."""
    return read_journal(lasting.paths, check=None)
