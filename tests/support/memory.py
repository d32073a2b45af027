"""A site's lasting memory with simulated keys, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tightframe.config.site import SiteEntry
from tightframe.rounds.lasting import Lasting, Places
from tightframe.rounds.sums.simulated_identity import simulated_identity
from tightframe.rounds.sums.vault import look_at_journal, remember, turn
from tightframe.securesum.journal import Entry


def memory(folder: Path, site: str = "site-1") -> Lasting:
    """Of one run, in a folder of its own."""
    places = Places(site, folder / "ledger.sqlite", folder / "secure_sum")
    return Lasting(places, SiteEntry(), partial(simulated_identity, "a-run", site, production=False))


def write(lasting: Lasting, entries: Sequence[Entry]) -> None:
    """Add one step's entries."""
    with turn(lasting) as ledger:
        remember(ledger, entries)


def read(lasting: Lasting) -> list[Entry]:
    """All entries."""
    return look_at_journal(lasting.places, check=None)
