"""The papers' image sets as data sets: options, shares, folds, records, and a run on real digits."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.support.processes import printed
from torch.utils.data import DataLoader

from tightframe import federation
from tightframe.data import partition
from tightframe.data.base import SiloData
from tightframe.data.image_sets import BENCHMARK_SETS, FolderSite, PartitionOptions, ShareSite, open_silos
from tightframe.data.image_sets.readers import read_digits, read_mnist
from tightframe.data.image_sets.silos import BenchmarkSilo, open_site
from tightframe.data.validation import target_size
from tightframe.errors import DataError, JobError
from tightframe.phases import Fold

FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
SPECS = {spec.name: spec for spec in BENCHMARK_SETS}
P10C2: dict[str, Any] = {"partition": "class_disjoint", "silos": 10, "classes_per_silo": 2}


def pixels(silo: SiloData, fold: Fold) -> torch.Tensor:
    """All records of a fold, (n, ...)."""
    records: Any = silo.records(fold)
    return torch.stack([records[index][0] for index in range(len(records))])


def rows(silos: dict[str, SiloData], *folds: Fold) -> list[tuple[float, ...]]:
    """Every record of these folds at all silos, label last, sorted."""
    found: list[tuple[float, ...]] = []
    for silo in silos.values():
        for fold in folds:
            flat = pixels(silo, fold).flatten(1).numpy()
            found += map(tuple, np.column_stack([flat, silo.labels(fold)]).tolist())
    return sorted(found)


@pytest.fixture
def cifar100(tmp_path: Path) -> Path:
    """Six hundred and fifty made records in the binary format; image i is full of i % 251."""
    for name, number in (("train.bin", 400), ("test.bin", 250)):
        records = np.repeat((np.arange(number) % 251).astype(np.uint8)[:, None], 3074, axis=1)
        records[:, 1] = np.arange(number) % 100
        # A bright corner, so that shifts and flips are seen.
        records[:, [2, 2 + 1024, 2 + 2048]] = 255
        (tmp_path / name).write_bytes(records.tobytes())
    return tmp_path


def test_digits_p10c2_is_a_partition_of_the_real_digits() -> None:
    silos = open_silos("digits", **P10C2, test="own")
    assert sorted(silos) == [f"silo-{number}" for number in range(10)]
    assert all(len(set(silo.labels("train").tolist())) == 2 for silo in silos.values())
    for part, folds in (("train", FOLDS[:2]), ("test", FOLDS[2:])):
        known = read_digits(None, part)  # type: ignore[arg-type]
        expected = np.column_stack([known.images.reshape(-1, 64) / 8.0 - 1.0, known.labels])
        assert rows(silos, *folds) == sorted(map(tuple, expected.tolist()))
    for number, silo in enumerate(silos.values()):
        assert not silo.synthetic
        assert silo.source == (
            f"scikit-learn's handwritten digits, silo {number} of 10 "
            "(class_disjoint, classes_per_silo 2, seed 0)"
        )


def test_the_partition_is_the_pure_functions() -> None:
    silos = open_silos(
        "digits", partition="dirichlet", alpha=0.5, variant="fedetf", silos=4, partition_seed=7
    )
    labels = read_digits(None, "train").labels
    parts = partition.dirichlet(labels, 4, 0.5, variant="fedetf", seed=7, num_classes=10)
    for silo, part in zip(silos.values(), parts, strict=True):
        both = np.concatenate([silo.labels("train"), silo.labels("validation")])
        np.testing.assert_array_equal(
            np.bincount(both, minlength=10), np.bincount(labels[part], minlength=10)
        )


def test_validation_is_fifteen_per_cent_of_each_class_of_a_silo_own_share() -> None:
    for silo in open_silos("digits", silos=3, partition="shards", classes_per_silo=4).values():
        held_out = np.bincount(silo.labels("validation"), minlength=10)
        whole = held_out + np.bincount(silo.labels("train"), minlength=10)
        assert held_out.tolist() == [target_size(int(count)) for count in whole]
        assert held_out.sum() > 0


def test_global_and_own_test_folds() -> None:
    everything = read_digits(None, "test").labels
    for silo in open_silos("digits", **P10C2).values():
        np.testing.assert_array_equal(silo.labels("test"), everything)
    own = open_silos("digits", **P10C2, test="own", test_subset=200)
    assert sum(len(silo.labels("test")) for silo in own.values()) == 200
    for silo in own.values():
        assert set(silo.labels("test").tolist()) == set(silo.labels("train").tolist())
    shared = open_silos("digits", silos=2, test_subset=50)
    first, second = (silo.labels("test") for silo in shared.values())
    assert len(first) == 50
    np.testing.assert_array_equal(first, second)


def test_a_subset_is_drawn_before_the_partition() -> None:
    small = open_silos("digits", silos=2, subset=300, partition_seed=1)
    again = open_silos("digits", silos=2, subset=300, partition_seed=1)
    other = open_silos("digits", silos=2, subset=300, partition_seed=2)
    assert sum(len(silo.labels(fold)) for silo in small.values() for fold in FOLDS[:2]) == 300
    assert rows(small, "train") == rows(again, "train") != rows(other, "train")
    with pytest.raises(JobError, match=r"dataset_options\.subset: Expected at most 1438"):
        open_silos("digits", subset=1439)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "class_disjoint"}, r"\['classes_per_silo'\].*but got no classes_per_silo"),
        ({"partition": "dirichlet"}, "but got no alpha"),
        ({"alpha": 0.3}, "'iid' with the required options .* but got alpha"),
        ({"partition": "shards", "classes_per_silo": 2, "alpha": 0.3}, "but got alpha"),
        ({"partition": "class_disjoint", "classes_per_silo": 2, "min_size": 4}, "but got min_size"),
        (
            {"partition": "dirichlet", "alpha": 0.3, "variant": "fedetf", "min_size": 4},
            "no min_size with the variant 'fedetf'.*but got 4",
        ),
        ({"partition": "patients"}, "'iid', 'class_disjoint', 'dirichlet' or 'shards'"),
        ({"silos": "10"}, "valid integer"),
        ({"silo": 10}, "Extra inputs"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PartitionOptions.model_validate(options)
    with pytest.raises(JobError, match=r"^TF-101: [\s\S]*dataset_options"):
        open_silos("digits", **options)


def test_an_option_that_a_set_does_not_have_is_answered_with_those_it_has() -> None:
    with pytest.raises(JobError) as caught:
        open_silos("digits", silo=10, partition="iid")
    (problem,) = caught.value.problems
    assert problem.startswith("dataset_options.silo: no such key: did you mean 'silos'? Known are ")
    assert set(problem.partition("Known are ")[2].split(", ")) == set(PartitionOptions.model_fields)
    with pytest.raises(JobError, match=r"dataset_options\.silos: .*valid integer \(got 'ten'\)"):
        open_silos("digits", silos="ten")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "class_disjoint", "classes_per_silo": 11}, r"`classes_per_silo` to be 1\.\.10"),
        ({"partition": "dirichlet", "alpha": 0.3, "min_size": 500}, "at least 5000 records"),
    ],
)
def test_a_partition_that_the_records_do_not_allow_is_the_jobs_error(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError, match=f"dataset_options: .*{said}"):
        open_silos("digits", **options)


def test_images_of_another_size_are_found_by_the_check(tmp_path: Path) -> None:
    for stem in ("train", "t10k"):
        images = struct.pack(">4B3I", 0, 0, 8, 3, 20, 32, 32) + bytes(20 * 32 * 32)
        (tmp_path / f"{stem}-images-idx3-ubyte").write_bytes(images)
        labels = struct.pack(">4BI", 0, 0, 8, 1, 20) + bytes(range(10)) * 2
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(labels)
    for name in ("mnist", "fashion_mnist"):
        silo = open_site(name, FolderSite(root=tmp_path, silo=0), PartitionOptions(silos=1))
        with pytest.raises(DataError, match=r"^TF-206: .*28 x 28"):
            silo.check()


def test_records_of_files_are_read_without_a_warning(real_data: Path, tmp_path: Path) -> None:
    """All of the test part, which nobody copies to take a share of it."""
    for stem in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (source,) = (real_data / "mnist_t10k").glob(f"t10k-{kind}-ubyte*")
            (tmp_path / source.name.replace("t10k", stem)).symlink_to(source.resolve())
    silo = open_site("mnist", FolderSite(root=tmp_path, silo=0), PartitionOptions(silos=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records: Any = silo.records("test")
    assert records[0][0].shape == (1, 28, 28)
    assert read_mnist(tmp_path, "test").images.flags.writeable


def test_an_empty_silo_is_named() -> None:
    with pytest.raises(DataError, match=r"^TF-208: .*train fold of silo .*gives it none"):
        open_silos("digits", partition="dirichlet", alpha=0.001, variant="fedetf", silos=40)


def test_unknown_sets_and_missing_folders() -> None:
    with pytest.raises(JobError, match="cifar1000"):
        open_silos("cifar1000")
    with pytest.raises(DataError, match=r"^TF-203: .*`root`"):
        open_silos("cifar10")


def test_digits_need_no_configuration() -> None:
    """A simulation without one takes the spec's stand-in, which are the real digits."""
    spec = SPECS["digits"]
    assert spec.twin is not None
    options = spec.options.model_validate(P10C2)
    every = open_silos("digits", **P10C2)
    share = spec.twin(6, options)
    assert not share.synthetic
    assert rows({"x": share}, *FOLDS) == rows({"x": every["silo-6"]}, *FOLDS)
    configured = spec.open(spec.site.model_validate({"silo": 6}), options)
    assert rows({"x": configured}, *FOLDS) == rows({"x": share}, *FOLDS)
    with pytest.raises(JobError, match="more than 10, but got 10"):
        spec.twin(10, options)
    assert all(other.twin is None for name, other in SPECS.items() if name != "digits")


