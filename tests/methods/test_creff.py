"""CReFF: gradients against autograd, matching against its measure, rounds against a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.methods.in_memory import Records, in_turn
from torch import nn

from tightframe import federation
from tightframe.errors import TrainingError
from tightframe.methods.creff import (
    FEATURES,
    GRADIENTS,
    HOLDERS,
    KNOWN,
    METHOD,
    CreffConfig,
    TwoHeads,
    class_gradients,
    dissimilarity,
    head_gradients,
    match_features,
)


def _head(seed: int, width: int = 5, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    draw = torch.randn(classes, width + 1, generator=stream, dtype=torch.float64)
    return draw[:, :width], draw[:, width]


def test_class_gradients_are_autograds() -> None:
    weight, bias = _head(1)
    stream = torch.Generator().manual_seed(2)
    features = torch.randn(11, 5, generator=stream, dtype=torch.float64)
    labels = torch.tensor([0] * 6 + [2] * 5)
    found, held = class_gradients([(features[:4], labels[:4]), (features[4:], labels[4:])], weight, bias)
    assert held.tolist() == [1, 0, 1] and not found[1].any() and found.shape == (3, 18)
    for label in (0, 2):
        own = features[labels == label]
        leaves = [item.clone().requires_grad_() for item in (weight, bias)]
        loss = nn.functional.cross_entropy(own @ leaves[0].T + leaves[1], torch.full((len(own),), label))
        slopes = torch.autograd.grad(loss, leaves)
        expected = torch.cat([slopes[0], slopes[1][:, None]], 1)
        torch.testing.assert_close(found[label].view(3, 6), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(TrainingError, match="NaN"):
        class_gradients([(torch.full((1, 5), float("inf")), torch.tensor([0]))], weight, bias)


def test_matching_lowers_the_dissimilarity_by_gradient_descent() -> None:
    """One step is finite differences' slope; a hundred bring the directions together."""
    weight, bias = _head(3)
    stream = torch.Generator().manual_seed(4)
    real = torch.randn(40, 5, generator=stream, dtype=torch.float64) + 1
    target = head_gradients(real, 1, weight, bias) / 40
    start = torch.randn(6, 5, generator=stream, dtype=torch.float64)

    def measure(features: torch.Tensor) -> float:
        own = head_gradients(features, 1, weight, bias) / len(features)
        cosines = [
            float(own[row] @ target[row] / (own[row].norm() * target[row].norm())) for row in range(len(own))
        ]
        return 1 - sum(cosines) / len(cosines)

    once = match_features(start, 1, target, weight, bias, steps=1, learning_rate=0.1)
    for place in ((0, 0), (5, 3)):
        shifted = [start.clone(), start.clone()]
        shifted[0][place] += 1e-6
        shifted[1][place] -= 1e-6
        slope = (measure(shifted[0]) - measure(shifted[1])) / 2e-6
        assert float(start[place] - once[place]) == pytest.approx(0.1 * slope, rel=1e-4, abs=1e-9)
    after = match_features(start, 1, target, weight, bias, steps=300, learning_rate=0.5)
    assert measure(after) < 0.5 * measure(start)
    assert float(dissimilarity(target, target)) == pytest.approx(0, abs=1e-12)
    assert float(dissimilarity(target, -target)) == pytest.approx(2, abs=1e-12)


def test_the_generic_head_trains_and_the_other_predicts() -> None:
    head = TwoHeads(4, 3)
    features = torch.randn(2, 4)
    assert torch.equal(head.generic.weight, head.retrained.weight)
    with torch.no_grad():
        head.retrained.weight.zero_()
        head.retrained.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert head.eval()(features)[0].tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(head.train()(features), head.generic(features))
    assert {name for name, item in head.named_parameters() if item.requires_grad} == {
        "generic.weight",
        "generic.bias",
    }


def _setting(make_setting: Any, **changes: Any) -> Any:
    setting = make_setting(CreffConfig(features=4, match_steps=3, epochs=5, **changes))
    plain = setting.build_model

    def build() -> Any:
        model = plain()
        model.head = METHOD.head(setting.config, model.feature_width, 3)  # type: ignore[misc]
        return model

    object.__setattr__(setting, "build_model", build)
    return setting


