"""Folders in which a site keeps features of its records on disk, and their deletion.

Torch-free, for ``tightframe site features``; ``encoded/files.py`` has the files' format.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tightframe.files import locked_folder
from tightframe.rounds.state_files import FEATURES, REHEARSAL, STATE

SUFFIX = ".safetensors"


def stored(state_dir: Path) -> Iterator[Path]:
    """Yield the files of features of all sites and jobs below a site's state."""
    for folder in folders(state_dir):
        yield from sorted(folder.rglob(f"*{SUFFIX}"))


def folders(state_dir: Path) -> list[Path]:
    """Return the folders of features: those that outlive jobs, and leftovers of killed jobs."""
    paths = (state_dir / FEATURES, *sorted(state_dir.glob(f"*/*/{FEATURES}")))
    return [path for path in paths if path.is_dir()]


def delete_all(state_dir: Path) -> None:
    """Delete the features of all sites and jobs below a site's state, and leftovers of killed rehearsals.

    Raises:
        OSError: if a file cannot be deleted.
    """
    for folder in folders(state_dir):
        delete(folder)
    for silo in state_dir.glob(f"*/*/{STATE}"):
        delete_left(silo)


def delete_left(state_folder: Path) -> None:
    """Delete the folders of rehearsals that no process holds, in one silo's state of one run."""
    for folder in state_folder.glob(f"{REHEARSAL}*"):
        with locked_folder(folder) as free:
            if free:
                shutil.rmtree(folder)


def delete(folder: Path) -> None:
    """Delete a folder of features, if there is one.

    Raises:
        OSError: if a file cannot be deleted.
    """
    if folder.is_dir():
        shutil.rmtree(folder)
