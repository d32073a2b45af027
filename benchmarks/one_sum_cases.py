"""Data sets of ``one_sum.py``: their silos, and the constants of each method on them.

Constants were chosen on other records than those of the tables: with seeds from 1000 on where a seed draws
the partition, by cross-validation on training and validation records where the folds are fixed. Those of
DP-SGD are of ``privacy_utility.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import eicu
import isic
import numpy as np
from privacy_attacks import stacked
from privacy_utility import SCALES as PRIVATE_SCALES
from privacy_utility import cut
from scales import CPU_SCALES, Scale

from tightframe import data, methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.data import partition as partitions
from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS, SiloData
from tightframe.data.heart import FEATURES
from tightframe.data.image_sets import open_silos
from tightframe.data.image_sets.readers import read_mnist
from tightframe.phases import Fold

Noise = Literal["own", "shared"]
PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "even4": {"partition": "iid", "silos": 4},
    "P10C2": {"partition": "class_disjoint", "silos": 10, "classes_per_silo": 2},
    "P10C1": {"partition": "class_disjoint", "silos": 10, "classes_per_silo": 1},
    "dirichlet0.05": {"partition": "dirichlet", "silos": 10, "alpha": 0.05},
}
NATURAL = "natural"
EVEN = 300
"""Training records of each silo of ``even4``."""
DELTA = 1e-5
ONE_SUM = ("fed3r", "fedcgs", "fedncm")
HEAD_ONLY = (*ONE_SUM, "fedsgd")
"""Methods that get the case's frozen encoder."""
RATES: Mapping[float, float] = {8.0: 0.5, 4.0: 0.5, 2.0: 0.2, 1.0: 0.2}
"""DP-SGD's learning rate of the digits, by epsilon (docs/benchmarks.md)."""
STEPS, FEWEST_STEPS = 20, 30
"""FedSGD's rounds for each epsilon, and at least: more steps need more noise in each."""
EXACT_STEPS = 100
EXACT: Mapping[str, Any] = {"optimizer": "adam", "learning_rate": 0.1}
"""FedSGD's steps and options without privacy, where gradients are not clipped: those that it documents."""
HEART_RANGES: Mapping[str, tuple[float, float]] = {
    "age": (20, 90),
    "trestbps": (80, 200),
    "chol": (0, 600),
    "thalach": (60, 210),
    "oldpeak": (-3, 7),
}
"""Of the columns that are not 0 or 1: plausible ones, from no record."""
MAPS: Mapping[str, Any] = {"keep": "maps", "length": 8}
"""Chosen, with J and width, by cross-validation on the 1,200 training records of seeds 101 and 102."""
MNIST_TEST = 2000
SPLIT_SEED = 7


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder; ``drawn`` if it has a seed, which is then the run's."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False

    def values(self, seed: int) -> dict[str, Any]:
        """Return the job's values."""
        return {
            "model": self.model,
            "model_options": {**self.options, **({"seed": seed} if self.drawn else {})},
        }


@dataclass(frozen=True)
class Case:
    """A data set.

    Attributes:
        name: as in ``--data``.
        dataset: registered name.
        open: (partition, seed) -> the silos' records.
        dataset_options: (partition, seed) -> of the job.
        divided: whether a partition is drawn.
        encoder, private_encoder: of methods that train no network.
        scale, private_scale: network and training of the others.
        options: method -> its options.
        release: values of ``privacy`` for methods of one release.
        score_bins: of the evaluation.
    """

    name: str
    dataset: str
    open: Callable[[str, int], dict[str, SiloData]]
    dataset_options: Callable[[str, int], dict[str, Any]]
    divided: bool
    encoder: Encoder
    private_encoder: Encoder
    scale: Scale
    private_scale: Scale
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)
    score_bins: int = 256

    def silos(self, partition: str, seed: int) -> dict[str, SiloData]:
        """Return the silos' records; all methods of a seed share them."""
        silos = self.open(partition, seed)
        return silos if self.divided or partition == NATURAL else redivided(silos, partition, seed)

    def noises(self, method: str, epsilon: float | None) -> tuple[Noise | None, ...]:
        """Return whose noise a method's rows at an epsilon have."""
        if epsilon is None:
            return (None,)
        return ("own", "shared") if method == "fedsgd" else ("shared",) if method in ONE_SUM else ("own",)

    def job(
        self,
        method: str,
        options: Mapping[str, Any],
        names: Sequence[str],
        partition: str,
        seed: int,
        epsilon: float | None,
        noise: Noise | None,
        summation: str,
    ) -> JobConfig:
        """Return a method's job.

        Args:
            method: its name.
            options: in place of the case's.
            names: of the silos.
            partition: of the silos' records.
            seed: of the run, of the partition and of what an encoder draws.
            epsilon: of the whole job; None for none.
            noise: see ``noises``.
            summation: ``secure`` or ``plain``.

        Raises:
            JobError: listing everything that is wrong.
        """
        scale = self.scale if epsilon is None else self.private_scale
        rate = scale.learning_rate if epsilon is None else RATES.get(epsilon, scale.learning_rate)
        values: dict[str, Any] = {
            "job_name": f"{method}-{self.name}".replace("_", "-"),
            "method": method,
            "method_options": dict(options or self.options.get(method, {})),
            "dataset": self.dataset,
            "dataset_options": self.dataset_options(partition, seed),
            "sites": list(names),
            "min_sites": len(names),
            "seed": seed,
            "class_rules": "off",
            "summation": summation,
            "threads": 1,
            "evaluation": {"score_bins": self.score_bins},
            "training": {
                "epochs": scale.epochs,
                "batch_size": scale.batch_size,
                "learning_rate": rate,
                "weight_decay": scale.weight_decay,
                "augment": scale.augment,
            },
        }
        if method == "fedsgd":  # a round is one step
            values["training"]["epochs"] = 1
            if epsilon is None and not options:
                values["method_options"] = dict(EXACT)
        if method in HEAD_ONLY:
            steps = EXACT_STEPS if epsilon is None else max(FEWEST_STEPS, round(STEPS * epsilon))
            encoder = self.encoder if epsilon is None else self.private_encoder
            values |= {"rounds": 1 if method in ONE_SUM else steps, **encoder.values(seed)}
        else:
            values |= {
                "rounds": scale.rounds,
                "model": scale.model,
                "model_options": dict(scale.model_options),
            }
            if methods.get(method).head is not None:
                values["model_options"].pop("single_logit", None)
        if epsilon is not None:
            private: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA}
            if method == "fedsgd":
                private["noise"] = noise
                values |= {"whole_sums": True} if (noise, summation) == ("shared", "secure") else {}
            if method in ONE_SUM:
                private |= self.release
            values |= {"weights": "uniform", "privacy": private}
        return parse_job(values)


