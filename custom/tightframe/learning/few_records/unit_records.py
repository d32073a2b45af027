"""Count the records that move each unit of a layer; leave units that few records move as they were.

**Units.** A unit's row of an update is the sum, over the records for which it fires, of the layer's inputs
times the slope of the loss; its bias's entry is the sum of these slopes. If one record alone moves a unit,
their quotient is that record, or its features, and the unit's column in the next layer tells which units the
record fires there. A job's values do not show this. Of 216 records

- 17 were read from one honest job whose inputs were not standardised (raw columns lie far from 0, so that
  some units fire for few records);
- 40 were read from one with a learning rate of 10 (most units die, and few records still have a loss).

For a convolution's channel the quotient is an average over what the channel saw of the record: without
normalisation one record alone moves 3 to 17 channels in each of VGG11's later layers (40 pictures). The scale
and shift of a normalised channel are two numbers of the record (1 to 6 channels of the last 124 of
``small_cnn``, 120 pictures).

So a silo looks at its own slopes. With ``a`` the size of what each record adds to a row or column, ``(sum of
a)^2 / sum of a^2`` records move it. A record that is drawn m times adds m parts, whose squared sum is at most
m times the sum of their squares. (Where each batch is drawn anew, some records come five times in an epoch,
0.4 % of a silo's in small batches, and would count as five.) A unit that fewer than ``min_class_count``
records move is left as it was before training: the sum is then of the others' records, and nobody sees which
are missing.

**Pairs of units.** The rows of two units with equal parts in the logits differ by the records that fire only
one of them. If few records tell two units apart, or tell one from a unit that fires for all, one of the two
is left as it was, too. After one step on raw columns, where many units are such, one or two of 216 records
were read in 8 of 12 runs, and yes/no columns showed the reader which of the results were right; 21 were read
after one step on a model that a hospital steers (72 units of one direction and several biases). Sizes count
here as well: at a rate of 3, one of six records that told two units apart made all but a thousandth of their
difference. The unit's column in the next layer is then left as it was: of 72 units on two numbers (``widths``
of 2 and 72), a combination of three units' columns is zero except between the borders of two of them, and a
record that lay there alone was in a total 4 to 12 times, with its label.

**Layers.** A record with hardly any loss is behind no unit, and whoever writes the job can make most records
such. With a balanced softmax of exponent 1000 only the rarer class had slopes: 36 of three hospitals' 48
records of it were read, with label, from 64 rounds of a head on 72 frozen features, which the rule on records
allows for 216. With the other records' slopes at 1/20,000 of theirs as many were read, at 1/2,000 half, at
1/150 none; of 15 records, 13 at 1/1,000 and 2 at 1/150. So a record is *behind* a layer if its size there is
at least 1 / ``BEHIND`` of ``sum of a^2 / sum of a``. A layer with fewer records behind it than the rule
relies on (``part_behind`` of ``rounds.few_records.rule``) is left as it was. So is a class's row of a head if
no convolution trains: at a small rate features hardly change, and the rounds of the row span the features of
that class's records alone (of three classes, where 61 % of the records had a loss, the rarest class's row
told 13 of 15). Each copy of a repeated record counts as a part of one: where copies balance two classes, half
of the rows would be behind a layer at which only the few records of the rarer class have a loss.

**Other parameters.** A trained temperature (FedETF's ``beta``, FedNH's ``scale``), or a class token, is in no
such layer. The gradient of a temperature is the sum over records of the logits' slopes times the logits: with
one record that has a loss, or that the head tells from others, its total is one number of that record. So
these parameters are left as they were if few records have slopes at the logits, or make that sum.

**Dead networks.** If the last dense layer gets the same input for every record, as when all units before it
are off, losses and updates depend on a silo's class counts, and on which classes were drawn, alone: two
rounds' losses of balanced softmax told the exact counts of both honest hospitals. Training such a network
fails, which costs nothing: it cannot learn.
"""

from __future__ import annotations

import functools
import math
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
"""Relative rounding error of sums of squares in float64."""
BEHIND = 64
"""A record is behind a layer if its size is at least 1 / ``BEHIND`` of a typical one's in the layer's sum."""
SAME = 2.0**-20
"""Relative distance, of lengths below 1 absolute, from which on two records' inputs differ."""
_EXPONENTS = 512
"""Sizes of records are counted by powers of two, so many to either side of 1."""


