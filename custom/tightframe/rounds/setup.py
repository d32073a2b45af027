"""A validated job joined with what it names: method, data set, model.

This is the only place that turns names of a job into objects, and it does so through the
registries; nothing a job says is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel

from tightframe import data, methods, model_update, models
from tightframe.config.job import JobConfig, check_job
from tightframe.data.base import DatasetSpec
from tightframe.errors import ContributionError, JobError
from tightframe.phases import (
    FEATURE_MEAN,
    FEATURE_STD,
    Contribution,
    Field,
    Method,
    Phase,
    Schema,
    ServerState,
    Setting,
    SiloView,
    Tensors,
    stream_seed,
)
from tightframe.privacy.accounting import BudgetError
from tightframe.rounds import classes, codec, evaluation, personal, statistics
from tightframe.rounds.naming import named, options_of
from tightframe.rounds.private import plan, shown
from tightframe.rounds.private.plan import PrivacyPlan

STANDARDISE_MEAN, STANDARDISE_STD = "standardise.mean", "standardise.std"
"""Parameters of a model that standardises its inputs; they never train."""
PRESENT = Field("closing/present", (), bound=1.0, mechanism="constant")
"""One from each silo, whatever its records."""
HEAD_OPTIONS = ("dropout", "head_bias", "single_logit")
"""Options of backbones that are of their own head only."""


@dataclass(frozen=True)
class JobSetup:
    """Everything that server and silos derive from a job alone.

    Attributes:
        setting: of the job's own model, on which the sums rest.
        site_settings: of silos that train another.
    """

    job: JobConfig
    method: Method
    dataset: DatasetSpec
    setting: Setting
    privacy: PrivacyPlan | None = None
    site_settings: Mapping[str, Setting] = field(default_factory=dict)

    def setting_at(self, site: str) -> Setting:
        """The setting with the model that a silo trains."""
        return self.site_settings.get(site, self.setting)

    def initial_state(self) -> ServerState:
        """The state before round 1, from the job's seed."""
        return self.method.init_server(self.setting, stream_seed(self.job.seed, "server", "init"))

    def training_phases(self, round_number: int) -> tuple[Phase, ...]:
        """The phases of one training round (1-based).

        Under privacy nothing is told of the losses, and with the last phase what the job has cost so far.
        """
        phases = self.method.plan(self.setting, round_number, self.job.rounds)
        if self.job.privacy is None:
            return phases
        *first, last = (_without_losses(phase) for phase in phases)
        return (*first, shown.telling(last, self.job))

    def statistics_phases(self) -> tuple[Phase, ...]:
        """The sums of pooled statistics that the method needs, before anything else."""
        names = self.method.statistics(self.setting) if self.method.statistics else ()
        if _standardises(self.setting):
            names = names if "feature_moments" in names else (*names, "feature_moments")
        return statistics.phases(self.setting, names, class_rules=self.job.class_rules == "on")

    def standardised(self, state: ServerState) -> ServerState:
        """The state once the statistics are in: a model that standardises its inputs has their moments."""
        if STANDARDISE_MEAN not in state.model or FEATURE_MEAN not in state.extra:
            return state
        found = {STANDARDISE_MEAN: state.extra[FEATURE_MEAN], STANDARDISE_STD: state.extra[FEATURE_STD]}
        fitted = {name: value.to(state.model[name].dtype) for name, value in found.items()}
        return state.evolve(model={**state.model, **fitted})

    def before_phases(self) -> tuple[Phase, ...]:
        """Phases before round 1."""
        return self.method.before(self.setting) if self.method.before else ()

    def after_phases(self) -> tuple[Phase, ...]:
        """Phases between the last round and the closing one."""
        return self.method.after(self.setting) if self.method.after else ()

    def schema(self, phase: Phase, *, evaluated: bool) -> Schema:
        """A phase's fields, the flags of the class rules, and the evaluation where it is part of it."""
        whole = phase.schema + self.class_flags(phase)
        return whole + self.evaluation_schema() if evaluated and self.evaluates else whole

    @property
    def evaluates(self) -> bool:
        """Whether silos tell how models do on their records: under privacy only with noise."""
        return self.job.privacy is None or self.job.privacy.evaluation == "noisy"

    def evaluates_in(self, number: int) -> bool:
        """Whether the model that a training round begins with is evaluated: with noise, as planned only."""
        if self.privacy is None:
            return self.evaluates
        return self.privacy.evaluation is not None and self.privacy.evaluation.in_round(number)

    def class_flags(self, phase: Phase) -> Schema:
        """The flags that the class rules add to a phase; none where they are off or do not apply."""
        # Under privacy a threshold would move whole blocks; noise and a floor of noisy counts replace it.
        if self.job.class_rules == "off" or self.job.privacy is not None:
            return Schema(())
        return classes.fields(phase.schema, self.dataset.num_classes)

    def sums(self) -> Iterator[tuple[str, int, int, tuple[Schema, ...]]]:
        """Every sum of a run that is not done by the jobs before: kind, round, index, possible schemas.

        A round's first sum has the evaluation with it, unless its broadcast turns out to have no model.
        """
        for kind, number, phases in self._phases():
            for index, phase in enumerate(phases):
                first = kind == "train" and index == 0
                ways = (True, False) if first and self.evaluates_in(number) else (False,)
                yield kind, number, index, tuple(self.schema(phase, evaluated=way) for way in ways)
        yield "closing", self.job.rounds, 0, (self.closing_schema(),)
        if self.job.personalise:
            yield personal.KIND, self.job.rounds, 0, (personal.schema(),)

    def _phases(self) -> Iterator[tuple[str, int, tuple[Phase, ...]]]:
        if self.job.resume is None:
            yield statistics.KIND, 0, self.statistics_phases()
            yield "before", 0, self.before_phases()
        for number in range(self.job.done + 1, self.job.rounds + 1):
            yield "train", number, self.training_phases(number)
        yield "after", self.job.rounds, self.after_phases()

    def closing_schema(self) -> Schema:
        """The closing's fields: the evaluation, or, where that stays at the silos, that a silo was there."""
        return self.evaluation_schema() if self.evaluates else Schema((PRESENT,))

    def evaluation_schema(self) -> Schema:
        """The fields of the evaluation of the model received."""
        if self.privacy is not None and self.privacy.evaluation is not None:
            return self.privacy.evaluation.schema(evaluation.FOLDS, self.job.evaluation.score_bins)
        return evaluation.schema(self.dataset.num_classes, self.job.evaluation.score_bins)


