"""Features on a site's disk: the same bits as computed, never those of other records, private, deletable."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.rounds.test_frozen_encoder import CLASSES, REST, SITES, TRAIN, seen, silos, values
from tests.support.outputs import checked
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS, SiloData
from tightframe.errors import RunError
from tightframe.files import locked_folder
from tightframe.models.frozen import FrozenEncoder
from tightframe.rounds.encoded import PROBED
from tightframe_app.cli import app

__all__ = ["seen"]
BATCH = 8
COMPUTED = TRAIN + 3 * REST
"""Of a silo: the validation records twice, in float64 for the temperature, too."""
ENCODER: dict[str, Any] = {
    "method": "fedncm",
    "rounds": 1,
    "model": "random_features",
    "model_options": {"width": 12},
    "encoder": "trained",
    "class_rules": "off",
    "evaluation": {"batch_size": BATCH},
}
Model = dict[str, bytes]


def run(
    state: Path | None,
    kind: Any = "kept",
    *,
    data: Mapping[str, SiloData] | None = None,
    folder: Path | None = None,
    **changes: Any,
) -> Model:
    entry = SiteEntry(feature_cache=kind, state_dir=None if state is None else str(state))
    job = parse_job(values(**{**ENCODER, **changes}))
    entries = dict.fromkeys(SITES, entry)
    result = federation.run_job(job, data=data or silos(), entries=entries, folder=folder)
    return {name: value.numpy().tobytes() for name, value in result.state.model.items()}


def stored(state: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in state.rglob("*.safetensors")}


@pytest.fixture
def kept(tmp_path: Path, seen: Counter[str]) -> Iterator[Path]:
    """State of sites after a run that stored its features; whatever the mask of the account."""
    before = os.umask(0)
    state = tmp_path / "state"
    run(state)
    assert seen["records"] == len(SITES) * COMPUTED
    assert len(stored(state)) == len(SITES) * 4
    seen.clear()
    yield state
    os.umask(before)


def test_a_second_run_reads_them_and_has_the_same_bits(kept: Path, seen: Counter[str]) -> None:
    before = stored(kept)
    again = run(kept)
    assert seen["records"] == len(SITES) * 4 * PROBED < len(SITES) * COMPUTED
    assert stored(kept) == before
    assert again == run(None, "memory")


def changed(site: str) -> dict[str, SiloData]:
    """One number of one training record of one silo is another; all labels are the same."""
    data = dict(silos())
    folds: Any = {}
    for fold in FOLDS:
        records: Any = data[site].records(fold)
        pictures = torch.stack([records[place][0] for place in range(len(records))]).numpy().copy()
        if fold == "train":
            pictures[TRAIN - 1, 0, 0, 0] += 1
        folds[fold] = (pictures, data[site].labels(fold))
    data[site] = ArrayData(folds, source=site, num_classes=CLASSES, synthetic=True)
    return data


@pytest.mark.whole
def test_another_record_makes_a_fold_anew_and_no_features_of_the_old_one_stay(
    kept: Path, seen: Counter[str]
) -> None:
    run(kept, model_options={"width": 12, "seed": 5})
    seen.clear()
    before = stored(kept)
    found = run(kept, data=changed("b"))
    assert seen["records"] == TRAIN + len(SITES) * 4 * PROBED
    assert found == run(None, "memory", data=changed("b")) != run(None, "memory")
    after = stored(kept)
    gone = set(before) - set(after)
    assert [path.parent.parent.name for path in gone] == ["b"], "of the other encoder"
    assert [path.name.split("-")[0] for path in gone] == ["train"]


@pytest.mark.whole
@pytest.mark.parametrize(
    "changes",
    [{"model_options": {"width": 12, "seed": 1}}, {"evaluation": {"batch_size": 5}}, {"threads": 2}],
)
def test_of_another_encoder_nothing_is_taken(kept: Path, seen: Counter[str], changes: dict[str, Any]) -> None:
    before = stored(kept)
    found = run(kept, **changes)
    assert seen["records"] == len(SITES) * COMPUTED
    assert found == run(None, "memory", **changes)
    assert len(stored(kept)) == 2 * len(before)


@pytest.mark.whole
def test_of_other_code_or_damaged_nothing_is_taken(
    kept: Path, seen: Counter[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(stored(kept))
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    paths[1].write_bytes(whole[:100])
    expected = run(None, "memory")
    assert run(kept) == expected
    assert caplog.text.count("is damaged") == 2 and _parts(paths[0].read_bytes()) == _parts(whole)
    encode = FrozenEncoder.encode
    monkeypatch.setattr(FrozenEncoder, "encode", lambda self, x: encode(self, x) * 1.01)
    assert run(kept) == run(None, "memory") != expected


def _parts(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a safetensors file, whose metadata are in no fixed order."""
    start = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:start]), file[start:]


