"""Tampering is found and named: every column, every table, truncation, rollback, foreign signatures."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledgers import CAP, DATA, SiteKeys, charge, open_ledger, ticking
from tests.support.securesum.certificates import AT, issue, make_root

from tightframe.privacy.ledger.chain import Chain, Verified, read_ledger, renew_head_file
from tightframe.privacy.ledger.entries import Remembered, TamperError
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.rows import canonical, digest, make_row
from tightframe.privacy.ledger.store import Contents, Store, head_file, make_head

COUNT = 4


@pytest.fixture(scope="module")
def keys() -> SiteKeys:
    return SiteKeys()


@pytest.fixture(scope="module")
def original(keys: SiteKeys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "ledger.sqlite"
    with open_ledger(path, keys, create=True) as ledger:
        ledger.note_data(DATA, "ab" * 32)
        for number in range(COUNT - 1):
            ledger.charge(charge(f"round {number}"), cap=CAP)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    for file in (original, head_file(original)):
        shutil.copy(file, tmp_path / file.name)
    return tmp_path / original.name


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """As somebody with the file and an SQL shell."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys=OFF")
    try:
        yield connection
        connection.commit()
    finally:
        connection.close()


def refusal(path: Path, keys: SiteKeys, *, signatures: bool = True, **options: Any) -> TamperError:
    """What is found, by a reader and by the site itself."""
    with pytest.raises(TamperError, match="TF-702") as raised:
        read_ledger(path, check=keys.check if signatures else None, **options)
    if signatures and not options:
        with pytest.raises(TamperError) as of_site:
            open_ledger(path, keys)
        assert str(of_site.value) == str(raised.value)
    return raised.value


def whole(path: Path, keys: SiteKeys, **options: Any) -> Verified:
    return read_ledger(path, check=keys.check, **options)


def test_the_original_is_whole(path: Path, keys: SiteKeys) -> None:
    assert [entry.sequence for entry in whole(path, keys).entries] == [1, 2, 3, 4]
    assert not read_ledger(path, check=None).signatures


@pytest.mark.parametrize("entry", [1, 3, 4])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("time", AT.isoformat(timespec="microseconds")),
        ("kind", "data2"),
        ("content", "{}"),
        ("previous", "0" * 64),
        ("signer", "0" * 64),
        ("hash", "0" * 64),
        ("time", b"bytes"),
        ("content", None),
    ],
)
def test_every_column_of_every_entry(path: Path, keys: SiteKeys, entry: int, column: str, value: Any) -> None:
    with raw(path) as sql:
        if value is None:
            (old,) = sql.execute("SELECT content FROM entries WHERE sequence = ?", (entry,)).fetchone()
            value = old.replace("ward-7", "ward-8")
            assert value != old
        sql.execute(f"UPDATE entries SET {column} = ? WHERE sequence = ?", (value, entry))  # noqa: S608
    for signatures in (True, False):
        found = refusal(path, keys, signatures=signatures)
        assert found.entry == entry and f"entry {entry} of the ledger" in str(found)


@pytest.mark.parametrize("entry", [1, 3, 4])
def test_a_signature_of_an_entry(path: Path, keys: SiteKeys, entry: int) -> None:
    with raw(path) as sql:
        other = 2 if entry != 2 else 1
        (another,) = sql.execute("SELECT signature FROM entries WHERE sequence = ?", (other,)).fetchone()
        sql.execute("UPDATE entries SET signature = ? WHERE sequence = ?", (another, entry))
    found = refusal(path, keys)
    assert found.entry == entry and "signature does not hold" in str(found)


def test_every_value_of_a_charge(path: Path, keys: SiteKeys) -> None:
    """Each is under the hash: noise that was claimed larger, another purpose, one retry less."""
    with raw(path) as sql:
        (text,) = sql.execute("SELECT content FROM entries WHERE sequence = 3").fetchone()
    values = json.loads(text)
    assert set(values) >= {"event", "retry", "purpose", "attempt", "cohort", "neighbours", "job_id", "alone"}
    values["event"]["noise_multiplier"] = 60.0
    changed = [canonical(values)]
    for name in sorted(set(json.loads(text)) - {"event"}):
        other = json.loads(text)
        other[name] = {"attempt": 9, "retry": 9, "cohort": ["x"], "neighbours": "patient"}.get(name, "x")
        changed.append(canonical(other))
    for content in changed:
        with raw(path) as sql:
            sql.execute("UPDATE entries SET content = ? WHERE sequence = 3", (content,))
        assert refusal(path, keys, signatures=False).entry == 3


