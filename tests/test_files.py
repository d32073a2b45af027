"""Files that a reader finds whole: what a kill or somebody else has left in the way changes nothing."""

from __future__ import annotations

from pathlib import Path

from tightframe.files import write_atomically


def test_a_temporary_file_that_was_left_lends_the_new_one_nothing(tmp_path: Path) -> None:
    path, left = tmp_path / "key", tmp_path / ".key.tmp"
    left.write_bytes(b"half of it, and longer than the new one")
    left.chmod(0o666)
    write_atomically(path, b"secret", mode=0o600, locked=True)
    assert path.read_bytes() == b"secret" and path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["key"]


def test_a_link_in_its_place_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of somebody else")
    (tmp_path / ".key.tmp").symlink_to(elsewhere)
    write_atomically(tmp_path / "key", b"secret", mode=0o600, locked=True)
    assert elsewhere.read_bytes() == b"of somebody else"
    assert (tmp_path / "key").read_bytes() == b"secret" and not (tmp_path / "key").is_symlink()
