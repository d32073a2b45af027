"""The probe lets per-record losses pass, and finds every way in which records can meet."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tightframe import models
from tightframe.learning.losses import balanced_softmax_loss
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Batch, BatchView, ParameterTerm, Stage, Term, cross_entropy
from tightframe.methods.fedmr import inter_class_loss, intra_class_loss
from tightframe.methods.moon import contrastive_loss
from tightframe.models.geometry_heads import EtfHead
from tightframe.models.heads import Classifier
from tightframe.privacy.training.per_sample import PrivacyError
from tightframe.privacy.training.probe import check_per_record, made_up

CLASSES = 3


def build(name: str = "mlp", shape: tuple[int, ...] = (6,), **options: Any) -> nn.Module:
    spec = models.get(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "mlp":
            options = {"widths": [16]} | options
        return spec.build(spec.options.model_validate(options), shape, CLASSES)


def batch(size: int = 6, shape: tuple[int, ...] = (6,)) -> Batch:
    stream = torch.Generator().manual_seed(1)
    return torch.randn(size, *shape, generator=stream), torch.arange(size) % CLASSES


def stage(*terms: Term, **others: Any) -> Stage:
    return Stage(terms=terms, optimizer=OptimizerSettings(), steps=1, **others)


def claimed(fn: Callable[[BatchView], torch.Tensor], name: str = "suspect") -> Term:
    """A term that says it is per-record; its weight is small, as a method's often is."""
    return Term(name, 1e-6, fn, per_record=True)


def check(model: nn.Module, *stages: Stage, data: Batch | None = None) -> None:
    check_per_record(model, stages, batch() if data is None else data, device="cpu")


PROTOTYPES = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(2)).abs()
EXISTING = torch.ones(CLASSES, dtype=torch.bool)
COUNTS = torch.tensor([5.0, 1.0, 9.0])


def surrogate(view: BatchView) -> torch.Tensor:
    """FedMR's intra-class term with class statistics that are constants."""
    z = (view.features - PROTOTYPES[view.labels]) / 0.5
    return (z * (z @ (0.1 * torch.ones(16, 16)))).sum(1).mean()


HONEST: dict[str, Callable[[BatchView], torch.Tensor]] = {
    "balanced softmax with a fixed prior": lambda v: balanced_softmax_loss(v.logits, v.labels, COUNTS),
    "contrast with frozen features": lambda v: contrastive_loss(
        v.features, v.inputs.repeat(1, 3)[:, :16], v.inputs.repeat(1, 3)[:, :16].flip(1)
    ),
    "FedMR's surrogate": surrogate,
    "FedMR's margin, weights 1 / B": lambda v: (
        torch.relu(
            torch.cdist(v.features, PROTOTYPES).gather(1, v.labels[:, None])
            - torch.cdist(v.features, PROTOTYPES)
        )
        .sum(1)
        .mean()
    ),
    "nothing yet": lambda v: (v.features * 0).sum(),
}

COUPLED: dict[str, Callable[[BatchView], torch.Tensor]] = {
    "FedMR's intra-class term": lambda v: intra_class_loss(v.features, v.labels),
    "the official form": lambda v: intra_class_loss(v.features, v.labels, form="official"),
    "FedMR's inter-class term": lambda v: inter_class_loss(
        v.features, v.labels, PROTOTYPES, EXISTING, support="all"
    ),
    "its observed support": lambda v: inter_class_loss(v.features, v.labels, PROTOTYPES, EXISTING),
    "MMD to a fixed sample": lambda v: (v.features.mean(0) - PROTOTYPES.mean(0)).square().sum(),
    "class counts of the batch": lambda v: balanced_softmax_loss(
        v.logits, v.labels, torch.bincount(v.labels, minlength=CLASSES)
    ),
    "weights by the batch's classes": lambda v: (
        nn.functional.cross_entropy(v.logits, v.labels, reduction="none")
        / (v.labels[:, None] == v.labels).sum(1)
    ).mean(),
    "hardest record": lambda v: nn.functional.cross_entropy(v.logits, v.labels, reduction="none").max(),
    "a sum": lambda v: nn.functional.cross_entropy(v.logits, v.labels, reduction="sum"),
    "neighbours": lambda v: (v.features * v.features.roll(1, 0)).sum(1).mean(),
    "batch normalisation in the term": lambda v: nn.functional.cross_entropy(
        nn.functional.batch_norm(v.logits, None, None, training=True) if len(v.labels) > 1 else v.logits,
        v.labels,
    ),
    "not a number": lambda v: v.logits.mean() * float("nan"),
}


