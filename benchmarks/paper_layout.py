"""Structure of a paper's table, and the data that replace the paper's at the small scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import eicu
import isic
from comparison import rounds_that_count
from scales import HAM, Scale, scale_of

from methods import Bench, parse_method, parse_partition
from tightframe.config.job import JobConfig, parse_job
from tightframe.data.base import SiloData
from tightframe.data.image_sets import DERIVED, SPECS, open_silos

Size = Literal["cpu", "paper"]
Measure = str
"""``accuracy``: mean of the last rounds, %; ``rate``: of the last model, a fraction; ``loss``, ``auroc`` and
``average_precision`` of the last model; ``personal``, ``valid_classes``, ``label_share`` of own models, %;
``spread``: FedMR's; ``reached``: the round that is as good as FedAvg's best; ``variance``, ``entropy`` and
``environment 1`` to ``9``: FedILC's, over sub-environments of the last model."""

WEIGHTS = (
    "Weights of terms are each method's defaults here unless noted; the values that a paper searched are "
    "not known to us."
)
EICU, TINY, FEMNIST = "eicu", "tiny_imagenet", "femnist"
TITLES = {
    **{name: spec.title for name, spec in SPECS.items()},
    HAM: "the HAM four-centre subset",
    EICU: "the eICU demo",
    TINY: "Tiny-ImageNet",
    FEMNIST: "FeMNIST",
}
NOT_OURS = (TINY, FEMNIST)
"""Sets of the papers that Tightframe does not have; at the small scale others replace them."""
SMALL_AS_THEY_ARE = ("fashion_mnist", "svhn", "cifar10")
"""Data sets of ten classes, used at the small scale too if their files are given."""
SMALL_DERIVED = {name: {"rounds": 60, "epochs": 1, "last": 1} for name in DERIVED}


def numbers(text: str) -> tuple[str | None, ...]:
    """Split printed numbers at commas or blanks; ``-`` stands for a number that is not printed.

    >>> numbers("1.0,- .25")
    ('1.0', None, '.25')
    """
    return tuple(None if item == "-" else item for item in text.replace(",", " ").split())


@dataclass(frozen=True)
class Place:
    """Data, partition and settings of a column, at the paper's scale and at the small one.

    Attributes:
        data: name of the data set.
        partition: as ``methods.parse_partition`` reads it.
        small: the partition at the small scale, of ten classes.
        scale: changes to the paper's scale (``scales.Scale``).
        small_scale: changes to the small scale.
        job: keys of the job, at both scales.
        options: options of the data set, at both scales.
        share: part of the silos that take part in a round, at the paper's scale; None for all.
        small_share: the same at the small scale.
        replaced: whether other data may replace the set at the small scale.
    """

    data: str
    partition: str
    small: str
    scale: Mapping[str, Any] = field(default_factory=dict)
    small_scale: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None
    small_share: float | None = None
    replaced: bool = True


@dataclass(frozen=True)
class Column:
    """A column: a measure at one place, or its mean over several.

    Attributes:
        title: as shown.
        places: data and settings over which the measure is averaged.
        measure: the measure shown.
        variant: selects one of a row's methods if rows have several.
    """

    title: str
    places: tuple[Place, ...]
    measure: Measure = "accuracy"
    variant: str = ""


@dataclass(frozen=True)
class Row:
    """A row: a method and the numbers that the paper prints for it.

    Attributes:
        title: as printed.
        methods: by a column's variant, as ``methods.parse_method`` reads it; "" for all other variants. A
            ``warm_up`` below 1 is a part of the rounds, ``submitting`` the part of the silos that submit
            prototypes. Empty if there is no such method here.
        printed: by column; None if not printed, or not known to us.
        small: other methods at the small scale.
    """

    title: str
    methods: Mapping[str, str]
    printed: tuple[str | None, ...]
    small: Mapping[str, str] = field(default_factory=dict)

    def method(self, variant: str, size: Size) -> str | None:
        """Return the method of a column; None if there is none."""
        known = {**self.methods, **(self.small if size == "cpu" else {})}
        return known.get(variant, known.get(""))


@dataclass(frozen=True)
class Table:
    """One table of a paper.

    Attributes:
        name: as in ``--table``.
        title: names the paper and its table.
        columns, rows: of the table.
        notes: differences from the paper, and uncertainties.
        baseline: title of the row with which others are compared, by paired differences; empty for none.
        first_seed: of its runs.
        seeds: how many if the command names none; None for the scale's number.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    baseline: str = ""
    first_seed: int = 0
    seeds: int | None = None


@dataclass(frozen=True)
class Run:
    """One training: a method at a place with a seed; ``site`` describes how its records are opened.

    Attributes:
        job: everything that determines its numbers.
        data: the data set that is really used.
        root: folder of its files.
        last: number of last rounds over which the score is averaged.
    """

    job: JobConfig
    data: str
    root: Path | None
    last: int

    def open(self) -> dict[str, SiloData]:
        """Return the silos' records."""
        if self.data == EICU:
            assert self.root is not None
            return eicu.silos(self.root)
        if self.data == HAM:
            assert self.root is not None
            return isic.silos(self.root, 32)
        return open_silos(self.data, root=self.root, **self.job.dataset_options)


