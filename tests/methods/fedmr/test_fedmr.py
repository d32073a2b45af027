"""FedMR: properties of its terms, and a round of it with silos that need no engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.spatial.distance import pdist

from tightframe import methods
from tightframe.errors import ContributionError, TrainingError
from tightframe.learning import class_sums
from tightframe.learning.class_sums import class_feature_sums
from tightframe.methods import fedmr
from tightframe.methods.fedmr import (
    METHOD,
    FedMRConfig,
    inter_class_loss,
    inter_weight,
    intra_class_loss,
    update_prototypes,
)
from tightframe.phases import Schema
from tightframe.rounds import codec

FORMS: list[Any] = ["correlation", "paper", "official"]
SUPPORTS: list[Any] = ["observed", "all"]


def _batch(seed: int, batch: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, width, generator=stream, dtype=torch.float64)
    return features, torch.randint(0, classes, (batch,), generator=stream)


def _intra_by_class(features: torch.Tensor, labels: torch.Tensor, form: str, eps: float) -> torch.Tensor:
    """Equation (3) as it is written, one class after another."""
    width = features.shape[1]
    total, used, records = features.sum() * 0, 0, 0
    for label in labels.unique():
        chosen = features[labels == label]
        if len(chosen) < 2:
            continue
        standardised = (chosen - chosen.mean(0)) / torch.sqrt(chosen.var(0, unbiased=True) + eps)
        correlation = standardised.T @ standardised / (len(chosen) - 1)
        if form == "paper":
            total = total + correlation.square().sum()
        elif width > 1:
            off = correlation[~torch.eye(width, dtype=torch.bool)].square().mean()
            total = total + (off if form == "correlation" else (len(chosen) - 1) ** 2 * off)
        used += 1
        records += len(chosen)
    return total / max(records if form == "official" else used, 1)


def _inter_by_pairs(
    features: torch.Tensor, labels: torch.Tensor, prototypes: torch.Tensor, valid: torch.Tensor, support: str
) -> torch.Tensor:
    """Equation (4) as it is written, one pair after another."""
    present = [label for label in labels.unique().tolist() if valid[label]]
    others = present if support == "observed" else torch.nonzero(valid).flatten().tolist()
    total, pairs = features.sum() * 0, 0
    for i in present:
        chosen = features[labels == i]
        for j in others:
            if j != i:
                gap = (chosen - prototypes[i]).norm(dim=1) - (chosen - prototypes[j]).norm(dim=1)
                total, pairs = total + gap.clamp_min(0).mean(), pairs + 1
    return total / max(pairs, 1)


# Both ways of summing over classes: batches below and above classes * width.
SHAPES = [(24, 30, 4), (24, 8, 4), (64, 5, 3), (90, 2, 6), (2, 3, 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_intra_equals_the_written_equation(shape: tuple[int, int, int], form: Any) -> None:
    features, labels = _batch(sum(shape), *shape)
    for eps in (1e-8, 1e-2):
        ours = features.clone().requires_grad_()
        theirs = features.clone().requires_grad_()
        found = intra_class_loss(ours, labels, form=form, eps=eps)
        expected = _intra_by_class(theirs, labels, form, eps)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        found.backward()
        expected.backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_inter_equals_the_written_equation(shape: tuple[int, int, int], support: Any) -> None:
    features, labels = _batch(sum(shape), *shape)
    prototypes, _ = _batch(1, 8, shape[1], 1)
    valid = torch.tensor([True, False, True, True, False, True, True, True])
    ours = features.clone().requires_grad_()
    theirs = features.clone().requires_grad_()
    found = inter_class_loss(ours, labels, prototypes, valid.to(torch.uint8), support=support)
    expected = _inter_by_pairs(theirs, labels, prototypes, valid, support)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(9, 12, 3), (16, 2, 3)])
def test_gradients_by_differences(shape: tuple[int, int, int], form: Any) -> None:
    features, labels = _batch(5, *shape)
    features.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: intra_class_loss(z, labels, form=form, eps=1e-3), features)
    prototypes, _ = _batch(6, 3, shape[1], 1)
    valid = torch.tensor([True, True, True])
    for support in SUPPORTS:
        assert torch.autograd.gradcheck(
            lambda z, s=support: inter_class_loss(z, labels, prototypes, valid, support=s), features
        )


@given(seed=st.integers(0, 10_000), batch=st.integers(2, 40), width=st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_invariances(seed: int, batch: int, width: int) -> None:
    features, labels = _batch(seed, batch, width, 4)
    stream = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(batch, generator=stream)
    scale = torch.rand(width, generator=stream, dtype=torch.float64) + 0.5
    shift = torch.randn(width, generator=stream, dtype=torch.float64)
    names = torch.randperm(9, generator=stream)[labels]
    prototypes, _ = _batch(seed + 2, 4, width, 1)
    valid = torch.rand(4, generator=stream) < 0.7
    for form in FORMS:
        loss = intra_class_loss(features, labels, form=form)
        for same in (
            intra_class_loss(features[order], labels[order], form=form),  # order of records
            intra_class_loss(features, names, form=form),  # names of classes
            intra_class_loss(features[:, torch.randperm(width, generator=stream)], labels, form=form),
        ):
            torch.testing.assert_close(same, loss, rtol=1e-9, atol=1e-9)
        # A correlation knows neither the unit nor the origin of a feature (eps is in its unit).
        if all(count == 0 or count > 2 for count in torch.bincount(labels).tolist()):
            moved = intra_class_loss(features * scale + shift, labels, form=form)
            torch.testing.assert_close(moved, loss, rtol=1e-5, atol=1e-7)
    for support in SUPPORTS:
        loss = inter_class_loss(features, labels, prototypes, valid, support=support)
        turn, _ = torch.linalg.qr(torch.randn(width, width, generator=stream, dtype=torch.float64))
        for same in (
            inter_class_loss(features[order], labels[order], prototypes, valid, support=support),
            inter_class_loss(features + shift, labels, prototypes + shift, valid, support=support),
            inter_class_loss(features @ turn, labels, prototypes @ turn, valid, support=support),
            inter_class_loss(3 * features, labels, 3 * prototypes, valid, support=support) / 3,
        ):
            torch.testing.assert_close(same, loss, rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 10_000), batch=st.integers(3, 40), width=st.integers(2, 12))
@settings(max_examples=25, deadline=None)
def test_intra_is_between_width_and_its_square(seed: int, batch: int, width: int) -> None:
    features, _ = _batch(seed, batch, width, 1)
    loss = float(intra_class_loss(features, torch.zeros(batch, dtype=torch.int64), eps=0.0))
    lowest = max(width, width**2 / (batch - 1))  # the rank of R is at most N - 1
    assert lowest - 1e-6 <= loss <= width**2 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (torch.ones(6, 4), [0, 0, 0, 1, 1, 1]),  # no feature has any spread
        (torch.arange(24.0).reshape(6, 4), [0, 1, 2, 3, 4, 5]),  # every class once
        (torch.arange(24.0).reshape(6, 4), [0, 0, 1, 1, 2, 2]),  # every class twice
        (torch.arange(4.0).reshape(1, 4), [3]),  # one record
        (torch.arange(6.0).reshape(6, 1), [0, 0, 0, 0, 0, 0]),  # one feature, larger batch than width
        (torch.full((64, 3), 1e4), [0] * 64),  # constant and large
    ],
)
def test_intra_never_breaks_training(
    features: torch.Tensor, labels: list[int], form: Any, dtype: torch.dtype
) -> None:
    features = features.clone().to(dtype).detach().requires_grad_()
    loss = intra_class_loss(features, torch.tensor(labels), form=form)
    loss.backward()
    assert loss.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert torch.isfinite(loss)
    assert features.grad is not None and torch.isfinite(features.grad).all()
    if len(set(labels)) == len(labels):
        assert float(loss.detach()) == 0
        assert not features.grad.any()


@pytest.mark.parametrize("support", SUPPORTS)
def test_inter_never_breaks_training(support: Any) -> None:
    prototypes = torch.tensor([[0.0, 0.0], [3.0, 4.0], [torch.nan, torch.inf]])
    labels = torch.tensor([0, 1, 2])
    for valid in ([True, True, False], [False, False, False], [False, True, False]):
        features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]], requires_grad=True)  # two at z = G
        loss = inter_class_loss(features, labels, prototypes, torch.tensor(valid), support=support)
        loss.backward()
        assert float(loss.detach()) == 0
        assert features.grad is not None and not features.grad.isnan().any()
    # A record at a *wrong* prototype: the own distance still pulls.
    features = torch.tensor([[3.0, 4.0]], requires_grad=True)
    loss = inter_class_loss(
        features, torch.tensor([0]), prototypes, torch.tensor([True, True, False]), support="all"
    )
    loss.backward()
    assert float(loss.detach()) == 5
    torch.testing.assert_close(features.grad, torch.tensor([[0.6, 0.8]]))


def test_missing_classes_act_only_with_all_prototypes() -> None:
    prototypes = torch.tensor([[0.0, 0.0], [10.0, 0.0], [1.0, 0.0]])
    valid = torch.ones(3, dtype=torch.bool)
    features = torch.tensor([[1.0, 0.0], [9.0, 0.0]])
    labels = torch.tensor([0, 1])
    assert float(inter_class_loss(features, labels, prototypes, valid)) == 0
    assert float(inter_class_loss(features, labels, prototypes, valid, support="all")) == 0.25


@given(seed=st.integers(0, 10_000), width=st.sampled_from([2, 16, 300]))
@settings(max_examples=15, deadline=None)
def test_the_mean_squared_correlation_is_the_same_at_every_width(seed: int, width: int) -> None:
    """Of independent features 1 / (N - 1), of one feature repeated 1: whatever the width."""
    features, _ = _batch(seed, 400, width, 1)
    labels = torch.zeros(400, dtype=torch.int64)
    one = intra_class_loss(features[:, :1].repeat(1, width), labels, form="correlation")
    assert float(one) == pytest.approx(1, abs=1e-6)
    independent = float(intra_class_loss(features, labels, form="correlation"))
    assert independent < 0.05
    if width == 300:
        assert independent == pytest.approx(1 / 399, rel=0.1)


def test_a_feature_that_is_nearly_dead_gets_no_gradient_beyond_the_others() -> None:
    """Of ReLU's outputs some are positive for one record of a class only, by very little."""
    features, labels = _batch(1, 32, 64, 2)
    features = features.relu()
    features[:, :8] *= 1e-5
    config = FedMRConfig()

    def largest(eps: float, form: Any) -> tuple[float, float]:
        given = features.clone().requires_grad_()
        intra_class_loss(given, labels, form=form, eps=eps).backward()
        assert given.grad is not None
        return float(given.grad[:, :8].abs().max()), float(given.grad[:, 8:].abs().max())

    dead, alive = largest(config.intra_eps, config.intra_form)
    assert dead <= alive
    dead, alive = largest(1e-8, config.intra_form)
    assert dead > 100 * alive


