"""Readers: real MNIST files, scikit-learn's digits, and small files in the true formats."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from sklearn.datasets import load_digits

from tightframe.data.image_sets import readers
from tightframe.data.image_sets.readers import (
    read_cifar10,
    read_cifar100,
    read_digits,
    read_idx,
    read_mnist,
    read_svhn,
)
from tightframe.errors import DataError

RNG = np.random.default_rng(0)


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Twelve images of each part; the training part compressed, the test part not."""
    for stem, pack in (("train", gzip.compress), ("t10k", bytes)):
        end = ".gz" if stem == "train" else ""
        images = np.arange(12 * 28 * 28, dtype=np.uint64).reshape(12, 28, 28).astype(np.uint8)
        (tmp_path / f"{stem}-images-idx3-ubyte{end}").write_bytes(pack(idx(images)))
        labels = np.arange(12, dtype=np.uint8) % 10
        (tmp_path / f"{stem}-labels-idx1-ubyte{end}").write_bytes(pack(idx(labels)))
    return tmp_path


def cifar_records(number: int, label_bytes: int, classes: int) -> np.ndarray:
    records = RNG.integers(0, 256, (number, label_bytes + 3072), dtype=np.uint8)
    records[:, :label_bytes] = RNG.integers(0, min(classes, 20), (number, label_bytes))
    records[0, label_bytes - 1] = classes - 1
    return records


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(cifar_records(number, 1, 10).tobytes())
    (folder / "test_batch.bin").write_bytes(cifar_records(4, 1, 10).tobytes())
    return tmp_path


@pytest.fixture
def svhn(tmp_path: Path) -> Path:
    for part, number in (("train", 7), ("test", 1)):
        images = RNG.integers(0, 256, (32, 32, 3, number), dtype=np.uint8)
        labels = (np.arange(number, dtype=np.uint8) % 10 + 4)[:, None]
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": labels}, do_compression=True)
    return tmp_path


def test_the_real_mnist_test_files(real_data: Path) -> None:
    found = read_mnist(real_data / "mnist_t10k", "test")
    assert found.images.shape == (10_000, 1, 28, 28)
    assert (found.images.dtype, found.labels.dtype, found.white) == (np.uint8, np.int64, 255)
    # As MNIST's own page and every paper count them.
    assert np.bincount(found.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert found.labels[:5].tolist() == [7, 2, 1, 0, 4]
    # A zero is dark in its middle, a one bright.
    middle = found.images[:, 0, 12:16, 13:15].mean(axis=(1, 2))
    assert middle[found.labels == 0].mean() < 30 < 180 < middle[found.labels == 1].mean()


def test_idx_files_compressed_or_not(mnist: Path) -> None:
    train, test = read_mnist(mnist, "train"), read_mnist(mnist, "test")
    assert len(train) == 12
    np.testing.assert_array_equal(train.images, test.images)
    assert train.images[1, 0, 0, :3].tolist() == [784 % 256, 785 % 256, 786 % 256]
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_cifar10_is_read_channel_by_channel(cifar10: Path) -> None:
    train = read_cifar10(cifar10, "train")
    assert train.images.shape == (15, 3, 32, 32)
    first = (cifar10 / "cifar-10-batches-bin" / "data_batch_1.bin").read_bytes()
    # Byte 0 is the label; byte 1 + 1024 * channel + 32 * row + column a pixel.
    assert train.labels[0] == first[0] == 9
    assert train.images[0, 2, 5, 7] == first[1 + 2048 + 5 * 32 + 7]
    last = (cifar10 / "cifar-10-batches-bin" / "data_batch_5.bin").read_bytes()
    assert train.images[14, 1, 31, 31] == last[4 * 3073 + 1 + 1024 + 1023]
    inside = read_cifar10(cifar10 / "cifar-10-batches-bin", "test")
    np.testing.assert_array_equal(inside.images, read_cifar10(cifar10, "test").images)


def test_cifar100_uses_the_fine_label(tmp_path: Path) -> None:
    records = cifar_records(6, 2, 100)
    (tmp_path / "train.bin").write_bytes(records.tobytes())
    (tmp_path / "test.bin").write_bytes(records[:2].tobytes())
    train = read_cifar100(tmp_path, "train")
    assert train.labels.tolist() == records[:, 1].tolist()
    np.testing.assert_array_equal(train.images[3].reshape(-1), records[3, 2:])
    assert len(read_cifar100(tmp_path, "test")) == 2


def test_svhn_calls_ten_zero(svhn: Path) -> None:
    train = read_svhn(svhn, "train")
    assert train.images.shape == (7, 3, 32, 32)
    assert train.labels.tolist() == [4, 5, 6, 7, 8, 9, 0]
    raw = scipy.io.loadmat(svhn / "train_32x32.mat")["X"]
    assert train.images[6, 1, 2, 3] == raw[2, 3, 1, 6]
    assert read_svhn(svhn, "test").images.shape == (1, 3, 32, 32)


def test_digits_are_scikit_learns() -> None:
    train, test = read_digits(None, "train"), read_digits(None, "test")
    known = load_digits()
    for found in (train, test):
        assert found.images.shape[1:] == (1, 8, 8)
        assert found.white == found.images.max() == 16
    rows = np.concatenate([train.images, test.images]).reshape(-1, 64)
    labels = np.concatenate([train.labels, test.labels])
    ours = sorted(map(tuple, np.column_stack([rows, labels]).tolist()))
    theirs = sorted(map(tuple, np.column_stack([known.data, known.target]).astype(int).tolist()))
    assert ours == theirs
    expected = [round(0.2 * n) for n in np.bincount(known.target).tolist()]
    assert np.abs(np.bincount(test.labels) - expected).max() <= 1


def test_digits_by_scikit_learns_loader_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = read_digits(None, "test")
    monkeypatch.setattr(readers, "DIGITS_FILE", "datasets/data/no-such-file")
    by_loader = read_digits(None, "test")
    np.testing.assert_array_equal(straight.images, by_loader.images)
    np.testing.assert_array_equal(straight.labels, by_loader.labels)


def test_the_digits_test_part_is_frozen() -> None:
    """Another choice would move records between training and test of results that were published."""
    assert read_digits(None, "test").labels[:12].tolist() == [2, 5, 6, 0, 8, 4, 7, 8, 6, 4, 6, 4]


@pytest.mark.parametrize(
    ("read", "module"),
    [(lambda: read_digits(None, "train"), "sklearn"), (lambda: read_svhn(Path("."), "train"), "scipy")],
)
def test_a_missing_package_is_named_with_how_to_get_it(
    read: Callable[[], Any], module: str, monkeypatch: pytest.MonkeyPatch, svhn: Path
) -> None:
    monkeypatch.chdir(svhn)
    monkeypatch.setattr(readers, "find_spec", lambda _: None)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"scikit-learn|scipy") as caught:
        read()
    assert caught.value.code == "TF-203"
    assert "pip install 'tightframe[benchmarks]'" in str(caught.value)


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:keep])


