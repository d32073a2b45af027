"""How many records move each unit of a layer, or channel; those that few move stay as they were.

A unit's row of an update is the sum of the layer's inputs over the records that the unit fires for, each
times the slope of its loss, and its bias's the sum of these slopes. So of a unit that one record alone moves
their quotient is that record, or its features; and its column in the next layer says which units there the
record fires. No rule on a job's values sees that: of 216 records 17 were read from one honest job whose
inputs were not standardised (raw columns are far from 0, so that some units fire for few), and 40 from one at
a rate of 10 (most units die, and few records still have a loss).

Of a convolution's channel the quotient is a mean of what it saw of that record: without normalisation one
record alone moves 3 to 17 channels in each of VGG11's later layers, of 40 pictures. A channel's scale and
shift in a normalisation are two numbers of it (of 1 to 6 channels of ``small_cnn``'s last 124, 120 pictures).

So a silo looks at its own slopes. With ``a`` the size of what each record adds to a row or column, as many
records as ``(sum of a)^2 / sum of a^2`` move it. A record that is drawn m times adds m parts, whose sum's
square is at most m times the sum of their squares: where each batch is drawn anew some come five times in an
epoch (in small batches 0.4 % of a silo's), and would count as five. Those that fewer than
``min_class_count`` move stay as they were before the training: the sum is of the others' records, and nobody
sees which are missing.

By a unit's part in the logits its row and another's differ by the records that fire one of them only. So of
two units, or of one and those that all records fire, which so few tell apart one stays, too. From one step on
raw columns, where many units are such, one or two of 216 records were read in 8 of 12 runs, and by their
columns of yes and no the reader knew which were right; from one on a model that a hospital steers, with 72
units of one direction and several biases, 21. Sizes count here, too: at rate 3 one of six records that told
two units apart made all but a thousandth of the difference. So its column in the next layer stays: of 72
units on two numbers (``widths`` of 2 and 72) a combination of three units' columns is zero but between the
borders of two, and there one record alone was 4 to 12 times in a total, with its label.

A record of which the loss says next to nothing is behind no unit. Who writes the job can have these be most:
by a balanced softmax of exponent 1000 only the rarer class had slopes, and of the 48 records of three
hospitals 36 were read, with label, from 64 allowed rounds of a head on 72 frozen features, which 216 records
allow. With the others' slopes at 1/20,000 of theirs as many were, at 1/2,000 half, at 1/150 none; of 15
records 13 at 1/1,000 and 2 at 1/150. So a record is behind a layer if its size there is at least 1 /
``BEHIND`` of ``sum of a^2 / sum of a``, and a layer that fewer are behind than the rule on records relies on
(``part_behind`` of ``rounds.few_records.rule``) stays as it was. So does the row of a class in a head, where
no convolution trains: at a small rate features hardly move, and its rounds span the features of that class's
records alone (of three classes, where 61 % had a loss, the rarest's row told 13 of 15). Of a record that is
repeated each copy is a part: of two classes that copies make alike half would be behind a layer at which only
the few of the rarer one have a loss.

Where the last dense layer gets the same of every record, as of units that all are off, losses and updates
are functions of a silo's class counts and of which classes were drawn, of nothing else. From losses of
balanced softmax two rounds told both honest hospitals' exact counts. So training on it fails, which changes
nothing in the sums: it is of no use either.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tightframe.errors import TrainingError

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Norm = nn.GroupNorm | nn.LayerNorm | _BatchNorm
_Layer = nn.Linear | Convolution | _Norm
ROUNDING = 1e-13
"""Of sums of squares in float64."""
BEHIND = 64
"""Part of the size of records that make a layer's sum that a record behind it has at least."""
SAME = 2.0**-20
"""Part of its length, or of 1, by which a record's input differs from that before it, if it does."""
_EXPONENTS = 512
"""Powers of two to either side of 1 by which records' sizes are counted."""


