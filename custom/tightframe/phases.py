"""The vocabulary of Tightframe: what a method declares and what leaves a silo.

Every method, the evaluation and the statistics are *phases*::

    broadcast (server -> silos)  ->  contribution (named tensors)  ->  SUM  ->  update (everybody)

This is the bottom layer: types only, and importable without torch and NumPy, because the processes that
only carry messages must start fast.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from tightframe.errors import RunError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from pydantic import BaseModel


Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
"""Tensors by name."""
CLASS_COUNTS = "statistics/class_counts"
"""In ``ServerState.extra``: pooled training records of each class (C,); 0 where that is not known."""
FINDING_COUNTS = "statistics/finding_counts"
"""In ``ServerState.extra``: pooled training records with each finding and without it (K, 2); 0 where that is
not known."""
FEATURE_MEAN, FEATURE_STD = "statistics/feature_mean", "statistics/feature_std"
"""In ``ServerState.extra``: pooled moments of the inputs (D,)."""
ADMITTED = "classes/admitted"
"""In what ``Phase.contribute`` receives under the class rules: classes to which this silo contributes, bool
(C,). For sums over records without an axis of classes, out of which no rule could take a class later."""
UNKNOWN = -1
"""Label of a finding of which nobody knows whether the record has it."""
Statistic = Literal["class_counts", "finding_counts", "feature_moments"]
Fold = Literal["train", "validation", "test"]
Group = Literal["update", "static"]
Neighbours = Literal["record", "patient"]
"""Between which data sets an observer must not be able to tell: one record more, or one patient."""
Mechanism = Literal[
    "training", "class_sums", "gradient_sum", "frozen_sums", "evaluation", "statistics", "constant", "charges"
]
"""By what differential privacy covers a field: a function of what private training returned, noisy class
sums, a noisy sum of clipped gradients, noisy sums of frozen features, noisy totals of an evaluation, noisy
statistics of a table, the same whatever the records are, or a function of what the silo's ledger says was
charged, which follows from the job, from what was repeated, and from a number of records that is taken as
known."""
Totals: TypeAlias = "Mapping[str, NDArray[np.float64]]"
"""Decoded sums, by field name, each of its field's shape, in float64."""

RING_DTYPE: Mapping[int, str] = {32: "uint32", 64: "uint64"}


@dataclass(frozen=True)
class Field:
    """One named tensor of a contribution, declared before anything runs.

    Attributes:
        name: unique in its phase, for example ``model/head.weight``.
        shape: the tensor's shape; ``()`` is a scalar.
        ring: bits of the integer ring in which it is summed, 32 or 64.
        bound: the largest absolute value; a larger one refuses the contribution, unless there is a norm.
        norm: L2 bound of all fields of the phase that carry it, taken together. The group is
            rescaled before encoding to this norm, and to values within ``bound``, so that it never
            refuses; None leaves it as it is.
        weighted: multiplied by the silo's public weight over the largest weight.
        static: hardly changes from round to round (counts, holders, class sums, evaluation).
        per_class: its first axis is the class.
        sensitivity: largest L2 change of the field by one record, where it is a sum over
            records; None where no such bound holds.
        bits: fraction bits at most; fewer put all silos' values on one coarse grid, so that a total tells
            their sum and nothing of how it came about; None for as many as the ring has.
        mechanism: by what differential privacy covers it; None where nothing does, so that a job with
            privacy is refused.
        products: the width d of features whose products it sums over records, exactly; 0 for any other field.
        features: the same of frozen features that it sums by class.
        independent: of each class, how many of its numbers do not follow from others; None for all.
        means: of each class the mean of a silo's features, not their sum.
        over_classes: without an axis of classes, a sum over the records of those that the class rules admit;
            a silo's ``contribute`` leaves out the others (``ADMITTED``).
    """

    name: str
    shape: tuple[int, ...]
    ring: Literal[32, 64] = 64
    bound: float = 1e6
    norm: float | None = None
    weighted: bool = False
    static: bool = False
    per_class: bool = False
    sensitivity: float | None = None
    mechanism: Mechanism | None = None
    bits: int | None = None
    products: int = 0
    features: int = 0
    independent: int | None = None
    means: bool = False
    over_classes: bool = False

    @property
    def group(self) -> Group:
        """The group of the secure sum that the field belongs to."""
        return "static" if self.static else "update"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes of this field in a silo's term."""
        return self.size * self.ring // 8

    @property
    def effective_bound(self) -> float:
        """The bound after rescaling: at most ``norm * (1 + 2**-10)`` where a norm is set.

        A norm above the bound changes nothing here, so that it changes no bit of an update within both.
        """
        return self.bound if self.norm is None else min(self.bound, self.norm * (1 + 2.0**-10))


