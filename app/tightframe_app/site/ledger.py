"""A site's privacy ledger: whether it is this account's alone, and whole under the roots that it may have."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe_app.ledger.job import DELTA
from tightframe_app.site.findings import Asked, Finding, State

if TYPE_CHECKING:
    from tightframe.config.site import SiteEntry
    from tightframe.privacy.ledger.entries import Entry
    from tightframe.rounds.lasting import Places

AREA = "ledger"
BEGIN = "`tightframe ledger begin` says what is forgotten, and begins anew"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Looked:
    """Findings about a site's ledger.

    Attributes:
        findings: what a job with differential privacy would stumble over.
        entries: all of a whole ledger, none of one that is not there yet; None where it cannot be told.
    """

    findings: tuple[Finding, ...] = ()
    entries: tuple[Entry, ...] | None = None


def look(entry: SiteEntry, name: str | None, asked: Asked) -> Looked:
    """Read a ledger; nothing is written."""
    from tightframe.privacy.ledger.ledger import ledger_expected
    from tightframe.rounds.lasting import Places, lost

    if entry.state_dir is None or not Path(entry.state_dir).is_dir():
        return Looked()
    if name is None:
        return _one("note", "not looked at: say with --site whose it is")
    places = Places.of_site(Path(entry.state_dir), name, asked.kit_root)
    path = places.ledger
    if not path.exists() and (gone := lost(places, None)) is not None:
        return _one("problem", f"TF-620: {gone}: restore the newest backup; if there is none, {BEGIN}")
    if not ledger_expected(path):
        old = f"; it takes over {places.old_journal}" if places.old_journal.exists() else ""
        text = f"{path}: none yet; the first job with secure sums or differential privacy makes it{old}"
        return Looked((Finding(AREA, "ok", text),), ())
    if not path.exists():
        return _one(
            "problem", f"TF-704: {path} is gone, and what lies beside it is not: restore it from a backup"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        return _one("problem", f"{path} is open to others (mode {mode:04o}): chmod 0600 {path}")
    if not os.access(path, os.R_OK | os.W_OK):
        return _one("problem", f"{path} cannot be written by this account: run the check as the client's")
    return _whole(places, entry, name, asked)


def _one(state: State, text: str) -> Looked:
    return Looked((Finding(AREA, state, text),))


def _whole(places: Places, entry: SiteEntry, name: str, asked: Asked) -> Looked:
    """Check chain and signatures; signatures only where there is a kit to hold them against."""
    from tightframe.errors import SiteConfigError, TightframeError
    from tightframe.flare.identity import site_identity
    from tightframe.privacy.ledger.entries import TamperError
    from tightframe.rounds.lasting import look as look_at
    from tightframe.rounds.ledger_keys import signature_check, trusted_roots

    check, path = None, places.ledger
    try:
        if asked.startup is not None:
            central = entry.policy.resolve(production=asked.production).central_provisioning
            _, anchor = site_identity(asked.startup, name, production=asked.production, missing_role=central)
            check = signature_check(trusted_roots(entry, anchor), name=name)
        found = look_at(places, check=check).whole
        assert found is not None  # noqa: S101 - it exists
    except TamperError as error:
        hint = " If its first entries were signed in another project, name that one's root in `ledger_roots`."
        return _one("problem", f"{path}: {error}{hint}")
    except SiteConfigError as error:
        return _one("problem", f"{path} was not looked at: {error}")
    except TightframeError as error:
        return _one("problem", str(error))
    how = "whole" if found.signatures else "whole by its hashes; signatures not looked at without a kit"
    text = f"{path}: {len(found.entries)} entries, {how}; {left(found.entries, entry, asked)}"
    return Looked(
        (Finding(AREA, "ok", f"{text}see `tightframe ledger show -c {asked.config}`"),), found.entries
    )


def left(entries: Sequence[Entry], entry: SiteEntry, asked: Asked) -> str:
    """Report the rest of the policy's cap for the site's records; empty where it has no cap."""
    from tightframe.privacy.accounting import guaranteed
    from tightframe.privacy.ledger.rules import events_of
    from tightframe.results.words import rounded_down

    policy = entry.policy.resolve(production=asked.production)
    cap, delta = policy.epsilon_cap, policy.delta_cap or DELTA
    if cap is None:
        return ""
    names = dict.fromkeys(entry.records_id(dataset) for dataset in entry.data)
    said = []
    for name in names:
        number = rounded_down(max(0.0, cap - guaranteed(events_of(entries, name), delta)))
        said.append(f"epsilon {number} of {cap:g}" + (f" for {name}" if len(names) > 1 else ""))
    return f"left: {', '.join(said)} (delta {delta:g}); " if said else ""