def prepare(values: dict[str, Any] | JobConfig) -> JobSetup:
    """Validate a job wholly: its values, the names it uses, their options, its sums.

    Raises:
        JobError: listing every problem at once.
    """
    raw = values.model_dump() if isinstance(values, JobConfig) else values
    job, problems = check_job(raw)
    method = named(methods.get, raw.get("method"), "method", problems)
    dataset = named(data.get, raw.get("dataset"), "dataset", problems)
    backbone = named(models.get, raw.get("model"), "model", problems)
    config = options_of(method, "config", raw, "method_options", problems)
    dataset_options = options_of(dataset, "options", raw, "dataset_options", problems)
    model_options = options_of(backbone, "options", raw, "model_options", problems)
    others = _site_models(method, raw.get("site_models"), problems)
    if problems or job is None or not (method and dataset and backbone):
        raise JobError(problems)
    input_shape = dataset.input_shape(dataset_options)

    def build(backbone: models.BackboneSpec, options: BaseModel) -> torch.nn.Module:
        model = backbone.build(options, input_shape, dataset.num_classes)
        head = method.head and method.head(config, models.feature_width(model), dataset.num_classes)
        if head is not None:
            model.head = head
        return model if job.privacy is None else make_private(model, job.privacy.normalisation)

    setting = Setting(
        config=config,
        num_classes=dataset.num_classes,
        input_shape=input_shape,
        build_model=partial(build, backbone, model_options),
        local=job.training,
        update_norm=job.update_norm,
        update_bound=job.update_bound,
        privacy=plan.public_setting(job),
    )
    shared: dict[str, Setting] = {}  # of silos that train the same
    own = {
        site: shared.setdefault(repr(other), replace(setting, build_model=partial(build, *other)))
        for site, other in others.items()
    }
    setup = JobSetup(job, method, dataset, setting, site_settings=own)
    if job.privacy is not None:
        setup = _with_privacy(setup)
    _check_sums(setup)
    _check_own_models(setup)
    _check_head(setup, raw.get("model_options", {}))
    return setup


