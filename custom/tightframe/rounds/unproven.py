"""Files of a run's end at a silo, kept apart from its results until the total that they rest on is proven.

The last total of a run is proven by a later sum (the closing, the personal models, a seal), once this silo
gives its shares of it: then all silos have named the same state and total, and the terms add up. A server
that tells one silo a false last total gets no shares from it. The task ``reveal`` does this without torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightframe.files import sync_folder, write_json
from tightframe.results.files import LOCAL, MODEL, NEEDS, PERSONAL, UNPROVEN
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import Notes, verified_total
from tightframe.rounds.state_files import TOLD
from tightframe.securesum.messages import Total

FILES = (MODEL, PERSONAL, LOCAL)
"""Files of a silo's results, in the order in which they are published: none is loaded without its report."""


@dataclass(frozen=True)
class Needs:
    """Notes that a silo needs before its files for a sum become its results (``notes.note_verified``).

    Attributes:
        words: to be noted; none where nothing is to be proven.
        since: number of words noted before. A state noted earlier proves nothing: a false total that changes
            nothing would leave the state as in the round before.
    """

    words: tuple[str, ...] = ()
    since: int = 0

    @classmethod
    def of(cls, context: SiloContext, state: str, total: Total | None) -> Needs:
        """Return what proves the state that a request rests on; nothing does in plain sums.

        A state that rests on verified totals is no exception: a server could end the run there for one silo.

        Args:
            state: SHA-256 (hex) of the run's state.
            total: the last one that the server named; None if there is none.
        """
        if context.job.summation != "secure":
            return cls()
        words = [state]
        if total is not None and (context.state_folder / TOLD).is_file():  # the silo's own state does so, too
            words.append(verified_total(total))
        return cls(tuple(words), len(Notes.read(context.state_folder).words))

    @classmethod
    def read(cls, value: Any) -> Needs:
        """Read ``stored``; an unreadable file is never proven."""
        try:
            return cls(tuple(map(str, value["words"])), int(value["since"]))
        except (KeyError, TypeError, ValueError):
            return cls(("unreadable",))

    def stored(self) -> dict[str, Any]:
        """Return plain values."""
        return {"words": list(self.words), "since": self.since}

    def proven(self, context: SiloContext) -> bool:
        """Check whether this silo has noted all of it."""
        return not self.words or set(self.words) <= set(Notes.read(context.state_folder).words[self.since :])


NO_NEEDS = Needs()


def begin(context: SiloContext, needs: Needs) -> Path:
    """Return the folder for a new final model, after deleting files kept apart before."""
    shutil.rmtree(context.run_dir / UNPROVEN, ignore_errors=True)
    return place(context, needs)


def place(context: SiloContext, needs: Needs) -> Path:
    """Return the folder for files of the run's end. While one is kept apart, all later ones are, too."""
    apart = context.run_dir / UNPROVEN
    if (earlier := _needed(apart)) is None and needs.proven(context):
        return context.run_dir
    apart.mkdir(parents=True, exist_ok=True, mode=0o700)
    stored = [item.stored() for item in (*(earlier or ()), needs)]
    write_json(apart / NEEDS, stored, mode=0o600)
    return apart


def current(context: SiloContext) -> Path:
    """Return the folder for additions to the report."""
    apart = context.run_dir / UNPROVEN
    return context.run_dir if _needed(apart) is None else apart


def reported(context: SiloContext) -> Path | None:
    """Return the folder with this silo's report; None if it has none."""
    folders = (current(context), context.run_dir)
    return next((folder for folder in folders if (folder / LOCAL).is_file()), None)


def publish(context: SiloContext) -> bool:
    """Publish the files kept apart as this silo's results, if proven by now; else the next task tries again.

    Returns:
        whether no unproven file is left.
    """
    apart = context.run_dir / UNPROVEN
    needed = _needed(apart)
    if needed is None:
        return True
    if not all(item.proven(context) for item in needed):
        return False
    try:
        for name in FILES:
            if (apart / name).is_file():
                os.replace(apart / name, context.run_dir / name)
        sync_folder(context.run_dir)
        shutil.rmtree(apart)
    except OSError as error:
        context.log.error(
            "%s: final model and report are proven, but could not be moved from %s: %s",
            context.name,
            apart,
            error.strerror,
        )
        return True
    report = context.run_dir / LOCAL
    context.log.info("%s: final model and report (this silo's own): %s", context.name, report)
    if context.write_page is not None:
        context.write_page(context.run_dir, context.log)
    return True


def end(context: SiloContext) -> None:
    """Name in this silo's log the files still unproven when the run has ended."""
    if not publish(context):
        apart = context.run_dir / UNPROVEN
        context.log.error(
            "TF-827: %s: what the run ended with was never proven: this silo gave no shares of a sum that "
            "verifies the total behind it. %s in %s: none of this silo's results.",
            context.name,
            ", ".join(name for name in FILES if (apart / name).is_file()) or "nothing",
            apart,
        )


def _needed(apart: Path) -> Iterable[Needs] | None:
    """Return the needs of all files kept apart; None if there are none."""
    if not (path := apart / NEEDS).is_file():
        return None
    try:
        return [Needs.read(item) for item in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, RecursionError):
        return [Needs.read(None)]
