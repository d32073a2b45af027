"""The silos of the papers' image sets: shares of files of which every silo has a full copy.

Torch-free until ``records`` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tightframe.data import partition
from tightframe.data.base import FOLDS, DatasetSpec, Progress, SiloData
from tightframe.data.image_sets import (
    ALLOWED,
    BENCHMARK_SETS,
    DERIVED,
    DerivedOptions,
    FolderSite,
    PartitionOptions,
    ShareSite,
)
from tightframe.data.image_sets.derived import Share, color_mnist, rotated_cifar10
from tightframe.data.image_sets.readers import PARTS, READERS, ImageSet, Part
from tightframe.data.looks import Pictured, channels_last, waves_of
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError, JobError
from tightframe.options import listed
from tightframe.phases import Fold, stream_seed

if TYPE_CHECKING:
    from torch.utils.data import Dataset

Options = PartitionOptions | DerivedOptions

MAKERS: dict[str, Callable[..., list[Share]]] = {
    "color_mnist": color_mnist,
    "rotated_cifar10": rotated_cifar10,
}

NORMALISED = {name: (0.5, 0.5) for name in READERS} | {name: (0.0, 1.0) for name in DERIVED}
"""Mean and standard deviation by which pixels in [0, 1] are normalised. They are constants, the same for all
sets and channels, so that they do not depend on the silos' records; derived sets stay in [0, 1]."""


@dataclass
class Files:
    """The files of one set; each part is read once for all shares.

    Attributes:
        root: the folder with the files; None for a set that needs none.
    """

    spec: DatasetSpec
    root: Path | None
    _parts: dict[Part, ImageSet] = field(default_factory=dict)

    def part(self, part: Part) -> ImageSet:
        """Return all images of a part.

        Raises:
            DataError: TF-203, TF-205, TF-206 or TF-207.
        """
        if part not in self._parts:
            reader = READERS[DERIVED.get(self.spec.name, self.spec.name)]
            self._parts[part] = reader(self.root or Path(), part)
        return self._parts[part]

    def subset(self, total: int, count: int | None, seed: int, key: str) -> NDArray[np.int64]:
        """Draw ``count`` of ``total`` indices at random, ascending; all of them for None.

        Raises:
            JobError: TF-101 if there are fewer.
        """
        if count is None:
            return np.arange(total)
        if count > total:
            raise JobError(
                [f"dataset_options.{key}: Expected at most {total}, the number of images, but got {count}"]
            )
        order = np.random.default_rng(stream_seed(seed, "partition", key)).permutation(total)
        return np.sort(order[:count])


@dataclass
class Divided:
    """A set that is divided by the job's partition; see ``partition``."""

    files: Files
    options: PartitionOptions
    parts = PARTS

    @property
    def silos(self) -> int:
        """Number of shares."""
        return self.options.silos

    def share(self, silo: int) -> Share:
        """Return the folds of one silo: 15 % of its training share is its validation fold.

        Raises:
            DataError: TF-203, TF-205, TF-206 or TF-207 for the files.
            JobError: TF-101 if they cannot be divided as the job asks.
        """
        pool, held_out, mine = self.files.part("train"), self.files.part("test"), self._train[silo]
        names = [f"{self.files.spec.name}-train-{index}" for index in mine]
        is_validation = validation_mask(pool.labels[mine], names)
        return Share(
            {
                "train": pool.take(mine[~is_validation]),
                "validation": pool.take(mine[is_validation]),
                "test": held_out.take(self._test[silo]) if self._test else held_out,
            }
        )

    @cached_property
    def _train(self) -> list[NDArray[np.int64]]:
        """Each silo's indices into the training part."""
        options, labels = self.options, self.files.part("train").labels
        chosen = self.files.subset(len(labels), options.subset, options.partition_seed, "subset")
        values: dict[str, Any] = {
            name: getattr(options, name)
            for name in ALLOWED[options.partition]
            if getattr(options, name) is not None
        }
        if options.partition != "iid":
            values["num_classes"] = self.files.spec.num_classes
        divide = getattr(partition, options.partition)
        try:
            parts = divide(labels[chosen], options.silos, seed=options.partition_seed, **values)
        except ValueError as error:
            raise JobError([f"dataset_options: {error}"]) from None
        return [chosen[part] for part in parts]

    @cached_property
    def _test(self) -> list[NDArray[np.int64]]:
        """Each silo's indices into the test part; empty if every silo has the whole part."""
        options, labels = self.options, self.files.part("test").labels
        if options.test == "global" and options.test_subset is None:
            return []
        chosen = self.files.subset(len(labels), options.test_subset, options.partition_seed, "test_subset")
        if options.test == "global":
            return [chosen] * options.silos
        train_labels = [self.files.part("train").labels[share] for share in self._train]
        parts = partition.follow(train_labels, labels[chosen], seed=options.partition_seed)
        return [chosen[part] for part in parts]


@dataclass
class Derived:
    """A set with fixed silos that is made from another set; see ``derived``."""

    files: Files
    options: DerivedOptions

    @property
    def parts(self) -> tuple[Part, ...]:
        """The part of the files that it is made from."""
        return (self.options.source,)

    @property
    def silos(self) -> int:
        """Number of shares."""
        return self.files.spec.num_centers

    def share(self, silo: int) -> Share:
        """Return the folds of one silo.

        Raises:
            DataError: TF-203, TF-205, TF-206 or TF-207 for the files.
            JobError: TF-101 if the subset is larger than the source.
        """
        share = self._shares[silo]
        if self.options.test == "global":
            return share
        own = np.arange(silo, len(share.folds["test"]), self.silos)
        return Share(
            {**share.folds, "test": share.folds["test"].take(own)},
            {**share.environments, "test": share.environments["test"][own]},
        )

    @cached_property
    def _shares(self) -> list[Share]:
        options, source = self.options, self.files.part(self.options.source)
        chosen = self.files.subset(len(source), options.subset, options.partition_seed, "subset")
        make = MAKERS[self.files.spec.name]
        try:
            return make(source.take(chosen), seed=options.partition_seed)
        except ValueError as error:
            raise DataError(f"{error} The files belong to another set.", code="TF-206") from None


