"""Ledgers of simulations, which last for one run: charges in one file, secure sums in another."""

from __future__ import annotations

from pathlib import Path


def run_of(ledger: Path) -> Path | None:
    """Return the simulated run's folder at a site, of whose secure sums or charges a file is the ledger."""
    from tightframe.rounds.context import SECURE_FOLDER, STATE

    places = ledger.absolute().parents
    for depth, name in ((2, STATE), (3, SECURE_FOLDER)):
        if len(places) > depth + 1 and places[depth].name == name:
            return places[depth + 1]
    return None


def charges_beside(ledger: Path) -> Path | None:
    """Return the ledger with the charges of the simulated run whose secure sums are in another one."""
    from tightframe.privacy.ledger.ledger import ledger_path
    from tightframe.rounds.context import STATE

    run = run_of(ledger)
    path = None if run is None else ledger_path(run / STATE, ledger.parent.name)
    return path if path is not None and path.is_file() and not path.samefile(ledger) else None


def ledgers_below(folder: Path) -> list[Path]:
    """Return the ledgers of simulated runs in a site's or a simulator's folder: of charges, if there are."""
    from tightframe.privacy.ledger.ledger import FILE, FOLDER
    from tightframe.rounds.context import SECURE_FOLDER, STATE

    for kind in (STATE, f"{SECURE_FOLDER}/*"):
        for depth in ("", "*/", "*/*/"):
            if found := sorted(folder.glob(f"{depth}{kind}/{FOLDER}/*/{FILE}")):
                return found
    return []
