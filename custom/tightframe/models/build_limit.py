"""A ceiling on the size of a model, enforced while it is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tightframe.errors import TooLargeError

RULE = "max_parameters"


def build_within(make: Callable[[], nn.Module], most: int | None) -> nn.Module:
    """Build a model that has no more numbers than a ceiling.

    The ceiling is enforced while the model is built: every tensor's size is checked before torch allocates
    it. This works for any backbone, those of other packages included.

    Args:
        most: largest number of values in its parameters and buffers; None for no limit.

    Raises:
        TooLargeError: TF-632.
    """
    if most is None:
        return make()
    with _Allocating(most):
        model = make()
    numbers = sum(item.numel() for item in (*model.parameters(), *model.buffers()))
    if numbers > most:
        raise TooLargeError(RULE, f"a model of {numbers} numbers", most)
    return model


class _Allocating(TorchFunctionMode):
    """Counts the values of new tensors; initialisers may allocate as many again as the model itself."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._allocated = most, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        size = _new_numbers(func, args, kwargs or {})
        self._allocated += size
        if size > self._most or self._allocated > 2 * self._most:
            raise TooLargeError(RULE, f"a model of more than {max(size, self._most)} numbers", self._most)
        return func(*args, **(kwargs or {}))


_BY_SIZE = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty_strided}
_OF_TENSOR = {
    *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
    *(torch.Tensor.repeat, torch.tile),
}


def _new_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of values in the tensor that a call allocates by a given size; 0 for other calls."""
    if func is torch.eye:
        rows, columns = [*args, kwargs.get("n"), kwargs.get("m")][:2]
        return int(rows) * int(columns if columns is not None else rows)
    if func not in _BY_SIZE and func not in _OF_TENSOR:
        return 0
    given = args[1:] if func in _OF_TENSOR else args
    first = kwargs.get("size", given[0] if given else ())
    lengths = first if isinstance(first, list | tuple) else [item for item in given if isinstance(item, int)]
    numbers = math.prod(int(length) for length in lengths)
    return numbers * args[0].numel() if func in (torch.Tensor.repeat, torch.tile) else numbers