@dataclass
class _Counted:
    """Sums over records, and of how many passes they are.

    Attributes:
        sums: of sizes and their squares, (2, rows + columns).
        both: the same of those that fire two units, (2, 1 + rows, 1 + rows), where the first stands for any
            unit, and a record's size is its mean one at the units that it fires; None where no ReLU follows.
        whole: number, sum and squares of records' sizes, over all rows and of a head in each, (3, 1 or more).
        often: how often such a size has each power of two, from the smallest on, (1 or more, powers).
        least: part of the records that must be behind all rows, and each, (1 or more,).
    """

    sums: torch.Tensor
    whole: torch.Tensor
    often: torch.Tensor
    least: torch.Tensor
    both: torch.Tensor | None = None
    passes: float = 0.0

    def add_whole(self, sizes: torch.Tensor, parts: torch.Tensor) -> None:
        """Count records by their sizes in each row, float64 (B, rows), each as a part of one, (B, 1)."""
        sizes = torch.cat([sizes.sum(1, keepdim=True), sizes], 1)[:, : len(self.least)]
        self.whole += torch.stack([parts.expand_as(sizes), sizes * parts, sizes.square() * parts]).sum(1)
        places = torch.frexp(sizes).exponent.long().clamp(1 - _EXPONENTS, _EXPONENTS - 1) + _EXPONENTS
        places = torch.where(sizes > 0, places, 0)
        self.often.scatter_add_(1, places.T, parts.expand_as(sizes).T)

    def unbacked(self, entries: int) -> torch.Tensor:
        """Return which rows too few records, but some, are behind, to a factor of 2 in sizes, (entries,)."""
        number, total, squares = self.whole.cpu()
        told = (total > 0) & squares.isfinite()
        least = torch.where(told, squares / total.clamp_min(1e-300) / BEHIND, 1.0)
        first = (torch.frexp(least).exponent.long() + _EXPONENTS).clamp_min(1)
        larger = torch.arange(2 * _EXPONENTS) >= first[:, None]
        few = told & ((self.often.cpu() * larger).sum(1) < self.least * number)
        return few[0] | torch.cat([few[1:], few.new_zeros(entries - len(few) + 1)])


