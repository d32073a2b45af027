"""Add up the exact sums of all jobs over the same records (``Rounds``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tightframe.config.policy import Policy
from tightframe.learning.few_records.products import Parts, Products, Sizes, Units
from tightframe.learning.model_update import shared_template
from tightframe.learning.one_sum.feature_sums import PREFIX
from tightframe.models.frozen import is_frozen
from tightframe.results.words import plural
from tightframe.rounds.few_records.layers import behind, layers_in, units_planned
from tightframe.rounds.few_records.planned import class_numbers, once, products_in, telling
from tightframe.rounds.few_records.rule import RULE, refuse
from tightframe.rounds.order import Place
from tightframe.rounds.setup import JobSetup
from tightframe.securesum.site.journal import History, Multiplied, Trained


@dataclass(frozen=True)
class Rounds:
    """The sums that a job plans of layers, of products of trained features, and by class in training.

    Two jobs over the same records with other seeds open other equations on the same rows. So a site notes
    each such sum in its ledger when it masks its term: from then on others can open it.

    Attributes:
        layers: places of sums of layers.
        multiplied: places of sums of products.
        classed: places of sums by class in training.
        whole: number of these in the whole chain of jobs.
        units: the layers; None without any.
        products: of features; None without any.
        records: number of records certainly in the sums, as public as the policy's ``weights`` make it.
        behind: number of these behind each number of a layer.
        config: SHA-256 of the job.
        lineage: id of the first job in its chain of resumed ones; None if this is the first.
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
        """Return the journal entries of one sum; its part by class has an entry of its own.

        A class in it is counted as if it had just as many values as one run opens numbers: a silo does not
        tell more.
        """
        kind, number, index = place
        named, entries = (dataset, job, number), list[Trained | Multiplied]()
        run = (self.lineage or job, self.config)
        phase = f"{kind}-{index}"
        if place in self.multiplied and self.products is not None:
            held = int(self.records) * self.products.values
            entries.append(Multiplied(*named, phase, *run, self.products.numbers, held))
        if place in self.layers and (units := self.units) is not None:
            numbers = (units.most, units.first, units.inputs, units.numbers)
            # A round whose update is summed in several forms counts as so many.
            records = int(self.behind * len(self.layers) / units.times)
            entries.append(Trained(*named, phase, *run, *numbers, records))
        if place in self.classed:
            entries.append(Multiplied(*named, f"{phase}-classes", *run, 1, self.whole))
        return tuple(entries)

    def parts(self, factor: int, places: Iterable[Place] | None = None) -> Parts:
        """Return the fractions that the sums at ``places``, or at all, use up of what the records allow."""
        chosen = self.places if places is None else places
        return taken((entry for place in chosen for entry in self.entries("", "", place)), factor)

    def before(self, dataset: str, job: str, history: History, factor: int) -> Parts:
        """Return the fractions that other jobs' sums used up; layers of this chain of jobs do not count."""
        others = [entry for entry in history.trained(dataset) if entry.job != job]
        return self._without_chain(others, job, factor)

    def _without_chain(self, others: Sequence[Trained | Multiplied], job: str, factor: int) -> Parts:
        chain = self.lineage or job
        layers = taken((entry for entry in others if entry.lineage != chain), factor)
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
        """Return the journal entries of the next sum; refuse it if other jobs used up what was left.

        Raises:
            BelowPolicyError: TF-625.
        """
        wanted, factor = self.entries(dataset, job, place), policy.records_per_feature
        sums = {entry.sum for entry in wanted}
        others = [entry for entry in history.trained(dataset) if entry.sum not in sums]
        parts, before = self.parts(factor, [place]), self._without_chain(others, job, factor)
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
        refuse(
            policy,
            " and ".join(asked),
            "fewer rounds, units or features, privacy, or a person's consent",
            "from these and those of earlier jobs records are computed. They took "
            f"{float(before.largest):.1%} of what {RULE} {factor} allows, {fit} such sums over "
            f"{records:.0f} records would fit. Or a person at this site accepts one run of the job: "
            "`tightframe site release accept --rounds`",
        )


def rounds_planned(setup: JobSetup, sizes: Sizes) -> Rounds | None:
    """Return a job's sums that add up with other jobs' over the same records; None if it plans none.

    Products of frozen features do not add up: they are the same in each job, or belong to another profile.
    """
    units, multiplied = units_planned(setup), _trained_products(setup)
    classed = _by_class(setup)
    if units is None and not multiplied and not classed:
        return None
    layers = frozenset(() if units is None else layers_in(setup))
    products = max(multiplied.values(), key=lambda item: item.width, default=None)
    config = bytes.fromhex(setup.job.sha256())
    lineage = None if setup.job.resume is None else setup.job.resume.lineage
    counted = sizes.sure(), sizes.behind(behind(setup))
    sums = (layers, frozenset(multiplied), units, products)
    return Rounds(*sums, *counted, config, lineage, classed, len(telling(setup)))


@once
def _by_class(setup: JobSetup) -> frozenset[Place]:
    """Return the places of sums by class in training that open more than flags."""
    if not class_numbers(setup):
        return frozenset()
    schemas = telling(setup)
    return frozenset(
        exchange.place
        for exchange in setup.plan
        if exchange.training and (exchange.round, exchange.index) in schemas
    )


@once
def _trained_products(setup: JobSetup) -> dict[Place, Products]:
    """Return the sums of products of features that training changes."""
    if setup.privacy is not None:
        return {}
    planned = {
        exchange.place: products_in(setup, exchange.phase.schema)
        for exchange in setup.plan
        if any(item.products and not item.name.startswith(PREFIX) for item in exchange.phase.schema.fields)
    }
    if not planned or is_frozen(shared_template(setup.setting)):
        return {}
    return {place: products for place, products in planned.items() if products is not None}


def taken(sums: Iterable[Trained | Multiplied], factor: int) -> Parts:
    """Return the fractions that sums used up of what the records behind them allow.

    The units of layers count once in a chain of resumed jobs, whose weights all come from one start.
    """
    trained, products = Counter[tuple[str, Units, int]](), Fraction(0)
    for entry in sums if factor else ():
        if isinstance(entry, Multiplied):
            products += Fraction(entry.numbers, max(1, entry.values))
        else:
            layers = Units(entry.widest, entry.units, entry.inputs, entry.numbers, 1)
            trained[entry.lineage, layers, entry.records] += 1
    rounds, units = Fraction(0), dict[str, Fraction]()
    for (chain, layers, records), times in trained.items():
        parts = replace(layers, times=times).parts(records, factor)
        rounds += parts.rounds
        units[chain] = max(parts.units, units.get(chain, Fraction(0)))
    return Parts(rounds, sum(units.values(), Fraction(0)), products)


def rounds_left(each: Parts, before: Parts) -> int | None:
    """Return how many more sums of another job fit that use up ``each``; None if any number does."""
    if not each.fit(before):
        return 0
    pairs = ((each.rounds, before.rounds), (each.products, before.products))
    return min((int((1 - earlier) / now) for now, earlier in pairs if now), default=None)
