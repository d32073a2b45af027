"""What a private silo charges and refuses, under plans and with a ledger that stand in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import HEART

from tightframe.config.job import parse_job
from tightframe.data.arrays import ArrayData
from tightframe.errors import RunError
from tightframe.phases import Fold
from tightframe.privacy.events import PrivacyValueError, SubsampledGaussian
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import private_view
from tightframe.rounds.silo.private_view import PrivateSilo, whole_patients
from tightframe.rounds.silo.view import LocalSilo, RequestedSum

SITES = ["a", "b", "c"]
PRIVATE: dict[str, Any] = {"privacy": {"epsilon": 60.0, "noise_multiplier": 1.0}, "weights": "uniform"}


class Data(ArrayData):
    """Ten records of three patients."""

    def __init__(self) -> None:
        values, labels = np.random.default_rng(1).normal(size=(10, 13)), np.arange(10) % 2
        folds: dict[Fold, Any] = dict.fromkeys(("train", "validation", "test"), (values, labels))
        owners: dict[Fold, Any] = dict.fromkeys(folds, np.array([1, 1, 1, 2, 2, 2, 2, 3, 3, 3]))
        super().__init__(folds, source="some records", num_classes=2, patients=owners)


def silo(folder: Path, number: int = 1, **changes: Any) -> tuple[Any, list[Any]]:
    """A silo of a private job, and what it charges."""
    values = {**HEART, "sites": SITES, "min_sites": 3, **PRIVATE, **changes}
    setup = prepare(parse_job(values))
    context = SiloContext("a", setup.job, None, run_dir=folder, records=Data(), job_id="run")
    context.state_folder.mkdir(parents=True, exist_ok=True)
    view = PrivateSilo(context, setup, torch.device("cpu"), number, RequestedSum(SITES, 3))
    charged: list[Any] = []
    view._budget = SimpleNamespace(  # type: ignore[assignment]
        charge=lambda purpose, events, **more: charged.append((purpose, more)),
        solve_once=lambda purpose, solve: 1.0,
    )
    return view, charged


def planned(view: Any, **values: Any) -> tuple[Any, ...]:
    """What a silo plans to charge under another plan, which releases one thing beside the training."""
    privacy = SimpleNamespace(neighbours="record", spare_rounds=2)
    plan = {"frozen": None, "trains": True, "gradients": None, "privacy": privacy}
    view._plan = SimpleNamespace(**{**plan, "release_events": ("release",), **values})
    return tuple(view._planned())


def test_a_job_without_privacy_is_none_of_a_private_silo(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected a job with `privacy`"):
        silo(tmp_path, privacy=None)


def test_each_round_and_release_is_planned_spare_rounds_too(tmp_path: Path) -> None:
    view, _ = silo(tmp_path)
    gradients = SimpleNamespace(event=lambda: "gradients")
    assert planned(view, trains=False) == ("release",)
    assert planned(view, gradients=gradients) == ("release", *["gradients"] * 3)
    privacy = SimpleNamespace(neighbours="record", spare_rounds=1, clip_norm=1.0, noise_multiplier=1.0)
    trained = SubsampledGaussian(1.0, 1.0, 1)
    assert planned(view, privacy=privacy) == ("release", trained, trained)
    checked: list[Any] = []
    view._budget.check = lambda *given: checked.append(given)
    view.check_budget()
    assert checked == [(("release", trained, trained), None)], "no other epsilon changes a given noise"


@pytest.mark.parametrize(("neighbours", "count"), [("record", 10), ("patient", 3)])
def test_the_sampling_rate_is_of_what_is_protected(tmp_path: Path, neighbours: str, count: int) -> None:
    view, _ = silo(tmp_path, training={"learning_rate": 0.1, "batch_size": 2})
    privacy = SimpleNamespace(neighbours=neighbours, spare_rounds=0, clip_norm=1.0)
    view._plan = SimpleNamespace(privacy=privacy)
    assert view.training_settings().sampling_rate == 2 / count


@pytest.mark.parametrize(("neighbours", "count"), [("record", 10), ("patient", 3)])
def test_a_frozen_release_is_checked_by_its_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbours: str, count: int
) -> None:
    view, _ = silo(tmp_path)
    checked: list[Any] = []
    monkeypatch.setattr(private_view, "checked_records", lambda *given: checked.append(given))
    privacy = SimpleNamespace(neighbours=neighbours, spare_rounds=0)
    planned(view, trains=False, privacy=privacy)
    assert checked == []
    planned(view, trains=False, privacy=privacy, frozen=SimpleNamespace())
    assert checked == [(count, neighbours)]


def test_repeated_records_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = silo(tmp_path)
    monkeypatch.setattr(private_view, "own_labels", lambda data: np.arange(9))
    with pytest.raises(PrivacyValueError, match="some are repeated"):
        planned(view)


@pytest.mark.parametrize("neighbours", ["record", "patient"])
def test_only_noisy_class_counts_are_charged_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbours: str
) -> None:
    view, charged = silo(tmp_path)
    made: list[Any] = []

    def noisy(labels: torch.Tensor, classes: int, noise: float, *, patients: Any) -> torch.Tensor:
        made.append((len(labels), patients is not None))
        return torch.tensor([4.5, 5.5])

    monkeypatch.setattr(private_view.class_sums, "noisy_counts", noisy)
    monkeypatch.setattr(private_view, "own_labels", lambda data: np.arange(9) % 2)  # one is repeated
    view._plan = SimpleNamespace(
        prior=False,
        class_sums=SimpleNamespace(noise_multiplier=2.0),
        privacy=SimpleNamespace(neighbours=neighbours),
    )
    assert view.class_counts("train").tolist() == [5, 5]
    view._plan.prior = True
    assert view.class_counts("test").tolist() == [5, 5] and charged == []
    for _ in range(2):
        assert view.class_counts("train").tolist() == [4.5, 5.5]
    assert len(charged) == 1 and made == [(9, False) if neighbours == "record" else (10, True)]


@pytest.mark.parametrize(("offers", "neighbours"), [(True, "record"), (True, "patient"), (False, "record")])
def test_class_sums_are_charged_where_records_are_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offers: bool, neighbours: str
) -> None:
    """Who offers none still adds its share of the noise."""
    view, charged = silo(tmp_path)
    monkeypatch.setattr(LocalSilo, "offers_prototypes", property(lambda self: offers))
    config = SimpleNamespace(lone_event=lambda honest: "alone", events=lambda times: ("sums",))
    view._plan = SimpleNamespace(class_sums=config, privacy=SimpleNamespace(neighbours=neighbours))
    summed: list[int] = []

    def ones(portion: Any, labels: torch.Tensor, *_: Any, patients: Any) -> torch.Tensor:
        summed.append(len(labels))
        assert (patients is None) == (neighbours == "record")
        return torch.ones(2, 4, dtype=torch.int64)

    monkeypatch.setattr(private_view.class_sums, "class_sums", ones)
    monkeypatch.setattr(view, "_with_noise", lambda total: total)
    total = view.private_class_sums(lambda inputs: inputs.flatten(1)[:, :3], 3)
    assert bool(total.any()) is offers and sum(summed) == 10 * offers
    assert charged == ([("round 1 class sums", {"alone": "alone"})] if offers else [])


def test_a_sum_of_gradients_that_is_not_planned_is_refused(tmp_path: Path) -> None:
    view, charged = silo(tmp_path)
    view._plan = SimpleNamespace(gradients=None)
    with pytest.raises(ValueError, match="the plan has none"):
        view.private_gradient_sum(torch.nn.Linear(1, 1), [])
    assert charged == []


@pytest.mark.parametrize(("shares", "alone"), [(1, None), (2, ("event", 2))])
def test_a_share_of_the_noise_is_charged_as_what_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: int, alone: Any
) -> None:
    view, charged = silo(tmp_path)
    config = SimpleNamespace(
        event=lambda shares=1: ("event", shares),
        as_numbers=lambda units: units,
        share=lambda shape, shares: np.full(shape, float(shares)),
    )
    privacy = SimpleNamespace(neighbours="record", clip_norm=1.0, views=1)
    view._plan = SimpleNamespace(gradients=config, training_shares=lambda honest: shares, privacy=privacy)

    def clipped(*_: Any, charge: Any, **__: Any) -> torch.Tensor:
        charge()
        return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    monkeypatch.setattr(private_view, "clipped_gradient_sum", clipped)
    sums, number = view.private_gradient_sum(torch.nn.Linear(1, 1), [])
    assert charged == [("round 1 training", {"alone": alone})]
    assert (sums - shares).tolist() == [1.0, 2.0] and float(number) == 3.0 + shares


def frozen(products: bool) -> Any:
    """A plan with a release of frozen features."""
    part = SimpleNamespace(share=lambda shape, honest: np.zeros(shape), as_numbers=lambda units: units)
    config = SimpleNamespace(
        products=products,
        lone_event=lambda honest: "alone",
        events=lambda times: ("sums",),
        part=lambda name: part,
    )
    return SimpleNamespace(
        frozen=SimpleNamespace(config=config), privacy=SimpleNamespace(neighbours="record")
    )


@pytest.mark.parametrize(
    ("offers", "number", "purposes"),
    [(True, 0, ["start feature sums"]), (True, 3, ["round 3 feature sums"]), (False, 3, [])],
)
def test_frozen_sums_are_charged_where_records_are_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offers: bool, number: int, purposes: list[str]
) -> None:
    view, charged = silo(tmp_path, number)
    monkeypatch.setattr(LocalSilo, "offers_prototypes", property(lambda self: offers))
    added: list[float] = []
    monkeypatch.setattr(view, "_add_features", lambda totals, model, radius: added.append(radius))
    view._plan = frozen(products=False)
    view.private_frozen_sums(torch.nn.Identity(), 4, products=False, radius=2.0)
    assert [purpose for purpose, _ in charged] == purposes and added == [2.0] * offers


def test_frozen_sums_that_are_not_planned_are_refused(tmp_path: Path) -> None:
    view, charged = silo(tmp_path)
    for plan in (frozen(products=True), SimpleNamespace(frozen=None)):
        view._plan = plan
        with pytest.raises(RunError, match=r"^TF-505: "):
            view.private_frozen_sums(torch.nn.Identity(), 4, products=False, radius=2.0)
    assert charged == []


@pytest.mark.parametrize("neighbours", ["record", "patient"])
def test_all_records_are_added_with_their_patients_where_these_are_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbours: str
) -> None:
    view, _ = silo(tmp_path)
    view._plan = SimpleNamespace(privacy=SimpleNamespace(neighbours=neighbours))
    batches = [(torch.ones(4, 2), torch.zeros(4)), (torch.ones(6, 2), torch.ones(6))]
    monkeypatch.setattr(view, "encoded", lambda model, fold, exact: iter(batches))
    monkeypatch.setattr(private_view.frozen_sums, "whole_features", lambda features, radius: features)
    added: list[Any] = []

    def add(rows: torch.Tensor, labels: torch.Tensor, *owners: torch.Tensor) -> None:
        added.append((len(rows), len(labels), len(owners)))

    totals: Any = SimpleNamespace(add=add)
    view._add_features(totals, torch.nn.Identity(), 1.0)
    assert added == ([(4, 4, 0), (6, 6, 0)] if neighbours == "record" else [(10, 10, 1)])


def test_training_sees_the_records_or_what_is_kept_of_them_until_the_run_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, _ = silo(tmp_path)
    seeds: list[Any] = []
    context = SimpleNamespace(
        stopped=lambda: False,
        data=SimpleNamespace(records=lambda fold, augment_seed: seeds.append((fold, augment_seed))),
        features=SimpleNamespace(fold=lambda *given: "encoded"),
    )
    view.context, view.stream = context, lambda name, step: 40 + step
    for augment in (False, True):
        view.setting = SimpleNamespace(local=SimpleNamespace(augment=augment))
        view._encoder = None
        view._views(2)
    assert seeds == [("train", None), ("train", 42)]
    view._encoder = torch.nn.Identity()
    assert view._views(2) == "encoded"
    context.stopped = lambda: True
    with pytest.raises(RunError, match=r"^TF-504: "):
        view._views(2)


def test_advice_on_noise_is_for_noise_that_alone_exceeds_the_bound(tmp_path: Path) -> None:
    """As many as six deviations, by SGD; by other optimizers it is not known."""

    def said(noise: float, privacy: dict[str, Any] = PRIVATE["privacy"], **training: Any) -> str:
        local = {"learning_rate": 1.0, "batch_size": 4, **training}
        view, _ = silo(tmp_path, training=local, update_norm=None, privacy=privacy)
        view._budget.solve_once = lambda purpose, solve: noise
        return str(view.large_update_advice())

    assert "a smaller `privacy.noise_multiplier`" in said(1e4)
    assert "a larger `privacy.epsilon`" in said(1e4, {"epsilon": 60.0})
    for advice in (said(1e-4), said(1e4, optimizer="adam", momentum=0.0)):
        assert "an update has noise" not in advice


def test_portions_are_whole_patients_and_all_of_them() -> None:
    owners = torch.tensor([1, 1, 2, 2, 3])

    def batches(*sizes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for size in sizes:
            yield torch.zeros(size, 2), torch.zeros(size)

    def portions(*sizes: int) -> list[list[int]]:
        return [found.tolist() for _, _, found in whole_patients(batches(*sizes), owners)]

    assert portions(1, 1, 2, 1) == [[1, 1], [2, 2], [3]], "no portion before a patient is whole"
    assert portions(3, 2) == [[1, 1], [2, 2, 3]]
    with pytest.raises(ValueError, match="consecutive"):
        list(whole_patients(batches(3), torch.tensor([1, 2, 1])))
    for wrong in ((1, 1), (2, 2), (3,)):
        with pytest.raises(ValueError, match="Expected 5 records"):
            portions(*wrong)