def redivided(silos: Mapping[str, SiloData], partition: str, seed: int) -> dict[str, SiloData]:
    """Return the records of natural silos, all together divided by a partition; tests follow their classes.

    Args:
        silos: with folds of their own, which stay folds.
        partition: of ``PARTITIONS``; ``even4`` takes at most 300 training records a silo.
        seed: of the draws.

    Raises:
        SystemExit: if no draw of the partition gives every silo enough records.
    """
    values = {key: value for key, value in PARTITIONS[partition].items() if key != "partition"}
    draw = getattr(partitions, str(PARTITIONS[partition]["partition"]))
    pooled: dict[Fold, Any] = {}
    for fold in FOLDS:
        parts = [stacked(silo, fold) for silo in silos.values() if len(silo.labels(fold))]
        none = tuple(item[:0] for item in pooled["train"]) if not parts else ()
        pooled[fold] = none or tuple(np.concatenate(items) for items in zip(*parts, strict=True))
    try:
        taken = {"train": draw(pooled["train"][1], **values, seed=seed)}
    except ValueError as error:
        raise SystemExit(f"{partition} does not divide these records: {error}") from None
    trained = [pooled["train"][1][part] for part in taken["train"]]
    for fold in ("validation", "test"):
        taken[fold] = partitions.follow(trained, pooled[fold][1], seed=seed)
    classes = int(max(labels.max(initial=0) for _, labels in pooled.values())) + 1
    made: dict[str, SiloData] = {}
    for place in range(len(trained)):
        folds: dict[Fold, Any] = {}
        for fold in FOLDS:
            part = taken[fold][place][: EVEN if (fold, partition) == ("train", "even4") else None]
            folds[fold] = tuple(item[part] for item in pooled[fold])
        made[f"site-{place + 1}"] = ArrayData(
            folds, source=f"{partition}, part {place + 1}", num_classes=classes
        )
    return made


def _of_images(name: str, root: Path | None) -> dict[str, Any]:
    """Return how the silos of a set without natural ones are opened."""

    def options(partition: str, seed: int) -> dict[str, Any]:
        return {**PARTITIONS[partition], "partition_seed": seed, "test": "own"}

    def opened(partition: str, seed: int) -> dict[str, SiloData]:
        silos = open_silos(name, root=root, **options(partition, seed))
        if partition == "even4":
            return {key: cut(silo, EVEN) for key, silo in silos.items()}
        return silos

    return {"name": name, "dataset": name, "open": opened, "dataset_options": options, "divided": True}


def digits(root: Path) -> Case:
    """Return scikit-learn's digits; they need no files."""
    return Case(
        **_of_images("digits", None),
        encoder=Encoder("random_features", {"width": 1024}, drawn=True),
        private_encoder=Encoder("scattering", {"J": 1, **MAPS, "width": None}),
        scale=CPU_SCALES["digits"],
        private_scale=PRIVATE_SCALES["digits"],
    )


_WRITTEN: dict[Path, tempfile.TemporaryDirectory[str]] = {}


