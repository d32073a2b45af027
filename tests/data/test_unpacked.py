"""Small files that unpack to far more than records do are refused before they take memory."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.support.tables import site

from tightframe.data import unpacked
from tightframe.data.arrays import ArrayData
from tightframe.data.eicu.matrix import read_matrix
from tightframe.data.image_sets.readers import read_idx
from tightframe.data.isic.folder import decode
from tightframe.data.table.sources.rows import read_all
from tightframe.errors import DataError


def packed(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(gzip.compress(content, 1))


def arrays(path: Path) -> None:
    few = {f"{name}_{fold}": np.zeros(1) for name in "xy" for fold in ("train", "validation", "test")}
    with path.open("wb") as stream:
        np.savez_compressed(stream, **{**few, "x_train": np.zeros(2**18)})


def parquet(path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(np.zeros(2**19, np.int32), pa.array(["aa"]))
    pq.write_table(pa.table({"a": column}), path, compression="zstd")


def table(path: Path) -> tuple[list[str], dict[str, Any], list[int]]:
    return read_all(site(path), 100)


def idx(path: Path) -> None:
    shape = bytes((0, 0, 8, 3, 0, 0, 4, 0, 0, 0, 0, 32, 0, 0, 0, 32))
    path.write_bytes(gzip.compress(shape + bytes(2**20)))


READERS: list[tuple[str, Callable[[Path], object], Callable[[Path], object]]] = [
    ("a.csv.gz", packed(b"a,b\n" + b"10,20\n" * 2**18), table),
    ("a.parquet", parquet, table),
    ("a.npz", arrays, lambda path: ArrayData.read(path, source="s", num_classes=2)),
    ("matrix.npz", arrays, read_matrix),
    ("a-idx3-ubyte.gz", idx, lambda path: read_idx(path, 3)),
]


@pytest.mark.parametrize(("name", "write", "read"), READERS, ids=[case[0] for case in READERS])
def test_a_file_unpacks_no_further_than_records_do(
    name: str,
    write: Callable[[Path], object],
    read: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unpacked, "FREE", 2**18)
    write(tmp_path / name)
    with pytest.raises(
        DataError, match=r"more than 30 times its size|UnpackedError|column.* cells, more"
    ) as caught:
        read(tmp_path / name)
    assert caught.value.code == "TF-206"


def test_an_honest_table_of_sparse_flags_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flag of a thousand in 40 columns of 4,000 rows, with a hundredth of the limit."""
    monkeypatch.setattr(unpacked, "FREE", unpacked.FREE // 100)
    flags = np.random.default_rng(0).random((4000, 40)) < 0.001
    columns = {f"f{place}": flags[:, place].astype(int) for place in range(40)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    text = ",".join(columns) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in flags.astype(int))
    packed(text.encode())(tmp_path / "a.csv.gz")
    for name in ("a.parquet", "a.csv.gz"):
        assert len(table(tmp_path / name)[1]["f0"]) == 4000


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_text_that_a_parquet_file_has_once_is_held_once(dictionary: bool, tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(np.zeros(2000, np.int32), pa.array(["x" * 20_000]))
    column = column if dictionary else column.dictionary_decode()
    pq.write_table(pa.table({"a": column}), tmp_path / "a.parquet", compression="zstd")
    cells = table(tmp_path / "a.parquet")[1]["a"]
    assert len(cells) == 2000 and len(set(map(id, cells))) == 1


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "FREE", 2**26)
    packed(b"a,b\n" + b"," * 2**25)(tmp_path / "a.csv.gz")
    with pytest.raises(DataError, match="without an end of line"):
        table(tmp_path / "a.csv.gz")


def test_a_picture_has_no_more_pixels_than_a_records_may_have(tmp_path: Path) -> None:
    """Pillow's own limit is 179 million."""
    Image.new("1", (9000, 8000)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="67108864"):
        decode(tmp_path / "a.png")
