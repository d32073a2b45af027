"""private_fit against plain loops, Opacus and the definition."""

from __future__ import annotations

import copy
import math
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from tightframe import models
from tightframe.errors import TrainingError
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import ParameterTerm, Stage, Term, cross_entropy
from tightframe.methods.fedmr import intra_class_loss
from tightframe.methods.scaffold import gradient_correction
from tightframe.models.heads import Classifier
from tightframe.privacy.events import SubsampledGaussian
from tightframe.privacy.os_randomness import KEY_BYTES, poisson_batch
from tightframe.privacy.training import dp_sgd, portions
from tightframe.privacy.training.clipping import clipped_sum
from tightframe.privacy.training.dp_sgd import PrivateSettings, private_fit
from tightframe.privacy.training.per_sample import ENGINES, EngineName, PrivacyError

Item = tuple[torch.Tensor, int]
COUNT, WIDTH, CLASSES = 24, 5, 3


def build(**options: Any) -> nn.Module:
    spec = models.get("mlp")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spec.build(spec.options.model_validate({"widths": [8], **options}), (WIDTH,), CLASSES)


def items(count: int = COUNT, seed: int = 1) -> list[Item]:
    stream = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTH, generator=stream)
    return [(inputs[i], i % CLASSES) for i in range(count)]


def given(records: list[Item]) -> Callable[[int], Any]:
    return lambda step: records


def stage(
    *terms: Term,
    name: Any = "sgd",
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    decay: float = 0.0,
    steps: int | None = 5,
    epochs: int | None = None,
    **others: Any,
) -> Stage:
    optimizer = OptimizerSettings(name, learning_rate, momentum, decay)
    steps = steps if epochs is None else None
    return Stage(terms or (cross_entropy(),), optimizer, epochs=epochs, steps=steps, **others)


def settings(rate: float = 0.4, clip: float = 1.0, noise: float = 1.0, count: int = COUNT) -> PrivateSettings:
    return PrivateSettings(clip, noise, rate, rate * count)


