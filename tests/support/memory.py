"""A site's ledger with simulated keys, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tightframe.config.site import SiteEntry
from tightframe.rounds.site_ledger import LedgerPaths, SiteLedger
from tightframe.rounds.sums.simulated_identity import simulated_identity
from tightframe.rounds.sums.vault import locked_ledger, read_journal, remember
from tightframe.securesum.site.journal import Entry


def memory(folder: Path, site: str = "site-1") -> SiteLedger:
    """Return the ledger of one run, in a folder of its own."""
    paths = LedgerPaths(site, folder / "ledger.sqlite", folder / "secure_sum")
    return SiteLedger(paths, SiteEntry(), partial(simulated_identity, "a-run", site, production=False))


def write(site_ledger: SiteLedger, entries: Sequence[Entry]) -> None:
    """Write the journal entries of one step."""
    with locked_ledger(site_ledger) as ledger:
        remember(ledger, entries)


def read(site_ledger: SiteLedger) -> list[Entry]:
    """Return all journal entries."""
    return read_journal(site_ledger.paths, check=None)
