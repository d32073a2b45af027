"""FedETF: the authors' training trajectory, rounds with odd silos, and personal models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods.in_memory import stateless_rounds
from torch import nn

from tightframe.learning import loop, losses
from tightframe.learning.losses import balanced_softmax_loss
from tightframe.learning.stages import Batch, BatchView, Stage, Term
from tightframe.methods import fedetf
from tightframe.methods.fedetf import METHOD, FedETFConfig
from tightframe.models import geometry_heads
from tightframe.models.geometry_heads import etf_logits
from tightframe.phases import Cohort, ServerState

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "fedetf.npz")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def _setting(make_setting: Any, config: FedETFConfig | None = None, **local: Any) -> Any:
    """As ``rounds.setup`` makes it: the network with FedETF's head."""
    config = FedETFConfig() if config is None else config
    base = make_setting(config, **local)

    def build() -> nn.Module:
        model = base.build_model()
        model.head = fedetf.head(config, model.feature_width, base.num_classes)
        return model

    return replace(base, build_model=build)


# ---------------------------------------------------------------- against the authors' code


class _Toy(nn.Module):
    """The network of the golden trajectory: linear, ReLU, then the head."""

    def __init__(self, config: FedETFConfig) -> None:
        super().__init__()
        width, inputs = GOLDEN["tr_init_layer.weight"].shape
        self.layer = nn.Linear(inputs, width)
        self.head = fedetf.head(config, width, GOLDEN["tr_etf"].shape[1])
        self.double()
        with torch.no_grad():
            for name, key in NAMES.items():
                self.get_parameter(name).copy_(torch.tensor(GOLDEN[f"tr_init_{key}"]))
            self.head.etf.copy_(torch.tensor(GOLDEN["tr_etf"]))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


NAMES = {
    "layer.weight": "layer.weight",
    "layer.bias": "layer.bias",
    "head.projection.weight": "linear_proto.weight",
    "head.projection.bias": "linear_proto.bias",
    "head.beta": "scaling_train",
}


def _toy_silo(config: FedETFConfig) -> Any:
    """A silo with the golden records in their order, and what the stages ask of it."""
    local = SimpleNamespace(
        epochs=3,
        batch_size=int(GOLDEN["tr_batch"]),
        optimizer="sgd",
        learning_rate=float(GOLDEN["tr_lr"]),
        momentum=float(GOLDEN["tr_momentum"]),
        weight_decay=float(GOLDEN["tr_wd"]),
    )
    return SimpleNamespace(
        setting=SimpleNamespace(
            config=config, local=local, privacy=None, num_classes=GOLDEN["tr_etf"].shape[1]
        ),
        device=torch.device("cpu"),
        class_counts=lambda fold: torch.tensor(GOLDEN["tr_counts_official"]),
    )


def _golden_batches(_epoch: int) -> Iterator[Batch]:
    size = int(GOLDEN["tr_batch"])
    inputs, labels = torch.tensor(GOLDEN["tr_X"]), torch.tensor(GOLDEN["tr_Y"])
    yield from zip(inputs.split(size), labels.split(size), strict=True)


def _watched(stage: Stage, seen: list[float]) -> Stage:
    """The stage, writing down the value of its only term in each step."""
    (term,) = stage.terms

    def watch(view: BatchView) -> torch.Tensor:
        value = term.fn(view)
        seen.append(float(value.detach()))
        return value

    return replace(stage, terms=(Term(term.name, term.weight, watch, term.per_record),))


