"""All that leaves a silo under privacy, on two data sets that differ in one record, or in one patient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rounds.test_findings import CONTRACT
from tests.support.neighbours import SITE, Records, Tap, compared, recorded, replayed
from tests.support.pages import written

from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.methods import METHODS
from tightframe.phases import Fold, stream_seed
from tightframe.privacy import accounting
from tightframe.privacy.os_randomness import MaskSeeds
from tightframe.privacy.releases.noise import NoisyRelease
from tightframe.privacy.training import dp_sgd, portions
from tightframe.rounds.silo import private_view
from tightframe.rounds.silo.view import LocalSilo

JOB: dict[str, Any] = {
    "job_name": "neighbours",
    "method": "fedavg",
    "dataset": "digits",
    "dataset_options": {"silos": 1},
    "model": "mlp",
    "model_options": {"widths": []},
    "sites": [SITE],
    "min_sites": 1,
    "rounds": 2,
    "weights": "uniform",
    "summation": "plain",
    "training": {"epochs": 2, "batch_size": 64, "learning_rate": 0.1, "augment": False},
    "privacy": {"epsilon": 100.0, "noise_multiplier": 2.0, "spare_rounds": 0},
}
ENTRY = SiteEntry.model_validate(
    {"policy": {"min_class_count": 5, "min_test_count": 10, "epsilon_shown": "exact"}}
)
EXTREME, TWICE, ALONE, FIVE, FIRST = 2, 10, 11, 12, 0
"""Records of the training fold: of huge values, there twice, the one of class 9, one of five of class 8."""
COUNTS = {"train": FIVE + 5, "validation": 10, "test": 10}
"""Records of each fold: the noise and rate of 17, or 16 of them, are those of 16."""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without PRV and the probe, which have tests of their own, and without pages, which nobody reads."""
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)
    with written(False):
        yield


def records(gone: dict[str, int] | None = None) -> Records:
    """Records of two classes, one and five of two others, in three folds; without one of a fold."""
    stream, folds, units = np.random.default_rng(4), {}, []
    for fold, count in COUNTS.items():
        values = stream.random((count, 1, 8, 8)).astype(np.float32)
        labels = np.arange(count) % 2
        if fold == "train":
            values[EXTREME] = 3e38
            values[TWICE], labels[TWICE] = values[4], labels[4]
            labels[ALONE] = 9
            labels[FIVE:] = 8
        else:
            values[3] = 3e38
        keep = np.arange(count) != (gone or {}).get(fold, -1)
        folds[fold] = values[keep], labels[keep]
        units += np.flatnonzero(keep).tolist() if fold == "train" else []
    return Records(ArrayData(folds, source="records", num_classes=10), units)


def findings(gone: dict[str, int] | None = None) -> Records:
    """The same of three findings, some unknown: the fifth of its class has all, the one alone none known."""
    stream, folds, units = np.random.default_rng(6), {}, []
    for fold, count in COUNTS.items():
        values = 3 * stream.random((count, 6)).astype(np.float32)
        labels = stream.integers(-1, 2, (count, 3))
        labels[[3, FIRST]] = 1
        if fold == "train":
            values[EXTREME] = 3e38
            values[TWICE], labels[TWICE] = values[3], labels[3]
            labels[ALONE], labels[FIVE] = -1, 1
        keep = np.arange(count) != (gone or {}).get(fold, -1)
        folds[fold] = values[keep], labels[keep]
        units += np.flatnonzero(keep).tolist() if fold == "train" else []
    return Records(ArrayData(folds, source="records", num_classes=3, findings=True), units)


