"""Records that are read a batch at a time, as a torch data set. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

Label = int | torch.Tensor


class BatchRecords(Dataset[tuple[torch.Tensor, Label]]):
    """Map-style data set of (float32 tensor, int label or int64 findings (K,)).

    A whole batch is built at once (``__getitems__``), which makes wide, sparse rows and small images cheap.

    Args:
        labels: int64 (n,), or (n, K) of findings.
        read: indices of B records -> their values, a new float32 array or tensor (B, ...).
    """

    def __init__(
        self, labels: NDArray[np.int64], read: Callable[[Sequence[int]], NDArray[np.float32] | torch.Tensor]
    ) -> None:
        # A row for each record, or a number, as torch's loader collates them.
        self._labels: Sequence[Label] = (
            labels.tolist() if labels.ndim == 1 else torch.from_numpy(np.ascontiguousarray(labels)).unbind(0)
        )
        self._read = read

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Label]:
        if not 0 <= index < len(self):
            raise IndexError(f"Expected an index below {len(self)}, but got {index}.")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, Label]]:
        """Return the records of a batch; torch's loader calls this instead of ``__getitem__``."""
        values = torch.as_tensor(self._read(indices))
        return list(zip(values.unbind(0), (self._labels[index] for index in indices), strict=True))
