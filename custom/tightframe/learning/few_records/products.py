"""How many records must stand behind exact sums of features and of their products, and how many surely do.

The sum of ``phi phi^T`` over n records has rank n at most. With a width d above n its null space vanishes at
the records' features and hardly elsewhere, so that records are found by least squares from random starts. So
such a sum needs, of the records surely in it,

1. ``n >= m d``: full rank with a margin, and so no null space to search;
2. ``d (d + 1) / 2 + C d + s <= v``: no more numbers than the records have values, with the s moments of
   inputs that the job opens before.

How many values a record has, each hospital counts of its own (``record_values``) and tells nobody: of a total
of rows times values, the opened rows times most hospitals' number leave one hospital's own number of records.
So each checks by itself that its records have, on average, what the rule needs of each: then all have enough.
A silo whose records have fewer fails inside the sum (``rounds.few_records``). On declared numbers, v is n p
with the most that a record of the job can have.

What silos declare is public, and up to c of them may lie. All declared numbers but the c largest add up to no
more than what the honest silos have, whoever lies: the honest silos' own are at least as many numbers, and
none of them is above its records. But they hold records that do not count: those of classes withheld by the
class rules, and repeats (``distinct_rows``). So an exchange before the sum counts the different rows that do.

Features that training moves are others in each job, so of these the numbers of all jobs add up, each as a
part of its own v. Frozen ones are the same, or another release profile (``rounds.sums.release``).

The sum of ``phi`` itself over the records of a class is d numbers of them. With as many as the records have
values, the records are found from it alone. So of each class

3. ``m d <= v``: m times fewer numbers than values.

In training, the sum of the gradients of a dense layer is, of each unit, a sum of the layer's inputs over the
records that the unit is active for. With more units than records the records' patterns of active units span
a space that hardly any other row's pattern lies in, and the units by rounds have one decomposition into rank
one: of 339 records of 13 columns, numbers too, 324 were read from an honest job with 4,096 units, with label.
And in each round a unit's sum is another combination of the layer's inputs. Where a record's inputs never
change (its own values, frozen features), as many combinations as records span what the records span: of a
head of 5 classes on 1,024 random features 321 of 339 were read after 100 rounds. So, of a layer that is dense
on a record's inputs or on frozen features, in t rounds, and of the units of those after it,

4. ``n >= m d`` units, as many inputs or units by rounds, ``n >= m min(p, t d)``, and as many numbers or
   rounds, ``n >= m min(q, t)``: as many rounds as records span what the records' gradients span (of 36 units,
   in 130 rounds, 54 of 102 records were read).

Behind trained convolutions features change, but of one sum the argument holds: of fewer records than a
layer's inputs and units, rows span their features and columns their slopes. Of 90 records 22 were read from
one total of a ViT's last layers. So there, of each layer, ``n >= m min(units, inputs)``. A convolution that
sees k places of a record is dense on k n rows, so that it takes a k-th of the records: at one or two by two
places, as VGG11's last on 32 x 32 pixels, it is nearly a dense layer (its features tell which of 80 records
were in one total, AUC 0.98). Pixels never change, and where it is on these 4 holds with a k-th of its units
and inputs: of a ViT whose one patch is the picture, of 16 units, 20 rounds span 120 pictures and no others.

Another job over the same records, which differs in the seed, has other combinations of the same rows: of two
jobs of 50 rounds each, which 4 allows, 311 of 339 records were read. So of all jobs

5. rounds, and units by rounds, add up, each as its part of what its own n allows, to 1 at most: fewer
   combinations than records do not span these, and those of many records say little of a few of them;
6. the squares of ``m d / n`` add up to 4 at most. By its activations a row is more or less like a record, in
   each job by itself, since each draws its batches anew; but what jobs say of it adds up. Of 120 records 88
   to 110 were more like one than any row that 150 searches from chance ended at, with 2n units in one job;
   with n/2 in one or two jobs 0 or 1, in four 0 to 5, in twelve (m = 2, as many rounds as 5 allows) 1 to 18;
   of 2,000 such searches one came near a record. A test of 2,000 rows by all jobs (AUC 0.71 to 0.86 in one of
   n/2, 0.89 to 0.98 in four, 0.71 to 0.83 in four of n/4) no rule here prevents.

All that is of the records *behind each number of one sum*. A job can have these be few: by a `sampling_rate`,
by dropout, which keeps most records from a unit, or by a term that pulls weights back so strongly (FedProx's
mu, a weight decay, of about 1 / rate) that an update is that of its last batches. Of 216 records and 72
units, in five rounds, 95 were in clear at a dropout of 0.99, and all that were drawn (a rate of 1e-6 is one
record a silo) or in the last batch of one. So n is that part (``Behind``), of each silo `min_class_count` at
least. After a drop-out it is the survivors'. Which records have a loss each silo sees for itself
(``unit_records``). Of methods that sum an update in two forms a round counts twice.

Class sums in training are other numbers of a class's few records in each round. CReFF's class gradients are
of the model received, which all know: 60 rounds of 96 units at rate 1 told a colluding hospital 4 of the 10
records of a class at two others (all 13 columns to 0.1 deviations), 12 of 64 all of 4. What counts is numbers
against values: of two records (26 values) 33 numbers told both, of four (52) 65 one and 129 all, 33 none.
The others' sums are of each silo's trained model: at a small rate (3e-4) 40 rounds of 200 units fix ten
records to 0.006 deviations (by the slopes at the records), though least squares from random starts found
none; at usual rates to 0.04 (0.003) and 0.2 (0.03). No exchange counts a class's records before them. So each
silo holds a class only if its own records of it have

7. ``m / 2`` values for each number that a whole run tells of a class, and one run takes all of it: with
   another honest holder there are twice as many, and a liar's flags leave one, whose records are not fewer.

No colluders' share comes off in 3: a rare class would never pass. Of a rare class a small hospital's few
records hardly vary. So a class passes too if a silo alone has ``ALONE`` times as many values of it as
features: a flag says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction

COUNTED, ROWS = "products/counts", "products/rows"
"""In ``ServerState.extra``: the opened numbers of different rows in a sum of features, each of the first
class that has it (C,), and of each class whatever others have (C,)."""
ENOUGH = "products/enough"
"""The same, of silos that alone have ``ALONE`` times as many values of a class as features (C,)."""
ALONE = 4
"""As the strictest profile's ``records_per_feature``; a silo with a larger one relies on its own values."""
LEAVING, LOSING = "products/leaving", "products/losing"
"""In a withdrawal: how many of these leave, and of which classes (C,)."""


