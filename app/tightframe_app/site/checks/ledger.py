"""Check of a site's privacy ledger: its permissions, chain and signatures."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightframe.config.profiles import DELTA
from tightframe.config.site import SiteEntry
from tightframe.errors import SiteConfigError, TightframeError
from tightframe.files import quoted
from tightframe.flare.identity import site_identity
from tightframe.privacy.accounting import guaranteed
from tightframe.privacy.ledger.entries import Entry, TamperError
from tightframe.privacy.ledger.ledger import ledger_expected
from tightframe.privacy.ledger.rules import events_of
from tightframe.results.words import rounded_down
from tightframe.rounds.site_ledger import LedgerPaths, describe_loss, read_contents
from tightframe.rounds.site_ledger.keys import signature_check, trusted_roots
from tightframe_app.site.checks.findings import Finding, Scope, State

AREA = "ledger"
BEGIN = "`tightframe ledger begin` lists what is forgotten, and begins a new one"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class LedgerFindings:
    """Findings about a site's ledger.

    Attributes:
        findings: problems that would stop a job with differential privacy.
        entries: of an intact ledger; empty if there is none yet; None if unknown.
    """

    findings: tuple[Finding, ...] = ()
    entries: tuple[Entry, ...] | None = None


def check_ledger(entry: SiteEntry, name: str | None, scope: Scope) -> LedgerFindings:
    """Check a site's ledger without writing."""
    if entry.state_dir is None or not Path(entry.state_dir).is_dir():
        return LedgerFindings()
    if name is None:
        return _single("note", "not checked: name the site with --site")
    places = LedgerPaths.of_site(Path(entry.state_dir), name, scope.kit_root)
    path = places.ledger
    if not path.exists() and (gone := describe_loss(places, None)) is not None:
        return _single("problem", f"TF-620: {gone}: restore the newest backup; if there is none, {BEGIN}")
    if not ledger_expected(path):
        text = f"{path}: none yet; the first job with secure sums or differential privacy creates it"
        return LedgerFindings((Finding(AREA, "ok", text),), ())
    if not path.exists():
        return _single(
            "problem", f"TF-704: {path} is missing, and the files beside it are not: restore it from a backup"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        return _single("problem", f"{path} is open to others (mode {mode:04o}): chmod 0600 {quoted(path)}")
    if not os.access(path, os.R_OK | os.W_OK):
        return _single("problem", f"this account cannot write {path}: run the check as the client's account")
    return _check_chain(places, entry, name, scope)


def _single(state: State, text: str) -> LedgerFindings:
    return LedgerFindings((Finding(AREA, state, text),))


def _check_chain(places: LedgerPaths, entry: SiteEntry, name: str, scope: Scope) -> LedgerFindings:
    """Check the chain, and the signatures if there is a kit."""
    check, path = None, places.ledger
    try:
        if scope.startup is not None:
            central = entry.policy.resolve(production=scope.real).central_provisioning
            _, anchor = site_identity(scope.startup, name, production=scope.production, missing_role=central)
            check = signature_check(trusted_roots(entry, anchor), name=name)
        ledger = read_contents(places, check=check)
        assert ledger is not None  # noqa: S101 - it exists
    except TamperError as error:
        hint = " If its first entries were signed in another project, add that root to `ledger_roots`."
        return _single("problem", f"{path}: {error}{hint}")
    except SiteConfigError as error:
        return _single("problem", f"{path} was not checked: {error}")
    except TightframeError as error:
        return _single("problem", str(error))
    how = "whole" if ledger.signatures else "whole by its hashes; signatures not checked without a kit"
    text = f"{path}: {len(ledger.entries)} entries, {how}; {left(ledger.entries, entry, scope)}"
    return LedgerFindings(
        (Finding(AREA, "ok", f"{text}see `tightframe ledger show -c {quoted(scope.config)}`"),),
        ledger.entries,
    )


def left(entries: Sequence[Entry], entry: SiteEntry, scope: Scope) -> str:
    """Return the rest of the policy's cap for the site's records; empty without a cap."""
    policy = entry.policy.resolve(production=scope.real)
    cap, delta = policy.epsilon_cap, policy.delta_cap or DELTA
    if cap is None:
        return ""
    names = dict.fromkeys(entry.records_id(dataset) for dataset in entry.data)
    budgets = []
    for name in names:
        number = rounded_down(max(0.0, cap - guaranteed(events_of(entries, name), delta)))
        budgets.append(f"epsilon {number} of {cap:g}" + (f" for {name}" if len(names) > 1 else ""))
    return f"left: {', '.join(budgets)} (delta {delta:g}); " if budgets else ""
