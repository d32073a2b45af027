"""FedCurv: silos keep what matters to the others, by how curved the others' losses are.

Source: Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef and Zeitak, Overcoming Forgetting in Federated
Learning on Non-IID Data, NeurIPS workshop on Federated Learning 2019 (arXiv 1910.07796), section 3. With
F_j the diagonal of silo j's Fisher information at w_j, both of the last opened sum, silo k minimises::

    f_k(v) + lambda sum over j != k of (v - w_j)^T diag(F_j) (v - w_j)
    = f_k(v) + lambda (v^T diag(U) v - 2 v^T V) + a constant
    U = sum over j != k of F_j,      V = sum over j != k of F_j w_j

Silos send F_j and F_j w_j; the server sums them and takes FedAvg's mean of the models. Silo k subtracts its
own part from both sums as it was summed, rounded to the grid of the encoding, so that nothing of it is
left. It knows by the number of the sum whether it was part of it: if its term was lost, there is nothing
to subtract.

F_j is nearly a function of the silo's records and the model received, so both sums are static: after a
drop-out they stay shut, and the silos go on with those of the last sum that was opened. So a silo keeps its
part of that sum beside what it sends, until a later one is opened.

An entry of U above 1 counts as 1, its V in proportion, and one below 0, which a liar can send, as 0: how much
of a step the next one undoes must follow from the job. F grows with the square of the inputs: at 400 a step
of rate 1e-6 and weight 1000, which the rule on few records took for one that undoes 0.002, undid 0.8, so that
a row of a total was a silo's last record (``tests/attacks/test_forgotten_steps.py``).

F_j is the empirical Fisher information: the mean over the silo's records of the squared gradient of one
record's log-likelihood, without augmentation, in evaluation mode, at the model just trained. It costs one
backward pass a record.

Both sums go to every silo; so three silos learn the sums of the two others.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from tightframe import phases
from tightframe.errors import TrainingError
from tightframe.learning import model_update, outputs
from tightframe.learning.exact_updates import on_grid
from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    averaging,
    composed_method,
    trained_parameters,
)
from tightframe.learning.model_update import BROADCAST
from tightframe.learning.stages import ParameterTerm, at_least_float32, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals

FISHER, PRODUCT = "fisher/", "fisher_times_model/"
SUMS = "fisher_sums"
OPENED = "opened/"
"""Start of the names under which a silo keeps its part of the sum that it was sent last."""

# Most entries of F are far below one. They are summed times 2**16, so that the grid is 2**-40; sums of such
# terms are exact in float64 below 2**13.
SCALE = 2.0**16
BOUND = 2.0**28


class FedCurvConfig(StrictModel):
    """FedCurv's option.

    Attributes:
        weight: lambda, of the other silos' curvature, of which entries above 1 count as 1. With 0 this is
            FedAvg.
    """

    weight: float = Field(default=0.01, ge=0)


def curvature_penalty(model: nn.Module, anchors: Tensors, bends: Tensors, slopes: Tensors) -> torch.Tensor:
    """Return ``v^T diag(U) v - 2 v^T V`` less its value at w: a scalar attached to the parameters.

    ``= a^T diag(U) a + 2 a^T (U w - V)`` with ``a = v - w``, in which nothing large cancels.

    Args:
        model: v.
        anchors: w by parameter name, on the model's device, constant.
        bends: U, likewise.
        slopes: ``U w - V``, likewise.
    """
    parts = []
    for name, parameter in model.named_parameters():
        if name in anchors:
            away = parameter - anchors[name]
            parts.append((away * (bends[name] * away + 2 * slopes[name])).sum())
    return torch.stack(parts).sum()


def diagonal_fisher(silo: SiloView, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return F of the silo's training records by parameter name, float64 on the CPU.

    Args:
        silo: whose records.
        model: in evaluation mode.

    Raises:
        TrainingError: TF-301 if a gradient is not finite.
    """
    trained = model_update.trained_parameters(model)
    sums = {name: torch.zeros_like(item, dtype=torch.float64) for name, item in trained.items()}
    records = 0
    with silo.unit_records(model, squared=True) as units:
        for inputs, labels in silo.batches("train", augment=False, shuffle=False):
            for row in range(len(labels)):
                logits = at_least_float32(model(inputs[row : row + 1]))
                loss = outputs.loss(logits, labels[row : row + 1])
                slopes = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
                for total, slope in zip(sums.values(), slopes, strict=True):
                    total.add_(slope.double().square())
            records += len(labels)
    units.clear(sums)
    fisher = {name: total.cpu() / max(records, 1) for name, total in sums.items()}
    if bad := [name for name, item in fisher.items() if not bool(item.isfinite().all())]:
        raise TrainingError(
            f"Expected finite gradients of single records, but those of {', '.join(bad[:5])} have NaN or "
            "infinite entries. Lower the learning rate or the method's `weight`.",
            code="TF-301",
        )
    return fisher


