"""FedILC at a silo: hard records, what is refused, and what leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.methods.fedilc_by_hand import (
    VARIANTS,
    WIDTH,
    WITH_FISHR,
    Network,
    adam,
    assert_agree,
    direction_of,
    federate,
    setting_of,
    silos_of,
    whole,
)
from torch import nn

from tightframe.errors import ContributionError, TrainingError
from tightframe.learning.gradients.fold import FoldGradients
from tightframe.methods import fedilc
from tightframe.methods.fedilc import METHOD, FedILCConfig
from tightframe.methods.fedilc.fishr import fishr_penalty
from tightframe.methods.fedilc.geometric_mean import (
    sign_log_terms,
    weighted_geometric_mean,
    weighted_geometric_mean_from_sums,
)
from tightframe.rounds import codec

# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_silo_with_one_record(variant: Any, make_setting: Any, open_sum: Any) -> None:
    setting = setting_of(make_setting, norm=True, variant=variant)
    silos = silos_of(setting, {"site-1": [0, 1, 2, 2, 1], "site-2": [2], "site-3": [0] * 4})
    if variant in WITH_FISHR:
        phase = METHOD.plan(setting, 1, 1)[0]
        broadcast = phase.broadcast(METHOD.init_server(setting, 7))
        assert not phase.contribute(silos["site-2"], broadcast, {}).tensors[fedilc.VARIANCE].any()
    state, _ = federate(setting, silos, open_sum, 2)
    assert all(torch.isfinite(tensor).all() for tensor in state.model.values())


def test_mini_batches_of_one_record(make_setting: Any, open_sum: Any) -> None:
    """The paper's reading of "each data example"."""
    setting = setting_of(make_setting, variant="intra_geo", local={"batch_size": 1})
    silos = silos_of(setting)
    direction, _ = direction_of(setting, METHOD.init_server(setting, 7), silos, 1)
    state, _ = federate(setting, silos, open_sum, 1)
    assert_agree(state, adam(setting, METHOD.init_server(setting, 7), [direction]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_finite_is_refused(variant: Any, make_setting: Any) -> None:
    setting = setting_of(make_setting, variant=variant, penalty_weight=0.0)
    (phase,) = METHOD.plan(setting, 1, 1)
    broadcast = phase.broadcast(METHOD.init_server(setting, 7))
    for bad in (math.nan, math.inf):
        silo = silos_of(setting)["site-1"]
        silo.inputs[3, 2] = bad
        with pytest.raises(TrainingError, match=r"^TF-301: .*that of backbone\.0\.weight"):
            phase.contribute(silo, broadcast, {})


def test_gradients_out_of_range_are_refused(make_setting: Any) -> None:
    for variant, error in (("geometric", "contribute"), ("intra_geo", "contribute"), ("fedsgd", "encode")):
        setting = setting_of(make_setting, variant=variant, penalty_weight=0.0)
        (phase,) = METHOD.plan(setting, 1, 1)
        silo = silos_of(setting)["site-1"]
        silo.inputs *= 1e9
        broadcast = phase.broadcast(METHOD.init_server(setting, 7))
        with pytest.raises(ContributionError, match=r"^TF-402: "):
            tensors = phase.contribute(silo, broadcast, {}).tensors
            assert error == "encode"
            codec.encode(phase.schema, tensors, share=1.0, parties=3)


def test_a_column_that_only_one_silo_has(make_setting: Any, open_sum: Any) -> None:
    """Its exact zeros elsewhere spoil a neutral mean only by what they count in K."""
    setting = setting_of(make_setting, variant="geometric", weight_decay=0.0, local={"augment": False})
    silos = silos_of(setting)
    for name in ("site-1", "site-2"):
        silos[name].inputs[:, 0] = 0
    start = METHOD.init_server(setting, 7)
    model = setting.build_model()
    model.load_state_dict(dict(start.model))
    _, own, _ = whole(silos["site-3"], model)  # type: ignore[arg-type]
    own = own[: 5 * WIDTH].view(WIDTH, 5)[:, 0]
    assert own.abs().max() > 1e-3
    state, _ = federate(setting, silos, open_sum, 1)
    step = (start.model["backbone.0.weight"] - state.model["backbone.0.weight"])[:, 0]
    direction = own / 3
    expected = 1e3 * direction / (direction.abs() + 1e3)  # Adam's first step
    torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-12)


# ---------------------------------------------------------------- what leaves a silo


def test_how_many_numbers_leave_a_silo(make_setting: Any) -> None:
    """P, or 3P or 4P of a mean over silos, and the penalty's part within or beside it."""
    size = 5 * WIDTH + WIDTH + 3 * WIDTH + 3
    layer = 3 * (WIDTH + 1)
    sizes = {
        "fedsgd": [size],
        "geometric": [4 * size],
        "fishr_arith_fullbatch": [layer, size],
        "inter_geo": [layer, 5 * size],
        "intra_arith": [layer, size],
        "intra_geo": [layer, size],
        "geo_substitute": [5 * size],
    }

    def counted(**options: Any) -> list[int]:
        phases = METHOD.plan(setting_of(make_setting, **options), 1, 1)
        kept = [[item for item in phase.schema.fields if not item.static] for phase in phases]
        assert not any(item.weighted or item.per_class for fields in kept for item in fields)
        return [sum(item.size for item in fields) for fields in kept]

    assert {variant: counted(variant=variant) for variant in VARIANTS} == sizes
    assert counted(variant="geometric", zero="official") == [3 * size]
    assert counted(variant="geometric", zero="official", threshold=0.1) == [4 * size]
    assert counted(variant="intra_geo", stale=True) == [size + layer]


@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_of_the_largest_federation_fit(variant: Any, make_setting: Any) -> None:
    for phase in METHOD.plan(setting_of(make_setting, variant=variant), 1, 1):
        codec.check_schema(phase.schema, 250)


@pytest.mark.parametrize("variant", VARIANTS)
def test_encoded_sums_are_as_exact_as_is_said(variant: Any, make_setting: Any) -> None:
    """Gradients over twelve orders of magnitude, as the comments at SCALE and RANGES say it."""
    setting = setting_of(make_setting, variant=variant)
    template = setting.build_model()
    size = sum(item.numel() for item in template.parameters())
    stream = torch.Generator().manual_seed(1)
    silos = 9
    gradients = torch.randn(silos, size, generator=stream, dtype=torch.float64)
    gradients *= 10.0 ** -(12 * torch.rand(silos, size, generator=stream, dtype=torch.float64))
    phase = METHOD.plan(setting, 1, 1)[-1]
    schema = type(phase.schema)(tuple(f for f in phase.schema.fields if f.name.startswith("gradient/")))
    config: FedILCConfig = setting.config
    zero = FoldGradients(gradients[0], torch.zeros(size), 0.0, 1, 1)
    totals: dict[str, Any] = {}
    for gradient in gradients:
        terms = fedilc._gradient_terms(
            config, template, replace(zero, gradient=gradient), fishr=False, factor=0
        )
        for group in codec.encode(schema, terms, share=1.0, parties=silos).values():
            assert isinstance(group, bytes)
        for item in schema.fields:
            one = codec.encoding.encode(
                terms[item.name].double().numpy(),
                ring=item.ring,
                bits=codec.bits_of(item, silos),
                bound=item.effective_bound,
                name=item.name,
            )
            totals[item.name] = one if item.name not in totals else totals[item.name] + one
    opened = codec.decode(schema, totals, parties=silos)
    names = [name for name, _ in template.named_parameters()]
    directions = fedilc._directions(config, opened, names, silos)
    found = torch.cat([directions[name].reshape(-1) for name in names])
    if not config.splits_by_sign:
        expected = gradients.mean(0)
        assert (found - expected).abs().max() <= 2.0**-37  # each term is rounded by half a unit of 2^-36
        return
    expected = config.rule.mean(
        {
            name: torch.stack([config.rule.terms(row)[name] for row in gradients]).sum(0)
            for name in config.rule.names
        },
        silos,
    )
    # Two sides may nearly cancel, so the error is relative to the larger one, which the mean of |a| bounds.
    bound = 1e-6 * gradients.abs().mean(0)
    assert ((found - expected).abs() <= bound).all()
    assert found.abs().min() > 0


def test_a_norm_bounds_the_gradient(make_setting: Any, open_sum: Any) -> None:
    setting = setting_of(make_setting, variant="intra_geo", update_norm=0.01)
    phase = METHOD.plan(setting, 1, 1)[-1]
    normed = [item for item in phase.schema.fields if item.norm is not None]
    assert {item.norm for item in normed} == {0.01 * fedilc.SCALE}
    assert all(item.name.startswith("gradient/") for item in normed) and len(normed) == 4
    for variant in ("geometric", "inter_geo", "geo_substitute"):
        with pytest.raises(ValueError, match=f"no update_norm with {variant}"):
            METHOD.plan(setting_of(make_setting, variant=variant, update_norm=0.01), 1, 1)


def test_values_of_the_job_that_have_no_meaning_are_refused(make_setting: Any) -> None:
    with pytest.raises(ValueError, match=r"epochs to be 1.*but got 3; training.amp to be false"):
        METHOD.plan(setting_of(make_setting, local={"epochs": 3, "amp": True}), 1, 1)
    setting = setting_of(make_setting, variant="intra_geo")
    strange = replace(
        setting, build_model=lambda: Network(norm=False, dropout=0.0, head=nn.Sequential(nn.Linear(WIDTH, 3)))
    )
    with pytest.raises(ValueError, match=r"linear head .* but got Sequential"):
        METHOD.plan(strange, 1, 1)
    wrong: list[dict[str, Any]] = [
        {"variant": "fishr"},
        {"zero": "none"},
        {"threshold": 1.1},
        {"penalty_weight": -1.0},
        {"beta1": 1.0},
        {"learning_rate": 0.0},
        {"lambda": 1.0},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            FedILCConfig.model_validate(options)


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        ({"penalty_weight": 1.0}, WITH_FISHR),
        ({"penalty_scale": "mean"}, WITH_FISHR),
        ({"penalty_anneal_rounds": 1}, WITH_FISHR),
        ({"penalty_weight_before": 1.0}, WITH_FISHR),
        ({"stale": True}, WITH_FISHR),
        ({"threshold": 0.5}, {"geometric", "inter_geo", "intra_geo"}),
        ({"zero": "official"}, {"geometric", "inter_geo", "intra_geo", "geo_substitute"}),
        ({"substitute": 0.5}, {"geo_substitute"}),
    ],
)
def test_an_option_that_its_variant_ignores_is_refused(options: dict[str, Any], variants: set[str]) -> None:
    (name,) = options
    default = {name: FedILCConfig.model_fields[name].default}
    for variant in VARIANTS:
        FedILCConfig.model_validate({"variant": variant, **default})
        if variant in variants:
            FedILCConfig.model_validate({"variant": variant, **options})
        else:
            with pytest.raises(ValueError, match=rf"variant '{variant}' looks at, but got \['{name}'\]"):
                FedILCConfig.model_validate({"variant": variant, **options})