@dataclass(frozen=True)
class Setting:
    """A place at one of the scales, with the data that are really used.

    Attributes:
        place: of the paper.
        data, partition, root, scale: see ``methods.Bench``.
        written: the partition in the papers' notation.
        share: part of the silos that take part in a round.
    """

    place: Place
    data: str
    partition: Mapping[str, Any]
    written: str
    root: Path | None
    scale: Scale
    share: float | None

    @property
    def described(self) -> str:
        """Return ``digits, P10C2`` and the like, with the number of silos per round if not all."""
        text = f"{TITLES[self.data]}, {self.written}"
        if self.share is None:
            return text
        silos = len(silo_names(self.data, self.partition))
        return f"{text}, {self._drawn(silos)} of {silos} silos per round"

    def run(self, method: str, seed: int) -> Run:
        """Return the run of a method.

        Args:
            method: as ``methods.parse_method`` reads it.
            seed: of the run and the partition.
        """
        name, given = parse_method(method)
        options = dict(given or {})
        if 0 < options.get("warm_up", 1) < 1:
            options["warm_up"] = max(2, round(options["warm_up"] * self.scale.rounds))
        names = silo_names(self.data, self.partition)
        submit = options.pop("submitting", None)
        if self.data == EICU:
            return Run(self._eicu_job(name, options, names, seed), EICU, self.root, self.scale.last)
        bench = Bench(self.data, self.partition, self.root, self.scale, summation="plain")
        values = bench.job(name, options, names, seed, "off").model_dump()
        values["dataset_options"] = {**values["dataset_options"], **self.place.options}
        if self.share is not None:
            values["sites_per_round"] = self._drawn(len(names))
            values["min_sites"] = values["sites_per_round"]
        if submit is not None:
            values["prototype_sites"] = sorted(names)[: max(1, round(submit * len(names)))]
        job = parse_job({**values, **self.place.job})
        return Run(job, self.data, self.root, rounds_that_count(name, self.scale.last))

    def _drawn(self, silos: int) -> int:
        assert self.share is not None
        return max(1, round(self.share * silos))

    def _eicu_job(self, name: str, options: Mapping[str, Any], names: list[str], seed: int) -> JobConfig:
        return parse_job(
            {
                "job_name": f"{name}-eicu",
                "method": name,
                "method_options": dict(options),
                "dataset": EICU,
                "dataset_options": eicu.OPTIONS,
                "model": self.scale.model,
                "model_options": dict(self.scale.model_options),
                "sites": names,
                "min_sites": len(names),
                "rounds": self.scale.rounds,
                "seed": seed,
                "class_rules": "off",
                "summation": "plain",
                "training": eicu.LOCAL,
                "evaluation": {"score_bins": 1024, "models": max(20, self.scale.rounds + 1)},
            }
        )


def silo_names(data: str, partition: Mapping[str, Any]) -> list[str]:
    """Return the names of a data set's silos, without opening them."""
    if data == EICU:
        return sorted(region.lower() for region in eicu.REGIONS)
    if data == HAM:
        return [f"centre-{centre}" for centre in isic.CENTRES]
    number = SPECS[data].num_centers if data in DERIVED else int(partition["silos"])
    width = len(str(number - 1))
    return [f"silo-{place:0{width}}" for place in range(number)]


def missing(name: str) -> str:
    """Return the reason shown for a data set without files."""
    return f"not run: files of {TITLES[name]} not given (--root {name}=FOLDER)"


def setting_of(
    place: Place, size: Size, roots: Mapping[str, Path], changes: Mapping[str, Any]
) -> Setting | str:
    """Return a place at one of the scales, or the reason why it is not available.

    Args:
        place: of the paper.
        size: ``cpu`` or ``paper``.
        roots: folders that exist, by data set.
        changes: to the scale, from the command line.
    """
    if place.data == EICU:
        return _eicu(place, size, roots, changes)
    data, share = place.data, place.share
    needed = next((name for name in (data, DERIVED.get(data, data)) if name in roots), None)
    written = place.partition
    if size == "cpu":
        share = place.small_share
        if (data in SPECS and data not in DERIVED) or data in NOT_OURS:
            if place.replaced and (data not in SMALL_AS_THEY_ARE or needed is None):
                data, needed = "digits", "digits"
            written = place.small
    elif data in NOT_OURS:
        return f"not run: {TITLES[data]} is not a data set of Tightframe"
    if needed is None and data != "digits":
        return missing(DERIVED.get(data, data))
    root = None if data == "digits" else roots[str(needed)]
    partition = parse_partition(written)
    if written == "natural":
        written = "silos of its own"
    values = {**(place.small_scale if size == "cpu" else place.scale)}
    if size == "cpu" and data in SMALL_DERIVED:
        values = {**SMALL_DERIVED[data], **values}
        if data == "color_mnist" and root is not None and not list(root.rglob("train-images*")):
            partition, written = {"source": "test"}, "silos of its own, from the test images"
    scale = replace(scale_of(data, size), **{**values, **changes})
    scale = replace(scale, last=min(scale.last, scale.rounds))
    return Setting(place, data, partition, written, root, scale, share)


def _eicu(place: Place, size: Size, roots: Mapping[str, Path], changes: Mapping[str, Any]) -> Setting | str:
    if size == "paper":
        return "not run: the paper's eICU table is not published; the demo runs with --scale cpu"
    if EICU not in roots:
        return missing(EICU)
    scale = Scale("mlp", {"widths": [], "single_logit": True}, 30, 1, 32, 0.03, last=1)
    return Setting(place, EICU, {}, "regions", roots[EICU], replace(scale, **changes), None)