def _by_epoch(seen: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.array(seen).reshape(-1, int(GOLDEN["tr_nbatches"])).mean(1)


def test_the_authors_trajectory() -> None:
    config = FedETFConfig(dim=8, temperature=10.0)
    model, silo, seen = _Toy(config), _toy_silo(config), []
    stage = fedetf._balanced_stage(silo, 3)
    loop.fit(model, _golden_batches, [_watched(stage, seen)], device="cpu")
    np.testing.assert_allclose(_by_epoch(seen), GOLDEN["tr_loss_epochs"], **CLOSE)
    for name, key in NAMES.items():
        found = model.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(found, GOLDEN[f"tr_final_{key}"], err_msg=name, **CLOSE)
    np.testing.assert_array_equal(model.head.etf.detach().numpy(), GOLDEN["tr_etf"])
    # Then the frame is tuned, beta frozen.
    tuned = FedETFConfig(personal_temperature="frozen", personal_alternations=1)
    stages, seen = fedetf._tuning_stages(tuned), []
    model.head.etf.requires_grad_(True)
    loop.fit(model, _golden_batches, [_watched(stages[0], seen)], device="cpu")
    np.testing.assert_allclose(_by_epoch(seen), GOLDEN["tr_ft_proto_loss"], **CLOSE)
    np.testing.assert_allclose(model.head.etf.detach().numpy(), GOLDEN["tr_ft_proto_final"], **CLOSE)
    for name, key in NAMES.items():
        found = model.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(found, GOLDEN[f"tr_final_{key}"], err_msg=name, **CLOSE)


def test_public_names() -> None:
    assert balanced_softmax_loss is losses.balanced_softmax_loss
    assert etf_logits is geometry_heads.etf_logits
    for index in range(int(GOLDEN["n_cases"])):
        arrays = [torch.tensor(GOLDEN[f"c{index}_{key}"]) for key in ("h", "proj_W", "proj_b", "etf", "beta")]
        loss = balanced_softmax_loss(
            etf_logits(*arrays),
            torch.tensor(GOLDEN[f"c{index}_labels"]),
            torch.tensor(GOLDEN[f"c{index}_counts_raw"]),
        )
        np.testing.assert_allclose(loss, GOLDEN[f"c{index}_etf_loss"], **CLOSE)


def test_the_authors_average() -> None:
    sizes = GOLDEN["avg_sizes"].astype(float)
    start = {name: torch.tensor(GOLDEN[f"avg_in_{name}"][0]) for name in ("a", "b")}
    cohort = Cohort(1, {f"site-{k}": size for k, size in enumerate(sizes)}, sizes.max())
    totals = {
        f"update/{name}": np.tensordot(sizes / sizes.max(), GOLDEN[f"avg_in_{name}"] - start[name].numpy(), 1)
        for name in start
    }
    result = fedetf.update(ServerState(model=start), totals, cohort)
    for name in start:
        np.testing.assert_allclose(result.model[name].numpy(), GOLDEN[f"avg_out_{name}"], **CLOSE)


# ---------------------------------------------------------------- options of training


def test_weight_decay_may_leave_beta_alone() -> None:
    """Against torch's own optimiser with two parameter groups."""
    for decay in (True, False):
        config = FedETFConfig(dim=8, temperature=10.0, temperature_decay=decay)
        model, other, silo = _Toy(config), _Toy(config), _toy_silo(config)
        silo.setting.local.weight_decay = 0.05
        loop.fit(model, _golden_batches, [fedetf._balanced_stage(silo, 2)], device="cpu")
        beta = other.head.beta
        rest = [item for item in other.parameters() if item is not beta and item.requires_grad]
        optimizer = torch.optim.SGD(
            [{"params": rest}, {"params": [beta], "weight_decay": 0.05 * decay}],
            lr=float(GOLDEN["tr_lr"]),
            momentum=float(GOLDEN["tr_momentum"]),
            weight_decay=0.05,
        )
        counts = torch.tensor(GOLDEN["tr_counts_official"]).double()
        for inputs, labels in [*_golden_batches(0), *_golden_batches(1)]:
            optimizer.zero_grad()
            logits = other.head(other.features(inputs)) + counts.log()
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, other.get_parameter(name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "powers"),
    [
        ({}, [4, 2, 1]),  # the absent class counts once
        ({"zero_counts": "exclude"}, [4, 2, 0]),
        ({"gamma": 2.0}, [16, 4, 1]),
        ({"gamma": 0.0}, [1, 1, 1]),
    ],
)
def test_options_reach_the_loss(
    make_setting: Any, make_silo: Any, options: dict[str, Any], powers: list[int]
) -> None:
    """With beta at zero all logits are equal, and the loss is that of the class powers alone."""
    setting = _setting(make_setting, FedETFConfig(**options), batch_size=6)
    model = {**METHOD.init_server(setting, 1).model, "head.beta": torch.tensor(0.0)}
    silo = make_silo(setting, [0, 0, 0, 0, 1, 1])
    (phase,) = METHOD.plan(setting, 1, 1)
    found = phase.contribute(silo, phase.broadcast(ServerState(model=model)), {}).tensors
    expected = np.log(sum(powers)) - (4 * np.log(powers[0]) + 2 * np.log(powers[1])) / 6
    assert float(found["training/balanced_softmax"]) == pytest.approx(expected, rel=1e-5)


def test_only_constant_priors_make_the_loss_per_record(make_setting: Any, make_silo: Any) -> None:
    for options, expected in (
        ({}, False),
        ({"gamma": 0.0}, True),
        ({"gamma": 0.0, "zero_counts": "exclude"}, False),
    ):
        setting = _setting(make_setting, FedETFConfig(**options))
        (term,) = fedetf._balanced_stage(make_silo(setting, [0, 1]), 1).terms
        assert term.per_record is expected


