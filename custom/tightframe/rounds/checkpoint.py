"""Files that must survive a crash: the server's state each round, models, a silo's own state.

Tensors are stored as safetensors, never pickled. A file is written beside its place, flushed to
disk and renamed over it, so that a reader finds the old one or the new one, whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from tightframe.errors import RunError
from tightframe.files import write_atomically
from tightframe.phases import ServerState, Tensors
from tightframe.securesum.messages import SumId

CHECKPOINT = "checkpoint.safetensors"
DESCRIPTION = "tightframe"


def tensor_bytes(tensors: Tensors) -> bytes:
    """Canonical safetensors bytes: names sorted, contiguous, on the CPU."""
    return save(_canonical(tensors))


def _canonical(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}


def save_tensors(path: Path, tensors: Tensors, *, mode: int = 0o644) -> str:
    """Write tensors as safetensors and return the file's SHA-256."""
    data = tensor_bytes(tensors)
    write_atomically(path, data, mode=mode)
    return hashlib.sha256(data).hexdigest()


def save_state(folder: Path, state: ServerState, *, round_number: int, job_sha256: str) -> None:
    """Checkpoint the server's state after a round: one file, replaced as a whole.

    Round, job and the SHA-256 of the tensors' canonical bytes are in the file's own metadata, so
    that a crash leaves the old checkpoint or the new one, never parts of two.
    """
    flat = {f"model/{name}": value for name, value in state.model.items()}
    flat |= {f"extra/{name}": value for name, value in state.extra.items()}
    described = {
        "format": 1,
        "after_round": round_number,
        "job_sha256": job_sha256,
        "sha256": hashlib.sha256(tensor_bytes(flat)).hexdigest(),
    }
    # One key, because the order of several is not the same in every process.
    metadata = {DESCRIPTION: json.dumps(described)}
    write_atomically(folder / CHECKPOINT, save(_canonical(flat), metadata))


def load_state(folder: Path) -> tuple[ServerState, dict[str, Any]]:
    """Read a checkpoint back: the state, and what was written of it.

    Raises:
        RunError: TF-507 if the tensors are not those that were written.
    """
    with safe_open(folder / CHECKPOINT, "pt") as stream:
        described: dict[str, Any] = json.loads((stream.metadata() or {}).get(DESCRIPTION, "{}"))
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (no mapping)
    found = hashlib.sha256(tensor_bytes(flat)).hexdigest()
    if found != described.get("sha256"):
        raise RunError(
            f"Expected a checkpoint with SHA-256 {described.get('sha256')}, but got {found}: it is torn.",
            code="TF-507",
        )
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "extra": {}}
    for name, value in flat.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = value
    return ServerState(parts["model"], parts["extra"]), described


class SiloStateStore:
    """A silo's own state across rounds: proposed with a contribution, committed on evidence.

    What ``contribute`` returns is only *proposed*. The next message tells which sums were opened
    over which cohort; only if this silo's term was in it does the proposal become its state.
    """

    def __init__(self, folder: Path, silo: str) -> None:
        self._folder = folder
        self._silo = silo

    def committed(self) -> Tensors:
        """The state that the last opened sum confirmed; empty before the first."""
        path = self._folder / "committed.safetensors"
        return load_file(path) if path.is_file() else {}

    def propose(self, sum_id: SumId, state: Tensors) -> None:
        """Keep a proposed state beside the committed one; an empty one is not stored."""
        if not state:
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = save(_canonical(state), {"sum_id": str(sum_id)})
        write_atomically(self._folder / "proposed.safetensors", data, mode=0o600)

    def settle(self, opened: Mapping[str, list[str]]) -> None:
        """Commit or drop the proposal, given sum id -> cohort of the sums opened since.

        Without a word about the proposal's sum it was not opened: the proposal is dropped.
        """
        path = self._folder / "proposed.safetensors"
        if not path.is_file():
            return
        with safe_open(path, "pt") as stream:
            sum_id = stream.metadata()["sum_id"]
        if self._silo in opened.get(sum_id, []):
            os.replace(path, self._folder / "committed.safetensors")
        else:
            path.unlink()
