"""FedETF: a fixed frame as the classifier, a projection, and a balanced feature loss.

Source: Li, Shang, He, Lin and Wu, No Fear of Classifier Biases: Neural Collapse Inspired Federated
Learning with Synthetic and Fixed Classifier, ICCV 2023.

Silos with different classes train different classifiers, and their mean fits nobody. FedETF fixes
the classifier for everybody: the class vectors V (d, C) are a simplex equiangular tight frame, the
features h are projected to d and brought to unit length, and a learned temperature beta scales
the cosines::

    mu = (P h + b) / |P h + b|,    z = beta * mu V,
    l  = -log( n_y^gamma exp(z_y) / sum_c n_c^gamma exp(z_c) )      n_c: the silo's own class counts

What leaves a silo: the differences of the backbone u, the projection p and beta, and nothing else.
The class counts enter the loss at the silo only.

Personalisation happens after the last round, in three steps that all minimise the plain
cross-entropy: the features are adapted with the projection and the frame fixed; then, with the
features fixed, the frame and the projection are tuned in turn. Its result never leaves the silo.

Paper and published code disagree, besides where ``tightframe explain`` says so, on

- momentum: code the optimiser lives on over rounds; here fresh each round
- rotation of V: code QR of uniform numbers; here uniform rotation (Gaussian QR, signs fixed)
- a projected feature of zero: code divides by 1e-12, a gradient 1e12 times too large; here no gradient for
  that row
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from tightframe.learning import loop, model_update
from tightframe.learning.batches import merge_single_tail
from tightframe.learning.halves import LocalRule, Objective, ServerRule, composed_method
from tightframe.learning.losses import ZeroCounts, balanced_softmax_loss
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import (
    Batch,
    GradientCorrection,
    Stage,
    Term,
    at_least_float32,
    cross_entropy,
)
from tightframe.models.geometry_heads import EtfHead, TemperatureForm
from tightframe.options import StrictModel
from tightframe.phases import Cohort, ServerState, Setting, SiloView, Tensors, Totals, stream_seed

TERMS = ("balanced_softmax",)
FRAME, TEMPERATURE, PROJECTION = "head.etf", "head.beta", "head.projection."


class FedETFConfig(StrictModel):
    """FedETF's options; where paper and published code disagree, both readings.

    Attributes:
        dim: width d of the frame, at least C - 1; None is the number of classes, as in the authors'
            code for its ResNets (64 for its small CNN).
        temperature: first value of beta: the authors' code has 1 in its ResNets and 10 in its small
            CNN. On this project's small CNN, which has group normalisation, 10 is far worse on digits, and
            gives constant predictions on Fashion-MNIST.
        temperature_form: ``plain`` (paper and code); ``softplus`` or ``clamp`` (at 0.001) keep beta
            positive, without which a negative one turns the classifier around.
        temperature_decay: whether the weight decay acts on beta, too (code).
        gamma: exponent of the class counts (paper); the code has always 1.
        zero_counts: of classes that a silo lacks: ``clamp`` counts them once (code, and so the
            printed tables), ``exclude`` leaves them out of the denominator (paper, literally).
        personal_features: the first step of personalisation. ``paper``: plain cross-entropy on
            backbone and beta; ``official``: one more ordinary round, with the balanced loss on
            everything that trains.
        personal_epochs: its epochs; None is the job's, 0 leaves it out.
        personal_temperature: beta in the later two steps: ``trained`` (paper) or ``frozen`` (code).
        personal_alternations: how often the frame and the projection are tuned in turn; 0 leaves
            them out.
        frame_epochs, frame_learning_rate: of the frame in each turn, by plain SGD; it then is no tight
            frame any more, and is not made one again.
        projection_epochs, projection_learning_rate, projection_momentum, projection_weight_decay: of
            the projection in each turn, by SGD.
    """

    dim: int | None = Field(default=None, ge=1, le=65_536)
    temperature: float = Field(default=1.0, gt=1e-3, le=1e4)
    temperature_form: TemperatureForm = "plain"
    temperature_decay: bool = True
    gamma: float = Field(default=1.0, ge=0, le=10)
    zero_counts: ZeroCounts = "clamp"
    personal_features: Literal["paper", "official"] = "paper"
    personal_epochs: int | None = Field(default=None, ge=0, le=10_000)
    personal_temperature: Literal["trained", "frozen"] = "trained"
    personal_alternations: int = Field(default=20, ge=0, le=10_000)
    frame_epochs: int = Field(default=3, ge=1, le=10_000)
    frame_learning_rate: float = Field(default=0.1, gt=0, le=100)
    projection_epochs: int = Field(default=3, ge=1, le=10_000)
    projection_learning_rate: float = Field(default=0.05, gt=0, le=100)
    projection_momentum: float = Field(default=0.9, ge=0, lt=1)
    projection_weight_decay: float = Field(default=5e-4, ge=0, le=1)


def head(config: FedETFConfig, feature_width: int, num_classes: int) -> EtfHead:
    """Return the head of projection, unit length, frame and temperature: ``z = beta * mu V``.

    Raises:
        ValueError: if there is no frame of this width for so many classes.
    """
    return EtfHead(
        feature_width,
        num_classes,
        dim=config.dim,
        temperature=config.temperature,
        projection=True,
        normalise=True,
        temperature_form=config.temperature_form,
    )


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return training of backbone, projection and temperature by the balanced loss, and their mean."""
    return LocalRule(TERMS, objective), ServerRule(model_update.model_fields, update)