def test_options_are_checked(make_setting: Any) -> None:
    for wrong in (
        {"zero_counts": "drop"},
        {"dim": 0},
        {"temperature": -1.0},
        {"personal_features": "both"},
        {"gama": 1.0},
        {"personal_temperature": "fixed"},
        {"temperature_form": "exp"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FedETFConfig.model_validate(wrong)
    with pytest.raises(ValueError, match="at least num_classes - 1 = 2, but got 1"):
        METHOD.plan(_setting(make_setting, FedETFConfig(dim=1)), 1, 1)


@pytest.mark.parametrize("form", ["softplus", "clamp"])
def test_other_forms_of_the_temperature_train(make_setting: Any, make_silo: Any, form: Any) -> None:
    setting = _setting(make_setting, FedETFConfig(temperature=5.0, temperature_form=form))
    state = METHOD.init_server(setting, 1)
    model = setting.build_model()
    model.load_state_dict(dict(state.model))
    assert float(model.head.temperature().detach()) == pytest.approx(5.0)
    (phase,) = METHOD.plan(setting, 1, 1)
    silo = make_silo(setting, [0, 1, 2] * 5)
    found = phase.contribute(silo, phase.broadcast(state), {}).tensors
    assert float(found["update/head.beta"]) != 0


# ---------------------------------------------------------------- rounds


ROSTER = {
    "site-1": [0] * 9 + [1] * 8,
    "site-2": [1] * 5,  # one class
    "site-3": [0],  # one record
}


def _rounds(make_setting: Any, make_silo: Any, open_sum: Any, config: FedETFConfig, rounds: int = 2) -> Any:
    setting = _setting(make_setting, config)
    silos = {name: make_silo(setting, labels, name=name) for name, labels in ROSTER.items()}
    states, _, terms = stateless_rounds(METHOD, setting, silos, open_sum, rounds)
    return setting, states[-1], terms


@pytest.mark.parametrize("zero_counts", ["clamp", "exclude"])
def test_rounds_with_missing_and_single_classes(
    make_setting: Any, make_silo: Any, open_sum: Any, zero_counts: Any
) -> None:
    config = FedETFConfig(zero_counts=zero_counts)
    setting, state, terms = _rounds(make_setting, make_silo, open_sum, config)
    start = METHOD.init_server(setting, 7)
    assert torch.equal(state.model["head.etf"], start.model["head.etf"])
    frame = state.model["head.etf"].double().numpy()
    np.testing.assert_allclose(frame.T @ frame, (3 * np.eye(3) - 1) / 2, atol=1e-6)
    assert all(torch.isfinite(item).all() for item in state.model.values())
    names = {name.removeprefix("update/") for name in terms["site-1"][1] if name.startswith("update/")}
    assert names == set(state.model) - {"head.etf"}
    assert {"head.beta", "head.projection.weight", "head.projection.bias"} < names
    changed = {name for name in names if not torch.equal(state.model[name], start.model[name])}
    assert changed == names
    alone = terms["site-2"][1]  # with one class left in the denominator there is nothing to learn
    assert (float(alone["training/balanced_softmax"]) == 0) is (zero_counts == "exclude")
    again = _rounds(make_setting, make_silo, open_sum, config)[1]
    assert all(torch.equal(again.model[name], state.model[name]) for name in state.model)


def test_the_logits_of_a_class_that_nobody_has_stay_low(
    make_setting: Any, make_silo: Any, open_sum: Any
) -> None:
    """As a weak negative it is pushed away, so that records of other classes are not taken for it."""
    setting, state, _ = _rounds(make_setting, make_silo, open_sum, FedETFConfig(), rounds=6)
    model = setting.build_model()
    model.load_state_dict(dict(state.model))
    silo = make_silo(setting, ROSTER["site-1"], name="site-1")
    with torch.no_grad():
        logits = METHOD.predict(model.eval(), silo.inputs)
    assert logits.shape == (17, 3)
    assert (logits.argmax(1) != 2).all()


# ---------------------------------------------------------------- personal models


def _personal(
    make_setting: Any, make_silo: Any, options: dict[str, Any], labels: Sequence[int] = (), **local: Any
) -> Any:
    """(final model by names, personal model, silo)."""
    setting = _setting(make_setting, FedETFConfig(**options), **local)
    final = METHOD.init_server(setting, 3).model
    before = {name: tensor.clone() for name, tensor in final.items()}
    silo = make_silo(setting, list(labels) or [0] * 9 + [1] * 8, name="site-1", round=9)
    assert METHOD.personalise is not None
    personal = METHOD.personalise(silo, final, {})
    assert not any(module.training for module in personal.modules())
    assert all(torch.equal(final[name], before[name]) for name in final)
    return final, personal, silo


def _changed(final: Any, personal: nn.Module) -> set[str]:
    """Parts of the model that personalisation changed."""
    parts = {"backbone": "u", "head.etf": "V", "head.beta": "beta", "head.projection": "p"}
    return {
        part
        for name, tensor in personal.state_dict().items()
        for prefix, part in parts.items()
        if name.startswith(prefix) and not torch.equal(tensor, final[name])
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"personal_alternations": 0}, {"u", "beta"}),
        ({"personal_alternations": 0, "personal_features": "official"}, {"u", "p", "beta"}),
        ({"personal_alternations": 0, "personal_epochs": 0}, set()),
        ({"personal_alternations": 1, "personal_epochs": 0}, {"V", "p", "beta"}),
        (
            {"personal_alternations": 1, "personal_epochs": 0, "personal_temperature": "frozen"},
            {"V", "p"},
        ),
        ({"personal_alternations": 2}, {"u", "V", "p", "beta"}),
    ],
)
def test_what_each_step_tunes(
    make_setting: Any, make_silo: Any, options: dict[str, Any], expected: set[str]
) -> None:
    final, personal, _ = _personal(make_setting, make_silo, options)
    assert _changed(final, personal) == expected
    if len(expected) == 4:
        again = _personal(make_setting, make_silo, options)[1]
        for name, tensor in personal.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)


