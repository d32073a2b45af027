"""The floor under a silo's work on its records, on a clock of the test's own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tightframe.rounds import pace
from tightframe.rounds.pace import HEADROOM, Pace


class Clock:
    """Time that passes where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Silo:
    """A silo that works for a number of seconds; returns how long that lasts for others."""

    def __init__(self, folder: Path, limit: float = 600.0, on: bool = True) -> None:
        self.clock = Clock()
        log = logging.getLogger("tests.pace")
        path = folder / "pace.json"
        self.pace = Pace(path, on=on, limit=limit, log=log, clock=self.clock, sleep=self.clock.sleep)

    def work(
        self,
        seconds: float,
        sum_id: str = "a",
        part: str | None = "0",
        *,
        known: bool = False,
        whole: bool = True,
    ) -> float:
        started = self.clock.now
        with self.pace.working(sum_id, part, known=known) as work:
            self.clock.now += seconds
            work.whole = whole
        return round(self.clock.now - started, 9)

    def begin(self, seconds: float = 10.0) -> None:
        """The first training, on the job's own start."""
        assert self.work(seconds, known=True) == seconds


@pytest.fixture
def silo(tmp_path: Path) -> Silo:
    return Silo(tmp_path)


def test_whatever_a_silo_trains_on_takes_as_long(silo: Silo) -> None:
    silo.begin()
    assert {silo.work(seconds) for seconds in (0.01, 3.0, 10.0, 12.4)} == {10.0 * HEADROOM}
    assert silo.work(2.0, part=None) == 10.0 * HEADROOM  # an evaluation, say


def test_what_fails_outright_takes_as_long_too(silo: Silo) -> None:
    silo.begin()
    started = silo.clock.now
    with pytest.raises(MemoryError), silo.pace.working("a", "0", known=False):
        raise MemoryError
    assert silo.clock.now - started == 10.0 * HEADROOM


def test_a_full_disk_makes_no_answer_earlier(silo: Silo, monkeypatch: pytest.MonkeyPatch) -> None:
    silo.begin()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pace, "write_atomically", full)
    started = silo.clock.now
    with pytest.raises(OSError, match="No space"):
        silo.work(0.5)
    assert silo.clock.now - started == 10.0 * HEADROOM


def test_what_was_pending_before_a_resumed_job_is_not_verified_by_its_sums(silo: Silo) -> None:
    silo.begin()
    assert silo.work(100.0, "2/train-0/0", whole=False) == 100.0 * HEADROOM
    silo.work(9.0, "2/train-0/0", known=True)
    silo.pace.verified("2/train-0/0")
    assert silo.pace.floor == 100.0 * HEADROOM


def test_nor_does_the_next_answer_tell_how_long_one_took(silo: Silo) -> None:
    silo.begin()
    assert silo.work(12.4, "a") == silo.work(0.1, "b") == 10.0 * HEADROOM


def test_longer_work_raises_the_floor_once(silo: Silo) -> None:
    silo.begin()
    assert silo.work(14.0, "a") == 14.0 * HEADROOM
    assert {silo.work(seconds, "b") for seconds in (0.1, 14.0, 17.0)} == {14.0 * HEADROOM}


@pytest.mark.parametrize("part", ["0", None])
def test_the_floor_stays_where_work_has_raised_it(silo: Silo, part: str | None) -> None:
    """Also if its sum is verified: the work was an evaluation, or a training that failed late."""
    silo.begin()
    assert silo.work(40.0, "a", part, whole=part is None) == 40.0 * HEADROOM
    silo.pace.verified("a")
    assert silo.work(0.1, "b") == 40.0 * HEADROOM


def test_an_aborted_run_ends_at_once(silo: Silo) -> None:
    silo.begin(1000.0)
    aborted = silo.clock.now + 3.0
    silo.pace._stopped = lambda: silo.clock.now >= aborted
    assert 3.0 <= silo.work(1.0) <= 3.0 + pace.POLL