def test_what_may_be_said_of_a_variant() -> None:
    split = {variant for variant in VARIANTS if FedILCConfig(variant=variant).splits_by_sign}
    assert split == {"geometric", "inter_geo", "geo_substitute"}
    geometric = {variant for variant in VARIANTS if FedILCConfig(variant=variant).geometric}
    assert geometric == {*split, "intra_geo"}


def test_public_names_are_the_formulas() -> None:
    gradients = torch.tensor([[1.0, -2.0], [4.0, 3.0]])
    sums = [sign_log_terms(row) for row in gradients]
    summed = {name: sums[0][name] + sums[1][name] for name in sums[0]}
    expected = weighted_geometric_mean(gradients)
    torch.testing.assert_close(weighted_geometric_mean_from_sums(summed, 2), expected)
    assert float(fishr_penalty(torch.tensor([[1.0], [3.0]]))) == 2


def test_a_personal_model_is_the_final_one_after_an_epoch(make_setting: Any) -> None:
    setting = setting_of(make_setting)
    silo = silos_of(setting)["site-1"]
    state = METHOD.init_server(setting, 7)
    assert METHOD.personalise is not None
    personal = METHOD.personalise(silo, state.model, {})
    model = setting.build_model()
    model.load_state_dict(dict(state.model))
    local = setting.local
    optimizer = torch.optim.SGD(
        model.parameters(), lr=local.learning_rate, momentum=local.momentum, weight_decay=local.weight_decay
    )
    for inputs, labels in silo.batches("train", augment=True, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(personal.state_dict()[name], tensor)
