"""FLamby's interface to Fed-ISIC2019, without FLamby, for code that was written for it.

The names, arguments and attributes are those of ``flamby.datasets.fed_isic2019`` (owkin/FLamby,
commit edacf54), without its model. The differences: ``data_path`` is required, the split file is
next to the images, ``targets`` and ``centers`` are NumPy arrays instead of pandas Series (with the
same indices), and training transforms are those of ``transforms``. As in FLamby the training fold is
whole: no validation fold is split off. Imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import Dataset

from tightframe.data.isic import FULL_SIZE, NUM_CENTERS, transforms
from tightframe.data.isic.folder import IMAGES, SPLIT, decode, read_split
from tightframe.errors import DataError
from tightframe.phases import stream_seed

NUM_CLIENTS = NUM_CENTERS
BATCH_SIZE = 64
NUM_EPOCHS_POOLED = 20
LR = 5e-4
Optimizer = torch.optim.Adam

_STATED_TOTAL = 18413
"""Training images by which FLamby computes rounds. There are 18,597, but FLamby's number is kept."""

ALPHA = (5.5813, 2.0472, 7.0204, 26.1194, 9.5369, 101.0707, 92.5224, 38.3443)
"""Class weights of the loss: 18,597 divided by each class's training images at all six centres together."""


def get_nb_max_rounds(num_updates: int, batch_size: int = BATCH_SIZE) -> int:
    """Return the number of rounds of ``num_updates`` steps that equals the pooled training.

    >>> get_nb_max_rounds(100)
    9
    """
    return (_STATED_TOTAL // NUM_CLIENTS // batch_size) * NUM_EPOCHS_POOLED // num_updates


def metric(y_true: NDArray[Any], logits: NDArray[Any]) -> float:
    """Compute balanced accuracy: the mean recall over the classes in ``y_true``.

    Args:
        y_true: labels, (n,) or (n, 1).
        logits: a score for each class, (n, C).

    Returns:
        A value in [0, 1].

    Raises:
        ValueError: if there is no record.
    """
    truth = np.asarray(y_true).reshape(-1).astype(np.int64)
    if truth.size == 0:
        raise ValueError("Expected `y_true` to hold at least one label, but got none.")
    guess = np.asarray(logits).argmax(axis=1)
    return float(np.mean([np.mean(guess[truth == label] == label) for label in np.unique(truth)]))


class BaselineLoss(torch.nn.Module):
    """FLamby's weighted focal loss: the mean of ``alpha_y (1 - p_y)^gamma (-log p_y)``.

    Args:
        alpha: weight of each class, (C,).
        gamma: focusing exponent.
    """

    alpha: torch.Tensor

    def __init__(self, alpha: Any = ALPHA, gamma: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.as_tensor(alpha, dtype=torch.float32))
        self.gamma = gamma

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (B, C) for labels int64 (B,) or (B, 1): a scalar."""
        labels = targets.reshape(-1)
        chosen = functional.log_softmax(inputs, dim=1).gather(1, labels[:, None])[:, 0]
        return (self.alpha[labels] * (1.0 - chosen.exp()) ** self.gamma * -chosen).mean()


class FedIsic2019(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One centre's fold, or a fold of all centres, with FLamby's contract.

    Args:
        center: 0..5; ignored where ``pooled``.
        train: the training fold with training transforms, or the test fold with a centre crop.
        pooled: all centres together.
        debug: accepted and ignored, as in FLamby.
        data_path: the folder that holds ``ISIC_2019_Training_Input_preprocessed``.
        split_path: FLamby's split file; by default ``<data_path>/train_test_split``.
        seed: None draws an item's training transforms from torch's global stream, so that they
            change from epoch to epoch; a number makes item i depend on (seed, i) only.

    Attributes:
        image_paths: of each item.
        targets: label of each item, int64 (n,).
        centers: centre of each item, int64 (n,).
        augmentations: the function that turns an item's pixels into its tensor; for inspection only.
        center, train_test, pooled, key: the selected fold; key is for example ``train_3``.

    Raises:
        DataError: TF-203 without a folder, TF-204 or TF-207 for the split file, TF-208 for an
            empty fold. A missing image raises only when it is read (TF-205), as in FLamby.
        AssertionError: if ``center`` is not 0..5, as in FLamby.
    """

    def __init__(
        self,
        center: int = 0,
        train: bool = True,
        pooled: bool = False,
        debug: bool = False,
        X_dtype: torch.dtype = torch.float32,  # noqa: N803 -- FLamby's name
        y_dtype: torch.dtype = torch.int64,
        data_path: str | Path | None = None,
        *,
        split_path: str | Path | None = None,
        seed: int | None = None,
    ) -> None:
        if not pooled and center not in range(NUM_CENTERS):
            raise AssertionError(f"Expected `center` to be 0..{NUM_CENTERS - 1}, but got {center}.")
        if data_path is None or not (Path(data_path) / IMAGES).is_dir():
            raise DataError(f"Expected `data_path` to be a folder with {IMAGES}, but got {data_path}.")
        self.center = center
        self.train_test = "train" if train else "test"
        self.pooled = pooled
        self.key = f"{self.train_test}_{center}"
        self.X_dtype = X_dtype
        self.y_dtype = y_dtype
        self.seed = seed
        self.augmentations = transforms.training if train else transforms.evaluation
        root = Path(data_path)
        rows = [
            row
            for row in read_split(Path(split_path) if split_path else root / SPLIT)
            if row.fold == self.train_test and (pooled or row.center == center)
        ]
        if not rows:
            raise DataError(f"Expected images in {self.key}, but the split file has none.", code="TF-208")
        self.image_paths = [str(root / IMAGES / f"{row.image}.jpg") for row in rows]
        self.targets = np.array([row.target for row in rows], dtype=np.int64)
        self.centers = np.array([row.center for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.image_paths)

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.from_numpy(decode(Path(self.image_paths[idx])).copy()).permute(2, 0, 1)
        if self.train_test == "train":
            seed = int(torch.randint(2**62, ())) if self.seed is None else stream_seed(self.seed, int(idx))
            image = transforms.training(pixels, FULL_SIZE, torch.Generator().manual_seed(seed))
        else:
            image = transforms.evaluation(pixels, FULL_SIZE)
        return image.to(self.X_dtype), torch.tensor(self.targets[idx], dtype=self.y_dtype)


FedClass = FedIsic2019
