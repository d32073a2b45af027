"""A silo's record of the terms that it made, from which its report says what left it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightframe.config.job import parse_job
from tightframe.errors import RunError
from tightframe.phases import Field, Schema
from tightframe.results.parts.dropouts import Lost
from tightframe.rounds.context import SiloContext
from tightframe.rounds.silo import own_report as report
from tightframe.rounds.sums.common import Encoded
from tightframe.securesum.messages import SumId

SCHEMA = Schema((Field("model/W", (2, 3), bound=1.0), Field("model/b", (3,), bound=1.0)))


@pytest.fixture
def context(small: dict[str, Any], tmp_path: Path) -> SiloContext:
    silo = SiloContext(
        "site-1",
        parse_job(small),
        None,
        run_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        job_id="a-run",
    )
    silo.state_folder.mkdir(parents=True)
    return silo


def _note(context: SiloContext, round_number: int) -> None:
    encoded = Encoded(
        SumId.of("train", round_number, 0, 0), (), {"update": b"12345678"}, bytes(32), follows=True
    )
    report.note_sent(context, SCHEMA, encoded, at_end=False)


def test_terms_are_counted_by_kind(context: SiloContext) -> None:
    for number in (1, 2):
        _note(context, number)
    (train,) = report._sent_terms(context)
    assert (train.kind, train.times, train.numbers, train.bytes) == ("train", 2, {"model": 9}, 16)


@pytest.mark.parametrize("stored", [b"", b"{", b"7", b"[7]", b'[{"kind": "train"}]', b"\xff", b"[" * 100_000])
def test_a_damaged_record_is_damaged_state(context: SiloContext, stored: bytes) -> None:
    (context.state_folder / report.SENT).write_bytes(stored)
    with pytest.raises(RunError, match=rf"{report.SENT}.* is missing or damaged .*: restore it") as refused:
        _note(context, 1)
    assert refused.value.code == "TF-522"


def test_who_is_missing_is_told_as_the_servers_word() -> None:
    """A server can name a hospital that took part in every sum."""
    lost = Lost(kind="train", round=1, at="2026-11-22T21:42:10Z", code="TF-502")
    said, rule = report.Missing({"hospital-3": lost}, 4, shut=True).notes()
    assert said.startswith("The server says: hospital-3 is missing since round 1 (")
    assert "The server" not in rule
