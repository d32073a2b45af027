"""A validated job together with the method, data set and model that it names.

Only this module turns names of a job into objects. It looks them up in the registries and imports nothing
that a job names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from tightframe import data, methods, models
from tightframe.config.job import STATISTICS_METHOD, JobConfig, check_job
from tightframe.config.policy import Ceilings
from tightframe.data.base import DatasetSpec
from tightframe.data.table.tabulated import Layout
from tightframe.errors import ContributionError, JobError
from tightframe.learning import iterate_average, model_update
from tightframe.learning.few_records.record_values import most_values
from tightframe.models.build_limit import build_within
from tightframe.models.own_modules import PROTOCOL
from tightframe.options import listed
from tightframe.phases import (
    FEATURE_MEAN,
    FEATURE_STD,
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
    Withdrawal,
    stream_seed,
)
from tightframe.privacy.accounting import BudgetError
from tightframe.rounds import job_checks, privacy_plan
from tightframe.rounds.job_checks import STANDARDISE_MEAN, STANDARDISE_STD, standardises
from tightframe.rounds.phases import statistics, table_statistics
from tightframe.rounds.plan import RunPlan
from tightframe.rounds.privacy_plan import PrivacyPlan

CEILINGS = Ceilings()


@dataclass(frozen=True, eq=False)
class JobSetup:
    """Everything that server and silos derive from a job alone.

    Attributes:
        job: validated.
        setting: with the job's own model, which fixes the fields of the sums.
        privacy: plan of the releases; None without privacy.
        site_settings: silo -> setting, of silos with a model of their own.
        start: by which the head is set before round 1; None leaves it.
    """

    job: JobConfig
    method: Method
    dataset: DatasetSpec
    setting: Setting
    privacy: PrivacyPlan | None = None
    site_settings: Mapping[str, Setting] = field(default_factory=dict)
    start: Method | None = None

    def setting_at(self, site: str) -> Setting:
        """Return the setting with the model that a silo trains."""
        return self.site_settings.get(site, self.setting)

    @property
    def trains(self) -> bool:
        """Check whether the job trains a model, rather than evaluating one or summing statistics only."""
        return self.job.evaluate_only is None and self.job.statistics is None

    @cached_property
    def dataset_options(self) -> BaseModel:
        """The job's options of its data set."""
        return self.dataset.options.model_validate(self.job.dataset_options)

    @property
    def columns(self) -> tuple[int, ...]:
        """Width of each column of a table in a record's inputs; empty where every width is one."""
        return () if self.dataset.columns is None else self.dataset.columns(self.dataset_options)

    @property
    def most_values(self) -> int:
        """Most values that are counted of a record (``learning.few_records.record_values``)."""
        return most_values(self.setting.input_shape, self.columns)

    @cached_property
    def layout(self) -> Layout | None:
        """The cells of a job with ``statistics``; None in others."""
        if self.job.statistics is None:
            return None
        return table_statistics.layout_of(self.dataset.name, self.dataset_options, self.job.statistics)

    @cached_property
    def kinds(self) -> tuple[Phase, ...]:
        """Phases of a run with one round, without riders: those of further rounds sum the same kinds."""
        return (*self.before_phases(), *self.training_phases(1), *self.after_phases())

    @cached_property
    def plan(self) -> RunPlan:
        """All exchanges of the run."""
        return RunPlan(self)

    def initial_state(self) -> ServerState:
        """Return the state before round 1, from the job's seed."""
        return self.method.init_server(self.setting, stream_seed(self.job.seed, "server", "init"))

    def training_phases(self, round_number: int) -> tuple[Phase, ...]:
        """Return the method's phases of one training round (1-based), under privacy without losses.

        With ``average_last`` those of the last rounds keep the mean of their models.
        """
        job = self.job
        phases = self.method.plan(self.setting, round_number, job.rounds)
        if job.average_last > 1:
            phases = iterate_average.attach(
                phases,
                iterate_average.averaged_names(self.setting),
                number=round_number,
                rounds=job.rounds,
                last=job.average_last,
            )
        return phases if self.job.privacy is None else tuple(map(_without_losses, phases))

    def statistics_phases(self) -> tuple[Phase, ...]:
        """Return the phases of the pooled statistics that the method or the model's input scaling needs.

        A job with ``statistics`` has no others.
        """
        if self.layout is not None:
            return table_statistics.phases(self.layout, private=self.job.privacy is not None)
        if not self.trains:
            return ()  # the model has their result
        names = self.method.statistics(self.setting) if self.method.statistics else ()
        if standardises(self.setting):
            names = names if "feature_moments" in names else (*names, "feature_moments")
        phases = statistics.phases(
            self.setting,
            names,
            class_rules=self.job.class_rules == "on",
            uniform=self.job.weights == "uniform",
        )
        if not phases:
            return ()
        last = phases[-1]

        def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
            return self._standardised(last.update(state, totals, cohort))

        return (*phases[:-1], replace(last, update=update))

    def _standardised(self, state: ServerState) -> ServerState:
        """Copy the pooled moments into a model that standardises its inputs."""
        if STANDARDISE_MEAN not in state.model or FEATURE_MEAN not in state.extra:
            return state
        moments = {STANDARDISE_MEAN: state.extra[FEATURE_MEAN], STANDARDISE_STD: state.extra[FEATURE_STD]}
        fitted = {name: value.to(state.model[name].dtype) for name, value in moments.items()}
        return state.evolve(model={**state.model, **fitted})

    def before_phases(self) -> tuple[Phase, ...]:
        """Return the phases before round 1: those that set the head, then the method's own."""
        if not self.trains:
            return ()
        own = self.method.before(self.setting) if self.method.before else ()
        if self.start is None or self.start.start is None:
            return own
        return (*self.start.start(replace(self.setting, config=self.start.config())), *own)

    @property
    def rounded(self) -> bool:
        """True if silos on different processors agree on an update only within rounding."""
        used = [(self.method, self.setting.config)]
        if self.start is not None:
            used.append((self.start, self.start.config()))
        return any(of.rounded(options) if callable(of.rounded) else of.rounded for of, options in used)

    def first_phases(self) -> tuple[Phase, ...]:
        """Return the phases before round 1 in this job: ``before_phases``, or those of a withdrawal."""
        asked = self.withdrawal
        if asked is None or self.method.withdraw is None:
            return self.before_phases()
        return self.method.withdraw(self.setting, asked)

    @property
    def withdrawal(self) -> Withdrawal | None:
        """Options of the job's withdrawal of records from an ended run; None if it withdraws none."""
        withdraw = self.job.withdraw
        if withdraw is None:
            return None
        by_class = self.job.class_rules == "on"
        names = tuple(self.dataset.class_names)
        return Withdrawal(withdraw.state_sha256, withdraw.min_withdrawn, by_class=by_class, names=names)

    def after_phases(self) -> tuple[Phase, ...]:
        """Return the method's phases between the last round and the closing."""
        return self.method.after(self.setting) if self.method.after and self.trains else ()

    @property
    def evaluates(self) -> bool:
        """Check whether the run sums evaluations, which under privacy it does only with noise."""
        if self.job.statistics is not None:
            return False
        return self.job.privacy is None or self.job.privacy.evaluation == "noisy"

    @cached_property
    def exactly_evaluated(self) -> frozenset[int]:
        """The rounds whose models are evaluated, in a job without privacy; of silos' own ones the last."""
        if self.method.own_model is not None:
            return frozenset({self.job.rounds})
        return frozenset(self.job.evaluation.after(self.job.rounds))

    def evaluates_in(self, number: int) -> bool:
        """Check whether a training round evaluates the model that it begins with."""
        if self.privacy is None:
            return number - 1 in self.exactly_evaluated
        return self.privacy.evaluation is not None and self.privacy.evaluation.in_round(number)


