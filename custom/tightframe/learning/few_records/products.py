"""Decide how many records an exact sum of features, of their products, or of updates must have behind it.

Notation: n records, d features (width), C classes, p numbers of a record, v values of all records, m =
``records_per_feature`` of a site's policy, c silos that may lie.

**Products of features.** The sum of ``phi phi^T`` over n records has a rank of n at most. If d > n, its null
space vanishes at the records' features and hardly anywhere else, so that least squares from random starts
finds the records. So such a sum needs, of the records that are certainly in it,

1. ``n >= m d``: full rank with a margin, which leaves no null space;
2. ``d (d + 1) / 2 + C d + s <= v``: no more numbers than the records have values, including the s moments of
   inputs that the job opened before.

Each hospital counts the values of its own records (``record_values``) and tells nobody: a total of rows times
values, less the opened rows times most hospitals' number, would leave one hospital's number of records. So
each checks that its own records have, on average, as many values as the rule needs of each record: then all
have enough. A silo whose records have fewer fails inside the sum (``rounds.few_records``). Where only
declared numbers of records are known, v is n times the most values that a record of the job can have.

Silos' declared numbers are public, and up to c of them may be false. All declared numbers but the c largest
add up to no more than the honest silos' records, whoever lies: the honest silos' numbers are at least as
many, and none is above the silo's records. But some of these records do not count: those of classes that the
class rules withhold, and copies (``distinct_rows``). So an exchange before the sum counts the distinct rows
that do.

Trained features differ in each job, so the numbers of all jobs add up, each as a fraction of its own v.
Frozen features are the same in each job, or belong to another release profile (``rounds.sums.release``).

**Class sums.** The sum of ``phi`` over the records of a class is d numbers of them. With as many numbers as
values, the records are found from that sum alone. So of each class

3. ``m d <= v``: m times fewer numbers than values.

No colluders' share is taken off here, or a rare class would never pass. A small hospital's few records of a
rare class hardly vary, so a class passes, too, if one silo alone has ``ALONE`` times as many values of it as
there are features: a flag tells so.

**Updates of dense layers.** The summed gradient of a unit is the sum of the layer's inputs over the records
for which the unit is active. With more units than records, the records' patterns of active units span a space
that hardly any other row's pattern lies in, and the units by rounds have one decomposition into rank one: 324
of 339 records of 13 columns, numbers too, were read, with label, from an honest job with 4,096 units. And in
each round a unit's sum is another combination of the layer's inputs. Where these never change (a record's own
values, frozen features), as many combinations as records span what the records span: of a head of 5 classes
on 1,024 random features, 321 of 339 records were read after 100 rounds. So, of a layer that is dense on a
record's inputs or on frozen features, in t rounds, and of the units of later layers,

4. ``n >= m d`` units; ``n >= m min(p, t d)`` inputs, or units by rounds; and ``n >= m min(q, t)`` numbers, or
   rounds: as many rounds as records span the records' gradients (54 of 102 records were read from 36 units in
   130 rounds).

Behind trained convolutions features change, but within one sum the argument holds: with fewer records than a
layer's inputs and units, rows span the records' features, and columns their slopes (22 of 90 records were
read from one total of a ViT's last layers). So there ``n >= m min(units, inputs)`` for each layer. A
convolution that sees k places of a record is dense on k n rows and needs a k-th of the records: at one or two
by two places, as VGG11's last on 32 x 32 pixels, it is nearly a dense layer (its features tell which of 80
records were in one total, AUC 0.98). Pixels never change: for a convolution on them 4 holds with a k-th of
its units and inputs (20 rounds of a ViT of 16 units, whose one patch is the picture, span 120 pictures and no
others).

Another job over the same records with another seed has other combinations of the same rows: from two jobs of
50 rounds each, which 4 allows, 311 of 339 records were read. So, over all jobs,

5. rounds, and units by rounds, add up, each as a fraction of what its own n allows, to 1 at most: fewer
   combinations than records do not span them, and combinations of many records tell little of a few;
6. the squares of ``m d / n`` add up to 4 at most. Activations make a row more or less like a record, in each
   job independently, since each job draws its batches anew, and what several jobs tell adds up. Of 120
   records 88 to 110 were more like a record than any row at which 150 random searches ended, with 2n units in
   one job; with n/2 units in one or two jobs 0 or 1, in four 0 to 5, in twelve (m = 2, as many rounds as 5
   allows) 1 to 18; of 2,000 such searches one came near a record. No rule here prevents a test of 2,000 rows
   by all jobs (AUC 0.71 to 0.86 in one job of n/2 units, 0.89 to 0.98 in four, 0.71 to 0.83 in four of n/4).

**Records behind a number.** n counts the records *behind each number of one sum*, which a job can make few:
by ``sampling_rate``, by dropout, which keeps most records from a unit, or by a term that pulls weights back
so strongly (FedProx's mu, a weight decay, of about 1 / rate) that an update is that of its last batches. Of
216 records and 72 units, in five rounds, 95 were in clear at a dropout of 0.99, and so were all that were
drawn (a rate of 1e-6 draws one record a silo) or in the last batch of one. So n is that part (``Behind``),
and at least ``min_class_count`` of each silo; after a drop-out it is the survivors'. Which records have a
loss each silo sees for itself (``unit_records``). If a method sums an update in two forms, a round counts
twice.

**Class sums in training** are other numbers of a class's few records in each round. CReFF's class gradients
are of the received model, which everybody knows: 60 rounds of 96 units at rate 1 told a colluding hospital 4
of the 10 records of a class at two others (all 13 columns to 0.1 deviations), 12 rounds of 64 units all of 4
records. What counts is numbers against values: of two records (26 values) 33 numbers told both, of four
records (52 values) 65 numbers one and 129 all, 33 none. Other methods' class sums are of each silo's trained
model: at a small rate (3e-4) 40 rounds of 200 units fix ten records to 0.006 deviations (by the slopes at the
records), though least squares from random starts found none; at usual rates to 0.04 (0.003) and 0.2 (0.03).
No exchange counts a class's records before these sums. So each silo takes part in a class only if its own
records of it have

7. ``m / 2`` values for each number that a whole run tells of a class, and one run may take all of it: with
   another honest holder there are twice as many, and if a liar's flags leave one honest holder, its records
   are not fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction

COUNTED, ROWS = "products/counts", "products/rows"
"""Names in ``ServerState.extra`` of the opened numbers of distinct rows in a sum of features, (C,): each row
in the first class that has it, and in each class that has it."""
ENOUGH = "products/enough"
"""Name of the opened number of silos that alone have ``ALONE`` values of a class for each feature, (C,)."""
ALONE = 4
"""The strictest profile's ``records_per_feature``; a silo with a larger one relies on its own values."""
LEAVING, LOSING = "products/leaving", "products/losing"
"""Names, in a withdrawal, of how many of these rows leave, and of which classes, (C,)."""


