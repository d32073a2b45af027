"""Keep few records of a table from being alone on one side of a ReLU in sums of features or their products.

Features are linear in the inputs except where a unit switches. If one record alone fires a unit, or alone
does not, the products of features have that record's own products as a row, or as a combination of rows that
whoever knows the weights can find: one to four of 216 records for most random networks on raw columns. If it
is alone in its class, the sum of the class has a number of that record in clear: of 64 units and 486 records
three a round, in two classes. So sides are those of each class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import nn

from tightframe.learning.few_records.unit_records import made_by_few

_B = TypeVar("_B")
_M = TypeVar("_M")


class UnitSides:
    """Put, in a ``with`` block, few records on the side of each ReLU that all others are on, layer by layer.

    Args:
        model: its ReLUs on one number a unit, (B, d), are watched.
        times: number of records of its class that each record's patient has, (n,): these count as one.
        labels: class of each record, int64 (n,).
        least: number of a class's patients below which a side has few; with up to 1 no side has.

    >>> rows = torch.tensor([[-1.0, 3.0], [-1.0, 1.0], [2.0, 2.0], [-3.0, -1.0]])
    >>> of = torch.ones(4), torch.zeros(4, dtype=torch.int64)
    >>> with UnitSides(model := nn.Sequential(nn.ReLU()), *of, least=2) as sides:
    ...     outputs = list(sides.passes(lambda: [rows[:2], rows[2:]], model))
    >>> torch.cat(outputs).tolist()  # one record fires the first unit, and one does not fire the second
    [[0.0, 3.0], [0.0, 1.0], [0.0, 2.0], [0.0, -1.0]]
    """

    def __init__(self, model: nn.Module, times: torch.Tensor, labels: torch.Tensor, *, least: int) -> None:
        self._times, self._labels, self._least = times.double(), labels, least
        self._classes = int(labels.max()) + 1 if len(labels) else 0
        self._units = [item for item in model.modules() if isinstance(item, nn.ReLU)] if least > 1 else []
        self._in_place = [item.inplace for item in self._units]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._decided: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums: list[torch.Tensor] = []  # of both sides: sizes and their squares, (2, C, units)
        self._calls = self._place = self._rows = 0

    @property
    def looks(self) -> bool:
        """Return True if there are ReLUs to watch."""
        return bool(self._units)

    def __enter__(self) -> Self:
        """Start watching the ReLUs."""
        for item in self._units:
            item.inplace = False
            self._handles.append(item.register_forward_hook(self._forward))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the model's ReLUs."""
        for item, before in zip(self._units, self._in_place, strict=True):
            item.inplace = before
        for handle in self._handles:
            handle.remove()

    def passes(self, batches: Callable[[], Iterable[_B]], run: Callable[[_B], _M]) -> Iterator[_M]:
        """Yield a model's outputs for all records, batch by batch, after one pass for each ReLU.

        Args:
            batches: return the batches of all records, the same each time.
            run: run the model once on a batch.
        """
        undecided = self.looks
        while undecided:
            self._sums = []
            for _ in self._run_all(batches, run):
                pass
            undecided = len(self._decided) + 1 < self._calls
            if self._calls:
                self._decide()
        yield from self._run_all(batches, run)

    def _run_all(self, batches: Callable[[], Iterable[_B]], run: Callable[[_B], _M]) -> Iterator[_M]:
        self._place = self._calls = 0
        for batch in batches():
            self._calls = self._rows = 0
            output = run(batch)
            self._place += self._rows
            yield output

    def _decide(self) -> None:
        off, on = (made_by_few(side, self._least) for side in self._sums)
        self._decided.append((off, on & ~off))

    def _forward(
        self, _unit: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        if output.dim() != 2:
            return None
        call, self._calls, self._rows = self._calls, self._calls + 1, len(output)
        place = slice(self._place, self._place + len(output))
        labels = self._labels[place].to(output.device)
        if call < len(self._decided):
            off, on = (side[labels] for side in self._decided[call])
            return torch.where(off, torch.zeros_like(output), torch.where(on, given[0], output))
        if call == len(self._decided):
            times = self._times[place, None].to(output.device)
            member = nn.functional.one_hot(labels, self._classes).double().T
            sides = output.detach().double(), (output - given[0]).detach().double()
            sums = [torch.stack([member @ side, member @ (times * side.square())]) for side in sides]
            before = self._sums or [torch.zeros_like(item) for item in sums]
            self._sums = [old + new for old, new in zip(before, sums, strict=True)]
        return None
