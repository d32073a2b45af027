"""The baselines written once more, as plain loops with ``torch.optim`` and none of our training code.

Also what the tests share: a tiny world of three silos, and a driver of a method's phases that can lose a
silo's term after it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.methods.silo import FakeSilo
from tests.support.runs import FOUR, twin
from torch import nn

from tightframe import federation
from tightframe.methods import fedavg
from tightframe.models import Classifier
from tightframe.phases import Method, ServerState, Setting, Tensors, stream_seed

SEED = 11
# Neither steps nor sizes are equal; at batches of 8 there is none of one record, for BatchNorm.
LABELS = {
    "site-1": [0] * 9 + [1] * 12,
    "site-2": [1] * 5 + [2] * 7,
    "site-3": [0, 0, 2, 2, 2, 2],
}
WIDTH = 8
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def setting_of(method: Method, config: Any, **local: Any) -> Setting:
    """A network with BatchNorm, and the method's head if it has one."""
    values: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 8,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "augment": True,
        "amp": False,
    }

    def build_model() -> nn.Module:
        backbone = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        model = Classifier(backbone, WIDTH, 3)
        head = method.head(config, WIDTH, 3) if method.head is not None else None
        if head is not None:
            model.head = head
        return model

    return Setting(
        config=config,
        num_classes=3,
        input_shape=(6,),
        build_model=build_model,
        local=SimpleNamespace(**{**values, **local}),
    )


def silos_of(setting: Setting) -> dict[str, FakeSilo]:
    """Three silos that see two classes each."""
    silos = {}
    for name, labels in LABELS.items():
        stream = torch.Generator().manual_seed(stream_seed(1, name))
        truth = torch.tensor(labels)
        inputs = torch.randn(len(labels), 6, generator=stream) + truth[:, None]
        silos[name] = FakeSilo(name, setting, inputs, truth)
    return silos


def federate(
    method: Method,
    setting: Setting,
    rounds: int,
    open_sum: Callable[..., Any],
    *,
    lost: Collection[tuple[int, str]] = (),
    silos: Mapping[str, FakeSilo] | None = None,
) -> tuple[ServerState, dict[str, Tensors]]:
    """Run a method's phases; a silo of ``lost`` contributes in that round, but its term never arrives.

    Without ``silos`` they are those of ``silos_of``.

    Returns:
        The server's state, and every silo's committed state.
    """
    silos = silos_of(setting) if silos is None else silos
    state = method.init_server(setting, SEED)
    kept: dict[str, Tensors] = {name: {} for name in silos}
    for number in range(1, rounds + 1):
        (phase,) = method.plan(setting, number, rounds)
        received = phase.broadcast(state)
        terms = {}
        for name, silo in silos.items():
            silo.round = number
            contribution = phase.contribute(silo, received, kept[name])
            if (number, name) not in lost:
                terms[name] = (len(silo.labels), contribution.tensors)
                kept[name] = contribution.proposed_state or kept[name]
        totals, cohort = open_sum(phase.schema, terms)
        state = phase.update(state, totals, replace(cohort, enrolled=len(silos)))
    return state, kept


def equal_sizes(open_sum: Callable[..., Any]) -> Callable[..., Any]:
    """The sum with silos that all have the same number of records."""
    return lambda schema, terms: open_sum(schema, {name: (1, item) for name, (_, item) in terms.items()})


def assert_models_agree(found: Tensors, expected: Tensors, *, atol: float = 2e-6) -> None:
    """Every tensor of the model, and no other."""
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=atol)


def assert_is_fedavg(method: Method, config: Any, open_sum: Callable[..., Any], **local: Any) -> None:
    """Two rounds of a method with options that leave nothing of it are FedAvg's, bit for bit."""
    found, _ = federate(method, setting_of(method, config, **local), 2, open_sum)
    plain = setting_of(fedavg.METHOD, fedavg.FedAvgConfig(), **local)
    expected, _ = federate(fedavg.METHOD, plain, 2, open_sum)
    assert list(found.model) == list(expected.model)
    assert all(torch.equal(found.model[name], expected.model[name]) for name in expected.model)


def whole_run(
    method: str,
    *,
    training: Mapping[str, Any] | None = None,
    sites: Sequence[str] = FOUR,
    **changes: Any,
) -> federation.Result:
    """Two whole rounds of four silos, or others, in this process."""
    return federation.run(
        method,
        {site: twin(site) for site in sites},
        2,
        dataset="fed_isic2019",
        dataset_options={"image_size": 16},
        training={"epochs": 1, "batch_size": 32, "learning_rate": 0.05, **(training or {})},
        **{"model_options": {"widths": [8, 8, 8]}, "seed": 3, **changes},
    )


# The baselines, by hand.


def cross_entropy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def start(setting: Setting) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return setting.build_model()