@pytest.mark.parametrize("name", HONEST)
def test_per_record_terms_pass(name: str) -> None:
    check(build(), stage(cross_entropy(), claimed(HONEST[name])))


@pytest.mark.parametrize("name", COUPLED)
def test_terms_that_lie_are_found_and_named(name: str) -> None:
    with pytest.raises(PrivacyError, match=r"^TF-711: .*'suspect' it is not"):
        check(build(), stage(cross_entropy(), claimed(COUPLED[name])))


@pytest.mark.parametrize("weight", [1.0, 1e-5])
def test_rounding_of_next_to_no_gradient_is_no_coupling(weight: float) -> None:
    """FedMR's inter-class term had 2e-10 of a saturated record alone and 0 in the batch."""

    def neighbours(view: BatchView) -> torch.Tensor:
        seen = view.features @ PROTOTYPES.T  # single precision alone
        return (seen * seen.roll(1, 0)).sum(1).mean()

    term = replace(claimed(lambda view: 1e-10 * neighbours(view)), weight=weight)
    check(build(), stage(cross_entropy(), term))
    with pytest.raises(PrivacyError, match="'suspect' it is not"):
        check(build(), stage(cross_entropy(), replace(term, fn=lambda view: 1e-5 * neighbours(view))))


def test_terms_that_remember_records_are_found() -> None:
    memory = [torch.zeros(16)]

    def remembering(view: BatchView) -> torch.Tensor:
        memory[0] = 0.9 * memory[0] + 0.1 * view.features.detach().mean(0)
        return (view.features * memory[0]).sum(1).mean()

    with pytest.raises(PrivacyError, match="'suspect'"):
        check(build(), stage(cross_entropy(), claimed(remembering)))