def test_other_forms_need_a_weight_of_their_own() -> None:
    for form in ("paper", "official"):
        with pytest.raises(ValueError, match=f"Expected `mu_intra` beside intra_form '{form}'"):
            FedMRConfig(intra_form=form)  # type: ignore[arg-type]
        assert FedMRConfig(intra_form=form, mu_intra=1e-5).mu_intra == 1e-5  # type: ignore[arg-type]


def test_unknown_forms_are_refused() -> None:
    features, labels = _batch(0, 4, 3, 2)
    with pytest.raises(ValueError, match=r"one of .*'official'.*, but got 'both'"):
        intra_class_loss(features, labels, form="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'observed' or 'all', but got 'both'"):
        inter_class_loss(features, labels, features, labels, support="both")  # type: ignore[arg-type]


def test_class_sums_do_not_depend_on_the_order_of_records() -> None:
    stream = torch.Generator().manual_seed(3)
    inputs = torch.randn(500, 6, generator=stream) * torch.logspace(-6, 3, 6)
    labels = torch.randint(0, 3, (500,), generator=stream)
    sums, counts = class_feature_sums([(inputs, labels)], 4, 6)
    exact = torch.stack([inputs[labels == label].double().sum(0) for label in range(4)])
    torch.testing.assert_close(sums, exact, rtol=0, atol=500 * 2.0**-25)
    assert counts.tolist() == torch.bincount(labels, minlength=4).tolist()
    for seed in range(5):
        order = torch.randperm(500, generator=torch.Generator().manual_seed(seed))
        batches = list(zip(inputs[order].split(37 + seed), labels[order].split(37 + seed), strict=True))
        again, _ = class_feature_sums(batches, 4, 6)
        assert torch.equal(again, sums)
    with pytest.raises(TrainingError, match="TF-301"):
        class_feature_sums([(inputs * torch.inf, labels)], 4, 6)


