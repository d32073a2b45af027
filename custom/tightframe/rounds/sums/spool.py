"""Files of the masked terms that the server keeps until the silos have verified their total."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from tightframe.securesum.messages import Group


class FileSpool:
    """A spool in a temporary folder (``TMPDIR``), which only its owner can read.

    It is there while it holds terms, and no longer than the process. Terms are masked, so that the files
    tell no more than the messages that the server received.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def keep(self, slot: int, site: str, group: Group, data: bytes) -> None:
        """Keep one group of a site's masked term."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tightframe-terms-")
        _path(self._folder.name, slot, site, group).write_bytes(data)

    def read(self, slot: int, site: str, group: Group) -> bytes:
        """Return what was kept.

        Raises:
            FileNotFoundError: if nothing was.
        """
        if self._folder is None:
            raise FileNotFoundError(f"Expected the {group} term of {site} in slot {slot}, but none is kept.")
        return _path(self._folder.name, slot, site, group).read_bytes()

    def erase(self, slot: int) -> None:
        """Erase all terms of a slot."""
        if self._folder is None:
            return
        folder = Path(self._folder.name)
        for path in folder.glob(f"{slot}-*"):
            path.unlink()
        if not any(folder.iterdir()):
            self._folder.cleanup()
            self._folder = None


def _path(folder: str, slot: int, site: str, group: Group) -> Path:
    # A silo's name need not be one of a file.
    name = hashlib.sha256(site.encode()).hexdigest()
    return Path(folder) / f"{slot}-{group}-{name}"
