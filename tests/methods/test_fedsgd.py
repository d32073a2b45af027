"""FedSGD: rounds are steps of torch's optimisers on the pooled records; FedILC's variant is the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods import by_hand
from tests.support.methods.silo import FakeSilo
from torch import nn

from tightframe import federation, models
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.errors import JobError
from tightframe.methods import fedilc
from tightframe.methods.fedilc import FedILCConfig
from tightframe.methods.fedsgd import METHOD, FedSGDConfig
from tightframe.phases import ServerState, Setting, Tensors
from tightframe.rounds.setup import prepare

SGD = {"optimizer": "sgd", "learning_rate": 0.3, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"optimizer": "adam", "learning_rate": 0.05, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.01}
SIZES = {"site-1": 31, "site-2": 7, "site-3": 18, "site-4": 40}


def optimizer_of(options: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    values = {"lr": options["learning_rate"], "weight_decay": options["weight_decay"]}
    if options["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, momentum=options["momentum"], **values)
    return torch.optim.Adam(parameters, betas=(options["beta1"], options["beta2"]), **values)


def records(seed: int = 3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    stream = np.random.default_rng(seed)
    made = {}
    for place, (site, size) in enumerate(SIZES.items()):
        labels = (np.arange(size) + place) % 2  # as in two classes of heart disease
        values = stream.normal(size=(size, 13)) + labels[:, None]
        made[site] = (values.astype(np.float32), labels)
    return made


def joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def pooled(options: dict[str, Any], start: Tensors, rounds: int) -> nn.Linear:
    """Torch's optimiser on all silos' records at once."""
    inputs, labels = (
        torch.from_numpy(np.concatenate(parts)) for parts in zip(*records().values(), strict=True)
    )
    model = nn.Linear(13, 2)
    model.load_state_dict({name.removeprefix("head."): item for name, item in start.items()})
    optimizer = optimizer_of(options, model.parameters())
    for _ in range(rounds):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def job(**changes: Any) -> dict[str, Any]:
    return {
        **{"job_name": "pooled", "method": "fedsgd", "dataset": "fed_heart_disease", "model": "identity"},
        **{"sites": list(SIZES), "min_sites": 3, "rounds": 5, "seed": 2, "max_weight_share": 1.0},
        "training": {"batch_size": 8, "augment": False},
        **changes,
    }


AS_THEY_ARE = {site: SiteEntry(policy=PolicyBlock(min_class_count=1)) for site in SIZES}
"""Of seven records one can stand out, which by default is hidden in exact sums."""


def of_arrays(given: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, ArrayData]:
    return {
        site: ArrayData(dict.fromkeys(("train", "validation", "test"), arrays), source=site, num_classes=2)
        for site, arrays in given.items()
    }


@pytest.mark.whole
@pytest.mark.parametrize("options", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_secure_run_with_full_batches_is_gradient_descent_on_the_pooled_records(
    options: dict[str, Any], tmp_path: Path
) -> None:
    values = job(method_options=options)
    start = prepare(values).initial_state().model
    result = federation.run_job(
        parse_job(values), data=of_arrays(records()), entries=AS_THEY_ARE, folder=tmp_path
    )
    expected = pooled(options, start, 5)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(result.state.model[f"head.{name}"], parameter.detach(), rtol=0, atol=1e-6)
        assert not torch.allclose(start[f"head.{name}"], parameter, atol=1e-2)
    moments = {"adam/first", "adam/second", "adam/step"} if options is ADAM else {"sgd/momentum"}
    kept = {name.rpartition("/head.")[0] or name for name in result.state.extra}
    assert moments <= kept


def test_equal_weights_give_the_mean_over_silos_and_not_over_records(tmp_path: Path) -> None:
    values = job(rounds=1, weights="uniform", method_options={"learning_rate": 1.0, "momentum": 0.0})
    start = prepare(values).initial_state().model
    result = federation.run_job(
        parse_job(values), data=of_arrays(records()), entries=AS_THEY_ARE, folder=tmp_path
    )
    slopes = []
    for inputs, labels in records().values():
        weight = start["head.weight"].clone().requires_grad_()
        logits = torch.from_numpy(inputs) @ weight.T + start["head.bias"]
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        slopes.append(torch.autograd.grad(loss, weight)[0])
    expected = start["head.weight"] - torch.stack(slopes).mean(0)
    torch.testing.assert_close(result.state.model["head.weight"], expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- the same code as FedILC's variant


def rounds_of(method: Any, setting: Setting, open_sum: Any, *, rounds: int = 3) -> ServerState:
    """Rounds of silos that count alike, so that weighted and plain means agree."""
    state = method.init_server(setting, 7)
    for number in range(1, rounds + 1):
        (phase,) = method.plan(setting, number, rounds)
        terms = {}
        for name, silo in by_hand.silos_of(setting).items():
            silo.round = number
            terms[name] = (1.0, phase.contribute(silo, phase.broadcast(state), {}).tensors)
        state = phase.update(state, *open_sum(phase.schema, terms))
    return state


def test_fedilcs_variant_gives_the_same_bits(open_sum: Callable[..., Any]) -> None:
    """With BatchNorm, augmentation and mini-batches; by Adam, which FedILC's server is."""
    adam: dict[str, Any] = {
        "learning_rate": 0.02,
        "beta1": 0.7,
        "beta2": 0.9,
        "eps": 1e-6,
        "weight_decay": 0.1,
    }
    own = by_hand.setting_of(METHOD, FedSGDConfig(optimizer="adam", **adam), epochs=1)
    its = by_hand.setting_of(fedilc.METHOD, FedILCConfig(variant="fedsgd", **adam), epochs=1)
    first, second = (rounds_of(*pair, open_sum) for pair in ((METHOD, own), (fedilc.METHOD, its)))
    assert {name for name in first.model if "running" in name}, "with running statistics"
    for one, other in ((first.model, second.model), (first.extra, second.extra)):
        assert set(one) == set(other)
        assert all(torch.equal(item, other[name]) for name, item in one.items())
    fields = [
        [item for item in method.plan(setting, 1, 1)[0].schema.fields]
        for method, setting in ((METHOD, own), (fedilc.METHOD, its))
    ]
    assert [item.name for item in fields[0]] == [item.name for item in fields[1]]
    # The one difference: FedILC's silos all count the same.
    assert {item.weighted for item in fields[0] if item.name.startswith("gradient/")} == {True}
    assert {item.weighted for item in fields[1] if item.name.startswith("gradient/")} == {False}