@dataclass(frozen=True)
class Behind:
    """Fraction and number of a silo's records behind each number of a sum in training.

    Attributes:
        share: fraction of the records that are drawn, and that dropout does not keep from a unit.
        most: number of records in the steps that an update does not forget.
    """

    share: float = 1.0
    most: float = math.inf

    def of(self, records: float) -> float:
        """Return how many of a silo's records are behind each number.

        >>> Behind(0.5, 150).of(200), Behind().of(200)
        (75.0, 200.0)
        """
        return self.share * min(records, self.most)


@dataclass(frozen=True)
class Sizes:
    """Public numbers of records behind a sum.

    Attributes:
        declared: sum of the numbers that all enrolled silos declare.
        colluding: the most records that c lying silos can have in the sum: the c largest declared numbers.
        each: declared number of each silo, in falling order; empty for one silo.
        colluders: c.
    """

    declared: float
    colluding: float
    each: tuple[float, ...] = field(default=(), compare=False)
    colluders: int = field(default=0, compare=False)

    @classmethod
    def of(cls, declared: Mapping[str, float], colluders: int) -> Sizes:
        """Return the sizes from each silo's declared number of records, of which ``colluders`` may be false.

        >>> Sizes.of({"a": 300.0, "b": 200.0, "liar": 1e6}, 1).sure()
        500.0
        """
        falling = sorted(declared.values(), reverse=True)
        return cls(sum(falling), sum(falling[:colluders]), tuple(falling), colluders)

    def behind(self, part: Behind) -> float:
        """Return how many records of honest silos are certainly behind each number of a sum in training.

        >>> Sizes.of({"a": 300.0, "b": 200.0, "c": 100.0}, 1).behind(Behind(0.5, 150))
        125.0
        """
        if not self.each:
            return part.of(self.declared - self.colluding)
        counted = [min(number, part.most) for number in self.each]
        return part.share * max(0.0, sum(counted) - sum(counted[: self.colluders]))

    def times(self, records: float) -> Sizes:
        """Return the sizes of silos of so many records each, from weights of 1."""
        each = tuple(number * records for number in self.each)
        return Sizes(self.declared * records, self.colluding * records, each, self.colluders)

    def sure(self, counted: float | None = None) -> float:
        """Return how many records of honest silos are certainly in a sum.

        Args:
            counted: opened number of records in the sum; None if it is not known.

        >>> Sizes.of({"a": 300.0, "b": 200.0, "c": 100.0}, 1).sure(450.0)
        150.0
        """
        records = self.declared if counted is None else min(counted, self.declared)
        return max(0.0, records - self.colluding)


