"""Several processes, and kill -9 at any point: charged, never lost, never past the cap together."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.support.ledgers import CAP, DATA, DELTA, SiteKeys, charge, open_ledger

from tightframe.privacy.accounting import BudgetError, fitting, guaranteed
from tightframe.privacy.events import Gaussian
from tightframe.privacy.ledger import store as ledger_store
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.entries import LedgerError, RepeatError
from tightframe.privacy.ledger.store import head_file
from tightframe.securesum.identity import KeySigner


@dataclass
class Process:
    """A forked process: what it prints, and a line that it waits for."""

    number: int
    said: int
    told: int

    def go(self) -> None:
        os.write(self.told, b"go")

    def line(self) -> str:
        found = b""
        while not found.endswith(b"\n"):
            more = os.read(self.said, 1)
            assert more, "it ended early"
            found += more
        return found.decode()

    def end(self) -> tuple[int, str]:
        """Its exit status (negative: the signal) and the rest of what it said."""
        rest = b""
        while more := os.read(self.said, 65536):
            rest += more
        os.close(self.said)
        os.close(self.told)
        return os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1]), rest.decode()


def start(run: Callable[[Callable[[object], None], Callable[[], None]], None]) -> Process:
    """Run ``run(say, wait)`` in a process of its own, which may be killed; it opens its own ledger."""
    said, say_to = os.pipe()
    hear_from, told = os.pipe()
    number = os.fork()
    if number:
        os.close(say_to)
        os.close(hear_from)
        return Process(number, said, told)
    status = 1
    try:
        os.close(said)
        os.close(told)
        run(lambda text: os.write(say_to, f"{text}\n".encode()), lambda: os.read(hear_from, 2))  # type: ignore[func-returns-value]
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def die(*_: object, **__: object) -> NoReturn:
    """Kill -9, by oneself."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.fixture(scope="module")
def keys() -> SiteKeys:
    return SiteKeys()


@pytest.fixture
def path(tmp_path: Path, keys: SiteKeys) -> Path:
    path = tmp_path / "ledger.sqlite"
    open_ledger(path, keys, create=True).close()
    return path


def append_and_die(*arguments: Any, append: Any = ledger_store.Store.append) -> None:
    append(*arguments)
    die()


POINTS: dict[str, tuple[Any, str, Any, int]] = {
    "before the transaction": (ledger_store.Store, "writing", die, 0),
    "while it is signed": (KeySigner, "sign", die, 0),
    "before the commit": (ledger_store.Store, "append", append_and_die, 0),
    "between the charge and the return": (ledger_store.Store, "publish_head", die, 1),
    "while the head file is written": (ledger_store.os, "replace", die, 1),
}


@pytest.mark.parametrize(("owner", "name", "deadly", "charged"), POINTS.values(), ids=POINTS.keys())
def test_killed_at(owner: Any, name: str, deadly: Any, charged: int, path: Path, keys: SiteKeys) -> None:
    def run(say: Any, wait: Any) -> None:
        ledger = open_ledger(path, keys)
        ledger.charge(charge("before"), cap=CAP)
        setattr(owner, name, deadly)  # in this process alone
        ledger.charge(charge("killed"), cap=CAP)

    assert start(run).end() == (-signal.SIGKILL, "")
    assert len(read_ledger(path, check=keys.check).entries) == 1 + charged
    with open_ledger(path, keys) as ledger:
        found = [entry.charge.purpose for entry in ledger.entries() if entry.charge]
        assert found == ["before", "killed"][: 1 + charged]
        assert ledger.spent(DATA, "record", DELTA, prv=False).exact == guaranteed(
            [Gaussian(6.0)] * (1 + charged), DELTA
        )
        if charged:
            with pytest.raises(RepeatError):  # new noise under the old charge: never
                ledger.charge(charge("killed"), cap=CAP)
        assert ledger.charge(charge("killed", attempt=1), cap=CAP).retry == charged
    assert not list(path.parent.glob(".*")), "what a crash left is overwritten"


@pytest.mark.whole
def test_killed_at_any_moment(path: Path, keys: SiteKeys) -> None:
    """What a process was told is charged, is; at most one more is, and the chain always holds."""
    chance = random.Random(5)  # noqa: S311 - moments, not secrets
    told: list[int] = []
    for number in range(8):

        def run(say: Any, wait: Any, number: int = number) -> None:
            with open_ledger(path, keys) as ledger:
                for count in range(10_000):
                    wanted = charge(f"{number} {count}", event=Gaussian(1e4))
                    say(ledger.charge(wanted, cap=CAP).sequence)

        process = start(run)
        told.append(int(process.line()))
        time.sleep(chance.uniform(0, 0.15))
        os.kill(process.number, signal.SIGKILL)
        status, rest = process.end()
        assert status == -signal.SIGKILL
        told += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        count = len(read_ledger(path, check=keys.check).entries)
        assert told[-1] <= count <= told[-1] + 1 and told == sorted(set(told))
    with open_ledger(path, keys) as ledger:
        assert len(ledger.entries()) >= len(told) >= 8


