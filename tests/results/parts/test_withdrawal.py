"""Models that a withdrawal does not reach are found beside its results, and in the engine's store."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tightframe.results.parts.withdrawal import NotCovered, not_covered

FIRST = "a" * 64
"""SHA-256 of the model of the run from which records are withdrawn."""


def card(name: str, model: str = "b" * 64, **job: Any) -> bytes:
    return json.dumps({"job": {"job_name": name, **job}, "model_sha256": model}).encode()


def archived(store: Path, job_id: str, content: bytes, name: str = "model.json") -> Path:
    """An ended job as the engine keeps it."""
    (store / job_id).mkdir(parents=True)
    path = store / job_id / "workspace"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("log.txt", b"said")
        made.writestr(name, content)
    return path


def found(folder: Path, store: Path | None) -> list[NotCovered]:
    own = folder / "kit" / "own"
    own.mkdir(parents=True, exist_ok=True)
    return not_covered(own.parent, "first", [FIRST], own, store)


def test_descendants_of_descendants_are_found_in_the_store(tmp_path: Path) -> None:
    store = tmp_path / "jobs"
    archived(store, "1", card("tuned", "b" * 64, initial_model_sha256=FIRST))
    archived(store, "2", card("tuned again", "c" * 64, initial_model_sha256="b" * 64))
    archived(store, "3", card("resumed", "d" * 64, resume={"lineage": "first"}))
    archived(store, "4", card("another", "e" * 64, initial_model_sha256="f" * 64))
    archived(store, "5", card("withdrawn", "0" * 64, withdraw={"lineage": "first"}))
    told = [(item.job_name, Path(item.folder).name, item.how) for item in found(tmp_path, store)]
    assert told == [
        ("tuned", "1", "starts from its model"),
        ("tuned again", "2", "starts from its model"),
        ("resumed", "3", "resumes it"),
    ]
    assert found(tmp_path, None) == []


def test_one_beside_and_one_in_the_store_are_one_chain(tmp_path: Path) -> None:
    beside = tmp_path / "kit" / "still-here"
    beside.mkdir(parents=True)
    (beside / "model.json").write_bytes(card("tuned", "b" * 64, initial_model_sha256=FIRST))
    archived(tmp_path / "jobs", "2", card("tuned again", initial_model_sha256="b" * 64))
    assert [item.job_name for item in found(tmp_path, tmp_path / "jobs")] == ["tuned again", "tuned"]


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def no_card(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    archived(path.parent.parent, path.parent.name, b"{}", "other.json")


def no_values(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    archived(path.parent.parent, path.parent.name, b"[1]")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b"model.json") + len(b"model.json") + 5
    content[place] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [damaged, no_card, no_values, flipped])
def test_an_archive_that_cannot_be_read_hides_no_other(tmp_path: Path, harm: Any) -> None:
    store = tmp_path / "jobs"
    harm(archived(store, "1", card("lost", initial_model_sha256=FIRST)))
    archived(store, "2", card("tuned", initial_model_sha256=FIRST))
    assert [item.job_name for item in found(tmp_path, store)] == ["tuned"]