@dataclass(frozen=True)
class _Network:
    """Builds the untrained model of a job; equal for equal jobs, so that parties in one process share one.

    Attributes:
        head: of the method, if it has one of its own (``Method.head``), with its options in ``config``.
        most: largest number of values; None for no limit.
    """

    backbone: models.BackboneSpec
    options: BaseModel
    input_shape: tuple[int, ...]
    classes: int
    head: Callable[..., torch.nn.Module | None] | None
    config: BaseModel | None
    frozen: bool
    normalisation: Any
    most: int | None

    def __hash__(self) -> int:
        return hash((self.backbone.name, self.input_shape, self.classes))

    def __call__(self) -> torch.nn.Module:
        return build_within(self._of_any_size, self.most)

    def _of_any_size(self) -> torch.nn.Module:
        model = self.backbone.build(self.options, self.input_shape, self.classes)
        head = self.head and self.head(self.config, models.feature_width(model), self.classes)
        if head is not None:
            model.head = head
        if self.frozen:
            models.freeze(model)
        return model if self.normalisation is None else make_private(model, self.normalisation)


def prepare(values: dict[str, Any] | JobConfig, ceilings: Ceilings = CEILINGS) -> JobSetup:
    """Validate a whole job: its values, the names that it uses, their options, its sums.

    Args:
        ceilings: limits on what is built or planned.

    Raises:
        JobError: listing every problem at once.
        TooLargeError: TF-632.
    """
    setup = assemble(values, ceilings)
    job_checks.check_parts(setup)
    _ = setup.layout  # refuses a data set whose statistics cannot be summed
    if setup.job.privacy is not None:
        setup = _with_privacy(setup)
    job_checks.check_sums(setup, ceilings)
    job_checks.check_models(setup)
    return setup


