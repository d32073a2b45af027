"""The synthetic twin of eICU: generated stays with the shape of FedILC's table.

58 hospitals, 30,760 stays, 1,399 drugs at ``twin_scale`` 1; a smaller scale takes the first part of
each hospital's stays. The frequency of a drug falls with its rank as in the demo's 48-hour table. A
hospital's formulary lacks many of the rarer drugs, so that their columns are exactly zero there.
Sicker patients get more of some drugs and less of others, and mortality (about 8.7 %) follows a fixed
sparse score of the drugs given and a shift of the hospital. It is frozen (``TWIN_VERSION``, and a test
that hashes it), was calibrated with pooled logistic regression only, and supports no claim about a
method. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tightframe.data.eicu import PAPER_DRUGS, REGIONS, EicuOptions
from tightframe.data.eicu.folds import Folds, of_hospitals, of_region, silo_folds, split_hospitals
from tightframe.data.eicu.matrix import StayMatrix, compressed
from tightframe.data.eicu.silo import EicuData
from tightframe.data.twin_render import Uniforms

TWIN_VERSION = 1
FLOOR = 8
"""Least number of stays of a hospital."""
READMITTED = 0.15
"""Share of stays that are a readmission of the patient before; the demo has 2,174 stays of 1,841 patients."""

SIZES = (
    *(1450, 1315, 1221, 1140, 1068, 1005, 950, 900, 855, 814, 777, 743, 712, 684, 657, 633, 610, 589),
    *(570, 551),
    *(534, 518, 502, 488, 475, 462, 450, 438, 427, 417, 407, 397, 388, 380, 371, 363, 356, 349, 342, 335),
    *(328, 322, 316, 310, 305, 300, 294, 289, 285, 280, 275, 271, 267, 263, 259, 255, 251, 247),
)
"""Stays of each hospital, the largest first; hospital h is the h-th."""

_REGION_OF = "MSWMSNMSWUMSWNMSNMWU" + "MSMWSMSWNMSUMSWMSNMSWMSUMSWMNSWMSMWNUW"
_REGIONS: Mapping[str, str] = {"M": "Midwest", "S": "South", "W": "West", "N": "Northeast", "U": "unknown"}

# Rank of a drug: its weight in the score. Multiples of 1/16, so that sums are exact.
_RISK: Mapping[int, float] = {
    **{9: 0.4375, 13: 0.375, 18: 0.5625, 22: 0.4375, 27: 0.375, 31: 0.6875, 36: 0.4375, 41: 0.5625, 47: 0.5},
    **{52: 0.6875, 58: 0.4375, 65: 0.5625, 71: 0.6875, 78: 0.5, 86: 0.5625, 95: 0.6875, 108: 0.5625},
    **{121: 0.6875, 137: 0.5625, 158: 0.6875},
}
_SAFE: Mapping[int, float] = {
    **{5: -0.25, 8: -0.25, 11: -0.3125, 16: -0.25, 20: -0.4375, 25: -0.375, 29: -0.25, 34: -0.4375},
    **{39: -0.375, 45: -0.4375, 55: -0.375, 62: -0.4375, 75: -0.375, 90: -0.4375, 112: -0.4375, 140: -0.4375},
}
_INTERCEPT = -3.59375
_MOST_GIVEN = 0.97

Array = NDArray[np.float64]


def drug_score() -> Array:
    """Return the weight of each drug in the log-odds of death, by rank, (1399,): 36 of them are not zero."""
    weights = np.zeros(PAPER_DRUGS)
    for rank, weight in {**_RISK, **_SAFE}.items():
        weights[rank] = weight
    return weights


def prevalence() -> Array:
    """Return the mean share of stays with each drug, by rank, (1399,): as in the demo's 48-hour table."""
    rank = np.arange(PAPER_DRUGS, dtype=np.float64)
    shrink = 1.0 + (rank / 220.0) * (rank / 220.0)
    values: Array = 0.78 / ((1.0 + rank / 8.0) * shrink)
    return values


def hospital_rates(hospital: int) -> Array:
    """Return the share of a hospital's stays with each drug, (1399,); 0 for drugs it never gives."""
    uniforms = Uniforms(f"eicu-twin{TWIN_VERSION}-hospital-{hospital}")
    listed = 1.0 / (1.0 + np.arange(PAPER_DRUGS) / 300.0)
    has = uniforms(PAPER_DRUGS) < listed
    rates: Array = np.where(has, prevalence() / listed * (0.5 + uniforms(PAPER_DRUGS)), 0.0)
    return rates


def scaled_size(hospital: int, scale: float) -> int:
    """Return the number of stays generated for hospital 1..58: all at scale 1, at least ``FLOOR``."""
    return max(FLOOR, round(SIZES[hospital - 1] * scale))


