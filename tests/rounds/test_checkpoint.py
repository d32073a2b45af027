"""Files survive a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tightframe.errors import RunError
from tightframe.phases import ServerState
from tightframe.results.files import CHECKPOINT
from tightframe.rounds import checkpoint

STATE = ServerState({"w": torch.arange(6.0).reshape(2, 3)}, {"prototypes": torch.ones(2, 2)})


def test_state_comes_back_whole(tmp_path: Path) -> None:
    checkpoint.save_state(tmp_path, STATE, round_number=3, job_sha256="abc")
    found = checkpoint.load_state(tmp_path / CHECKPOINT)
    state = found.state
    assert found.described["after_round"] == 3 and found.described["job_sha256"] == "abc" and not found.best
    assert torch.equal(state.model["w"], STATE.model["w"])
    assert torch.equal(state.extra["prototypes"], STATE.extra["prototypes"])


def test_torn_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint.save_state(tmp_path, STATE, round_number=3, job_sha256="abc")
    path = tmp_path / CHECKPOINT
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RunError, match="TF-507"):
        checkpoint.load_state(path)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    checkpoint.write_atomically(path, b"old")

    def crash(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
