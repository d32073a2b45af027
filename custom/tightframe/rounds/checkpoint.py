"""Files that must survive a crash: the server's state after each round, and models.

Tensors are stored as safetensors, never pickled. A file is written under a temporary name, flushed to
disk and renamed, so that a reader finds the old file or the new one, never a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from tightframe.errors import RunError
from tightframe.files import write_atomically
from tightframe.phases import ServerState, Tensors
from tightframe.results.files import CHECKPOINT

DESCRIPTION = "tightframe"
FORMAT = 3
_OF_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}


def tensor_bytes(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """Return canonical safetensors bytes: names sorted, contiguous, on the CPU."""
    plain = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    if any(item.dtype not in _OF_NUMPY for item in plain.values()):
        return safetensors.torch.save(plain, metadata)
    # The same bytes in a quarter of the time, most of which is spent per tensor and not per number.
    return safetensors.numpy.save({name: item.numpy() for name, item in plain.items()}, metadata)


def save_tensors(path: Path, tensors: Tensors, *, mode: int = 0o644) -> str:
    """Write tensors as safetensors and return the file's SHA-256."""
    data = tensor_bytes(tensors)
    write_atomically(path, data, mode=mode)
    return hashlib.sha256(data).hexdigest()


MODEL, EXTRA = "model/", "extra/"


def flattened(state: ServerState) -> dict[str, torch.Tensor]:
    """Return all tensors of a state, named ``model/<name>`` and ``extra/<name>``."""
    flat = {MODEL + name: value for name, value in state.model.items()}
    return flat | {EXTRA + name: value for name, value in state.extra.items()}


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a round.

    Attributes:
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
    # One key, because the order of several keys differs between processes.
    metadata = {DESCRIPTION: json.dumps(described)}
    write_atomically(folder / CHECKPOINT, tensor_bytes(flat, metadata))


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
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        got = described.get("format") if isinstance(described, dict) else type(described).__name__
        raise RunError(
            f"Expected {path} to be a checkpoint of format {FORMAT}, but got {str(got)[:40]}: "
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