def assemble(values: dict[str, Any] | JobConfig, ceilings: Ceilings = CEILINGS) -> JobSetup:
    """Join a job with what it names, without checks of its sums and without a plan of privacy.

    For callers that use a model of an ended run, and start none.

    Args:
        ceilings: limits on what is built.

    Raises:
        JobError: listing values, names and options that are wrong.
    """
    raw = values.model_dump() if isinstance(values, JobConfig) else values
    job, problems = check_job(raw)
    if not isinstance(raw, dict):
        raise JobError(problems)
    method = look_up(_method, raw.get("method"), "method", problems)
    dataset = look_up(data.get, raw.get("dataset"), "dataset", problems)
    backbone = look_up(models.get, raw.get("model"), "model", problems)
    config = options_of(method, "config", raw, "method_options", problems)
    dataset_options = options_of(dataset, "options", raw, "dataset_options", problems)
    model_options = options_of(backbone, "options", raw, "model_options", problems)
    others = _site_models(method, raw.get("site_models"), problems)
    start = _start(raw.get("start"), problems)
    problems += _network_problems(raw, method, backbone)
    trains = raw.get("evaluate_only") is None and raw.get("statistics") is None
    if trains and method is not None and method.rounds not in (None, raw.get("rounds")):
        problems.append(
            f"rounds: Expected {method.rounds} with {method.name}, which trains nothing afterwards, but got "
            f"{raw.get('rounds')}; to go on from its head choose another method, with start: {method.name}"
        )
    if problems or job is None or not (method and dataset and backbone):
        raise JobError(problems)
    dataset = dataset.of(dataset_options)
    input_shape = dataset.input_shape(dataset_options)

    def network(backbone: models.BackboneSpec, options: BaseModel) -> _Network:
        return _Network(
            backbone,
            options,
            input_shape,
            dataset.num_classes,
            method.head,
            config if method.head else None,
            frozen=backbone.frozen or job.encoder != "trained",
            normalisation=job.normalisation,
            most=ceilings.parameters,
        )

    setting = Setting(
        config=config,
        num_classes=dataset.num_classes,
        input_shape=input_shape,
        build_model=network(backbone, model_options),
        local=job.training,
        update_norm=job.update_norm,
        update_bound=job.update_bound,
        privacy=privacy_plan.public_setting(job),
        findings=dataset.multi_label,
    )
    shared: dict[str, Setting] = {}  # one setting for all silos with the same model
    own = {
        site: shared.setdefault(repr(other), replace(setting, build_model=network(*other)))
        for site, other in others.items()
    }
    return JobSetup(job, method, dataset, setting, site_settings=own, start=start)


