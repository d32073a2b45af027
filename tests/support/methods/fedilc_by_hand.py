"""FedILC written once more: all silos in one process, with every graph kept, and torch's own Adam."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from tests.support.methods.silo import FakeSilo
from torch import nn

from tightframe.learning.gradients.fold import same_batches
from tightframe.methods import fedilc
from tightframe.methods.fedilc import METHOD, FedILCConfig
from tightframe.methods.fedilc.fishr import gradient_variance
from tightframe.methods.fedilc.geometric_mean import substitute_geometric_mean, weighted_geometric_mean
from tightframe.models.heads import SingleLogit
from tightframe.phases import ServerState, Setting

VARIANTS: list[Any] = [*get_args(fedilc.Variant)]
WITH_FISHR = ["fishr_arith_fullbatch", "inter_geo", "intra_arith", "intra_geo"]
LABELS = {"site-1": [0] * 9 + [1] * 10, "site-2": [1] * 5 + [2] * 8, "site-3": [0, 2, 2, 2, 0, 1, 2]}
WIDTH = 6
Slopes = dict[str, torch.Tensor]


class Network(nn.Module):
    """Everything that makes a pass over records differ from the next: BatchNorm, dropout."""

    def __init__(self, *, norm: bool, dropout: float, head: nn.Module) -> None:
        super().__init__()
        layers = [nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.Identity()]
        self.backbone = nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout))
        self.feature_width = WIDTH
        self.head: Any = head
        self.double()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.backbone(x.double())
        return features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x))
        return logits


def setting_of(
    make_setting: Any,
    *,
    norm: bool = False,
    dropout: float = 0.0,
    classes: int = 3,
    local: Mapping[str, Any] | None = None,
    update_norm: float | None = None,
    **options: Any,
) -> Setting:
    """Adam as gentle as SGD: with large ``eps`` and rate a step is about the direction itself."""
    gentle = {"learning_rate": 1e3, "eps": 1e3, "weight_decay": 0.01, "penalty_weight": 0.3}
    values = {**gentle, **options}
    if values.get("variant", "intra_geo") not in WITH_FISHR:
        del values["penalty_weight"]  # is refused where there is no penalty
    setting = make_setting(FedILCConfig(**values), classes=classes, **(local or {}))

    def build_model() -> nn.Module:
        head = SingleLogit(WIDTH) if classes == 2 else nn.Linear(WIDTH, classes)
        return Network(norm=norm, dropout=dropout, head=head)

    return replace(setting, build_model=build_model, input_shape=(5,), update_norm=update_norm)


def silos_of(setting: Setting, labels: Mapping[str, list[int]] = LABELS) -> dict[str, FakeSilo]:
    silos = {}
    for name, chosen in labels.items():
        stream = torch.Generator().manual_seed(len(name) + 7 * int(name[-1]))
        inputs = torch.randn(len(chosen), 5, generator=stream) + 0.3 * torch.tensor(chosen)[:, None]
        inputs[:, int(name[-1])] = 0  # a column that this silo never has
        silos[name] = FakeSilo(name, setting, inputs, torch.tensor(chosen) % setting.num_classes)
    return silos


def federate(
    setting: Setting,
    silos: Mapping[str, FakeSilo],
    open_sum: Any,
    rounds: int,
    lost: Collection[tuple[int, str, str]] = (),
) -> tuple[ServerState, list[dict[str, Any]]]:
    """The rounds as the coordinator runs them; (round, phase, silo) of ``lost`` do not arrive."""
    state = METHOD.init_server(setting, 7)
    opened = []
    for number in range(1, rounds + 1):
        among = list(silos)
        found: dict[str, Any] = {}
        for phase in METHOD.plan(setting, number, rounds):
            terms = {}
            for name in among:
                silos[name].round = number
                contribution = phase.contribute(silos[name], phase.broadcast(state), {})
                assert contribution.proposed_state == {}
                if (number, phase.name, name) not in lost:
                    terms[name] = (len(silos[name].labels), contribution.tensors)
            totals, cohort = open_sum(phase.schema, terms)
            state = phase.update(state, totals, cohort)
            among, found = list(terms), {**found, phase.name: totals}
        opened.append(found)
    return state, opened


# ---------------------------------------------------------------- the same by hand, in one process


def slopes_of(scalar: torch.Tensor, model: nn.Module) -> torch.Tensor:
    slopes = torch.autograd.grad(scalar, list(model.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([slope.reshape(-1) for slope in slopes])


def single_variance(features: torch.Tensor, labels: torch.Tensor, model: Network) -> torch.Tensor:
    """v of a silo from a gradient of each record of its own, attached to all parameters."""
    each = []
    for feature, label in zip(features, labels, strict=True):
        loss = nn.functional.cross_entropy(model.head(feature[None]), label[None])
        weight, bias = torch.autograd.grad(loss, [model.head.weight, model.head.bias], create_graph=True)
        each.append(torch.cat([weight.reshape(-1), bias]))
    return torch.stack(each).var(0, correction=0)


def whole(
    silo: FakeSilo, model: Network, *, one_by_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """v, the full-batch gradient and the mini-batches' gradients, from graphs that are all kept."""
    features, labels, means = [], [], []
    for inputs, truth in same_batches(silo, model):
        features.append(model.features(inputs))
        labels.append(truth)
        means.append(slopes_of(nn.functional.cross_entropy(model.head(features[-1]), truth), model))
    total: Any = sum(len(truth) * mean for truth, mean in zip(labels, means, strict=True)) / len(silo.labels)
    records = torch.cat(features), torch.cat(labels)
    if one_by_one:
        return single_variance(*records, model), total, means
    weight, bias = gradient_variance(*records, model.head.weight, model.head.bias)
    return torch.cat([weight.reshape(-1), bias]), total, means