def fit(model: nn.Module, *stages: Stage, records: list[Item] | None = None, **others: Any) -> Any:
    others = {"settings": settings(), "probe": False} | others
    return private_fit(model, given(items() if records is None else records), stages, device="cpu", **others)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, which no setting allows."""
    monkeypatch.setattr(dp_sgd, "standard_normal", lambda count, _: torch.zeros(count, dtype=torch.float64))


def drawn_batches(seed: int, steps: list[int], rate: float) -> list[list[int]]:
    """The batches that ``private_fit`` draws from this generator while there is no noise."""
    source = np.random.default_rng(seed).bytes
    source(KEY_BYTES)  # of dropout masks
    return [poisson_batch(COUNT, rate, source) for count in steps for _ in range(count)]


PROXIMAL = 0.3


def proximal(start: dict[str, torch.Tensor]) -> ParameterTerm:
    def value(model: nn.Module) -> torch.Tensor:
        return torch.stack([(p - start[n]).square().sum() for n, p in model.named_parameters()]).sum() / 2

    return ParameterTerm("proximal", PROXIMAL, value)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_without_noise_and_clipping_it_is_a_plain_loop_over_the_same_batches(silent: None, name: str) -> None:
    """With FedProx's term, SCAFFOLD's correction, momentum and weight decay; two stages."""
    model, plain = build(), build()
    start = {n: p.detach().clone() + 0.2 for n, p in model.named_parameters()}
    own = {n: torch.full_like(p, 0.02) for n, p in model.named_parameters()}
    common = {n: torch.full_like(p, 0.05) for n, p in model.named_parameters()}
    shared: Any = {
        "name": name,
        "momentum": 0.9 if name == "sgd" else 0.0,
        "decay": 0.01,
        "parameter_terms": [proximal(start)],
        "corrections": [gradient_correction(own, common)],
    }
    stages = [stage(steps=6, **shared), stage(epochs=1, trainable=lambda n: n.startswith("head"), **shared)]
    report, events = fit(
        model,
        *stages,
        settings=settings(rate=0.1, clip=1e12),
        random_bytes=np.random.default_rng(1).bytes,
    )
    batches = drawn_batches(1, [6, 10], 0.1)
    assert any(not chosen for chosen in batches) and max(map(len, batches)) > 1

    records = items()
    for chosen, trained in (
        (batches[:6], list(plain.parameters())),
        (batches[6:], list(plain.head.parameters())),  # type: ignore[union-attr]
    ):
        optimizer: Any = (
            torch.optim.SGD(trained, 0.1, momentum=0.9, weight_decay=0.01)
            if name == "sgd"
            else torch.optim.Adam(trained, 0.1, weight_decay=0.01)
        )
        for places in chosen:
            optimizer.zero_grad()
            value = PROXIMAL / 2 * sum((p - start[n]).square().sum() for n, p in plain.named_parameters())
            for place in places:
                inputs, label = records[place]
                logits = plain(inputs[None])
                value = value + nn.functional.cross_entropy(logits, torch.tensor([label])) / (0.1 * COUNT)
            value.backward()  # type: ignore[union-attr]
            for parameter in trained:
                parameter.grad += 0.03  # type: ignore[operator]
            optimizer.step()
    for (place, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-6, msg=lambda m, p=place: f"{p}: {m}")
    assert report.steps == 16 and events == (SubsampledGaussian(1.0, 0.1, 16),)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_engines_train_alike(silent: None, engine: EngineName) -> None:
    trained = []
    for name in ("loop", engine):
        model = build()
        fit(model, stage(), engine=name, random_bytes=np.random.default_rng(3).bytes)
        trained.append(list(model.parameters()))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_clipping_and_averaging_are_those_of_opacus() -> None:
    model = build()
    inputs = torch.stack([item[0] for item in items()]) * torch.linspace(0.01, 20, COUNT)[:, None]
    labels = torch.tensor([item[1] for item in items()])
    wrapped = GradSampleModule(copy.deepcopy(model))
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.7,
        expected_batch_size=10,
    )
    nn.functional.cross_entropy(wrapped(inputs), labels).backward()
    group = [parameter.grad_sample for parameter in wrapped.parameters()]
    found = clipped_sum(group, 0.7)
    norms = torch.stack([item.reshape(COUNT, -1).norm(dim=1) for item in group]).norm(dim=0)
    assert bool((norms < 0.7).any()) and bool((norms > 0.7).any())
    optimizer.pre_step()
    expected = torch.cat([item.summed_grad.double().flatten() for item in wrapped.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    averaged = torch.cat([item.grad.double().flatten() for item in wrapped.parameters()])
    torch.testing.assert_close(found / 10, averaged, rtol=1e-5, atol=1e-7)


def test_no_record_moves_the_sum_by_more_than_the_clipping_norm(silent: None) -> None:
    """The sensitivity itself: the same run with one record more, which pulls as hard as it can."""
    wild = (torch.full((WIDTH,), 1e6), 0)
    moved = []
    for records in (items(), [*items(), wild]):
        model = build()
        before = [item.detach().clone() for item in model.parameters()]
        fit(
            model,
            stage(steps=1, learning_rate=1.0),
            records=records,
            settings=PrivateSettings(0.5, 1.0, 1.0, 1.0),
        )
        moved.append(
            torch.cat([(a - b).detach().flatten() for a, b in zip(model.parameters(), before, strict=True)])
        )
    assert 0.49 < float((moved[1] - moved[0]).norm()) < 0.5 * (1 + 1e-4)


def test_records_whose_gradient_is_not_finite_count_as_zero(silent: None) -> None:
    group = [
        torch.tensor([[1.0, 0.0], [math.nan, 0.0], [math.inf, 1.0]]),
        torch.tensor([[0.0], [1.0], [1.0]]),
    ]
    assert clipped_sum(group, 10.0).tolist() == [1.0, 0.0, 0.0]
    assert clipped_sum([item[1:2] for item in group], 10.0).tolist() == [0.0, 0.0, 0.0]
    trained = []
    for records in (items(), [*items(), (torch.full((WIDTH,), math.nan), 0)]):
        model = build()
        fit(model, stage(), records=records, settings=PrivateSettings(1.0, 1.0, 1.0, COUNT))
        trained.append(list(model.parameters()))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


def test_noise_has_the_promised_deviation_in_every_coordinate() -> None:
    """Batches that are empty leave the noise alone: sigma C / L."""
    model = build(widths=[400])
    before = [item.detach().clone() for item in model.parameters()]
    chosen = PrivateSettings(2.0, 1.5, 1e-12, 4.0)
    report, events = fit(model, stage(steps=8, learning_rate=1.0), settings=chosen)
    noise = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(model.parameters(), before, strict=True)]
    ).double()
    expected = math.sqrt(8) * 1.5 * 2.0 / 4.0
    # Six standard deviations: 7 % of what is promised, of which half or twice as much would be far off.
    assert abs(float(noise.std()) / expected - 1) < 6 / math.sqrt(2 * len(noise))
    assert abs(float(noise.mean())) < 6 * expected / math.sqrt(len(noise))
    assert report.steps == 8 and events == (SubsampledGaussian(1.5, 1e-12, 8),)


def test_neither_batches_nor_noise_follow_any_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        model = build()
        fit(model, stage())
        trained.append(torch.cat([item.detach().flatten() for item in model.parameters()]))
        after = torch.rand(())
    # One of 75 parameters is the same number by chance in one of some ten thousand runs.
    assert int((trained[0] == trained[1]).sum()) < 3
    torch.manual_seed(0)
    assert after == torch.rand(())  # and torch's own stream is left as it was


def test_dropout_masks_do_not_follow_torchs_seed(silent: None) -> None:
    trained = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build(dropout=0.5)
        fit(model, stage(steps=1), settings=settings(rate=1.0))
        trained.append(model.head.weight.detach())  # type: ignore[union-attr]
    assert not torch.equal(*trained)


@pytest.mark.parametrize("engine", [None, "vmap"])
def test_each_record_has_a_stream_of_dropout_masks_of_its_own(engine: EngineName | None) -> None:
    """In one stream, with a seed of 32 bits that can be found, one record more shifts the masks of others."""
    seeds = []

    class Dropping(nn.Dropout):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            if self.training:
                seeds.append(torch.default_generator.initial_seed() % 2**32)
            return super().forward(values)

    model = Classifier(nn.Sequential(nn.Linear(WIDTH, 8), Dropping(0.5)), 8, CLASSES)
    fit(model, stage(steps=3), settings=settings(rate=1.0), engine=engine)
    assert len(seeds) - 2 <= 3 * COUNT <= len(seeds)  # vmap is tried on one batch
    assert len(set(seeds[-3 * COUNT :])) == 3 * COUNT


def test_the_charge_comes_first_and_can_stop_it() -> None:
    class SpentError(Exception):
        pass

    asked: list[Any] = []
    read: list[int] = []

    class Watched(list[Item]):
        def __getitem__(self, place: Any) -> Any:
            read.append(place)
            return super().__getitem__(place)

    def refuse(events: tuple[SubsampledGaussian, ...]) -> None:
        asked.append(events)
        raise SpentError

    def forbidden(count: int) -> bytes:
        raise AssertionError("drawn before the charge")

    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SpentError):
        fit(
            model,
            stage(epochs=2),
            records=Watched(items()),
            charge=refuse,
            random_bytes=forbidden,
        )
    assert asked == [(SubsampledGaussian(1.0, 0.4, 6),)] and not read
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    _, events = fit(model, stage(epochs=2), charge=lambda planned: asked.append(planned))
    assert asked[-1] == events == asked[0]


def test_failing_later_stays_charged() -> None:
    charged: list[Any] = []

    class Torn(list[Item]):
        def __getitem__(self, place: Any) -> Any:
            raise OSError("unreadable")

    model = build()
    with pytest.raises(OSError, match="unreadable"):
        fit(model, stage(), records=Torn(items()), charge=charged.append)
    assert len(charged) == 1
    assert not model.training and all(item.grad is None for item in model.parameters())


def test_views_are_asked_for_by_step_and_counted_over_stages(silent: None) -> None:
    asked: list[int] = []

    def records(step: int) -> Any:
        asked.append(step)
        return items()

    private_fit(
        build(),
        records,
        [stage(steps=2), stage(steps=3)],
        settings=settings(rate=1.0),
        device="cpu",
        probe=False,
    )
    assert asked == [0, 0, 1, 2, 3, 4]  # the first to know how many there are


def test_workers_load_the_same(silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Python's own way to start processes is: from 3.14 on it takes records that can be pickled."""
    spawned = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", spawned)  # type: ignore[attr-defined]
    trained = []
    for workers in (0, 1):
        model = build()
        fit(model, stage(steps=3), workers=workers, random_bytes=np.random.default_rng(5).bytes)
        trained.append(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


def test_the_report_tells_nothing_of_the_records() -> None:
    reports = [fit(build(), stage(), records=items(seed=seed))[0] for seed in (1, 2)]
    assert reports[0] == reports[1]
    assert (reports[0].steps, reports[0].records, reports[0].terms) == (5, 48, {})


def test_flags_modes_and_gradients_afterwards() -> None:
    model = build()
    model.head.bias.requires_grad_(False)  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    fit(model, stage(trainable=lambda name: name.startswith("head")))
    moved = {n for n, item in model.state_dict().items() if not torch.equal(item, before[n])}
    assert moved == {"head.weight"}
    assert not model.training and model.backbone[1].weight.requires_grad  # type: ignore[union-attr, index]
    assert all(item.grad is None for item in model.parameters())


def test_the_probe_runs_unless_switched_off() -> None:
    coupled = Term("intra", 1e-5, lambda v: intra_class_loss(v.features, v.labels), per_record=True)
    charged: list[Any] = []
    with pytest.raises(PrivacyError, match="'intra'"):
        fit(build(), stage(cross_entropy(), coupled), probe=True, charge=charged.append)
    assert not charged


def test_whether_a_model_is_refused_tells_nothing_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crafted model would otherwise ask the first records a question, for free, as often as it likes."""
    probed: list[Any] = []
    monkeypatch.setattr(portions, "check_per_record", lambda *given, **_: probed.append(given[2]))
    for seed in (1, 2):
        private_fit(build(), given(items(seed=seed)), [stage(steps=1)], settings=settings(), device="cpu")
    assert all(torch.equal(one, other) for one, other in zip(*probed, strict=True))
    assert not any(torch.equal(probed[0][0][0], item[0]) for item in items(seed=1))


def test_terms_without_weight_are_never_computed() -> None:
    def fail(_view: Any) -> torch.Tensor:
        raise AssertionError

    fit(build(), stage(cross_entropy(), Term("watch", 0.0, fail, per_record=False)), probe=True)


def test_too_large_steps_are_named() -> None:
    with pytest.raises(TrainingError, match=r"^TF-301: .*finite parameters after private training"):
        fit(build(), stage(learning_rate=3e38), settings=settings(noise=100.0))


def test_memory_halves_the_records_at_a_time_without_counting_any_twice(
    silent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = build(), build()
    fit(expected, stage(steps=2), settings=settings(rate=1.0), engine="loop")
    sizes: list[int] = []

    def scarce(group: Any, clip_norm: float) -> Any:
        sizes.append(len(group[0]))
        if sizes[-1] > 7:
            raise torch.OutOfMemoryError
        return clipped_sum(group, clip_norm)

    monkeypatch.setattr(dp_sgd, "clipped_sum", scarce)
    fit(model, stage(steps=2), settings=settings(rate=1.0), engine="vmap")
    assert sizes == [24, 12, 6, 6, 6, 6, 6, 6, 6, 6]
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)

    def none(group: Any, clip_norm: float) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(dp_sgd, "clipped_sum", none)
    with pytest.raises(TrainingError, match=r"^TF-302: .*gradient of one record"):
        fit(build(), stage(), settings=settings(rate=1.0))


def test_an_engine_is_chosen_once_and_on_nothing_of_the_records(
    silent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. Chosen by records, of which one has huge values, another engine would change all parts."""
    asked: list[Any] = []

    def measured(loss: Any, trained: Any, inputs: Any, labels: Any, tell: Any = None) -> str:
        asked.append((inputs, labels))
        return "vmap"

    monkeypatch.setattr(portions, "choose_engine", measured)
    monkeypatch.setattr(portions, "CHOSEN_ON_CPU", None)
    for records in (items(), [(torch.full((WIDTH,), 3e38), 0)] * COUNT):
        fit(build(), stage(), stage(), settings=settings(rate=0.9), records=records)
    one, other = asked
    assert len(one[0]) == round(settings(rate=0.9).expected_batch)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("batch_size", "records", "epochs", "rate", "batch", "steps"),
    [
        (64, 128, 3, 0.5, 64, 6),
        (64, 351, 50, 64 / 351, 64, 300),
        (7, 49, 1, 7 / 49, 7, 7),  # 1 / (7 / 49) is a little more than 7
        (64, 10, 2, 1.0, 10, 2),
    ],
)
def test_settings(batch_size: int, records: int, epochs: int, rate: float, batch: float, steps: int) -> None:
    made = PrivateSettings.of(batch_size=batch_size, records=records, clip_norm=1.0, noise_multiplier=2.0)
    assert made.sampling_rate == rate and made.expected_batch == pytest.approx(batch)
    assert made.events([stage(epochs=epochs)]) == (SubsampledGaussian(2.0, rate, steps),)
    assert made.events([]) == ()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["clip_norm", "noise_multiplier", "sampling_rate", "expected_batch"])