def test_a_site_names_its_folder_and_its_share(cifar100: Path) -> None:
    spec = SPECS["cifar100"]
    options = spec.options.model_validate({"silos": 3})
    site = spec.site.model_validate({"root": str(cifar100), "silo": 2})
    silo = spec.open(site, options)
    silo.check()
    every = open_silos("cifar100", root=cifar100, silos=3)
    assert rows({"x": silo}, "train") == rows({"x": every["silo-2"]}, "train")
    with pytest.raises(ValidationError, match="absolute path"):
        FolderSite.model_validate({"root": "data", "silo": 0})
    with pytest.raises(ValidationError, match="root"):
        spec.site.model_validate({"silo": 0})
    with pytest.raises(DataError, match=r"^TF-208: .*0\.\.2.*configured as silo 3"):
        open_site("cifar100", FolderSite(root=cifar100, silo=3), options)


def test_damage_is_found_by_the_check_before_training(cifar100: Path) -> None:
    (cifar100 / "test.bin").write_bytes(b"cut off")
    silo = open_site("cifar100", FolderSite(root=cifar100, silo=0), PartitionOptions())
    with pytest.raises(DataError, match=r"^TF-206: .*test\.bin"):
        silo.check()


def test_the_check_tells_how_much_it_read() -> None:
    told: list[str] = []
    open_site("digits", ShareSite(silo=0), PartitionOptions(silos=4)).check(told.append)
    # 1,438 / 4 of training and validation, and all 359 of the test part.
    assert told in (["read 718 records"], ["read 719 records"])