# ---------------------------------------------------------------- drawn batches


def plain_setting(make_setting: Any, **options: Any) -> Setting:
    return make_setting(FedSGDConfig(**options), augment=False, batch_size=4)


def test_a_silo_draws_a_part_of_its_records_anew_in_each_round(make_setting: Any, make_silo: Any) -> None:
    setting = plain_setting(make_setting, sampling_rate=0.3)
    (phase,) = METHOD.plan(setting, 1, 1)
    broadcast = phase.broadcast(METHOD.init_server(setting, 7))
    silo: FakeSilo = make_silo(setting, [0, 1, 2] * 10)
    model = silo.load({name.removeprefix("model/"): item for name, item in broadcast.items()})
    seen = []
    for number in (1, 2):
        silo.round = number
        found = phase.contribute(silo, broadcast, {}).tensors
        taken = [batch for batch in silo.batches("train", augment=False, shuffle=True, share=0.3)]
        inputs, labels = (torch.cat(parts) for parts in zip(*taken, strict=True))
        assert len(labels) == 9
        model.zero_grad()
        nn.functional.cross_entropy(model.train()(inputs), labels).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                found[f"gradient/{name}"] / 2**12, parameter.grad.double(), rtol=1e-4, atol=1e-6
            )
        seen.append(labels)
    assert not torch.equal(*seen)


# ---------------------------------------------------------------- what is refused, what leaves


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"training": {"epochs": 2}}, "training.epochs to be 1"),
        ({"training": {"amp": True}}, "training.amp to be false"),
        ({"method_options": {"sampling_rate": 0.0}}, "sampling_rate"),
        ({"method_options": {"optimizer": "adagrad"}}, "optimizer"),
        (
            {"privacy": {"epsilon": 8.0}, "weights": "uniform", "update_norm": 1.0},
            "no update_norm with privacy",
        ),
        (
            {"method": "fedavg", "privacy": {"noise": "shared"}, "weights": "uniform"},
            r"noise 'shared' needs a method .*\(fedsgd\); with fedavg each silo trains by itself",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        prepare(job(**changes))


@pytest.mark.parametrize("privacy", [None, {"epsilon": 8.0, "noise": "shared"}])
def test_with_a_frozen_encoder_the_heads_gradient_alone_leaves(privacy: Any) -> None:
    values = job(
        model="mlp", model_options={"widths": [5]}, encoder="random", weights="uniform", privacy=privacy
    )
    (phase,) = prepare(values).training_phases(1)
    names = {item.name for item in phase.schema.fields if not item.name.startswith("training/")}
    head = {"gradient/head.weight", "gradient/head.bias"}
    assert names == head | ({"gradient_records"} if privacy else set())
    assert not any(item.static for item in phase.schema.fields if item.name in names)
    assert not any(item.per_class for item in phase.schema.fields)


def test_the_options_of_a_whole_network(make_setting: Any) -> None:
    spec = models.get("small_cnn")
    setting = make_setting(FedSGDConfig(optimizer="adam"), model=spec.name)
    (phase,) = METHOD.plan(setting, 1, 1)
    trained = [name for name, item in setting.build_model().named_parameters() if item.requires_grad]
    assert [item.name for item in phase.schema.fields][: len(trained)] == [
        f"gradient/{name}" for name in trained
    ]
