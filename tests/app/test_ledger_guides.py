"""What the guides show of ``tightframe ledger`` is what it prints."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.ledgers import CAP, SiteKeys, charge, open_ledger
from typer.testing import CliRunner

from tightframe.privacy.events import Gaussian, SubsampledGaussian
from tightframe_app.ledger import commands

DOCS = Path(__file__).resolve().parents[2] / "docs"
JOB = {"dataset_id": "skin", "job_id": "7c41e0d2-53aa-4a0f-9d8e-2f0d1b6a9e10"}
TRAINING = SubsampledGaussian(0.7092, 64 / 9216, 288)
RELEASE = {"event": Gaussian(9.1457), "alone": Gaussian(9.1457 / 2)}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds of a job with class sums, over 9,216 records, at epsilon 4."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    start, minutes = datetime(2030, 6, 3, 9, tzinfo=UTC), itertools.count(step=11)
    clock = {"clock": lambda: start + timedelta(minutes=next(minutes))}
    with open_ledger(path, SiteKeys(), create=True, **clock) as opened:
        opened.note_data("skin", "ab" * 32)
        for number in range(1, 5):
            opened.charge(charge(f"round {number} training", event=TRAINING, **JOB), cap=CAP)
            if number < 4:
                opened.charge(charge(f"round {number} class sums", **RELEASE, **JOB), cap=CAP)
    return path


def test_the_guides_show_what_the_commands_print(ledger: Path) -> None:
    """In order; ``...`` stands for lines that are left out."""
    page, first = "privacy.md", "Data set skin"
    done = CliRunner().invoke(
        commands.app, ["explain", str(ledger), "--epsilon", "8"], env={"COLUMNS": "110"}
    )
    printed = iter([line.rstrip() for line in done.stdout.splitlines()])
    blocks = (DOCS / page).read_text(encoding="utf-8").split("```text\n")
    (shown,) = (block.partition("```")[0] for block in blocks if block.startswith(first))
    assert len(shown.splitlines()) > 5
    for line in shown.splitlines():
        assert line == "  ..." or line in printed, line
