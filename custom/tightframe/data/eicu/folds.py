"""Which hospitals train, which are out of distribution, and what of both a silo has.

FedILC trains on the 20 largest hospitals and tests on all others. Here the test hospitals are
shared out: a region has those that lie in it; a training hospital has its share of all of them,
dealt out by size. Every choice is a pure function of the table, so that all processes agree.
Torch-free.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tightframe.data.eicu import REGIONS
from tightframe.data.validation import validation_mask
from tightframe.errors import DataError

SALT = "tightframe-eicu-v1"
_SHOWN = 40

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Stays:
    """What is known of each stay beside its drugs; all of one length n.

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
        train: those that train.
        other: those that are out of distribution.
        smallest: stays of the smallest that trains.
    """

    train: tuple[int, ...]
    other: tuple[int, ...]
    smallest: int

    def share(self, hospital: int) -> tuple[int, ...]:
        """The out-of-distribution hospitals dealt to one that trains.

        The largest of them goes to the largest that trains, the next to the next, and so on, in
        turns.
        """
        return self.other[self.train.index(hospital) :: len(self.train)]


@dataclass(frozen=True)
class Place:
    """The hospitals of one silo: where it trains, and where it is tested."""

    train: tuple[int, ...]
    test: tuple[int, ...]


@dataclass(frozen=True)
class Folds:
    """Row numbers of a silo's folds, int64, in record order.

    Attributes:
        train: may hold a row more than once, if the rarer class is oversampled.
        validation: rows of the same hospitals that never train.
        test: rows of out-of-distribution hospitals.
        left_out: stays of those hospitals whose patient also has a stay in a training hospital.
    """

    train: Rows
    validation: Rows
    test: Rows
    left_out: int


def split_hospitals(sizes: Mapping[int, int], train_hospitals: int) -> HospitalSplit:
    """Rank hospitals by size, the smaller id first among equals, and split after the largest.

    Args:
        sizes: stays by hospital id.
        train_hospitals: how many train.

    Raises:
        DataError: TF-208 if no hospital is left to be out of distribution.

    >>> split_hospitals({5: 10, 3: 10, 9: 30, 7: 1}, 2)
    HospitalSplit(train=(9, 3), other=(5, 7), smallest=10)
    """
    ranked = sorted(sizes, key=lambda hospital: (-sizes[hospital], hospital))
    if len(ranked) <= train_hospitals:
        raise DataError(
            f"Expected more than {train_hospitals} hospitals with usable stays, so that some are out of "
            f"distribution, but got {len(ranked)}: point `root` at the tables of all hospitals (a silo "
            "reads only its own stays of them), or lower `train_hospitals` in the job.",
            code="TF-208",
        )
    train = tuple(ranked[:train_hospitals])
    return HospitalSplit(train, tuple(ranked[train_hospitals:]), sizes[train[-1]])


def of_region(split: HospitalSplit, regions: Mapping[int, str], region: str) -> Place:
    """The hospitals of a region.

    Args:
        split: of all hospitals.
        regions: region by hospital id.
        region: one of ``REGIONS``.

    Raises:
        DataError: TF-208 if it has no training hospital, or none out of distribution.
    """
    train = tuple(hospital for hospital in split.train if regions[hospital] == region)
    test = tuple(hospital for hospital in split.other if regions[hospital] == region)
    if not train or not test:
        lacking, members = ("training", split.train) if not train else ("out-of-distribution", split.other)
        counts = Counter(regions[hospital] for hospital in members)
        found = ", ".join(f"{name}: {counts[name]}" for name in REGIONS)
        raise DataError(
            f"Expected a {lacking} hospital in the region {region}, but the {len(members)} there are lie "
            f"elsewhere ({found}): leave this region out of the job's sites, or change `train_hospitals`.",
            code="TF-208",
        )
    return Place(train, test)


def of_hospitals(split: HospitalSplit, hospitals: Sequence[int]) -> Place:
    """Training hospitals with their shares of the out-of-distribution ones.

    Raises:
        DataError: TF-208 if one of them does not train, or if nothing is dealt to them.
    """
    others = [hospital for hospital in hospitals if hospital not in split.train]
    if others:
        shown = ", ".join(map(str, split.train[:_SHOWN]))
        raise DataError(
            f"Expected `hospitals` to be among the {len(split.train)} that train ({shown}), but got "
            f"{others}: name one of these, or change `train_hospitals` in the job.",
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


def silo_folds(
    stays: Stays, split: HospitalSplit, place: Place, *, equal_sizes: bool, oversample_minority: bool
) -> Folds:
    """The folds of one silo.

    Validation is 15 % of the training hospitals' stays (``data.validation``), grouped by patient.
    No patient is in two folds, of this silo or of two: who has a stay in a training hospital is
    tested nowhere, and who has stays in the training hospitals of two silos validates nowhere.

    Args:
        stays: of the table.
        split: of its hospitals.
        place: the silo's.
        equal_sizes: keep ``split.smallest`` stays of each training hospital, by a fixed hash.
        oversample_minority: repeat the rarer class in the training fold until classes are equal.

    Raises:
        DataError: TF-208 if the training or the test fold is empty.
    """
    trains = np.isin(stays.hospital, split.train)
    own = np.isin(stays.hospital, place.train)
    tested = np.isin(stays.hospital, place.test)
    known = np.isin(stays.patient, stays.patient[trains])
    rows = np.flatnonzero(own)
    if equal_sizes:
        kept = [_kept(stays, rows[stays.hospital[rows] == h], split.smallest) for h in place.train]
        rows = np.sort(np.concatenate(kept))
    alone = ~np.isin(stays.patient[rows], stays.patient[trains & ~own])
    held_out = np.zeros(len(rows), dtype=np.bool_)
    groups = [f"patient-{patient}" for patient in stays.patient[rows[alone]].tolist()]
    held_out[alone] = validation_mask(stays.label[rows[alone]], groups)
    train, test = rows[~held_out], np.flatnonzero(tested & ~known)
    for name, found in (("training", train), ("test", test)):
        if len(found) == 0:
            raise DataError(
                f"Expected stays in the {name} fold of the hospitals {list(place.train)} with the "
                f"out-of-distribution hospitals {list(place.test[:_SHOWN])}, but there are none: give this "
                "silo other hospitals, or change `train_hospitals` in the job.",
                code="TF-208",
            )
    if oversample_minority:
        train = _balanced(stays, train)
    return Folds(train, rows[held_out], test, int(np.sum(tested & known)))


def _order(stays: Stays, rows: Rows, purpose: str) -> Rows:
    """The rows by a fixed hash of their stays."""
    keys = [hashlib.sha256(f"{SALT}/{purpose}/{stay}".encode()).digest() for stay in stays.stay[rows]]
    return rows[sorted(range(len(rows)), key=keys.__getitem__)]


def _kept(stays: Stays, rows: Rows, count: int) -> Rows:
    return _order(stays, rows, "equal-sizes")[:count]


def _balanced(stays: Stays, train: Rows) -> Rows:
    """The training rows with those of the rarer class repeated; a silo of one class stays as it is."""
    died = stays.label[train] == 1
    rarer = train[died] if died.sum() * 2 <= len(train) else train[~died]
    missing = len(train) - 2 * len(rarer)
    if len(rarer) == 0 or missing == 0:
        return train
    again = np.resize(_order(stays, rarer, "oversample"), missing)
    return np.concatenate([train, again])
