"""CCVR: after FedAvg the head is trained once more, on features drawn from each class's Gaussian.

Source: Luo, Chen, Hu, Zhang, Liang and Feng, No Fear of Heterogeneity: Classifier Calibration for
Federated Learning with Non-IID Data, NeurIPS 2021, eq. (3), (4) and algorithm 1. With z a training
record's features in the final model, n_c records of class c at all silos::

    mu_c    = sum z / n_c
    Sigma_c = (sum z z^T - n_c mu_c mu_c^T) / (n_c - 1)
    the head is trained on M draws of N(mu_c, Sigma_c) for each class, the body stays

The three sums over all silos' records of a class are what is opened, so that the moments are those of
the pooled records, exactly. Of the symmetric z z^T the upper triangle travels. The sums go out after
the last round, once: the first of three exchanges tells who holds what (the class rules), the second how
many records of each class that is, the third has the sums. A class that is not told of keeps its row of the
head as far as the other classes' draws leave it; a class of one record has no covariance and is drawn at its
mean.

``covariance: shared``, which is ours, has one triangle of all classes' records, and one covariance within
classes, ``(sum z z^T - sum_c n_c mu_c mu_c^T) / (N - K)``: enough records of all classes together hide them.

FedETF's code takes standard deviations for variances and does not weigh silos, and FL-bench's mixes a
covariance over n with a formula for n - 1; neither is the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field

from tightframe import phases
from tightframe.errors import TrainingError
from tightframe.learning import model_update
from tightframe.learning.class_sums import holders_phase
from tightframe.learning.few_records.distinct_rows import counts_phase
from tightframe.learning.halves import LocalRule, ServerRule, averaging, composed_method, plain_training
from tightframe.learning.losses import fit_head
from tightframe.models import feature_width
from tightframe.options import StrictModel
from tightframe.phases import (
    ADMITTED,
    Cohort,
    Contribution,
    Phase,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
    stream_seed,
)

COUNTS, SUMS, PRODUCTS = "moments/counts", "moments/sums", "moments/products"
RECORDS = "moments/records"
"""With ``covariance: shared``: how many records the products are of."""
SEED = "ccvr_seed"
COUNT_BOUND, SUM_BOUND, PRODUCT_BOUND = 2.0**24, 2.0**28, 2.0**32


class CcvrConfig(StrictModel):
    """CCVR's options.

    Attributes:
        virtual_features: M, draws of each class; the paper tries 100 to 2,000.
        covariance: ``class``, each class's own, as the paper; or ``shared``, one within classes, which sites'
            rules for products of features (``records_per_feature``) accept over enough records.
        epochs: passes over all draws, which are drawn once.
        learning_rate, momentum, batch_size: of SGD on the head.
    """

    tells_gradients: ClassVar[bool] = True
    """Its moments tell, nearly, the sum of the silos' gradients in the head, which updates at a small rate
    weigh by steps."""

    virtual_features: int = Field(default=1000, ge=1, le=1_000_000)
    covariance: Literal["class", "shared"] = "class"
    epochs: int = Field(default=10, ge=1, le=10_000)
    learning_rate: float = Field(default=0.01, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    batch_size: int = Field(default=64, ge=1)


@torch.no_grad()
def class_moments(
    features: Iterable[tuple[torch.Tensor, torch.Tensor]], num_classes: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return per class the number of records, the sum of z and the upper triangle of the sum of z z^T.

    Args:
        features: batches of z (B, d) and labels (B,).
        width: d.

    Returns:
        (C,), (C, d) and (C, d (d + 1) / 2), float64 on the CPU.

    Raises:
        TrainingError: TF-301 if a feature is not finite.
    """
    counts = torch.zeros(num_classes, dtype=torch.float64)
    sums = torch.zeros(num_classes, width, dtype=torch.float64)
    products = torch.zeros(num_classes, width, width, dtype=torch.float64)
    for rows, labels in features:
        wide = rows.to("cpu", torch.float64)
        for label in labels.unique().tolist():
            own = wide[labels.cpu() == label]
            counts[label] += len(own)
            sums[label] += own.sum(0)
            products[label] += own.T @ own
    if not bool(products.isfinite().all()):
        raise TrainingError("Expected finite features of the final model, but some are NaN or infinite.")
    upper = torch.triu_indices(width, width)
    return counts, sums, products[:, upper[0], upper[1]]


