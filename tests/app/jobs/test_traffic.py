"""What a job's tasks move, told beforehand: against what a run counts, and the engine's own waiting."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.streaming import stream_const
from nvflare.fuel.f3.streaming.stream_types import StreamFuture

from tightframe import federation
from tightframe.rounds.setup import prepare
from tightframe_app.jobs import recipes
from tightframe_app.jobs.folders import LINE, UNSEEN, Traffic


@pytest.mark.whole
@pytest.mark.parametrize("name", ["fedetf_heart", "fedilc_eicu"])
def test_it_is_what_a_run_counts(name: str, tmp_path: Path) -> None:
    """A run counts the bytes of messages; what they have beside tensors is a few kilobytes."""
    changes: dict[str, Any] = {"rounds": 1, "summation": "plain", "personalise": False}
    job = recipes.get(name).job(sites=["a", "b", "c"], changes=changes)
    told = Traffic.of(prepare(job))
    federation.run_job(job, folder=tmp_path)
    lines = (tmp_path / "server" / "metrics.jsonl").read_text().splitlines()
    asked = [row for row in map(json.loads, lines) if row["silos"]]
    counted = [tuple(row[way] / len(row["silos"]) for way in ("bytes_down", "bytes_up")) for row in asked]
    assert told.down <= max(down for down, _ in counted) <= told.down + 4096
    assert told.up <= max(up for _, up in counted) <= told.up + 4096


def test_a_large_model_is_told_to_need_more_time() -> None:
    small, large = Traffic(400_000, 500_000, 120, 40), Traffic(146_000_000, 146_000_000, 600, 200)
    assert small.seconds() == pytest.approx(0.72) and large.seconds() == pytest.approx(233.6)
    assert str(small) == (
        "a task moves up to 0.40 MB to a silo and 0.50 MB back: 0.7 s of its 120 s on a line of 10 Mbit/s"
    )
    assert "raise `site_timeout`, or ensure that no line is slower than 7.8 Mbit/s" in str(large)
    assert Traffic(146_000_000, 146_000_000, 3600, 1200).seconds(2 * LINE) == pytest.approx(116.8)
    assert "raise" not in str(Traffic(146_000_000, 146_000_000, 3600, 1200))
    # Where little comes down, the answer's way alone decides; of a very large one its last 64 MiB.
    assert Traffic(0, 30_000_000, 120, 40).slowest == pytest.approx(6.0)
    assert Traffic(0, 10**9, 12_000, 40).slowest == pytest.approx(8 * 64 * 2**20 / 40e6)


def test_the_engine_waits_as_long_as_bytes_move_but_sees_only_those_it_has_not_handed_over() -> None:
    """What the rule rests on: ``submit_task_result_timeout`` is of no progress, not of the whole."""
    assert stream_const.STREAM_WINDOW_SIZE == UNSEEN
    cell: Any = SimpleNamespace(logger=logging.getLogger("test"), _check_error=lambda future: False)

    def waits(steps: int) -> bool:
        """Of an answer that has moved a step at the end of each of so many times, and is there after them."""
        future = StreamFuture(1)

        def moved() -> int:
            if future.progress < steps:
                future.set_progress(future.progress + 1)
                if future.progress == steps:
                    future.set_result(steps)
            return int(future.progress)

        future.get_progress = moved  # type: ignore[method-assign]
        return bool(Cell._future_wait(cell, future, 0.1, Signal()))

    assert waits(5), "0.5 s in all, never 0.1 s without any progress"
    assert not waits(0)
