"""FedNH: golden values of the published code, properties, rounds without an engine, and whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.support.methods.in_memory import (
    LABELS,
    RUN,
    GoneOnce,
    assert_averaged,
    headed_rounds,
    made_silos,
    setting_with_head,
    withheld,
)
from torch import nn

from tightframe import federation
from tightframe.errors import TrainingError
from tightframe.methods import fednh
from tightframe.methods.fednh import METHOD, FedNHConfig, local_prototypes, update_prototypes
from tightframe.phases import Cohort, ServerState

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "fednh.npz")
CASES = range(int(GOLDEN["n_cases"]))
TYPES = [(torch.float64, 1e-9, 1e-12), (torch.float32, 1e-4, 1e-6)]
CLIENTS = [(case, client) for case in CASES for client in range(int(GOLDEN[f"c{case}_K"]))]
PROTOTYPES, SUMS = fednh.HEAD_PROTOTYPES, fednh.SUMS


def _golden(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    value = torch.as_tensor(GOLDEN[name])
    return value.to(dtype) if value.is_floating_point() else value


def _close(found: torch.Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=rtol, atol=atol)


# ---------------------------------------------------------------- golden values


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize(("case", "client"), CLIENTS)
def test_local_prototypes(case: int, client: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    prefix = f"c{case}_k{client}_"
    expected = GOLDEN[prefix + "scaled_prototype"]
    found = local_prototypes(_golden(prefix + "x", dtype), _golden(prefix + "y"), len(expected))
    assert found.dtype == dtype
    _close(found, expected, rtol, atol)


@pytest.mark.parametrize("case", CASES)
def test_prototypes_need_no_counts(case: int) -> None:
    """The published rule divides by summed counts; the sum alone gives the same."""
    prefix = f"c{case}_"
    previous, rho = _golden(prefix + "W"), float(GOLDEN[prefix + "rho"])
    clients = range(int(GOLDEN[prefix + "K"]))
    summed = torch.stack([_golden(f"{prefix}k{client}_scaled_prototype") for client in clients]).sum(0)
    found = update_prototypes(previous, summed, rho=rho)
    _close(found, GOLDEN[prefix + "new_prototype"])
    _close(found, GOLDEN[prefix + "sumform_new_prototype"])
    narrow = update_prototypes(previous.float(), summed, rho=rho)
    assert narrow.dtype == torch.float32
    _close(narrow, GOLDEN[prefix + "new_prototype"], 1e-4, 1e-6)
    assert torch.equal(found[-1], previous[-1]), "no silo has the last class"


class _Rows(nn.Module):
    """A model whose features are its inputs, with FedNH's head."""

    def __init__(self, prototypes: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.features = nn.Identity()
        self.head = METHOD.head(FedNHConfig(scale=scale), prototypes.shape[1], len(prototypes))
        self.head.double().load_state_dict(
            {"prototypes": prototypes, "scale": torch.tensor(scale, dtype=torch.float64)}
        )


def _golden_terms(case: int, config: FedNHConfig) -> list[torch.Tensor]:
    """What each client of a case sends, through the pass over batches that a silo makes."""
    prefix = f"c{case}_"
    model = _Rows(_golden(prefix + "W"), float(GOLDEN[prefix + "scaling0"]))
    terms = []
    for client in range(int(GOLDEN[prefix + "K"])):
        inputs, labels = (_golden(f"{prefix}k{client}_{name}") for name in "xy")

        def encoded(model: Any, fold: str, x: Any = inputs, y: Any = labels) -> Iterator[Any]:
            assert fold == "train"
            return iter(zip(model.features(x).split(5), y.split(5), strict=True))

        silo: Any = SimpleNamespace(
            setting=SimpleNamespace(config=config),
            encoded=encoded,
            offers_prototypes=True,
            backed=lambda sizes, labels: torch.ones(1, 1),
        )
        terms.append(fednh.prototype_terms(silo, model, _golden(prefix + "W")))
    return terms


@pytest.mark.parametrize("case", CASES)
def test_official_terms_over_batches(case: int) -> None:
    for client, term in enumerate(_golden_terms(case, FedNHConfig())):
        _close(term, GOLDEN[f"c{case}_k{client}_scaled_prototype"])


@pytest.mark.parametrize("case", CASES)
def test_adv_variant(case: int) -> None:
    """Probability-weighted vectors at the client, ``exp(W . mu)`` at the server: still one sum."""
    prefix = f"c{case}_"
    previous, rho = _golden(prefix + "W"), float(GOLDEN[prefix + "rho"])
    both = _golden_terms(case, FedNHConfig(client_adv=True, server_adv=True))
    _close(update_prototypes(previous, sum(both), rho=rho), GOLDEN[prefix + "adv_new_prototype"])
    client_only = _golden_terms(case, FedNHConfig(client_adv=True))
    for client, term in enumerate(client_only):
        # The golden clients after the first were uploaded with another scale than they were given.
        if client == 0:
            _close(nn.functional.normalize(term), GOLDEN[prefix + "k0_adv_prototype"])
        counts = GOLDEN[prefix + "counts"][client]
        _close(term.norm(dim=1), counts, 1e-9, 1e-9)
    for client, term in enumerate(_golden_terms(case, FedNHConfig(server_adv=True))):
        means = nn.functional.normalize(_golden(f"{prefix}k{client}_scaled_prototype"))
        _close(term, torch.exp((previous * means).sum(1, keepdim=True)) * means)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("case", CASES)
def test_head_loss_and_gradients(case: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    prefix = f"c{case}_"
    model = _Rows(_golden(prefix + "W"), float(GOLDEN[prefix + "scaling0"])).to(dtype)
    features = _golden(prefix + "hx", dtype).requires_grad_()
    loss = nn.functional.cross_entropy(model.head(features), _golden(prefix + "hy"))
    loss.backward()
    _close(loss, GOLDEN[prefix + "hloss"], rtol, atol)
    _close(features.grad, GOLDEN[prefix + "hgrad_x"], rtol, atol)
    _close(model.head.scale.grad.reshape(1), GOLDEN[prefix + "hgrad_scaling"], rtol, atol)
    assert model.head.prototypes.grad is None


@pytest.mark.parametrize("case", CASES)
def test_body_and_scale_are_the_unweighted_mean(case: int, open_sum: Any) -> None:
    prefix = f"c{case}_"
    model = {
        "body": _golden(prefix + "body0"),
        "head.scale": _golden(prefix + "scaling0"),
        PROTOTYPES: _golden(prefix + "W"),
    }
    totals = {"update/body": np.zeros((4, 3)), "update/head.scale": np.zeros(())}
    totals[SUMS] = np.zeros(model[PROTOTYPES].shape)
    weights = {}
    for client in range(int(GOLDEN[prefix + "K"])):
        own = f"{prefix}k{client}_"
        totals["update/body"] += GOLDEN[own + "body"] - GOLDEN[prefix + "body0"]
        totals["update/head.scale"] += GOLDEN[own + "scaling"] - GOLDEN[prefix + "scaling0"]
        totals[SUMS] += GOLDEN[own + "scaled_prototype"]
        weights[f"site-{client}"] = float(len(GOLDEN[own + "y"]))
    config = FedNHConfig(rho=float(GOLDEN[prefix + "rho"]))
    cohort = Cohort(1, weights, max(weights.values()))
    state = fednh.update(ServerState(model), totals, cohort, config=config)
    _close(state.model["body"], GOLDEN[prefix + "new_body"])
    _close(state.model["head.scale"].reshape(1), GOLDEN[prefix + "new_scaling"])
    _close(state.model[PROTOTYPES], GOLDEN[prefix + "new_prototype"])


# ---------------------------------------------------------------- properties


def _records(seed: int, count: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=stream, dtype=torch.float64)
    return features, torch.randint(0, classes, (count,), generator=stream)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 40), width=st.integers(2, 12))
