"""Any head, with any local objective, with any server rule: comparisons that need no new method.

The rows "+ETF" of FedAvg_ETF's Table 2 (Huang et al., Neural Collapse Inspired Federated Learning with
Non-iid Data) are such combinations, for example ``head: etf, local: scaffold, server: scaffold`` or
``head: etf, server: fedadam``, and so are SCAFFOLD's and FedNova's with other heads and losses, and the
rows "with prototypes" of FedMR's Table 8, ``prototypes: fedmr``. The file gathers what the methods' own
files define; it has no formula of its own.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model, model_validator
from torch import nn

from tightframe import phases
from tightframe.learning.halves import (
    LocalRule,
    Objective,
    ServerRule,
    Trained,
    averaging,
    composed_method,
    plain_training,
)
from tightframe.learning.losses import ZeroCounts, balanced_softmax_loss
from tightframe.learning.stages import Term
from tightframe.methods import feddc, feddyn, fedmr, fednova, fedopt, fedprox, fedrs, moon, scaffold
from tightframe.models.geometry_heads import (
    LOWEST_TEMPERATURE,
    EtfHead,
    NormalisedPrototypeHead,
    PrototypeInit,
    TemperatureForm,
)
from tightframe.options import StrictModel, meanings
from tightframe.phases import Cohort, Contribution, ServerState, Setting, SiloView, Tensors, Totals


class EtfOptions(StrictModel):
    """Arguments of ``EtfHead``; the defaults are FedAvg_ETF's frame on the bare features.

    Attributes:
        dim: of the frame; None is the feature width, or the number of classes with a projection.
        temperature: first value of a learned one, above 0.001; None has none.
        projection: a linear layer before the frame.
        normalise: unit length before it.
        scale: length of the class vectors.
        temperature_form: as of FedETF; another than ``plain`` needs a ``temperature``.
    """

    dim: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, gt=LOWEST_TEMPERATURE)
    projection: bool = False
    normalise: bool = False
    scale: float = Field(default=1.0, gt=0)
    temperature_form: TemperatureForm = "plain"


class NormalisedOptions(StrictModel):
    """Arguments of ``NormalisedPrototypeHead``; its prototypes stay as they are drawn.

    Attributes:
        init: as of FedNH.
        scale: first value of s.
        learn_scale: whether s is trained.
    """

    init: PrototypeInit = "orthonormal"
    scale: float = Field(default=1.0, gt=0)
    learn_scale: bool = True


class BalancedSoftmaxOptions(StrictModel):
    """Arguments of ``balanced_softmax_loss``, whose class counts are the silo's own.

    Attributes:
        gamma: exponent of the class counts, at most FedETF's.
        zero_counts: as of FedETF.
    """

    gamma: float = Field(default=1.0, ge=0, le=10)
    zero_counts: ZeroCounts = "clamp"


OPTIONS: dict[str, type[BaseModel]] = {
    "etf": EtfOptions,
    "normalised": NormalisedOptions,
    "balanced_softmax": BalancedSoftmaxOptions,
    "fedprox": fedprox.FedProxConfig,
    "fedrs": fedrs.FedRSConfig,
    "moon": moon.MoonConfig,
    "scaffold": scaffold.ScaffoldConfig,
    "feddyn": feddyn.FedDynConfig,
    "feddc": feddc.FedDCConfig,
    "fedmr": fedmr.InterOptions,
    "fedopt": fedopt.AdaptiveServer,
}
"""The options of each part; a job writes those of ``moon`` as ``moon_mu`` and ``moon_tau``."""

REPLACED = "cross_entropy"
"""The term that ``loss`` stands for."""

PAIRED = ("scaffold", "feddyn", "feddc")
"""Methods whose silos correct their steps by what the server sums: both halves are taken, or neither."""

ADAPTIVE: dict[str, fedopt.Variant] = {"fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}


class Choices(StrictModel):
    """The parts to combine.

    Attributes:
        head: ``linear`` is the backbone's own, ``etf`` a frozen frame, ``normalised`` cosines with frozen
            prototypes.
        local: what a silo minimises.
        loss: what stands for the cross-entropy in it, not with ``balanced_softmax``; ``fedrs`` with
            ``scaffold`` on both sides is SCAFFOLD/RS.
        server: what the server does with the updates; ``scaffold``, ``feddyn`` and ``feddc`` with the same
            ``local`` only.
        prototypes: ``fedmr`` adds FedMR's inter-class term, and the class sums of its prototypes, under the
            class rules; a personal model is trained without it.
    """

    head: Literal["linear", "etf", "normalised"] = "linear"
    local: Literal["cross_entropy", "balanced_softmax", "fedprox", "moon", "scaffold", "feddyn", "feddc"] = (
        "cross_entropy"
    )
    loss: Literal["cross_entropy", "fedrs"] = "cross_entropy"
    server: Literal[
        "fedavg", "fednova", "fedadam", "fedyogi", "fedadagrad", "scaffold", "feddyn", "feddc"
    ] = "fedavg"
    prototypes: Literal["fedmr"] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Choices:
        if self.local != self.server and (paired := {self.local, self.server} & set(PAIRED)):
            raise ValueError(
                f"Expected `local` and `server` to be both {min(paired)!r} or neither, because what its "
                "silos keep and correct their steps by is what its server sums, but got "
                f"`local` {self.local!r} and `server` {self.server!r}"
            )
        if self.local == "balanced_softmax" and self.loss != "cross_entropy":
            raise ValueError(
                f"Expected `local` with a cross-entropy, which `loss` {self.loss!r} can stand for, but got "
                "'balanced_softmax', which has none"
            )
        chosen = {self.head, self.local, self.loss, "fedopt" if self.server in ADAPTIVE else self.server}
        if self.prototypes is not None:
            chosen.add(self.prototypes)
        unused = [name for name in sorted(self.model_fields_set) if _owner(name) not in {None, *chosen}]
        if unused:
            raise ValueError(
                f"Expected options of the chosen parts {sorted(chosen)} only, but got {unused}, which would "
                "change nothing"
            )
        form = getattr(self, "etf_temperature_form", "plain")
        if form != "plain" and getattr(self, "etf_temperature", None) is None:
            raise ValueError(
                f"Expected `etf_temperature` with `etf_temperature_form` {form!r}, which changes nothing "
                "without one, but got none"
            )
        return self

    @property
    def equations(self) -> int:
        """Number of fields in one sum that are a silo's update times a factor that others can know."""
        several: int = getattr(OPTIONS.get(self.local), "equations", 1)
        return several


