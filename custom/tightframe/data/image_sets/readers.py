"""Readers of the papers' image sets from files that the user has downloaded, and of handwritten digits.

MNIST and Fashion-MNIST (idx, compressed or not), CIFAR-10 and CIFAR-100 (the *binary* version:
unpickling the Python version would run any code in its files), SVHN (``.mat``, format 2), and
scikit-learn's handwritten digits, which need no file. Nothing is downloaded. Torch-free.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from tightframe.data.unpacked import open_gzip
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError

Part = Literal["train", "test"]
PARTS: tuple[Part, ...] = ("train", "test")
Reader = Callable[[Path, Part], "ImageSet"]

MNIST_STEMS: dict[Part, str] = {"train": "train", "test": "t10k"}
CIFAR10_FILES: dict[Part, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
CIFAR100_FILES: dict[Part, tuple[str, ...]] = {"train": ("train.bin",), "test": ("test.bin",)}
DIGITS_FILE = "datasets/data/digits.csv.gz"
DIGITS_TEST_SHARE = 0.2
_IDX_UINT8 = 8
_IDX_LIMIT = 2**31
_MNIST_SIDE = 28
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True)
class ImageSet:
    """One part of an image set.

    Attributes:
        images: uint8 (n, channels, height, width).
        labels: int64 (n,), in [0, C).
        white: the value of a pixel at full brightness.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    white: int = 255

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> ImageSet:
        """Copy some records, in the order of the indices, so that the rest can be freed."""
        return ImageSet(self.images[indices], self.labels[indices], self.white)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an array in the idx format of MNIST: big-endian header, then bytes; gzip or not.

    Args:
        path: the file; compression is recognised by its first bytes, not by its name.
        dimensions: 1 for labels, 3 for images.

    Raises:
        DataError: TF-205 if it is missing, TF-206 if it is not such an array or is truncated.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                return _idx(raw, path, dimensions)
            with open_gzip(path) as stream:
                return _idx(stream, path, dimensions)
    except FileNotFoundError:
        raise DataError(f"Expected a file at {path}, but there is none.", code="TF-205") from None
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, "an idx file", str(error)) from None


def _idx(stream: BinaryIO, path: Path, dimensions: int) -> NDArray[np.uint8]:
    header = stream.read(4 + 4 * dimensions)
    if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, _IDX_UINT8, dimensions)):
        raise _unreadable(
            path, f"an idx file of bytes with {dimensions} dimensions", f"the header {header[:4].hex()}"
        )
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4", offset=4))
    total = math.prod(shape)
    if not 0 < total < _IDX_LIMIT:
        raise _unreadable(path, "an idx file of 1 to 2**31 bytes", f"the shape {shape}")
    values = stream.read(total + 1)  # one byte more than expected, so that a longer file is detected
    if len(values) != total:
        count = "more" if len(values) > total else f"{len(values)}"
        raise _unreadable(path, f"{total} bytes for the shape {shape}", f"{count} bytes")
    # Copied, because torch warns about read-only arrays.
    return np.frombuffer(values, dtype=np.uint8).reshape(shape).copy()


def read_mnist(root: Path, part: Part) -> ImageSet:
    """Read MNIST or Fashion-MNIST: ``<train|t10k>-<images-idx3|labels-idx1>-ubyte``, ``.gz`` or not.

    Raises:
        DataError: TF-203, TF-205, TF-206 or TF-207.
    """
    stem = MNIST_STEMS[part]
    image_path, label_path = (
        _first(root, [f"{stem}-{kind}-ubyte", f"{stem}-{kind}-ubyte.gz"])
        for kind in ("images-idx3", "labels-idx1")
    )
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(images) != len(labels):
        raise _unreadable(label_path, f"{len(images)} labels, one for each image", f"{len(labels)}")
    if images.shape[1:] != (_MNIST_SIDE, _MNIST_SIDE):
        raise _unreadable(image_path, f"images of {_MNIST_SIDE} x {_MNIST_SIDE}", f"the shape {images.shape}")
    return ImageSet(images[:, None], _labels(labels, 10, label_path))


def read_cifar10(root: Path, part: Part) -> ImageSet:
    """Read CIFAR-10, binary version: ``data_batch_1.bin`` .. ``data_batch_5.bin``, ``test_batch.bin``.

    A record is a label byte and 3,072 pixels: red, green, blue, each 32 x 32, row by row. The
    files are in ``root`` or in its folder ``cifar-10-batches-bin``.

    Raises:
        DataError: TF-203, TF-205, TF-206 or TF-207.
    """
    return _read_cifar(root, "cifar-10-batches-bin", CIFAR10_FILES[part], label_bytes=1, num_classes=10)


def read_cifar100(root: Path, part: Part) -> ImageSet:
    """Read CIFAR-100, binary version: ``train.bin`` and ``test.bin``, with the 100 fine labels.

    A record is the coarse label, the fine label and 3,072 pixels. The files are in ``root`` or in
    its folder ``cifar-100-binary``.

    Raises:
        DataError: TF-203, TF-205, TF-206 or TF-207.
    """
    return _read_cifar(root, "cifar-100-binary", CIFAR100_FILES[part], label_bytes=2, num_classes=100)


