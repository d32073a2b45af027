"""The rule on exact sums of features, products and dense layers (``records_per_feature`` of a site's policy).

It is checked on declared numbers before anything runs, and again on opened ones before each such term is made
(``learning.products`` says why, and what is counted). That is public, so that a refusal tells nothing. How
many values its own records have a silo checks while it makes the term: who has too few fails as any silo that
cannot contribute, so that the sum is of nobody and its number is all that is told.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn

from tightframe.config.policy import Policy
from tightframe.config.profiles import PROFILES
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.errors import RunError
from tightframe.learning.few_records.products import (
    ALONE,
    COUNTED,
    ENOUGH,
    LEAVING,
    LOSING,
    ROWS,
    Behind,
    ClassSums,
    Parts,
    Products,
    Sizes,
    Units,
)
from tightframe.learning.few_records.unit_records import Convolution
from tightframe.learning.model_update import shared_template, shared_width
from tightframe.learning.one_sum.feature_sums import PREFIX
from tightframe.models.frozen import is_frozen
from tightframe.models.heads import DropoutLinear
from tightframe.phases import Field, OwnRows, Schema, ServerState
from tightframe.results.words import plural
from tightframe.rounds.order import Place
from tightframe.rounds.phases.statistics import SQUARES, SUMS
from tightframe.rounds.riders.class_rules import MIN_HOLDERS, holders_in, offered, sums_by_class
from tightframe.rounds.setup import JobSetup
from tightframe.securesum.site.journal import History, Multiplied, Trained

RULE, CODE = "records_per_feature", "TF-625"
_Sum = TypeVar("_Sum", Products, ClassSums)
_SMALL = 1 << 16
"""Numbers of a record up to which computing a network's shapes with values is faster than torch's imports for
shapes alone, 1.8 s of each process."""
NARROW = 8
"""Numbers before a dense layer with a ReLU from which on its features tell hardly a record alone."""
_once = functools.lru_cache(maxsize=16)
"""Plans once for each job in a process: a long run has many sums, and each is checked before its term."""


def planned(setup: JobSetup) -> Products | None:
    """Return the widest sum of products that a job plans; None if it plans none."""
    return _widest(setup, products_in)


def products_in(setup: JobSetup, schema: Schema) -> Products | None:
    """Return what the rule is on in a sum; None if it has no products without noise."""
    width = max((item.products for item in schema.fields), default=0)
    if not width:
        return None
    moments = sum(
        item.size
        for phase in setup.statistics_phases()
        for item in phase.schema.fields
        if item.name in (SUMS, SQUARES)
    )
    return Products(width, setup.setting.num_classes, setup.most_values, moments)


def class_sums_planned(setup: JobSetup) -> ClassSums | None:
    """Return the widest sums of frozen features by class that a job plans; None if it plans none."""
    return _widest(setup, class_sums_in)


def class_sums_in(setup: JobSetup, schema: Schema) -> ClassSums | None:
    """Return the sums of frozen features by class in a sum; None if it has none without noise."""
    width = max((item.features for item in schema.fields), default=0)
    return ClassSums(width, setup.most_values) if width else None


@_once
def class_numbers(setup: JobSetup) -> int:
    """Return how many numbers of each class's records a whole run's exact sums in training tell; 0 for none.

    Behind convolutions, which no training was inverted through, they are not counted. Of a frozen encoder's
    features each round tells the same numbers.
    """
    if setup.privacy is not None or not setup.trains or setup.method.one_sum is not None:
        return 0
    template, width = shared_template(setup.setting), shared_width(setup.setting)
    frozen = is_frozen(template)
    if not frozen and any(item.dim() > 2 for item in template.parameters()):
        return 0
    found, once = 0, 0
    for schema in _telling(setup).values():
        for item in filter(sums_in_training, schema.fields):
            each = item.size // item.shape[0] if item.independent is None else item.independent
            if frozen and item.shape[1] == width:
                once = max(once, each)
            else:
                found += each
    return found + once


@_once
def _telling(setup: JobSetup) -> dict[tuple[int, int], Schema]:
    """Return the sums of a whole run that tell class sums in training, by round and place in it.

    The first sum by class of a run carries flags only, under the class rules (``riders.class_rules``).
    """
    earlier = (*setup.statistics_phases(), *setup.before_phases())
    known = setup.job.class_rules == "off" or any(item.per_class for p in earlier for item in p.schema.fields)
    found = {}
    for number in range(1, setup.job.rounds + 1):
        for index, phase in enumerate(setup.training_phases(number)):
            if known and any(map(sums_in_training, phase.schema.fields)):
                found[number, index] = phase.schema
            known = known or any(item.per_class for item in phase.schema.fields)
    return found


def sums_in_training(item: Field) -> bool:
    """Return True for sums by class that have no rule of their own."""
    return sums_by_class(item) and not item.features and not item.products


def least_class_values(policy: Policy, setup: JobSetup) -> int:
    """Return how many values a silo's own records of a class must have for a job's class sums in training.

    Half of ``records_per_feature`` for each number, as two of a class's three holders are honest: and whoever
    sends flags for others leaves one, whose records then have no fewer values than numbers are told. 0 where
    any number will do.
    """
    return math.ceil(policy.records_per_feature * class_numbers(setup) / 2)


def _widest(setup: JobSetup, found_in: Callable[[JobSetup, Schema], _Sum | None]) -> _Sum | None:
    found = (found_in(setup, phase.schema) for exchange in setup.plan for phase in exchange.phases)
    return max((item for item in found if item is not None), key=lambda item: item.width, default=None)


@_once
def units_planned(setup: JobSetup) -> Units | None:
    """Return the dense layers that a job trains without noise; None if it has none."""
    if setup.privacy is not None:
        return None
    rounds = _layers(setup)
    summed = {name: item.shape for each in rounds.values() for name, item in each.items()}
    dense = [shape for shape in summed.values() if len(shape) == 2]
    shape, numbers = setup.setting.input_shape, sum(map(math.prod, summed.values()))
    # In several forms of a silo's update each is another combination of its records.
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
    """Return what layers count as of a network with convolutions, where features change in each sum.

    A convolution that sees k places of each record is dense on k times as many rows: as if it had a part of
    its units and inputs. On the records' own values rounds add up, too, where these inputs are more.
    """
    most, first, inputs = 0, 0, 0
    for name, layer, places, own in _places(setup):
        if not any(each.endswith(f"/{name}.weight") for each in summed):
            continue
        units, numbers = (math.ceil(each / places) for each in _width(layer))
        most = max(most, min(units, numbers) if isinstance(layer, Convolution) else min(_width(layer)))
        if own:
            first, inputs = max(first, units), max(inputs, numbers)
    if not most:
        return None
    return Units(most, first, inputs, 0, times) if inputs > most else Units(most, 0, 0, 0, times)


def _width(layer: nn.Linear | Convolution) -> tuple[int, int]:
    """Return how many units a layer has, of one group of channels, and inputs of each."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    return len(layer.weight) // groups, layer.weight[0].numel()


