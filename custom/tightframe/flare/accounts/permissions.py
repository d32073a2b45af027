"""Rights of a local account to read or change files, from the files' owners and modes."""

from __future__ import annotations

import json
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvflare

import tightframe
from tightframe.config.site import SiteEntry
from tightframe.data.table import Database
from tightframe.data.table.sources.typed import sqlite_file
from tightframe.flare.accounts.request import AccountError
from tightframe.flare.identity import SITE_FILE

READ, WRITE, ENTER = 4, 2, 1
_ACL = ("system.posix_acl_access", "system.posix_acl_default")


@dataclass(frozen=True)
class Account:
    """A local account.

    Attributes:
        groups: ids of all its groups.
    """

    name: str
    uid: int
    groups: frozenset[int]

    @classmethod
    def named(cls, name: str) -> Account:
        """Return the account with a name.

        Raises:
            AccountError: TF-742, if this machine has none.
        """
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise AccountError(
                f"Expected the account {name!r} on this machine, but there is none: create it, or correct "
                "`engine_account` in this site's local/tightframe.json.",
                code="TF-742",
            ) from None
        return cls(name, entry.pw_uid, frozenset(os.getgrouplist(name, entry.pw_gid)))

    def may(self, path: Path, want: int) -> bool:
        """Return True if the account has a right in ``want`` to a path; never to an absent one.

        The modes of the path and of every folder above it count. Where a path has an access list, its widest
        rights count as this account's, because modes do not say who has them.
        """
        try:
            resolved = path.resolve(strict=True)
            return all(self._has(folder, ENTER) for folder in resolved.parents) and self._has(resolved, want)
        except FileNotFoundError:
            return False

    def may_change(self, path: Path) -> bool:
        """Check whether it can write to a path or replace it; an absent path counts if it can create it.

        The owner of a file or folder can give itself every right to it. Each link on the way counts: whoever
        can replace it leads elsewhere.
        """
        ends = {path.absolute(), path.resolve()}
        return any(
            self._owns(one)
            or (not one.is_symlink() and self._has(one, WRITE) and not (one not in ends and _sticky(one)))
            for one in _on_the_way(ends)
        )

    def _owns(self, path: Path) -> bool:
        return self.uid in (0, path.lstat().st_uid)

    def _has(self, path: Path, want: int) -> bool:
        status = path.stat()
        if self.uid == 0:
            return True
        if status.st_uid == self.uid:
            rights = status.st_mode >> 6
        elif status.st_gid in self.groups or _listed(path):
            rights = status.st_mode >> 3
        else:
            rights = status.st_mode
        return bool(rights & want)


def _on_the_way(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield what absolute paths go through, themselves included: folders, links, and where links lead."""
    pending, visited = list(paths), set[Path]()
    while pending:
        path = pending.pop()
        for one in {path, *path.parents} - visited:
            visited.add(one)
            if one.is_symlink():
                pending.append(one.parent / one.readlink())
            if os.path.lexists(one):
                yield one


def _sticky(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_ISVTX)


def _listed(path: Path) -> bool:
    """Check whether a path has an access list; the mode's group bits are then its widest rights."""
    try:
        return any(name in _ACL for name in os.listxattr(path))
    except OSError:
        return False


def separation(kit: Path, entry: SiteEntry, engine: Account) -> list[str]:
    """Describe the training account's files that the engine's account can reach; none if they are separate.

    Args:
        kit: the training account's.
        entry: the configuration in its ``local/tightframe.json``.
        engine: the account of the engine's client.
    """
    return [
        *(["the engine's account is root, which can read everything"] if engine.uid == 0 else []),
        *(f"{engine.name} can read {what} {path}" for what, path in _secret(kit, entry, engine)),
        *(
            f"{engine.name} can change or replace {path}: {what}"
            for what, path in _trusted(kit, entry)
            if engine.may_change(path)
        ),
    ]


def require(kit: Path, entry: SiteEntry) -> None:
    """Refuse to train if the site's configuration asks for two accounts and they are not separate.

    Args:
        kit: the training account's.
        entry: the configuration in its ``local/tightframe.json``.

    Raises:
        AccountError: TF-742, listing everything that the engine's account can reach.
    """
    if entry.engine_account is None:
        return
    engine = Account.named(entry.engine_account)
    same = [f"this process runs as {engine.name} itself"] if engine.uid == os.geteuid() else []
    if wrong := same + separation(kit, entry, engine):
        lines = "\n".join(f"  - {line}" for line in wrong)
        raise AccountError(
            f"Expected the engine's account {entry.engine_account} to have no access to the training "
            f"account's files, as `engine_account` in {kit}/local/tightframe.json asks for, but:\n{lines}\n"
            "Nothing is trained in one account instead. See docs/site-guide.md, Two accounts.",
            code="TF-742",
        )


def _secret(kit: Path, entry: SiteEntry, engine: Account) -> Iterator[tuple[str, Path]]:
    """Yield the secret files that the engine's account can read; entering a folder suffices to read in it."""
    key = _key(kit)
    state = None if entry.state_dir is None else Path(entry.state_dir)
    secrets = [("the key", key), ("the ledger and journal in", state), ("the jobs' results in", kit)]
    secrets += [("records in", path) for path in records(entry)]
    secrets += [("the names of withdrawn records in", path) for path in _withdrawn(entry)]
    for what, path in secrets:
        if path is not None and engine.may(path, READ | (ENTER if path.is_dir() else 0)):
            yield what, path


def records(entry: SiteEntry) -> list[Path]:
    """Return the files and folders of an entry's records, a database's own file too."""
    return [path for values in entry.data.values() for path in (*_paths(values.values()), *_database(values))]


def _withdrawn(entry: SiteEntry) -> list[Path]:
    return [Path(path) for path in entry.withdrawn.values()]


def _database(values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the file of a table's database, if it is one; its address has been checked with the entry."""
    if isinstance(database := values.get("database"), Mapping):
        file = sqlite_file(Database.model_validate(database))
        yield from () if file is None else (file,)


def _paths(values: Iterable[Any]) -> Iterator[Path]:
    for value in values:
        if isinstance(value, str) and value.startswith("/"):
            yield Path(value)
        elif isinstance(value, Mapping):
            yield from _paths(value.values())
        elif isinstance(value, list):
            yield from _paths(value)


def _trusted(kit: Path, entry: SiteEntry) -> Iterator[tuple[str, Path]]:
    """Yield the files on which the job's process relies."""
    if entry.state_dir is not None:
        yield "ledger and journal", Path(entry.state_dir)
    yield from (("records", path) for path in records(entry))
    yield from (("names of withdrawn records", path) for path in _withdrawn(entry))
    yield from (("a root of the ledger", Path(path)) for path in entry.ledger_roots)
    for folder, what in (("local", "policy and allow list"), ("startup", "key and root")):
        yield what, kit / folder
        yield from ((what, path) for path in sorted(kit.glob(f"{folder}/**/*")))
    yield "the programs that run", Path(sys.executable)
    packages = [Path(module.__path__[0]) for module in (nvflare, tightframe)]
    for path in sorted({Path(sys.prefix), *packages, *(Path(one) for one in sys.path if one)}):
        if path.exists():
            yield "the programs that run", path


def _key(kit: Path) -> Path | None:
    try:
        name = json.loads((kit / "startup" / SITE_FILE).read_text(encoding="utf-8"))["client"]
        return kit / "startup" / name["ssl_private_key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