def test_a_log_that_a_crash_left_torn(path: Path, keys: SiteKeys, tmp_path: Path) -> None:
    """The WAL cut off at every length: the old state or the new one, never another."""
    with open_ledger(path, keys) as ledger:
        ledger.charge(charge("a"), cap=CAP)
        wal = Path(f"{path}-wal")
        ledger.charge(charge("b"), cap=CAP)
        database, log, head = path.read_bytes(), wal.read_bytes(), head_file(path).read_bytes()
    found = set()
    for number, length in enumerate(range(0, len(log) + 1, max(1, len(log) // 24))):
        copy = tmp_path / f"{number}" / path.name
        copy.parent.mkdir()
        copy.write_bytes(database)
        Path(f"{copy}-wal").write_bytes(log[:length])
        try:
            found.add(len(read_ledger(copy, check=keys.check).entries))
        except Exception as error:  # the head file, which is written after the commit, tells of a loss
            assert "TF-702" in str(error) and "head file" in str(error)
        head_file(copy).write_bytes(head)
        try:
            assert len(read_ledger(copy, check=keys.check).entries) == 2
        except Exception as error:
            assert "TF-702" in str(error) and "as the head file says" in str(error)
    assert found <= {0, 1, 2}


def both(run: Callable[[int, Any], None]) -> list[str]:
    """Two processes at once, each begun when both are there; what each says."""

    def one(number: int) -> Process:
        def ready(say: Any, wait: Any) -> None:
            say("ready")
            wait()
            run(number, say)

        return start(ready)

    processes = [one(number) for number in range(2)]
    assert [process.line() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.go()
    ended = [process.end() for process in processes]
    assert [status for status, _ in ended] == [0, 0]
    return [said.strip() for _, said in ended]


def test_two_processes_never_pass_the_cap_together(path: Path, keys: SiteKeys) -> None:
    """Both charge the same event as fast as they can; together exactly as many fit as by one."""

    def run(number: int, say: Any) -> None:
        made = 0
        with open_ledger(path, keys) as ledger:
            try:
                while True:
                    ledger.charge(charge(f"{number} {made}", event=Gaussian(3.0)), cap=CAP)
                    made += 1
            except BudgetError:
                say(made)

    made = [int(said) for said in both(run)]
    assert sum(made) == fitting(Gaussian(3.0), epsilon=CAP.epsilon, delta=DELTA) == 24
    assert len(read_ledger(path, check=keys.check).entries) == 24
    assert guaranteed([Gaussian(3.0)] * 24, DELTA) <= 8.0 < guaranteed([Gaussian(3.0)] * 25, DELTA)


def test_two_processes_cannot_both_use_one_charge(path: Path, keys: SiteKeys) -> None:
    def run(number: int, say: Any) -> None:
        made = 0
        with open_ledger(path, keys) as ledger:
            for count in range(10):
                try:
                    ledger.charge(charge(f"{count}", event=Gaussian(100.0)), cap=CAP)
                    made += 1
                except RepeatError:
                    pass
        say(made)

    assert sum(int(said) for said in both(run)) == 10
    assert len(read_ledger(path, check=keys.check).entries) == 10


def test_a_writer_waits_for_another(path: Path, keys: SiteKeys) -> None:
    """SQLite's own lock, held for a while by somebody else."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.5, lambda: other.execute("ROLLBACK")).start()
    with open_ledger(path, keys) as ledger:
        assert ledger.charge(charge(), cap=CAP).sequence == 1
    other.close()


def test_creation_is_whole_or_not_at_all(tmp_path: Path, keys: SiteKeys) -> None:
    path = tmp_path / "ledger.sqlite"

    def killed(say: Any, wait: Any) -> None:
        ledger_store.os.link = die  # type: ignore[assignment]
        open_ledger(path, keys, create=True)

    assert start(killed).end()[0] == -signal.SIGKILL and not path.exists()

    def run(number: int, say: Any) -> None:
        try:
            open_ledger(path, keys, create=True).close()
            say("made")
        except LedgerError:
            say("refused")

    assert sorted(both(run)) == ["made", "refused"]
    assert read_ledger(path, check=keys.check).entries == ()