@dataclass
class _Counted:
    """Statistics of one layer's slopes, over records and passes.

    Attributes:
        sums: sums of the records' sizes in each row and column, and of squared sizes, (2, rows + columns).
        pair_sums: the same sums over the records that fire both of two units, (2, 1 + rows, 1 + rows). Index
            0 stands for any unit; a record's size is its mean over the units that it fires. None where no
            ReLU follows.
        behind_sums: number of records, sum and squared sum of sizes, in all rows together and, of a head, in
            each row, (3, 1 or 1 + rows).
        exponents: histogram of these sizes by powers of two, the smallest first, (1 or 1 + rows, powers).
        required: fraction of the records that must be behind all rows together, and behind each.
        passes: over the records.
    """

    sums: torch.Tensor
    behind_sums: torch.Tensor
    exponents: torch.Tensor
    required: torch.Tensor
    pair_sums: torch.Tensor | None = None
    passes: float = 0.0

    def add_behind(self, sizes: torch.Tensor, weights: torch.Tensor) -> None:
        """Count a batch's records by size.

        Args:
            sizes: of each record in each row, float64 (B, rows).
            weights: as how many records each counts, (B, 1).
        """
        sizes = torch.cat([sizes.sum(1, keepdim=True), sizes], 1)[:, : len(self.required)]
        weights = weights.expand_as(sizes)
        self.behind_sums += torch.stack([weights, sizes * weights, sizes.square() * weights]).sum(1)
        exponents = torch.frexp(sizes).exponent.long().clamp(1 - _EXPONENTS, _EXPONENTS - 1) + _EXPONENTS
        self.exponents.scatter_add_(1, torch.where(sizes > 0, exponents, 0).T, weights.T)

    def unbacked(self, entries: int) -> torch.Tensor:
        """Return a mask of the rows, and columns, with some records behind them, but too few.

        Sizes are compared to a factor of 2.

        Args:
            entries: rows + columns, the length of the mask.
        """
        number, total, squares = self.behind_sums.cpu()
        moved = (total > 0) & squares.isfinite()
        smallest = torch.where(moved, squares / total.clamp_min(1e-300) / BEHIND, 1.0)
        first = (torch.frexp(smallest).exponent.long() + _EXPONENTS).clamp_min(1)
        behind = torch.arange(2 * _EXPONENTS) >= first[:, None]
        unbacked = moved & ((self.exponents.cpu() * behind).sum(1) < self.required * number)
        return unbacked[0] | torch.cat([unbacked[1:], unbacked.new_zeros(entries - len(unbacked) + 1)])