@lru_cache(maxsize=128)
def hospital_stays(hospital: int, copy: int, count: int) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Generate the first stays of a hospital.

    A stay depends only on its hospital, copy and number, not on the number of stays.

    Args:
        hospital: 1..58.
        copy: 0, or more for further silos of the same hospitals.
        count: number of stays n.

    Returns:
        Drugs given, by rank, bool (n, 1399), and 1 where the patient died, uint8 (n,).
    """
    shift = 2.0 * float(Uniforms(f"eicu-twin{TWIN_VERSION}-shift-{hospital}")(1)[0]) - 1.0
    draws = Uniforms(f"eicu-twin{TWIN_VERSION}-stays-{copy}-{hospital}")(count, PAPER_DRUGS + 3)
    severity = (draws[:, 0] * draws[:, 0])[:, None]
    load = (0.35 + 1.3 * draws[:, 1])[:, None]
    factor = np.ones((count, PAPER_DRUGS))
    factor[:, list(_RISK)] = 0.25 + 2.25 * severity
    factor[:, list(_SAFE)] = 1.5 - 1.5 * severity
    prescribed = draws[:, 3:] < np.minimum(hospital_rates(hospital) * load * factor, _MOST_GIVEN)
    prescribed[~prescribed.any(axis=1), 0] = True  # the real table has no stay without a drug
    odds = np.exp(_INTERCEPT + shift + prescribed @ drug_score())
    died = draws[:, 2] < odds / (1.0 + odds)
    return prescribed, died.astype(np.uint8)


def region_of(hospital: int) -> str:
    """Return the region of hospital 1..58."""
    return _REGIONS[_REGION_OF[hospital - 1]]


def _matrix(hospitals: Sequence[int], copy: int, options: EicuOptions) -> StayMatrix:
    """Generate the stays of these hospitals, with the job's number of columns.

    These are the first D drugs by rank; columns beyond 1,399 are drugs that no hospital gives.
    """
    sizes = [scaled_size(hospital, options.twin_scale) for hospital in hospitals]
    parts = [hospital_stays(hospital, copy, size) for hospital, size in zip(hospitals, sizes, strict=True)]
    row, column = np.nonzero(np.concatenate([given[:, : options.drugs] for given, _ in parts]))
    total = sum(sizes)
    indptr, indices = compressed(row, column, total)
    numbers = np.concatenate([np.arange(size) for size in sizes])
    identity = np.repeat(np.array(hospitals), sizes)
    stay = (copy * 100 + identity) * 10_000 + numbers
    return StayMatrix(
        indptr=indptr,
        indices=indices,
        label=np.concatenate([died for _, died in parts]),
        hospital=identity.astype(np.int32),
        region=np.array([region_of(hospital) for hospital in identity.tolist()], dtype="<U9"),
        stay=stay.astype(np.int64),
        patient=np.arange(total, dtype=np.int32),
        hicl=np.arange(options.drugs, dtype=np.int32),
    )


def stay_patients(matrix: StayMatrix, folds: Folds, copy: int) -> NDArray[np.int64]:
    """Return the patient of each generated stay, (n,) int64: the row of the patient's first stay.

    Patients are an array separate from the records, which are bit for bit those generated before the twin had
    patients, with the same folds. So that no patient is in two folds or hospitals, a readmission belongs to
    the patient of the previous stay *in its fold and hospital*. Whether a stay is a readmission depends on
    hospital, copy and the stay's number only.
    """
    readmission = np.zeros(len(matrix), dtype=np.bool_)
    for hospital, size in matrix.sizes().items():
        draws = Uniforms(f"eicu-twin{TWIN_VERSION}-patients-{copy}-{hospital}")(size)
        readmission[matrix.hospital == hospital] = draws < READMITTED
    patients = np.arange(len(matrix))
    for fold in (folds.train, folds.validation, folds.test):
        rows = np.unique(fold)
        same = matrix.hospital[rows[1:]] == matrix.hospital[rows[:-1]]
        joined = readmission[rows] & np.concatenate([[False], same])[: len(rows)]
        patients[rows] = rows[np.maximum.accumulate(np.where(joined, 0, np.arange(len(rows))))]
    return patients


def open_twin(silo: int, options: EicuOptions) -> EicuData:
    """Open the twin of silo ``silo`` of a job's roster.

    If silos are regions, it is region ``silo % 5`` of ``REGIONS``; if they are hospitals, the training
    hospital ``silo % train_hospitals``, the largest first. Further silos are copies of the same hospitals
    with stays of their own.

    Raises:
        DataError: TF-208 if the job's ``train_hospitals`` leaves a fold empty.
    """
    if silo < 0:
        raise ValueError(f"Expected `silo` to be at least 0, but got {silo}.")
    every = range(1, len(SIZES) + 1)
    split = split_hospitals(
        {hospital: scaled_size(hospital, options.twin_scale) for hospital in every}, options.train_hospitals
    )
    natural = len(REGIONS) if options.silos == "regions" else len(split.train)
    copy, index = divmod(silo, natural)
    if options.silos == "regions":
        named = f"region {REGIONS[index]}"
        place = of_region(split, {hospital: region_of(hospital) for hospital in every}, REGIONS[index])
    else:
        named = f"hospital {split.train[index]}"
        place = of_hospitals(split, [split.train[index]])
    matrix = _matrix(sorted(place.train + place.test), copy, options)
    folds = silo_folds(matrix.stays, split, place, options)
    suffix = f" (copy {copy + 1})" if copy else ""
    return EicuData(
        matrix,
        folds,
        source=f"synthetic twin of eICU, {named}{suffix}",
        synthetic=True,
        patients=stay_patients(matrix, folds, copy),
    )
