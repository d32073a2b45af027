"""FedAvg_ETF: golden values of the paper's formulas, its schedule, rounds without an engine, whole runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
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
from tightframe.learning.class_sums import ClassSums
from tightframe.learning.stages import BatchView
from tightframe.methods import fedavg_etf
from tightframe.methods.fedavg_etf import (
    DENOMINATOR,
    ETF,
    MEMORY,
    MEMORY_VALID,
    METHOD,
    NUMERATOR,
    OFFSETS,
    VALID,
    FedAvgETFConfig,
    memory_offsets,
    update_memory,
)
from tightframe.phases import Cohort, ServerState

GOLDEN = np.load(Path(__file__).resolve().parent.parent / "golden" / "fedavg_etf_gmv.npz")
CASES = range(int(GOLDEN["n_cases"]))
ALPHAS = ["0.0", "0.1", "0.5", "1.0"]
TYPES = [(torch.float64, 1e-9, 1e-12), (torch.float32, 1e-4, 1e-6)]


def memory_logits(
    features: torch.Tensor,
    labels: torch.Tensor,
    memory: torch.Tensor,
    valid: torch.Tensor,
    etf: torch.Tensor,
    *,
    alpha: float,
) -> torch.Tensor:
    """Return the paper's form, ``(f + alpha mu_y) V``; silos compute ``f V + memory_offsets(...)[y]``."""
    vectors = torch.where(valid.to(torch.bool)[:, None], memory, 0)
    return (features + alpha * vectors[labels]) @ etf