@dataclass(frozen=True)
class Products:
    """An exact sum of products of features.

    Attributes:
        width: d, of the features.
        classes: C; sums of features by class are opened with the products.
        values: p, the most values of one record.
        moments: s, number of moments of the same records that the job opens.
    """

    width: int
    classes: int
    values: int
    moments: int = 0

    @property
    def name(self) -> str:
        """Name of the sums, for messages."""
        return f"products of {self.width} features"

    @property
    def numbers(self) -> int:
        """How many numbers are opened."""
        return self.width * (self.width + 1) // 2 + self.classes * self.width + self.moments

    def allowed(self, records: float, factor: int, values: float | None = None) -> bool:
        """Check whether they may be summed over so many records.

        Args:
            records: n, those certainly in the sum.
            factor: m, ``records_per_feature`` of a site's policy; 0 allows any.
            values: v, of these records; None for the most that they can have.

        >>> Products(64, 2, 13).allowed(216, 2), Products(64, 2, 13).allowed(127, 2)
        (True, False)
        >>> Products(100, 2, 13).allowed(216, 2)  # 5,250 numbers of 2,808 values
        False
        """
        if factor == 0:
            return True
        held = records * self.values if values is None else values
        return records >= factor * self.width and self.numbers <= held

    def widest(self, records: float, factor: int, values: float | None = None) -> int:
        """Return the largest width that is allowed for so many records; 0 for none."""
        widths = range(self.width, 0, -1)
        return next((d for d in widths if replace(self, width=d).allowed(records, factor, values)), 0)


@dataclass(frozen=True)
class Parts:
    """Fractions that exact sums of all jobs use up of what the records behind them allow; refused above 1.

    Attributes:
        rounds: by rule 5.
        units: by rule 6.
        products: numbers of products, by rule 2.
    """

    rounds: Fraction = Fraction(0)
    units: Fraction = Fraction(0)
    products: Fraction = Fraction(0)

    @property
    def largest(self) -> Fraction:
        """The fraction that reaches 1 first."""
        return max(astuple(self))

    def fit(self, before: Parts) -> bool:
        """Check whether these fit beside the fractions ``before``; a fraction of 0 always does."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return all(not now or now + earlier <= 1 for now, earlier in pairs)


@dataclass(frozen=True)
class Units:
    """Exact sums of updates of dense layers.

    Attributes:
        most: units of the widest layer; behind convolutions the inputs of a layer that has fewer.
        first: units of the layer on values of a record that do not change; 0 without such a layer.
        inputs: p, inputs of that layer.
        numbers: q, numbers in all layers.
        times: t, number of times that they are summed.
    """

    most: int
    first: int
    inputs: int
    numbers: int
    times: int

    @property
    def name(self) -> str:
        """Name of the sums, for messages."""
        return f"layers of {self.width} units, or inputs by rounds, trained"

    @property
    def where(self) -> str:
        """Place of the first layer, for messages."""
        return f"the first on {self.inputs} numbers of a record" if self.inputs else "behind convolutions"

    @property
    def width(self) -> int:
        """Width that the number of records is compared with."""
        return max(self.most, min(self.inputs, self.times * self.first), min(self.numbers, self.times))

    def parts(self, records: float, factor: int) -> Parts:
        """Return the fractions that their sums use up of what so many records allow.

        >>> Units(8, 8, 13, 130, 60).parts(120, 2)
        Parts(rounds=Fraction(1, 1), units=Fraction(1, 225), products=Fraction(0, 1))
        >>> Units(8, 8, 13, 130, 60).parts(20, 2).rounds  # units by rounds, 24 times too many
        Fraction(48, 1)
        >>> Units(2, 2, 13, 28, 500).parts(120, 2).rounds  # no more numbers than records, however often
        Fraction(0, 1)
        """
        each = self.first if factor * self.inputs > records else int(factor * self.numbers > records)
        least = max(1, int(records))
        rounds, units = Fraction(factor * self.times * each, least), Fraction(factor * self.most, least)
        return Parts(rounds, units**2 / 4)

    def allowed(self, records: float, factor: int) -> bool:
        """Check whether they may be trained on so many records; see ``Products.allowed``.

        >>> Units(8, 8, 13, 130, 60).allowed(120, 2), Units(8, 8, 13, 130, 61).allowed(120, 2)
        (True, False)
        >>> Units(2, 2, 1024, 2050, 100).allowed(399, 2)
        False
        """
        return records >= factor * self.most and self.parts(records, factor).fit(Parts())


@dataclass(frozen=True)
class ClassSums:
    """An exact sum of features by class.

    Attributes:
        width: d, of the features.
        values: p, the most values of one record.
    """

    width: int
    values: int

    @property
    def name(self) -> str:
        """Name of the sums, for messages."""
        return f"sums of {self.width} features by class"

    def allowed(self, values: float, factor: int) -> bool:
        """Check whether features may be summed over the records of a class.

        Args:
            values: v, of these records.
            factor: m, as for products; 0 allows any.

        >>> ClassSums(312, 13).allowed(48 * 13, 2), ClassSums(313, 13).allowed(48 * 13, 2)
        (True, False)
        """
        return factor * self.width <= values

    def widest(self, values: float, factor: int) -> int:
        """Return the largest width that is allowed for so many values, up to this one."""
        return self.width if factor == 0 else min(self.width, int(values // factor))