@dataclass(frozen=True)
class Behind:
    """Which of a silo's records are behind each number of a sum in training.

    Attributes:
        share: the part that is drawn, and that dropout does not keep from a unit.
        most: records of the steps that its update does not forget.
    """

    share: float = 1.0
    most: float = math.inf

    def of(self, records: float) -> float:
        """Return how many of so many.

        >>> Behind(0.5, 150).of(200), Behind().of(200)
        (75.0, 200.0)
        """
        return self.share * min(records, self.most)


@dataclass(frozen=True)
class Sizes:
    """Public numbers of records behind a sum.

    Attributes:
        declared: of all silos enrolled, as they declare them.
        colluding: the most that silos who may lie can have in it: the c largest declared numbers.
        each: silo's declared number, falling; empty of one silo.
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
        """Return how many records of honest silos are surely behind each number of a sum in training.

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
        """Return how many records of honest silos are surely in a sum.

        Args:
            counted: the opened number of records that the sum is of; None if it is not known.

        >>> Sizes.of({"a": 300.0, "b": 200.0, "c": 100.0}, 1).sure(450.0)
        150.0
        """
        known = self.declared if counted is None else min(counted, self.declared)
        return max(0.0, known - self.colluding)


@dataclass(frozen=True)
class Products:
    """An exact sum of products of features.

    Attributes:
        width: d, of the features.
        classes: C; sums of features by class are opened with the products.
        values: p, the most numbers of one record.
        moments: s, other numbers that the job opens of the same records.
    """

    width: int
    classes: int
    values: int
    moments: int = 0

    @property
    def name(self) -> str:
        """What is summed, in words."""
        return f"products of {self.width} features"

    @property
    def numbers(self) -> int:
        """How many numbers are opened."""
        return self.width * (self.width + 1) // 2 + self.classes * self.width + self.moments

    def allowed(self, records: float, factor: int, values: float | None = None) -> bool:
        """Check whether they may be summed over so many records.

        Args:
            records: n, those surely in the sum.
            factor: m, ``records_per_feature`` of a site's policy; 0 allows any.
            values: v, of these records; None for the most.

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
    """What exact sums in and after training take of what the records behind them allow, over all jobs.

    Attributes:
        rounds: by 5; above 1 is refused.
        units: the same, by 6.
        products: the same of numbers of products, by 2.
    """

    rounds: Fraction = Fraction(0)
    units: Fraction = Fraction(0)
    products: Fraction = Fraction(0)

    @property
    def largest(self) -> Fraction:
        """The part that is used up first."""
        return max(astuple(self))

    def fit(self, before: Parts) -> bool:
        """Check whether these fit beside what earlier ones took; what takes nothing always does."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return all(not now or now + earlier <= 1 for now, earlier in pairs)


@dataclass(frozen=True)
class Units:
    """Exact sums of updates of dense layers.

    Attributes:
        most: units of the widest; behind convolutions inputs, of a layer that has fewer.
        first: units of the layer on what does not change of a record; 0 if there is none.
        inputs: p, of that layer.
        numbers: q, of all layers.
        times: t, how often they are summed.
    """

    most: int
    first: int
    inputs: int
    numbers: int
    times: int

    @property
    def name(self) -> str:
        """What is summed, in words."""
        return f"layers of {self.width} units, or inputs by rounds, trained"

    @property
    def where(self) -> str:
        """What the first is on, in words."""
        return f"the first on {self.inputs} numbers of a record" if self.inputs else "behind convolutions"

    @property
    def width(self) -> int:
        """What the records are held against."""
        return max(self.most, min(self.inputs, self.times * self.first), min(self.numbers, self.times))

    def parts(self, records: float, factor: int) -> Parts:
        """Return the parts that their sums take of what so many records allow in all.

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
        values: p, the most numbers of one record.
    """

    width: int
    values: int

    @property
    def name(self) -> str:
        """What is summed, in words."""
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