class UnitRecords:
    """Counts, in a block, the records whose gradients go through each unit of a model's layers.

    Args:
        model: whose linear layers, convolutions and normalisations are looked at, as far as they train.
        records: that an epoch draws.
        repeats: how often the most repeated record is among these.
        least: units that fewer records move are few; with up to 1 none are.
        part: of the records that must be behind a layer; with 0, and ``least`` up to 1, nothing is counted.
        each: the same for each input of a class's row in a head.
        squared: count squares of sizes, as of sums of squared gradients.

    >>> layer = nn.Linear(2, 3)
    >>> rows, slopes = torch.eye(2).repeat(2, 1), torch.tensor([[1.0, 1, 0], [0, 1, 0]]).repeat(2, 1)
    >>> with UnitRecords(layer, 4, least=3) as units:
    ...     _ = torch.autograd.grad((layer(rows) * slopes).sum(), layer.weight)
    >>> units.few()["weight"].int().tolist()  # two records move the first unit, four the second, none a third
    [[1, 1], [0, 0], [0, 0]]
    """

    def __init__(
        self,
        model: nn.Module,
        records: int,
        *,
        repeats: int = 1,
        least: int,
        part: float = 0.0,
        each: float = 0.0,
        squared: bool = False,
    ) -> None:
        self._model, self._records, self._repeats, self._least = model, max(records, 1), repeats, least
        self._part, self._each, self._squared = part, each, squared
        self._often: torch.Tensor | None = None
        self._copies: torch.Tensor | None = None
        self._drawn = self._records
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._before: dict[str, torch.Tensor] = {}
        self._counted: dict[str, _Counted] = {}
        self._last: torch.Tensor | None = None
        self._apart: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        """Begin to count."""
        if self._least > 1 or self._part > 0:
            modules = [*self._model.named_modules(), ("", None)]
            layers = [
                (f"{place}." if place else "", layer, isinstance(after, nn.ReLU))
                for (place, layer), (_, after) in pairwise(modules)
                if isinstance(layer, _Layer) and _counts(layer)
            ]
            dense = [place for place, layer, _ in layers if isinstance(layer, nn.Linear)]
            convolutions = any(isinstance(layer, Convolution) for _, layer, _ in layers)
            last = next(reversed(dense), None)
            for place, layer, followed in layers:
                own_rows = place == last and not convolutions
                self._watch(place, layer, fires=followed and place in dense, head=own_rows)
                if place == last and self._least > 1:
                    self._handles.append(layer.register_forward_hook(self._compare))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()

    def next_batch(
        self, often: NDArray[np.int64], drawn: int, copies: NDArray[np.int64] | None = None
    ) -> None:
        """Say how often each record of the next batch is drawn in a pass or some, (B,), and all together.

        Args:
            copies: of each record among all, (B,); one each where it is None.
        """
        self._often, self._drawn = torch.from_numpy(often).double(), drawn
        self._copies = None if copies is None else torch.from_numpy(copies).double()

    def _watch(self, place: str, layer: _Layer, *, fires: bool, head: bool) -> None:
        self._before |= {place + name: item.detach().clone() for name, item in layer.named_parameters()}
        groups = layer.groups if isinstance(layer, Convolution) else 1
        axis = -1 if isinstance(layer, nn.Linear | nn.LayerNorm) else 1
        weight = layer.weight
        # A normalisation has a scale for each unit, and nothing of others.
        width = weight.shape[0] + (0 if isinstance(layer, _Norm) else groups * weight.shape[1])
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=weight.device)
        row = min(self._part, self._each * weight.shape[-1])
        needed = torch.tensor([self._part, *([row] * weight.shape[0] if head else [])], dtype=torch.float64)
        whole = zeros(3, len(needed)), zeros(len(needed), 2 * _EXPONENTS)
        counted = _Counted(zeros(2, width), *whole, needed)
        self._counted[place] = counted

        def seen(_layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad or output.dim() < max(weight.dim(), 2):  # of no record's own values
                return
            inputs = given[0].detach() if given[0].requires_grad and weight.dim() > 1 else None

            def add(slopes: torch.Tensor) -> None:
                # ``SingleLogit`` returns a zero in front of its one unit's value.
                sizes = self._sizes(slopes[..., -weight.shape[0] :] if axis < 0 else slopes, axis)
                times = torch.ones(len(sizes), 1, dtype=torch.float64, device=sizes.device)
                if (often := self._often) is not None:
                    each = often if len(often) == len(sizes) else often.max().expand(len(sizes))
                    times = each.to(sizes.device)[:, None]
                if self._part:
                    parts = torch.ones_like(times)
                    if (copies := self._copies) is not None and len(copies) == len(sizes):
                        parts /= copies.to(sizes.device)[:, None]
                    counted.add_whole(sizes, parts)
                if fires and sizes.shape[1] == weight.shape[0]:
                    on = torch.cat([(sizes > 0).any(1, keepdim=True), sizes > 0], 1).double()
                    own = sizes.sum(1, keepdim=True) / on[:, 1:].sum(1, keepdim=True).clamp_min(1)
                    if counted.both is None:
                        counted.both = on.new_zeros(2, on.shape[1], on.shape[1])
                    counted.both[0].addmm_((on * own).T, on)
                    counted.both[1].addmm_((on * times * own.square()).T, on)
                if inputs is not None:  # a record's own columns have a rule of their own
                    columns = self._sizes(inputs, axis) * sizes.sum(1, keepdim=True)
                    sizes = torch.cat([sizes, columns], 1)
                counted.sums[:, : sizes.shape[1]] += torch.stack(
                    [sizes.sum(0), (times * sizes.square()).sum(0)]
                )
                counted.passes += len(sizes) / self._drawn

            output.register_hook(add)

        self._handles.append(layer.register_forward_hook(seen))

    def _compare(self, _layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Note which records' inputs of the last dense layer differ from those of the record before them."""
        if not output.requires_grad or output.dim() < 2:
            return
        rows = given[0].detach().flatten(1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        before = rows[:0] if self._last is None or self._last.shape[1] != rows.shape[1] else self._last
        self._last = rows[-1:]
        steps = torch.cat([before, rows]).diff(dim=0)
        lengths = torch.linalg.vector_norm(rows[len(rows) - len(steps) :], dim=1)
        self._apart.append(torch.linalg.vector_norm(steps, dim=1) > SAME * lengths.clamp_min(1))

    def check(self) -> None:
        """Refuse gradients of a model that tells too few of its records apart.

        Raises:
            TrainingError: TF-305.
        """
        if not self._apart:
            return
        apart = torch.cat(self._apart)  # one record unlike all others differs twice
        found, most = int(apart.sum()), apart.numel() / 2
        times = max(1.0, apart.numel() / self._records) * self._repeats
        if found < min(2 * self._least * times, most):
            raise TrainingError(
                f"Expected features that differ from record to record at {self._least} records or more, but "
                f"those of {found} of {apart.numel()} did. Such a network learns nothing, and what it "
                "sends follows from this silo's class counts alone. If this log says above that columns say "
                "nothing, make its first layer narrower (model_options.widths). Otherwise standardise inputs "
                "(model_options.standardise), or take wider layers, another seed or a smaller learning rate.",
                code="TF-305",
            )

    def _sizes(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        sizes = _by_record(values, axis)
        return sizes.square() if self._squared else sizes

    def few(self) -> dict[str, torch.Tensor]:
        """Return which entries of each parameter few records, but some, move, bool in its shape."""
        found, alikes = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        dense = [f"{place}." for place, layer in self._model.named_modules() if isinstance(layer, nn.Linear)]
        following = dict(pairwise(dense))
        for place, counted in self._counted.items():
            times = max(1.0, counted.passes) * self._repeats
            few = made_by_few(counted.sums, self._least * times)
            few |= counted.unbacked(len(few)).to(few.device)
            # Of a convolution in groups each row has its own group's columns.
            shape = self._before[f"{place}weight"].shape
            if len(shape) == 1:
                found |= {place + name: few for name in ("weight", "bias") if place + name in self._before}
                continue
            rows, columns = few[: shape[0]], few[shape[0] :].view(-1, 1, shape[1])
            if (before := alikes.get(place)) is not None and len(before) == shape[1]:
                columns = columns | before
            if counted.both is not None:
                alike = _alike(counted.both, self._least * times)
                rows, alikes[following.get(place, "")] = rows | alike, alike
            own = columns.expand(-1, shape[0] // len(columns), -1).reshape(shape[:2])
            found[f"{place}weight"] = (
                (rows[:, None] | own).view(*own.shape, *[1] * (len(shape) - 2)).expand(shape)
            )
            if f"{place}bias" in self._before:
                found[f"{place}bias"] = rows
        return found

    def unbacked(self) -> list[str]:
        """Return the layers, by name, of which a row stays as too few records have a loss there."""
        return [
            place.rstrip(".")
            for place, counted in self._counted.items()
            if bool(counted.unbacked(counted.sums.shape[1]).any())
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give these entries of the model their values of before the block.

        Raises:
            TrainingError: as by ``check``.
        """
        self.check()
        own = dict(self._model.named_parameters())
        for name, few in self.few().items():
            if bool(few.any()):
                own[name].copy_(torch.where(few, self._before[name], own[name]))

    def clear(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set these entries of gradients to 0, in place, by name.

        Raises:
            TrainingError: as by ``check``.
        """
        self.check()
        for name, few in self.few().items():
            if name in gradients:
                gradients[name].masked_fill_(few.to(gradients[name].device), 0)


def made_by_few(sums: torch.Tensor, least: float) -> torch.Tensor:
    """Return what fewer records make, but some, of sums of their sizes and of the squares (2, ...)."""
    sizes, squares = sums
    return (squares > 0) & (sizes.square() < least * squares)


def _alike(both: torch.Tensor, least: float) -> torch.Tensor:
    """Return the units that fewer records fire, or do not, unlike an earlier one that is none of these."""
    each = both.diagonal(dim1=1, dim2=2)
    unlike = each[:, :, None] + each[:, None, :] - 2 * both
    opposite = both[:, :1, :1] - unlike
    for item in (unlike, opposite):  # what rounding leaves of units that no record tells apart
        item[:, item[1] < ROUNDING * both[1, 0, 0]] = 0
    alike = made_by_few(unlike, least) | made_by_few(opposite, least)
    kept = torch.ones_like(alike[0])
    for unit in range(1, len(kept)):
        kept[unit] = ~(alike[unit, :unit] & kept[:unit]).any()
    return ~kept[1:]


def _counts(layer: _Layer) -> bool:
    """Check that a layer trains, and a normalisation one scale for each unit."""
    weight: torch.Tensor | None = layer.weight
    if weight is None or not weight.requires_grad:
        return False
    return weight.dim() == 1 or not isinstance(layer, _Norm)


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