@dataclass(frozen=True)
class Schema:
    """The fields of a phase, in the order in which they are summed."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [item.name for item in self.fields]
        if len(set(names)) != len(names):
            doubled = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"Expected field names to be unique, but got {doubled} twice.")
        summed = [item for item in self.fields if item.products or item.features]
        if open_ := [item.name for item in summed if not item.static]:
            raise ValueError(
                "Expected sums of features and products to be static, because the number of records behind "
                f"them is that of all silos enrolled, but {open_} are not."
            )

    def __add__(self, other: Schema) -> Schema:
        return Schema(self.fields + other.fields)

    def __getitem__(self, name: str) -> Field:
        for item in self.fields:
            if item.name == name:
                return item
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(item.name == name for item in self.fields)

    def group(self, group: Group) -> tuple[Field, ...]:
        """Return the fields of one group, in order."""
        return tuple(item for item in self.fields if item.group == group)

    def describe(self) -> list[dict[str, Any]]:
        """Return plain values, for the configuration's hash and the model card."""
        return [
            {
                "name": item.name,
                "shape": list(item.shape),
                "ring": item.ring,
                "bound": item.bound,
                "norm": item.norm,
                "weighted": item.weighted,
                "static": item.static,
                "per_class": item.per_class,
                "sensitivity": item.sensitivity,
                "mechanism": item.mechanism,
                "bits": item.bits,
            }
            for item in self.fields
        ]


@dataclass(frozen=True)
class Contribution:
    """A silo's proposal: tensors by field name, and its own next state.

    The state is *proposed*: it is committed only on evidence that the term is in the opened
    sum, and never leaves the silo. None proposes nothing, so that the silo keeps the state it has.
    """

    tensors: Tensors
    proposed_state: Tensors | None = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """The silos in an opened sum, with the public weights that were applied.

    ``weights`` are the public weights of the silos in the sum; a weighted field holds
    ``sum_k (w_k / largest) * x_k``, so ``mean`` divides by ``sum_k w_k / largest``. ``enrolled`` is the
    number of silos in the run, in this sum or not; those in the sum if it is not given. ``failed`` is the
    number of silos in the sum that could not contribute, and are in it with zeros (``rounds.riders.failures``
    tells the riders within it, and the method).
    """

    round: int
    weights: Mapping[str, float]
    largest: float
    enrolled: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if not self.enrolled:
            object.__setattr__(self, "enrolled", len(self.weights))

    @classmethod
    def of(cls, round: int, survivors: Iterable[str], enrolled: Mapping[str, float]) -> Cohort:
        """Return the survivors of a sum, with their weights among those of all enrolled silos."""
        weights = {site: enrolled[site] for site in survivors}
        return cls(round, weights, max(enrolled.values()), enrolled=len(enrolled))

    @property
    def size(self) -> int:
        """Number of silos in the sum."""
        return len(self.weights)

    def uniform(self) -> Cohort:
        """Return the same silos, each counting once: for sums that were not weighted."""
        return replace(self, weights=dict.fromkeys(self.weights, 1.0), largest=1.0)

    def check_flags(self, totals: Totals, names: Iterable[str], *, each: float = 1.0) -> None:
        """Refuse totals of flags that these silos cannot add up to: one of them sent another number.

        A false number that stays below is not found.

        Args:
            totals: as opened.
            names: of the fields.
            each: largest number of a silo; the least one is 0.

        Raises:
            RunError: TF-526, naming the field.
        """
        for name in names:
            # None at all is the moments of a table without numbers.
            low, high = float(totals[name].min(initial=0.0)), float(totals[name].max(initial=0.0))
            most = each * self.size
            if low < -0.5 or high > most + 0.5:
                raise RunError(
                    f"Expected numbers from 0 to {most:g} in the total {name} of {self.size} silos, but got "
                    f"{low:g} to {high:g}: a silo sent a false one. What follows from it is "
                    "not used; run the job without that silo, if you know which it is.",
                    code="TF-526",
                )

    @property
    def total_weight(self) -> float:
        """``sum_k w_k / largest`` over the cohort, summed in roster order."""
        return float(sum(self.weights[name] / self.largest for name in sorted(self.weights)))


