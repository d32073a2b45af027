"""How many records move each unit of a layer, or channel; those that few move stay as they were.

A unit's row of an update is the sum of the layer's inputs over the records that the unit fires for, each
times the slope of its loss, and its bias's the sum of these slopes. So of a unit that one record alone moves
their quotient is that record, or its features; and its column in the next layer says which units there the
record fires. No rule on a job's values sees that: of 216 records 17 were read from one honest job whose
inputs were not standardised (raw columns are far from 0, so that some units fire for few), and 40 from one at
a rate of 10 (most units die, and few records still have a loss).

Of a convolution's channel the quotient is a mean of what it saw of that record: without normalisation one
record alone moves 3 to 17 channels in each of VGG11's later layers, of 40 pictures.

Of a column that few records have, a total's column is the sum of their slopes alone, each times zero or one
for each unit: of up to seven records 32 quotients by the next layer's weights told which units each fires
for, and its label, in one round, and in twelve rounds 56 of 67 such records whole, by integer programming. As
many records as units have no such subset sums that a reader could take apart, so that a column on a record's
own values, or on frozen features, needs as many, and so what tells it from others (``few_columns``).

So a silo looks at its own slopes. With ``a`` the size of what each record adds to a row or column, as many
records as ``(sum of a)^2 / sum of a^2`` move it. Those that fewer than ``min_class_count`` move stay as they
were before the training: the sum is of the others' records, and nobody sees which are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import nn

_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Layer = nn.Linear | _Convolution
SEEN = 256
"""Records whose median is each column's commonest value, if more than half of all have one."""


@dataclass
class _Counted:
    """Sums over records of sizes and their squares (2, rows + columns), and how many were drawn.

    Attributes:
        first: columns of a layer on what does not change of a record, and each one's size, until they are
            enough to tell each column's commonest value.
        common: that value, (columns,); None until then.
    """

    sums: torch.Tensor
    drawn: int = 0
    first: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    common: torch.Tensor | None = None

    def add(self, sizes: torch.Tensor, start: int = 0) -> None:
        """Add each record's sizes of rows or columns (B, n), the first of which is at a place."""
        self.sums[:, start : start + sizes.shape[1]] += torch.stack([sizes.sum(0), sizes.square().sum(0)])

    def add_own(self, values: torch.Tensor, sizes: torch.Tensor) -> None:
        """Count a record's size (B, 1) in the columns (B, n) in which it has not the commonest value."""
        self.first.append((values, sizes))
        if self.common is not None or sum(len(each) for each, _ in self.first) >= SEEN:
            self.settle()

    def settle(self) -> None:
        """Count what was kept for later."""
        if not self.first:
            return
        if self.common is None:
            self.common = torch.cat([values for values, _ in self.first]).median(0).values
        for values, sizes in self.first:
            powers = torch.cat([sizes, sizes.square()], 1)
            self.sums[:, -values.shape[1] :] += powers.T @ torch.ne(values, self.common).to(powers)
        self.first = []