def test_they_are_the_owners_alone_and_the_server_has_none(kept: Path, tmp_path: Path) -> None:
    for path in (*kept.rglob("*"), kept / "features"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    run(kept, folder=tmp_path / "run")
    server = b"".join(
        path.read_bytes() for path in (tmp_path / "run" / "server").rglob("*") if path.is_file()
    )
    assert len(server) > 10_000
    for path in stored(kept):
        rows = load_file(path)["features"]
        assert not any(row.numpy().tobytes() in server for row in rows)


def test_for_the_run_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there while it runs, and gone after it, also after one that failed."""
    from tightframe.rounds.silo import own_report as report

    seen: list[int] = []
    close = report.close

    def closing(*arguments: Any) -> None:
        seen.append(len([path for path in stored(tmp_path) if "features" in path.parts]))
        close(*arguments)
        if len(seen) > len(SITES):
            raise RunError("stopped here", code="TF-504")

    monkeypatch.setattr(report, "close", closing)
    for name in ("ended", "failed"):
        try:
            run(None, "run", folder=tmp_path / name)
        except RunError:
            assert name == "failed"
        assert not [path for path in stored(tmp_path / name) if "features" in path.parts]
    assert min(seen) > 0


def test_what_cannot_be_deleted_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder))

    monkeypatch.setattr("tightframe.rounds.context.shutil", SimpleNamespace(rmtree=busy))
    run(None, "run", folder=tmp_path)
    left = {path.parents[1] for path in stored(tmp_path) if "features" in path.parts}
    told = [
        item.getMessage() for item in caplog.records if "could not be deleted (Device" in item.getMessage()
    ]
    assert len(left) == len(told) == len(SITES)
    assert all(any(text.endswith(str(folder)) for text in told) for folder in left)


def test_kept_needs_a_place() -> None:
    with pytest.raises(ValidationError, match="Expected `state_dir` with feature_cache 'kept'"):
        SiteEntry(feature_cache="kept")


def test_the_command_tells_and_deletes_all(kept: Path, tmp_path: Path) -> None:
    config = tmp_path / "tightframe.json"
    config.write_text(json.dumps({"state_dir": str(kept), "feature_cache": "kept"}))
    left = kept / "job" / "a" / "features" / "0" / "train-0.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of a run that was killed")
    rehearsal = kept / "job" / "a" / "silo_state" / "rehearsal-x" / "silo_state" / "proposed.safetensors"
    rehearsal.parent.mkdir(parents=True)
    rehearsal.write_bytes(b"what a killed process has trained")
    at_work = rehearsal.parents[1].with_name("rehearsal-y")
    at_work.mkdir()
    other = kept / "a" / "ledger.sqlite"
    other.parent.mkdir()
    other.write_bytes(b"stays")
    line = ["site", "features", "-c", str(config)]
    told = CliRunner().invoke(app, line)
    assert told.exit_code == 0 and told.output.startswith("13 files of features, "), told.output
    assert len(stored(kept)) == 14
    shown = checked("site features", CliRunner().invoke(app, [*line, "--format", "json"]).output)
    assert (shown["files"], shown["deleted"]) == (13, False) and shown["bytes"] > 1000
    with locked_folder(at_work):
        told = CliRunner().invoke(app, [*line, "--delete"])
    assert told.output.startswith("deleted: 13 files") and not stored(kept) and at_work.exists()
    assert not (kept / "features").exists() and other.read_bytes() == b"stays"
