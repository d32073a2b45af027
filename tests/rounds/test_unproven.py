"""What a silo makes at a run's end is its result once it has noted what proves it, and not before."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightframe.config.job import parse_job
from tightframe.results.files import LOCAL, MODEL, NEEDS, UNPROVEN, not_proven
from tightframe.rounds import unproven
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import note_verified
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.state_files import TOLD
from tightframe.rounds.unproven import Needs
from tightframe.securesum.messages import SumId, Total

STATE = bytes(range(32))
TOTAL = Total(1, SumId(1, "train-0"), "s", ("a",), {"update": b""}, bytes(32))
CLOSING, SEAL = SumId(1, "closing-0"), SumId(0, "seal-0")


@pytest.fixture
def silo(small: dict[str, Any], tmp_path: Path) -> SiloContext:
    context = SiloContext(
        "site-1", parse_job(small | {"summation": "secure"}), None, run_dir=tmp_path / "run"
    )
    context.state_folder.mkdir(parents=True)
    return context


def kept(silo: SiloContext, needs: Needs) -> Path:
    """The silo makes a final model and a report."""
    folder = unproven.begin(silo, needs)
    for name in (MODEL, LOCAL):
        (folder / name).write_bytes(b"")
    return folder


def needs(silo: SiloContext, total: Total | None = TOTAL) -> Needs:
    return Needs.of(silo, STATE.hex(), total)


def is_result(silo: SiloContext) -> bool:
    unproven.publish(silo)
    found = [(silo.run_dir / name).exists() for name in (MODEL, LOCAL)]
    assert found[0] == found[1] == (not (silo.run_dir / UNPROVEN).exists())
    return found[0]


def test_shares_of_a_later_sum_on_the_same_state_prove_it(silo: SiloContext) -> None:
    note_verified(silo.state_folder, STATE, SumId(1, "train-0"))
    kept(silo, needs(silo))
    assert not is_result(silo), "a false total can leave the state as it was"
    note_verified(silo.state_folder, bytes(32), CLOSING)
    assert not is_result(silo)
    note_verified(silo.state_folder, STATE, SEAL)
    assert is_result(silo)


def test_so_does_the_total_that_a_silos_own_state_rests_on(silo: SiloContext) -> None:
    (silo.state_folder / TOLD).write_bytes(b"")
    kept(silo, needs(silo))
    note_verified(silo.state_folder, STATE, CLOSING, replace(TOTAL.told(), slot=2))
    assert not is_result(silo), "another total"
    note_verified(silo.state_folder, STATE, SEAL, TOTAL.told())
    assert is_result(silo)


def test_what_rests_on_no_total_needs_proof_too_but_no_plain_sum(
    silo: SiloContext, small: dict[str, Any], tmp_path: Path
) -> None:
    kept(silo, needs(silo, None))
    assert not is_result(silo), "a server could end the run at its start"
    note_verified(silo.state_folder, STATE, CLOSING)
    assert is_result(silo)
    plain = SiloContext("site-1", parse_job(small | {"summation": "plain"}), None, run_dir=tmp_path / "plain")
    assert needs(plain) == Needs()


def test_what_is_added_meanwhile_needs_its_own_proof_too(silo: SiloContext) -> None:
    kept(silo, needs(silo))
    assert unproven.place(silo, Needs(("other",))) == unproven.current(silo) == unproven.reported(silo)
    note_verified(silo.state_folder, STATE, CLOSING)
    assert not is_result(silo)
    assert kept(silo, needs(silo)).name == UNPROVEN, "a new final model takes the place of all of it"
    note_verified(silo.state_folder, STATE, SEAL)
    assert is_result(silo) and unproven.reported(silo) == silo.run_dir


def test_a_move_that_was_cut_short_is_finished_later(
    silo: SiloContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept(silo, needs(silo))
    note_verified(silo.state_folder, STATE, CLOSING)
    moved, replace = [], os.replace

    def once(source: Path, target: Path) -> None:
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(replace(source, target))

    with monkeypatch.context() as full:
        full.setattr(unproven.os, "replace", once)
        unproven.publish(silo)
        unproven.end(silo)
    assert (silo.run_dir / MODEL).exists() and not (silo.run_dir / LOCAL).exists()
    assert "could not be moved" in caplog.text
    unproven.end(silo)
    assert is_result(silo) and "TF-827" not in caplog.text


def test_what_a_killed_process_proved_is_published_by_the_next_one(silo: SiloContext) -> None:
    kept(silo, needs(silo))
    note_verified(silo.state_folder, STATE, CLOSING)
    assert "killed" in str(not_proven(silo.run_dir / MODEL))
    SiloSession(silo)
    assert (silo.run_dir / MODEL).exists() and not_proven(silo.run_dir / MODEL) is None


@pytest.mark.parametrize("stored", [b"", b"7", b"[7]", b'[{"words": []}]', b"[" * 100_000])
def test_what_cannot_be_read_is_not_proven(silo: SiloContext, stored: bytes) -> None:
    kept(silo, needs(silo))
    note_verified(silo.state_folder, STATE, CLOSING)
    written = json.loads((silo.run_dir / UNPROVEN / NEEDS).read_bytes())
    assert written == [{"words": [STATE.hex()], "since": 0}]
    (silo.run_dir / UNPROVEN / NEEDS).write_bytes(stored)
    assert not is_result(silo)


def test_who_compared_the_models_moves_the_files_as_the_refusal_says(silo: SiloContext) -> None:
    apart = kept(silo, needs(silo))
    refusal = str(not_proven(silo.run_dir))
    assert f"move all files but {NEEDS} out of the folder {UNPROVEN}, and delete it" in refusal
    for name in os.listdir(apart):
        if name != NEEDS:
            os.replace(apart / name, silo.run_dir / name)
    shutil.rmtree(apart)
    assert not_proven(silo.run_dir) is None and not_proven(silo.run_dir / MODEL) is None