def _site_models(method: Method | None, asked: Any, problems: list[str]) -> dict[str, tuple[Any, Any]]:
    """Backbone and options of each silo that has a model of its own, as far as they are right."""
    if not isinstance(asked, dict) or not asked:
        return {}  # what is no mapping the job's own validation has told of
    if method is not None and method.own_model is None:
        others = ", ".join(item.name for item in methods.METHODS if item.own_model is not None)
        problems.append(
            f"site_models: {method.name} has a global model, which all silos train; silos may have models of "
            f"their own with {others}"
        )
    found = {}
    for site, values in asked.items():
        if isinstance(values, dict):
            place = f"site_models.{site}."
            backbone = named(models.get, values.get("model"), f"{place}model", problems)
            options = options_of(backbone, "options", values, "model_options", problems, place)
            found[site] = (backbone, options)
    return found


def make_private(model: torch.nn.Module, form: Any) -> torch.nn.Module:
    """``privacy.normalisation.make_private``, imported only where a job has privacy."""
    from tightframe.privacy.training import normalisation

    return normalisation.make_private(model, form)


def _with_privacy(setup: JobSetup) -> JobSetup:
    """The setup with its privacy plan, if everything that would leave a silo has a mechanism.

    Raises:
        JobError: TF-101, naming each field or option that has none.
    """
    job, method, config = setup.job, setup.method, setup.setting.config
    if method.private is None:
        reasons = [f"{method.name} has no form for differential privacy"]
    else:
        reason = method.private(config)
        reasons = [] if reason is None else [f"{method.name}: {reason}"]
    if getattr(config, "geometric", False):
        reasons.append("geometric means have no bound for one record: logarithms are unbounded at zero")
    if job.dataset_options.get("oversample_minority"):
        reasons.append(
            "oversample_minority repeats records, so that noise for one record hides none of them; "
            "set dataset_options.oversample_minority to false"
        )
    if job.privacy is not None and job.privacy.neighbours == "patient" and setup.dataset.no_patients:
        reasons.append(
            f"{setup.dataset.title} cannot hide patients, because {setup.dataset.no_patients}; "
            "use neighbours 'record'"
        )
    if reasons:
        raise JobError([f"privacy: {reason}" for reason in reasons])
    numbers = range(1, job.rounds + 1)
    rounds = [(number, setup.training_phases(number)) for number in numbers]
    bare = [
        item.name
        for _, phases in rounds
        for phase in phases
        for item in phase.schema.fields
        if item.mechanism is None
    ]
    others = (*setup.statistics_phases(), *setup.before_phases(), *setup.after_phases())
    bare += [item.name for phase in others for item in phase.schema.fields]
    if bare:
        raise JobError(
            [f"privacy: nothing protects the field {name} of {method.name}" for name in dict.fromkeys(bare)]
        )
    prior = method.private_prior is not None and method.private_prior(config)
    try:
        made = plan.make_plan(job, rounds, prior=prior, num_classes=setup.dataset.num_classes)
        return replace(setup, privacy=made)
    except (BudgetError, ContributionError) as error:
        raise JobError([f"privacy: {error}"]) from None