def _method(name: str) -> Method:
    """Look up a method; that of a job with ``statistics``, which has none, is in no registry."""
    return table_statistics.METHOD if name == STATISTICS_METHOD else methods.get(name)


def _site_models(method: Method | None, raw: Any, problems: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return backbone and options of each site model, and note their problems."""
    if not isinstance(raw, dict) or not raw:
        return {}  # the job's own validation has refused anything but a mapping
    if method is not None and method.own_model is None:
        others = ", ".join(item.name for item in methods.METHODS if item.own_model is not None)
        problems.append(
            f"site_models: {method.name} has a global model, which all silos train; silos may have models of "
            f"their own with {others}"
        )
    site_models = {}
    for site, values in raw.items():
        if isinstance(values, dict):
            place = f"site_models.{site}."
            backbone = look_up(models.get, values.get("model"), f"{place}model", problems)
            options = options_of(backbone, "options", values, "model_options", problems, place)
            site_models[site] = (backbone, options)
    return site_models


def _start(raw: Any, problems: list[str]) -> Method | None:
    """Return the method that a job starts with, and note its problems."""
    if not isinstance(raw, str):
        return None  # none, or refused by the job's own validation
    if (start := look_up(methods.get, raw, "start", problems)) is not None and start.start is None:
        able = ", ".join(item.name for item in methods.METHODS if item.start is not None)
        problems.append(f"start: {raw} is no closed form that sets a head; these are: {able}")
    return start if start is not None and start.start is not None else None


def _network_problems(
    raw: dict[str, Any], method: Method | None, backbone: models.BackboneSpec | None
) -> list[str]:
    """List the options of a job that need features, where a network returns only logits."""
    if backbone is None or not backbone.logits_only:
        return []
    add = f"give the network {PROTOCOL}"
    problems = []
    if method is not None and method.network != "logits":
        able = ", ".join(item.name for item in methods.METHODS if item.network == "logits")
        problems.append(f"model: {method.name} needs more than logits: {add}, or choose one of: {able}")
    if raw.get("encoder", "trained") != "trained":
        problems.append(f"encoder: what is frozen is all but the head: {add}")
    if raw.get("privacy") is not None:
        problems.append(f"privacy: gradients of single records are taken through features and head: {add}")
    if raw.get("start") is not None:
        problems.append(f"start: it sets the head: {add}")
    return problems


def make_private(model: torch.nn.Module, form: Any) -> torch.nn.Module:
    """Call ``privacy.training.normalisation.make_private``, imported only where a job has privacy."""
    from tightframe.privacy.training import normalisation

    return normalisation.make_private(model, form)


def _with_privacy(setup: JobSetup) -> JobSetup:
    """Return the setup with its privacy plan."""
    job, method, config = setup.job, setup.method, setup.setting.config
    if not setup.trains:
        reasons: list[str] = []  # the evaluation alone needs noise
    elif method.private is None:
        reasons = [f"{method.name} has no form for differential privacy"]
    else:
        reason = method.private(config)
        reasons = [] if reason is None else [f"{method.name}: {reason}"]
    rate = None if method.gradient_rate is None else method.gradient_rate(config)
    if rate is None and job.privacy is not None and job.privacy.noise == "shared":
        able = ", ".join(item.name for item in methods.METHODS if item.gradient_rate is not None)
        reasons.append(
            f"noise 'shared' needs a method whose round is one sum of records' gradients ({able}); with "
            f"{method.name} each silo trains by itself, and its noise is its own: leave privacy.noise out"
        )
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
    if job.privacy is not None and job.privacy.views > 1:
        reasons += job_checks.views(setup)
    if reasons:
        raise JobError([f"privacy: {reason}" for reason in reasons])
    numbers = range(1, job.rounds + 1)
    try:
        rounds = [(number, setup.training_phases(number)) for number in numbers]
    except ValueError as error:
        raise JobError([f"the method cannot be planned with these options: {error}"]) from None
    unprotected = [
        item.name
        for _, phases in rounds
        for phase in phases
        for item in phase.schema.fields
        if item.mechanism is None
    ]
    before = setup.before_phases()
    unprotected += [
        item.name for phase in before for item in phase.schema.fields if not privacy_plan.is_frozen_sum(item)
    ]
    others = (*setup.statistics_phases(), *setup.after_phases())
    unprotected += [
        item.name for phase in others for item in phase.schema.fields if item.mechanism != "statistics"
    ]
    if unprotected:
        names = dict.fromkeys(unprotected)
        raise JobError([f"privacy: nothing protects the field {name} of {method.name}" for name in names])
    prior = setup.trains and method.private_prior is not None and method.private_prior(config)
    rate = rate if setup.trains else None
    try:
        rounds = [(0, before), *rounds]
        plan = privacy_plan.make_plan(
            job,
            rounds,
            prior=prior,
            num_classes=setup.dataset.num_classes,
            findings=setup.dataset.multi_label,
            gradient_rate=rate,
        )
        if setup.layout is not None:
            plan = privacy_plan.with_statistics(
                plan, job, columns=len(setup.layout.places), numbers=setup.layout.numbers
            )
        return replace(setup, privacy=plan)
    except (BudgetError, ContributionError) as error:
        raise JobError([f"privacy: {error}"]) from None


def _without_losses(phase: Phase) -> Phase:
    """Return a phase without the silos' losses, which are exact statistics of records."""
    fields = tuple(item for item in phase.schema.fields if not item.name.startswith(model_update.TRAINING))

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        contribution = phase.contribute(silo, broadcast, state)
        names = {item.name for item in fields}
        return replace(
            contribution, tensors={name: item for name, item in contribution.tensors.items() if name in names}
        )

    return replace(phase, schema=Schema(fields), contribute=contribute)


def set_threads(threads: int) -> None:
    """Set torch's intra-op threads, which are part of the job because they change the last bits of a run."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


SITE_RULES = frozenset({"min_class_count"})
"""Rules of a site whose names no job option may have, so that no method takes them from a job."""


def look_up(get: Any, name: Any, key: str, problems: list[str]) -> Any:
    """Look up a name in a registry; None, with the problem noted, if there is no such entry.

    Args:
        get: lookup function of the registry.
        name: as the job has it.
        key: of the name in the job.
        problems: list to which a problem is added.
    """
    if not isinstance(name, str):
        return None  # missing or not text, which the job's own validation has noted
    try:
        return get(name)
    except JobError as error:
        problems += [f"{key}: {problem}" for problem in error.problems]
        return None


def options_of(
    owner: Any, attribute: str, raw: dict[str, Any], key: str, problems: list[str], place: str = ""
) -> Any:
    """Validate the options that a job gives for a registry's entry; None if they are wrong.

    Args:
        owner: the entry; None has no options.
        attribute: of the entry that holds the options' model.
        raw: values that contain the options.
        key: of the options in these values.
        problems: list to which problems are added.
        place: prefix of the values' keys, if they are not at the job's top level: ``site_models.site-1.``.
    """
    values = raw.get(key, {})
    if owner is None or not isinstance(values, dict):
        return None
    if own := sorted(SITE_RULES.intersection(values)):
        problems += [
            f"{place}{key}.{name}: Expected it to be left out, because it is each site's own rule (in its "
            "`policy`): jobs that differ in it would reveal a single silo's records"
            for name in own
        ]
        return None
    model: type[BaseModel] = getattr(owner, attribute)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems += listed(error, f"{place}{key}.", model)
        return None
