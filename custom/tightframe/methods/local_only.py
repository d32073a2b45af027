"""Local-only: every silo trains on its own records, and nothing is shared but how well it went.

The yardstick of every comparison: R rounds of E local epochs each, which is what a silo can do alone with
the same work. A silo's model starts from a draw of its own, is the silo's own state, and never leaves;
what is summed are a one, the means of the losses, and the evaluation. There is no global model, so that
architectures may differ. A job's ``local_baseline_epochs`` is one such training beside a federated run.
"""

from __future__ import annotations

from tightframe.learning import model_update
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.own_models import TRAINED, kept_model, own_tensors, own_trained, trained
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.options import StrictModel
from tightframe.phases import (
    Cohort,
    Contribution,
    Method,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    Totals,
)

TERMS = ("cross_entropy",)


class LocalOnlyConfig(StrictModel):
    """There are no options: rounds and epochs are the job's."""


def init_server(setting: Setting, seed: int) -> ServerState:
    """Return an empty state: the server has no model."""
    return ServerState(model={})


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """Return one phase, which sums the losses only, and that the silo has trained."""
    schema = Schema((TRAINED, *model_update.training_fields(TERMS)))
    return (Phase("train", schema, broadcast, contribute, update),)


def broadcast(state: ServerState) -> Tensors:
    """Return nothing."""
    return {}


def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
    """Train E epochs more of this silo's own model."""
    model = silo.load(own_tensors(silo, state))
    local = silo.setting.local
    stage = Stage((cross_entropy(),), OptimizerSettings.of(local), epochs=local.epochs)
    report = silo.fit(model, [stage])
    reported = {**trained(), **model_update.training_terms(report, TERMS)}
    return Contribution(reported, kept_model(model))


def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    """Return the state as it is."""
    return state


METHOD = Method(
    name="local_only",
    title="local-only",
    paper="none: training without federation",
    counts_rounds=False,
    config=LocalOnlyConfig,
    findings=lambda config: None,
    init_server=init_server,
    plan=plan,
    own_model=own_tensors,
    personalise=own_trained,
    network="logits",
)