def form(method: str, privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    values = {**JOB, "method": method, **changes}
    return {**values, "privacy": {**JOB["privacy"], **(privacy or {})}}


FROZEN = {"encoder": "random"}
NOISY = {"evaluation": "noisy", "evaluation_noise_share": 0.5, "class_noise_share": 0.3}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedbabu": {"model_options": {"widths": [4]}},
    "fedrs": {"method_options": {"form": "soft"}},
    "fedavg": {"training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1, "augment": False}},
    "fedsgd": {"training": {"batch_size": 12}},
    **{
        name: {**FROZEN, "rounds": 1, "privacy": {"noise_multiplier": None}}
        for name in ("fed3r", "fedcgs", "fedncm")
    },
}
CHESTS = {"dataset": "table", "dataset_options": {"contract": CONTRACT}}
FORMS = {
    item.name: form(item.name, **OPTIONS.get(item.name, {})) for item in METHODS if item.private is not None
} | {
    "fedavg, findings": form("fedavg", NOISY, **CHESTS),
    "fedavg, CNN": form("fedavg", model="small_cnn", model_options={"widths": [8, 8, 8]}, average_last=2),
    "fedsgd, shared": form("fedsgd", {"noise": "shared"}, training={"batch_size": 12}),
    "fedsgd, drawn": form("fedsgd", method_options={"sampling_rate": 0.5}, training={"batch_size": 12}),
    "fedmr, noisy evaluation": form("fedmr", NOISY),
    "fedavg, start": form("fedavg", **FROZEN, start="fed3r"),
}
CHANGES = {
    "the first, one of many": {"train": FIRST},
    "extreme values": {"train": EXTREME},
    "repeated": {"train": TWICE},
    "alone in its class": {"train": ALONE},
    "fifth of its class": {"train": FIVE},
    "tenth test record": {"test": 3},
    "tenth validation record": {"validation": 3},
}
EACH_KIND = ("fedavg", "fedavg, findings", "fedmr", "fedmr, noisy evaluation", "fed3r", "fedsgd")
"""The first of each kind of release: with all changes. Others clip with the same code, so fewer will do."""
LIKE_OTHERS = ("the first, one of many", "repeated")


PATIENT: dict[str, Any] = {
    "dataset": "eicu",
    "dataset_options": {"drugs": 32},
    "training": {"epochs": 2, "batch_size": 64, "learning_rate": 0.1},
}
PATIENTS = {
    item.name: form(
        item.name,
        {**OPTIONS.get(item.name, {}).get("privacy", {}), "neighbours": "patient"},
        **{
            **PATIENT,
            **{key: value for key, value in OPTIONS.get(item.name, {}).items() if key != "privacy"},
        },
    )
    for item in METHODS
    if item.private is not None
} | {
    "fedsgd, drawn": form(
        "fedsgd",
        {"neighbours": "patient"},
        **{**PATIENT, "method_options": {"sampling_rate": 0.5}, "training": {"batch_size": 12}},
    ),
    "fedavg, start": form("fedavg", {"neighbours": "patient"}, **FROZEN, start="fed3r", **PATIENT),
}
SINGLE, MANY, HUGE, COPIED, LEAST = 3, 4, 5, 6, 0
"""Patients: of one record, of five, of huge values, of one record thrice, the first."""


def stays(gone: int | None = None) -> Records:
    """Records of 17 patients in any order; without one of them."""
    stream = np.random.default_rng(5)
    sizes = {MANY: 5, HUGE: 2, COPIED: 3}
    owners = np.repeat(np.arange(17), [sizes.get(patient, 1) for patient in range(17)])
    values = (stream.normal(size=(len(owners), 32)) * 3).astype(np.float32)
    values[owners == HUGE] = 3e38
    values[owners == COPIED] = values[owners == COPIED][0]
    labels, order = owners % 2, stream.permutation(len(owners))
    chosen = order[owners[order] != gone]
    train = values[chosen], labels[chosen]
    other = values[:10] / 3e38, np.arange(10) % 2
    return Records(
        ArrayData(
            {"train": train, "validation": other, "test": other},
            source="stays",
            num_classes=2,
            patients={
                "train": owners[chosen],
                "validation": np.arange(100, 110),
                "test": np.arange(110, 120),
            },
        ),
        np.unique(owners[chosen]).tolist(),
    )


def worst(
    job: JobConfig,
    whole: Records,
    others: Sequence[Records],
    always: Sequence[int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, float]:
    """Release -> the largest change, in parts of what its noise and its charge allow."""
    tap, found = Tap(monkeypatch, always), dict[str, float]()
    first = recorded(job, whole, folder / "whole", tap, monkeypatch, ENTRY)
    for place, other in enumerate(others):
        second = replayed(job, other, folder / str(place), tap, first, ENTRY)
        for release, part in compared(job, first, second).items():
            found[release] = max(found.get(release, 0.0), part)
    return found


DRAWN = [5, *(gone["train"] for gone in CHANGES.values() if "train" in gone)]


def tight(found: dict[str, float]) -> bool:
    """A sensitivity of half what one record does, or a noise of half the charge, is found."""
    return bool(found) and all(0.5 < part <= 1 + 1e-9 for part in found.values())


@pytest.mark.whole
@pytest.mark.parametrize("name", FORMS)
def test_one_record_changes_what_noise_covers_by_its_sensitivity_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = findings if name.endswith("findings") else records
    left_out = () if name in EACH_KIND else LIKE_OTHERS
    *trained, test, validation = (gone for change, gone in CHANGES.items() if change not in left_out)
    noisy = FORMS[name]["privacy"].get("evaluation") == "noisy"  # else nothing tells of these folds
    changes = [*trained, test, validation] if noisy else [trained[0] | test | validation, *trained[1:]]
    others = [of(gone) for gone in changes]
    found = worst(parse_job(FORMS[name]), of(), others, DRAWN, tmp_path, monkeypatch)
    assert tight(found), found


@pytest.mark.whole
@pytest.mark.parametrize("name", ["fedavg, findings", "fedsgd, drawn"])
def test_a_batched_engine_moves_others_by_rounding_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a record's gradient is computed beside others'."""
    monkeypatch.setattr(portions, "CHOSEN_ON_CPU", "hooks")
    of = findings if name.endswith("findings") else records
    others = [of({"train": gone}) for gone in (EXTREME, FIRST)]
    found = worst(parse_job(FORMS[name]), of(), others, DRAWN, tmp_path, monkeypatch)
    assert 0.5 < found["training"] < 1 + 1e-6


@pytest.mark.whole
@pytest.mark.parametrize("name", PATIENTS)
def test_one_patient_changes_what_noise_covers_by_its_sensitivity_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = (LEAST, SINGLE, MANY, HUGE, COPIED) if name in EACH_KIND else (SINGLE, MANY, HUGE)
    others = [stays(gone) for gone in people]
    found = worst(parse_job(PATIENTS[name]), stays(), others, people, tmp_path, monkeypatch)
    assert tight(found), found


@pytest.mark.parametrize(
    "name",
    [
        "fedmr, noisy evaluation",
        *(pytest.param(name, marks=pytest.mark.whole) for name in ("fed3r", "fedsgd")),
    ],
)
def test_half_the_noise_of_the_charge_and_half_the_clipping_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variance, clipped = NoisyRelease.share_variance, dp_sgd.clipped_sum
    monkeypatch.setattr(NoisyRelease, "share_variance", lambda *given: variance(*given) // 4)
    monkeypatch.setattr(dp_sgd, "clipped_sum", lambda group, clip: clipped(group, 2 * clip))
    others = [records({"train": 5}), records({"test": 4})]
    found = worst(parse_job(FORMS[name]), records(), others, DRAWN, tmp_path, monkeypatch)
    assert found and all(part > 1.2 for part in found.values()), found


class Augmented(ArrayData):
    """Records whose signs turn with the seed, by a name or by their place."""

    names: Sequence[int] = ()

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Any:
        values, labels = self._folds[fold]
        if augment_seed is None or fold != "train":
            return super().records(fold)
        names = self.names or range(len(labels))
        signs = [
            np.random.default_rng([augment_seed, name]).choice([-1, 1], values.shape[1:]) for name in names
        ]
        turned = values * np.array(signs, np.float32)
        return ArrayData({**self._folds, fold: (turned, labels)}, source="", num_classes=10).records(fold)


@pytest.mark.parametrize("stays_with", ["record", "place"])
@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedsgd", marks=pytest.mark.whole)])
def test_seeds_of_masks_and_augmentations_leave_one_clipped_part_if_each_stays_with_its_record(
    name: str, stays_with: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is how the proof has them, and why nobody may know them: by place more is moved."""
    tap = Tap(monkeypatch, DRAWN)
    started: list[int] = []

    def start_next(seeds: MaskSeeds) -> None:
        seeds._count += 1
        by_record = tap.taken[len(started)] if stays_with == "record" else (0, seeds._count)
        started.append(1)
        torch.default_generator.manual_seed(stream_seed(1, *by_record))

    def of(gone: int | None = None) -> Records:
        whole = records(None if gone is None else {"train": gone})
        made = Augmented(whole.data._folds, source="records", num_classes=10)  # type: ignore[attr-defined]
        made.names = whole.units if stays_with == "record" else ()
        tap.taken.clear(), started.clear()
        return Records(made, whole.units)

    monkeypatch.setattr(MaskSeeds, "start_next", start_next)
    training = {**FORMS[name]["training"], "augment": True}
    options = {"widths": [4], "dropout": 0.5}
    job = parse_job({**FORMS[name], "training": training, "model_options": options})
    first = recorded(job, of(), tmp_path / "whole", tap, monkeypatch, ENTRY)
    second = replayed(job, of(FIRST), tmp_path / "other", tap, first, ENTRY)
    moved = compared(job, first, second)["training"]
    assert started and (0.5 < moved <= 1 + 1e-9 if stays_with == "record" else moved > 1.5), moved


def test_a_step_by_the_exact_number_of_records_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_view, "coarse_count", lambda number: number)
    job = parse_job(FORMS["fedprox"])
    with pytest.raises(AssertionError, match=r"update/head\.weight differs, and no noise covers it"):
        worst(job, records(), [records({"train": 5})], DRAWN, tmp_path, monkeypatch)


@pytest.mark.parametrize("leaks", [False, True])
def test_who_is_not_drawn_moves_no_gradient_unless_the_loss_has_exact_class_counts(
    leaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if leaks:
        monkeypatch.setattr(private_view.PrivateSilo, "class_counts", LocalSilo.class_counts)
    job, tap = parse_job({**FORMS["fedetf"], "rounds": 1}), Tap(monkeypatch, never=[FIVE])
    first = recorded(job, records(), tmp_path / "whole", tap, monkeypatch, ENTRY)
    moved = compared(job, first, replayed(job, records({"train": FIVE}), tmp_path, tap, first, ENTRY))
    assert (moved["training"] > 0) is leaks
