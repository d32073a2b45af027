"""Files that a reader finds whole: what a kill or somebody else has left in the way changes nothing."""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tightframe.files import append_durably, indented, waiting, write_atomically


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


def test_only_a_simulation_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with waiting(False):
        write_atomically(tmp_path / "whole", b"whole")
        append_durably(tmp_path / "lines", b"line\n")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write_atomically, tmp_path / "elsewhere", b"whole").result()
    assert len(synced) == 2, "the file and its folder, of another thread"
    assert {item.read_bytes() for item in tmp_path.iterdir()} == {b"whole", b"line\n"}
    write_atomically(tmp_path / "whole", b"again")
    append_durably(tmp_path / "lines", b"line\n")
    assert len(synced) == 5


def test_what_root_replaces_stays_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``tightframe federation pins`` does in the kit of the account that trains."""
    path, given = tmp_path / "tightframe.json", list[tuple[int, int]]()
    path.write_bytes(b"{}")
    if os.geteuid() == 0:
        os.chown(path, 4711, 4712)
    owner = (path.stat().st_uid, path.stat().st_gid)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda descriptor, uid, gid: given.append((uid, gid)))
    write_atomically(path, b"[]", mode=0o600)
    write_atomically(tmp_path / "new", b"[]")
    assert path.read_bytes() == b"[]" and given == [owner]


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize(
    "values",
    [
        *([], {}, "text", 3, {"a": []}, [{}, []], {"a": [1, 2.5, None, True, -0.0, 1e300], "b": 1e-7}),
        *([[1, [2]], 3], {5: {"x": [[1], ()]}, None: [0], True: {}, 1.5: 2}, {5: 1}),
        {"é": {'"\n': "\u2028 / \\"}, "more": ["é", {"a": {"b": {}}}]},
    ],
)
def test_indented_text_is_that_of_pythons_own_encoder(values: Any, step: int) -> None:
    assert indented(values, step) == json.dumps(values, indent=step, allow_nan=False)


@pytest.mark.parametrize("values", [math.nan, [math.inf], {"a": [-math.inf]}, {"a": {"b": math.nan}}])
def test_what_json_has_no_word_for_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        indented(values)