def _owner(option: str) -> str | None:
    """Return the part that an option belongs to; None for the choices themselves."""
    return next((part for part in OPTIONS if option.startswith(f"{part}_")), None)


def _flat(part: str) -> dict[str, Any]:
    descriptions, fields = meanings(OPTIONS[part]), {}
    for name, info in OPTIONS[part].model_fields.items():
        field = copy(info)
        field.description = descriptions.get(name)
        fields[f"{part}_{name}"] = (info.annotation, field)
    return fields


CombineConfig: type[Choices] = create_model(
    "CombineConfig",
    __base__=Choices,
    __doc__="The choices, and the options of every part by their own names after the part's.",
    **{name: field for part in OPTIONS for name, field in _flat(part).items()},
)


def options_of(config: Choices, part: str) -> Any:
    """Return the options of one part as its own file knows them.

    >>> options_of(CombineConfig(local="moon", moon_mu=5.0), "moon")
    MoonConfig(mu=5.0, tau=0.5)
    """
    model = OPTIONS[part]
    return model(**{name: getattr(config, f"{part}_{name}") for name in model.model_fields})


def head(config: Choices, feature_width: int, num_classes: int) -> nn.Module | None:
    """Return the module in place of the backbone's head; None keeps that.

    Raises:
        ValueError: if there is no such frame for this width and number of classes.
    """
    if config.head == "etf":
        return EtfHead(feature_width, num_classes, **options_of(config, "etf").model_dump())
    if config.head == "normalised":
        chosen = options_of(config, "normalised").model_dump()
        return NormalisedPrototypeHead(feature_width, num_classes, **chosen)
    return None


def parts(setting: Setting) -> tuple[LocalRule, ServerRule]:
    """Return the two halves that the options choose.

    Raises:
        ValueError: if the job's training does not suit them (see each method).
    """
    local, server = local_rule(setting), server_rule(setting)
    if setting.config.prototypes == "fedmr":
        return with_prototypes(local, server, options_of(setting.config, "fedmr"))
    return local, server