@dataclass(frozen=True)
class ServerState:
    """All that the server carries from round to round: explicit, checkpointed, no pickle.

    Attributes:
        model: parameters and buffers of the global model, by name.
        extra: whatever else the method keeps (prototypes, moments, control variates).
    """

    model: Tensors
    extra: Tensors = field(default_factory=dict)

    def evolve(self, **changes: Any) -> ServerState:
        """Return a copy with some parts replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class PrivacySetting:
    """A job's differential privacy, as far as a method needs it.

    Attributes:
        feature_clip: L2 norm to which each record's features are clipped before they are summed.
        releases: the rounds, from 1 on, in which class sums are released; in others there are none.
    """

    feature_clip: float
    releases: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """A method's inputs; the same at the server and at every silo.

    Attributes:
        config: the method's own validated options.
        num_classes: number of classes C.
        input_shape: shape of one record, for example (3, 48, 48).
        build_model: makes an untrained model with ``features(x) -> (B, d)`` and ``head``.
        local: epochs, batch size and optimiser of local training (``config.job.Training``).
        update_norm: L2 norm of the model update; None leaves updates as they are.
        update_bound: bound of one coordinate of the update.
        privacy: what a method has to know of the job's differential privacy; None without it. With it every
            loss must be a mean of single records' losses.
        findings: whether the classes are findings, of which a record may have several or none.
    """

    config: Any
    num_classes: int
    input_shape: tuple[int, ...]
    build_model: Callable[[], torch.nn.Module]
    local: Any
    update_norm: float | None = None
    update_bound: float = 8.0
    privacy: PrivacySetting | None = None
    findings: bool = False


@dataclass(frozen=True)
class Withdrawal:
    """Settings of a job that withdraws records from a finished run.

    Attributes:
        start: SHA-256 (hex) of the state with the total.
        least: the least number of records, over all silos.
        by_class: whether the class rules hold, so that no class may lose the records of one or two silos.
        names: of the classes, for messages.
    """

    start: str
    least: int
    by_class: bool
    names: tuple[str, ...] = ()

    def named(self, places: Sequence[int]) -> str:
        """Return the names of classes by their places, or the places."""
        return ", ".join(self.names[place] for place in places) if self.names else str(places)


@dataclass(frozen=True)
class OwnRows:
    """Numbers of a silo's distinct training records, and of their values.

    Attributes:
        counts: distinct records, each in the first class that has it, float64 (C,).
        by_class: distinct records of each class, float64 (C,).
        values: unknown numbers of a record of each class, float64 (C,); they stay at the silo.
    """

    counts: torch.Tensor
    by_class: torch.Tensor
    values: torch.Tensor


class SiloView(Protocol):
    """A silo as a method's ``contribute`` sees it."""

    name: str
    round: int
    setting: Setting
    device: torch.device

    def class_counts(self, fold: Fold, *, distinct: bool = False) -> torch.Tensor:
        """Count records of each class in a fold: int64 (C,); ``distinct`` counts repeated records once.

        With differential privacy those of the training fold are noisy, float64, and 1 at least.
        """

    def held_counts(self) -> torch.Tensor:
        """Count patients with training records of each class, by which the class rules go: int64 (C,)."""

    @property
    def drawn_records(self) -> int:
        """Number of records that an epoch of training takes, repeats counted."""

    @property
    def min_class_count(self) -> int:
        """Least number of patients of a class with which the silo tells of that class."""

    @property
    def records_per_feature(self) -> int:
        """Least number of records for each feature whose exact products leave the silo; 0 for no rule."""

    def record_values(self, *, staying: bool = False) -> torch.Tensor:
        """Return how many unknown numbers a training record of each class has.

        See ``learning.few_records.record_values``.

        Args:
            staying: count the records that stay in a withdrawal, not those before it.
        """

    def own_rows(self, *, staying: bool = False) -> OwnRows:
        """Return the numbers of distinct training records, and ``record_values``.

        Args:
            staying: see ``record_values``.
        """

    def backed(self, sizes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a mask of the parts of each class's sum that enough training records make, bool (C, K).

        See ``learning.few_records.class_parts``.

        Args:
            sizes: weight of each record in each part, none negative, (n, K); all parts have equally many
                numbers.
            labels: (n,).
        """

    def rows(self) -> tuple[list[bytes], torch.Tensor]:
        """Return a digest of each training record's inputs, before a withdrawal, and labels (n,), in order.

        Inputs that agree to 2^-24 have one digest (``learning.few_records.distinct_rows``).
        """

    def private_class_sums(
        self, features: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noisy sums by class of ``features`` of the training records, with differential privacy.

        Args:
            features: (B, ...) -> (B, width); each record's is clipped.

        Returns:
            Tensors (C, width) and (C,) for the two fields whose mechanism is ``class_sums``; only
            ``Phase.update`` is given them as sums and numbers of records.
        """

    def private_gradient_sum(
        self, model: torch.nn.Module, terms: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noisy sum of the training records' clipped gradients, with differential privacy.

        Args:
            model: as it was broadcast.
            terms: of the loss, ``learning.stages.Term``, each a mean over records.

        Returns:
            Tensors (P,), over the parameters that train, one after another, and (), the noisy number of
            records or patients, for the fields whose mechanism is ``gradient_sum``; only ``Phase.update`` is
            given them as gradients.
        """

    def private_frozen_sums(
        self, model: torch.nn.Module, width: int, *, products: bool, radius: float
    ) -> dict[str, torch.Tensor]:
        """Return noisy sums of ``model``'s features of the training records, with differential privacy.

        Args:
            model: in evaluation mode; its features are brought into the ball of radius ``radius``.
            width: d, of its features.
            products: whether their products are summed.
            radius: public.

        Returns:
            Tensors for the fields whose mechanism is ``frozen_sums``, by the last part of their names.
        """

    def load(self, tensors: Tensors) -> torch.nn.Module:
        """Load a model with these parameters and buffers on this silo's device."""

    def batches(
        self, fold: Fold, *, augment: bool, shuffle: bool, epoch: int = 0, share: float = 1.0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield mini-batches (inputs (B, ...), labels int64 (B,), or findings (B, K)) on the silo's device.

        With ``share`` below 1 they hold that part of the fold, as the order has it, and one record at least.
        Once a model was loaded whose encoder is frozen, inputs may be its features, computed before; the
        model's ``features`` takes them as they are.
        """

    def encoded(
        self, model: torch.nn.Module, fold: Fold, *, exact: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield features (B, d) and labels int64 (B,) of a fold, in order, without augmentation and gradient.

        Those of a frozen encoder are computed once in a run. With ``exact`` they are computed in float64, so
        that a record's do not show which records were in its batch.
        """

    def encoded_before(
        self, model: torch.nn.Module
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield ``encoded`` of the training fold before a withdrawal, and a mask of those that stay."""

    def class_patients(self, fold: Fold) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count patients by class: with withdrawn records, with any before, and with others, int64 (C,)."""

    def withdrawn_from(self, fold: Fold) -> tuple[torch.Tensor, bool]:
        """Return the labels (n,) of a fold's withdrawn records, and whether it is to be evaluated no more.

        The latter if evaluations have used up their limits, or fewer than ``min_test_count`` records leave or
        stay: if too few stay, exact counts lose a part; if too few leave, the difference is of these.
        """

    def fit(self, model: torch.nn.Module, stages: Sequence[Any]) -> Any:
        """Run the stages of local training and return ``learning.stages.FitReport``."""

    def fit_by_own_loop(self, model: torch.nn.Module) -> Any:
        """Let the job's own training loop (``training.loop``) train a model, and return ``FitReport``."""

    def unit_records(
        self, model: torch.nn.Module, *, passes: Sequence[range] = (), squared: bool = False
    ) -> Any:
        """Return a ``learning.few_records.unit_records.UnitRecords``, for gradients of training records.

        Args:
            passes: epochs of shuffled batches that train the same; empty for records in their order.
            squared: for sums of squared gradients.
        """

    def generator(self, purpose: str) -> torch.Generator:
        """Return a random stream keyed by (seed, silo, round, purpose)."""

    @property
    def offers_prototypes(self) -> bool:
        """This silo submits class prototypes (FedMR's Table 5 lets silos opt out)."""

    @property
    def limits_evaluations(self) -> bool:
        """This silo limits exact evaluations of its records, and sends losses in whole nats."""

    def may_sum(self, fold: Fold) -> bool:
        """Check whether this silo's counts over a fold may enter a total, like its evaluation."""


@dataclass(frozen=True)
class Reading:
    """Opened totals after the riders of a phase have read theirs.

    Attributes:
        state: of the server, with what riders remember in ``extra``, under names that begin with ``RIDERS``.
        notes: for the record of the run, by rider.
        warnings: for the server's log.
        failed: number of silos in the sum that could not contribute.
    """

    state: ServerState
    totals: Totals
    notes: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    failed: int = 0

    def noting(self, rider: str, note: Any) -> Reading:
        """Return the same with a rider's note."""
        return replace(self, notes={**self.notes, rider: note})

    def warning(self, *lines: str) -> Reading:
        """Return the same with lines for the server's log."""
        return replace(self, warnings=(*self.warnings, *lines))


def taken_out(
    totals: Totals, mine: Callable[[str], bool]
) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
    """Split totals into those of a rider, by their names, and all others."""
    own = {name: value for name, value in totals.items() if mine(name)}
    return own, {name: value for name, value in totals.items() if name not in own}


RIDERS = "riders/"
"""Start of the names in ``ServerState.extra`` of what riders remember."""


def _untouched(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
    return Reading(state, totals)


@dataclass(frozen=True)
class Phase:
    """One exchange with every silo, ending in one sum.

    ``update`` gets the totals that were opened. After a drop-out a secure sum opens the *update*
    group only: static fields (counts, class sums) are then missing from the totals, and what they
    would have changed keeps its value.

    ``read`` is the server half of the phase's riders (``rounds.riders``): it takes out of the totals what
    is theirs before ``update`` sees them. Methods take nothing out; they may warn.
    """

    name: str
    schema: Schema
    broadcast: Callable[[ServerState], Tensors]
    contribute: Callable[[SiloView, Tensors, Tensors], Contribution]
    update: Callable[[ServerState, Totals, Cohort], ServerState]
    read: Callable[[ServerState, Totals, Cohort], Reading] = _untouched


def logits(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the model's output for a batch: class logits (B, C)."""
    output: torch.Tensor = model(inputs)
    return output


@dataclass(frozen=True)
class OneSum:
    """Description of a method whose model is a function of one sum.

    Attributes:
        follows: how the head follows from the totals, in one sentence.
        opened: what the sum opens -> how many numbers of it, in a setting.
    """

    follows: str
    opened: Callable[[Setting], Mapping[str, int]]


@dataclass(frozen=True)
class Method:
    """A method is a value. One paper, one file, ending in ``METHOD = ...``.

    Most are made by ``learning.halves.composed_method`` from how a silo trains and what the server does
    with the sums; a method that has no such form gives ``init_server`` and ``plan`` itself.

    Attributes:
        name: what a job calls it.
        paper: citation.
        config: frozen pydantic model of its options.
        init_server: makes the state before round 1 from a seed.
        plan: the phases of one training round.
        predict: class logits (B, C) of a batch from a model; the model's output unless a method says
            otherwise.
        head: makes what replaces the backbone's linear head, from (options, feature width, classes):
            logits (B, C) of features (B, d). What is fixed for all silos is a parameter without a
            gradient: it travels with the model, but is never sent up. None keeps the backbone's.
        statistics: pooled statistics that it needs in its state before round 1.
        private: with which options it can be run with differential privacy: says why not, None if it can.
            A method without it cannot.
        network: what it needs of a network: its ``logits``, or also ``features`` and ``head``.
        findings: with which options it takes records of several findings: says why not, None if it does. A
            method without it needs the one class of each record.
        own_training: with which options an installed training loop (``learning.own_loop``) may stand in place
            of its local training: says why not, None if it may. A method without it trains in a way of its
            own, which no loop replaces.
        needs_secure_sums: why a job cannot use plain sums with these options; None if it can.
        needs_encoder: why a job cannot freeze the encoder with it; empty if it can.
        gradient_rate: where a round is one sum of records' gradients, the probability with which a record
            takes part in it; under privacy that sum is bounded by record, so that silos can share its noise.
            None where silos train.
        pull: see ``learning.halves.LocalRule``.
        private_prior: whether its loss uses the silo's own class counts, which are then made noisy, once.
        before, after: phases outside the training rounds.
        start: phases before round 1 that set the linear head of any method's model (``start`` in a job), from
            a setting with this method's options; None where it is no start.
        withdraw: phases in place of ``before`` in a job that takes records out of an ended run; None where
            the model is no function of sums over records.
        rounds: the number of rounds that it has; None for as many as a job wants.
        counts_rounds: whether a round's phases differ with the number of all rounds: then that number is in
            the release profile.
        one_sum: what it tells of its one sum; None where a model is trained.
        own_model: the tensors of the model that a silo trains for itself, from (silo, the silo's committed
            state), where there is no global model: broadcasts have none, the last models are evaluated each
            at its silo, and no model is left at the server. None where there is a global model.
        personalise: makes a silo's personal model from (silo, the final model's tensors, the silo's
            committed state); ``predict`` is asked of it, and it stays at the silo. None takes the model
            right after one more round of local training.
        personal_form: turns a model of a setting into one of the form of a personal model, with values of no
            meaning, to load one into; None where a personal model has the form of the global one.
        rounded: whether the server's half uses matrix products, powers or decompositions, whose last bits
            differ between processors, or with which options it does; a silo then takes over the server's
            result, checked against its own within rounding (``rounds.run_state``).
    """

    name: str
    title: str
    paper: str
    config: type[BaseModel]
    init_server: Callable[[Setting, int], ServerState]
    plan: Callable[[Setting, int, int], tuple[Phase, ...]]
    predict: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] = logits
    head: Callable[[Any, int, int], torch.nn.Module | None] | None = None
    statistics: Callable[[Setting], tuple[Statistic, ...]] | None = None
    private: Callable[[Any], str | None] | None = None
    gradient_rate: Callable[[Any], float] | None = None
    pull: Callable[[Setting], float] = lambda setting: 0.0
    private_prior: Callable[[Any], bool] | None = None
    before: Callable[[Setting], tuple[Phase, ...]] | None = None
    after: Callable[[Setting], tuple[Phase, ...]] | None = None
    start: Callable[[Setting], tuple[Phase, ...]] | None = None
    withdraw: Callable[[Setting, Withdrawal], tuple[Phase, ...]] | None = None
    rounds: int | None = None
    counts_rounds: bool = True
    one_sum: OneSum | None = None
    own_model: Callable[[SiloView, Tensors], Tensors] | None = None
    personalise: Callable[[SiloView, Tensors, Tensors], torch.nn.Module] | None = None
    personal_form: Callable[[Setting, torch.nn.Module], torch.nn.Module] | None = None
    rounded: bool | Callable[[Any], bool] = False
    needs_secure_sums: Callable[[Any], str | None] | None = None
    needs_encoder: str = ""
    network: Literal["features", "logits"] = "features"
    findings: Callable[[Any], str | None] | None = None
    own_training: Callable[[Any], str | None] | None = None


def stream_seed(seed: int, *key: str | int) -> int:
    """Return a 63-bit seed for one named random stream.

    Streams are keyed by what they are for, never by process or arrival, so that a run is the
    same however it is spread over processes.

    >>> stream_seed(7, "site-1", 1) == stream_seed(7, "site-1", 1)
    True
    >>> stream_seed(7, "site-1", 1) == stream_seed(7, "site-1", 2)
    False
    """
    digest = hashlib.sha256()
    for part in (seed, *key):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
