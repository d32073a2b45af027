"""CReFF: a head re-trained at the server on features that have the silos' gradients.

Source: Shang, Lu, Huang and Wang, Federated Learning on Heterogeneous and Long-Tailed Data via Classifier
Re-Training with Federated Features, IJCAI 2022, eq. (3) to (8) and algorithm 1. Beside FedAvg's model
(body and generic head) there is a re-trained head, which predicts. Each round a silo sends, for each of
its classes, the mean gradient of the cross-entropy in the re-trained head's parameters, at its records'
features in the model received::

    g_kc = mean over records of class c of  (softmax(phi z) - e_c) [z, 1]^T        (C, d + 1)
    G_c  = mean of g_kc over the silos that have class c                           a ratio of two sums

The server keeps M federated features of each class and changes them, by S steps of gradient descent,
until their own mean gradient points where the silos' does, row by row::

    D(G_c, g_c) = sum over rows j of  1 - cos(G_c[j], g_c[j])

and trains the head on them, the same number of each class, from the averaged generic head. Until the first
class gradients are open the re-trained head is the generic one. A class without open gradients keeps its
federated features, and is in the re-training once it has been open.

Eq. (6) prints a mean over the C rows, the published code takes the sum: a step C times as large. The sum is
the default, because the published step lengths, 0.1 in a configuration file and 0.01 in scripts, are its;
``match_rows: mean`` is eq. (6). The paper does not say from where the re-training starts each round; here it
is from the averaged head. A personal model predicts with the head that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from tightframe import phases
from tightframe.errors import TrainingError
from tightframe.learning import model_update
from tightframe.learning.halves import (
    LocalRule,
    ServerRule,
    Trained,
    averaging,
    plain_training,
    scheduled_method,
)
from tightframe.learning.losses import fit_head
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import (
    Cohort,
    Contribution,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
    stream_seed,
)

GRADIENTS, HOLDERS = "creff/gradients", "creff/holders"
FEATURES, KNOWN, SEED = "creff_features", "creff_known", "creff_seed"
GRADIENT_BOUND = 2.0**20
GENERIC, RETRAINED = "head.generic.", "head.retrained."
SHORTEST = 1e-12


class CreffConfig(StrictModel):
    """CReFF's options.

    Attributes:
        features: M, federated features of each class.
        match_steps: S steps of gradient descent on them a round.
        match_learning_rate: of these; 0.1 as in a published configuration, the scripts have 0.01.
        match_rows: ``sum`` over the classes' rows of the dissimilarity, as in the published code, for which
            these steps are; or its ``mean``, eq. (6), with steps smaller by the number of classes.
        epochs, learning_rate, momentum, batch_size: of the head's re-training by SGD, a round.
    """

    features: int = Field(default=100, ge=1, le=100_000)
    match_steps: int = Field(default=100, ge=1, le=100_000)
    match_learning_rate: float = Field(default=0.1, gt=0)
    match_rows: Literal["sum", "mean"] = "sum"
    epochs: int = Field(default=300, ge=1, le=100_000)
    learning_rate: float = Field(default=0.01, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    batch_size: int = Field(default=256, ge=1)


class TwoHeads(nn.Module):
    """The generic head in training, the re-trained one in evaluation.

    Args:
        feature_width: d.
    """

    def __init__(self, feature_width: int, num_classes: int) -> None:
        super().__init__()
        self.generic = nn.Linear(feature_width, num_classes)
        self.retrained = nn.Linear(feature_width, num_classes).requires_grad_(False)
        self.retrained.load_state_dict(self.generic.state_dict())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (B, C) of features (B, d)."""
        logits: torch.Tensor = (self.generic if self.training else self.retrained)(features)
        return logits


