"""The split of hospitals into training and out-of-distribution ones, and a silo's folds.

FedILC trains on the 20 largest hospitals and tests on all others. Here the test hospitals are divided
among the silos: a region has its own; a training hospital has a share of all of them, dealt by size.
Every choice is a pure function of the table, so that all processes agree. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightframe.data.eicu import REGIONS, EicuOptions
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError

SALT = "tightframe-eicu-v1"
_SHOWN = 40

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Stays:
    """The columns of a table of n stays other than the drugs, each of shape (n,).

    Attributes:
        label: 1 where the patient died in hospital, int64.
        hospital: its id, int64.
        stay: a number unique to the stay, int64.
        patient: a number unique to the patient, int64.
    """

    label: NDArray[np.int64]
    hospital: NDArray[np.int64]
    stay: NDArray[np.int64]
    patient: NDArray[np.int64]


@dataclass(frozen=True)
class HospitalSplit:
    """All hospitals of a table, the largest first.

    Attributes:
        train: ids of the training hospitals.
        other: ids of the out-of-distribution hospitals.
        smallest: number of stays of the smallest training hospital.
    """

    train: tuple[int, ...]
    other: tuple[int, ...]
    smallest: int

    def share(self, hospital: int) -> tuple[int, ...]:
        """Return the out-of-distribution hospitals that are dealt to a training hospital.

        In the order of size they are dealt in turn to the training hospitals, the largest to the largest.
        """
        return self.other[self.train.index(hospital) :: len(self.train)]


@dataclass(frozen=True)
class Place:
    """The hospitals of one silo: those it trains on, and those it is tested on."""

    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True)
class Folds:
    """Row numbers of a silo's folds, int64, in record order.

    Attributes:
        train: rows of the training hospitals; repeated if the rarer class is oversampled.
        validation: rows of the same hospitals that are never trained on.
        test: rows of out-of-distribution hospitals.
        left_out: number of stays of these hospitals whose patient also has a stay in a training hospital.
    """

    train: Rows
    validation: Rows
    test: Rows
    left_out: int


def split_hospitals(sizes: Mapping[int, int], train_hospitals: int) -> HospitalSplit:
    """Rank hospitals by size (equal ones by id) and split after the ``train_hospitals`` largest.

    Args:
        sizes: stays by hospital id.

    Raises:
        DataError: TF-208 if no hospital is left to be out of distribution.

    >>> split_hospitals({5: 10, 3: 10, 9: 30, 7: 1}, 2)
    HospitalSplit(train=(9, 3), other=(5, 7), smallest=10)
    """
    ranked = sorted(sizes, key=lambda hospital: (-sizes[hospital], hospital))
    if len(ranked) <= train_hospitals:
        raise DataError(
            f"Expected more than {train_hospitals} hospitals with usable stays, so that some are out of "
            f"distribution, but got {len(ranked)}: set `root` to the tables of all hospitals (a silo uses "
            "only its own stays), or lower `train_hospitals` in the job.",
            code="TF-208",
        )
    train = tuple(ranked[:train_hospitals])
    return HospitalSplit(train, tuple(ranked[train_hospitals:]), sizes[train[-1]])


def of_region(split: HospitalSplit, regions: Mapping[int, str], region: str) -> Place:
    """Return the hospitals of a region.

    Args:
        split: of all hospitals.
        regions: region by hospital id.

    Raises:
        DataError: TF-208 if it has no training hospital, or none out of distribution.
    """
    train = tuple(hospital for hospital in split.train if regions[hospital] == region)
    test = tuple(hospital for hospital in split.other if regions[hospital] == region)
    if not train or not test:
        kind, members = ("training", split.train) if not train else ("out-of-distribution", split.other)
        counts = Counter(regions[hospital] for hospital in members)
        by_region = ", ".join(f"{name}: {counts[name]}" for name in REGIONS)
        raise DataError(
            f"Expected a {kind} hospital in the region {region}, but all {len(members)} are in other regions "
            f"({by_region}): leave this region out of the job's sites, or change `train_hospitals`.",
            code="TF-208",
        )
    return Place(train, test)


def of_hospitals(split: HospitalSplit, hospitals: Sequence[int]) -> Place:
    """Return training hospitals with their shares of the out-of-distribution ones.

    Raises:
        DataError: TF-208 if one of them is not a training hospital, or if their share is empty.
    """
    others = [hospital for hospital in hospitals if hospital not in split.train]
    if others:
        training = ", ".join(map(str, split.train[:_SHOWN]))
        raise DataError(
            f"Expected `hospitals` to be among the {len(split.train)} that train ({training}), but got "
            f"{others}: name some of these, or change `train_hospitals` in the job.",
            code="TF-208",
        )
    test = tuple(other for hospital in hospitals for other in split.share(hospital))
    if not test:
        raise DataError(
            f"Expected out-of-distribution hospitals for {list(hospitals)}, but there are only "
            f"{len(split.other)} for {len(split.train)} that train: lower `train_hospitals` in the job.",
            code="TF-208",
        )
    return Place(tuple(hospitals), test)


def silo_folds(stays: Stays, split: HospitalSplit, place: Place, options: EicuOptions) -> Folds:
    """Return the folds of one silo.

    Validation is 15 % of the training hospitals' stays (``data.validation``), grouped by patient. No
    patient is in two folds, of one silo or of two: a patient with a stay in a training hospital is in no
    test fold, and a patient with stays in the training hospitals of two silos is in no validation fold.

    Args:
        split: of its hospitals.
        place: the silo's hospitals.
        options: with ``equal_sizes`` ``split.smallest`` stays of each training hospital are kept, chosen by a
            fixed hash; with ``oversample_minority`` the rarer class is repeated in the training fold.

    Raises:
        DataError: TF-208 if the training or the test fold is empty.
    """
    trains = np.isin(stays.hospital, split.train)
    own = np.isin(stays.hospital, place.train)
    tested = np.isin(stays.hospital, place.test)
    in_training = np.isin(stays.patient, stays.patient[trains])
    rows = np.flatnonzero(own)
    if options.equal_sizes:
        kept = [_kept(stays, rows[stays.hospital[rows] == h], split.smallest) for h in place.train]
        rows = np.sort(np.concatenate(kept))
    only_here = ~np.isin(stays.patient[rows], stays.patient[trains & ~own])
    held_out = np.zeros(len(rows), dtype=np.bool_)
    groups = [f"patient-{patient}" for patient in stays.patient[rows[only_here]].tolist()]
    held_out[only_here] = validation_mask(stays.label[rows[only_here]], groups)
    train, test = rows[~held_out], np.flatnonzero(tested & ~in_training)
    for name, fold in (("training", train), ("test", test)):
        if len(fold) == 0:
            raise DataError(
                f"Expected stays in the {name} fold of the hospitals {list(place.train)} with the "
                f"out-of-distribution hospitals {list(place.test[:_SHOWN])}, but there are none: give this "
                "silo other hospitals, or change `train_hospitals` in the job.",
                code="TF-208",
            )
    if options.oversample_minority:
        train = _balanced(stays, train)
    return Folds(train, rows[held_out], test, int(np.sum(tested & in_training)))


def _order(stays: Stays, rows: Rows, purpose: str) -> Rows:
    """Order rows by a fixed hash of their stays."""
    keys = [hashlib.sha256(f"{SALT}/{purpose}/{stay}".encode()).digest() for stay in stays.stay[rows]]
    return rows[sorted(range(len(rows)), key=keys.__getitem__)]


def _kept(stays: Stays, rows: Rows, count: int) -> Rows:
    return _order(stays, rows, "equal-sizes")[:count]


def _balanced(stays: Stays, train: Rows) -> Rows:
    """Repeat the training rows of the rarer class; a silo with one class does not change."""
    died = stays.label[train] == 1
    rarer = train[died] if died.sum() * 2 <= len(train) else train[~died]
    missing = len(train) - 2 * len(rarer)
    if len(rarer) == 0 or missing == 0:
        return train
    repeated = np.resize(_order(stays, rarer, "oversample"), missing)
    return np.concatenate([train, repeated])