def pooled_moments(
    counts: torch.Tensor, sums: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means (C, d) and covariances (C, d, d) of each class, from sums over all silos, eq. (3) and (4).

    Args:
        counts: n, (C,); a class below 1/2 has zeros, one below 3/2 no covariance.
        sums: of z, (C, d).
        products: the upper triangle of the sum of z z^T, (C, d (d + 1) / 2); of all classes together,
            (d (d + 1) / 2,), every class has the covariance within classes.

    >>> mean, covariance = pooled_moments(
    ...     torch.tensor([2.0]), torch.tensor([[4.0]]), torch.tensor([[10.0]])
    ... )  # of 1 and 3
    >>> float(mean), float(covariance)
    (2.0, 2.0)
    """
    width = sums.shape[1]
    upper = torch.triu_indices(width, width)
    whole = torch.zeros(*products.shape[:-1], width, width, dtype=torch.float64)
    whole[..., upper[0], upper[1]] = products.to(torch.float64)
    whole = whole + whole.triu(1).transpose(-2, -1)
    records = counts.to(torch.float64).clamp_min(1)[:, None]
    means = sums.to(torch.float64) / records
    between = records[:, :, None] * means[:, :, None] * means[:, None, :]
    if products.ndim == 1:
        free = (counts.sum() - (counts >= 0.5).sum()).clamp_min(1)
        return means, ((whole - between.sum(0)) / free).expand(len(counts), -1, -1)
    scatter = whole - between
    several = (counts >= 1.5)[:, None, None]
    return means, torch.where(several, scatter / (records - 1).clamp_min(1)[:, :, None], 0.0)


def draw_features(
    mean: torch.Tensor, covariance: torch.Tensor, number: int, stream: torch.Generator
) -> torch.Tensor:
    """Draw from N(mean, covariance), (number, d) float64; eigenvalues that rounding made negative are 0."""
    values, vectors = torch.linalg.eigh(covariance)
    noise = torch.randn(number, len(mean), generator=stream, dtype=torch.float64)
    return mean + noise * values.clamp_min(0).sqrt() @ vectors.T


def init_server(setting: Setting, seed: int) -> ServerState:
    """Return the model that ``seed`` gives, and the seed of the draws."""
    return ServerState(
        model_update.initial_model(setting, seed),
        {SEED: torch.tensor(stream_seed(seed, "ccvr"), dtype=torch.int64)},
    )


def after(setting: Setting) -> tuple[Phase, ...]:
    """Return three phases: who holds each class, how many records; then the sums and the calibration."""
    classes, width = setting.num_classes, model_update.shared_width(setting)
    counts = phases.Field(COUNTS, (classes,), bound=COUNT_BOUND, static=True, per_class=True, sensitivity=1.0)
    sums = phases.Field(SUMS, (classes, width), bound=SUM_BOUND, static=True, per_class=True, features=width)
    size, shared = width * (width + 1) // 2, setting.config.covariance == "shared"
    products = phases.Field(
        PRODUCTS,
        (size,) if shared else (classes, size),
        bound=PRODUCT_BOUND,
        static=True,
        per_class=not shared,
        products=width,
    )
    records = [phases.Field(RECORDS, (), bound=COUNT_BOUND, static=True)] if shared else []
    calibration = Phase(
        "moments",
        phases.Schema((counts, sums, products, *records)),
        model_update.broadcast_of,
        tell_moments,
        lambda state, totals, cohort: state if cohort.failed else update(setting, state, totals),
        _read,
    )
    return (holders_phase(counts), counts_phase(counts, width), calibration)


def _read(state: ServerState, totals: Totals, cohort: Cohort) -> phases.Reading:
    reading = phases.Reading(state, totals)
    if cohort.failed:
        return reading.warning(
            "CCVR calibrated nothing: a silo could not add its products, so that none are opened; the model "
            "is FedAvg's. Start the job again."
        )
    if not _of_other_records(totals):
        return reading
    return reading.warning(
        "CCVR calibrated nothing: a class lost a holder while its records were summed, so that the products "
        "are of other records than the sums; the model is FedAvg's. Start the job again."
    )


def _of_other_records(totals: Totals) -> bool:
    """Check whether the products of all classes are of other records than the sums by class."""
    return RECORDS in totals and abs(float(totals[RECORDS]) - float(totals[COUNTS].sum())) >= 0.5


def tell_moments(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """Return the three class sums of this silo's training records in the model received."""
    model = silo.load(model_update.received_model(broadcast)).eval()
    batches = silo.encoded(model, "train") if silo.offers_prototypes else ()
    with torch.no_grad():
        counts, sums, products = class_moments(batches, silo.setting.num_classes, feature_width(model))
    if silo.setting.config.covariance == "class":
        return Contribution({COUNTS: counts, SUMS: sums, PRODUCTS: products}, state)
    # No axis of classes, which rules could withhold later.
    admitted = broadcast.get(ADMITTED, torch.ones_like(counts)).bool()
    of_all = {PRODUCTS: products[admitted].sum(0), RECORDS: counts[admitted].sum()}
    return Contribution({COUNTS: counts, SUMS: sums, **of_all}, state)


def update(setting: Setting, state: ServerState, totals: Totals) -> ServerState:
    """Train the head on draws of every class that has moments."""
    config: CcvrConfig = setting.config
    counts = torch.as_tensor(totals[COUNTS], dtype=torch.float64)
    means, covariances = pooled_moments(
        counts, torch.as_tensor(totals[SUMS]), torch.as_tensor(totals[PRODUCTS])
    )
    known = [label for label in range(setting.num_classes) if counts[label] >= 0.5]
    if len(known) < 2:  # one class alone would only push all others away
        return state
    if _of_other_records(totals):
        return state
    stream = torch.Generator().manual_seed(int(state.extra[SEED]))
    drawn = [
        draw_features(means[label], covariances[label], config.virtual_features, stream) for label in known
    ]
    labels = torch.tensor(known).repeat_interleave(config.virtual_features)
    model = model_update.build_template(setting)
    model.load_state_dict(dict(state.model))
    fit_head(
        model.get_submodule("head"),
        torch.cat(drawn).float(),
        labels,
        epochs=config.epochs,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        batch_size=config.batch_size,
        stream=stream,
    )
    return state.evolve(model={name: item.detach().clone() for name, item in model.state_dict().items()})


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return FedAvg's training and mean."""
    return plain_training(), averaging()


METHOD = composed_method(
    name="ccvr",
    title="CCVR",
    paper=(
        "Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with "
        "Non-IID Data, NeurIPS 2021"
    ),
    config=CcvrConfig,
    findings=lambda config: "its head is trained on features drawn for single classes",
    parts=parts,
    after=after,
    init_server=init_server,
    rounded=True,
)