def head_gradients(
    features: torch.Tensor, label: int, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the sum over records of the cross-entropy's gradient in a linear head, eq. (3).

    Args:
        features: z of records of one class, (B, d).
        label: that class, c.
        weight: (C, d).
        bias: (C,).

    Returns:
        ``sum (softmax(W z + b) - e_c) [z, 1]^T``, (C, d + 1), differentiable in the features.

    >>> head_gradients(torch.ones(1, 1), 0, torch.zeros(2, 1), torch.zeros(2)).tolist()
    [[-0.5, -0.5], [0.5, 0.5]]
    """
    gaps = torch.softmax(features @ weight.T + bias, 1)
    gaps = gaps - nn.functional.one_hot(torch.tensor(label), len(bias)).to(gaps)
    ones = torch.ones(len(features), 1, dtype=features.dtype, device=features.device)
    return gaps.T @ torch.cat([features, ones], 1)


def dissimilarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``mean over rows of 1 - cos``, eq. (6), of gradients (C, d + 1); a row of zeros has cosine 0."""
    return 1 - nn.functional.cosine_similarity(first, second, dim=1, eps=SHORTEST).mean()


@torch.no_grad()
def class_gradients(
    records: Iterable[tuple[torch.Tensor, torch.Tensor]],
    weight: torch.Tensor,
    bias: torch.Tensor,
    backed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a silo's mean gradient of each class, and which classes it has.

    A record is in the row of another class by the probability of that class, and in its own class's by less
    the sum of these.

    Args:
        records: batches of features (B, d) and labels (B,).
        weight: of the re-trained head, (C, d).
        bias: (C,).
        backed: says by these probabilities (n, C - 1), other classes in order, and labels (n,) which rows
            enough records make (C, C - 1); the others are of nobody. None takes all.

    Returns:
        (C, C (d + 1)) and (C,), float64 on the CPU; rows of classes that it lacks are zero.

    Raises:
        TrainingError: TF-301 if a gradient is not finite.
    """
    classes, width = weight.shape
    sums = torch.zeros(classes, classes, width + 1, dtype=torch.float64)
    counts = torch.zeros(classes, dtype=torch.float64)
    wide = [item.to("cpu", torch.float64) for item in (weight, bias)]
    parts, truths = [torch.zeros(0, classes - 1)], [torch.zeros(0, dtype=torch.int64)]
    for rows, labels in records:
        features, truth = rows.to("cpu", torch.float64), labels.cpu()
        for label in truth.unique().tolist():
            own = features[truth == label]
            sums[label] += head_gradients(own, label, wide[0], wide[1])
            counts[label] += len(own)
        if backed is not None:
            likely = torch.softmax(features @ wide[0].T + wide[1], 1)
            own_class = nn.functional.one_hot(truth, classes).bool()
            parts.append(likely[~own_class].view(len(likely), classes - 1))
            truths.append(truth)
    if not bool(sums.isfinite().all()):
        raise TrainingError("Expected finite gradients of the head, but some are NaN or infinite.")
    if backed is not None:
        keep_rows(sums, backed(torch.cat(parts), torch.cat(truths)))
    means = sums / counts.clamp_min(1)[:, None, None]
    return means.flatten(1), (counts > 0).to(torch.float64)


def keep_rows(sums: torch.Tensor, kept: torch.Tensor) -> None:
    """Clear rows of class gradients in place, and of each class's own row what they are of it.

    Args:
        sums: (C, C, d + 1).
        kept: which of the other classes' rows stay, bool (C, C - 1).
    """
    for label in (~kept).any(1).nonzero()[:, 0].tolist():
        others = [place for place in range(len(sums)) if place != label]
        sums[label, others] *= kept[label, :, None]
        sums[label, label] = -sums[label, others].sum(0)


def match_features(
    features: torch.Tensor,
    label: int,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    steps: int,
    learning_rate: float,
) -> torch.Tensor:
    """Return one class's federated features after gradient descent on the mean dissimilarity, eq. (5) to (7).

    Args:
        features: (M, d).
        label: their class, c.
        target: G_c, (C, d + 1).
        weight: of the re-trained head, (C, d).
        bias: (C,).
        learning_rate: of each.

    Returns:
        (M, d), in the type of ``features``.
    """
    current = features.detach().clone()
    for _ in range(steps):
        current.requires_grad_(True)
        own = head_gradients(current, label, weight, bias) / len(current)
        (slope,) = torch.autograd.grad(dissimilarity(target, own), current)
        current = (current - learning_rate * slope).detach()
    return current


def head(config: CreffConfig, width: int, classes: int) -> nn.Module:
    """Return both heads."""
    return TwoHeads(width, classes)


def init_server(setting: Setting, seed: int) -> ServerState:
    """Return the model that ``seed`` gives, and federated features from a standard normal distribution."""
    width = model_update.shared_width(setting)
    stream = torch.Generator().manual_seed(stream_seed(seed, "creff", "features"))
    shape = (setting.num_classes, setting.config.features, width)
    extra = {
        FEATURES: torch.randn(shape, generator=stream),
        KNOWN: torch.zeros(setting.num_classes, dtype=torch.uint8),
        SEED: torch.tensor(stream_seed(seed, "creff", "order"), dtype=torch.int64),
    }
    return ServerState(model_update.initial_model(setting, seed), extra)


def parts(setting: Setting, round: int, rounds: int) -> tuple[LocalRule, ServerRule]:
    """Return FedAvg's training beside class gradients; the mean, and the head's re-training."""
    local = replace(plain_training(), fields=gradient_fields, finish=finish)
    return local, replace(averaging(), update=partial(update, setting, round))


def gradient_fields(setting: Setting) -> tuple[phases.Field, ...]:
    """Return mean gradients of each class, flattened, and holders."""
    shared = partial(phases.Field, static=True, per_class=True)
    classes, width = setting.num_classes, model_update.shared_width(setting)
    return (
        # A record's rows add up to zero.
        shared(
            GRADIENTS,
            (classes, classes * (width + 1)),
            bound=GRADIENT_BOUND,
            independent=(classes - 1) * (width + 1),
        ),
        shared(HOLDERS, (classes,), bound=1.0),
    )


@torch.no_grad()
def finish(trained: Trained) -> Contribution:
    """Return gradients of each class's records at the model received; nothing is kept."""
    silo, received = trained.silo, model_update.received_model(trained.broadcast)
    model: Any = silo.load(received).eval()
    features = silo.encoded(model, "train") if silo.offers_prototypes else ()
    head = received[f"{RETRAINED}weight"], received[f"{RETRAINED}bias"]
    gradients, held = class_gradients(features, *head, silo.backed)
    return Contribution({GRADIENTS: gradients, HOLDERS: held})


def update(setting: Setting, round: int, state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """Take FedAvg's mean; then change the federated features, and re-train the head on them."""
    config: CreffConfig = setting.config
    model = model_update.apply_mean(state.model, totals, cohort)
    weight, bias = (state.model[RETRAINED + name] for name in ("weight", "bias"))
    features, known = state.extra[FEATURES].clone(), state.extra[KNOWN].clone()
    if HOLDERS in totals:
        holders = torch.as_tensor(totals[HOLDERS], dtype=torch.float64)
        sums = torch.as_tensor(totals[GRADIENTS], dtype=torch.float64)
        for label in (holders >= 0.5).nonzero()[:, 0].tolist():
            target = (sums[label] / holders[label]).view(len(bias), -1).to(features)
            features[label] = match_features(
                features[label],
                label,
                target,
                weight,
                bias,
                steps=config.match_steps,
                learning_rate=config.match_learning_rate * (len(bias) if config.match_rows == "sum" else 1),
            )
            known[label] = 1
    head = nn.utils.skip_init(nn.Linear, weight.shape[1], len(bias))  # no draw from the global stream
    head.load_state_dict({name: model[GENERIC + name] for name in ("weight", "bias")})
    chosen = known.bool()
    if int(chosen.sum()) > 1:  # one class alone would only push all others away
        labels = chosen.nonzero()[:, 0].repeat_interleave(config.features)
        stream = torch.Generator().manual_seed(stream_seed(int(state.extra[SEED]), round))
        fit_head(
            head,
            features[chosen].flatten(0, 1),
            labels,
            epochs=config.epochs,
            learning_rate=config.learning_rate,
            momentum=config.momentum,
            batch_size=config.batch_size,
            stream=stream,
        )
    model |= {RETRAINED + name: item.detach().clone() for name, item in head.state_dict().items()}
    return state.evolve(model=model, extra={**state.extra, FEATURES: features, KNOWN: known})


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Return the final model after one more round of training, with the generic head, which that trains."""
    own: Any = silo.load(model)
    local = silo.setting.local
    silo.fit(own, [Stage((cross_entropy(),), OptimizerSettings.of(local), epochs=local.epochs)])
    own.head = own.head.generic
    module: nn.Module = own.eval()
    return module


def personal_form(setting: Setting, model: nn.Module) -> nn.Module:
    """Return a model with the generic head alone, as ``personalise`` leaves it."""
    own: Any = model
    own.head = own.head.generic
    return model


METHOD = scheduled_method(
    name="creff",
    title="CReFF",
    paper=(
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training "
        "with Federated Features, IJCAI 2022"
    ),
    counts_rounds=False,
    config=CreffConfig,
    findings=lambda config: "its head is trained on features made for single classes",
    parts=parts,
    init_server=init_server,
    head=head,
    personalise=personalise,
    personal_form=personal_form,
    rounded=True,
)
