"""Check of the accounts that can read a site's records, state and key, or change files that its jobs use."""

from __future__ import annotations

import json
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tightframe.config.site import SiteEntry
from tightframe.errors import TightframeError
from tightframe.files import quoted
from tightframe.flare.accounts import permissions
from tightframe.flare.accounts.permissions import Account, records
from tightframe.flare.identity import SITE_FILE
from tightframe_app.federation.kits import LAUNCHER
from tightframe_app.site.checks.engine import components
from tightframe_app.site.checks.findings import Finding, Scope

AREA = "accounts"
GUIDE = "docs/site-guide.md, Two accounts"


def check_accounts(entry: SiteEntry, scope: Scope) -> Iterator[Finding]:
    """Check that the training account is separate from the engine's; list what other accounts can reach."""
    if scope.startup is None:
        return  # reported as a problem of the identity
    kit = scope.startup.resolve().parent
    owner = _name(kit.stat().st_uid)
    try:
        yield from _unreadable(scope, kit.stat().st_uid)
        if entry.engine_account is None:
            text = (
                f"engine and training run in one account ({owner}): an attacker who controls the engine's "
                f"client can read records, state folder and key. {GUIDE}, explains how to use two"
            )
            yield Finding(AREA, "note", text)
            others = permissions.Account("any account on this machine", -1, frozenset())
            wrong = permissions.separation(kit, entry, others)
        else:
            engine = permissions.Account.named(entry.engine_account)
            if engine.uid == kit.stat().st_uid:
                yield Finding(
                    AREA,
                    "problem",
                    f"TF-742: the kit {kit} belongs to {owner}, which is the engine's account itself",
                )
            wrong = permissions.separation(kit, entry, engine)
            yield from _launcher(scope.local, owner)
            yield from _engine_kit(scope, engine, kit, owner)
    except TightframeError as error:
        yield Finding(AREA, "problem", str(error))
        return
    except PermissionError as error:
        yield Finding(AREA, "problem", f"cannot read {error.filename}: run this check as {owner}")
        return
    for line in wrong:
        # Files that everybody can change are a problem even with one account.
        grave = entry.engine_account is not None or " can change " in line
        yield Finding(AREA, "problem" if grave else "note", f"{_code(entry)}{line}")
    if not wrong:
        other = entry.engine_account or "another account"
        text = (
            f"{other} can read neither records, state folder nor key of {owner}, and can change no file that "
            "its jobs use"
        )
        yield Finding(AREA, "ok", text)
    yield from _modes(entry, kit)


def _unreadable(scope: Scope, uid: int) -> Iterator[Finding]:
    """Report the site's own file if the account of its kit cannot read it, though root can."""
    config, owner = scope.config.resolve(), _name(uid)
    holder = config.stat().st_uid
    try:
        account = Account.named(owner)
    except TightframeError:  # an account without a name, as in a container
        account = Account(owner, uid, frozenset())
    if holder != uid and not account.may(config, permissions.READ):
        text = (
            f"TF-202: {config} belongs to {_name(holder)}, and {owner}, which has the kit, cannot read it: "
            f"chown {owner} {quoted(config)}"
        )
        yield Finding(AREA, "problem", text)


def _engine_kit(scope: Scope, engine: Account, kit: Path, owner: str) -> Iterator[Finding]:
    """Check that the engine's own kit has its own key, readable by its account alone, and our launcher."""
    if scope.engine_kit is None:
        text = "the engine's own kit was not checked: give its folder with --engine-kit, as root"
        yield Finding(AREA, "note", text)
        return
    # The folder may be the kit or its `startup`, as with --kit.
    root = scope.engine_kit.resolve()
    root = root.parent if root.name == "startup" else root
    if root == kit:
        yield Finding(AREA, "problem", f"TF-745: {root} is the training account's kit, not a second one")
        return
    engine_files, own_files = (_identity_files(place / "startup" / SITE_FILE) for place in (root, kit))
    if engine_files is None or own_files is None:
        place = root if engine_files is None else kit
        yield Finding(AREA, "problem", f"{place}/startup holds no readable {SITE_FILE} with a certificate")
        return
    (key, public), before = engine_files, own_files[1]
    wrong: list[str] = []
    if public == before:
        wrong.append(
            f"TF-745: the engine's kit {root} has the key that signs secure sums: ask for a second "
            "certificate"
        )
    if not key.is_file():
        wrong.append(f"TF-615: the engine's kit has no key at {key}")
    else:
        status, mode = key.stat(), stat.S_IMODE(key.stat().st_mode)
        if status.st_uid != engine.uid:
            wrong.append(
                f"TF-742: the engine's key {key} belongs to {_name(status.st_uid)}: "
                f"chown {engine.name} {quoted(key)}"
            )
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            wrong.append(
                f"TF-742: accounts other than {engine.name} can read the engine's key {key} "
                f"(mode {mode:04o}): chmod 0600 {quoted(key)}"
            )
    for folder in (root, root / "local", root / "startup"):
        if folder.is_dir() and folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong.append(f"TF-742: others can change the engine's {folder}: chmod go-w {quoted(folder)}")
    yield from (Finding(AREA, "problem", line) for line in wrong)
    if not wrong:
        yield Finding(AREA, "ok", f"engine's kit {root}: a key of its own, for {engine.name} alone")
    yield from _launcher(root / "local", owner)


def _identity_files(config: Path) -> tuple[Path, bytes] | None:
    """Return the key's path and the certificate's public key (DER); None if a kit has none."""
    try:
        client = json.loads(config.read_text(encoding="utf-8"))["client"]
        certificate = x509.load_pem_x509_certificate((config.parent / client["ssl_cert"]).read_bytes())
        key = config.parent / client["ssl_private_key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key, certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _launcher(local: Path, owner: str) -> Iterator[Finding]:
    """Report any other launcher: with two accounts, none may start jobs in the engine's account."""
    launchers = [item for item in components(local) if "auncher" in str(item.get("path"))]
    paths = [str(item.get("path")) for item in launchers]
    if paths != [LAUNCHER]:
        text = (
            f"{local}/resources.json names the launchers {paths}, not ours alone, so that a job could be "
            "started in the engine's account: run tightframe federation add-site with "
            f"--training-account {owner}"
        )
        yield Finding(AREA, "problem", text)
        return
    arguments = launchers[0].get("args")
    account = arguments.get("account") if isinstance(arguments, dict) else None
    if account != owner:
        text = f"{local}/resources.json says that {account} trains, but this kit belongs to {owner}"
        yield Finding(AREA, "problem", text)


def _modes(entry: SiteEntry, kit: Path) -> Iterator[Finding]:
    """Report the owner and mode of records, state folder and kit."""
    places = [("kit", kit), *(("records", path) for path in records(entry))]
    places += [] if entry.state_dir is None else [("state folder", Path(entry.state_dir))]
    for what, path in places:
        if path.exists():
            status = path.stat()
            mode = stat.S_IMODE(status.st_mode)
            yield Finding(AREA, "ok", f"{what} {path}: owner {_name(status.st_uid)}, mode {mode:04o}")


def _code(entry: SiteEntry) -> str:
    return "TF-742: " if entry.engine_account is not None else ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"account {uid}" if uid != os.getuid() else "this account"