def test_terms_that_say_so_are_refused_by_their_name_unless_they_weigh_nothing() -> None:
    coupled = Term("intra", 1e-5, COUPLED["FedMR's intra-class term"], per_record=False)
    with pytest.raises(PrivacyError, match=r"^TF-711: .*'intra' couples"):
        check(build(), stage(cross_entropy()), stage(cross_entropy(), coupled))
    check(build(), stage(cross_entropy(), replace(coupled, weight=0.0)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_few_records_are_enough(size: int) -> None:
    check(build(), stage(cross_entropy()), data=batch(size))
    with pytest.raises(PrivacyError):
        check(build(), stage(cross_entropy(), claimed(COUPLED["FedMR's intra-class term"])), data=batch(size))


def test_no_records_are_no_evidence() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        check(build(), stage(cross_entropy()), data=batch(0))


@pytest.mark.parametrize("name", ["resnet20", "wrn_28_10"])
def test_batch_norm_is_named(name: str) -> None:
    options = {"widen_factor": 1} if name == "wrn_28_10" else {}
    model = build(name, (3, 8, 8), **options)
    with pytest.raises(PrivacyError, match=r"^TF-711: .*backbone\.\S+ \(BatchNorm2d\) normalises"):
        check(model, stage(cross_entropy()), data=batch(4, (3, 8, 8)))


class CentredByBatch(nn.Module):
    """No layer that a list of types would know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    """Per-record in what it returns, but it keeps a mean of the records."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += 0.1 * (x.detach().mean(0) - self.mean)
        return x


class Pooling(nn.Module):
    """Mixes records in the network outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).cumsum(0)


@pytest.mark.parametrize(
    ("backbone", "what"),
    [
        (nn.Sequential(nn.Linear(6, 16), CentredByBatch()), r"backbone\.1 \(CentredByBatch\) gives"),
        (nn.Sequential(nn.Linear(6, 16), Counting()), r"backbone\.1 \(Counting\) keeps statistics"),
        (Pooling(), r"(head|the model) \(\w+\) gives"),
    ],
)
def test_modules_that_couple_records_are_named(backbone: nn.Module, what: str) -> None:
    with pytest.raises(PrivacyError, match=what):
        check(Classifier(backbone, 16, CLASSES), stage(cross_entropy()))


def test_chance_is_not_taken_for_coupling() -> None:
    """Dropout in a layer, by a function, and stochastic depth by a draw of its own."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            kept = torch.floor(torch.rand(len(x), 1) + 0.5)
            return (
                x * kept
                + torch.randn_like(x)
                + torch.empty_like(x).uniform_()
                + torch.bernoulli(x.sigmoid() * 0 + 0.5)
            )

    backbone = nn.Sequential(Noisy(), nn.ReLU(), nn.Dropout(0.5))
    check(Classifier(backbone, 16, CLASSES, dropout=0.3), stage(cross_entropy()))
    with pytest.raises(PrivacyError):
        check(
            Classifier(copy.deepcopy(backbone), 16, CLASSES, dropout=0.3),
            stage(cross_entropy(), claimed(COUPLED["FedMR's intra-class term"])),
        )


def test_heads_of_the_geometry_methods_pass() -> None:
    model = build()
    model.head = EtfHead(16, CLASSES, projection=True, normalise=True, temperature=3.0)
    check(model, stage(cross_entropy()))


def test_what_is_added_after_the_noise_must_not_read_records() -> None:
    start = {name: item.detach().clone() for name, item in build().named_parameters()}
    proximal = ParameterTerm(
        "proximal",
        0.1,
        lambda m: sum((p - start[n]).square().sum() for n, p in m.named_parameters()),  # type: ignore[arg-type, return-value]
    )

    def harmless(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    check(build(), stage(cross_entropy(), parameter_terms=[proximal], corrections=[harmless]))
    seen: list[torch.Tensor] = []

    def spying(view: BatchView) -> torch.Tensor:
        seen[:] = [view.features.detach().mean()]
        return nn.functional.cross_entropy(view.logits, view.labels)

    def leaking(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(seen[0] if seen else 0.0)

    with pytest.raises(PrivacyError, match=r"gradient correction 2 .* changes with the records"):
        check(build(), stage(claimed(spying), corrections=[harmless, leaking]))
    drifting = ParameterTerm(
        "drifting",
        1.0,
        lambda m: m.head.weight.sum() * (seen[0] if seen else 0.0),  # type: ignore[union-attr]
    )
    seen.clear()
    with pytest.raises(PrivacyError, match="parameter term 'drifting'"):
        check(build(), stage(claimed(spying), parameter_terms=[drifting]))


def test_only_trained_parameters_are_looked_at() -> None:
    """A term that couples records through frozen features only changes no gradient that is clipped."""
    terms = (cross_entropy(), claimed(COUPLED["FedMR's intra-class term"]))
    check(build(), stage(*terms, trainable=lambda name: name.startswith("head")))
    with pytest.raises(PrivacyError):
        check(build(), stage(*terms, trainable=lambda name: name.startswith("backbone")))


def test_everything_is_as_before_afterwards() -> None:
    model = build(dropout=0.5)
    model.head.bias.requires_grad_(False)  # type: ignore[union-attr]
    model.head.eval()  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    check(model, stage(cross_entropy()))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert model.training and not model.head.training  # type: ignore[union-attr]
    assert not model.head.bias.requires_grad  # type: ignore[union-attr]
    assert all(item.grad is None for item in model.parameters())


def test_its_messages_hold_no_values_of_records() -> None:
    with pytest.raises(PrivacyError) as caught:
        check(build(), stage(claimed(COUPLED["hardest record"])))
    assert not re.search(r"\d[.e]\d|nan|inf|tensor", str(caught.value))


def test_no_trained_network_is_refused_for_its_kinks() -> None:
    """In single precision an activation may be above zero alone and below it in a batch."""
    stage = Stage((cross_entropy(),), OptimizerSettings(), epochs=1)
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Module()
        model.features = nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32))
        model.head = nn.Linear(32, 3)
        first = model.features[1]
        made = made_up((torch.zeros(1, 3, 2, 2), torch.zeros(1, dtype=torch.int64)), 3)
        with torch.no_grad():
            first.weight.mul_(30)  # far from zero, so that rounding is large beside the kinks
            first.bias.copy_(-(first.weight @ made[0][0].flatten()))  # the first record lies on every kink
        check_per_record(model, [stage], made, device="cpu")


def test_made_up_records_are_the_same_for_all_records_of_a_shape() -> None:
    one, other = (made_up((torch.full((2, 3, 4), value), torch.tensor([1, 0])), 2) for value in (0.0, 5.0))
    assert torch.equal(one[0], other[0]) and one[1].tolist() == [0, 1, 0, 1]
    indices = made_up((torch.ones(1, 3, dtype=torch.int64), torch.tensor([0])), 2)
    assert indices[0].dtype == torch.int64 and not bool(indices[0].any())