def others_curvature(
    broadcast: Tensors, state: Tensors
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return U and V by parameter name, float64: the last sums less the silo's own part if it is in them."""
    mine = own_part(broadcast, state)
    others: dict[str, dict[str, torch.Tensor]] = {FISHER: {}, PRODUCT: {}}
    for kind, items in others.items():
        for name, total in broadcast.items():
            if name.startswith(kind):
                items[name.removeprefix(kind)] = (total - mine[name] if mine else total) / SCALE
    return others[FISHER], others[PRODUCT]


def own_part(broadcast: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the silo's own part of the sums received, with their number; {} if it was not in them."""
    for start in ("", OPENED):  # what it sent last, and what it sent when a sum was opened before that
        if start + SUMS in state and int(state[start + SUMS]) == int(broadcast[SUMS]):
            names = [name for name in state if name.startswith((start + FISHER, start + PRODUCT))]
            return {name.removeprefix(start): state[name] for name in (*names, start + SUMS)}
    return {}


def local_rule(config: FedCurvConfig) -> LocalRule:
    """Return the cross-entropy with the others' curvature; the silo sends its own, and keeps it."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        # None before the first sum, and none for a personal model.
        if not any(name.startswith(FISHER) for name in broadcast):
            return Objective((cross_entropy(),))
        bends, products = others_curvature(broadcast, state)
        anchors = {name: broadcast[BROADCAST + name].to(silo.device) for name in bends}
        slopes, known = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, bend in bends.items():
            slope = bend * broadcast[BROADCAST + name].double() - products[name]
            most = bend.abs().clamp_min(1)
            slopes[name] = (slope / most).to(anchors[name])
            known[name] = (bend.clamp_min(0) / most).to(anchors[name])
        term = ParameterTerm(
            "curvature", config.weight, lambda model: curvature_penalty(model, anchors, known, slopes)
        )
        return Objective((cross_entropy(),), (term,))

    def finish(trained: Trained) -> Contribution:
        parameters = model_update.trained_parameters(trained.model)
        sent = {}
        for name, fisher in diagonal_fisher(trained.silo, trained.model).items():
            place = parameters[name].detach().to("cpu", torch.float64)
            sent[FISHER + name] = on_grid(SCALE * fisher)
            sent[PRODUCT + name] = on_grid(SCALE * fisher * place)
        opened = own_part(trained.broadcast, trained.state)
        kept = {OPENED + name: item for name, item in opened.items()}
        # The number that this sum will have, if it is opened.
        return Contribution(sent, {**kept, **sent, SUMS: trained.broadcast[SUMS].cpu() + 1})

    pull = 2 * config.weight  # times what others tell of a weight's curvature, at most 1
    return LocalRule(("cross_entropy", "curvature"), objective, curvature_fields, finish, pull=pull)


def curvature_fields(setting: Setting) -> tuple[phases.Field, ...]:
    """Return F and F w of each parameter, times 2**16, not weighted."""
    return tuple(
        phases.Field(kind + name, tuple(item.shape), ring=64, bound=BOUND, static=True)
        for kind in (FISHER, PRODUCT)
        for name, item in trained_parameters(setting).items()
    )


def server_rule() -> ServerRule:
    """Return FedAvg's mean. In its state: the last opened sums of F and F w, and how many there were.

    After a drop-out these are not opened, and stay as they are.
    """
    mean = averaging()

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        sums = {
            name: torch.as_tensor(total, dtype=torch.float64)
            for name, total in totals.items()
            if name.startswith((FISHER, PRODUCT))
        }
        extra = {**state.extra, **sums, SUMS: state.extra[SUMS] + bool(sums)}
        return mean.update(state, totals, cohort).evolve(extra=extra)

    return ServerRule(
        fields=mean.fields,
        update=update,
        initial=lambda setting: {SUMS: torch.zeros((), dtype=torch.int64)},
        broadcast=_curvature,
    )


def _curvature(state: ServerState) -> dict[str, torch.Tensor]:
    """Select the curvature sums from the server's state, which may hold pooled statistics too."""
    return {
        name: item for name, item in state.extra.items() if name == SUMS or name.startswith((FISHER, PRODUCT))
    }


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return FedCurv's training, and FedAvg's mean with the sums that it needs."""
    return local_rule(setting.config), server_rule()


METHOD = composed_method(
    name="fedcurv",
    title="FedCurv",
    paper="Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, NeurIPS workshop 2019",
    config=FedCurvConfig,
    findings=lambda config: None,
    parts=parts,
    network="logits",
)