def replaced(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_bytes(content)


TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("harm", "part", "code", "said"),
    [
        (cut(TEST_IMAGES, 5000), "test", "TF-206", "9408 bytes for the shape .12, 28, 28."),
        (cut(TEST_IMAGES, 10), "test", "TF-206", "the header 00000803"),
        (cut("train-images-idx3-ubyte.gz", 200), "train", "TF-206", "an idx file"),
        (replaced(TEST_LABELS, b"<html>not found</html>"), "test", "TF-206", "the header 3c68746d"),
        (
            replaced(TEST_LABELS, idx(np.arange(11, dtype=np.uint8) % 10)),
            "test",
            "TF-206",
            "12 labels.*got 11",
        ),
        (replaced(TEST_LABELS, idx(np.full(12, 10, np.uint8))), "test", "TF-207", r"labels of 0\.\.9"),
        (
            replaced(TEST_LABELS, idx(np.zeros(12, np.uint8)) + b"x"),
            "test",
            "TF-206",
            r"12 bytes for the shape \(12,\).*got more",
        ),
        (
            replaced(TEST_LABELS, struct.pack(">4BI", 0, 0, 8, 1, 2**32 - 1)),
            "test",
            "TF-206",
            "1 to 2..31 bytes",
        ),
        (
            replaced(TEST_IMAGES, idx(np.zeros((12, 32, 32), np.uint8))),
            "test",
            "TF-206",
            rf"images of 28 x 28 in .*{TEST_IMAGES}, but got the shape \(12, 32, 32\)",
        ),
        (lambda root: (root / TEST_LABELS).unlink(), "test", "TF-205", f"{TEST_LABELS} or {TEST_LABELS}.gz"),
    ],
)
def test_damaged_mnist_files_are_named(
    mnist: Path, harm: Callable[[Path], Any], part: Any, code: str, said: str
) -> None:
    harm(mnist)
    with pytest.raises(DataError, match=rf"^{code}: [\s\S]*{said}"):
        read_mnist(mnist, part)


def test_a_huge_compressed_file_is_not_unpacked(tmp_path: Path) -> None:
    """A header that promises four bytes, before 30 MB of zeros: no more than five bytes are read."""
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 4)) + gzip.compress(bytes(30_000_000)))
    tracemalloc.start()
    with pytest.raises(DataError, match="got more bytes"):
        read_idx(path, 1)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_damaged_cifar_files_are_named(cifar10: Path) -> None:
    batch = cifar10 / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = batch.read_bytes()
    for content, code, said in (
        (whole[:-1], "TF-206", "records of 3073 bytes"),
        (b"", "TF-206", "but got 0 bytes"),
        (b"\x0a" + whole[1:], "TF-207", r"labels of 0\.\.9"),
    ):
        batch.write_bytes(content)
        with pytest.raises(DataError, match=said) as caught:
            read_cifar10(cifar10, "train")
        assert caught.value.code == code
        assert "data_batch_3.bin" in str(caught.value)


def test_the_python_version_of_cifar_is_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"^TF-205: .*download the binary version"):
        read_cifar10(tmp_path, "test")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "TF-206"),
        ({"X": np.zeros((32, 32, 3, 2), np.float64), "y": np.ones((2, 1), np.uint8)}, "TF-206"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1), np.uint8)}, "TF-206"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.zeros((2, 1), np.uint8)}, "TF-207"),
    ],
)
def test_other_matlab_files_are_refused(tmp_path: Path, values: dict[str, Any], code: str) -> None:
    scipy.io.savemat(tmp_path / "train_32x32.mat", values)
    with pytest.raises(DataError, match=rf"^{code}: "):
        read_svhn(tmp_path, "train")


def test_a_cut_off_matlab_file_is_refused(svhn: Path) -> None:
    cut("train_32x32.mat", 3000)(svhn)
    with pytest.raises(DataError, match=r"^TF-206: .*download it again"):
        read_svhn(svhn, "train")


@pytest.mark.parametrize("read", [read_mnist, read_cifar10, read_cifar100, read_svhn])
def test_a_missing_folder_is_named(tmp_path: Path, read: Any) -> None:
    with pytest.raises(DataError, match=r"^TF-203: .*Expected a folder at"):
        read(tmp_path / "nowhere", "train")