class UnitRecords:
    """Count, in a ``with`` block, the records whose gradients move each unit of a model's layers.

    Args:
        model: its linear layers, convolutions and normalisations are watched, as far as they train, and for
            other parameters its logits.
        records: number of records that an epoch draws.
        repeats: how often the most repeated record is among these.
        least: number of records below which a unit is moved by few; with up to 1 no unit is.
        part: fraction of the records that must be behind a layer; with 0, and ``least`` up to 1, nothing is
            counted.
        each: the same for each input of a class's row in a head.
        squared: count squared sizes, as in sums of squared gradients.

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
        self._times: torch.Tensor | None = None
        self._copies: torch.Tensor | None = None
        self._drawn = self._records
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._before: dict[str, torch.Tensor] = {}
        self._counted: dict[str, _Counted] = {}
        self._others: dict[str, torch.Tensor] = {}
        self._logits: _Counted | None = None
        self._last_row: torch.Tensor | None = None
        self._differing: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        """Start counting."""
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
                head = place == last and not convolutions
                self._watch(place, layer, relu=followed and place in dense, head=head)
                if place == last and self._least > 1:
                    self._handles.append(layer.register_forward_hook(self._compare))
            self._watch_others()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()

    def next_batch(
        self, often: NDArray[np.int64], drawn: int, copies: NDArray[np.int64] | None = None
    ) -> None:
        """Tell how often the records of the next batch are drawn.

        Args:
            often: how often each record is drawn in the passes that train the same, (B,).
            drawn: number of records drawn in these passes.
            copies: number of copies of each record among all, (B,); None for one each.
        """
        self._times, self._drawn = torch.from_numpy(often).double(), drawn
        self._copies = None if copies is None else torch.from_numpy(copies).double()

    def _watch(self, place: str, layer: _Layer, *, relu: bool, head: bool) -> None:
        self._before |= {place + name: item.detach().clone() for name, item in layer.named_parameters()}
        groups = layer.groups if isinstance(layer, Convolution) else 1
        axis = -1 if isinstance(layer, nn.Linear | nn.LayerNorm) else 1
        weight = layer.weight
        rows = weight.shape[0]
        # A normalisation has one scale a unit and no columns.
        columns = 0 if isinstance(layer, _Norm) else groups * weight.shape[1]
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=weight.device)
        of_row = min(self._part, self._each * weight.shape[-1])
        required = torch.tensor([self._part, *([of_row] * rows if head else [])], dtype=torch.float64)
        counted = _Counted(
            zeros(2, rows + columns), zeros(3, len(required)), zeros(len(required), 2 * _EXPONENTS), required
        )
        self._counted[place] = counted

        def forward(_layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad or output.dim() < max(weight.dim(), 2):  # not one row a record
                return
            inputs = given[0].detach() if given[0].requires_grad and weight.dim() > 1 else None

            def backward(slopes: torch.Tensor) -> None:
                # ``SingleLogit`` puts a zero in front of its one unit's value.
                sizes = self._sizes(slopes[..., -rows:] if axis < 0 else slopes, axis)
                times = self._add_behind(counted, sizes)
                if relu and sizes.shape[1] == rows:
                    fires = torch.cat([(sizes > 0).any(1, keepdim=True), sizes > 0], 1).double()
                    mean = sizes.sum(1, keepdim=True) / fires[:, 1:].sum(1, keepdim=True).clamp_min(1)
                    if counted.pair_sums is None:
                        counted.pair_sums = fires.new_zeros(2, fires.shape[1], fires.shape[1])
                    counted.pair_sums[0].addmm_((fires * mean).T, fires)
                    counted.pair_sums[1].addmm_((fires * times * mean.square()).T, fires)
                if inputs is not None:  # columns of the records' own values have a rule of their own
                    of_columns = self._sizes(inputs, axis) * sizes.sum(1, keepdim=True)
                    sizes = torch.cat([sizes, of_columns], 1)
                counted.sums[:, : sizes.shape[1]] += torch.stack(
                    [sizes.sum(0), (times * sizes.square()).sum(0)]
                )
                counted.passes += len(sizes) / self._drawn

            output.register_hook(backward)

        self._handles.append(layer.register_forward_hook(forward))

    def _add_behind(self, counted: _Counted, sizes: torch.Tensor) -> torch.Tensor:
        """Count a batch's records by size, (B, rows), and return how often each is drawn, (B, 1)."""
        times = torch.ones(len(sizes), 1, dtype=torch.float64, device=sizes.device)
        if (often := self._times) is not None:
            of_records = often if len(often) == len(sizes) else often.max().expand(len(sizes))
            times = of_records.to(sizes.device)[:, None]
        if self._part:
            weights = torch.ones_like(times)
            if (copies := self._copies) is not None and len(copies) == len(sizes):
                weights /= copies.to(sizes.device)[:, None]
            counted.add_behind(sizes, weights)
        return times

    def _watch_others(self) -> None:
        """Watch the logits, if parameters train that are in no watched layer."""
        self._others = {
            name: item.detach().clone()
            for name, item in self._model.named_parameters()
            if item.requires_grad and name not in self._before
        }
        if not self._others:
            return
        device = next(iter(self._others.values())).device
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        required = torch.tensor([self._part], dtype=torch.float64)
        counted = self._logits = _Counted(zeros(2, 2), zeros(3, 1), zeros(1, 2 * _EXPONENTS), required)

        def forward(_head: nn.Module, _given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad or output.dim() < 2:
                return
            logits = output.detach()

            def backward(slopes: torch.Tensor) -> None:
                both = slopes.detach().double().flatten(1), (slopes.detach() * logits).double().flatten(1)
                sizes = torch.stack([both[0].abs().sum(1), both[1].sum(1).abs()], 1)
                sizes = (sizes.square() if self._squared else sizes).nan_to_num(posinf=0.0)
                times = self._add_behind(counted, sizes[:, :1])
                counted.sums += torch.stack([sizes.sum(0), (times * sizes.square()).sum(0)])
                counted.passes += len(sizes) / self._drawn

            output.register_hook(backward)

        head = getattr(self._model, "head", None)
        head = head if isinstance(head, nn.Module) else self._model
        self._handles.append(head.register_forward_hook(forward))

    def _compare(self, _layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Note which records' inputs of the last dense layer differ from the previous record's."""
        if not output.requires_grad or output.dim() < 2:
            return
        rows = given[0].detach().flatten(1)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        last = self._last_row
        previous = rows[:0] if last is None or last.shape[1] != rows.shape[1] else last
        self._last_row = rows[-1:]
        differences = torch.cat([previous, rows]).diff(dim=0)
        lengths = torch.linalg.vector_norm(rows[len(rows) - len(differences) :], dim=1)
        distances = torch.linalg.vector_norm(differences, dim=1)
        self._differing.append(distances > SAME * lengths.clamp_min(1))

    def check(self) -> None:
        """Refuse gradients of a model whose last layer tells too few records apart.

        Raises:
            TrainingError: TF-305.
        """
        if not self._differing:
            return
        differing = torch.cat(self._differing)  # one record unlike all others differs twice
        count, most = int(differing.sum()), differing.numel() / 2
        times = max(1.0, differing.numel() / self._records) * self._repeats
        needed = min(2 * self._least * times, most)
        if count < needed:
            raise TrainingError(
                f"Expected features that tell {self._least} records or more apart, so that they differ in "
                f"{math.ceil(needed)} or more of {differing.numel()} steps from a drawn record to the next, "
                f"but they differ in {count}. Such a network learns nothing, and what it sends follows from "
                "this silo's class counts alone. If this log says above that columns say nothing, make its "
                "first layer narrower (model_options.widths). Otherwise take a smaller learning rate, "
                "standardised inputs (model_options.standardise), wider layers or another seed, or several "
                "of these.",
                code="TF-305",
            )

    def _sizes(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        sizes = _by_record(values, axis)
        return sizes.square() if self._squared else sizes

    def few(self) -> dict[str, torch.Tensor]:
        """Return a mask for each parameter, in its shape: entries that some records move, but few."""
        masks, columns_alike = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        dense = [f"{place}." for place, layer in self._model.named_modules() if isinstance(layer, nn.Linear)]
        following = dict(pairwise(dense))
        for place, counted in self._counted.items():
            times = max(1.0, counted.passes) * self._repeats
            few = made_by_few(counted.sums, self._least * times)
            few |= counted.unbacked(len(few)).to(few.device)
            shape = self._before[f"{place}weight"].shape
            if len(shape) == 1:
                masks |= {place + name: few for name in ("weight", "bias") if place + name in self._before}
                continue
            rows, columns = few[: shape[0]], few[shape[0] :].view(-1, 1, shape[1])
            if (before := columns_alike.get(place)) is not None and len(before) == shape[1]:
                columns = columns | before
            if counted.pair_sums is not None:
                alike = _alike(counted.pair_sums, self._least * times)
                rows, columns_alike[following.get(place, "")] = rows | alike, alike
            # Each row of a grouped convolution has the columns of its own group.
            columns = columns.expand(-1, shape[0] // len(columns), -1).reshape(shape[:2])
            masks[f"{place}weight"] = (
                (rows[:, None] | columns).view(*columns.shape, *[1] * (len(shape) - 2)).expand(shape)
            )
            if f"{place}bias" in self._before:
                masks[f"{place}bias"] = rows
        if (logits := self._logits) is not None:
            times = max(1.0, logits.passes) * self._repeats
            few = made_by_few(logits.sums.cpu(), self._least * times).any() | logits.unbacked(1).any()
            masks |= {name: few.expand(item.shape) for name, item in self._others.items()}
        return masks

    def unbacked(self) -> list[str]:
        """Return the names of layers of which some row has too few records behind it."""
        return [
            place.rstrip(".")
            for place, counted in self._counted.items()
            if bool(counted.unbacked(counted.sums.shape[1]).any())
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Set the entries of ``few`` back to their values before the block.

        Raises:
            TrainingError: as by ``check``.
        """
        self.check()
        parameters = dict(self._model.named_parameters())
        before = {**self._before, **self._others}
        for name, few in self.few().items():
            if bool(few.any()):
                parameters[name].copy_(torch.where(few, before[name], parameters[name]))

    def clear(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the entries of ``few`` in gradients, by parameter name, to 0 in place.

        Raises:
            TrainingError: as by ``check``.
        """
        self.check()
        for name, few in self.few().items():
            if name in gradients:
                gradients[name].masked_fill_(few.to(gradients[name].device), 0)


def made_by_few(sums: torch.Tensor, least: float) -> torch.Tensor:
    """Return a mask of the sums that some records make, but fewer than ``least``.

    Args:
        sums: of the records' sizes and of squared sizes, (2, ...).
    """
    sizes, squares = sums
    return (squares > 0) & (sizes.square() < least * squares)


def _alike(pair_sums: torch.Tensor, least: float) -> torch.Tensor:
    """Return a mask of units that few records tell from an earlier unit that is not in it, (rows,)."""
    of_units = pair_sums.diagonal(dim1=1, dim2=2)
    unlike = of_units[:, :, None] + of_units[:, None, :] - 2 * pair_sums
    opposite = pair_sums[:, :1, :1] - unlike
    for sums in (unlike, opposite):  # remove rounding errors of units that no record tells apart
        sums[:, sums[1] < ROUNDING * pair_sums[1, 0, 0]] = 0
    alike = made_by_few(unlike, least) | made_by_few(opposite, least)
    kept = torch.ones_like(alike[0])
    for unit in range(1, len(kept)):
        kept[unit] = ~(alike[unit, :unit] & kept[:unit]).any()
    return ~kept[1:]


def _counts(layer: _Layer) -> bool:
    """Check that a layer trains and, if it is a normalisation, has one scale a unit."""
    weight: torch.Tensor | None = layer.weight
    if weight is None or not weight.requires_grad:
        return False
    return weight.dim() == 1 or not isinstance(layer, _Norm)


def _by_record(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the size of each record's values over all other axes, (B, width); 0 where it overflows.

    That is their norm behind a convolution and their absolute sum elsewhere, whichever is faster.
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
