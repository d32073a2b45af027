"""FedROD: the personal head never leaves its silo, and never touches what does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tightframe.errors import JobError
from tightframe.methods import fedrod
from tightframe.methods.fedrod import METHOD, FedRODConfig
from tightframe.phases import ServerState
from tightframe.rounds.setup import prepare

STATE = {"personal_head.weight", "personal_head.bias"}
PERSONAL_REPORTS = {"training/loss", "training/personal"}


def _contribute(setting: Any, silo: Any, model: Any, state: Any = None) -> Any:
    (phase,) = METHOD.plan(setting, silo.round, 3)
    received = phase.broadcast(ServerState(model=model))
    return phase.contribute(silo, received, {} if state is None else state)


def _random_state(setting: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    shape = (setting.num_classes, setting.build_model().feature_width)
    return {
        "personal_head.weight": torch.randn(shape, generator=stream),
        "personal_head.bias": torch.randn(shape[0], generator=stream),
    }


def _summed(model: Any, inputs: torch.Tensor, state: Any) -> torch.Tensor:
    """G(h) + P(h) as the equation says it."""
    with torch.no_grad():
        features = model.features(inputs)
        personal = features @ state["personal_head.weight"].T + state["personal_head.bias"]
        return model.head(features) + personal


def test_what_leaves_does_not_depend_on_the_personal_head(make_setting: Any, make_silo: Any) -> None:
    setting = make_setting(FedRODConfig(), epochs=2)
    model = METHOD.init_server(setting, 5).model
    labels = [0] * 9 + [1] * 8
    first = _contribute(setting, make_silo(setting, labels), model)
    second = _contribute(setting, make_silo(setting, labels), model, _random_state(setting))
    (phase,) = METHOD.plan(setting, 1, 3)
    declared = {item.name for item in phase.schema.fields}
    assert set(first.tensors) == declared
    assert {name for name in declared if name.startswith("update/")} == {f"update/{name}" for name in model}
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]) is (name not in PERSONAL_REPORTS), name
    assert set(first.proposed_state) == set(second.proposed_state) == STATE
    assert not torch.equal(*(one.proposed_state["personal_head.weight"] for one in (first, second)))


def test_the_generic_model_learns_the_balanced_loss(make_setting: Any, make_silo: Any) -> None:
    """Against torch's own optimiser: one step on all records, each class divided by its count."""
    setting = make_setting(FedRODConfig(), batch_size=64, augment=False)
    model = METHOD.init_server(setting, 5).model
    silo = make_silo(setting, [0] * 9 + [1] * 3)
    found = _contribute(setting, silo, model).tensors
    other: Any = silo.load(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    exponentials = other(silo.inputs).exp() * torch.tensor([9.0, 3.0, 1.0])
    chosen = exponentials.gather(1, silo.labels[:, None])[:, 0]
    loss = -(chosen / exponentials.sum(1)).log().mean()
    loss.backward()
    optimizer.step()
    assert float(found["training/balanced_softmax"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(found[f"update/{name}"], (parameter - model[name]).detach())


def test_the_personal_head_learns_the_rest(make_setting: Any, make_silo: Any) -> None:
    """One step on all records from zeros: the gradient is mean_i (softmax(G(h_i)) - onehot_i) h_i^T."""
    setting = make_setting(FedRODConfig(), batch_size=64, augment=False, weight_decay=0.0)
    model = METHOD.init_server(setting, 5).model
    silo = make_silo(setting, [0] * 9 + [1] * 3)
    found = _contribute(setting, silo, model)
    other: Any = silo.load(model)
    with torch.no_grad():
        features = other.features(silo.inputs).double()
        gap = torch.softmax(other.head(features.float()).double(), 1) - nn.functional.one_hot(silo.labels, 3)
    expected = {
        "personal_head.weight": -0.05 * gap.T @ features / 12,
        "personal_head.bias": -0.05 * gap.mean(0),
    }
    for name, tensor in found.proposed_state.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-7)
        assert not tensor.requires_grad
    generic = nn.functional.cross_entropy(other(silo.inputs), silo.labels)
    assert float(found.tensors["training/personal"]) == pytest.approx(float(generic.detach()), rel=1e-5)


def test_the_personal_head_goes_on_only_from_what_was_committed(make_setting: Any, make_silo: Any) -> None:
    setting = make_setting(FedRODConfig(), learning_rate=1e-12, momentum=0.0)
    model = METHOD.init_server(setting, 5).model
    kept = _random_state(setting)
    silo = make_silo(setting, [0, 1, 2] * 4, round=2)
    again = _contribute(setting, silo, model, kept).proposed_state
    for name in STATE:
        torch.testing.assert_close(again[name], kept[name], rtol=0, atol=1e-6)
    # A term that was never opened leaves nothing: the silo starts anew.
    assert all(item.abs().max() < 1e-9 for item in _contribute(setting, silo, model).proposed_state.values())


@pytest.mark.parametrize(
    ("absent", "powers"), [("clamp", [4, 2, 1]), ("tiny", [4, 2, 1e-12]), ("exclude", [4, 2, 0])]
)
def test_absent_classes(make_setting: Any, make_silo: Any, absent: Any, powers: list[float]) -> None:
    """With equal logits the loss is that of the class counts alone."""
    setting = make_setting(FedRODConfig(absent_classes=absent), batch_size=6)
    model = dict(METHOD.init_server(setting, 5).model)
    model |= {"head.weight": torch.zeros_like(model["head.weight"]), "head.bias": torch.zeros(3)}
    found = _contribute(setting, make_silo(setting, [0, 0, 0, 0, 1, 1]), model).tensors
    expected = np.log(sum(powers)) - (4 * np.log(4) + 2 * np.log(2)) / 6
    assert float(found["training/balanced_softmax"]) == pytest.approx(expected, rel=1e-5)
    # The gradient of the absent class's logit is its share of the denominator.
    pushed = -0.05 * powers[2] / sum(powers)
    assert float(found["update/head.bias"][2]) == pytest.approx(pushed, rel=1e-4, abs=1e-20)


# ---------------------------------------------------------------- rounds


ROSTER = {"site-1": [0] * 9 + [1] * 8, "site-2": [1] * 5, "site-3": [0]}


def _rounds(make_setting: Any, make_silo: Any, open_sum: Any, config: FedRODConfig, dropped: str = "") -> Any:
    """Two rounds; what ``dropped`` proposes in the first is not committed, and not in its sum."""
    setting = make_setting(config)
    state = METHOD.init_server(setting, 7)
    states: dict[str, Any] = {name: {} for name in ROSTER}
    proposed: list[dict[str, Any]] = []
    for number in (1, 2):
        (phase,) = METHOD.plan(setting, number, 2)
        terms = {}
        proposed.append({})
        for name, labels in ROSTER.items():
            silo = make_silo(setting, labels, name=name, round=number)
            contribution = phase.contribute(silo, phase.broadcast(state), states[name])
            proposed[-1][name] = contribution.proposed_state
            if number == 2 or name != dropped:
                terms[name] = (len(labels), contribution.tensors)
        states |= {name: proposed[-1][name] for name in terms}
        state = phase.update(state, *open_sum(phase.schema, terms))
    return setting, state, proposed


@pytest.mark.parametrize("absent", ["clamp", "tiny", "exclude"])
def test_rounds_with_missing_and_single_classes(
    make_setting: Any, make_silo: Any, open_sum: Any, absent: Any
) -> None:
    config = FedRODConfig(absent_classes=absent)
    _, state, proposed = _rounds(make_setting, make_silo, open_sum, config)
    assert all(torch.isfinite(item).all() for item in state.model.values())
    assert set(state.model) == set(METHOD.init_server(make_setting(config), 7).model)
    weights = [proposed[1][name]["personal_head.weight"] for name in sorted(ROSTER)]
    assert all(torch.isfinite(item).all() for item in weights)
    assert not torch.equal(weights[0], weights[1])
    _, again, repeated = _rounds(make_setting, make_silo, open_sum, config)
    assert all(torch.equal(again.model[name], state.model[name]) for name in state.model)
    assert torch.equal(repeated[1]["site-1"]["personal_head.weight"], weights[0])


def test_a_dropped_silo_starts_its_head_anew(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    _, _, with_it = _rounds(make_setting, make_silo, open_sum, FedRODConfig())
    _, _, without = _rounds(make_setting, make_silo, open_sum, FedRODConfig(), dropped="site-1")
    first = {name: item["personal_head.weight"] for name, item in without[0].items()}
    second = {name: item["personal_head.weight"] for name, item in without[1].items()}
    assert torch.equal(first["site-1"], with_it[0]["site-1"]["personal_head.weight"])
    # Two rounds from zeros move further than one; the dropped silo has one only.
    longer = with_it[1]["site-1"]["personal_head.weight"].norm()
    assert second["site-1"].norm() < 0.8 * longer


# ---------------------------------------------------------------- personal models


def _personal(setting: Any, silo: Any, model: Any, state: Any) -> Any:
    assert METHOD.personalise is not None
    before = {name: tensor.clone() for name, tensor in {**model, **state}.items()}
    personal = METHOD.personalise(silo, model, state)
    assert not any(module.training for module in personal.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in {**model, **state}.items())
    return personal


def _silo(make_setting: Any, make_silo: Any, labels: Sequence[int], **options: Any) -> Any:
    setting = make_setting(FedRODConfig(**options))
    return setting, make_silo(setting, labels, round=4), METHOD.init_server(setting, 7).model


def test_the_kept_head_on_the_final_model(make_setting: Any, make_silo: Any) -> None:
    setting, silo, final = _silo(make_setting, make_silo, [0, 1] * 6, personal_epochs=0)
    state = _random_state(setting)
    personal = _personal(setting, silo, final, state)
    with torch.no_grad():
        found = METHOD.predict(personal, silo.inputs)
    torch.testing.assert_close(found, _summed(silo.load(final).eval(), silo.inputs, state))
    # A silo that was never part of a sum has the global model.
    with torch.no_grad():
        fresh = METHOD.predict(_personal(setting, silo, final, {}), silo.inputs)
        assert torch.equal(fresh, METHOD.predict(silo.load(final).eval(), silo.inputs))


def test_one_more_round_before_the_personal_model(make_setting: Any, make_silo: Any) -> None:
    setting, silo, final = _silo(make_setting, make_silo, [0] * 9 + [1] * 8)
    state = _random_state(setting)
    personal = _personal(setting, silo, final, state)
    contribution = _contribute(setting, silo, final, state)
    trained = {
        name: (tensor.double() + contribution.tensors[f"update/{name}"].double()).float()
        for name, tensor in final.items()
    }
    expected = _summed(silo.load(trained).eval(), silo.inputs, contribution.proposed_state)
    with torch.no_grad():
        torch.testing.assert_close(METHOD.predict(personal, silo.inputs), expected, rtol=1e-4, atol=1e-5)
    names = {name for name, _ in personal.named_parameters()}
    assert {"head.generic.weight", "head.personal.weight"} < names
    assert not any(name.startswith(fedrod.PERSONAL) for name in names)


def test_a_personal_model_knows_its_own_classes(make_setting: Any, make_silo: Any) -> None:
    """The balanced head gives the rare class more room than the silo's own records do."""
    setting, silo, final = _silo(make_setting, make_silo, [0] * 30 + [1] * 2)
    setting = replace(setting, config=FedRODConfig(personal_epochs=10))
    silo.setting = setting
    personal = _personal(setting, silo, final, {})
    with torch.no_grad():
        both = METHOD.predict(personal, silo.inputs)
        generic = personal.head.generic(personal.features(silo.inputs))
    assert nn.functional.cross_entropy(both, silo.labels) < nn.functional.cross_entropy(generic, silo.labels)
    shares = torch.softmax(both, 1).mean(0)
    torch.testing.assert_close(shares, torch.tensor([30, 2, 0]) / 32, rtol=0, atol=0.05)


def test_options_are_checked() -> None:
    for wrong in (
        {"personal_head": "hypernetwork"},
        {"absent_classes": "drop"},
        {"personal_epochs": -1},
        {"gamma": 2.0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FedRODConfig.model_validate(wrong)


# ---------------------------------------------------------------- the hyper-network

HYPER = {"personal_head": "hyper_network", "hyper_width": 5}


def _hyper_setting(make_setting: Any, **options: Any) -> Any:
    """A setting whose models have the method's head, as a job's have."""
    config = FedRODConfig(
        **HYPER, **{key: options.pop(key) for key in list(options) if key[:8] == "personal"}
    )
    setting = make_setting(config, **options)
    bare = setting.build_model

    def build() -> Any:
        model = bare()
        model.head = METHOD.head(config, model.feature_width, setting.num_classes)  # type: ignore[misc]
        return model

    return replace(setting, build_model=build)


def _stirred(model: Any) -> dict[str, torch.Tensor]:
    """With a last layer that is not zero, so that every layer has a gradient."""
    stream = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(item.shape, generator=stream) * 0.3 if "hyper" in name else item
        for name, item in model.items()
    }


def _made_by_hand(model: Any, shares: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """H(a), layer by layer, in float64."""
    value = {name[11:]: item.double().numpy() for name, item in model.items() if "hyper" in name}
    hidden = np.logaddexp(0, value["0.weight"] @ np.array(shares) + value["0.bias"])
    rows = (value["2.weight"] @ hidden + value["2.bias"]).reshape(len(shares), -1)
    return rows[:, :-1], rows[:, -1]


def test_the_hyper_network_makes_the_head_of_the_silos_class_shares(
    make_setting: Any, make_silo: Any
) -> None:
    setting = _hyper_setting(make_setting, personal_epochs=0)
    final = _stirred(METHOD.init_server(setting, 7).model)
    silo = make_silo(setting, [0] * 9 + [1] * 3, round=4)
    personal = _personal(setting, silo, final, {})
    weight, bias = _made_by_hand(final, [0.75, 0.25, 0.0])
    with torch.no_grad():
        features = personal.features(silo.inputs).double().numpy()
        generic = silo.load(final).eval()(silo.inputs).double().numpy()
        found = METHOD.predict(personal, silo.inputs).double().numpy()
    np.testing.assert_allclose(found, generic + features @ weight.T + bias, rtol=1e-4, atol=1e-5)
    form = METHOD.personal_form(setting, setting.build_model())  # type: ignore[misc]
    form.load_state_dict(personal.state_dict())


def test_the_hyper_network_learns_the_rest_and_is_summed(make_setting: Any, make_silo: Any) -> None:
    """One step on all records: backbone and generic head as with a linear head, H by its own gradient."""
    setting = _hyper_setting(make_setting, batch_size=64, augment=False, weight_decay=0.0)
    model = _stirred(METHOD.init_server(setting, 5).model)
    silo = make_silo(setting, [0] * 9 + [1] * 3)
    found = _contribute(setting, silo, model)
    (phase,) = METHOD.plan(setting, 1, 3)
    updates = {item.name for item in phase.schema.fields if item.name.startswith("update/")}
    assert updates == {f"update/{name}" for name in model} and not found.proposed_state
    # Numerical gradient of l_personal along H's last bias and first layer, with everything else fixed.
    other: Any = silo.load(model)
    with torch.no_grad():
        features = other.features(silo.inputs).double().numpy()
        generic = other.head(other.features(silo.inputs)).double().numpy()

    def loss(changed: Any) -> float:
        weight, bias = _made_by_hand(changed, [0.75, 0.25, 0.0])
        logits = generic + features @ weight.T + bias
        chosen = logits[np.arange(12), silo.labels.numpy()]
        return float(np.mean(np.log(np.exp(logits).sum(1)) - chosen))

    assert float(found.tensors["training/personal"]) == pytest.approx(loss(model), rel=1e-4)
    for name in ("head.hyper.2.bias", "head.hyper.0.weight"):
        flat = model[name].double().flatten()
        for place in (0, len(flat) // 2):
            sides = []
            for step in (1e-5, -1e-5):
                moved = flat.clone()
                moved[place] += step
                sides.append(loss({**model, name: moved.reshape(model[name].shape)}))
            slope = (sides[0] - sides[1]) / 2e-5
            assert float(found.tensors[f"update/{name}"].flatten()[place]) == pytest.approx(
                -0.05 * slope, rel=1e-2, abs=1e-6
            )
    # What the global model learns does not depend on H.
    calm = dict(METHOD.init_server(setting, 5).model)
    plain = _contribute(setting, make_silo(setting, [0] * 9 + [1] * 3), calm)
    for name in model:
        if "hyper" not in name:
            assert torch.equal(found.tensors[f"update/{name}"], plain.tensors[f"update/{name}"])


def test_the_hyper_network_is_not_fed_with_classes_of_few_records(make_setting: Any, make_silo: Any) -> None:
    """Else the update of H's first layer, a multiple of the shares, tells of a class of one record."""
    setting = _hyper_setting(make_setting, augment=False, weight_decay=0.0)
    model = _stirred(METHOD.init_server(setting, 5).model)
    found = _contribute(setting, make_silo(setting, [0] * 9 + [1] * 5 + [2], least=5), model).tensors
    told, bias = found["update/head.hyper.0.weight"], found["update/head.hyper.0.bias"]
    assert bias.abs().max() > 0
    for place, share in enumerate((9 / 14, 5 / 14, 0.0)):
        torch.testing.assert_close(told[:, place], share * bias, rtol=1e-3, atol=1e-7)


def test_a_total_over_two_silos_would_tell_each_ones_class_counts(make_setting: Any, make_silo: Any) -> None:
    """Its rows lie in the plane of both silos' shares, whose points of so many records are few."""
    counts = [[61, 24, 9, 0, 13, 7, 31, 5], [12, 55, 0, 21, 8, 17, 6, 26]]
    setting = _hyper_setting(make_setting, classes=8, batch_size=16, augment=False, weight_decay=0.0)
    state, rows = METHOD.init_server(setting, 7), []
    for round in (1, 2, 3):
        (phase,) = METHOD.plan(setting, round, 4)
        made = [
            phase.contribute(
                make_silo(setting, np.repeat(np.arange(8), own), name=str(place), round=round, least=5),
                phase.broadcast(state),
                {},
            ).tensors
            for place, own in enumerate(counts)
        ]
        total = {name: sum(term[name].double() for term in made) / 2 for name in made[0]}
        rows.append(total["update/head.hyper.0.weight"].numpy())
        model = {name: item + total[f"update/{name}"].float() for name, item in state.model.items()}
        state = state.evolve(model=model)
    plane = np.linalg.svd(np.concatenate(rows))[2][:2]
    sums = plane.sum(1)
    along = np.array([-sums[1], sums[0]]) @ plane
    points = sums @ plane / (sums @ sums) + np.linspace(-1, 1, 200_001)[:, None] * along / abs(along).max()
    points = points[(points > -1e-3).all(1)]
    for own in counts:
        of_so_many = points * sum(own)
        nearest = abs(of_so_many - of_so_many.round()).max(1).argmin()
        assert of_so_many[nearest].round().tolist() == own


def test_no_unit_of_the_hyper_network_is_moved_by_one_of_many_silos_alone() -> None:
    """The quotient of its row and bias in the total would be that silo's class shares."""
    draw, silos, told = np.random.default_rng(0), 17, 0
    for seed in range(20):
        torch.manual_seed(seed)
        head = fedrod.HyperHead(4, 8, 16)
        nn.init.normal_(head.hyper[2].weight)
        shares = torch.as_tensor(draw.dirichlet([0.3] * 8, silos), dtype=torch.float32)
        for own in shares:
            weight, bias = head.weights(own)
            (weight.sum() + bias.sum()).backward()
        rows = head.hyper[0].weight.grad / head.hyper[0].bias.grad[:, None]
        told += int(((rows[:, None] - shares).abs().amax(2) < 1e-3).any())
    assert told == 0


def test_the_hyper_network_needs_secure_sums() -> None:
    job = {
        **{"job_name": "plain", "method": "fedrod", "rounds": 1, "sites": ["a", "b", "c"], "min_sites": 3},
        **{"dataset": "fed_heart_disease", "model": "mlp", "summation": "plain"},
    }
    prepare(job)
    with pytest.raises(JobError, match="summation: Expected 'secure', got 'plain'"):
        prepare({**job, "method_options": HYPER})
    prepare({**job, "method_options": HYPER, "summation": "secure"})


def test_a_hidden_width_without_a_hyper_network_is_refused() -> None:
    with pytest.raises(ValueError, match="hyper_width"):
        FedRODConfig(hyper_width=8)
