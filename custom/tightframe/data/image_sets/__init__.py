"""The papers' image sets as data sets of Tightframe: a job names the partition, a site its share.

These sets have no natural silos, so a job's ``dataset_options`` define how the records are divided, and
a site's entry names the folder of its copy of the files and its share. ``digits`` needs no files: a
simulation has these real records without any configuration. Torch-free; the modules that read records
are imported when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from tightframe.data.base import DatasetSpec, SiloData, SitePath
from tightframe.data.forms import PictureForm, Pixels
from tightframe.data.partition import DirichletVariant
from tightframe.options import StrictModel
from tightframe.registry import deferred

Partition = Literal["iid", "class_disjoint", "dirichlet", "shards"]
TestFold = Literal["global", "own"]

NEEDED: dict[Partition, tuple[str, ...]] = {
    "iid": (),
    "class_disjoint": ("classes_per_silo",),
    "dirichlet": ("alpha",),
    "shards": ("classes_per_silo",),
}
ALLOWED: dict[Partition, tuple[str, ...]] = {
    **NEEDED,
    "dirichlet": ("alpha", "variant", "min_size"),
}
_OF_ONE_PARTITION = ("classes_per_silo", "alpha", "variant", "min_size")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FASHION = _names("T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle-boot")
CIFAR10 = _names("airplane automobile bird cat deer dog frog horse ship truck")
CIFAR100 = _names(
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm"
)
DIGITS = _names("0 1 2 3 4 5 6 7 8 9")


class PartitionOptions(StrictModel):
    """A job's options for a set without natural silos.

    Attributes:
        partition: ``iid``, ``class_disjoint`` (PrhoCsigma), ``dirichlet`` or ``shards`` (Cx-100-c);
            see ``data.partition``.
        silos: number of shares; a job may leave some of them out.
        partition_seed: of the partition, the subsets and the division of the test set; independent of the
            job's seed, so that several runs can share a partition.
        classes_per_silo: of ``class_disjoint`` (sigma) and of ``shards`` (c).
        alpha: of ``dirichlet``.
        variant: of ``dirichlet``: ``fednh`` (default), ``fedetf`` or ``fedmr``.
        min_size: of ``dirichlet``: records of the smallest silo, validation included; 10 by default,
            none with ``fedetf``.
        subset: total number of training images used, drawn at random; None uses all.
        test_subset: total number of test images used, drawn at random; None uses all.
        test: ``global`` tests every silo on the whole test set, as in the papers: pooled counts include each
            image once for every silo, which does not change accuracy. With ``own`` it is divided like the
            training set, so that pooled results are those of the whole test set after one pass over it.
    """

    partition: Partition = "iid"
    silos: int = Field(default=10, ge=1, le=1000)
    partition_seed: int = Field(default=0, ge=0, lt=2**31)
    classes_per_silo: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    variant: DirichletVariant | None = None
    min_size: int | None = Field(default=None, ge=0)
    subset: int | None = Field(default=None, ge=1)
    test_subset: int | None = Field(default=None, ge=1)
    test: TestFold = "global"

    @model_validator(mode="after")
    def _fits_the_partition(self) -> PartitionOptions:
        given = [name for name in _OF_ONE_PARTITION if getattr(self, name) is not None]
        missing = [name for name in NEEDED[self.partition] if name not in given]
        extra = [name for name in given if name not in ALLOWED[self.partition]]
        if missing or extra:
            problems = [f"no {name}" for name in missing] + extra
            raise ValueError(
                f"Expected the partition {self.partition!r} with the required options "
                f"{list(NEEDED[self.partition])} and no others than {list(ALLOWED[self.partition])}, but got "
                f"{', '.join(problems)}"
            )
        if self.variant == "fedetf" and self.min_size is not None:
            raise ValueError(
                "Expected no min_size with the variant 'fedetf', which has no minimum, but got "
                f"{self.min_size}: leave it out"
            )
        return self

    @property
    def described(self) -> str:
        """One line for reports: ``class_disjoint, classes_per_silo 2, seed 0``."""
        own = [
            f"{name} {getattr(self, name)}" for name in _OF_ONE_PARTITION if getattr(self, name) is not None
        ]
        return ", ".join([self.partition, *own, f"seed {self.partition_seed}"])


class DerivedOptions(StrictModel):
    """A job's options for Color-MNIST and Rotated-CIFAR10, whose silos are fixed.

    Attributes:
        partition_seed: of every draw that makes the set.
        source: the part of the original set that it is made from: ``train`` as published, or
            ``test`` for a small version.
        subset: number of images of the source used, drawn at random; None uses all.
        test: ``global`` tests every silo on all out-of-distribution records, as published; with
            ``own`` they are divided evenly.
    """

    partition_seed: int = Field(default=0, ge=0, lt=2**31)
    source: Literal["train", "test"] = "train"
    subset: int | None = Field(default=None, ge=100)
    test: TestFold = "global"

    @property
    def described(self) -> str:
        """One line for reports: ``made from 100 of the train images, seed 0``."""
        used = "" if self.subset is None else f"{self.subset} of the "
        return f"made from {used}{self.source} images, seed {self.partition_seed}"


class ShareSite(StrictModel):
    """A site's entry for a set that needs no files.

    Attributes:
        silo: index of its share, from 0.
    """

    silo: int = Field(ge=0, lt=1000)


class FolderSite(ShareSite):
    """A site's entry for a set that it has as files.

    Attributes:
        root: the folder with the downloaded files, under their publishers' names.
        silo: index of its share, from 0.
    """

    root: SitePath


def _shape(shape: tuple[int, ...]) -> Callable[[Any], tuple[int, ...]]:
    return lambda _options: shape


AUGMENTED = frozenset({"cifar10", "cifar100"})
"""Sets whose training images are shifted and mirrored."""


def form(name: str, shape: tuple[int, ...], options: Any) -> PictureForm:
    """Return how records are made of pictures.

    Args:
        shape: of a record, (channels, height, width), with 1 or 3 channels.
        options: of the job; they change no transform.
    """
    channels, height, width = shape
    return PictureForm(
        channels=3 if channels == 3 else 1,
        transform=partial(_record, name),
        said=f"{'RGB' if channels == 3 else 'grey'} pictures of {width} x {height} pixels",
        size=(height, width),
    )


def _record(name: str, pixels: Pixels) -> Any:
    from tightframe.data.image_sets.pixels import PixelBatches
    from tightframe.data.image_sets.readers import ImageSet
    from tightframe.data.image_sets.silos import NORMALISED

    mean, std = NORMALISED[name]
    images = ImageSet(pixels.transpose(2, 0, 1)[None].copy(), np.zeros(1, np.int64))
    return PixelBatches(images, mean=mean, std=std)([0])[0]


def _spec(
    name: str,
    title: str,
    classes: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    silos: int = 10,
    files: bool = True,
) -> DatasetSpec:
    opener = deferred("tightframe.data.image_sets.silos", "open_site")
    share = deferred("tightframe.data.image_sets.silos", "open_share")
    return DatasetSpec(
        name=name,
        title=title,
        class_names=classes,
        options=DerivedOptions if name in DERIVED else PartitionOptions,
        site=FolderSite if files else ShareSite,
        input_shape=_shape(shape),
        open=partial(opener, name),
        twin=None if files else partial(share, name),
        num_centers=silos,
        no_patients="its files do not name the person behind an image",
        form=None if shape[0] == 2 else partial(form, name, shape),
        augments=name in AUGMENTED,
    )


DERIVED: dict[str, str] = {"color_mnist": "mnist", "rotated_cifar10": "cifar10"}
"""Name of each derived set -> the set that it is made from."""

BENCHMARK_SETS: list[DatasetSpec] = [
    _spec("digits", "scikit-learn's handwritten digits", DIGITS, (1, 8, 8), files=False),
    _spec("mnist", "MNIST", DIGITS, (1, 28, 28)),
    _spec("fashion_mnist", "Fashion-MNIST", FASHION, (1, 28, 28)),
    _spec("cifar10", "CIFAR-10", CIFAR10, (3, 32, 32)),
    _spec("cifar100", "CIFAR-100", CIFAR100, (3, 32, 32)),
    _spec("svhn", "SVHN", DIGITS, (3, 32, 32)),
    _spec("color_mnist", "Color-MNIST", ("5 to 9", "0 to 4"), (2, 14, 14), silos=5),
    _spec("rotated_cifar10", "Rotated-CIFAR10", CIFAR10, (3, 16, 16), silos=3),
]

SPECS = {spec.name: spec for spec in BENCHMARK_SETS}


def open_silos(dataset: str, *, root: Path | str | None = None, **options: Any) -> dict[str, SiloData]:
    """Open all silos of one of these sets, for notebooks and benchmarks; the files are read once.

    ::

        options = {"partition": "class_disjoint", "silos": 10, "classes_per_silo": 2}
        silos = open_silos("digits", **options)
        federation.run("fedavg", silos, 5, dataset="digits", dataset_options=options, class_rules="off")

    Args:
        dataset: a name of ``BENCHMARK_SETS``.
        root: the folder with the files; None for ``digits``.
        **options: of ``PartitionOptions``, or of ``DerivedOptions``.

    Returns:
        ``silo-0``, ``silo-1``, ... (``silo-00`` where there are more than ten) -> its records.

    Raises:
        JobError: for an unknown set, or options that are unknown or cannot be met.
        DataError: if files are missing or damaged.
    """
    from tightframe.data.image_sets.silos import open_all

    return open_all(dataset, None if root is None else Path(root), options)
