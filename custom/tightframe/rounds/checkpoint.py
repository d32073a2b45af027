"""Files that must survive a crash: the server's state after each round, models, a silo's own state.

Tensors are stored as safetensors, never pickled. A file is written under a temporary name, flushed to
disk and renamed, so that a reader finds the old file or the new one, never a part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from tightframe.errors import RunError
from tightframe.files import write_atomically
from tightframe.phases import ServerState, Tensors
from tightframe.results.files import CHECKPOINT
from tightframe.rounds.context import COMMITTED, EARLIER, PROPOSED
from tightframe.rounds.silo.state import LOST, checkpoint_round, damaged, is_training, proposed_in
from tightframe.securesum.messages import SumId

DESCRIPTION = "tightframe"
FORMAT = 3
READABLE = (FORMAT, 2)
"""Formats that are read; the rows of metrics have another form in 2."""


def tensor_bytes(tensors: Tensors) -> bytes:
    """Return canonical safetensors bytes: names sorted, contiguous, on the CPU."""
    return save(_canonical(tensors))


def _canonical(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}


def save_tensors(path: Path, tensors: Tensors, *, mode: int = 0o644) -> str:
    """Write tensors as safetensors and return the file's SHA-256."""
    data = tensor_bytes(tensors)
    write_atomically(path, data, mode=mode)
    return hashlib.sha256(data).hexdigest()


MODEL, EXTRA = "model/", "extra/"


def flattened(state: ServerState) -> dict[str, torch.Tensor]:
    """Return all tensors of a state by one name each: ``model/<name>``, ``extra/<name>``."""
    flat = {MODEL + name: value for name, value in state.model.items()}
    return flat | {EXTRA + name: value for name, value in state.extra.items()}


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a round.

    Attributes:
        state: of the server.
        best: the best model so far by validation; empty while there is none.
        described: ``after_round``, ``job_sha256``, and ``run``, which a resumed run reads
            (``rounds.server.resume``).
    """

    state: ServerState
    best: Tensors
    described: Mapping[str, Any]


def save_state(
    folder: Path,
    state: ServerState,
    *,
    round_number: int,
    job_sha256: str,
    run: Mapping[str, Any] | None = None,
    best: Tensors | None = None,
) -> None:
    """Checkpoint the server's state after a round: one file, replaced as a whole.

    Round, job, the run so far and a SHA-256 over all of it are in the file's metadata, so that a crash
    leaves the old checkpoint or the new one, never parts of two.
    """
    flat = flattened(state) | {f"best/{name}": value for name, value in (best or {}).items()}
    described = {
        "format": FORMAT,
        "after_round": round_number,
        "job_sha256": job_sha256,
        "run": dict(run or {}),
    }
    described["sha256"] = _hash(described, flat)
    # One key, because the order of several differs between processes.
    metadata = {DESCRIPTION: json.dumps(described)}
    write_atomically(folder / CHECKPOINT, save(_canonical(flat), metadata))


def load_state(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        RunError: TF-507 if the file is missing or damaged, TF-521 if another version wrote it.
    """
    try:
        with safe_open(path, "pt") as stream:
            described = json.loads((stream.metadata() or {}).get(DESCRIPTION, "{}"))
            flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"Expected a checkpoint at {path}, but it is missing or damaged: {error}.", code="TF-507"
        ) from None
    if not isinstance(described, dict) or described.get("format") not in READABLE:
        got = described.get("format") if isinstance(described, dict) else type(described).__name__
        raise RunError(
            f"Expected {path} to be a checkpoint of format {FORMAT} or 2, but got {str(got)[:40]}: "
            "another version of tightframe wrote it; resume the job with that version.",
            code="TF-521",
        )
    expected = described.pop("sha256", None)
    actual = _hash(described, flat)
    if actual != expected:
        raise RunError(
            f"Expected {path} to be a checkpoint with SHA-256 {str(expected)[:64]}, but got {actual}: it is "
            "damaged.",
            code="TF-507",
        )
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "extra": {}, "best": {}}
    for name, value in flat.items():
        part, _, rest = name.partition("/")
        if part not in parts or not rest:
            raise RunError(
                f"Expected {path} to hold tensors of {list(parts)}, but got {name[:80]!r}: another version "
                "of tightframe wrote it.",
                code="TF-521",
            )
        parts[part][rest] = value
    return Checkpoint(ServerState(parts["model"], parts["extra"]), parts["best"], described)


def _hash(described: Mapping[str, Any], flat: Tensors) -> str:
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(hashlib.sha256(text.encode()).digest() + tensor_bytes(flat)).hexdigest()


class SiloStateStore:
    """A silo's own state across rounds: proposed with a contribution, committed once its sum is opened.

    The state that ``contribute`` returns is only *proposed*. The next message lists the sums opened since
    and their cohorts; the proposal is committed only if this silo's term was in its sum. The state of the
    round before is kept beside it, for a server that lost the last round (``rounds.silo.state``).
    """

    def __init__(self, folder: Path, silo: str) -> None:
        self._folder = folder
        self._silo = silo
        self._lost = folder / LOST

    def committed(self) -> Tensors:
        """Return the committed state; empty before the first.

        Raises:
            RunError: TF-522 if its file is damaged.
        """
        path = self._folder / COMMITTED
        if not path.is_file():
            return {}
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged(path, error) from None

    def propose(self, sum_id: SumId, state: Tensors) -> None:
        """Store a proposed state beside the committed one; an empty one is not stored.

        Raises:
            RunError: TF-522 if this silo's state of the rounds before is lost.
        """
        if not state:
            return
        if self._lost.is_file():
            raise RunError(
                "Expected this silo's own state of the job that this one continues, because the method keeps "
                "some and this silo took part, but it is missing: an empty one would change the training.",
                code="TF-522",
            )
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = save(_canonical(state), {"sum_id": str(sum_id)})
        write_atomically(self._folder / PROPOSED, data, mode=0o600)

    def settle(self, opened: Mapping[str, list[str]]) -> None:
        """Commit or drop the proposed state.

        Args:
            opened: sum id -> cohort of the sums opened since the last message. A proposal whose sum is not
                among them is dropped.
        """
        if self._lost.is_file() and self._lost.stat().st_size == 0:
            self._check_participation(opened)
        path = self._folder / PROPOSED
        if path.is_file():
            sum_id = proposed_in(path)
            self.commit(sum_id, opened.get(sum_id, []))
            path.unlink(missing_ok=True)

    def commit(self, sum_id: str, cohort: Sequence[str]) -> None:
        """Commit the proposed state if it was made for this sum, and this silo is in it."""
        path, committed = self._folder / PROPOSED, self._folder / COMMITTED
        if self._silo not in cohort or not path.is_file() or proposed_in(path) != sum_id:
            return
        if committed.is_file() and checkpoint_round(proposed_in(committed)) < checkpoint_round(sum_id):
            os.replace(committed, self._folder / EARLIER)
        os.replace(path, committed)

    def _check_participation(self, opened: Mapping[str, list[str]]) -> None:
        """Note from a resumed job's first message whether this silo took part in the jobs before."""
        if any(is_training(sum_id) and self._silo in cohort for sum_id, cohort in opened.items()):
            write_atomically(self._lost, b"took part", mode=0o600)
        else:
            self._lost.unlink()
