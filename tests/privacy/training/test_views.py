"""Augmented views of a record: their mean gradient is clipped, by record and by patient, as one record's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from torch import nn

from tightframe import data
from tightframe.errors import JobError
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.models.heads import Classifier
from tightframe.privacy.os_randomness import KEY_BYTES, poisson_batch
from tightframe.privacy.releases.gradient_sums import GradientSumConfig
from tightframe.privacy.training import dp_sgd
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.privacy.training.gradient_sum import clipped_gradient_sum
from tightframe.privacy.training.per_sample import ENGINES, EngineName
from tightframe.rounds.setup import prepare

COUNT, WIDTH, VIEWS, CLIP = 12, 5, 3, 1.2
PATIENTS = np.array([4, 4, 7, 7, 7, 9, 2, 2, 1, 1, 1, 1])


def network(dropout: float = 0.0) -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout)), 8, 3)


def view(number: int) -> list[tuple[torch.Tensor, int]]:
    """Records of very different sizes, each view of one another; labels stay."""
    sizes = torch.linspace(0.1, 6, COUNT)
    stream = torch.Generator().manual_seed(number)
    return [(sizes[i] * torch.randn(WIDTH, generator=stream), i % 3) for i in range(COUNT)]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, which no setting allows."""
    monkeypatch.setattr(dp_sgd, "standard_normal", lambda count, _: torch.zeros(count, dtype=torch.float64))


def opacus_gradients(module: nn.Module, numbers: range) -> torch.Tensor:
    """Each view's gradient, (views, records, P) float64, by Opacus."""
    found = []
    for number in numbers:
        wrapped = GradSampleModule(module, loss_reduction="sum")
        inputs = torch.stack([item for item, _ in view(number)])
        labels = torch.tensor([label for _, label in view(number)])
        nn.functional.cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
        found.append(torch.cat([item.grad_sample.flatten(1) for item in module.parameters()], 1).double())
        module = wrapped.to_standard_module()
        module.zero_grad()
    return torch.stack(found)


def clipped(rows: torch.Tensor) -> torch.Tensor:
    return rows * (CLIP / rows.norm(dim=1, keepdim=True)).clamp(max=1)


def by_patient(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [rows[torch.from_numpy(patient == PATIENTS)].mean(0) for patient in np.unique(PATIENTS)]
    )


def stepped(model: nn.Module, records: Any = view, **given: Any) -> torch.Tensor:
    """How far one step of rate 1 moves the parameters, which is minus the sum: (P,)."""
    before = torch.cat([item.detach().clone().flatten() for item in model.parameters()])
    settings = given.pop("settings", PrivateSettings(CLIP, 1.0, 1.0, 1.0))
    stage = Stage((cross_entropy(),), OptimizerSettings("sgd", 1.0), steps=given.pop("steps", 1))
    given = {"views": VIEWS, "probe": False} | given
    private_fit(model, records, [stage], settings=settings, device="cpu", **given)
    return before - torch.cat([item.detach().flatten() for item in model.parameters()])


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("patients", [None, PATIENTS], ids=["record", "patient"])
def test_the_mean_of_a_records_views_is_clipped(silent: None, engine: EngineName, patients: Any) -> None:
    each = opacus_gradients(network(), range(VIEWS))
    found = stepped(network(), engine=engine, patients=patients).double()
    rows = each.mean(0) if patients is None else by_patient(each.mean(0))
    norms = rows.norm(dim=1)
    assert bool((norms > CLIP).any()) and bool((norms < CLIP).any())
    torch.testing.assert_close(found, clipped(rows).sum(0), rtol=1e-4, atol=1e-5)

    single = torch.stack([clipped(item) for item in each])
    for wrong in (single.mean(0).sum(0), single.sum((0, 1)), clipped(each.flatten(0, 1)).sum(0)):
        assert float((found - wrong).norm()) > 0.05, "views clipped by themselves, or counted as records"


def test_a_sum_of_gradients_has_them_too() -> None:
    model = network()
    config = GradientSumConfig(1.0, sum(item.numel() for item in model.parameters()), 1.0)
    each = opacus_gradients(network(), range(VIEWS))
    for patients, rows in ((None, each.mean(0)), (PATIENTS, by_patient(each.mean(0)))):
        units = clipped_gradient_sum(
            network(),
            view,
            [cross_entropy()],
            config=config,
            clip_norm=CLIP,
            device="cpu",
            batch_size=5,
            charge=lambda: None,
            patients=patients,
            views=VIEWS,
        )
        found = units[:-1].double() * CLIP / config.grid
        torch.testing.assert_close(found, clipped(rows).sum(0), rtol=1e-4, atol=1e-4)
        assert units[-1] == len(rows) * config.count_units, "a record counts once, however many its views"