def test_no_more_answers_are_longer_than_the_headroom_allows(
    silo: Silo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that finds states that take longer and longer, up to a thousand times."""
    monkeypatch.setattr(pace, "POLL", 1e9)
    silo.begin()
    longer, seconds = 0, 10.0
    while seconds <= 10_000.0:
        longer += silo.work(seconds) > silo.work(0.0) - 1e-9 and silo.pace.floor > seconds * HEADROOM - 1e-9
        seconds *= 1.01
    assert longer <= 32  # log(1000) / log(1.25) = 30.96


def test_work_on_a_state_that_is_never_verified_lowers_nothing(silo: Silo) -> None:
    silo.begin()
    silo.work(14.0, "a")
    silo.work(1.0, "b")
    silo.pace.verified("b")
    assert silo.pace.floor == 14.0 * HEADROOM


def test_a_first_training_from_a_cold_disk_counts_until_a_second_is_verified(silo: Silo) -> None:
    silo.begin(50.0)
    silo.work(10.0, "a")
    assert silo.pace.floor == 50.0 * HEADROOM
    silo.pace.verified("another")
    assert silo.pace.floor == 50.0 * HEADROOM
    silo.pace.verified("a")
    assert silo.pace.floor == 10.0 * HEADROOM
    silo.work(9.0, "b")
    silo.pace.verified("b")
    assert silo.pace.floor == 10.0 * HEADROOM


def test_no_measure_is_a_training_that_failed(silo: Silo) -> None:
    silo.begin(50.0)
    silo.work(0.1, "a", whole=False)
    silo.pace.verified("a")
    assert silo.pace.floor == 50.0 * HEADROOM
    assert not Silo(silo.pace._path.parent).pace.lacks("0")
    assert silo.pace.lacks("1")
    silo.work(3.0, part="1", known=True, whole=False)
    assert silo.pace.lacks("1")


def test_nor_is_work_that_trains_nothing(silo: Silo) -> None:
    silo.work(3.0, "a", part=None, known=True)
    silo.work(3.0, "b", whole=False)
    silo.pace.verified("b")
    assert silo.pace.lacks("0") and silo.pace.floor == 3.0 * HEADROOM  # raised, but no measure


def test_a_rehearsal_is_a_measure_for_each_phase(silo: Silo) -> None:
    assert silo.pace.lacks("0") and silo.pace.lacks("before-0")
    silo.pace.rehearsed({"0": 4.0, "1": 20.0, "before-0": 0.5})
    assert not (silo.pace.lacks("0") or silo.pace.lacks("1") or silo.pace.lacks("before-0"))
    assert silo.work(0.1, part="1") == 20.0 * HEADROOM
    silo.pace.rehearsed({"0": 90.0})  # what was timed stays
    assert silo.pace.floor == 20.0 * HEADROOM


def test_a_new_process_goes_on_with_it(silo: Silo, tmp_path: Path) -> None:
    silo.begin()
    silo.work(14.0)
    assert Silo(tmp_path).work(0.1) == 14.0 * HEADROOM


def test_a_file_of_an_earlier_version_keeps_its_floor(silo: Silo) -> None:
    pending = '{"sum": "x", "part": null, "seconds": 3, "unverified": true}'
    silo.pace._path.write_text(f'{{"first": {{"0": 8}}, "pending": {pending}}}')
    assert silo.pace.floor == 8.0 * HEADROOM


def test_a_damaged_file_asks_for_a_rehearsal(silo: Silo, caplog: pytest.LogCaptureFixture) -> None:
    silo.begin()
    silo.pace._path.write_text('{"first": {"0": -1}}')
    assert silo.pace.lacks("0") and "damaged" in caplog.text


def test_it_says_when_the_server_will_not_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silo = Silo(tmp_path, limit=20.0)
    silo.begin()
    silo.work(13.0)
    assert not caplog.records
    silo.work(17.0)
    assert "site_timeout" in caplog.text


def test_nothing_is_held_back_in_a_simulation(tmp_path: Path) -> None:
    silo = Silo(tmp_path, on=False)
    silo.begin()
    assert silo.work(1.0) == 1.0 and not silo.pace.lacks("0")
    silo.pace.verified("a")
    assert not list(tmp_path.iterdir())