def test_wrong_settings_are_refused(name: str, bad: float) -> None:
    values = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_rate": 0.5, "expected_batch": 8.0}
    with pytest.raises(ValueError, match=f"`{name}`"):
        PrivateSettings(**(values | {name: bad}))


def test_more_that_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1"):
        PrivateSettings(1.0, 1.0, 1.5, 8.0)
    with pytest.raises(ValueError, match="`batch_size` and `records`"):
        PrivateSettings.of(batch_size=0, records=3, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="at least one record"):
        fit(build(), stage(), records=[])
    with pytest.raises(ValueError, match="selects none"):
        fit(build(), stage(trainable=lambda name: False))


@pytest.mark.whole
def test_it_learns() -> None:
    """Enough records, and the noise does not matter."""
    stream = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=stream)
    records = [(centres[i % CLASSES] + torch.randn(WIDTH, generator=stream), i % CLASSES) for i in range(300)]
    model = build()
    chosen = PrivateSettings.of(batch_size=30, records=300, clip_norm=1.0, noise_multiplier=1.0)
    fit(model, stage(epochs=6, learning_rate=0.5), records=records, settings=chosen)
    with torch.no_grad():
        right = model(torch.stack([item[0] for item in records])).argmax(1)
    assert (right == torch.tensor([item[1] for item in records])).float().mean() > 0.8
