"""Entries of a hospital that ran an exact and a private job with version 0.1.0, as that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightframe.privacy.ledger.entries import Entry, Remembered
from tightframe.privacy.ledger.rows import canonical, read_row
from tightframe.privacy.ledger.summary import spendings
from tightframe.securesum.errors import ReplayError, StaticCohortError
from tightframe.securesum.messages import SumId
from tightframe.securesum.site.journal import History, entry_from_value

WRITTEN = json.loads((Path(__file__).parent / "vectors" / "ledger-0.1.0.json").read_text())
FOUR = tuple(f"hospital-{number}" for number in (1, 2, 3, 4))


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    read: list[Entry] = []
    for row in WRITTEN:
        *texts, signature = row
        previous = read[-1].hash if read else row[4]
        read.append(read_row((*texts, bytes.fromhex(signature)), expected=len(read) + 1, previous=previous))
    return read


def test_each_entry_is_read_and_would_be_written_the_same(entries: list[Entry]) -> None:
    for entry, row in zip(entries, WRITTEN, strict=True):
        values = entry.content.as_value()
        assert canonical(values | ({"retry": entry.retry} if entry.charge else {})) == row[3]


def test_what_was_spent_stays_spent(entries: list[Entry]) -> None:
    (spent,) = spendings(entries, 1e-5)
    assert (spent.dataset_id, len(spent.entries), len(spent.fingerprints)) == ("hearts", 1, 1)
    assert spent.spent.guaranteed == pytest.approx(0.2111, abs=1e-4)


def test_what_was_summed_is_remembered(entries: list[Entry]) -> None:
    facts = [
        entry_from_value(fact)  # type: ignore[arg-type]  # plain values
        for entry in entries
        if isinstance(entry.content, Remembered)
        for fact in entry.content.facts
    ]
    history = History(facts)
    history.check_static("hearts", FOUR)
    with pytest.raises(StaticCohortError):
        history.check_static("hearts", FOUR[:3])
    with pytest.raises(ReplayError):
        history.check_slot("job-a", 0, 0, SumId.of("train", 2, 0, 0))
    ((_, weights),) = [item for item in history.profiles("hearts")[0] if item[0] == "weights"]
    assert weights == "exact"