@pytest.mark.parametrize(
    "values",
    [
        [1e15, 1e15],  # both saturate: the wrapped sum would be -2 units, a prototype of about 0
        [-1e15, -1e15],
        [1e15, -1e15],  # a sum within its bound, of records that are not
        [1.0, 2.0**14 * (1 + 2.0**-52)],
        [3e4, 1.0],
    ],
)
def test_features_over_the_bound_are_refused_before_they_become_integers(values: list[float]) -> None:
    inputs = torch.tensor([[0.5, value] for value in values], dtype=torch.float64)
    labels = torch.zeros(len(values), dtype=torch.int64)
    for batches in ([(inputs, labels)], list(zip(inputs.split(1), labels.split(1), strict=True))):
        with pytest.raises(ContributionError, match=r"^TF-402: .*at most 16384 .* but got .*: lower the"):
            class_feature_sums(batches, 2, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_features_that_are_not_finite_are_named_so_in_any_batch(bad: float) -> None:
    fine, large = torch.tensor([[1.0]]), torch.tensor([[1e15]])
    label = torch.tensor([0])
    for order in ([fine, torch.tensor([[bad]]), large], [large, torch.tensor([[bad]]), fine]):
        with pytest.raises(TrainingError, match=r"^TF-301: .*NaN or infinite"):
            class_feature_sums([(inputs, label) for inputs in order], 1, 1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_silo_with_the_largest_features_does_not_wrap(sign: float) -> None:
    part = 2**20
    inputs = torch.full((part, 1), sign * class_sums.FEATURE_BOUND)
    labels = torch.zeros(part, dtype=torch.int64)
    parts = int(class_sums.COUNT_BOUND) // part
    sums, counts = class_feature_sums([(inputs, labels)] * parts, 1, 1)
    assert float(sums) == sign * class_sums.FEATURE_BOUND * class_sums.COUNT_BOUND  # 2**62 units of the grid
    assert float(counts) == class_sums.COUNT_BOUND


def test_more_records_than_the_sum_is_made_for_are_refused_by_their_count(make_setting: Any) -> None:
    assert class_sums.COUNT_BOUND * class_sums.FEATURE_BOUND * class_sums.GRID < 2**63
    (phase,) = METHOD.plan(make_setting(FedMRConfig()), 1, 1)
    assert phase.schema[fedmr.SUMS].bound * class_sums.GRID < 2**53
    schema = Schema((phase.schema[fedmr.COUNTS],))
    counts = torch.tensor([class_sums.COUNT_BOUND, 0.0, 0.0], dtype=torch.float64)
    codec.encode(schema, {fedmr.COUNTS: counts}, share=1.0, parties=6)
    with pytest.raises(ContributionError, match=r"^TF-402: .*prototype/counts.* at most"):
        codec.encode(schema, {fedmr.COUNTS: counts + 1}, share=1.0, parties=6)


def test_a_class_that_disappears_keeps_its_prototype() -> None:
    previous = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
    prototypes, seen = update_prototypes(previous, torch.tensor([[10.0, 0.0]] * 3), torch.tensor([4, 0, 0]))
    assert prototypes.tolist() == [[2.5, 0.0], [3.0, 4.0], [0.0, 0.0]]
    assert seen.tolist() == [True, False, False]


# ---------------------------------------------------------------- a round with silos


def _round(make_setting: Any, make_silo: Any, open_sum: Any, config: FedMRConfig, **changes: Any) -> Any:
    setting = make_setting(config)
    state = METHOD.init_server(setting, 7)
    (phase,) = METHOD.plan(setting, 1, 2)
    silos = {
        "site-1": make_silo(setting, [0] * 9 + [1] * 8, name="site-1"),
        "site-2": make_silo(setting, [1] * 5 + [0], name="site-2", **changes),
    }
    for number in (1, 2):
        terms = {}
        for name, silo in silos.items():
            silo.round = number
            contribution = phase.contribute(silo, phase.broadcast(state), {})
            assert contribution.proposed_state == {}
            terms[name] = (len(silo.labels), contribution.tensors)
        totals, cohort = open_sum(phase.schema, terms)
        state = phase.update(state, totals, cohort)
    return setting, silos, state, totals, terms


def test_two_rounds(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    config = FedMRConfig(mu_intra=1e-3, mu_inter=1e-2, inter_units="distance", lite_m=4)
    setting, silos, state, totals, terms = _round(make_setting, make_silo, open_sum, config)
    assert totals["prototype/counts"].tolist() == [10, 13, 0]
    assert state.extra["prototype_valid"].tolist() == [1, 1, 0]
    assert not state.extra["prototypes"][2].any()
    means = totals["prototype/feature_sums"][:2] / np.array([[10], [13]])
    np.testing.assert_allclose(state.extra["prototypes"][:2].numpy(), means, rtol=1e-6)
    assert totals["training/intra"] > 0
    for _, tensors in terms.values():
        parts = [float(tensors[f"training/{name}"]) for name in fedmr.TERMS]
        total = parts[0] + config.mu_intra * parts[1] + config.mu_inter * parts[2]
        assert float(tensors["training/loss"]) == pytest.approx(total, rel=1e-5)
    passes = [asked for asked in silos["site-1"].asked if not asked["shuffle"]]
    assert passes == [{"fold": "train", "augment": False, "shuffle": False, "epoch": 0}] * 2
    logits = METHOD.predict(setting.build_model(), torch.zeros(2, 1, 8, 8))
    assert logits.shape == (2, 3)
    again = _round(make_setting, make_silo, open_sum, config)[2]
    assert all(torch.equal(again.model[name], state.model[name]) for name in state.model)


def test_relative_units_are_free_of_the_features_scale() -> None:
    """The weight is scipy's: one over the mean distance of the classes that have a prototype."""
    source = torch.Generator().manual_seed(3)
    features, prototypes = torch.randn(12, 5, generator=source), torch.randn(4, 5, generator=source)
    labels, valid = torch.arange(12) % 4, torch.tensor([True, True, False, True])
    options = FedMRConfig(mu_inter=0.7)
    weight = inter_weight(options, prototypes, valid)
    assert weight == pytest.approx(0.7 / pdist(prototypes[valid].numpy()).mean(), rel=1e-6)
    term = weight * inter_class_loss(features, labels, prototypes, valid)
    large = 1e3 * prototypes
    scaled = inter_weight(options, large, valid) * inter_class_loss(1e3 * features, labels, large, valid)
    assert term > 0 and float(scaled) == pytest.approx(float(term), rel=1e-5)


def test_weight_without_distances_and_as_printed() -> None:
    same, valid = torch.ones(3, 2), torch.tensor([1, 1, 1], dtype=torch.uint8)
    assert inter_weight(FedMRConfig(), same, valid) == 0.0
    assert inter_weight(FedMRConfig(mu_inter=0.2), same, torch.tensor([1, 0, 0])) == 0.2
    printed = FedMRConfig(mu_inter=0.2, inter_units="distance")
    assert inter_weight(printed, 9 * torch.eye(3), valid) == 0.2
    with pytest.raises(ValidationError, match="`mu_inter` beside inter_units 'distance'"):
        FedMRConfig(inter_units="distance")


def test_a_silo_may_keep_its_prototypes(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    _, silos, state, totals, terms = _round(
        make_setting, make_silo, open_sum, FedMRConfig(), offers_prototypes=False
    )
    assert totals["prototype/counts"].tolist() == [9, 8, 0]
    assert not terms["site-2"][1]["prototype/feature_sums"].any()
    assert all(asked["shuffle"] for asked in silos["site-2"].asked)  # no pass for nothing
    assert state.extra["prototype_valid"].tolist() == [1, 1, 0]


def test_without_its_terms_it_is_fedavg(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    state = _round(make_setting, make_silo, open_sum, FedMRConfig(mu_intra=0, mu_inter=0))[2]
    fedavg = methods.get("fedavg")
    setting = make_setting(fedavg.config())
    other = fedavg.init_server(setting, 7)
    (phase,) = fedavg.plan(setting, 1, 2)
    labels = {"site-1": [0] * 9 + [1] * 8, "site-2": [1] * 5 + [0]}
    for number in (1, 2):
        terms = {}
        for name, chosen in labels.items():
            silo = make_silo(setting, chosen, name=name, round=number)
            terms[name] = (len(chosen), phase.contribute(silo, phase.broadcast(other), {}).tensors)
        other = phase.update(other, *open_sum(phase.schema, terms))
    assert all(torch.equal(other.model[name], state.model[name]) for name in state.model)


def test_lite_looks_at_m_records(make_setting: Any, make_silo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = fedmr.inter_class_loss

    def spy(features: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        seen.append(features.detach().clone())
        return original(features, *others, **options)

    monkeypatch.setattr(fedmr, "inter_class_loss", spy)
    setting = make_setting(FedMRConfig(lite_m=3))
    state = METHOD.init_server(setting, 7)
    (phase,) = METHOD.plan(setting, 1, 1)
    for _ in range(2):
        phase.contribute(make_silo(setting, [0, 1] * 8 + [2, 2]), phase.broadcast(state), {})
    assert [len(chosen) for chosen in seen] == [3, 3, 2] * 2  # the last batch has two records
    assert all(torch.equal(one, other) for one, other in zip(seen[:3], seen[3:], strict=True))


def test_options_are_checked() -> None:
    for wrong in ({"mu_intra": -1.0}, {"mu": 1}, {"lite_m": 0}, {"intra_form": "both"}, {"mu_inter": "1"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FedMRConfig.model_validate(wrong)
