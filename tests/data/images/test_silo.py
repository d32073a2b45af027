"""Pictures of a site as records: values, folds, what is set aside or refused, and what may not be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from tests.support.pictures import contract, noise, options, site, write_manifest, write_skin

from tightframe import data, federation
from tightframe.data.base import FOLDS, check_form, record_patients
from tightframe.data.content import content_of
from tightframe.data.images import ImagesSite
from tightframe.data.images.contract import PictureContract
from tightframe.data.images.silo import open_site
from tightframe.data.images.views import transformed
from tightframe.errors import DataError


def test_records_are_the_normalised_pixels_of_their_files(tmp_path: Path) -> None:
    rows = write_skin(tmp_path)
    means, deviations = [0.2, 0.4, 0.6], [0.5, 0.25, 2.0]
    for more in ({}, {"mean": means, "std": deviations}):
        opened = open_site(site(tmp_path), options(contract(more)))
        mean = np.array(more.get("mean", [0.5] * 3))[:, None, None]
        std = np.array(more.get("std", [0.5] * 3))[:, None, None]
        by_name = {row[0]: row for row in rows}
        count = 0
        for fold in FOLDS:
            records: Any = opened.records(fold, augment_seed=1)
            for place, name in enumerate(opened.record_ids(fold)):
                pixels = np.asarray(Image.open(tmp_path / by_name[name][2])).transpose(2, 0, 1) / 255
                value, label = records[place]
                np.testing.assert_allclose(value.numpy(), (pixels - mean) / std, atol=1e-5)
                assert label == (by_name[name][3] == "MEL")
                count += 1
        assert count == len(rows)
        spec = data.get("images").of(options(contract(more)))
        check_form(opened, spec, options(contract(more)))
    patients = [set(record_patients(opened, fold).tolist()) for fold in FOLDS]
    assert not patients[0] & patients[1] and not patients[0] & patients[2]


def test_what_breaks_the_contract_is_refused_or_set_aside_and_named_by_row_and_rule(tmp_path: Path) -> None:
    rows = write_skin(tmp_path)
    outside = tmp_path.with_name(tmp_path.name + "-outside")
    write_skin(outside, 2)
    (tmp_path / "link.png").symlink_to(outside / "0.png")
    (tmp_path / "inside.png").symlink_to(tmp_path / "39.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "7.png").read_bytes()[:200])
    os.mkfifo(tmp_path / "pipe.png")
    paths = {
        3: f"../{outside.name}/0.png",
        4: str(tmp_path / "4.png"),
        5: "link.png",
        6: "gone.png",
        7: "cut.png",
        8: "pipe.png",
        9: "1.png",
        10: "",
        11: "a\0b.png",
        39: "inside.png",
    }
    for row, text in paths.items():
        rows[row][2] = text
    rows[12][3] = "unknown"
    rows = [row for row in rows if "\0" not in row[2]]
    write_manifest(tmp_path, rows)
    with pytest.raises(DataError) as caught:
        open_site(site(tmp_path), options())
    said = str(caught.value)
    assert caught.value.code == "TF-215"
    for words in (
        "file: a path that leads out of the folder of the pictures: 3 rows (5, 6, 7)",
        "file: no such file: 1 row (8)",
        "file: a file that cannot be decoded completely: 1 row (9)",
        "file: no file (a folder, a pipe or a device): 1 row (10)",
        "file: the picture of an earlier row: 1 row (11)",
        "file: no path: 1 row (12)",
        "diagnosis: a code that is no class of the contract: 1 row (13)",
    ):
        assert words in said, said
    for value in ("gone", "unknown", "cut.png", outside.name, "p0-"):
        assert value not in said
    opened = open_site(site(tmp_path, invalid="set_aside"), options())
    logged: list[str] = []
    opened.check(logged.append)
    assert sum(len(opened.labels(fold)) for fold in FOLDS) == len(rows) - 9
    assert len(logged) == 7 and all(line.startswith("set aside: ") for line in logged)


def test_the_same_files_under_other_names_labels_and_sizes_are_the_same_content(tmp_path: Path) -> None:
    rows = write_skin(tmp_path / "one")
    write_manifest(tmp_path / "one", rows)
    first = open_site(site(tmp_path / "one"), options())
    known = content_of(first)
    (tmp_path / "two").mkdir()
    for place, row in enumerate(rows):
        (tmp_path / "one" / row[2]).rename(tmp_path / "two" / f"n{place}.png")
        row[2], row[3] = f"n{place}.png", ("NV", "MEL")[place % 3 == 0]
    write_manifest(tmp_path / "two", rows[::-1])
    other = options(contract({"size": [8, 8]}, title="Moles"))
    assert content_of(open_site(site(tmp_path / "two"), other)) == known is not None
    write_manifest(tmp_path / "two", rows[1:])
    assert content_of(open_site(site(tmp_path / "two"), other)) != known


def test_folders_are_classes(tmp_path: Path) -> None:
    for place in range(40):
        folder = tmp_path / ("moles", "MEL")[place % 2] / "deeper"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise((20, 18, 3), place)).save(folder / f"{place}.png")
    (tmp_path / "readme.txt").write_text("beside the classes")
    (tmp_path / "MEL" / ".hidden").write_text("")
    entry = ImagesSite(root=tmp_path, layout="folders", codes={"diagnosis": {"moles": "NV"}})
    opened = open_site(entry, options(contract(patient=None)))
    assert sum(len(opened.labels(fold)) for fold in FOLDS) == 40
    names = [name for fold in FOLDS for name in opened.record_ids(fold)]
    labels = [label for fold in FOLDS for label in opened.labels(fold).tolist()]
    assert all(
        name.startswith("MEL/deeper/") == bool(label) for name, label in zip(names, labels, strict=True)
    )
    with pytest.raises(DataError, match="TF-218"):
        open_site(entry, options())


def test_without_names_the_pixels_decide_the_fold(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        rows = write_skin(folder)
        for row in rows:
            (folder / row[2]).rename(folder / f"{folder.name}-{row[2]}")
        write_manifest(
            folder,
            [
                [*row[:2], f"{folder.name}-{row[2]}", row[3]]
                for row in rows[:: 1 if folder.name == "a" else -1]
            ],
        )
    values = contract(record=None, patient=None)
    first, second = (open_site(site(tmp_path / name), options(values)) for name in "ab")
    for fold in FOLDS:
        assert sorted(first.record_ids(fold)) == sorted(second.record_ids(fold))


def test_transforms_are_those_of_the_contract_and_of_the_record_alone(tmp_path: Path) -> None:
    rows = write_skin(tmp_path, side=24)
    assert rows
    opened = open_site(site(tmp_path), options(contract({"augment": {}, "size": [16, 24]})))
    plain: Any = opened.records("train")
    first, again, other = (opened.records("train", augment_seed=seed) for seed in (1, 1, 2))
    assert data.get("images").of(options(contract({"augment": {}}))).augments
    assert not data.get("images").of(options()).augments
    for place in range(len(plain)):
        alone: Any = first[place][0]
        assert alone.shape == (3, 16, 24) and torch.equal(alone, again[place][0])
    batch: Any = first
    whole = batch.__getitems__([3, 1])
    assert torch.allclose(whole[0][0], batch[3][0], atol=1e-6), "the batch does not matter"
    changed = [not torch.equal(first[i][0], other[i][0]) for i in range(len(plain))]
    assert np.mean(changed) > 0.5


def test_flips_and_turns_are_exact() -> None:
    from tightframe.data.images.contract import Augment

    values = torch.rand(1, 1, 3, 8, 12)  # a volume: all slices alike
    still = [0.9, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.9, 0.5, 0.5, 0.9]
    both = Augment(rotate=180.0)
    assert torch.equal(transformed(values, [still], both), values)
    horizontal = [*still[:3], 0.1, *still[4:]]
    assert torch.allclose(transformed(values, [horizontal], both), values.flip(-1), atol=1e-5)
    assert torch.equal(transformed(values, [horizontal], Augment(flips=())), values)
    turned = [0.9, 0.1, 0.9, 0.9, 0.5, 1.0, *still[6:]]
    assert torch.allclose(transformed(values, [turned], both), values.flip((-2, -1)), atol=1e-5)
    light = [*still[:8], 0.1, 1.0, 1.0, 0.9]
    expected = (values * 1.1 + 0.15).clamp(0, 1)
    assert torch.allclose(transformed(values, [light], both), expected, atol=1e-6)


@pytest.mark.whole
def test_volumes_train_and_are_judged(tmp_path: Path) -> None:
    """A brighter ball in one class, in NIfTI files of three sizes; one plain sum of features."""
    import tightframe
    from tightframe.config.job import parse_job
    from tightframe.config.site import parse_site_file
    from tightframe.inference import inputs

    values = contract(
        {"size": [16, 16, 16], "colour": "gray", "fit": "stretch", "window": {"low": 0.0, "high": 2.0}},
        patient=None,
    )
    entries: dict[str, Any] = {}
    for number in range(3):
        folder = tmp_path / f"site-{number}"
        folder.mkdir()
        rows = []
        for place in range(30):
            random = np.random.default_rng(100 * number + place)
            cube = random.uniform(0, 1, (18 + number, 20, 22)).astype(np.float32)
            cube[5:12, 5:12, 5:12] += place % 2
            nibabel.save(nibabel.Nifti1Image(cube, np.eye(4)), folder / f"{place}.nii.gz")
            rows.append([f"r{number}-{place}", "", f"{place}.nii.gz", ("NV", "MEL")[place % 2]])
        write_manifest(folder, rows)
        entries[folder.name] = {
            "data": {"images": {"root": str(folder), "file": str(folder / "manifest.csv")}}
        }
    job = parse_job(
        {
            "job_name": "volumes",
            "method": "fedncm",
            "dataset": "images",
            "dataset_options": {"contract": values},
            "model": "random_features",
            "model_options": {"width": 64},
            "training": {"augment": False},
            "sites": sorted(entries),
            "min_sites": 3,
            "rounds": 1,
            "summation": "plain",
        }
    )
    sites = parse_site_file({"sites": entries}).sites
    federation.run_job(job, entries=sites, folder=tmp_path / "run")
    model = tightframe.load_model(tmp_path / "run")
    found = inputs.find(model, [tmp_path / "site-1"])
    names, records = zip(*found.records(), strict=True)
    assert len(names) == 30 and not found.problems
    truth = [int(Path(name).name.partition(".")[0]) % 2 for name in names]
    assert (model.predict(torch.stack(records)) == truth).mean() > 0.9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": [16]}, "at least 2 items"),
        ({"size": [16, 2048]}, "sides of 8 to 1024"),
        ({"size": [16, 16, 16]}, "a `window` of a volume"),
        ({"window": {"low": 0.0, "high": 1.0}}, "`gray` as `colour`"),
        ({"window": {"low": 1.0, "high": 1.0}}, "`low` below `high`"),
        ({"mean": [0.5]}, "3 values in `mean`"),
        ({"std": [0.0, 1.0, 1.0]}, "0.001 to 1000"),
        ({"colour": "cmyk"}, "'rgb' or 'gray'"),
        ({"column": "diagnosis"}, "one role for the column"),
        ({"augment": {"flips": ["diagonal"]}}, "horizontal"),
    ],
)
def test_a_contract_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PictureContract.model_validate(contract(changes))
