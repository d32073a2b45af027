"""By what a ledger recognises records: each reader's, under another title or path, other order, changed."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.io
from tests.support import made_eicu, pictures, tables
from tests.support.made_isic import write_centre

from tightframe.data.content import Content, content_of
from tightframe.data.eicu import EicuOptions, EicuSite
from tightframe.data.eicu.silo import open_site as open_eicu
from tightframe.data.eicu.twin import open_twin
from tightframe.data.heart import HeartOptions, HeartSite
from tightframe.data.heart.silo import open_site as open_heart
from tightframe.data.image_sets import BENCHMARK_SETS, FolderSite, ShareSite
from tightframe.data.image_sets.silos import open_site as open_set
from tightframe.data.images.silo import open_site as open_pictures
from tightframe.data.isic import IsicOptions, IsicSite
from tightframe.data.isic.folder import IMAGES, FolderData
from tightframe.data.table.silo import open_site as open_table
from tightframe.privacy.ledger.entries import DataNoted
from tightframe.rounds.site_ledger.known_records import fingerprint

Opened = tuple[Any, Any, Any]
"""Records; the same ones, of which what is no record differs; and these with one record more or less."""


def isic(folder: Path, _: Path) -> Opened:
    """A copied folder, the split file in another order and with other labels; a picture less."""
    write_centre(folder / "one", 24, 24)
    shutil.copytree(folder / "one", folder / "two")
    header, *rows = csv.reader((folder / "one" / "train_test_split").read_text().splitlines())
    split = folder / "two" / "train_test_split"

    def opened(kept: Sequence[Sequence[str]]) -> FolderData:
        tables.write(split, [[row[0], str(8 - int(row[1]) - 1), *row[2:]] for row in kept], header)
        site = IsicSite.model_validate({"root": folder / "two", "center": 3})
        return FolderData(site, IsicOptions(image_size=32))

    first = FolderData(IsicSite.model_validate({"root": folder / "one", "center": 3}), IsicOptions())
    return first, opened(rows[::-1]), opened(rows[1:])


def isic_by_contract(folder: Path, real: Path) -> Opened:
    """The same pictures with a contract, below other names."""
    first, _, fewer = isic(folder, real)
    rows = []
    for place, path in enumerate(sorted((folder / "one" / IMAGES).iterdir())):
        shutil.copy(path, folder / f"{place}.jpg")
        rows.append([f"r{place}", f"p{place}", f"{place}.jpg", ("NV", "MEL")[place % 2]])
    pictures.write_manifest(folder, rows)
    return first, open_pictures(pictures.site(folder), pictures.options()), fewer


def heart(folder: Path, real: Path) -> Opened:
    """The same lines as a table with a header, in another order, and without its first."""
    lines = list(csv.reader((real / "fed_heart_disease" / "processed.va.data").read_text().splitlines()))
    names = [f"c{place}" for place in range(14)]
    contract = {
        **{"title": "Hearts", "columns": [{"column": "c0", "kind": "number", "low": 0, "high": 120}]},
        "label": {"column": "c1", "classes": [{"code": "0"}, {"code": "1"}]},
    }

    def opened(name: str, rows: list[list[str]]) -> Any:
        path = tables.write(folder / name, rows, names)
        return open_table(tables.site(path, invalid="set_aside"), tables.options(contract))

    site = HeartSite.model_validate({"root": real / "fed_heart_disease", "center": 3})
    return open_heart(site, HeartOptions()), opened("all.csv", lines[::-1]), opened("fewer.csv", lines[1:])


def eicu(folder: Path, _: Path) -> Opened:
    """A copy in which a job takes other drugs and hospitals; a stay less."""
    first = made_eicu.clinic(folder / "one")
    shutil.copytree(first, folder / "two")

    def opened(root: Path, **options: Any) -> Any:
        site = EicuSite.model_validate({"root": root, "region": "Midwest"})
        return open_eicu(site, EicuOptions.model_validate({"drugs": 14, "train_hospitals": 4, **options}))

    same = opened(folder / "two", train_hospitals=5, equal_sizes=True, window="stay")
    patients = list(csv.reader((first / "patient.csv").read_text().splitlines()))
    shutil.copytree(first, folder / "three")
    gone = next(place for place, row in enumerate(patients) if row[3] == "3")
    made_eicu.write(folder / "three" / "patient.csv", patients[0], patients[1:gone] + patients[gone + 1 :])
    return opened(first), same, opened(folder / "three")


def svhn(folder: Path, _: Path) -> Opened:
    """A ``.mat`` of which the job makes other shares, in another order; an image less."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (32, 32, 3, 60), dtype=np.uint8)
    labels = (np.arange(60, dtype=np.uint8) % 10 + 1)[:, None]
    spec = next(spec for spec in BENCHMARK_SETS if spec.name == "svhn")

    def opened(name: str, order: Any, silos: int, silo: int) -> Any:
        (folder / name).mkdir()
        for part, places in (("train", order[order < 50]), ("test", order[order >= 50])):
            values = {"X": images[..., places], "y": labels[places]}
            scipy.io.savemat(folder / name / f"{part}_32x32.mat", values)
        options = spec.options.model_validate({"partition": "iid", "silos": silos})
        return open_set("svhn", FolderSite.model_validate({"root": folder / name, "silo": silo}), options)

    ordered = np.arange(60)
    return opened("a", ordered, 2, 0), opened("b", ordered[::-1], 3, 2), opened("c", ordered[:-1], 2, 0)