def test_the_official_first_step_is_one_more_round(make_setting: Any, make_silo: Any) -> None:
    options = {"personal_alternations": 0, "personal_features": "official"}
    final, personal, silo = _personal(make_setting, make_silo, options)
    (phase,) = METHOD.plan(silo.setting, 9, 9)
    terms = phase.contribute(silo, phase.broadcast(ServerState(model=final)), {}).tensors
    for name, parameter in personal.named_parameters():
        if name != "head.etf":
            moved = final[name].double() + terms[f"update/{name}"].double()
            torch.testing.assert_close(parameter.detach().double(), moved, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", ["trained", "frozen"])
def test_tuning_in_turn_by_hand(make_setting: Any, make_silo: Any, temperature: Any) -> None:
    """With one batch for all records, against torch's own optimisers on the features."""
    options = {
        "personal_epochs": 0,
        "personal_alternations": 3,
        "personal_temperature": temperature,
        "frame_epochs": 2,
        "projection_epochs": 4,
    }
    final, personal, silo = _personal(make_setting, make_silo, options, batch_size=64)
    model: Any = silo.load(final).eval()
    features = model.features(silo.inputs).detach()
    weight, bias = (final[f"head.projection.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    frame, beta = (final[f"head.{name}"].clone().requires_grad_() for name in ("etf", "beta"))
    free = [beta] if temperature == "trained" else []
    for _ in range(3):
        frame_optimizer = torch.optim.SGD([frame, *free], lr=0.1)
        projection_optimizer = torch.optim.SGD(
            [weight, bias, *free], lr=0.05, momentum=0.9, weight_decay=5e-4
        )
        for optimizer, epochs in ((frame_optimizer, 2), (projection_optimizer, 4)):
            for _ in range(epochs):
                for tensor in (weight, bias, frame, beta):
                    tensor.grad = None
                projected = features @ weight.T + bias
                logits = beta * (projected / projected.norm(dim=1, keepdim=True)) @ frame
                nn.functional.cross_entropy(logits, silo.labels).backward()
                optimizer.step()
    tuned = {"projection.weight": weight, "projection.bias": bias, "etf": frame, "beta": beta}
    for name, tensor in tuned.items():
        found = personal.get_parameter(f"head.{name}").detach()
        torch.testing.assert_close(found, tensor.detach(), rtol=1e-4, atol=1e-5)


def test_a_personal_model_fits_its_silo(make_setting: Any, make_silo: Any) -> None:
    final, personal, silo = _personal(
        make_setting, make_silo, {"personal_alternations": 6}, learning_rate=0.02
    )
    before: Any = silo.load(final).eval()
    with torch.no_grad():
        first, second = (METHOD.predict(model, silo.inputs) for model in (before, personal))
    assert nn.functional.cross_entropy(second, silo.labels) < 0.7 * nn.functional.cross_entropy(
        first, silo.labels
    )
    # The features of the later steps are those of evaluation: one pass, without augmentation.
    passes = [asked for asked in silo.asked if not asked["shuffle"]]
    assert passes == [{"fold": "train", "augment": False, "shuffle": False, "epoch": 0}]
    assert all(asked["fold"] == "train" for asked in silo.asked)


@pytest.mark.parametrize("labels", [[2] * 5, [1]])
@pytest.mark.parametrize("features", ["paper", "official"])
def test_a_personal_model_of_one_class_or_record(
    make_setting: Any, make_silo: Any, labels: list[int], features: Any
) -> None:
    for zero_counts in ("clamp", "exclude"):
        options = {"personal_features": features, "personal_alternations": 2, "zero_counts": zero_counts}
        _, personal, silo = _personal(make_setting, make_silo, options, labels)
        assert all(torch.isfinite(item).all() for item in personal.state_dict().values())
        with torch.no_grad():
            assert (METHOD.predict(personal, silo.inputs).argmax(1) == silo.labels).all()
