"""A site's privacy ledger: whether it is this account's alone, and whole under the roots that it may have."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe_app.site_findings import Asked, Finding

if TYPE_CHECKING:
    from tightframe.config.site import SiteEntry

AREA = "ledger"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def look(entry: SiteEntry, name: str | None, asked: Asked) -> Iterator[Finding]:
    """What a job with differential privacy would stumble over; nothing is written."""
    from tightframe.privacy.ledger.ledger import ledger_path

    if entry.state_dir is None or not Path(entry.state_dir).is_dir():
        return
    if name is None:
        yield Finding(AREA, "note", "not looked at: say with --site whose it is")
        return
    path = ledger_path(Path(entry.state_dir), name)
    if not path.exists():
        yield Finding(AREA, "ok", f"{path}: none yet; the first job with differential privacy makes it")
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        yield Finding(AREA, "problem", f"{path} is open to others (mode {mode:04o}): chmod 0600 {path}")
    elif not os.access(path, os.R_OK | os.W_OK):
        text = f"{path} cannot be written by this account: run the check as the client's"
        yield Finding(AREA, "problem", text)
    else:
        yield _whole(path, entry, name, asked)


def _whole(path: Path, entry: SiteEntry, name: str, asked: Asked) -> Finding:
    """Whether its chain and signatures hold; signatures only where there is a kit to hold them against."""
    from tightframe.errors import SiteConfigError, TightframeError
    from tightframe.flare.identity import site_identity
    from tightframe.privacy.ledger.chain import read_ledger
    from tightframe.privacy.ledger.entries import TamperError
    from tightframe.rounds.private.ledger_keys import signature_check, trusted_roots

    check = None
    try:
        if asked.startup is not None:
            central = entry.policy.resolve(production=asked.production).central_provisioning
            _, anchor = site_identity(asked.startup, name, production=asked.production, missing_role=central)
            check = signature_check(trusted_roots(entry, anchor), name=name)
        found = read_ledger(path, check=check)
    except TamperError as error:
        hint = " If its first entries were signed in another project, name that one's root in `ledger_roots`."
        return Finding(AREA, "problem", f"{path}: {error}{hint}")
    except SiteConfigError as error:
        return Finding(AREA, "problem", f"{path} was not looked at: {error}")
    except TightframeError as error:
        return Finding(AREA, "problem", str(error))
    how = "whole" if found.signatures else "whole by its hashes; signatures not looked at without a kit"
    return Finding(AREA, "ok", f"{path}: {len(found.entries)} entries, {how}; see `tightframe ledger show`")