def test_records_have_the_specs_shape_and_the_stated_normalisation(cifar100: Path, real_data: Path) -> None:
    cifar = open_silos("cifar100", root=cifar100, silos=2)["silo-0"]
    values = pixels(cifar, "train")
    assert values.shape[1:] == SPECS["cifar100"].input_shape(None) == (3, 32, 32)
    assert values.dtype == torch.float32
    assert values[:, :, 0, 0].min() == 1.0  # 255 -> (1 - 0.5) / 0.5
    center = values[:, 0, 16, 16] * 127.5 + 127.5
    torch.testing.assert_close(center, center.round(), atol=1e-4, rtol=0)
    digits = open_silos("digits", silos=1)["silo-0"]
    assert (pixels(digits, "test").min(), pixels(digits, "test").max()) == (-1.0, 1.0)
    record, label = digits.records("test")[3]
    assert record.shape == SPECS["digits"].input_shape(None)
    assert isinstance(label, int)
    color = open_silos("color_mnist", root=real_data / "mnist_t10k", source="test", subset=600)["silo-1"]
    values = pixels(color, "train")
    assert values.shape[1:] == SPECS["color_mnist"].input_shape(None) == (2, 14, 14)
    assert values.min() == 0.0
    assert values.max() == pytest.approx(1.0)