def _without_losses(phase: Phase) -> Phase:
    """A phase whose silos tell nothing of their losses, which are exact statistics of records."""
    kept = tuple(item for item in phase.schema.fields if not item.name.startswith(model_update.TRAINING))

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        made = phase.contribute(silo, broadcast, state)
        names = {item.name for item in kept}
        return replace(made, tensors={name: item for name, item in made.tensors.items() if name in names})

    return replace(phase, schema=Schema(kept), contribute=contribute)


def set_threads(threads: int) -> None:
    """Intra-op threads of torch: part of the job, because they change the last bits of a run."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _check_sums(setup: JobSetup) -> None:
    releases = setup.privacy.releases if setup.privacy is not None else ()
    try:
        phases = (
            *setup.statistics_phases(),
            *setup.before_phases(),
            *setup.training_phases(1),
            *(phase for number in releases[:1] for phase in setup.training_phases(number)),
            *setup.after_phases(),
        )
        for phase in phases:
            codec.check_schema(setup.schema(phase, evaluated=True), len(setup.job.sites))
    except ContributionError as error:
        raise JobError([str(error)]) from None
    except (ValueError, TypeError) as error:
        raise JobError([f"the method cannot be planned with these options: {error}"]) from None


def _check_own_models(setup: JobSetup) -> None:
    """Refuse what needs a global model where the method has none.

    Raises:
        JobError: TF-101, naming each.
    """
    if setup.method.own_model is None:
        return
    problems = []
    if setup.job.local_baseline_epochs:
        problems.append(
            f"local_baseline_epochs: {setup.method.name} has no global model from which such a baseline "
            "would start"
        )
    if _standardises(setup.setting):
        problems.append(_no_moments("model_options", setup.method))
    told: dict[int, list[str]] = {}  # by setting, which silos that train the same share
    for site, setting in sorted(setup.site_settings.items()):
        if id(setting) not in told:
            told[id(setting)] = _site_model_problems(setup, setting, setup.job.model_at(site).model)
        problems += [f"site_models.{site}{problem}" for problem in told[id(setting)]]
    if problems:
        raise JobError(problems)


def _site_model_problems(setup: JobSetup, setting: Setting, name: str) -> list[str]:
    """Why a model that some silos train cannot be built, or does not go with the job's sums."""
    try:
        width, sums = _width(setting), _schemas(setup, setting)
    except (ValueError, TypeError) as error:
        return [f".model: {error}"]
    problems = []
    if _standardises(setting):
        problems.append(_no_moments(".model_options", setup.method))
    if sums != _schemas(setup, setup.setting):
        problems.append(
            f": Expected a model of feature width {_width(setup.setting)}, as that of the job's "
            f"{setup.job.model}, because {setup.method.name}'s sums have it, but got {name} of width {width}"
        )
    return problems


def _no_moments(place: str, method: Method) -> str:
    return (
        f"{place}.standardise: {method.name} has no global model with which pooled moments would reach silos"
    )


def _standardises(setting: Setting) -> bool:
    return STANDARDISE_MEAN in dict(model_update.shared_template(setting).named_parameters())


def _width(setting: Setting) -> int:
    return models.feature_width(model_update.shared_template(setting))


def _schemas(setup: JobSetup, setting: Setting) -> list[Schema]:
    """The sums of a method with a setting's model."""
    of = replace(setup, setting=setting)
    return [item.schema for item in (*of.before_phases(), *of.training_phases(1), *of.after_phases())]


def _check_head(setup: JobSetup, asked: dict[str, Any]) -> None:
    """Refuse options of the backbone's head where the method brings a head of its own."""
    options = sorted(name for name in HEAD_OPTIONS if asked.get(name))
    if options and brings_head(setup.method, setup.setting):
        ours = f"{setup.method.name} has a head of its own, without it"
        raise JobError([f"model_options.{name}: {ours}" for name in options])


def brings_head(method: Method, setting: Setting) -> bool:
    """Whether a method replaces the backbone's head, with these options of its own."""
    if method.head is None:
        return False
    return method.head(setting.config, _width(setting), setting.num_classes) is not None