class UnitRecords:
    """Counts, in a block, the records whose gradients go through each unit of a model's layers.

    Args:
        model: whose linear layers and convolutions are looked at, as far as they train.
        records: that an epoch draws.
        repeats: how often the most repeated record is among these.
        least: units that fewer records move are few; with up to 1 none are, and nothing is counted.
        per_unit: so many records a unit must move a column on what does not change of a record.
        still: columns of records, (p,), that in a layer on these are few in any case; None for none.

    >>> layer = nn.Linear(2, 3)
    >>> rows, slopes = torch.arange(12.0).view(6, 2), torch.tensor([[1.0, 1, 0], [0, 1, 0]]).repeat(3, 1)
    >>> with UnitRecords(layer, 6, least=4) as units:
    ...     _ = torch.autograd.grad((layer(rows) * slopes).sum(), layer.weight)
    >>> units.few()["weight"].int().tolist()  # three records move the first, six the second
    [[1, 1], [0, 0], [0, 0]]
    """

    def __init__(
        self,
        model: nn.Module,
        records: int,
        *,
        repeats: int = 1,
        least: int,
        per_unit: float = 0.0,
        still: torch.Tensor | None = None,
    ) -> None:
        self._model, self._records, self._repeats, self._least = model, max(records, 1), repeats, least
        self._per_unit, self._still = per_unit, still
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._before: dict[str, torch.Tensor] = {}
        self._counted: dict[str, _Counted] = {}

    def __enter__(self) -> Self:
        """Begin to count."""
        if self._least > 1:
            for place, layer in self._model.named_modules():
                if isinstance(layer, _Layer) and layer.weight.requires_grad:
                    self._watch(f"{place}." if place else "", layer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, place: str, layer: _Layer) -> None:
        self._before |= {place + name: item.detach().clone() for name, item in layer.named_parameters()}
        axis, groups = (1, layer.groups) if isinstance(layer, _Convolution) else (-1, 1)
        weight = layer.weight
        width = weight.shape[0] + groups * weight.shape[1]
        counted = _Counted(torch.zeros(2, width, dtype=torch.float64, device=weight.device))
        self._counted[place] = counted

        def seen(_layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad or output.dim() < weight.dim():  # of no record's own values
                return
            inputs, change = given[0].detach(), given[0].requires_grad

            def add(slopes: torch.Tensor) -> None:
                # ``SingleLogit`` returns a zero in front of its one unit's value.
                sizes = _by_record(slopes[..., -weight.shape[0] :] if axis < 0 else slopes, axis)
                every = sizes.sum(1, keepdim=True)
                counted.add(sizes)
                counted.drawn += len(sizes)
                if change:
                    counted.add(_by_record(inputs, axis) * every, sizes.shape[1])
                elif inputs.dim() == 2:
                    counted.add_own(inputs, every)

            output.register_hook(add)

        self._handles.append(layer.register_forward_hook(seen))

    def few(self) -> dict[str, torch.Tensor]:
        """Return which entries of each parameter few records, but some, move, bool in its shape."""
        found = {}
        for place, counted in self._counted.items():
            counted.settle()
            times = max(1.0, counted.drawn / self._records) * self._repeats
            sizes, squares = counted.sums
            # Of a convolution in groups each row has its own group's columns.
            shape = self._before[f"{place}weight"].shape
            least = torch.full_like(squares, self._least)
            if counted.common is not None:
                least[shape[0] :].clamp_(min=self._per_unit * shape[0])
            few = (squares > 0) & (sizes.square() < least * times * squares)
            if counted.common is not None and self._still is not None and len(self._still) == shape[1]:
                few[shape[0] :] |= self._still.to(few.device)
            rows, columns = few[: shape[0]], few[shape[0] :].view(-1, 1, shape[1])
            own = columns.expand(-1, shape[0] // len(columns), -1).reshape(shape[:2])
            found[f"{place}weight"] = (
                (rows[:, None] | own).view(*own.shape, *[1] * (len(shape) - 2)).expand(shape)
            )
            if f"{place}bias" in self._before:
                found[f"{place}bias"] = rows
        return found

    @torch.no_grad()
    def put_back(self) -> None:
        """Give these entries of the model their values of before the block."""
        own = dict(self._model.named_parameters())
        for name, few in self.few().items():
            if bool(few.any()):
                own[name].copy_(torch.where(few, self._before[name], own[name]))

    def clear(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set these entries of gradients to 0, in place, by name."""
        for name, few in self.few().items():
            if name in gradients:
                gradients[name].masked_fill_(few.to(gradients[name].device), 0)


def _by_record(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the size of each record's values, (B, width), over all other axes; 0 of what overflows.

    It is their norm behind a convolution and their sum elsewhere, as one is faster here, the other there.
    """
    values = values.detach()
    wide = torch.promote_types(values.dtype, torch.float32)
    if values.dim() > 2 and axis == 1:
        sizes = torch.linalg.vector_norm(values, dim=tuple(range(2, values.dim())), dtype=wide)
    else:
        sizes = values.abs()
        if values.dim() > 2:
            sizes = sizes.flatten(1, -2).sum(1, dtype=wide)
    return sizes.double().nan_to_num(posinf=0.0)