@pytest.mark.parametrize("patients", [False, True], ids=["record", "patient"])
def test_a_record_moves_the_sum_by_the_clipping_norm_at_most_whatever_its_views(
    silent: None, patients: bool
) -> None:
    """The sensitivity, as without views: the same run with one record, or patient, more."""
    base = stepped(network(), patients=PATIENTS if patients else None)
    longest = 0.0
    for scale in (1e-9, 1.0, 1e4, 1e30, math.inf, math.nan):
        # Each view pulls another way, or as far as it can.
        def more(number: int, scale: float = scale) -> list[tuple[torch.Tensor, int]]:
            return [*view(number), (scale * (1 + number) * torch.ones(WIDTH), 2)]

        owners = np.append(PATIENTS, 100) if patients else None
        moved = float((stepped(network(), more, patients=owners) - base).norm())
        assert moved <= CLIP * (1 + 1e-4)
        longest = max(longest, moved)
    assert longest > 0.99 * CLIP


def test_every_step_sees_other_views_of_those_who_take_part(silent: None) -> None:
    asked: list[int] = []

    def records(number: int) -> Any:
        asked.append(number)
        return view(number)

    stepped(network(), records, steps=2)
    # The first is asked for the number of records; each step then has its own.
    assert [number for number in dict.fromkeys(asked)] == list(range(2 * VIEWS))

    seed, rate = 3, 0.4
    source = np.random.default_rng(seed).bytes
    source(KEY_BYTES)  # of dropout masks
    chosen = poisson_batch(COUNT, rate, source)
    assert 1 < len(chosen) < COUNT
    settings = PrivateSettings(CLIP, 1.0, rate, 1.0)
    found = stepped(network(), settings=settings, random_bytes=np.random.default_rng(seed).bytes)
    rows = opacus_gradients(network(), range(VIEWS)).mean(0)[chosen]
    torch.testing.assert_close(found.double(), clipped(rows).sum(0), rtol=1e-4, atol=1e-5)


def test_views_cost_nothing_and_have_dropout_masks_of_their_own(silent: None) -> None:
    settings = PrivateSettings(CLIP, 1.0, 0.5, 6.0)
    stage = Stage((cross_entropy(),), OptimizerSettings("sgd", 0.1), steps=4)
    charged = [
        private_fit(network(), view, [stage], settings=settings, device="cpu", views=number)[1]
        for number in (1, VIEWS)
    ]
    assert charged[0] == charged[1] == settings.events([stage])
    same = lambda number: view(0)  # noqa: E731
    one = stepped(network(0.5), same, views=1, random_bytes=np.random.default_rng(1).bytes)
    many = stepped(network(0.5), same, views=64, random_bytes=np.random.default_rng(1).bytes)
    assert float((one - many).norm()) > 0.05


def test_no_view_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one view"):
        stepped(network(), views=0)


JOB: dict[str, Any] = {
    "job_name": "views",
    "method": "fedavg",
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "model": "small_cnn",
    "model_options": {"widths": [8]},
    "sites": ["a", "b", "c"],
    "min_sites": 3,
    "rounds": 2,
    "weights": "uniform",
    "privacy": {"views": 4},
}


def test_a_job_with_one_view_has_the_hash_that_it_had() -> None:
    one = {**JOB, "privacy": {}}
    setup = prepare(one)
    assert "views" not in setup.job.model_dump()["privacy"]
    assert setup.job.sha256() == prepare({**JOB, "privacy": {"views": 1}}).job.sha256()
    assert setup.job.sha256() != prepare(JOB).job.sha256()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset": "digits", "dataset_options": {}}, "augments nothing"),
        ({"training": {"augment": False}}, "set training.augment to true"),
        ({"privacy": {"views": 0}}, "privacy.views"),
    ],
)
def test_views_that_would_all_be_the_same_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        prepare({**JOB, **changes})


@pytest.mark.parametrize("name", ["fed_isic2019", "cifar10", "digits", "fed_heart_disease"])
def test_a_data_set_says_truly_whether_it_augments(name: str) -> None:
    spec = data.get(name)
    assert spec.augments == (name in ("fed_isic2019", "cifar10"))
    if spec.twin is None:
        return
    silo = spec.twin(0, spec.options())
    first, other = (silo.records("train", augment_seed=seed)[0][0] for seed in (1, 2))
    assert torch.equal(first, other) == (not spec.augments)