@pytest.mark.parametrize(("rows", "larger"), [("sum", 3), ("mean", 1)])
def test_a_round_is_the_algorithms(
    make_setting: Any, make_silo: Any, open_sum: Any, rows: str, larger: int
) -> None:
    """A step on the sum over three classes' rows is three times that on their mean."""
    setting = _setting(make_setting, match_rows=rows)
    holders = {"a": [0] * 9 + [1] * 4, "b": [1] * 6}
    silos = {name: make_silo(setting, labels, name=name) for name, labels in holders.items()}
    state = METHOD.init_server(setting, 5)
    (phase,) = METHOD.plan(setting, 1, 2)
    received = phase.broadcast(state)
    assert not any("creff" in name for name in received), "federated features stay at the server"
    made = {name: phase.contribute(silo, received, {}) for name, silo in silos.items()}
    assert not any("retrained" in name for name in made["a"].tensors)
    totals, cohort = open_sum(
        phase.schema, {name: (len(silos[name].labels), item.tensors) for name, item in made.items()}
    )
    after = phase.update(state, totals, cohort)
    # Class 0 is a's alone, class 1 the plain mean of two silos, class 2 nobody's.
    assert totals[HOLDERS].tolist() == [1, 2, 0] and after.extra[KNOWN].tolist() == [1, 1, 0]
    assert torch.equal(after.extra[FEATURES][2], state.extra[FEATURES][2])
    model: Any = silos["a"].load(state.model).eval()
    leaves = [item.requires_grad_() for item in model.head.retrained.parameters()]
    for label, names in ((0, "a"), (1, "ab")):
        slopes = []
        for name in names:
            own = silos[name].inputs[silos[name].labels == label]
            logits = model.head.retrained(model.features(own).detach())
            loss = nn.functional.cross_entropy(logits, torch.full((len(own),), label))
            parts = torch.autograd.grad(loss, leaves)
            slopes.append(torch.cat([parts[0], parts[1][:, None]], 1))
        target = torch.stack(slopes).mean(0)
        expected = match_features(
            state.extra[FEATURES][label],
            label,
            target,
            state.model["head.retrained.weight"],
            state.model["head.retrained.bias"],
            steps=3,
            learning_rate=0.1 * larger,
        )
        torch.testing.assert_close(after.extra[FEATURES][label], expected, rtol=1e-3, atol=1e-4)
    moved = after.model["head.retrained.weight"] - after.model["head.generic.weight"]
    assert moved.abs().max() > 1e-4, "re-trained from the averaged head"
    same = phase.update(state, totals, cohort)
    assert all(torch.equal(after.model[name], same.model[name]) for name in after.model)
    # Without class sums (a drop-out) the heads are those of the average, the features stay.
    bare = {name: item for name, item in totals.items() if name not in (GRADIENTS, HOLDERS)}
    without = phase.update(state, bare, cohort)
    assert torch.equal(without.extra[FEATURES], state.extra[FEATURES])
    assert torch.equal(without.model["head.retrained.weight"], without.model["head.generic.weight"])


def test_a_personal_model_predicts_with_the_head_that_it_trains(make_setting: Any, make_silo: Any) -> None:
    setting = _setting(make_setting)
    silo = make_silo(setting, [0] * 5 + [1] * 3)
    model = dict(METHOD.init_server(setting, 5).model)
    model |= {"head.retrained.bias": torch.tensor([0.0, 0.0, 99.0])}
    assert METHOD.personalise is not None
    own = METHOD.personalise(silo, model, {})
    assert (own(silo.inputs).argmax(1) != 2).any() and not own.training


@pytest.mark.whole
def test_secure_sums_give_the_same_bits_as_plain_ones() -> None:
    """Under the class rules: flags in round 1, gradients from round 2 on, all of classes 0 to 2."""
    plain, secure = (
        federation.run(
            "creff",
            {name: Records(in_turn(seed), seed) for seed, name in enumerate("abcdef")},
            3,
            dataset="fed_isic2019",
            dataset_options={"image_size": 16},
            model_options={"widths": [8]},
            training={"epochs": 1, "batch_size": 8, "learning_rate": 0.05},
            method_options={"features": 4, "match_steps": 2, "epochs": 3},
            summation=kind,
        )
        for kind in ("plain", "secure")
    )
    for ours, theirs in ((plain.state.model, secure.state.model), (plain.state.extra, secure.state.extra)):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert plain.state.extra[KNOWN].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
