"""What a request changed of a silo's own state is undone if its term never left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightframe.rounds import unsent
from tightframe.rounds.state_files import COMMITTED, EARLIER, PROPOSED, TOLD
from tightframe.securesum.errors import ReplayError
from tightframe.securesum.messages import SumId

ONE, OTHER = SumId(2, "train-0", 1), SumId(2, "train-0", 2)
BEFORE = {COMMITTED: "1", PROPOSED: "2"}
SETTLED = {COMMITTED: "2", EARLIER: "1", PROPOSED: "3"}


def files(folder: Path) -> dict[str, str]:
    """The files in a folder, none hidden."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def write(folder: Path, wanted: dict[str, str]) -> None:
    """Replace the files of a silo's own state."""
    for name in (COMMITTED, EARLIER, PROPOSED, TOLD):
        (folder / name).unlink(missing_ok=True)
    for name, text in wanted.items():
        (folder / name).write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a silo's state, which a request has settled."""
    write(tmp_path, BEFORE)
    unsent.keep(tmp_path, ONE, b"a request")
    write(tmp_path, SETTLED)
    return tmp_path


@pytest.mark.parametrize(
    ("masked", "request_again", "left", "kept"),
    [
        ((), b"", BEFORE, False),
        ((OTHER,), b"another", BEFORE, False),
        ((ONE,), b"another", SETTLED, False),
        ((), b"a request", SETTLED, True),
    ],
    ids=["shares are asked for", "another request", "its term was masked", "it is repeated"],
)
def test_it_is_undone_unless_its_term_was_masked_or_it_comes_again(
    folder: Path, masked: tuple[SumId, ...], request_again: bytes, left: dict[str, str], kept: bool
) -> None:
    unsent.undo(folder, masked, request_again)
    assert files(folder) == left
    unsent.undo(folder, ())
    assert files(folder) == (BEFORE if kept else left), "undone once"
    assert not any(path.is_dir() for path in folder.iterdir())


def test_a_repeated_request_keeps_what_was_before_the_first(folder: Path) -> None:
    unsent.keep(folder, ONE, b"a request")
    unsent.undo(folder, ())
    assert files(folder) == BEFORE


def test_nothing_is_masked_for_a_request_that_is_undone(folder: Path) -> None:
    """The training that it settled counts no more: the term would leave beside another state of this silo."""
    unsent.check(folder, ONE, b"a request")
    for sum_id, request in ((OTHER, b"a request"), (ONE, b"another")):
        with pytest.raises(ReplayError, match="another one while this silo trained"):
            unsent.check(folder, sum_id, request)
    unsent.undo(folder, ())
    with pytest.raises(ReplayError):
        unsent.check(folder, ONE, b"a request")


def test_what_was_masked_is_not_undone(folder: Path) -> None:
    unsent.sent(folder)
    unsent.undo(folder, ())
    assert files(folder) == SETTLED


def test_what_a_killed_process_left_of_either_is_in_nobodys_way(folder: Path) -> None:
    (partial := folder / f"{unsent.BEFORE_REQUEST}.partial").mkdir()
    (partial / TOLD).touch()
    (folder / f".{COMMITTED}.before").touch()
    unsent.undo(folder, ())
    assert files(folder) == BEFORE
    partial.mkdir()
    (partial / TOLD).touch()
    unsent.keep(folder, OTHER, b"another")
    write(folder, SETTLED)
    unsent.undo(folder, ())
    assert files(folder) == BEFORE