def direction_of(
    setting: Setting,
    state: ServerState,
    silos: Mapping[str, FakeSilo],
    number: int,
    *,
    mean: torch.Tensor | None = None,
    staying: Collection[str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction of a round by the paper's formulas, and vbar; all silos on one graph."""
    config: FedILCConfig = setting.config
    model = setting.build_model()
    model.load_state_dict(dict(state.model))
    variances, totals, batches = {}, {}, {}
    for name, silo in silos.items():
        silo.round = number
        variances[name], totals[name], batches[name] = whole(silo, model)  # type: ignore[arg-type]
    stay = list(silos) if staying is None else list(staying)
    vbar = torch.stack(list(variances.values())).mean(0)
    rule: dict[str, Any] = {"zero": config.zero, "threshold": config.threshold}
    if config.variant in ("geometric", "inter_geo"):
        direction = weighted_geometric_mean([totals[name] for name in stay], **rule)
    elif config.variant == "geo_substitute":
        direction = substitute_geometric_mean([totals[name] for name in stay], zero=config.zero)
    elif config.variant == "intra_geo":
        direction = torch.stack([weighted_geometric_mean(batches[name], **rule) for name in stay]).mean(0)
    elif config.variant == "intra_arith":
        direction = torch.stack([torch.stack(batches[name]).mean(0) for name in stay]).mean(0)
    else:
        direction = torch.stack([totals[name] for name in stay]).mean(0)
    if config.variant in WITH_FISHR and config.weight_in(number):
        # Through vbar, too, if it is this round's: the gradient of the whole penalty.
        target = vbar if mean is None else mean
        penalty: Any = (
            sum((variances[name] - target).square().sum() for name in stay) * len(silos) / len(stay)
        )
        weight = config.weight_in(number)
        if config.penalty_scale == "mean":
            weight /= len(silos) * len(vbar)
        direction = direction + weight * slopes_of(penalty, model)
    return direction, vbar.detach()


def adam(setting: Setting, start: ServerState, directions: list[torch.Tensor]) -> Slopes:
    """torch's own Adam on given directions."""
    config: FedILCConfig = setting.config
    model = setting.build_model()
    model.load_state_dict(dict(start.model))
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for direction in directions:
        parts = direction.split([item.numel() for item in model.parameters()])
        for item, part in zip(model.parameters(), parts, strict=True):
            item.grad = part.view_as(item)
        optimizer.step()
    return {name: item.detach() for name, item in model.named_parameters()}


def assert_agree(state: ServerState, expected: Slopes) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(state.model[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