def with_prototypes(
    local: LocalRule, server: ServerRule, options: fedmr.InterOptions
) -> tuple[LocalRule, ServerRule]:
    """Add FedMR's inter-class term, and the class sums that its prototypes are made of, to both halves.

    The term is none of a personal model's training, which is told of the model alone.
    """

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        objective = local.objective(silo, broadcast, state)
        if fedmr.PROTOTYPES not in broadcast:
            return objective
        return replace(objective, terms=(*objective.terms, fedmr.inter_term(silo, broadcast, options)))

    def fields(setting: Setting) -> tuple[phases.Field, ...]:
        return (*local.fields(setting), *fedmr.sum_fields(setting, static=True))

    def finish(trained: Trained) -> Contribution:
        contribution = local.finish(trained)
        return replace(contribution, tensors={**contribution.tensors, **fedmr.finish(trained).tensors})

    def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        changed = server.update(state, totals, cohort)
        return changed.evolve(extra=fedmr.with_new_prototypes(changed.extra, totals))

    def initial(setting: Setting) -> Tensors:
        return {**server.initial(setting), **fedmr.initial(setting)}

    def broadcast(state: ServerState) -> Tensors:
        return {**server.broadcast(state), **fedmr.received(state)}

    return (
        replace(local, names=(*local.names, "inter"), objective=objective, fields=fields, finish=finish),
        replace(server, update=update, initial=initial, broadcast=broadcast),
    )


def local_rule(setting: Setting) -> LocalRule:
    """Return the silo's half that the options choose."""
    rule = _local_rule(setting)
    if setting.config.loss == "fedrs":
        return with_loss(rule, fedrs.local_rule(options_of(setting.config, "fedrs")))
    return rule


def with_loss(rule: LocalRule, loss: LocalRule) -> LocalRule:
    """Put another loss in the place of a rule's cross-entropy.

    Args:
        rule: one of whose terms is named ``cross_entropy``.
        loss: whose only term is put in its place, with that one's weight.
    """
    (name,) = loss.names

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        objective = rule.objective(silo, broadcast, state)
        (term,) = loss.objective(silo, broadcast, {}).terms
        terms = [replace(term, weight=old.weight) if old.name == REPLACED else old for old in objective.terms]
        return replace(objective, terms=tuple(terms))

    names = tuple(name if old == REPLACED else old for old in rule.names)
    return replace(rule, names=names, objective=objective)


def _local_rule(setting: Setting) -> LocalRule:
    config: Choices = setting.config
    if config.local == "balanced_softmax":
        return balanced_training(options_of(config, "balanced_softmax"))
    if config.local == "fedprox":
        return fedprox.local_rule(options_of(config, "fedprox"))
    if config.local == "moon":
        return moon.local_rule(options_of(config, "moon"))
    if config.local == "scaffold":
        return scaffold.local_rule(options_of(config, "scaffold"), setting)
    if config.local == "feddyn":
        return feddyn.local_rule(options_of(config, "feddyn"))
    if config.local == "feddc":
        return feddc.local_rule(options_of(config, "feddc"), setting)
    return plain_training()


def server_rule(setting: Setting) -> ServerRule:
    """Return the server's half that the options choose."""
    config: Choices = setting.config
    if config.server == "fednova":
        mu = options_of(config, "fedprox").mu if config.local == "fedprox" else 0.0
        return fednova.server_rule(setting, mu=mu)
    if config.server in ADAPTIVE:
        return fedopt.server_rule(options_of(config, "fedopt"), ADAPTIVE[config.server])
    if config.server == "scaffold":
        return scaffold.server_rule(options_of(config, "scaffold"))
    if config.server == "feddyn":
        return feddyn.server_rule()
    if config.server == "feddc":
        return feddc.server_rule()
    return averaging()


def balanced_training(options: BalancedSoftmaxOptions) -> LocalRule:
    """Return the balanced softmax with the silo's own class counts, which stay there."""

    def objective(silo: SiloView, broadcast: Tensors, state: Tensors) -> Objective:
        counts = silo.class_counts("train").to(silo.device)
        # Adding a record changes the counts, and by them the gradient of every other record.
        term = Term(
            "balanced_softmax",
            1.0,
            lambda view: balanced_softmax_loss(view.logits, view.labels, counts, **options.model_dump()),
            per_record=False,
        )
        return Objective((term,))

    return LocalRule(("balanced_softmax",), objective)


def takes_findings(config: Choices) -> str | None:
    """Refuse the parts that need the one class of each record."""
    parts = {"head": config.head, "local": config.local, "loss": config.loss, "prototypes": config.prototypes}
    wrong = [
        f"{key} '{part}'"
        for key, part in parts.items()
        if part in ("etf", "normalised", "balanced_softmax", "fedrs", "fedmr")
    ]
    return f"of its parts {' and '.join(wrong)} need the one class of each record" if wrong else None


METHOD = composed_method(
    name="combine",
    title="combination",
    paper="none: parts of other methods put together",
    config=CombineConfig,
    findings=takes_findings,
    rounded=lambda config: config.server in ADAPTIVE,
    parts=parts,
    head=head,
)