@pytest.mark.whole
def test_cifar_is_augmented_by_draws_of_seed_and_record_alone(cifar100: Path) -> None:
    silo = open_silos("cifar100", root=cifar100, silos=1)["silo-0"]
    plain, one, two = (silo.records("train", augment_seed=seed) for seed in (None, 1, 2))
    count = len(silo.labels("train"))
    shuffled = np.random.default_rng(0).permutation(count).tolist()
    in_batch = dict(zip(shuffled, one.__getitems__(shuffled), strict=True))
    offsets, flips, changed = set(), [], 0
    for index in range(count):
        original, view = plain[index][0], one[index][0]
        torch.testing.assert_close(view, in_batch[index][0], atol=0, rtol=0)
        changed += not torch.equal(view, two[index][0])
        # By hand: pad with black, which is -1 after normalisation; cut out; mirror.
        padded = torch.full((3, 40, 40), -1.0)
        padded[:, 4:36, 4:36] = original
        found = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if torch.equal(
                padded[:, top : top + 32, left : left + 32].flip(-1)
                if flip
                else padded[:, top : top + 32, left : left + 32],
                view,
            )
        ]
        assert found, "not a crop of the padded image"
        if len(found) == 1:
            offsets.add(found[0][:2])
            flips.append(found[0][2])
    assert len(offsets) > 20
    assert len(flips) > 100
    assert 0.35 < np.mean(flips) < 0.65
    assert changed > 0.9 * count


def test_other_sets_are_not_augmented() -> None:
    silo = open_silos("digits", silos=1)["silo-0"]
    assert torch.equal(silo.records("train", augment_seed=5)[0][0], silo.records("train")[0][0])


def test_loader_workers_make_the_same_batches(cifar100: Path) -> None:
    silo = open_silos("cifar100", root=cifar100, silos=4)["silo-0"]
    batches = [
        [
            (inputs, labels)
            for inputs, labels in DataLoader(
                silo.records("train", augment_seed=3), batch_size=32, num_workers=workers
            )
        ]
        for workers in (0, 2)
    ]
    for (inputs, labels), (others, other_labels) in zip(*batches, strict=True):
        assert torch.equal(inputs, others)
        assert torch.equal(labels, other_labels)
        assert labels.dtype == torch.int64
    whole = torch.cat([labels for _, labels in batches[0]])
    np.testing.assert_array_equal(whole.numpy(), silo.labels("train"))
    with pytest.raises(IndexError):
        silo.records("train")[len(whole)]


def test_derived_sets_have_their_own_silos(real_data: Path) -> None:
    root = real_data / "mnist_t10k"
    silos = open_silos("color_mnist", root=root, source="test", subset=1200, partition_seed=5)
    assert [len(silo.labels("train")) for silo in silos.values()] == [160] * 5
    assert [len(silo.labels("validation")) for silo in silos.values()] == [40] * 5
    assert [len(silo.labels("test")) for silo in silos.values()] == [200] * 5
    own = open_silos("color_mnist", root=root, source="test", subset=1200, partition_seed=5, test="own")
    assert rows(own, "test") == rows({"x": silos["silo-0"]}, "test")
    fourth = silos["silo-4"]
    assert isinstance(fourth, BenchmarkSilo)
    assert set(fourth.environments("train").tolist()) == {4}
    assert len(fourth.environments("validation")) == 40
    assert fourth.source == "Color-MNIST, silo 4 of 5 (made from 1200 of the test images, seed 5)"
    digits = open_silos("digits", silos=1)["silo-0"]
    assert isinstance(digits, BenchmarkSilo)
    with pytest.raises(ValueError, match="digits has no environments"):
        digits.environments("train")