def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
    """Return the balanced loss; the silo keeps nothing."""
    stage = _balanced_stage(silo, silo.setting.local.epochs)
    return Objective(stage.terms, corrections=stage.corrections)


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """Set ``w <- w + sum_k p_k (w_k - w)`` with ``p_k = n_k / sum_j n_j``; the frame stays as it is."""
    return state.evolve(model=model_update.apply_mean(state.model, totals, cohort))


def _balanced_stage(silo: SiloView, epochs: int) -> Stage:
    """Return the balanced loss on everything that trains, with this silo's class counts as the prior."""
    config, local = silo.setting.config, silo.setting.local
    counts = silo.class_counts("train").to(silo.device)
    term = Term(
        TERMS[0],
        1.0,
        lambda view: balanced_softmax_loss(
            view.logits, view.labels, counts, gamma=config.gamma, zero_counts=config.zero_counts
        ),
        # One record more changes the counts, and with them the loss of every other record; noisy counts,
        # released once, are constants.
        per_record=silo.setting.privacy is not None or not uses_prior(config),
    )
    return Stage(
        terms=(term,),
        optimizer=OptimizerSettings.of(local),
        epochs=epochs,
        corrections=_corrections(config, local.weight_decay),
    )


def uses_prior(config: FedETFConfig) -> bool:
    """Return whether the loss depends on the silo's class counts."""
    return config.gamma != 0 or config.zero_counts != "clamp"


def private(config: FedETFConfig) -> str | None:
    """Refuse ``exclude``: noisy counts cannot tell a class that the silo lacks from one that it has."""
    return (
        "zero_counts 'exclude' needs exact class counts; take 'clamp'"
        if config.zero_counts == "exclude"
        else None
    )


def _corrections(config: FedETFConfig, weight_decay: float) -> tuple[GradientCorrection, ...]:
    """Take the weight decay of beta, which the optimiser will add to its gradient, off in advance."""
    if config.temperature_decay or not weight_decay:
        return ()

    def without_decay(model: nn.Module) -> None:
        beta = model.get_parameter(TEMPERATURE)
        if beta.grad is not None:
            beta.grad.sub_(beta.detach(), alpha=weight_decay)

    return (without_decay,)