Source = Divided | Derived


class BenchmarkSilo:
    """One silo's share; see ``SiloData``. The records are real, so never synthetic.

    Args:
        silo: index of the share.
    """

    synthetic = False

    def __init__(self, source: Source, silo: int) -> None:
        self._pending: list[Source] = [source]
        self._spec, self._root = source.files.spec, source.files.root
        self._parts = source.parts
        self.silo = silo
        self.source = f"{self._spec.title}, silo {silo} of {source.silos} ({source.options.described})"

    @cached_property
    def _share(self) -> Share:
        source = self._pending[0]
        share = source.share(self.silo)
        for fold in ("train", "test"):
            if len(share.folds[fold]) == 0:
                raise DataError(
                    f"Expected records in the {fold} fold of silo {self.silo}, but the partition "
                    f"({source.options.described}) gives it none: choose another partition, or leave "
                    "the silo out.",
                    code="TF-208",
                )
        self._pending.clear()  # frees the records of the other silos
        return share

    def environments(self, fold: Fold) -> NDArray[np.int64]:
        """Return the sub-environment of each record of a derived set, int64 (n,); -1 in its test fold.

        Raises:
            ValueError: for a set that has none.
        """
        if not self._share.environments:
            raise ValueError(f"Expected one of {sorted(DERIVED)}, but {self._spec.name} has no environments.")
        return self._share.environments[fold]

    def labels(self, fold: Fold) -> NDArray[np.int64]:
        """Return the labels of a fold in record order, (n,)."""
        return self._share.folds[fold].labels

    def contents(self) -> Iterator[bytes]:
        """Yield pixels and label of each image of the site's files, in any share of a job."""
        for part in self._parts:
            images = Files(self._spec, self._root).part(part)
            for pixels, label in zip(images.images, images.labels, strict=True):
                content = pixels.tobytes() + label.astype("<i8").tobytes()
                yield Pictured.of(content, waves_of(channels_last(pixels)))

    def check(self, progress: Progress | None = None) -> None:
        """Read all files, which detects missing, truncated and wrong ones.

        Raises:
            DataError: TF-203, TF-205, TF-206, TF-207 or TF-208.
            JobError: TF-101 if the files cannot be divided as the job asks.
        """
        records = sum(len(self._share.folds[fold]) for fold in FOLDS)
        if progress:
            progress(f"read {records} records")

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Dataset[Any]:
        """Return the fold's records: float32 of the set's input shape, and int label."""
        # Torch costs seconds to import; enrolment counts labels without it.
        from tightframe.data.batch_records import BatchRecords
        from tightframe.data.image_sets.pixels import PixelBatches

        mean, std = NORMALISED[self._spec.name]
        images = self._share.folds[fold]
        augmented = augment_seed if self._spec.augments else None
        return BatchRecords(images.labels, PixelBatches(images, mean=mean, std=std, augment_seed=augmented))


def open_site(name: str, site: ShareSite, options: Options) -> BenchmarkSilo:
    """Open the records of a configured site.

    Raises:
        DataError: TF-208 if the job has no such share.
    """
    source = _source(name, site.root if isinstance(site, FolderSite) else None, options)
    if site.silo >= source.silos:
        raise DataError(
            f"Expected `silo` to be 0..{source.silos - 1}, because the job divides {source.files.spec.title} "
            f"among {source.silos} silos, but this site is configured as silo {site.silo}.",
            code="TF-208",
        )
    return BenchmarkSilo(source, site.silo)


def open_share(name: str, silo: int, options: Options) -> BenchmarkSilo:
    """Open the share of silo ``silo`` of a job's roster, of a set that needs no files: real records.

    Raises:
        JobError: TF-101 if the job has more sites than shares.
    """
    source = _source(name, None, options)
    if silo >= source.silos:
        raise JobError(
            [
                f"dataset_options.silos: Expected a share for each site of the job, so more than {silo}, "
                f"but got {source.silos}"
            ]
        )
    return BenchmarkSilo(source, silo)


def open_all(name: str, root: Path | None, values: dict[str, Any]) -> dict[str, SiloData]:
    """Open every silo of a set, reading the files once; see ``image_sets.open_silos``."""
    spec = _spec(name)
    try:
        options: Any = spec.options.model_validate(values)
    except ValidationError as error:
        raise JobError(listed(error, "dataset_options.", spec.options)) from None
    if root is None and spec.twin is None:
        raise DataError(f"Expected `root` to be the folder with the files of {spec.title}, but got none.")
    source = _source(name, root, options)
    digits = len(str(source.silos - 1))
    opened = [BenchmarkSilo(source, silo) for silo in range(source.silos)]
    for silo in opened:
        silo.check()
    return {f"silo-{silo.silo:0{digits}d}": silo for silo in opened}


def _source(name: str, root: Path | None, options: Options) -> Source:
    files = Files(_spec(name), root)
    return Divided(files, options) if isinstance(options, PartitionOptions) else Derived(files, options)


def _spec(name: str) -> DatasetSpec:
    for spec in BENCHMARK_SETS:
        if spec.name == name:
            return spec
    raise JobError([f"Expected a data set of {[spec.name for spec in BENCHMARK_SETS]}, but got {name!r}"])