def test_rotated_cifar10_from_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (40, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(40) % 10
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(records.tobytes())
    silos = open_silos("rotated_cifar10", root=tmp_path)
    assert list(silos) == ["silo-0", "silo-1", "silo-2"]
    # 200 images: 120 over nine environments, of which the first three have one more, 40 tested on.
    assert [len(silo.labels("train")) for silo in silos.values()] == [42, 39, 39]
    assert pixels(silos["silo-2"], "test").shape == (40, 3, 16, 16)


def test_real_mnist_in_shards(real_data: Path, tmp_path: Path) -> None:
    """With the test files under the training part's name: only 10,000 images are there for tests."""
    for kind in ("images-idx3", "labels-idx1"):
        for stem in ("train", "t10k"):
            (tmp_path / f"{stem}-{kind}-ubyte.gz").symlink_to(
                real_data / "mnist_t10k" / f"t10k-{kind}-ubyte.gz"
            )
    silos = open_silos("mnist", root=tmp_path, partition="shards", silos=100, classes_per_silo=2, test="own")
    assert list(silos)[:2] == ["silo-00", "silo-01"]
    together = np.concatenate([silo.labels(fold) for silo in silos.values() for fold in FOLDS[:2]])
    known = read_mnist(real_data / "mnist_t10k", "test").labels
    np.testing.assert_array_equal(np.bincount(together), np.bincount(known))
    assert max(len(set(silo.labels("train").tolist())) for silo in silos.values()) == 2


def test_class_names() -> None:
    counts = {name: spec.num_classes for name, spec in SPECS.items()}
    assert counts == {
        "digits": 10,
        "mnist": 10,
        "fashion_mnist": 10,
        "cifar10": 10,
        "cifar100": 100,
        "svhn": 10,
        "color_mnist": 2,
        "rotated_cifar10": 10,
    }
    assert all(len(set(spec.class_names)) == spec.num_classes for spec in SPECS.values())
    fine = SPECS["cifar100"].class_names
    assert list(fine) == sorted(fine), "the official fine labels are in alphabetical order"


def test_enrolment_needs_neither_torch_nor_scikit_learn() -> None:
    code = (
        "import sys\n"
        "from tightframe.data.image_sets import BENCHMARK_SETS\n"
        "spec = BENCHMARK_SETS[0]\n"
        "silo = spec.twin(1, spec.options(silos=4))\n"
        "silo.check(print)\n"
        "print(sorted({'torch', 'sklearn', 'scipy'} & set(sys.modules)), len(silo.labels('train')))\n"
    )
    assert printed(code)[-1].startswith("[] ")


@pytest.mark.whole
def test_a_run_on_the_real_digits_is_not_called_synthetic(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "dataset": "digits",
        "model_options": {"widths": [16, 32]},
        "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.05},
        "summation": "plain",
        "dataset_options": {"silos": 3, "subset": 600, "test": "own"},
    }
    names = ["a", "b", "c"]
    unconfigured = federation.run("fedavg", names, 2, folder=tmp_path, **common)
    card = json.loads((tmp_path / "server" / "model.json").read_text())
    assert card["synthetic"] is False
    report = json.loads((tmp_path / "b" / "local_report.json").read_text())
    assert report["data"] == "scikit-learn's handwritten digits, silo 1 of 3 (iid, seed 0)"
    opened = open_silos("digits", **common["dataset_options"])
    given = federation.run("fedavg", dict(zip(names, opened.values(), strict=True)), 2, **common)
    for name, value in unconfigured.state.model.items():
        assert torch.equal(value, given.state.model[name])
    final = given.outcome.final()
    assert final is not None and final.evaluation is not None
    # The own test folds together are the whole test part of 359.
    assert final.evaluation.test.records == 359
    assert final.evaluation.test.accuracy > 0.5