def mnist(root: Path) -> Case:
    """Return MNIST's 10,000 test images: 8,000 train, the others test, by a fixed draw."""
    source = root / "mnist_t10k"
    if source not in _WRITTEN:
        images = read_mnist(source, "test")
        order = np.random.default_rng(SPLIT_SEED).permutation(len(images.labels))
        folder = tempfile.TemporaryDirectory(prefix="tightframe-")
        for stem, kept in (("train", order[MNIST_TEST:]), ("t10k", order[:MNIST_TEST])):
            pixels = np.ascontiguousarray(
                np.asarray(images.images)[kept].reshape(len(kept), 28, 28), np.uint8
            )
            for kind, values in (
                ("images-idx3", pixels),
                ("labels-idx1", images.labels[kept].astype(np.uint8)),
            ):
                header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
                (Path(folder.name) / f"{stem}-{kind}-ubyte").write_bytes(header + values.tobytes())
        _WRITTEN[source] = folder
    return Case(
        **_of_images("mnist", Path(_WRITTEN[source].name)),
        encoder=Encoder("scattering", {"J": 3, "width": 256}, drawn=True),
        private_encoder=Encoder("scattering", {"J": 3, **MAPS, "width": 128}, drawn=True),
        scale=CPU_SCALES["digits"],
        private_scale=PRIVATE_SCALES["digits"],
    )


def ham(root: Path) -> Case:
    """Return the HAM four-centre subset at 32 px."""

    def opened(partition: str, seed: int) -> dict[str, SiloData]:
        return isic.silos(root, 32)

    pictures = {"J": 3, "colours": "rgb"}
    balanced = {"priors": "balanced"}
    return Case(
        "ham",
        "fed_isic2019",
        opened,
        lambda partition, seed: {"image_size": 32},
        divided=False,
        encoder=Encoder("scattering", {**pictures, "width": 256}, drawn=True),
        # Best at epsilon 8 and 2 by cross-validation on training and validation records, seeds 101 to 103.
        private_encoder=Encoder(
            "scattering", {**pictures, "J": 4, "reference": "noise", "width": 64}, drawn=True
        ),
        scale=CPU_SCALES["ham"],
        private_scale=PRIVATE_SCALES["ham"],
        options={"fed3r": balanced, "fedcgs": {**balanced, "shrinkage": 0.4}},
        release={"count_weight": 0.3},
    )


def within(silo: SiloData, low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> SiloData:
    """Return a silo's table with each column's declared range brought to [-1, 1]."""
    folds: dict[Fold, Any] = {}
    for fold in FOLDS:
        inputs, labels = stacked(silo, fold)
        folds[fold] = (((2 * inputs - low - high) / (high - low)).astype(np.float32), labels)
    return ArrayData(folds, source=silo.source, num_classes=2)


def heart(root: Path) -> Case:
    """Return Fed-Heart-Disease's four centres; under privacy nothing is standardised by moments."""
    spec = data.get("fed_heart_disease")
    folder = str((root / "fed_heart_disease").resolve())

    low = np.array([HEART_RANGES.get(name, (0, 1))[0] for name in FEATURES])
    high = np.array([HEART_RANGES.get(name, (0, 1))[1] for name in FEATURES])

    def opened(partition: str, seed: int) -> dict[str, SiloData]:
        sites = {f"centre-{n}": spec.site.model_validate({"root": folder, "center": n}) for n in range(4)}
        return {name: within(spec.open(site, spec.options()), low, high) for name, site in sites.items()}

    network = {"widths": [16], "standardise": True}
    return Case(
        "heart",
        "fed_heart_disease",
        opened,
        lambda partition, seed: {},
        divided=False,
        encoder=Encoder("identity", {"standardise": True}),
        private_encoder=Encoder("identity"),
        scale=Scale("mlp", network, 10, 4, 16, 0.03, last=1),
        private_scale=Scale("mlp", {"widths": [16]}, 10, 2, 64, 0.2, last=1),
    )


def eicu_demo(root: Path) -> Case:
    """Return the eICU demo's five regions, tested on all other hospitals."""
    options = {"drugs": 920}
    network = {"widths": [], "single_logit": True}
    local = eicu.LOCAL
    scale = Scale("mlp", network, 30, local["epochs"], local["batch_size"], local["learning_rate"], last=1)
    balanced = {"priors": "balanced"}
    return Case(
        "eicu",
        "eicu",
        lambda partition, seed: eicu.silos(root, options),
        lambda partition, seed: dict(options),
        divided=False,
        encoder=Encoder("identity"),
        private_encoder=Encoder("random_features", {"width": 64}, drawn=True),
        scale=Scale(**{**vars(scale), "weight_decay": local["weight_decay"]}),
        private_scale=Scale("mlp", network, 10, 2, 64, 0.2, last=1),
        options={"fed3r": balanced, "fedcgs": {**balanced, "shrinkage": 0.4}},
        score_bins=1024,
    )


CASES: Mapping[str, Callable[[Path], Case]] = {
    "digits": digits,
    "mnist": mnist,
    "ham": ham,
    "eicu": eicu_demo,
    "heart": heart,
}