@pytest.mark.parametrize(("removed", "named"), [(1, 1), (2, 2), (4, 4)])
def test_a_missing_entry(path: Path, keys: SiteKeys, removed: int, named: int) -> None:
    with raw(path) as sql:
        sql.execute("DELETE FROM entries WHERE sequence = ?", (removed,))
    assert refusal(path, keys).entry == named


def test_renumbering_after_a_removal(path: Path, keys: SiteKeys) -> None:
    with raw(path) as sql:
        sql.execute("DELETE FROM entries WHERE sequence = 2")
        sql.execute("UPDATE entries SET sequence = sequence - 1 WHERE sequence > 2")
    assert refusal(path, keys).entry == 2


def forged(path: Path, signer: Any, sequence: int, previous: str, **changes: Any) -> str:
    """Write an entry that is right in all but its signer; its hash."""
    row = make_row(sequence, AT, charge("forged", **changes), 0, previous, signer)
    with raw(path) as sql:
        sql.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        sql.execute(
            "INSERT OR IGNORE INTO signers VALUES (?, ?)", (digest(signer.certificate), signer.certificate)
        )
    return row[6]


@pytest.mark.parametrize("root", ["another", "self-made site of another root under the same name"])
def test_entries_by_somebody_else(path: Path, keys: SiteKeys, root: str) -> None:
    stranger = issue(make_root("project" if root != "another" else "another"), "site-1").signer()
    (previous,) = [entry.previous for entry in whole(path, keys).entries][3:]
    forged(path, stranger, 4, previous)
    found = refusal(path, keys)
    assert found.entry == 4 and "not as the head" not in str(found)


def test_a_certificate_that_is_not_the_named_one(path: Path, keys: SiteKeys) -> None:
    with raw(path) as sql:
        sql.execute("UPDATE signers SET certificate = ?", (issue(keys.root, "site-1").certificate,))
    assert "the certificate" in str(refusal(path, keys))
    with raw(path) as sql:
        sql.execute("DELETE FROM signers")
    assert "the certificate" in str(refusal(path, keys))


def test_a_certificate_out_of_date_at_the_entry_s_time(path: Path, keys: SiteKeys) -> None:
    """Signatures are held against the time of the entry and not of the reader."""
    whole(path, keys)
    late = issue(keys.root, "site-1", start=AT.replace(year=2031), end=AT.replace(year=2032)).signer()
    forged(path, late, 5, whole(path, keys).head.hash)
    assert "valid" in str(refusal(path, keys))


def test_truncation_is_noticed_by_the_head_record(path: Path, keys: SiteKeys) -> None:
    with raw(path) as sql:
        sql.execute("DELETE FROM entries WHERE sequence > 2")
    found = refusal(path, keys)
    assert found.entry == 3 and "Expected 4 entries, as the head record says, but found 2" in str(found)


def test_truncation_with_a_head_that_was_made_up(path: Path, keys: SiteKeys) -> None:
    shortened = whole(path, keys).entries[1]
    with raw(path) as sql:
        sql.execute("DELETE FROM entries WHERE sequence > 2")
        sql.execute("UPDATE head SET count = 2, hash = ?", (shortened.hash,))
    assert "the head record to be signed by this site" in str(refusal(path, keys))
    assert "the head file says" in str(refusal(path, keys, signatures=False))


def test_a_rollback_is_noticed_by_the_head_file(path: Path, keys: SiteKeys, tmp_path: Path) -> None:
    """An older copy of the database alone, with its own valid head."""
    old = tmp_path / "old"
    shutil.copy(path, old)
    with open_ledger(path, keys) as ledger:
        ledger.charge(charge("later"), cap=CAP)
    old_head = whole(path, keys).head
    shutil.copy(old, path)
    found = refusal(path, keys)
    assert found.entry == 5 and "Expected 5 entries, as the head file says, but found 4" in str(found)
    assert old_head.count == 5