def train(
    model: nn.Module,
    silo: FakeSilo,
    number: int,
    loss: Loss = cross_entropy,
    correct: Callable[[nn.Module], None] | None = None,
    *,
    epochs: int | None = None,
) -> int:
    """Local training of one round; returns the steps."""
    local = silo.setting.local
    silo.round = number
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=local.learning_rate,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
    )
    model.train()
    steps = 0
    for epoch in range(epochs or local.epochs):
        for inputs, labels in silo.batches("train", augment=local.augment, shuffle=True, epoch=epoch):
            optimizer.zero_grad()
            loss(model, inputs, labels).backward()
            if correct is not None:
                correct(model)
            optimizer.step()
            steps += 1
    return steps


def flat(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its tensors, floating ones in float64."""
    return {
        name: item.detach().clone().double() if item.is_floating_point() else item.detach().clone()
        for name, item in model.state_dict().items()
    }


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total: torch.Tensor = sum(w * value for w, value in zip(weights, values, strict=True))  # type: ignore[assignment]
    return total / sum(weights)


@dataclass
class ByHand:
    """Rounds of local training and averages; a baseline changes ``loss``, ``correct`` or ``step``.

    Attributes:
        setting: as the method under test has it.
        uniform: means over silos, otherwise weighted by their numbers of records.
        lost: (round, silo) whose result never arrives.
        model: the global one.
    """

    setting: Setting
    uniform: bool = False
    lost: Collection[tuple[int, str]] = ()
    model: nn.Module = field(init=False)
    silos: dict[str, FakeSilo] = field(init=False)

    def __post_init__(self) -> None:
        self.model = start(self.setting)
        self.silos = silos_of(self.setting)

    def loss(self, name: str, received: nn.Module) -> Loss:
        return cross_entropy

    def correct(self, name: str) -> Callable[[nn.Module], None] | None:
        return None

    def train_silo(self, model: nn.Module, name: str, number: int) -> int:
        """A silo's training of the model received; returns the steps."""
        return train(model, self.silos[name], number, self.loss(name, self.model), self.correct(name))

    def seen(self, name: str, trained: nn.Module, moved: dict[str, torch.Tensor], steps: int) -> None:
        """A silo's result that arrived."""

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        """By how much each parameter changes."""
        return {name: mean([move[name] for move in moves], weights) for name in moves[0]}

    def run(self, rounds: int) -> dict[str, torch.Tensor]:
        for number in range(1, rounds + 1):
            self._round(number)
        return {name: item.detach().clone() for name, item in self.model.state_dict().items()}

    def _round(self, number: int) -> None:
        before = flat(self.model)
        trained = trained_names(self.model)
        floats = [name for name, item in before.items() if item.is_floating_point()]
        moves, buffers, counts, weights = [], [], [], []
        for name, silo in self.silos.items():
            model = self.setting.build_model()
            model.load_state_dict(self.model.state_dict())
            steps = self.train_silo(model, name, number)
            if (number, name) in self.lost:
                continue
            after = flat(model)
            move = {key: after[key] - before[key] for key in trained}
            self.seen(name, model, move, steps)
            moves.append(move)
            buffers.append({key: after[key] for key in floats if key not in trained})
            counts.append(steps)
            weights.append(1.0 if self.uniform else float(len(silo.labels)))
        after = dict(before)
        change = self.step(moves, counts, weights)
        after |= {key: before[key] + change[key] for key in trained}
        after |= {key: mean([item[key] for item in buffers], weights) for key in buffers[0]}
        self.model.load_state_dict(after)


class OwnHead(ByHand):
    """Each silo puts its own head on the model received; only the rest is averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heads: dict[str, dict[str, torch.Tensor]] = {}

    def train_silo(self, model: Any, name: str, number: int) -> int:
        if name in self.heads:
            model.head.load_state_dict(self.heads[name])
        return self.learn(model, name, number)

    def learn(self, model: Any, name: str, number: int) -> int:
        return train(model, self.silos[name], number)

    def _round(self, number: int) -> None:
        common: Any = self.model
        start = {key: item.clone() for key, item in common.head.state_dict().items()}
        super()._round(number)
        common.head.load_state_dict(start)

    def seen(self, name: str, trained: Any, moved: Any, steps: int) -> None:
        self.heads[name] = {key: item.clone() for key, item in trained.head.state_dict().items()}


class FedProx(ByHand):
    mu = 0.1

    def loss(self, name: str, received: nn.Module) -> Loss:
        anchors = [item.detach().clone() for item in received.parameters()]

        def objective(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            distance = sum(((v - w) ** 2).sum() for v, w in zip(model.parameters(), anchors, strict=True))
            return cross_entropy(model, inputs, labels) + self.mu / 2 * distance

        return objective


class Moon(ByHand):
    mu, tau = 1.5, 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.previous: dict[str, nn.Module] = {}

    def seen(self, name: str, trained: nn.Module, moved: Any, steps: int) -> None:
        self.previous[name] = trained

    def loss(self, name: str, received: nn.Module) -> Loss:
        if name not in self.previous:
            return cross_entropy
        received, previous = received.eval(), self.previous[name].eval()
        cosine = nn.functional.cosine_similarity

        def objective(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            features = model.features(inputs)
            near = torch.exp(cosine(features, received.features(inputs).detach()) / self.tau)  # type: ignore[operator]
            far = torch.exp(cosine(features, previous.features(inputs).detach()) / self.tau)  # type: ignore[operator]
            contrast = -torch.log(near / (near + far)).mean()
            return nn.functional.cross_entropy(model.head(features), labels) + self.mu * contrast

        return objective


class FedRS(ByHand):
    alpha, form = 0.3, "binary"

    def loss(self, name: str, received: nn.Module) -> Loss:
        counts = [LABELS[name].count(label) for label in range(3)]
        if self.form == "binary":
            scales = [1.0 if count else self.alpha for count in counts]
        else:
            scales = [(1 - self.alpha) * count / max(counts) + self.alpha for count in counts]

        def objective(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            likelihood = torch.exp(model(inputs) * torch.tensor(scales))
            return -torch.log(likelihood / likelihood.sum(1, keepdim=True))[range(len(labels)), labels].mean()

        return objective


class Scaffold(ByHand):
    """With c = (1 / K) sum of c_k kept as the paper has it."""

    global_learning_rate = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uniform = True
        zeros = {
            name: 0.0 * item for name, item in flat(self.model).items() if name in trained_names(self.model)
        }
        self.common = dict(zeros)
        self.own = {name: dict(zeros) for name in self.silos}
        self.changes: list[dict[str, torch.Tensor]] = []

    def correct(self, name: str) -> Callable[[nn.Module], None]:
        def subtract(model: nn.Module) -> None:
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    assert parameter.grad is not None
                    parameter.grad += (self.common[key] - self.own[name][key]).float()

        return subtract

    def seen(self, name: str, trained: nn.Module, moved: dict[str, torch.Tensor], steps: int) -> None:
        rate, own = self.setting.local.learning_rate, self.own[name]
        new = {key: own[key] - self.common[key] - moved[key] / (steps * rate) for key in moved}
        self.changes.append({key: new[key] - own[key] for key in new})
        self.own[name] = new

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        share = len(moves) / len(self.silos)
        for key in self.common:
            summed = torch.stack([change[key] for change in self.changes])
            self.common[key] = self.common[key] + share * summed.mean(0)
        self.changes = []
        step = super().step(moves, steps, weights)
        return {key: self.global_learning_rate * value for key, value in step.items()}


class ScaffoldRS(Scaffold, FedRS):
    """SCAFFOLD with FedRS's loss."""


def weight_of_gradients(steps: int, learning_rate: float, momentum: float, mu: float) -> float:
    """How far SGD gets with a gradient that is always one, in units of the learning rate."""
    place = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([place], lr=learning_rate, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        (place + mu / 2 * place**2).backward()
        optimizer.step()
    return -float(place.detach()) / learning_rate


class FedNova(ByHand):
    mu = 0.0

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        local = self.setting.local
        norms = [weight_of_gradients(n, local.learning_rate, local.momentum, self.mu) for n in steps]
        reach = mean([torch.tensor(norm, dtype=torch.float64) for norm in norms], weights)
        return {
            key: reach * mean([move[key] / norm for move, norm in zip(moves, norms, strict=True)], weights)
            for key in moves[0]
        }


class FedProxNova(FedNova, FedProx):
    mu = 0.1


class FedOpt(ByHand):
    variant, learning_rate, beta1, beta2, tau = "adam", 0.03, 0.9, 0.99, 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}

    def step(self, moves: list[dict[str, torch.Tensor]], steps: list[int], weights: list[float]) -> Any:
        change = {}
        for key, mean_move in super().step(moves, steps, weights).items():
            first = self.first.get(key, torch.zeros_like(mean_move))
            second = self.second.get(key, torch.full_like(mean_move, self.tau**2))
            square = mean_move**2
            self.first[key] = self.beta1 * first + (1 - self.beta1) * mean_move
            if self.variant == "adam":
                self.second[key] = self.beta2 * second + (1 - self.beta2) * square
            elif self.variant == "adagrad":
                self.second[key] = second + square
            else:
                self.second[key] = second - (1 - self.beta2) * square * torch.sign(second - square)
            change[key] = self.learning_rate * self.first[key] / (torch.sqrt(self.second[key]) + self.tau)
        return change


def assert_is_a_gradient(
    method: Method,
    setting: Setting,
    field_prefix: str,
    times: float,
    *,
    rtol: float,
    atol: float,
) -> None:
    """What site-1 sends in round 1 is ``times`` the gradient of its loss at the model received."""
    (phase,) = method.plan(setting, 1, 1)
    silo = silos_of(setting)["site-1"]
    contribution = phase.contribute(silo, phase.broadcast(method.init_server(setting, SEED)), {})
    model = start(setting).train()
    cross_entropy(model, silo.inputs, silo.labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = times * parameter.grad.double()
        torch.testing.assert_close(contribution.tensors[field_prefix + name], expected, rtol=rtol, atol=atol)