@settings(max_examples=25, deadline=None)
def test_neither_length_nor_order_of_features_matters(seed: int, count: int, width: int) -> None:
    features, labels = _records(seed, count, width, 4)
    found = local_prototypes(features, labels, 5)
    stream = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(count, generator=stream)
    lengths = torch.rand(count, 1, generator=stream, dtype=torch.float64) * 1e6 + 1e-6
    torch.testing.assert_close(local_prototypes((lengths * features)[order], labels[order], 5), found)
    counts = torch.bincount(labels, minlength=5).double()
    torch.testing.assert_close(found.norm(dim=1), counts, rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_one_record_changes_the_plain_sum_by_at_most_one(seed: int, count: int) -> None:
    """The sensitivity that the field of ``proto_release: sum`` declares."""
    features, labels = _records(seed, count, 6, 4)
    sums, counts = fednh.class_directions(features, labels, 4)
    kept = torch.arange(count) != seed % count
    others, _ = fednh.class_directions(features[kept], labels[kept], 4)
    assert float((sums - others).norm()) <= 1 + 1e-12
    assert counts.tolist() == torch.bincount(labels, minlength=4).tolist()
    by_hand = [(features / features.norm(dim=1, keepdim=True))[labels == label].sum(0) for label in range(4)]
    torch.testing.assert_close(sums, torch.stack(by_hand))


def test_one_record_of_a_class_is_its_direction_and_zero_rows_count_for_nothing() -> None:
    features = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]])
    assert local_prototypes(features, torch.tensor([0, 1, 2]), 4).tolist() == [
        pytest.approx([0.6, 0.8]),
        [0.0, 0.0],
        [0.0, 1.0],
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 1.0])
def test_prototypes_stay_on_the_sphere_and_absent_ones_where_they_are(rho: float) -> None:
    stream = torch.Generator().manual_seed(3)
    previous = nn.functional.normalize(torch.randn(5, 4, generator=stream))
    summed = torch.randn(5, 4, generator=stream, dtype=torch.float64) * 1e4
    summed[1] = 0
    summed[3] = -7.0 * previous[3].double()  # with rho = 1/2 nothing is left of the two
    found = update_prototypes(previous, summed, rho=rho)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))
    assert torch.equal(found[1], previous[1])
    expected = rho * previous[0].double() + (1 - rho) * summed[0] / summed[0].norm()
    torch.testing.assert_close(found[0].double(), expected / expected.norm(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[3], previous[3] if rho >= 0.5 else -previous[3])


def test_gradients_are_shortened_together() -> None:
    model = nn.Linear(2, 1)
    model.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    for length, factor in ((20.0, 0.5), (5.0, 1.0)):
        model.weight.grad = torch.tensor([[0.6 * length, 0.0]])
        model.bias.grad = torch.tensor([0.8 * length])
        fednh.clip_gradients(10.0)(model)
        found = [*model.weight.grad.flatten().tolist(), float(model.bias.grad)]
        assert found == pytest.approx([0.6 * length * factor, 0.0, 0.8 * length * factor], rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"proto_release": "sum", "client_adv": True},
        {"proto_release": "sum", "server_adv": True},
        {"rho": 1.5},
        {"scale": 0.0},
        {"clip_norm": 0.0},
        {"init": "random"},
        {"unknown": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedNHConfig.model_validate(options)


# ---------------------------------------------------------------- rounds with silos


@pytest.mark.parametrize(
    "config",
    [
        FedNHConfig(),
        FedNHConfig(proto_release="sum", init="etf"),
        FedNHConfig(client_adv=True, server_adv=True),
        FedNHConfig(scale=30.0, learn_scale=False, clip_norm=None, augment_prototypes=True),
    ],
)
def test_two_rounds(make_setting: Any, make_silo: Any, open_sum: Any, config: FedNHConfig) -> None:
    states, phase, terms, silos = headed_rounds(METHOD, make_setting, make_silo, open_sum, config)
    first, last = states[0].model, states[-1].model
    names = [item.name for item in phase.schema.fields]
    assert "update/" + PROTOTYPES not in names
    assert ("update/head.scale" in names) == config.learn_scale
    assert torch.equal(first["head.scale"], last["head.scale"]) != config.learn_scale
    assert (phase.schema[SUMS].sensitivity == 1.0) == (config.proto_release == "sum")
    assert phase.schema[SUMS].static and phase.schema[SUMS].per_class
    rows = last[PROTOTYPES]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))
    assert torch.equal(rows[3], first[PROTOTYPES][3]), "nobody has it"
    assert all(not torch.equal(rows[label], first[PROTOTYPES][label]) for label in range(3))
    for name, (_, tensors) in terms.items():
        present = torch.bincount(torch.tensor(LABELS[name]), minlength=4) > 0
        assert torch.equal(tensors[SUMS].any(1), present)
    passes = [asked for asked in silos["site-1"].asked if not asked["shuffle"]]
    augment = config.augment_prototypes
    assert passes == [{"fold": "train", "augment": augment, "shuffle": False, "epoch": int(augment)}] * 2
    again = headed_rounds(METHOD, make_setting, make_silo, open_sum, config)[0]
    assert all(torch.equal(again[-1].model[name], last[name]) for name in last)


