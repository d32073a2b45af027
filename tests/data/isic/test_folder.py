from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from tightframe.data.base import own_patients, record_patients
from tightframe.data.isic import IsicOptions, IsicSite
from tightframe.data.isic.folder import IMAGES, FolderData, read_split
from tightframe.data.withdrawn import Remaining
from tightframe.errors import DataError
from tightframe.phases import Fold

Row = tuple[str, int, int, str]
ROWS: list[Row] = [
    *((f"ISIC_{index:03d}", index % 3, 3, "train") for index in range(24)),
    *((f"ISIC_{index:03d}", index % 3, 3, "test") for index in range(24, 30)),
    ("ISIC_100", 1, 0, "train"),
    ("ISIC_101", 1, 0, "train"),
]


def write_split(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "target", "center", "fold", "fold2"])
        writer.writerows([*row, f"{row[3]}_{row[2]}"] for row in rows)


def write_lesions(path: Path, pairs: list[tuple[str, str]], *, complete: bool = True) -> None:
    """A lesion file of these pairs; ``complete`` gives every other image of centre 3 a lesion of its own."""
    named = {image for _, image in pairs}
    if complete:
        pairs = pairs + [(f"alone_{row[0]}", row[0]) for row in ROWS if row[2] == 3 and row[0] not in named]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["lesion_id", "image_id", "dx", "dataset"])
        writer.writerows([lesion, image, "nv", "vidir_modern"] for lesion, image in pairs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A made folder: 24 + 6 images of centre 3, 2 of centre 0 (which lack files)."""
    (tmp_path / IMAGES).mkdir()
    rng = np.random.default_rng(0)
    for name, _, center, _ in ROWS:
        if center == 3:
            noise = rng.integers(0, 256, (60, 70, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / IMAGES / f"{name}.jpg")
    write_split(tmp_path / "train_test_split", ROWS)
    return tmp_path


def opened(folder: Path, **site: Any) -> FolderData:
    values = {"root": str(folder), "center": 3} | site
    return FolderData(IsicSite.model_validate(values), IsicOptions(image_size=32))


def test_a_good_folder(folder: Path) -> None:
    data = opened(folder)
    data.check()
    folds: tuple[Fold, ...] = ("train", "validation", "test")
    names = {fold: data.names(fold) for fold in folds}
    assert set(names["train"]) | set(names["validation"]) == {row[0] for row in ROWS[:24]}
    assert not set(names["train"]) & set(names["validation"])
    assert names["test"] == tuple(row[0] for row in ROWS[24:30])
    assert np.bincount(data.labels("validation")).tolist() == [1, 1, 1]
    assert not data.synthetic
    target = {row[0]: row[1] for row in ROWS}
    for fold, members in names.items():
        assert data.labels(fold).tolist() == [target[name] for name in members]
        records: Any = data.records(fold)
        assert [records[i][1] for i in range(len(records))] == data.labels(fold).tolist()
        assert records[0][0].shape == (3, 32, 32)


def truncate(folder: Path) -> None:
    path = folder / IMAGES / "ISIC_005.jpg"
    path.write_bytes(path.read_bytes()[:-400])


def no_images(folder: Path) -> None:
    for path in (folder / IMAGES).iterdir():
        path.unlink()
    (folder / IMAGES).rmdir()


def changed(*rows: Row) -> Callable[[Path], None]:
    return lambda folder: write_split(folder / "train_test_split", [*ROWS, *rows])


def test_a_truncated_image_still_opens(folder: Path) -> None:
    """Its header is whole, so that only decoding it finds the fault."""
    truncate(folder)
    with Image.open(folder / IMAGES / "ISIC_005.jpg") as image:
        assert image.size == (70, 60)


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (no_images, "TF-203", "no such folder"),
        (lambda folder: (folder / "train_test_split").unlink(), "TF-204", "cannot be read"),
        (lambda folder: (folder / "train_test_split").write_text(""), "TF-204", "no column"),
        (
            lambda folder: (folder / "train_test_split").write_text("image,target,center,fold\n"),
            "TF-204",
            "no line",
        ),
        (
            lambda folder: (folder / "train_test_split").write_text("image,target\nISIC_000,1\n"),
            "TF-204",
            r"no column \['center', 'fold'\]",
        ),
        (
            lambda folder: (folder / "train_test_split").write_text("image,target,center,fold\nISIC_000,1\n"),
            "TF-204",
            "short lines: 1",
        ),
        (lambda folder: (folder / "train_test_split").write_bytes(b"\xff\xfe\x00"), "TF-204", "be read"),
        (changed(("ISIC_200", 1, 3, "valid")), "TF-204", "'valid'"),
        (changed(("ISIC_200", 1, 6, "train")), "TF-204", "center of 0..5"),
        (changed(("../secret", 1, 3, "train")), "TF-204", "an image's name"),
        (changed(("ISIC_000", 1, 3, "train")), "TF-204", r"repeated: 1 \(ISIC_000\)"),
        (changed(("ISIC_200", 8, 3, "train")), "TF-207", r"1 \(ISIC_200: 8\)"),
        (lambda folder: (folder / IMAGES / "ISIC_004.jpg").unlink(), "TF-205", r"1 \(ISIC_004\) are missing"),
        (truncate, "TF-206", r"1 \(ISIC_005\) cannot be decoded"),
        (
            lambda folder: (folder / IMAGES / "ISIC_006.jpg").write_text("not an image"),
            "TF-206",
            r"1 \(ISIC_006\) cannot be decoded",
        ),
    ],
)
def test_every_fault_has_its_code(folder: Path, harm: Callable[[Path], object], code: str, said: str) -> None:
    harm(folder)
    with pytest.raises(DataError, match=rf"^{code}: [\s\S]*{said}"):
        opened(folder).check()


def test_text_as_target_is_malformed(folder: Path) -> None:
    split = folder / "train_test_split"
    split.write_text(split.read_text().replace("ISIC_003,0,", "ISIC_003,naevus,"))
    with pytest.raises(DataError, match=r"^TF-204: .*'naevus'"):
        opened(folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ISIC_200,2.7,3,train", "'2.7' and '3'"),  # would be class 2
        ("ISIC_200,-0.4,3,train", "'-0.4' and '3'"),  # would be class 0
        ("ISIC_200,1,0.9,train", "'1' and '0.9'"),  # would be centre 0
        ("ISIC_200,nan,3,train", "'nan' and '3'"),
        ("ISIC_200,1,inf,train", "'1' and 'inf'"),
        ("ISIC_200,,3,train", "'' and '3'"),
    ],
)
def test_what_is_no_whole_number_is_refused_not_cut(folder: Path, line: str, said: str) -> None:
    split = folder / "train_test_split"
    split.write_text(f"{split.read_text()}{line},fold2\n")
    with pytest.raises(DataError, match=rf"^TF-204: .*integers as target and center in line 34 .*{said}"):
        read_split(split)


def test_whole_numbers_may_be_written_as_pandas_does(folder: Path) -> None:
    split = folder / "train_test_split"
    split.write_text(f"{split.read_text()}ISIC_200,2.0,3.0,train,train_3\n")
    row = read_split(split)[-1]
    assert (row.target, row.center) == (2, 3)


@pytest.mark.parametrize(("center", "fold"), [(0, "test"), (5, "train")])
def test_an_empty_centre_or_fold(folder: Path, center: int, fold: str) -> None:
    with pytest.raises(DataError, match=rf"^TF-208: .*centre {center} in the {fold} fold"):
        opened(folder, center=center)


def test_many_missing_files_are_counted_and_the_first_named(folder: Path) -> None:
    for index in range(10, 20):
        (folder / IMAGES / f"ISIC_{index:03d}.jpg").unlink()
    with pytest.raises(DataError, match=r"10 \(ISIC_010, .*ISIC_014, \.\.\.\)"):
        opened(folder).check()


def test_another_split_file(folder: Path) -> None:
    write_split(folder / "mine.csv", ROWS[:20] + ROWS[24:26])
    data = opened(folder, split=str(folder / "mine.csv"))
    assert len(data.labels("train")) + len(data.labels("validation")) == 20
    assert len(data.labels("test")) == 2


def test_lesions_stay_together_in_validation(folder: Path) -> None:
    # Twins of one class: images 0 and 3, 1 and 4, 2 and 5, 6 and 9, ...
    pairs = [(f"HAM_{index // 6}_{index % 3}", f"ISIC_{index:03d}") for index in range(24)]
    write_lesions(folder / "HAM10000_metadata", pairs)
    lesion = {image: name for name, image in pairs}
    data = opened(folder, lesions=str(folder / "HAM10000_metadata"))
    trained = {lesion[name] for name in data.names("train")}
    held_out = {lesion[name] for name in data.names("validation")}
    assert held_out
    assert not trained & held_out
    alone = opened(folder)
    mixed = {lesion[name] for name in alone.names("train")} & {lesion[n] for n in alone.names("validation")}
    assert mixed, "without lesions the folder must mix some, or this test shows nothing"


def test_the_leakage_free_view(folder: Path) -> None:
    pairs = [
        ("HAM_a", "ISIC_000"),  # trained on here, so image 24 goes
        ("HAM_a", "ISIC_024"),
        ("HAM_b", "ISIC_100"),  # trained on at centre 0, so image 25 goes
        ("HAM_b", "ISIC_025"),
        ("HAM_c", "ISIC_026"),  # two images, both in the test fold: they stay
        ("HAM_c", "ISIC_027"),
    ]
    write_lesions(folder / "HAM10000_metadata", pairs)
    usual = opened(folder, lesions=str(folder / "HAM10000_metadata"))
    assert len(usual.labels("test")) == 6
    data = opened(folder, lesions=str(folder / "HAM10000_metadata"), leakage_free_test=True)
    assert data.names("test") == ("ISIC_026", "ISIC_027", "ISIC_028", "ISIC_029")
    assert set(data.names("train")) == set(usual.names("train"))
    assert "leakage-free" in data.source


def test_pictures_of_a_lesion_are_of_one_patient(folder: Path) -> None:
    plain = opened(folder)
    assert len(np.unique(own_patients(plain))) == len(plain.names("train"))
    pairs = [(f"HAM_{place % 4}", name) for place, name in enumerate(plain.names("train"))]
    write_lesions(folder / "HAM10000_metadata", pairs)
    data = opened(folder, lesions=str(folder / "HAM10000_metadata"))
    lesion = {image: name for name, image in pairs}
    own = {lesion.get(name, name) for name in data.names("train")}
    assert len(np.unique(own_patients(data))) == len(own) < len(data.names("train"))
    remaining = Remaining(data, frozenset())
    assert own_patients(remaining).tolist() == own_patients(data).tolist()
    for item in (data, remaining):  # two lesions may be one patient's: noise would not protect the patient
        with pytest.raises(DataError, match=r"^TF-210: "):
            record_patients(item, "train")


def test_a_lesion_file_that_does_not_know_the_images_is_refused(folder: Path) -> None:
    path = folder / "HAM10000_metadata"
    write_lesions(path, [("HAM_a", "ISIC_000.jpg"), ("HAM_b", "ISIC_001")], complete=False)
    for leakage_free in (False, True):
        with pytest.raises(DataError, match=r"TF-204.*29.*ISIC_000") as caught:
            opened(folder, lesions=str(path), leakage_free_test=leakage_free)
        assert "ISIC_001," not in str(caught.value)


def test_the_leakage_free_view_needs_lesions(folder: Path) -> None:
    with pytest.raises(DataError, match="HAM10000_metadata"):
        opened(folder, leakage_free_test=True)
    with pytest.raises(DataError, match=r"^TF-204: "):
        opened(folder, lesions=str(folder / "absent"), leakage_free_test=True)


@pytest.mark.parametrize(
    "wrong",
    [{"center": 6}, {"center": "3"}, {"center": -1}, {"folder": "/x"}, {"leakage_free_test": 1}],
)
def test_the_site_says_nothing_else(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        IsicSite.model_validate({"root": "/data", "center": 3} | wrong)


@pytest.mark.parametrize(
    "wrong", [{"image_size": 15}, {"image_size": 513}, {"image_size": 48.0}, {"root": "/x"}]
)
def test_a_job_asks_for_a_size_only(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        IsicOptions.model_validate(wrong)


def test_progress_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr("tightframe.data.base.time.monotonic", lambda: float(next(clock)))
    lines: list[str] = []
    opened(folder).check(lines.append)
    assert lines
    assert lines[0] == "read 1 of 30 images"


@pytest.mark.parametrize(
    ("center", "train", "test"), [(1, 194, 63), (2, 290, 101), (3, 355, 142), (5, 102, 33)]
)
def test_real_records(real_data: Path, center: int, train: int, test: int) -> None:
    data = opened(real_data / "fed_isic_ham", center=center)
    data.check()
    assert len(data.labels("train")) + len(data.labels("validation")) == train
    assert len(data.labels("test")) == test
    assert 0.13 <= len(data.labels("validation")) / train <= 0.17
    rows = [
        row for row in read_split(real_data / "fed_isic_ham" / "train_test_split") if row.center == center
    ]
    fold = {row.image: row.fold for row in rows}
    assert {fold[name] for name in data.names("validation")} == {"train"}


def test_real_centre_that_is_not_here(real_data: Path) -> None:
    with pytest.raises(DataError, match=r"^TF-208: .*centre 4 in the train fold"):
        opened(real_data / "fed_isic_ham", center=4)