def digits(_: Path, __: Path) -> Opened:
    """Real digits, which need no file: any share is one of the same records."""
    spec = next(spec for spec in BENCHMARK_SETS if spec.name == "digits")
    first, second = (
        open_set(
            "digits", ShareSite(silo=silo), spec.options.model_validate({"partition": "iid", "silos": silos})
        )
        for silo, silos in ((0, 2), (3, 4))
    )
    return first, second, None


def nested_parquet(folder: Path, _: Path) -> Opened:
    """A table with a column of lists that no contract reads; another title and label; a row more."""
    rows = tables.ward_rows(60)

    def opened(name: str, kept: Sequence[Sequence[str]], **changes: Any) -> Any:
        columns = {title: [row[place] for row in kept] for place, title in enumerate(tables.HEADER)}
        pyarrow.parquet.write_table(
            pyarrow.table({**columns, "waves": [[1.0, float(row[0][1:])] for row in kept]}), folder / name
        )
        return open_table(tables.site(folder / name), tables.options(tables.contract(**changes)))

    return (
        opened("a.parquet", rows),
        opened("b.parquet", rows[::-1], title="Other"),
        opened("c.parquet", rows[1:]),
    )


def dicom(folder: Path, _: Path) -> Opened:
    """DICOM files below other names, of another size in the job; a picture less."""
    (folder / "one").mkdir()
    rows = []
    for place in range(40):
        pictures.write_dicom(folder / "one" / f"{place}.dcm", pictures.noise((16, 16), place, 4096))
        rows.append([f"r{place}", f"p{place}", f"{place}.dcm", ("NV", "MEL")[place % 2]])
    pictures.write_manifest(folder / "one", rows)
    shutil.copytree(folder / "one", folder / "two")

    def opened(name: str, size: int) -> Any:
        made = pictures.contract({"colour": "gray", "size": [size, size]})
        return open_pictures(pictures.site(folder / name), pictures.options(made))

    first, same = opened("one", 16), opened("two", 8)
    pictures.write_manifest(folder / "two", rows[1:])
    return first, same, opened("two", 16)


READERS = [isic, isic_by_contract, heart, eicu, svhn, digits, nested_parquet, dicom]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_the_same_records_are_recognised_and_those_with_one_changed_are_alike(
    reader: Callable[[Path, Path], Opened], tmp_path: Path, real_data: Path
) -> None:
    first, same, changed = reader(tmp_path, real_data)
    known = content_of(first)
    assert known is not None and content_of(same) == known
    assert fingerprint("a", first) != fingerprint("a", same), "source and labels alone would not tell"
    if changed is not None:
        other = content_of(changed)
        assert other is not None and other.digest != known.digest
        assert noted(other).is_like(noted(known))


def test_generated_records_have_no_content() -> None:
    assert content_of(open_twin(0, EicuOptions(twin_scale=0.01))) is None


def noted(content: Content) -> DataNoted:
    return DataNoted("ward", content.digest, content.sketch)


def of(numbers: Sequence[int]) -> DataNoted:
    return noted(Content.of(str(number).encode() for number in numbers))


@pytest.mark.parametrize("seed", range(5))
def test_sets_are_alike_from_about_half_in_common(seed: int) -> None:
    first = range(seed * 10**6, seed * 10**6 + 3000)
    start = first.start
    assert of(first).is_like(of(first[::-1]))
    for shared, alike in ((2999, True), (2250, True), (1000, False), (0, False)):  # J = 0.6 and 0.2
        assert of(first).is_like(of(range(start + 3000 - shared, start + 6000 - shared))) is alike, shared


def test_rows_of_few_possible_values_are_known_by_all_of_them_alone() -> None:
    """Two wards of 500 rows have the same eight kinds, and are different patients."""
    one, other = of([row % 8 for row in range(500)]), of([row % 8 for row in range(501)])
    assert not one.is_like(other) and one.fingerprint != other.fingerprint
    assert one.sketch == ""
