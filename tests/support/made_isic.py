"""Made images in the layout of Fed-ISIC2019."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from tightframe.data.isic.folder import IMAGES


def write_centre(folder: Path, height: int, width: int) -> None:
    """Write thirty images of centre 3, three classes, 24 of them for training."""
    (folder / IMAGES).mkdir(parents=True)
    with (folder / "train_test_split").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "target", "center", "fold", "fold2"])
        for index in range(30):
            name, fold = f"ISIC_{index:03d}", "train" if index < 24 else "test"
            writer.writerow([name, index % 3, 3, fold, f"{fold}_3"])
            noise = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / IMAGES / f"{name}.jpg")
