from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.made_eicu import clinic

from tightframe.data.eicu import prepare as eicu_prepare
from tightframe.data.eicu.matrix import MANIFEST, read_matrix, read_vocabulary
from tightframe.data.eicu.prepare import prepare
from tightframe.errors import DataError


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return clinic(tmp_path / "tables")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_demo(real_data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    early, whole = prepare(real_data / "eicu_demo", tmp_path / "out", progress=lines.append)
    assert (early.window, early.made, whole.window, whole.made) == ("48h", True, "stay", True)
    assert [early.counts[key] for key in ("stays", "drugs", "deaths", "orders")] == [1555, 920, 136, 75604]
    assert [whole.counts[key] for key in ("stays", "drugs", "deaths")] == [1558, 1012, 136]
    assert "48h: stays 1555, drugs 920, deaths 136, hospitals 144, given 31795" in lines
    made = digests(tmp_path / "out")
    assert set(made) == {
        MANIFEST,
        *(f"eicu_{window}.npz" for window in ("48h", "stay")),
        *(f"vocabulary_{window}.json" for window in ("48h", "stay")),
    }
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())["windows"]
    # The published checksums of the demo's own files.
    published = dict(
        reversed(line.split())
        for line in (real_data / "eicu_demo" / "SHA256SUMS.txt").read_text().splitlines()
    )
    for entry in manifest.values():
        for table in ("patient", "hospital", "medication"):
            assert entry["inputs"][table]["sha256"] == published[f"{table}.csv.gz"]
        assert {name: made[name] for name in entry["outputs"]} == entry["outputs"]
    with np.load(real_data / "eicu_demo" / "eicu_demo_drug_mortality_48h.npz", allow_pickle=True) as stored:
        matrix = read_matrix(tmp_path / "out" / "eicu_48h.npz")
        assert np.array_equal(matrix.indices, stored["indices"])
        assert read_vocabulary(tmp_path / "out" / "vocabulary_48h.json") == tuple(stored["hicl"].tolist())


def test_what_is_done_is_verified_and_kept(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(tables, tmp_path / "out")
    before = digests(tmp_path / "out")
    lines: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(eicu_prepare, "read_tables", None)  # reading again would fail
        again = prepare(tables, tmp_path / "out", progress=lines.append)
    assert [item.made for item in first] == [True, True]
    assert [item.made for item in again] == [False, False]
    assert [item.counts for item in again] == [item.counts for item in first]
    assert sum("already prepared from these tables, and verified" in line for line in lines) == 2
    assert digests(tmp_path / "out") == before


def test_one_window_first_then_the_other(tables: Path, tmp_path: Path) -> None:
    (only,) = prepare(tables, tmp_path / "out", window="stay")
    assert (only.window, only.made) == ("stay", True)
    assert not (tmp_path / "out" / "eicu_48h.npz").exists()
    assert [(item.window, item.made) for item in prepare(tables, tmp_path / "out")] == [
        ("48h", True),
        ("stay", False),
    ]
    prepare(tables, tmp_path / "both")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "both").iterdir()} == {0o600}
    assert digests(tmp_path / "both") == digests(tmp_path / "out")


def other_tables(tables: Path, output: Path) -> None:
    path = tables / "medication.csv"
    path.write_text(path.read_text() + "1,1000,0,No,NAME,777\n")


@pytest.mark.parametrize(
    "harm",
    [
        lambda tables, output: (output / "eicu_48h.npz").unlink(),
        lambda tables, output: (output / "eicu_48h.npz").write_bytes(b"torn"),
        lambda tables, output: (output / "vocabulary_48h.json").write_bytes(b"torn"),
        other_tables,
    ],
)
def test_what_is_damaged_or_of_other_tables_is_made_again(
    tables: Path, tmp_path: Path, harm: Callable[[Path, Path], object]
) -> None:
    output = tmp_path / "out"
    prepare(tables, output)
    harm(tables, output)
    assert [item.made for item in prepare(tables, output, window="48h")] == [True]
    prepare(tables, tmp_path / "fresh", window="48h")
    for name in ("eicu_48h.npz", "vocabulary_48h.json"):
        assert (output / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()


def test_a_run_that_is_cut_off_goes_on(tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = eicu_prepare.write_whole

    def dies_at_the_fourth(path: Path, data: bytes) -> None:
        written.append(path.name)
        if len(written) == 4:
            raise KeyboardInterrupt
        real(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(eicu_prepare, "write_whole", dies_at_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            prepare(tables, tmp_path / "out")
    assert written == ["eicu_48h.npz", "vocabulary_48h.json", MANIFEST, "eicu_stay.npz"]
    assert [item.made for item in prepare(tables, tmp_path / "out")] == [False, True]
    prepare(tables, tmp_path / "fresh")
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_a_table_that_is_not_the_published_one_is_refused(tables: Path, tmp_path: Path) -> None:
    lines = [f"{digest} {name}" for name, digest in digests(tables).items()]
    (tables / "SHA256SUMS.txt").write_text("\n".join([*lines, "0" * 64 + " lab.csv.gz"]) + "\n")
    prepare(tables, tmp_path / "out", window="48h")
    path = tables / "patient.csv"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"^TF-206: .*patient.csv .*download it again"):
        prepare(tables, tmp_path / "other", window="48h")
    assert not (tmp_path / "other").exists()


def test_the_demo_must_give_the_demos_counts(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(eicu_prepare.DEMO_COUNTS, "48h", {"stays": 1556})  # type: ignore[misc]
    with pytest.raises(DataError, match=r"^TF-206: .*Expected stays 1556 .* but got stays 1555"):
        prepare(real_data / "eicu_demo", tmp_path / "out", window="48h")
    assert not (tmp_path / "out").exists()


def test_bad_input_and_output(tables: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^TF-203: "):
        prepare(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^TF-203: [\s\S]*able to write"):
        prepare(tables, tmp_path / "file" / "out")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / MANIFEST).write_text("{}x")
    with pytest.raises(DataError, match=r"^TF-206: [\s\S]*remove this file"):
        prepare(tables, tmp_path / "strange")
    shutil.rmtree(tables)
    with pytest.raises(DataError):
        prepare(tables, tmp_path / "out")
