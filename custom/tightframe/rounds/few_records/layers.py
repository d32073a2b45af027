"""Count the dense layers and convolutions that a job trains without noise, for the rule on few records."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import pairwise

import torch
from torch import nn

from tightframe.learning import model_update
from tightframe.learning.few_records.products import Behind, Units
from tightframe.learning.few_records.unit_records import Convolution
from tightframe.learning.model_update import shared_template
from tightframe.models.frozen import is_frozen
from tightframe.models.heads import DropoutLinear
from tightframe.phases import Field
from tightframe.rounds.few_records.planned import once
from tightframe.rounds.order import Place
from tightframe.rounds.setup import JobSetup

_SMALL = 1 << 16
"""Size of a record up to which a network's shapes are computed with values: torch's imports for shapes alone
take 1.8 s of each process."""
NARROW = 8
"""Inputs of a dense layer with a ReLU from which on its features hardly tell a record alone."""


_Layer = tuple[str, tuple[int, int], bool, int, bool]
"""Name, width (units, inputs), whether it is a convolution, number of places of a record that it sees, and
whether these are the record's own values."""


@once
def units_planned(setup: JobSetup) -> Units | None:
    """Return the dense layers that a job trains without noise; None if it has none."""
    if setup.privacy is not None:
        return None
    rounds = layers_in(setup)
    summed = {name: item.shape for each in rounds.values() for name, item in each.items()}
    dense = [shape for shape in summed.values() if len(shape) == 2]
    shape, numbers = setup.setting.input_shape, sum(map(math.prod, summed.values()))
    # Each form in which a silo's update is summed is another combination of its records.
    times = len(rounds) * int(getattr(setup.setting.config, "equations", 1))
    frozen = is_frozen(shared_template(setup.setting))
    if not frozen and len(shape) > 1 and any(len(each) > 2 for each in summed.values()):
        return _behind_convolutions(setup, summed.keys(), times)
    if not dense:
        return None
    most = max(units for units, _ in dense)
    if frozen:
        return Units(most, most, max(inputs for _, inputs in dense), numbers, times)
    first = [units for units, inputs in dense if inputs >= math.prod(shape)]
    return Units(most, max(first, default=most), math.prod(shape), numbers, times)


def _behind_convolutions(setup: JobSetup, summed: Collection[str], times: int) -> Units | None:
    """Return the layers of a network with convolutions, where features change with each sum.

    A convolution that sees k places of each record is dense on k times as many rows: it counts with a k-th of
    its units and inputs. On the records' own values rounds add up, too, if these inputs are more.
    """
    most, first, inputs = 0, 0, 0
    for name, width, convolution, places, own in _places(
        setup.setting.build_model, setup.setting.input_shape
    ):
        if not any(each.endswith(f"/{name}.weight") for each in summed):
            continue
        units, layer_inputs = (math.ceil(size / places) for size in width)
        most = max(most, min(units, layer_inputs) if convolution else min(width))
        if own:
            first, inputs = max(first, units), max(inputs, layer_inputs)
    if not most:
        return None
    return Units(most, first, inputs, 0, times) if inputs > most else Units(most, 0, 0, 0, times)


def _width(layer: nn.Linear | Convolution) -> tuple[int, int]:
    """Return the units of a layer, in one group of channels, and the inputs of a unit."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    return len(layer.weight) // groups, layer.weight[0].numel()


@functools.lru_cache(maxsize=4)
def _places(build_model: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[_Layer, ...]:
    """Return a network's layers; cached, as all silos of a run in one process need them."""
    if math.prod(shape) > _SMALL:
        with suppress(RuntimeError, NotImplementedError):  # a network whose code needs values
            return _traced(build_model, shape, "meta")
    return _traced(build_model, shape, "cpu")


def _traced(build_model: Callable[[], nn.Module], shape: tuple[int, ...], device: str) -> tuple[_Layer, ...]:
    layers: dict[str, tuple[nn.Linear | Convolution, int, bool]] = {}
    model = copy.deepcopy(model_update.template_of(build_model)).to(device)

    def watch(name: str, layer: nn.Linear | Convolution) -> None:
        def note(_layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            _, places, own = layers.get(name, (layer, 0, False))
            places += max(1, output.numel() // (len(output) * len(layer.weight)))
            layers[name] = layer, places, own or not given[0].requires_grad

        layer.register_forward_hook(note)

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Convolution):
            watch(name, layer)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model(torch.zeros(2, *shape, device=device))
    return tuple(
        (name, _width(layer), isinstance(layer, Convolution), places, own)
        for name, (layer, places, own) in layers.items()
    )


def units_on_records(setup: JobSetup) -> int:
    """Return the units of the layer that is trained, without noise, on records' own values; 0 without one."""
    units = units_planned(setup)
    return 0 if units is None or is_frozen(shared_template(setup.setting)) else units.first


@once
def behind(setup: JobSetup) -> Behind:
    """Return the fraction and number of a silo's records behind each number of a sum in training.

    A step pulls weights back by its rate times decay and pull; momentum multiplies the rate.
    """
    training, config, rate = setup.job.training, setup.setting.config, setup.method.gradient_rate
    if setup.privacy is not None:
        return Behind()
    share = _kept(shared_template(setup.setting)) * (1.0 if rate is None else rate(config))
    if rate is not None:
        return Behind(share)
    step = training.learning_rate / (1 - training.momentum * (training.optimizer == "sgd"))
    forgotten = step * (training.weight_decay + setup.method.pull(setup.setting))
    return Behind(share, training.batch_size / forgotten if forgotten else math.inf)


def _kept(model: nn.Module) -> float:
    """Return the fraction of records that dropout leaves to a unit: its own, and any later one below 1/2."""
    kept = [1 - module.dropout for module in model.modules() if isinstance(module, DropoutLinear)]
    if not is_frozen(model):
        kept += [1 - module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    least, *others = sorted([*kept, 1.0])
    return least * math.prod(other for other in others if other < 1 / 2)


def behind_few(setup: JobSetup) -> int:
    """Return the fewest inputs of a dense layer with a ReLU, if fewer than ``NARROW``; else 0."""
    modules = [*shared_template(setup.setting).modules(), None]
    inputs = [
        layer.in_features
        for layer, after in pairwise(modules)
        if isinstance(layer, nn.Linear) and isinstance(after, nn.ReLU) and layer.in_features < NARROW
    ]
    return min(inputs, default=0)


@once
def layers_in(setup: JobSetup) -> dict[Place, dict[str, Field]]:
    """Return the layers in each sum of training that has any, by place and name."""
    by_place = {
        exchange.place: {
            item.name: item for phase in exchange.phases for item in phase.schema.fields if _is_layer(item)
        }
        for exchange in setup.plan
        if exchange.training
    }
    return {place: layers for place, layers in by_place.items() if layers}


def _is_layer(item: Field) -> bool:
    return len(item.shape) > 1 and not item.per_class
