"""Facts of eICU as FedILC uses it (mortality from drugs given), the options of a job and the entry of a site.

A record is a hospital stay: the drugs that were ordered (HICL codes), and whether the patient died in
hospital. The tables are those of the eICU Collaborative Research Database, full release or demo
(Pollard et al., Sci. Data 2018, doi 10.1038/sdata.2018.178). Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from tightframe.data.base import DatasetSpec, SitePath
from tightframe.data.forms import TableForm, named_columns, numbers
from tightframe.options import StrictModel
from tightframe.registry import deferred

CLASS_NAMES = ("survived", "died")
"""Outcome in hospital, in label order."""

Window = Literal["48h", "stay"]
WINDOWS: tuple[Window, ...] = ("48h", "stay")
"""Windows of drug orders: started up to 48 hours after admission to a unit, or at any time of the stay."""

WINDOW_MINUTES = 2880

Region = Literal["Midwest", "South", "West", "Northeast", "unknown"]
REGIONS: tuple[Region, ...] = ("Midwest", "South", "West", "Northeast", "unknown")
"""Regions of the hospital table, in the order of the region silos; ``unknown`` if the table has none."""

TRAIN_HOSPITALS = 20
"""Number of hospitals that train: in FedILC the 20 largest; all others are out of distribution."""

PAPER_DRUGS = 1399
"""Drugs in FedILC's table, which is not published."""

MOST_DRUGS = 20_000


class EicuOptions(StrictModel):
    """A job's options for eICU.

    Attributes:
        window: drugs of the first 48 hours in a unit, or of the whole stay. The whole stay includes
            orders at the end of life, so it supports no claim of prediction.
        silos: a silo is a region, or one or more of the training hospitals.
        drugs: columns of a record, D; the length of the drug vocabulary.
        vocabulary: SHA-256 of the drug vocabulary (``vocabulary_sha256``) that every silo must
            have; None checks its length only.
        train_hospitals: number of hospitals that train, the largest ones.
        equal_sizes: reduce every training hospital to the size of the smallest of them, as FedILC's
            code does.
        oversample_minority: repeat records of the rarer class in the training fold until the
            classes are equal, as FedILC's code does. A record then counts more than once.
        twin_scale: share of each hospital's stays that the synthetic twin generates; not used for
            real records.
    """

    window: Window = "48h"
    silos: Literal["regions", "hospitals"] = "regions"
    drugs: int = Field(default=PAPER_DRUGS, ge=1, le=MOST_DRUGS)
    vocabulary: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    train_hospitals: int = Field(default=TRAIN_HOSPITALS, ge=1, le=10_000)
    equal_sizes: bool = False
    oversample_minority: bool = False
    twin_scale: float = Field(default=1.0, gt=0, le=1)


HospitalIds = Annotated[tuple[int, ...], Field(strict=False, min_length=1)]


class EicuSite(StrictModel):
    """A site's entry for its records of eICU.

    Attributes:
        root: a folder that ``prepare`` wrote, or one with the tables patient, hospital and
            medication (``.csv`` or ``.csv.gz``).
        region: this silo's region, if the job's silos are regions.
        hospitals: ids of this silo's training hospitals, if the job's silos are hospitals.
        vocabulary: path of the drug vocabulary, if it is not the one next to the prepared matrices.
    """

    root: SitePath
    region: Region | None = None
    hospitals: HospitalIds | None = None
    vocabulary: SitePath | None = None

    @model_validator(mode="after")
    def _region_or_hospitals(self) -> EicuSite:
        if (self.region is None) == (self.hospitals is None):
            raise ValueError("Expected either `region` or `hospitals`, and not both")
        if self.hospitals is not None and len(set(self.hospitals)) != len(self.hospitals):
            raise ValueError(f"Expected different `hospitals`, but got {list(self.hospitals)}")
        return self


def vocabulary_sha256(codes: Iterable[int]) -> str:
    """Return the fingerprint of a drug vocabulary, which a job can require of every silo.

    Args:
        codes: HICL codes in column order.

    Returns:
        SHA-256, in hexadecimal, of the codes in decimal, one a line.

    >>> vocabulary_sha256([4, 11])[:8]
    '53fd0c7d'
    """
    return hashlib.sha256("".join(f"{code}\n" for code in codes).encode()).hexdigest()


ORDERED = frozenset({0.0, 1.0})


def form(options: EicuOptions) -> TableForm:
    """Return how records are made of rows in a job."""
    return TableForm(
        choose=partial(_choose, options),
        encode=_encode,
        said=f"a column for each of the vocabulary's {options.drugs} drugs, called by its HICL code, 0 or 1",
    )


def _choose(options: EicuOptions, header: Sequence[str]) -> tuple[list[str], list[str]]:
    codes = sorted({int(name) for name in header if name.isascii() and name.isdigit()})
    names, problems = named_columns([str(code) for code in codes], header)
    if len(codes) != options.drugs:
        problems.append(
            f"Expected {options.drugs} columns called by HICL codes, the job's `drugs`, but got {len(codes)}"
        )
    elif options.vocabulary not in (None, vocabulary := vocabulary_sha256(codes)):
        problems.append(
            f"Expected the drugs of the vocabulary with SHA-256 {options.vocabulary}, but these columns have "
            f"{vocabulary}"
        )
    return names, problems


def _encode(columns: Sequence[str], values: Sequence[str]) -> tuple[NDArray[np.float32], list[str]]:
    return numbers(columns, values, lambda name: ORDERED)


SPECS = {
    "eicu": DatasetSpec(
        name="eicu",
        title="eICU",
        class_names=CLASS_NAMES,
        options=EicuOptions,
        site=EicuSite,
        input_shape=lambda options: (options.drugs,),
        open=deferred("tightframe.data.eicu.silo", "open_site"),
        twin=deferred("tightframe.data.eicu.twin", "open_twin"),
        num_centers=len(REGIONS),
        choosing=("window", "silos", "train_hospitals", "equal_sizes"),
        form=form,
    ),
}