def _golden(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    value = torch.as_tensor(GOLDEN[name])
    return value.to(dtype) if value.is_floating_point() else value


def _close(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    found = found.detach().double().numpy() if isinstance(found, torch.Tensor) else found
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def _valid(case: int) -> torch.Tensor:
    return torch.ones(len(GOLDEN[f"c{case}_prev"]), dtype=torch.bool)


# ---------------------------------------------------------------- golden values


@pytest.mark.parametrize("case", CASES)
def test_memory_is_the_ratio_of_two_sums(case: int) -> None:
    prefix = f"c{case}_"
    previous, sums = _golden(prefix + "prev"), _golden(prefix + "sum_means")
    found = update_memory(previous, sums, _golden(prefix + "sum_has"))
    _close(found, GOLDEN[prefix + "mu_over_holders"])
    assert torch.equal(found[-1], previous[-1]), "no silo has the last class"


@pytest.mark.parametrize("divisor", ["over_holders", "over_selected", "count_weighted"])
@pytest.mark.parametrize("case", CASES)
def test_every_divisor_from_what_silos_send(case: int, divisor: Any) -> None:
    """Records whose class means are the golden clients' go through the silos' half and the server's."""
    prefix = f"c{case}_"
    config = FedAvgETFConfig(mu_divisor=divisor, average="weighted")
    counts, means = GOLDEN[prefix + "counts"], _golden(prefix + "client_means")
    totals = {NUMERATOR: np.zeros(means.shape[1:]), DENOMINATOR: np.zeros(means.shape[1])}
    stream = torch.Generator().manual_seed(case)
    for mine, vectors in zip(counts, means, strict=True):
        sums = ClassSums(*vectors.shape)
        for label, count in enumerate(mine):
            spread = torch.randn(count, vectors.shape[1], generator=stream, dtype=torch.float64)
            features = vectors[label] + spread - (spread.mean(0) if count else 0)
            sums.add(features, torch.full((count,), label))
        numerator, denominator = fedavg_etf.memory_terms(sums, config)
        totals[NUMERATOR] += numerator.numpy()
        totals[DENOMINATOR] += denominator.numpy()
    state = ServerState({}, {MEMORY: _golden(prefix + "prev"), MEMORY_VALID: torch.zeros(len(mine))})
    cohort = Cohort(1, {f"site-{k}": 1.0 for k in range(len(counts))}, 1.0)
    after = fedavg_etf.update(state, totals, cohort, config=config)
    _close(after.extra[MEMORY], GOLDEN[f"{prefix}mu_{divisor}"])
    assert after.extra[MEMORY_VALID].bool().tolist() == (counts.sum(0) > 0).tolist()


@pytest.mark.parametrize(("dtype", "rtol", "atol"), TYPES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("case", CASES)
def test_loss_with_memory_in_both_forms(
    case: int, alpha: str, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    prefix = f"c{case}_"
    memory, etf = _golden(prefix + "mu_over_holders", dtype), _golden(prefix + "etf", dtype)
    labels, given = _golden(prefix + "y"), {"alpha": float(alpha)}
    offsets = memory_offsets(memory, _valid(case), etf, **given)
    assert offsets.shape == (len(memory), len(memory)) and offsets.dtype == dtype
    by_offsets, _ = fedavg_etf.offset_terms(offsets)
    for form in ("reference", "offsets"):
        features = _golden(prefix + "f", dtype).requires_grad_()
        logits = memory_logits(features, labels, memory, _valid(case), etf, **given)
        if form == "offsets":
            logits = features @ etf + offsets[labels]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        _close(losses, GOLDEN[f"{prefix}loss_a{alpha}"], rtol, atol)
        loss = losses.mean()
        if form == "offsets":
            view = BatchView(features, labels, features, features @ etf, nn.Identity())
            loss = by_offsets.fn(view)
        loss.backward()
        _close(features.grad, GOLDEN[f"{prefix}grad_f_mean_a{alpha}"], rtol, atol)


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("case", CASES)
def test_loss_with_a_longer_frame(case: int, beta: float) -> None:
    prefix = f"c{case}_"
    etf = _golden(prefix + "etf")
    width, count = etf.shape
    frame: Any = METHOD.head(FedAvgETFConfig(beta_etf=beta), width, count)
    gram = beta**2 * (count / (count - 1) * np.eye(count) - np.ones((count, count)) / (count - 1))
    _close(frame.etf.T @ frame.etf, gram, 1e-5, 1e-6)
    assert not frame.etf.requires_grad and [name for name, _ in frame.named_parameters()] == ["etf"]
    frame.double().load_state_dict({"etf": beta * etf})
    loss = nn.functional.cross_entropy(frame(_golden(prefix + "f")), _golden(prefix + "y"))
    _close(loss, GOLDEN[f"{prefix}loss_scale{beta}_a0"])


# ---------------------------------------------------------------- properties


def test_classes_without_memory_have_no_offsets() -> None:
    stream = torch.Generator().manual_seed(1)
    memory, etf = torch.randn(3, 5, generator=stream), torch.randn(5, 3, generator=stream)
    memory[1] = torch.nan
    valid = torch.tensor([1, 0, 1], dtype=torch.uint8)
    offsets = memory_offsets(memory, valid, etf, alpha=0.7)
    assert offsets[1].tolist() == [0.0, 0.0, 0.0]
    features, labels = torch.randn(4, 5, generator=stream), torch.tensor([1, 0, 2, 1])
    logits = memory_logits(features, labels, memory, valid, etf, alpha=0.7)
    torch.testing.assert_close(logits, features @ etf + offsets[labels])
    torch.testing.assert_close(logits[[0, 3]], (features @ etf)[[0, 3]])


def test_margin_is_the_lead_that_offsets_give_alone() -> None:
    offsets = torch.tensor([[3.0, 1.0, -5.0], [0.0, 0.0, 0.0], [4.0, 1.0, -1.0]])
    assert fedavg_etf.offset_margins(offsets).tolist() == [2.0, 0.0, -5.0]
    _, margin = fedavg_etf.offset_terms(offsets)
    labels = torch.tensor([0, 0, 1, 2])
    view = BatchView(labels, labels, torch.zeros(4, 2), torch.zeros(4, 3), nn.Identity())
    assert float(margin.fn(view)) == pytest.approx((2 + 2 + 0 - 5) / 4) and margin.weight == 0


def test_a_class_without_records_adds_nothing() -> None:
    sums = ClassSums(4, 2)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    sums.add(torch.arange(12.0).reshape(6, 2), labels)
    numerator, denominator = fedavg_etf.memory_terms(sums, FedAvgETFConfig())
    assert denominator.tolist() == [1, 1, 1, 0] and numerator.any(1).tolist() == [True, True, True, False]
    numerator, denominator = fedavg_etf.memory_terms(sums, FedAvgETFConfig(mu_divisor="count_weighted"))
    assert denominator.tolist() == [3, 2, 1, 0] and numerator[0].tolist() == [6.0, 9.0]
    sums.add(torch.tensor([[torch.nan, 0.0]]), torch.tensor([3]))
    with pytest.raises(TrainingError, match="TF-301"):
        fedavg_etf.memory_terms(sums, FedAvgETFConfig())


@pytest.mark.parametrize(
    "options", [{"warm_up": 0}, {"alpha": -1.0}, {"beta_etf": 0.0}, {"mu_divisor": "none"}, {"unknown": 1}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedAvgETFConfig.model_validate(options)


# ---------------------------------------------------------------- the schedule


def _calendar(make_setting: Any, config: FedAvgETFConfig, rounds: int) -> list[str]:
    """For each round what it has of the memory: f(lags) or m(eans) are collected, o(ffsets) are used."""
    setting = setting_with_head(METHOD, make_setting, config)
    state = METHOD.init_server(setting, 7)
    found = []
    for number in range(1, rounds + 1):
        (phase,) = METHOD.plan(setting, number, rounds)
        sent, schema = phase.broadcast(state), phase.schema
        text = "m" if NUMERATOR in schema else "f" if DENOMINATOR in schema else ""
        text += "o" if OFFSETS in sent else ""
        assert (OFFSETS in sent) == (VALID in sent) == ("training/margin" in schema)
        assert not any(name == MEMORY or tuple(item.shape) == (4, 16) for name, item in sent.items())
        for name in {NUMERATOR, DENOMINATOR} & {item.name for item in schema.fields}:
            assert schema[name].static and schema[name].per_class and not schema[name].weighted
        found.append(text or "-")
    return found


def test_class_means_are_collected_before_they_are_used(make_setting: Any) -> None:
    assert _calendar(make_setting, FedAvgETFConfig(warm_up=4), 6) == ["-", "f", "m", "mo", "mo", "mo"]
    assert _calendar(make_setting, FedAvgETFConfig(warm_up=2), 3) == ["m", "mo", "mo"]
    assert _calendar(make_setting, FedAvgETFConfig(warm_up=1), 2) == ["mo", "mo"]
    assert _calendar(make_setting, FedAvgETFConfig(warm_up=9), 3) == ["-", "-", "-"]
    assert _calendar(make_setting, FedAvgETFConfig(warm_up=1, alpha=0), 2) == ["-", "-"]
    assert _calendar(make_setting, FedAvgETFConfig(), 4) == ["f", "m", "mo", "mo"], "the second half"
    assert FedAvgETFConfig().first_round(1000) == 501


# ---------------------------------------------------------------- rounds with silos


def _class_means(state: ServerState, tensors: Any, silo: Any) -> dict[int, torch.Tensor]:
    """Class means of a silo's records by its trained model, one class after another."""
    trained = {name: value + tensors.get("update/" + name, 0) for name, value in state.model.items()}
    features = silo.load(trained).eval().features(silo.inputs).detach()
    return {label: features[silo.labels == label].mean(0) for label in silo.labels.unique().tolist()}


@pytest.mark.parametrize("average", ["uniform", "weighted"])
def test_rounds_with_memory(make_setting: Any, make_silo: Any, open_sum: Any, average: Any) -> None:
    config = FedAvgETFConfig(warm_up=2, average=average)
    states, phase, terms, silos = headed_rounds(METHOD, make_setting, make_silo, open_sum, config)
    assert states[1].extra[MEMORY_VALID].tolist() == [1, 1, 1, 0]
    assert torch.equal(states[2].model[ETF], states[0].model[ETF]) and "update/" + ETF not in phase.schema
    means = {name: _class_means(states[1], terms[name][1], silos[name]) for name in LABELS}
    for label, holders in ((0, ["site-1", "site-3"]), (1, ["site-1", "site-2"]), (2, ["site-3"])):
        expected = sum(means[name][label] for name in holders) / len(holders)
        torch.testing.assert_close(states[2].extra[MEMORY][label], expected, rtol=1e-4, atol=1e-5)
    assert not states[2].extra[MEMORY][3].any()
    assert_averaged(states[1], states[2], terms, average, but=ETF)
    offsets = phase.broadcast(states[1])[OFFSETS]
    by_hand = config.alpha * states[1].extra[MEMORY] @ states[1].model[ETF]
    torch.testing.assert_close(offsets, by_hand)
    margin = by_hand[1, 1] - by_hand[1, [0, 2, 3]].max()
    assert float(terms["site-2"][1]["training/margin"]) == pytest.approx(float(margin), rel=1e-4)
    again = headed_rounds(METHOD, make_setting, make_silo, open_sum, config)[0][-1]
    assert all(torch.equal(again.model[name], states[-1].model[name]) for name in again.model)


def test_a_step_with_offsets_is_the_papers_step(make_setting: Any, make_silo: Any) -> None:
    """One step of a silo against autograd through ``(f + alpha mu_y) V``, with one class not yet known."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "augment": False, "batch_size": 32, "learning_rate": 0.1}
    setting = setting_with_head(METHOD, make_setting, FedAvgETFConfig(warm_up=1, alpha=0.8), **plain)
    (phase,) = METHOD.plan(setting, 1, 1)
    start = METHOD.init_server(setting, 7)
    memory = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    valid = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    state = start.evolve(extra={MEMORY: memory, MEMORY_VALID: valid})
    silo = make_silo(setting, [0, 1, 2] * 6)
    tensors = phase.contribute(silo, phase.broadcast(state), {}).tensors
    model: Any = silo.load(state.model)
    untouched = copy.deepcopy(model.state_dict())
    logits = memory_logits(model.features(silo.inputs), silo.labels, memory, valid, model.head.etf, alpha=0.8)
    nn.functional.cross_entropy(logits, silo.labels).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(tensors["update/" + name], -0.1 * parameter.grad, rtol=1e-3, atol=1e-6)
    assert all(torch.equal(value, state.model[name]) for name, value in untouched.items())
    logits_without = METHOD.predict(model, silo.inputs)
    torch.testing.assert_close(logits_without, model.features(silo.inputs) @ state.model[ETF])


def test_before_the_warm_up_nothing_of_the_memory_leaves(
    make_setting: Any, make_silo: Any, open_sum: Any
) -> None:
    _, _, terms, silos = headed_rounds(
        METHOD, make_setting, make_silo, open_sum, FedAvgETFConfig(warm_up=5), 2
    )
    assert all("memory" not in name for _, tensors in terms.values() for name in tensors)
    assert all(asked["shuffle"] for asked in silos["site-1"].asked), "no pass for nothing"
    states, phase, terms, _ = headed_rounds(
        METHOD, make_setting, make_silo, open_sum, FedAvgETFConfig(warm_up=3), 1
    )
    assert NUMERATOR not in phase.schema
    assert not any(tensors[DENOMINATOR].any() for _, tensors in terms.values()), "a place for flags only"
    assert not states[1].extra[MEMORY_VALID].any()


def test_features_of_the_last_epoch(make_setting: Any, make_silo: Any) -> None:
    """Without learning the running mean of the last epoch is the mean; two epochs count once."""
    silent = {"learning_rate": 1e-30, "weight_decay": 0.0, "augment": False, "epochs": 2}
    found = []
    for measure in ("eval_pass", "last_epoch"):
        config = FedAvgETFConfig(warm_up=2, measure=measure, mu_divisor="count_weighted")
        setting = setting_with_head(METHOD, make_setting, config, **silent)
        (phase,) = METHOD.plan(setting, 1, 2)
        silo = make_silo(setting, LABELS["site-1"])
        state = METHOD.init_server(setting, 7)
        found.append(phase.contribute(silo, phase.broadcast(state), {}).tensors)
        epochs = [asked["epoch"] for asked in silo.asked if asked["shuffle"]]
        assert epochs == [0, 1] and len(silo.asked) == (3 if measure == "eval_pass" else 2)
    for name in (NUMERATOR, DENOMINATOR):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-5)
    assert found[1][DENOMINATOR].tolist() == [9, 8, 0, 0]


def test_without_the_class_sums_the_memory_stays(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    """After a drop-out static fields are not opened; here one silo is gone, too."""
    config = FedAvgETFConfig(warm_up=2)
    states, phase, terms, _ = headed_rounds(METHOD, make_setting, make_silo, open_sum, config)
    del terms["site-2"]
    totals, cohort = open_sum(phase.schema, terms)
    opened = {name: value for name, value in totals.items() if not phase.schema[name].static}
    state = phase.update(states[1], opened, cohort)
    assert all(torch.equal(state.extra[name], states[1].extra[name]) for name in (MEMORY, MEMORY_VALID))
    assert not torch.equal(state.model["backbone.0.weight"], states[1].model["backbone.0.weight"])
    # Without the silo, a class that only it had would keep its vector; class 1 is site-1's alone now.
    partial = phase.update(states[1], totals, cohort)
    mean = terms["site-1"][1][NUMERATOR][1].float()
    torch.testing.assert_close(partial.extra[MEMORY][1], mean)


def test_withheld_rows_are_absent_classes(make_setting: Any, make_silo: Any, open_sum: Any) -> None:
    config = FedAvgETFConfig(warm_up=1)
    states, phase, terms, _ = headed_rounds(METHOD, make_setting, make_silo, open_sum, config, 1)
    state = phase.update(states[0], *open_sum(phase.schema, withheld(phase, terms)))
    assert state.extra[MEMORY_VALID].tolist() == [1, 1, 0, 0], "class 2 has one record"
    assert not state.extra[MEMORY][2:].any()


def test_a_silo_may_keep_its_class_means(make_setting: Any, make_silo: Any) -> None:
    setting = setting_with_head(METHOD, make_setting, FedAvgETFConfig(warm_up=1))
    (phase,) = METHOD.plan(setting, 1, 1)
    silo = make_silo(setting, [0, 1] * 8, offers_prototypes=False)
    tensors = phase.contribute(silo, phase.broadcast(METHOD.init_server(setting, 7)), {}).tensors
    assert not tensors[NUMERATOR].any() and not tensors[DENOMINATOR].any()
    assert all(asked["shuffle"] for asked in silo.asked), "no pass for nothing"


# ---------------------------------------------------------------- whole runs


OPTIONS: dict[str, Any] = {
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "method_options": {"warm_up": 3},
    "model_options": {"widths": [8]},
    "training": {"epochs": 1, "batch_size": 8, "learning_rate": 0.05},
}


@pytest.mark.whole
def test_secure_sums_give_the_same_bits_as_plain_ones() -> None:
    """Flags in round 1, class means in round 2, offsets in round 3, under the class rules."""
    plain, secure = (
        federation.run("fedavg_etf", made_silos(), 3, summation=kind, **OPTIONS)
        for kind in ("plain", "secure")
    )
    for ours, theirs in ((plain.state.model, secure.state.model), (plain.state.extra, secure.state.extra)):
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert plain.state.extra[MEMORY_VALID].tolist() == [1, 1, 0, 0, 0, 0, 0, 0], "three holders or more"
    margins = [row.training.get("margin") for row in plain.outcome.rows if row.kind == "train"]
    assert margins[:2] == [None, None] and margins[2] != 0


@pytest.mark.whole
def test_a_silo_that_drops_out_costs_the_memory_a_round() -> None:
    silos = made_silos() | {"d": GoneOnce(RUN["d"], 3, time=2)}
    result = federation.run("fedavg_etf", silos, 3, min_sites=3, **OPTIONS)
    rows = [row for row in result.outcome.rows if row.kind == "train"]
    assert [row.static_opened for row in rows] == [True, False, True]
    assert rows[2].training["margin"] == 0, "nothing was collected in round 2"
    assert result.state.extra[MEMORY_VALID].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------- memory with a classifier that trains


def test_memory_alone_trains_the_heads_own_vectors_on_shifted_features(
    make_setting: Any, make_silo: Any
) -> None:
    """One step on all records against autograd on the paper's form: logits = W (f + alpha mu_y) + b."""
    config = FedAvgETFConfig(classifier="trained", alpha=0.5, warm_up=1)
    setting = make_setting(config, batch_size=64, augment=False, momentum=0.0, weight_decay=0.0)
    assert METHOD.head(config, 8, 3) is None  # type: ignore[misc]
    state = METHOD.init_server(setting, 5)
    memory = torch.randn(state.extra[MEMORY].shape, generator=torch.Generator().manual_seed(2))
    valid = torch.tensor([1, 0, 1], dtype=torch.uint8)
    state = state.evolve(extra={**state.extra, MEMORY: memory, MEMORY_VALID: valid})
    (phase,) = METHOD.plan(setting, 2, 3)
    broadcast = phase.broadcast(state)
    assert OFFSETS not in broadcast and torch.equal(broadcast[fedavg_etf.VECTORS], memory)
    silo = make_silo(setting, [0, 0, 1, 1, 2, 2, 2])
    found = phase.contribute(silo, broadcast, {}).tensors
    other: Any = silo.load(state.model)
    shift = 0.5 * memory * valid[:, None]
    logits = (other.features(silo.inputs) + shift[silo.labels]) @ other.head.weight.T + other.head.bias
    loss = nn.functional.cross_entropy(logits, silo.labels)
    loss.backward()
    assert float(found["training/cross_entropy"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    rate = setting.local.learning_rate
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(found[f"update/{name}"], -rate * parameter.grad, rtol=1e-4, atol=1e-7)