def personalise(silo: SiloView, model: Tensors, state: Tensors) -> nn.Module:
    """Make a personal model from the final global one: features, then frame and projection in turn.

    The backbone is fixed in the later steps, so its features are computed once, as evaluation sees
    them; the batches of these steps are drawn anew in each epoch.

    Args:
        silo: whose training records are used.
        model: the final global model, by its own names.
        state: not used; FedETF's silos keep nothing.

    Returns:
        The personal model in evaluation mode; its frame has been trained.
    """
    setting, config = silo.setting, silo.setting.config
    personal = silo.load(model).eval()
    epochs = setting.local.epochs if config.personal_epochs is None else config.personal_epochs
    if epochs:
        silo.fit(personal, [_feature_stage(silo, epochs)])
    if config.personal_alternations:
        features, labels = _features(silo, personal)
        # An order of records for each epoch, drawn from a stream of its own.
        seed = int(torch.randint(2**62, (), generator=silo.generator("personal")))
        loop.fit(
            _OnFeatures(personal.head),
            lambda epoch: _shuffled(features, labels, setting.local.batch_size, stream_seed(seed, epoch)),
            _tuning_stages(config),
            device=silo.device,
        )
    return personal


def _feature_stage(silo: SiloView, epochs: int) -> Stage:
    """Step 1 of personalisation: adapt the features to the fixed classifier."""
    config, local = silo.setting.config, silo.setting.local
    if config.personal_features == "official":
        return _balanced_stage(silo, epochs)
    return Stage(
        terms=(cross_entropy(),),
        optimizer=OptimizerSettings.of(local),
        epochs=epochs,
        trainable=lambda name: not name.startswith(PROJECTION),
        corrections=_corrections(config, local.weight_decay),
    )


def _tuning_stages(config: FedETFConfig) -> list[Stage]:
    """Return steps 2 and 3 in turn: {V, beta}, then {p, beta}, each with an optimiser of its own."""
    beta = {TEMPERATURE} if config.personal_temperature == "trained" else set()
    weight_decay = config.projection_weight_decay
    frame = Stage(
        terms=(cross_entropy(),),
        optimizer=OptimizerSettings(learning_rate=config.frame_learning_rate),
        epochs=config.frame_epochs,
        trainable=lambda name: name == FRAME or name in beta,
    )
    projection = Stage(
        terms=(cross_entropy(),),
        optimizer=OptimizerSettings(
            learning_rate=config.projection_learning_rate,
            momentum=config.projection_momentum,
            weight_decay=weight_decay,
        ),
        epochs=config.projection_epochs,
        trainable=lambda name: name.startswith(PROJECTION) or name in beta,
        corrections=_corrections(config, weight_decay),
    )
    return [frame, projection] * config.personal_alternations


class _OnFeatures(nn.Module):
    """A head as a model of its own, whose inputs are features; its frame may train."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head
        self.head.etf.requires_grad_(True)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs."""
        return x


@torch.no_grad()
def _features(silo: SiloView, model: Any) -> Batch:
    """Return features (n, h) and labels (n,) of the training fold, without augmentation."""
    pairs = [
        (at_least_float32(model.features(inputs)), labels)
        for inputs, labels in silo.batches("train", augment=False, shuffle=False)
    ]
    return torch.cat([features for features, _ in pairs]), torch.cat([labels for _, labels in pairs])


def _shuffled(features: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yield mini-batches in the order that the seed gives."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for chosen in merge_single_tail(order.to(labels.device), batch_size):
        yield features[chosen], labels[chosen]


METHOD = composed_method(
    name="fedetf",
    title="FedETF",
    paper=(
        "Li et al., No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with "
        "Synthetic and Fixed Classifier, ICCV 2023"
    ),
    config=FedETFConfig,
    findings=lambda config: "its head is a simplex with a corner for each class",
    head=head,
    parts=parts,
    personalise=personalise,
    private=private,
    private_prior=uses_prior,
)
