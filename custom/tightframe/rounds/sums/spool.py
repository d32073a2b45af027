"""Files of the masked terms that the server keeps until the silos have verified their total."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from tightframe.securesum.messages import Group


class FileSpool:
    """A spool in a temporary folder, which only its owner can read; it disappears with the process.

    Terms are masked, so that the files tell no more than the messages that the server received.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tightframe-terms-")

    def keep(self, slot: int, site: str, group: Group, data: bytes) -> None:
        """Keep one group of a site's masked term."""
        self._path(slot, site, group).write_bytes(data)

    def read(self, slot: int, site: str, group: Group) -> bytes:
        """Return what was kept."""
        return self._path(slot, site, group).read_bytes()

    def erase(self, slot: int) -> None:
        """Erase all terms of a slot."""
        for path in Path(self._folder.name).glob(f"{slot}-*"):
            path.unlink()

    def _path(self, slot: int, site: str, group: Group) -> Path:
        # A silo's name need not be one of a file.
        name = hashlib.sha256(site.encode()).hexdigest()
        return Path(self._folder.name) / f"{slot}-{group}-{name}"
