"""What sums of several jobs over the same records add up to: ``Rounds``."""

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
    """Return the sums that add up with other jobs' over so many records; None if a job plans none.

    Products of features that no training moves do not: they are the same in each job, or another profile's.
    """
    units, moved = units_planned(setup), _moved(setup)
    classed = _by_class(setup)
    if units is None and not moved and not classed:
        return None
    layers = frozenset(() if units is None else layers_in(setup))
    products = max(moved.values(), key=lambda item: item.width, default=None)
    config = bytes.fromhex(setup.job.sha256())
    lineage = None if setup.job.resume is None else setup.job.resume.lineage
    counted = sizes.sure(), sizes.behind(behind(setup))
    sums = (layers, frozenset(moved), units, products)
    return Rounds(*sums, *counted, config, lineage, classed, len(telling(setup)))


@once
def _by_class(setup: JobSetup) -> frozenset[Place]:
    """Return the sums by class in training of which a run tells more than the class before."""
    if not class_numbers(setup):
        return frozenset()
    told = telling(setup)
    return frozenset(
        exchange.place
        for exchange in setup.plan
        if exchange.training and (exchange.round, exchange.index) in told
    )


@once
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