def test_a_rollback_of_everything_is_noticed_only_from_outside(
    path: Path, keys: SiteKeys, tmp_path: Path
) -> None:
    """The honest limit, and what helps: a head that somebody wrote down."""
    kept = tmp_path / "kept"
    kept.mkdir()
    for file in (path, head_file(path)):
        shutil.copy(file, kept / file.name)
    with open_ledger(path, keys) as ledger:
        ledger.charge(charge("later"), cap=CAP)
        head = ledger.verify().head
    assert (
        len(
            whole(path, keys, known=[(head.count, head.hash), (4, whole(path, keys).entries[3].hash)]).entries
        )
        == 5
    )
    for file in (path, head_file(path)):
        shutil.copy(kept / file.name, file)
    assert len(whole(path, keys).entries) == 4, "nothing in the files themselves tells"
    assert "written down" in str(refusal(path, keys, known=[(head.count, head.hash)]))
    assert refusal(path, keys, known=[(4, "0" * 64)]).entry == 4


def test_the_head_file(path: Path, keys: SiteKeys) -> None:
    file = head_file(path)
    good = file.read_bytes()
    file.unlink()
    assert "the head file beside the ledger, but there is none" in str(refusal(path, keys))
    renew_head_file(path, check=keys.check)
    assert json.loads(file.read_bytes()) == json.loads(good) and whole(path, keys)
    for name, value in json.loads(good).items():
        other = {"count": 3}.get(name, "ab" * 32)
        file.write_text(json.dumps({**json.loads(good), name: other}))
        assert "head file" in str(refusal(path, keys)) or name == "signer", (name, value)
    for text in ("", "[]", "{}", '{"count": true}'):
        file.write_text(text)
        assert "to be a ledger's head, but found something else" in str(refusal(path, keys))
    for changed in ({"count": True}, {"count": -1}, {"hash": 5}, {"signer": "\u00e9"}):
        file.write_text(json.dumps({**json.loads(good), **changed}))
        assert "values of its types" in str(refusal(path, keys))
    file.write_bytes(good)
    with raw(path) as sql:
        sql.execute("DELETE FROM entries WHERE sequence = 2")
    file.unlink()
    with pytest.raises(TamperError):
        renew_head_file(path, check=keys.check)
    assert not file.exists(), "only a whole ledger gets a new head file"


@pytest.mark.parametrize("name", ["ledger", "count", "hash", "time", "signer", "signature"])
def test_every_column_of_the_head_record(path: Path, keys: SiteKeys, name: str) -> None:
    with raw(path) as sql:
        sql.execute(f"UPDATE head SET {name} = ?", (3 if name == "count" else "ab" * 32,))  # noqa: S608
    assert "head record" in str(refusal(path, keys))


def test_another_ledger_s_head_file(path: Path, keys: SiteKeys, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with open_ledger(other, keys, create=True):
        pass
    shutil.copy(head_file(other), head_file(path))
    assert "another ledger's" in str(refusal(path, keys))


def test_no_head_record_or_two(path: Path, keys: SiteKeys) -> None:
    with raw(path) as sql:
        sql.execute("DELETE FROM head")
    assert "found 0" in str(refusal(path, keys))


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END",
        "CREATE TABLE more (x)",
        "CREATE VIEW v AS SELECT * FROM entries",
        "ALTER TABLE entries ADD COLUMN note TEXT",
        "DROP TABLE signers",
    ],
)
def test_tables_and_triggers_of_others(path: Path, keys: SiteKeys, statement: str) -> None:
    with raw(path) as sql:
        sql.execute(statement)
    assert "The file was altered" in str(refusal(path, keys))


def test_entries_that_the_ledger_did_not_write(path: Path, keys: SiteKeys) -> None:
    """By the right key, but not counted by the head: the program was not the writer."""
    forged(path, keys.signer, 5, whole(path, keys).head.hash)
    found = refusal(path, keys)
    assert found.entry == 5 and "the head record to count entry 5" in str(found)