def test_what_a_silo_sends_is_of_its_trained_model(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    states, _, terms, silos = headed_rounds(METHOD, make_setting, make_silo, open_sum, FedNHConfig(), 1)
    silo, tensors = silos["site-3"], terms["site-3"][1]
    trained = {name: value + tensors.get("update/" + name, 0) for name, value in states[0].model.items()}
    features = silo.load(trained).eval().features(silo.inputs).detach()
    expected = local_prototypes(features, silo.labels, 4)
    torch.testing.assert_close(tensors[SUMS].float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", ["uniform", "weighted"])
def test_models_are_averaged_as_asked(make_setting: Any, make_silo: Any, open_sum: Any, average: Any) -> None:
    config = FedNHConfig(average=average)
    states, _, terms, _ = headed_rounds(METHOD, make_setting, make_silo, open_sum, config, 1)
    assert_averaged(states[0], states[1], terms, average, but=PROTOTYPES)


def test_without_the_class_sums_the_prototypes_stay(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    """After a drop-out static fields are not opened; here one silo is gone, too."""
    states, phase, terms, _ = headed_rounds(METHOD, make_setting, make_silo, open_sum, FedNHConfig(), 1)
    del terms["site-2"]
    totals, cohort = open_sum(phase.schema, terms)
    opened = {name: value for name, value in totals.items() if not phase.schema[name].static}
    state = phase.update(states[0], opened, cohort)
    assert torch.equal(state.model[PROTOTYPES], states[0].model[PROTOTYPES])
    moved = (terms["site-1"][1]["update/head.scale"] + terms["site-3"][1]["update/head.scale"]) / 2
    torch.testing.assert_close(state.model["head.scale"], states[0].model["head.scale"] + moved)


def test_withheld_rows_are_absent_classes(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    states, phase, terms, _ = headed_rounds(METHOD, make_setting, make_silo, open_sum, FedNHConfig(), 1)
    state = phase.update(states[0], *open_sum(phase.schema, withheld(phase, terms)))
    same = [
        torch.equal(a, b) for a, b in zip(state.model[PROTOTYPES], states[0].model[PROTOTYPES], strict=True)
    ]
    assert same == [False, False, True, True], "class 2 has one record"


def test_a_silo_may_keep_its_prototypes(make_setting: Any, make_silo: Any) -> None:
    setting = setting_with_head(METHOD, make_setting, FedNHConfig())
    (phase,) = METHOD.plan(setting, 1, 1)
    silo = make_silo(setting, [0, 1] * 8, offers_prototypes=False)
    tensors = phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, 7)), {}).tensors
    assert tensors[SUMS].shape == (4, 16) and not tensors[SUMS].any()
    assert all(asked["shuffle"] for asked in silo.asked), "no pass for nothing"


@pytest.mark.parametrize(("decay", "factor"), [(1.0, 1.0), (0.5, 0.25)])
def test_learning_rate_decays_with_the_rounds(
    make_setting: Any, make_silo: Any, decay: float, factor: float
) -> None:
    plain = {"momentum": 0.0, "weight_decay": 0.0, "augment": False, "batch_size": 32}
    moved = []
    for number, config in ((1, FedNHConfig()), (3, FedNHConfig(lr_decay=decay))):
        setting = setting_with_head(METHOD, make_setting, config, **plain)
        (phase,) = METHOD.plan(setting, number, 3)
        silo = make_silo(setting, [0, 1] * 8, round=number)
        state = METHOD.init_server(setting, 7)
        moved.append(phase.contribute(silo, phase.broadcast(state), {}).tensors["update/head.scale"])
    torch.testing.assert_close(moved[1], factor * moved[0], rtol=1e-3, atol=1e-6)


def test_clipping_bounds_a_step(make_setting: Any, make_silo: Any) -> None:
    plain = {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 32, "learning_rate": 0.5}
    setting = setting_with_head(METHOD, make_setting, FedNHConfig(clip_norm=1e-3), **plain)
    (phase,) = METHOD.plan(setting, 1, 1)
    state = METHOD.init_server(setting, 7)
    tensors = phase.contribute(make_silo(setting, [0, 1] * 8), phase.broadcast(state), {}).tensors
    step = torch.cat([v.flatten() for name, v in tensors.items() if name.startswith("update/")])
    assert float(step.norm()) == pytest.approx(0.5 * 1e-3, rel=1e-3)


def test_features_that_are_not_finite_are_named() -> None:
    model = _Rows(torch.eye(2, dtype=torch.float64), 1.0)
    bad = [(torch.tensor([[1.0, torch.inf]]), torch.tensor([0]))]
    silo: Any = SimpleNamespace(
        setting=SimpleNamespace(config=FedNHConfig()),
        encoded=lambda *_: iter(bad),
        offers_prototypes=True,
    )
    with pytest.raises(TrainingError, match="TF-301"):
        fednh.prototype_terms(silo, model, torch.eye(2))


# ---------------------------------------------------------------- whole runs


OPTIONS: dict[str, Any] = {
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "model_options": {"widths": [8]},
    "training": {"epochs": 1, "batch_size": 4, "learning_rate": 0.05},
}


@pytest.mark.whole
def test_secure_sums_give_the_same_bits_as_plain_ones(tmp_path: Path) -> None:
    plain = federation.run("fednh", made_silos(), 2, summation="plain", **OPTIONS).state.model
    options = OPTIONS | {"personalise": True}
    secure = federation.run(
        "fednh", made_silos(), 2, summation="secure", folder=tmp_path, **options
    ).state.model
    assert list(plain) == list(secure) and all(torch.equal(plain[name], secure[name]) for name in plain)
    one_round = federation.run("fednh", made_silos(), 1, summation="plain", **OPTIONS).state.model
    turned = (plain[PROTOTYPES] != one_round[PROTOTYPES]).any(1).tolist()
    # Under the class rules the first sum only tells who holds what; classes 0 and 1 have three holders.
    assert turned == [True, True] + [False] * 6
    # A personal model has trained once more, with the prototypes as they are.
    personal = load_file(tmp_path / "c" / "personal_model.safetensors")
    assert torch.equal(personal[PROTOTYPES], secure[PROTOTYPES])
    assert not torch.equal(personal["backbone.0.weight"], secure["backbone.0.weight"])


@pytest.mark.whole
def test_a_silo_that_drops_out_costs_a_turn_of_the_prototypes() -> None:
    silos = made_silos() | {"d": GoneOnce(RUN["d"], 3, time=2)}
    result = federation.run("fednh", silos, 2, min_sites=3, **OPTIONS)
    assert not result.outcome.rows[2].static_opened and list(result.outcome.rows[2].dropped) == ["d"]
    start = federation.run("fednh", silos, 1, **OPTIONS).state.model
    assert torch.equal(result.state.model[PROTOTYPES], start[PROTOTYPES])
    assert not torch.equal(result.state.model["backbone.0.weight"], start["backbone.0.weight"])
