"""Files of the masked terms that the server keeps until the silos have verified their total."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tightframe.securesum.messages import GROUPS, Group


class FileSpool:
    """A spool in a temporary folder (``TMPDIR``), which only its owner can read.

    It is there while it holds terms, and no longer than the process. Terms are masked, so that the files
    tell no more than the messages that the server received. Later terms are written over erased ones, which
    takes a fraction of the time of a new file as long as the page cache holds them.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clear()

    def keep(self, slot: int, site: str, group: Group, data: bytes) -> None:
        """Keep one group of a site's masked term."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tightframe-terms-")
        if self._erased[group]:
            path = self._erased[group].pop()
        else:
            self._files += 1
            path = Path(self._folder.name) / str(self._files)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
            stream.write(data)
        self._kept[slot, site, group] = path, len(data)

    def read(self, slot: int, site: str, group: Group) -> bytes:
        """Return what was kept.

        Raises:
            FileNotFoundError: if nothing was.
        """
        if (slot, site, group) not in self._kept:
            raise FileNotFoundError(f"Expected the {group} term of {site} in slot {slot}, but none is kept.")
        path, size = self._kept[slot, site, group]
        with path.open("rb") as stream:
            return stream.read(size)  # an erased term may have been longer

    def erase(self, slot: int) -> None:
        """Forget all terms of a slot; the last one to go takes the folder with it."""
        for place in [place for place in self._kept if place[0] == slot]:
            path, _ = self._kept.pop(place)
            self._erased[place[2]].append(path)
        if self._folder is not None and not self._kept:
            self._folder.cleanup()
            self._clear()

    def _clear(self) -> None:
        self._folder, self._files = None, 0
        self._kept: dict[tuple[int, str, Group], tuple[Path, int]] = {}
        self._erased: dict[Group, list[Path]] = {group: [] for group in GROUPS}
