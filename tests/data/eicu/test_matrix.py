from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tightframe.data.eicu import vocabulary_sha256
from tightframe.data.eicu.matrix import (
    MANIFEST,
    StayMatrix,
    aligned,
    compressed,
    matrix_bytes,
    read_manifest,
    read_matrix,
    read_vocabulary,
    vocabulary_bytes,
)
from tightframe.errors import DataError


def made(table: NDArray[Any], hicl: list[int]) -> StayMatrix:
    """A matrix of a dense table (n, D)."""
    row, column = np.nonzero(table)
    indptr, indices = compressed(row, column, len(table))
    n = len(table)
    return StayMatrix(
        indptr=indptr,
        indices=indices,
        label=(np.arange(n) % 2).astype(np.uint8),
        hospital=np.arange(n, dtype=np.int32) // 2,
        region=np.array(["South"] * n, dtype="<U9"),
        stay=np.arange(n, dtype=np.int64) + 50,
        patient=np.arange(n, dtype=np.int32),
        hicl=np.array(hicl, dtype=np.int32),
    )


@pytest.fixture
def table() -> NDArray[Any]:
    dense = (np.random.default_rng(1).random((7, 5)) < 0.4).astype(np.float32)
    dense[3] = 0.0  # a row without a drug
    return dense


def test_dense_rows_are_the_table(table: NDArray[Any]) -> None:
    matrix = made(table, [2, 3, 5, 8, 13])
    assert np.array_equal(matrix.dense(range(7)), table)
    assert np.array_equal(matrix.dense([6, 0, 6]), table[[6, 0, 6]])
    assert matrix.dense([]).shape == (0, 5)
    assert matrix.sizes() == {0: 2, 1: 2, 2: 2, 3: 1}


def test_pairs_may_come_in_any_order() -> None:
    indptr, indices = compressed(np.array([2, 0, 2]), np.array([4, 1, 0]), 3)
    assert indptr.tolist() == [0, 1, 1, 3]
    assert indices.tolist() == [1, 0, 4]


@pytest.mark.parametrize("codes", [[2, 3, 5, 8, 13], [3, 8], [1, 2, 4, 5, 99], [100], [0, 13]])
def test_another_vocabulary(table: NDArray[Any], codes: list[int]) -> None:
    own = [2, 3, 5, 8, 13]
    expected = np.stack([table[:, own.index(code)] if code in own else np.zeros(7) for code in codes], axis=1)
    found = aligned(made(table, own), codes)
    assert np.array_equal(found.dense(range(7)), expected)
    assert found.hicl.tolist() == codes


def test_a_matrix_survives_its_file(table: NDArray[Any], tmp_path: Path) -> None:
    matrix = made(table, [2, 3, 5, 8, 13])
    path = tmp_path / "m.npz"
    path.write_bytes(matrix_bytes(matrix))
    back = read_matrix(path)
    for name, value in vars(matrix).items():
        assert np.array_equal(getattr(back, name), value), name
    assert matrix_bytes(back) == path.read_bytes()


def changed(**columns: Any) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        with np.load(path) as stored:
            arrays = dict(stored)
        np.savez(path, **{name: item for name, item in (arrays | columns).items() if item is not None})

    return harm


def with_file(name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    """Put other bytes in the place of one file of the archive."""

    def harm(path: Path) -> None:
        with zipfile.ZipFile(path) as stored:
            members = {member: stored.read(member) for member in stored.namelist()}
        members.pop("label.npy")
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
            archive.writestr(name, data, compression)

    return harm


def foreign(path: Path) -> None:
    """One array, as ``np.save`` writes it."""
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))


def unknown_method(path: Path) -> None:
    """A compression that no reader knows, as a flipped bit may name it."""
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = data.find(signature)
        while place >= 0:
            data[place + offset : place + offset + 2] = b"\x63\x00"
            place = data.find(signature, place + 4)
    path.write_bytes(data)


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (foreign, "cannot be read: TypeError"),
        (unknown_method, "cannot be read: NotImplementedError"),
        (with_file("label.npy", npy(b"{'descr': (((,\n")), "cannot be read"),
        (with_file("label.npy", npy(b"{'descr': '''\n")), "cannot be read"),
        (
            with_file(
                "label.npy",
                npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"9" * 15 + b",)}\n"),
            ),
            "cannot be read",
        ),
        (with_file("label", b"no array"), "label is .S8 of 0 axes"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "cannot be read"),
        (lambda path: path.write_bytes(b"nothing"), "cannot be read"),
        (changed(hicl=None), "hicl"),
        (changed(region=np.array(["South"] * 7, dtype=object)), "cannot be read"),
        (changed(label=np.zeros(7)), "label is float64"),
        (changed(label=np.zeros(6, dtype=np.uint8)), "6 labels"),
        (changed(label=np.full(7, 2, dtype=np.uint8)), "unknown labels"),
        (changed(region=np.array(["Texas"] * 7, dtype="<U9")), "unknown labels or regions"),
        (changed(hicl=np.array([2, 5, 3, 8, 13], dtype=np.int32)), "ascending"),
        (changed(hicl=np.array([2, 3], dtype=np.int32)), r"columns outside of 0\.\.1"),
        (changed(indices=np.array([0], dtype=np.int32)), "do not cover"),
        (changed(stay=np.zeros(7, dtype=np.int64)), "occurs twice"),
    ],
)
def test_a_damaged_file_is_refused(
    table: NDArray[Any], tmp_path: Path, harm: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(matrix_bytes(made(table, [2, 3, 5, 8, 13])))
    read_matrix(path)
    harm(path)
    with pytest.raises(DataError, match=said) as caught:
        read_matrix(path)
    assert caught.value.code == "TF-206"
    assert "tightframe data prepare eicu" in str(caught.value)


def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    path.write_bytes(vocabulary_bytes([4, 11, 15]))
    assert read_vocabulary(path) == (4, 11, 15)
    assert json.loads(path.read_text())["sha256"] == vocabulary_sha256([4, 11, 15])


def stated(codes: list[Any]) -> str:
    return json.dumps({"hicl": codes, "sha256": vocabulary_sha256(codes)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 200_000, "cannot be read"),
        ("[4, 11]", "cannot be read"),
        ('{"hicl": [4]}', "cannot be read"),
        (stated([]), "ascending order"),
        (stated([4, 4]), "ascending order"),
        (stated([11, 4]), "ascending order"),
        (stated(["4"]), "integers in ascending order"),
        (stated([4.0]), "integers in ascending order"),
        (stated([True]), "integers in ascending order"),
        (stated([-1]), "integers in ascending order"),
        (stated([4, 11]).replace("11", "12"), "changed or truncated"),
    ],
)
def test_a_wrong_vocabulary_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "v.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=rf"^TF-204: [\s\S]*{said}"):
        read_vocabulary(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "windows": {}}', '{"windows": {"24h": {}}}'])
def test_a_strange_manifest_is_refused(tmp_path: Path, text: str) -> None:
    assert read_manifest(tmp_path).windows == {}
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError, match=r"^TF-206: [\s\S]*remove this file"):
        read_manifest(tmp_path)