def _read_cifar(
    root: Path, folder: str, names: Sequence[str], *, label_bytes: int, num_classes: int
) -> ImageSet:
    place = root / folder if (root / folder).is_dir() else root
    paths = [_first(place, [name], "the binary version of the set") for name in names]
    size = label_bytes + _PIXELS
    images, labels = [], []
    for path in paths:
        values = _bytes_of(path)
        if len(values) == 0 or len(values) % size:
            raise _unreadable(path, f"records of {size} bytes", f"{len(values)} bytes")
        records = np.frombuffer(values, dtype=np.uint8).reshape(-1, size)
        images.append(records[:, label_bytes:].reshape(-1, 3, _SIDE, _SIDE))
        labels.append(_labels(records[:, label_bytes - 1], num_classes, path))
    return ImageSet(np.concatenate(images), np.concatenate(labels))


def read_svhn(root: Path, part: Part) -> ImageSet:
    """Read SVHN, format 2, with SciPy: ``train_32x32.mat`` and ``test_32x32.mat`` (MATLAB 5).

    ``X`` is uint8 (32, 32, 3, n) and ``y`` (n, 1), in which 10 stands for the digit 0.

    Raises:
        DataError: TF-203, TF-205, TF-206 or TF-207; TF-203 also if SciPy is not installed.
    """
    path = _first(root, [f"{part}_32x32.mat"])
    reader = _optional("scipy.io", "SVHN")
    try:
        variables = reader.loadmat(path, variable_names=("X", "y"))
        images, labels = np.asarray(variables["X"]), np.asarray(variables["y"]).reshape(-1)
    except Exception as error:  # a damaged file can make SciPy's parser raise anything
        raise _unreadable(path, "a MATLAB file with X and y", f"{type(error).__name__}: {error}") from None
    if images.dtype != np.uint8 or images.shape != (_SIDE, _SIDE, 3, len(labels)) or len(labels) == 0:
        raise _unreadable(
            path,
            "uint8 pixels (32, 32, 3, n) and n labels",
            f"{images.dtype} {images.shape} and {len(labels)} labels",
        )
    if labels.dtype.kind not in "iu" or labels.min() < 1 or labels.max() > 10:
        raise _unknown_class(path, "1..10", labels)
    return ImageSet(np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10)


def read_digits(_root: Path | None, part: Part) -> ImageSet:
    """Read the 1,797 handwritten digits of scikit-learn: 8 x 8 pixels, 0 to 16. Real records, no file.

    They have no official test part: a fifth of each class, chosen by a fixed hash, is the test part.

    Raises:
        DataError: TF-203 if scikit-learn is not installed.
    """
    images, labels = _digits()
    is_test = validation_mask(
        labels, [f"digits-test-{index}" for index in range(len(labels))], DIGITS_TEST_SHARE
    )
    chosen = np.flatnonzero(is_test if part == "test" else ~is_test)
    return ImageSet(images, labels, white=16).take(chosen)


def _digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read all digits, (n, 1, 8, 8) and (n,), from scikit-learn's own file.

    Importing scikit-learn takes seconds, and in the engine's simulator every task is a process of its own,
    so scikit-learn's loader is used only if the file is not at its usual path.
    """
    package = find_spec("sklearn")
    path = Path(package.origin).parent / DIGITS_FILE if package and package.origin else None
    if path is not None and path.is_file():
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        pixels, labels = table[:, :-1], table[:, -1]
    else:
        digits = _optional("sklearn.datasets", "the set of digits").load_digits()
        pixels, labels = digits.data.astype(np.uint8), digits.target
    return pixels.reshape(-1, 1, 8, 8), labels.astype(np.int64)


def _optional(module: str, what: str) -> Any:
    """Import a module of a package that Tightframe does not require."""
    try:
        return import_module(module)
    except ImportError:
        package = {"sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise DataError(
            f"Expected {package}, which reads {what}, to be installed, but it is not: "
            "run pip install 'tightframe[benchmarks]', or pip install scikit-learn."
        ) from None


def _first(root: Path, names: Sequence[str], what: str = "it under its publisher's name") -> Path:
    """Return the path of the first of these files that is in the folder.

    Raises:
        DataError: TF-203 without the folder, TF-205 without any of them.
    """
    if not root.is_dir():
        raise DataError(
            f"Expected a folder at {root}, but there is none: set `root` to the folder with the downloaded "
            "files, and check that this process may read it."
        )
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"Expected {' or '.join(names)} in {root}, but it is not there: download {what}.", code="TF-205"
    )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, "a readable file", str(error)) from None


def _labels(labels: NDArray[Any], num_classes: int, path: Path) -> NDArray[np.int64]:
    if labels.max() >= num_classes:
        raise _unknown_class(path, f"0..{num_classes - 1}", labels)
    return labels.astype(np.int64)


def _unknown_class(path: Path, expected: str, labels: NDArray[Any]) -> DataError:
    return DataError(
        f"Expected labels of {expected} in {path}, but got {labels.dtype} from {labels.min()} to "
        f"{labels.max()}: it belongs to another data set.",
        code="TF-207",
    )


def _unreadable(path: Path, expected: str, actual: str) -> DataError:
    return DataError(f"Expected {expected} in {path}, but got {actual}: download it again.", code="TF-206")


READERS: dict[str, Reader] = {
    "digits": read_digits,
    "mnist": read_mnist,
    "fashion_mnist": read_mnist,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "svhn": read_svhn,
}
"""Reader of each data set: (folder, part) -> its records."""