def _places(setup: JobSetup) -> list[tuple[str, nn.Linear | Convolution, int, bool]]:
    """Return a network's layers by name, how many places of a record each sees, and if these are its own."""
    if math.prod(setup.setting.input_shape) > _SMALL:
        with suppress(RuntimeError, NotImplementedError):  # of code that needs values
            return _seen(setup, "meta")
    return _seen(setup, "cpu")


def _seen(setup: JobSetup, device: str) -> list[tuple[str, nn.Linear | Convolution, int, bool]]:
    found: dict[str, tuple[nn.Linear | Convolution, int, bool]] = {}
    model = copy.deepcopy(shared_template(setup.setting)).to(device)

    def watch(name: str, layer: nn.Linear | Convolution) -> None:
        def seen(_layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            _, places, own = found.get(name, (layer, 0, False))
            places += max(1, output.numel() // (len(output) * len(layer.weight)))
            found[name] = layer, places, own or not given[0].requires_grad

        layer.register_forward_hook(seen)

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Convolution):
            watch(name, layer)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model(torch.zeros(2, *setup.setting.input_shape, device=device))
    return [(name, *each) for name, each in found.items()]


def units_on_records(setup: JobSetup) -> int:
    """Return how many units a layer has that is trained, without noise, on records' own values; 0 if none."""
    found = units_planned(setup)
    return 0 if found is None or is_frozen(shared_template(setup.setting)) else found.first


@_once
def behind(setup: JobSetup) -> Behind:
    """Return which of a silo's records are behind each number of a sum in training.

    A step draws weights back by its rate times decay and pull; a momentum adds up as many.
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
    """Return the part of records that dropout leaves to a unit: its own, and any after it that keeps few."""
    kept = [1 - module.dropout for module in model.modules() if isinstance(module, DropoutLinear)]
    if not is_frozen(model):
        kept += [1 - module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    least, *others = sorted([*kept, 1.0])
    return least * math.prod(other for other in others if other < 1 / 2)


def check_behind(policy: Policy, setup: JobSetup, records: float) -> None:
    """Refuse a job of which hardly any of this silo's records would be behind a sum in training.

    Args:
        records: of this silo; if it has fewer than ``min_class_count``, all of them must be.

    Raises:
        BelowPolicyError: TF-625.
    """
    found, least = behind(setup), policy.class_count(synthetic=False)
    trains = setup.trains and setup.method.one_sum is None
    if not policy.records_per_feature or not trains or found.of(records) >= min(least, records):
        return
    _refuse(
        policy,
        f"updates of {found.of(records):.1f} records of a silo",
        f"at least {least} (min_class_count), or privacy",
        "few records are read from their update. So few are drawn (sampling_rate), not dropped out "
        "(model_options.dropout), or in the last steps that a strong term or weight decay does not undo",
    )


@_once
def _layers(setup: JobSetup) -> dict[Place, dict[str, Field]]:
    """Return the layers in each sum of a training round that has any, by name."""
    found = {
        exchange.place: {
            item.name: item for phase in exchange.phases for item in phase.schema.fields if _is_layer(item)
        }
        for exchange in setup.plan
        if exchange.training
    }
    return {place: layers for place, layers in found.items() if layers}


def _is_layer(item: Field) -> bool:
    return len(item.shape) > 1 and not item.per_class


def check_job(policy: Policy, setup: JobSetup) -> None:
    """Refuse a job of which no number of records could meet the rule.

    Raises:
        BelowPolicyError: TF-625.
    """
    if not policy.records_per_feature:
        return
    if setup.job.class_rules == "off" and least_class_values(policy, setup):
        _refuse(
            policy,
            "class sums in training without class rules",
            "class_rules on, or privacy",
            "no silo could leave out a class of which it has so few records that these are computed",
        )
    found = planned(setup)
    if (numbers := behind_few(setup)) and (found or class_sums_planned(setup) or _on_features(setup)):
        _refuse(
            policy,
            f"sums of features that units make of {plural(numbers, 'number')}",
            f"at least {NARROW} before each ReLU, or privacy",
            "of units on two or three numbers a combination is zero for all records but one between two "
            "borders, so that a sum tells it, with its class: make hidden layers before the last wider "
            "(model_options.widths of mlp, hidden of vgg11), take random_features, or give the job `privacy`",
        )
    if found is None:
        return
    if setup.job.weights == "uniform":
        _refuse(
            policy,
            f"products of {found.width} features with uniform weights",
            "weights exact or power_of_two, or privacy",
            "uniform weights tell nobody how many records stand behind the sum",
        )
    by_class = any(
        item.products and item.per_class
        for exchange in setup.plan
        for phase in exchange.phases
        for item in phase.schema.fields
    )
    if by_class:
        _refuse(
            policy,
            f"products of {found.width} features by class",
            "method_options.covariance shared",
            "a rare class has fewer records than features, and these are computed from its sum",
        )


def behind_few(setup: JobSetup) -> int:
    """Return the fewest numbers that units with a ReLU are made of, if fewer than ``NARROW``; else 0."""
    modules = [*shared_template(setup.setting).modules(), None]
    few = [
        layer.in_features
        for layer, after in pairwise(modules)
        if isinstance(layer, nn.Linear) and isinstance(after, nn.ReLU) and layer.in_features < NARROW
    ]
    return min(few, default=0)


def _on_features(setup: JobSetup) -> bool:
    """Check whether exact sums of a job are of features that a model known to all makes, or by class."""
    frozen = setup.trains and setup.privacy is None and is_frozen(shared_template(setup.setting))
    return frozen or class_numbers(setup) > 0


def check_declared(policy: Policy, setup: JobSetup, sizes: Sizes) -> None:
    """Refuse a job whose silos declare too few records, before anything runs.

    Raises:
        BelowPolicyError: TF-625.
    """
    if (found := planned(setup)) is not None:
        records = sizes.sure()
        _check(policy, found, records, records * found.values, "declared")
    if setup.job.weights != "uniform" and (layers := units_planned(setup)) is not None:
        check_units(policy, layers, sizes.behind(behind(setup)), "declared records")
    if setup.job.weights != "uniform" and (sums := class_sums_planned(setup)) is not None:
        _check_class(policy, sums, sizes.declared * sums.values, "all declared records")
    if setup.job.weights != "uniform" and (least := least_class_values(policy, setup)):
        held = sizes.declared * setup.most_values
        if MIN_HOLDERS * least > held:
            _refuse(
                policy,
                f"{class_numbers(setup)} numbers of each class from sums in training",
                f"at most {int(class_numbers(setup) * held / (MIN_HOLDERS * least))}, or privacy",
                f"a class's records are computed from more numbers than they have values, and all "
                f"{sizes.declared:.0f} declared records have no more than {held:.0f}: make rounds or "
                "features (model_options.widths) fewer, or give the job `privacy`",
            )


def check_sum(policy: Policy, setup: JobSetup, schema: Schema, state: ServerState, sizes: Sizes) -> None:
    """Refuse a sum over too few records, whatever values they have, before its term is made.

    Args:
        state: behind the verified totals so far, with the opened numbers of records.

    Raises:
        BelowPolicyError: TF-625.
        RunError: TF-523 if too few records stay in a withdrawal.
    """
    products, sums = products_in(setup, schema), class_sums_in(setup, schema)
    if products is None and sums is None:
        return
    found = _counted(state, setup.setting.num_classes)
    try:
        if products is not None:
            sure = sizes.sure(found.records)
            _check(policy, products, sure, sure * products.values, "counted")
        if sums is not None:
            for place, rows in found.by_class.items():
                _check_class(policy, sums, rows * sums.values, f"the counted records of class {place}")
    except BelowPolicyError as error:
        if LEAVING not in state.extra:
            raise
        raise RunError(
            "Expected enough records to stay in the total that sums of features do not tell them "
            f"(`{RULE}` {policy.records_per_feature}), but too few would: {found.records:.0f} in all, "
            "whichever silos lie. Nothing is taken out: withdraw fewer, or start a new job with fewer "
            f"features, or with `privacy`. {error}",
            code="TF-523",
        ) from error


def check_own(
    policy: Policy,
    setup: JobSetup,
    schema: Schema,
    state: ServerState,
    sizes: Sizes,
    own: OwnRows,
    *,
    seen: bool,
) -> None:
    """Refuse a sum of which this silo's records have fewer values than it needs of each.

    Args:
        state: see ``check_sum``, which has passed.
        own: of the classes that this silo takes part in; in a withdrawal, those that stay.
        seen: whether the server sees this silo's term, so that its records alone must be enough.

    Raises:
        BelowPolicyError: TF-625, which depends on this silo's records.
    """
    products, sums = products_in(setup, schema), class_sums_in(setup, schema)
    found = _counted(state, setup.setting.num_classes)
    within = list(found.by_class)
    rows = float(own.counts[within].sum())
    if products is not None and rows:
        sure = sizes.sure(min(found.records, rows) if seen else found.records)
        each = float(own.counts[within] @ own.values[within]) / rows
        _check(policy, products, sure, sure * each, "counted")
    if sums is None:
        return
    for place, counted in found.by_class.items():
        mine, each = float(own.by_class[place]), float(own.values[place])
        alone = place in found.alone and policy.records_per_feature <= ALONE and not seen
        if mine and not alone:
            held = (min(counted, mine) if seen else counted) * each
            _check_class(
                policy, sums, held, f"the counted records of class {place}, each worth one of this silo's"
            )


@dataclass(frozen=True)
class _Counted:
    """What a sum is of at least.

    Attributes:
        records: in all.
        by_class: records of each class that is in it.
        alone: classes of which a silo alone has enough values.
    """

    records: float
    by_class: dict[int, float]
    alone: frozenset[int]


def _counted(state: ServerState, classes: int) -> _Counted:
    """Return how many different records a sum is of at least.

    In a withdrawal these are those that stay. How many leave is known of all classes together: each that
    loses records could lose them all. A class without enough holders leaves whole.
    """
    if not {COUNTED, ROWS, ENOUGH} <= state.extra.keys():
        return _Counted(0.0, dict.fromkeys(range(classes), 0.0), frozenset())
    counts, rows, enough = (state.extra[name] for name in (COUNTED, ROWS, ENOUGH))
    kept, holders = rows > 0, holders_in(state)
    # By its flags: a liar's negative number can have made a class's nothing, and so can what was withdrawn.
    summed = None if holders is None else offered(holders, classes).bool()
    leaving, loses = 0.0, torch.zeros_like(kept)
    if LEAVING in state.extra:
        leaving, loses = float(state.extra[LEAVING]), state.extra[LOSING].bool()
        kept = kept if summed is None else summed
    elif summed is not None:
        kept = kept | summed
    least = {
        place: max(0.0, float(rows[place]) - (leaving if loses[place] else 0.0))
        for place in torch.nonzero(kept).flatten().tolist()
    }
    alone = torch.nonzero((enough > 0.5) & ~loses).flatten().tolist()
    return _Counted(max(0.0, float(counts[kept].sum()) - leaving), least, frozenset(alone))


def warned(found: Products | ClassSums | Units, records: float | None, *, classes: int = 1) -> list[str]:
    """Say what a reader of a sum can do that a ``standard`` policy would refuse; empty if it would not.

    Args:
        records: surely in it; None where weights tell no number.
        classes: C of sums by class, whose smallest class has a C-th of the records at most.
    """
    by_class = isinstance(found, ClassSums)
    if records is None and not isinstance(found, Products):
        return []
    if records is not None:
        held = records / classes * (found.values if isinstance(found, ClassSums) else 1)
        if found.allowed(held, PROFILES["standard"][RULE]):
            return []
    many = "UNTOLD NUMBERS OF" if records is None else f"{records:.0f}" if by_class else f"{records:.0f} SURE"
    few = f"a small one of the {classes} classes has few" if by_class else "they are few"
    return [
        f"{found.name.upper()} OVER {many} RECORDS: whoever reads their total, as all silos, can compute "
        f"single records from it if {few}; `standard` policies refuse it ({RULE}, {CODE})"
    ]


def check_units(policy: Policy, found: Units, records: float, of: str) -> None:
    """Refuse to train dense layers on too few records.

    Raises:
        BelowPolicyError: TF-625.
    """
    factor = policy.records_per_feature
    if found.allowed(records, factor):
        return
    most, asked = int(records // factor), list[str]()
    if found.most > most:
        asked.append(f"{plural(most, 'unit')} a layer")
    units = min(found.first, most)
    if units and found.inputs > most and found.times * units > most:
        asked.append(
            f"{plural(most // units, 'round')} of {plural(units, 'unit')}, or {plural(most, 'input')}"
        )
    elif found.numbers > most and found.times > most:
        asked.append(plural(most, "round"))
    _refuse(
        policy,
        f"layers of up to {found.most} units, {found.where} in {found.times} sums, trained on {records:.0f} "
        f"{of}",
        f"at most {', and '.join(asked)}; or privacy" if most else "privacy",
        "records are computed from totals of layers with more units, or both more inputs and more units by "
        f"rounds, or more rounds, than 1/{factor} of the records, those of the largest silos not counted, as "
        "these may lie: set model_options.widths of mlp, width of random_features, or rounds, have smaller "
        "patches or larger pictures, or give the job `privacy`",
    )


@dataclass(frozen=True)
class Rounds:
    """The sums of layers, of products of features that training moves, and by class, that a job plans.

    Two jobs over the same records, which differ in the seed, have other equations on the same rows. So a site
    notes in its ledger each such sum as it masks its term: from then on others can open it.

    Attributes:
        layers: places of sums of layers.
        multiplied: places of sums of products.
        classed: places of sums by class in training.
        whole: how many of these the whole chain of jobs has.
        units: the layers; None if there are none.
        products: of features; None if there are none.
        records: surely in them, as public as the policy's ``weights`` have it.
        behind: of these, behind each number of layers.
        config: SHA-256 of the job.
        lineage: id of the first job in its chain of resumed ones; None if it is that.
    """

    layers: frozenset[Place]
    multiplied: frozenset[Place]
    units: Units | None
    products: Products | None
    records: float
    behind: float
    config: bytes
    lineage: str | None = None
    classed: frozenset[Place] = frozenset()
    whole: int = 0

    @property
    def places(self) -> frozenset[Place]:
        """Places of all these sums."""
        return self.layers | self.multiplied | self.classed

    @property
    def _first(self) -> Place:
        return min(self.layers or self.multiplied or self.classed)

    def entries(self, dataset: str, job: str, place: Place) -> tuple[Trained | Multiplied, ...]:
        """Return the journal entries of one sum; of its part by class one of its own.

        A class in it has, for all a silo tells, just as many values as one run tells numbers.
        """
        kind, number, index = place
        named, told = (dataset, job, number), list[Trained | Multiplied]()
        run = (self.lineage or job, self.config)
        phase = f"{kind}-{index}"
        if place in self.multiplied and self.products is not None:
            held = int(self.records) * self.products.values
            told.append(Multiplied(*named, phase, *run, self.products.numbers, held))
        if place in self.layers and (of := self.units) is not None:
            numbers = (of.most, of.first, of.inputs, of.numbers)
            # In several forms a round is as many.
            records = int(self.behind * len(self.layers) / of.times)
            told.append(Trained(*named, phase, *run, *numbers, records))
        if place in self.classed:
            told.append(Multiplied(*named, f"{phase}-classes", *run, 1, self.whole))
        return tuple(told)

    def parts(self, factor: int, places: Iterable[Place] | None = None) -> Parts:
        """Return what sums take of what the records allow; of all places, or of these."""
        some = self.places if places is None else places
        return taken((entry for place in some for entry in self.entries("", "", place)), factor)

    def before(self, dataset: str, job: str, history: History, factor: int) -> Parts:
        """Return what all other jobs' sums took, and layers of other chains of jobs."""
        return self._without([each for each in history.trained(dataset) if each.job != job], job, factor)

    def _without(self, others: Sequence[Trained | Multiplied], job: str, factor: int) -> Parts:
        chain = self.lineage or job
        layers = taken((each for each in others if each.lineage != chain), factor)
        return replace(taken(others, factor), units=layers.units)

    def check(self, policy: Policy, dataset: str, job: str, history: History) -> None:
        """Refuse a job whose sums, with those of earlier jobs, add up to more than its records allow.

        Raises:
            BelowPolicyError: TF-625.
        """
        factor = policy.records_per_feature
        before = self.before(dataset, job, history, factor)
        wanted = self.entries(dataset, job, self._first)[0]
        self._check(policy, self.parts(factor), before, wanted, history)

    def check_next(
        self, policy: Policy, dataset: str, job: str, place: Place, history: History
    ) -> tuple[Trained | Multiplied, ...]:
        """Return the journal entries of the next sum; refuse it if jobs beside this one took what was left.

        Raises:
            BelowPolicyError: TF-625.
        """
        wanted, factor = self.entries(dataset, job, place), policy.records_per_feature
        now = {each.sum for each in wanted}
        others = [each for each in history.trained(dataset) if each.sum not in now]
        parts, before = self.parts(factor, [place]), self._without(others, job, factor)
        self._check(policy, parts, before, wanted[0], history)
        return wanted

    def _check(
        self, policy: Policy, parts: Parts, before: Parts, wanted: Trained | Multiplied, history: History
    ) -> None:
        if parts.fit(before) or history.accepts_rounds(wanted):
            return
        factor, asked = policy.records_per_feature, list[str]()
        records = self.records if self.units is None else self.behind
        if self.units is not None:
            asked.append(
                f"{plural(len(self.layers), 'more sum')} of layers of up to {self.units.most} units, "
                f"{self.units.where}"
            )
        if self.products is not None:
            asked.append(f"{plural(len(self.multiplied), 'more sum')} of {self.products.name}")
        if self.classed:
            asked.append(f"{plural(len(self.classed), 'more sum')} by class, of {self.whole} in a run")
        fit = rounds_left(self.parts(factor, [self._first]), before)
        _refuse(
            policy,
            " and ".join(asked),
            "fewer rounds, units or features, privacy, or a person's consent",
            "from these and those of earlier jobs records are computed. They took "
            f"{float(before.largest):.1%} of what {RULE} {factor} allows, {fit} such sums over "
            f"{records:.0f} records would fit. Or a person at this site accepts one run of the job: "
            "`tightframe site release accept --rounds`",
        )


def rounds_planned(setup: JobSetup, sizes: Sizes) -> Rounds | None:
    """Return the sums that add up with other jobs' over so many records; None if a job plans none.

    Products of features that no training moves do not: they are the same in each job, or another profile's.
    """
    units, moved = units_planned(setup), _moved(setup)
    classed = _by_class(setup)
    if units is None and not moved and not classed:
        return None
    layers = frozenset(() if units is None else _layers(setup))
    products = max(moved.values(), key=lambda item: item.width, default=None)
    config = bytes.fromhex(setup.job.sha256())
    lineage = None if setup.job.resume is None else setup.job.resume.lineage
    counted = sizes.sure(), sizes.behind(behind(setup))
    sums = (layers, frozenset(moved), units, products)
    return Rounds(*sums, *counted, config, lineage, classed, len(_telling(setup)))


@_once
def _by_class(setup: JobSetup) -> frozenset[Place]:
    """Return the sums by class in training of which a run tells more than the class before."""
    if not class_numbers(setup):
        return frozenset()
    telling = _telling(setup)
    return frozenset(
        exchange.place
        for exchange in setup.plan
        if exchange.training and (exchange.round, exchange.index) in telling
    )


@_once
def _moved(setup: JobSetup) -> dict[Place, Products]:
    """Return the sums of products of features that training moves."""
    if setup.privacy is not None:
        return {}
    found = {
        exchange.place: products_in(setup, exchange.phase.schema)
        for exchange in setup.plan
        if any(item.products and not item.name.startswith(PREFIX) for item in exchange.phase.schema.fields)
    }
    if not found or is_frozen(shared_template(setup.setting)):
        return {}
    return {place: products for place, products in found.items() if products is not None}


def taken(sums: Iterable[Trained | Multiplied], factor: int) -> Parts:
    """Return what sums took of what the records behind them allow.

    Layers count once in a chain of resumed jobs, whose weights go on from one start.
    """
    trained, products = Counter[tuple[str, Units, int]](), Fraction(0)
    for each in sums if factor else ():
        if isinstance(each, Multiplied):
            products += Fraction(each.numbers, max(1, each.values))
        else:
            layers = Units(each.widest, each.units, each.inputs, each.numbers, 1)
            trained[each.lineage, layers, each.records] += 1
    rounds, units = Fraction(0), dict[str, Fraction]()
    for (chain, layers, records), times in trained.items():
        parts = replace(layers, times=times).parts(records, factor)
        rounds += parts.rounds
        units[chain] = max(parts.units, units.get(chain, Fraction(0)))
    return Parts(rounds, sum(units.values(), Fraction(0)), products)


def rounds_left(each: Parts, before: Parts) -> int | None:
    """Return how many more sums of another job fit that take such parts each; None if any number does."""
    if not each.fit(before):
        return 0
    left = [
        int((1 - earlier) / now)
        for now, earlier in ((each.rounds, before.rounds), (each.products, before.products))
        if now
    ]
    return min(left, default=None)


def _check(policy: Policy, found: Products, records: float, values: float, how: str) -> None:
    factor = policy.records_per_feature
    if found.allowed(records, factor, values):
        return
    _tell_widest(
        policy,
        f"{found.numbers} sums of products of {found.width} features over {records:.0f} {how} records, "
        f"with {values:.0f} values",
        found.widest(records, factor, values),
        f"the sums if fewer than {factor} records a feature surely stand behind them, "
        "whichever silos lie, or fewer values than sums",
    )


def _check_class(policy: Policy, found: ClassSums, values: float, of: str) -> None:
    factor = policy.records_per_feature
    if found.allowed(values, factor):
        return
    _tell_widest(
        policy,
        f"sums of {found.width} features by class over {of}, with {values:.0f} values",
        found.widest(values, factor),
        f"the sum of a class if it is more than 1/{factor} as many numbers as its records have values",
    )


def _tell_widest(policy: Policy, asked: str, widest: int, case: str) -> None:
    """Refuse a sum over too few records; ``case`` says from what they are computed, and when."""
    _refuse(
        policy,
        asked,
        f"at most {plural(widest, 'feature')}, or privacy" if widest else "privacy",
        f"records are computed from {case}: make the features fewer (model_options.width of "
        "random_features, scattering), or give the job `privacy`",
    )


def _refuse(policy: Policy, asked: str, required: str, why: str) -> None:
    raise BelowPolicyError(
        [Refusal(RULE, asked, required, why)], shown_to_lead=policy.tell_refusals, code=CODE
    )