def test_a_chain_that_was_made_anew(path: Path, keys: SiteKeys) -> None:
    """Hashes and head all consistent, but by a stranger's key: found by signatures, not by hashes."""
    stranger = issue(make_root("project"), "site-1").signer()
    found = whole(path, keys)
    previous = found.entries[2].hash
    forged(path, stranger, 4, previous)
    hashed = forged(path, stranger, 4, previous)
    head = make_head(found.head.ledger, 4, hashed, AT, stranger)
    with raw(path) as sql:
        sql.execute(
            "UPDATE head SET count = ?, hash = ?, time = ?, signer = ?, signature = ?",
            (head.count, head.hash, head.time, head.signer, head.signature),
        )
    head_file(path).write_text(json.dumps(head.__dict__))
    assert len(read_ledger(path, check=None).entries) == 4
    refusal(path, keys)


def test_an_open_ledger_notices_at_the_next_charge(path: Path, keys: SiteKeys) -> None:
    with Ledger(path, keys.signer, check=keys.check, clock=ticking()) as ledger:
        ledger.charge(charge("a"), cap=CAP)
        with raw(path) as sql:
            sql.execute("UPDATE entries SET time = 'x' WHERE sequence = 2")
        with pytest.raises(TamperError) as raised:
            ledger.charge(charge("b"), cap=CAP)
        assert raised.value.entry == 2
    with raw(path) as sql:
        assert sql.execute("SELECT count(*) FROM entries").fetchone() == (5,)


def opened(path: Path, keys: SiteKeys, chain: Chain) -> Ledger:
    return Ledger(path, keys.signer, check=keys.check, chain=chain, clock=ticking())


def test_of_what_was_found_right_only_new_entries_are_read_until_something_is_charged(
    path: Path, keys: SiteKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, rows = Chain(keys.check), list[int]()
    read = Store.read

    def counted(self: Store, *known: Any) -> Contents:
        found = read(self, *known)
        rows.append(len(found.rows))
        return found

    monkeypatch.setattr(Store, "read", counted)
    with opened(path, keys, chain) as ledger:
        ledger.remember(Remembered(({"kind": "a"},)))
    with opened(path, keys, Chain(keys.check)) as ledger:  # as another process does
        ledger.remember(Remembered(({"kind": "b"},)))
    with opened(path, keys, chain) as ledger:
        assert [entry.content for entry in ledger.seen.entries] == [
            entry.content for entry in read_ledger(path, check=keys.check).entries
        ]
        ledger.charge(charge("a"), cap=CAP)
    assert rows == [4, 0, 5, 0, 2, 6, 6]


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        ("UPDATE entries SET time = 'x' WHERE sequence = 2", False),
        ("DELETE FROM entries WHERE sequence = 2", False),
        ("UPDATE entries SET hash = 'x' WHERE sequence = 4", True),
        ("DELETE FROM entries WHERE sequence = 4", True),
        ("UPDATE signers SET certificate = x'00'", True),
    ],
)
def test_nothing_is_charged_on_entries_that_were_altered_between_two_openings(
    path: Path, keys: SiteKeys, change: str, at_once: bool
) -> None:
    """What rests on the last one is found as the ledger is opened, and what does not at the next charge."""
    chain = Chain(keys.check)
    opened(path, keys, chain).close()
    with raw(path) as sql:
        sql.execute(change)
    with pytest.raises(TamperError) if at_once else nullcontext():
        opened(path, keys, chain).close()
    with pytest.raises(TamperError), opened(path, keys, chain) as ledger:
        ledger.charge(charge("b"), cap=CAP)


@pytest.mark.parametrize("name", ["ledger", "count", "hash", "time", "signer", "signature"])
def test_an_open_ledger_notices_a_head_that_was_right_before(path: Path, keys: SiteKeys, name: str) -> None:
    other = 3 if name == "count" else "ab" * 32
    with open_ledger(path, keys) as ledger:
        good = head_file(path).read_text()
        ledger.verify()
        head_file(path).write_text(json.dumps({**json.loads(good), name: other}))
        with pytest.raises(TamperError):
            ledger.verify()
        head_file(path).write_text(good)
        with raw(path) as sql:
            sql.execute(f"UPDATE head SET {name} = ?", (other,))  # noqa: S608
        with pytest.raises(TamperError):
            ledger.verify()
