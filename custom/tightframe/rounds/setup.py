"""A validated job together with the method, data set and model that it names.

Only this module turns names of a job into objects. It looks them up in the registries and imports nothing
that a job names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from tightframe import data, methods, models
from tightframe.config.job import STATISTICS_METHOD, JobConfig, check_job
from tightframe.config.policy import Ceilings
from tightframe.data.base import DatasetSpec
from tightframe.data.table.tabulated import Layout
from tightframe.errors import ContributionError, JobError, TooLargeError
from tightframe.learning import iterate_average, model_update
from tightframe.models.build_limit import build_within
from tightframe.models.frozen import HEAD
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
from tightframe.rounds import codec, privacy_plan
from tightframe.rounds.phases import statistics, table_statistics
from tightframe.rounds.plan import RunPlan
from tightframe.rounds.privacy_plan import PrivacyPlan

STANDARDISE_MEAN, STANDARDISE_STD = "standardise.mean", "standardise.std"
"""Parameters of a model that standardises its inputs; they never train."""
CEILINGS = Ceilings()
HEAD_OPTIONS = ("dropout", "head_bias", "single_logit")
"""Options of backbones that affect only the backbone's own head."""


@dataclass(frozen=True)
class JobSetup:
    """Everything that server and silos derive from a job alone.

    Attributes:
        job: validated.
        method: of the job.
        dataset: of the job.
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
        """Check whether the job makes a model, rather than evaluating one or summing statistics only."""
        return self.job.evaluate_only is None and self.job.statistics is None

    @cached_property
    def layout(self) -> Layout | None:
        """The cells of a job with ``statistics``; None in others."""
        if self.job.statistics is None:
            return None
        options = self.dataset.options.model_validate(self.job.dataset_options)
        return table_statistics.layout_of(self.dataset.name, options, self.job.statistics.bins)

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

        In a job with ``statistics`` they are all that it has.
        """
        if self.layout is not None:
            return table_statistics.phases(self.layout, private=self.job.privacy is not None)
        if not self.trains:
            return ()  # what they would give is in the model
        names = self.method.statistics(self.setting) if self.method.statistics else ()
        if _standardises(self.setting):
            names = names if "feature_moments" in names else (*names, "feature_moments")
        made = statistics.phases(self.setting, names, class_rules=self.job.class_rules == "on")
        if not made:
            return ()
        last = made[-1]

        def update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
            return self._standardised(last.update(state, totals, cohort))

        return (*made[:-1], replace(last, update=update))

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
        return self.method.rounded or (self.start is not None and self.start.rounded)

    def first_phases(self) -> tuple[Phase, ...]:
        """Return the phases before round 1 in this job: ``before_phases``, or those of a withdrawal."""
        withdraw = self.job.withdraw
        if withdraw is None or self.method.withdraw is None:
            return self.before_phases()
        asked = Withdrawal(
            withdraw.state_sha256, withdraw.min_withdrawn, by_class=self.job.class_rules == "on"
        )
        return self.method.withdraw(self.setting, asked)

    def after_phases(self) -> tuple[Phase, ...]:
        """Return the method's phases between the last round and the closing."""
        return self.method.after(self.setting) if self.method.after and self.trains else ()

    @property
    def evaluates(self) -> bool:
        """Check whether the run sums evaluations, which under privacy it does only with noise."""
        if self.job.statistics is not None:
            return False
        return self.job.privacy is None or self.job.privacy.evaluation == "noisy"

    def evaluates_in(self, number: int) -> bool:
        """Check whether a training round evaluates the model that it begins with."""
        if self.privacy is None:
            return self.evaluates
        return self.privacy.evaluation is not None and self.privacy.evaluation.in_round(number)


def prepare(values: dict[str, Any] | JobConfig, ceilings: Ceilings = CEILINGS) -> JobSetup:
    """Validate a whole job: its values, the names that it uses, their options, its sums.

    Args:
        values: of the job.
        ceilings: limits on what is built or planned.

    Raises:
        JobError: listing every problem at once.
        TooLargeError: TF-632.
    """
    setup, options = _assemble(values, ceilings)
    job = setup.job
    _check_evaluate_only(setup)
    _check_own_loop(setup)
    _check_plain_sums(setup)
    _check_findings(setup)
    _ = setup.layout  # refuses a data set whose statistics nobody can sum
    _check_encoder(setup)
    _check_start(setup)
    _check_withdrawal(setup, options)
    if job.privacy is not None:
        setup = _with_privacy(setup)
    _check_sums(setup, ceilings)
    _check_without_global_model(setup)
    _check_head(setup, job.model_options)
    return setup


def assemble(values: dict[str, Any] | JobConfig, ceilings: Ceilings = CEILINGS) -> JobSetup:
    """Join a job with what it names, without checks of its sums and without a plan of privacy.

    For whoever uses a model of an ended run and starts none.

    Args:
        values: of the job.
        ceilings: limits on what is built.

    Raises:
        JobError: listing values, names and options that are wrong.
    """
    setup, _ = _assemble(values, ceilings)
    return setup


def _assemble(values: dict[str, Any] | JobConfig, ceilings: Ceilings) -> tuple[JobSetup, BaseModel]:
    """Return the setup of a job's values, and the options of its data set."""
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

    def build(backbone: models.BackboneSpec, options: BaseModel) -> torch.nn.Module:
        return build_within(partial(build_any_size, backbone, options), ceilings.parameters)

    def build_any_size(backbone: models.BackboneSpec, options: BaseModel) -> torch.nn.Module:
        model = backbone.build(options, input_shape, dataset.num_classes)
        head = method.head and method.head(config, models.feature_width(model), dataset.num_classes)
        if head is not None:
            model.head = head
        if backbone.frozen or job.encoder != "trained":
            models.freeze(model)
        return model if job.normalisation is None else make_private(model, job.normalisation)

    setting = Setting(
        config=config,
        num_classes=dataset.num_classes,
        input_shape=input_shape,
        build_model=partial(build, backbone, model_options),
        local=job.training,
        update_norm=job.update_norm,
        update_bound=job.update_bound,
        privacy=privacy_plan.public_setting(job),
        findings=dataset.multi_label,
    )
    shared: dict[str, Setting] = {}  # one setting for all silos with the same model
    own = {
        site: shared.setdefault(repr(other), replace(setting, build_model=partial(build, *other)))
        for site, other in others.items()
    }
    return JobSetup(job, method, dataset, setting, site_settings=own, start=start), dataset_options


def _method(name: str) -> Method:
    """Look up a method; that of a job with ``statistics``, which has none, is in no registry."""
    return table_statistics.METHOD if name == STATISTICS_METHOD else methods.get(name)


def _site_models(method: Method | None, raw: Any, problems: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return backbone and options of each site model, and note what is wrong with them."""
    if not isinstance(raw, dict) or not raw:
        return {}  # the job's own validation has refused what is no mapping
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
    """Return the method that a job starts with, and note what is wrong with it."""
    if not isinstance(raw, str):
        return None  # none, or refused by the job's own validation
    if (start := look_up(methods.get, raw, "start", problems)) is not None and start.start is None:
        able = ", ".join(item.name for item in methods.METHODS if item.start is not None)
        problems.append(f"start: {raw} is no closed form that sets a head; these are: {able}")
    return start if start is not None and start.start is not None else None


def _check_start(setup: JobSetup) -> None:
    """Refuse a start whose head the method or the model cannot take.

    Raises:
        JobError: TF-101.
    """
    if setup.start is None:
        return
    start, method, problem = setup.start.name, setup.method, None
    if method.own_model is not None:
        problem = f"{method.name} has no global model, whose head it would set"
    elif brings_head(method, setup.setting):
        problem = (
            f"{method.name} has a head of its own, which is not the linear one that {start} sets; leave "
            "`start` out, or choose a method with the model's own head (fedavg)"
        )
    else:
        try:
            setup.before_phases()
        except ValueError as error:
            problem = str(error)
    if problem is not None:
        raise JobError([f"start: {problem}"])


def _check_evaluate_only(setup: JobSetup) -> None:
    """Refuse to evaluate a model of the server's where the method has none.

    Raises:
        JobError: TF-101.
    """
    if setup.job.evaluate_only is not None and setup.method.own_model is not None:
        raise JobError(
            [f"evaluate_only: {setup.method.name} has no global model: silos evaluate their own in its runs"]
        )


def _check_own_loop(setup: JobSetup) -> None:
    """Refuse an own training loop with a method whose local training is the method.

    Which loops there are, each site knows (``config.site.check_training_loop``).

    Raises:
        JobError: TF-101.
    """
    method = setup.method
    if setup.job.training.loop is None:
        return
    if method.own_training is None:
        able = ", ".join(item.name for item in methods.METHODS if item.own_training is not None)
        raise JobError(
            [
                f"training.loop: {method.name} trains in a way of its own, which no loop replaces; "
                f"these allow one: {able}"
            ]
        )
    if (reason := method.own_training(setup.setting.config)) is not None:
        raise JobError([f"training.loop: not possible with {method.name}: {reason}"])


def _check_plain_sums(setup: JobSetup) -> None:
    """Refuse plain sums of what tells of a silo what the class rules withhold.

    Raises:
        JobError: TF-101.
    """
    method = setup.method
    if setup.job.summation != "plain" or method.needs_secure_sums is None:
        return
    if (reason := method.needs_secure_sums(setup.setting.config)) is not None:
        raise JobError([f"summation: Expected 'secure', got 'plain': {reason}"])


def _check_findings(setup: JobSetup) -> None:
    """Refuse what needs the one class of each record where records have several findings.

    Raises:
        JobError: TF-101, naming each reason.
    """
    job, method = setup.job, setup.method
    if not setup.dataset.multi_label or job.statistics is not None:
        return
    problems = []
    if setup.trains:
        reason = "it needs the one class of each record"
        if method.findings is not None:
            reason = method.findings(setup.setting.config) or ""
        if reason:
            able = ", ".join(
                item.name
                for item in methods.METHODS
                if item.findings is not None and item.findings(item.config()) is None
            )
            problems.append(
                f"method: {method.name} does not take records of several findings, because {reason}; these "
                f"do: {able}"
            )
    if job.start is not None:
        problems.append(f"start: {job.start} sums features by the one class of each record; leave it out")
    if job.model_options.get("single_logit"):
        problems.append("model_options.single_logit: findings have a logit each; leave it out")
    if problems:
        raise JobError(problems)


def _network_problems(
    raw: dict[str, Any], method: Method | None, backbone: models.BackboneSpec | None
) -> list[str]:
    """List what of a job needs features of a network that returns logits only."""
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


def _check_withdrawal(setup: JobSetup, dataset_options: Any) -> None:
    """Refuse a withdrawal from a run whose model is no function of sums over its records alone.

    Raises:
        JobError: TF-101, naming each reason.
    """
    if setup.job.withdraw is None:
        return
    problems, method = [], setup.method
    again = "start a new job without the records instead"
    if method.withdraw is None:
        able = ", ".join(item.name for item in methods.METHODS if item.withdraw is not None)
        problems.append(
            f"withdraw: {method.name} trains step by step, and no record can be taken out of what comes of "
            f"that; it can with {able}; {again}"
        )
    if setup.statistics_phases():
        problems.append(
            "withdraw: not possible with `model_options.standardise`, because every record's features depend "
            f"on the moments of all records; {again}"
        )
    if getattr(dataset_options, "oversample_minority", False):
        problems.append(
            "withdraw: not possible with `dataset_options.oversample_minority`, because how often a record "
            f"counts depends on all records; {again}"
        )
    if problems:
        raise JobError(problems)


def make_private(model: torch.nn.Module, form: Any) -> torch.nn.Module:
    """Call ``privacy.training.normalisation.make_private``, imported only where a job has privacy."""
    from tightframe.privacy.training import normalisation

    return normalisation.make_private(model, form)


def _with_privacy(setup: JobSetup) -> JobSetup:
    """Return the setup with its privacy plan.

    Raises:
        JobError: TF-101, naming each field or option that no mechanism protects.
    """
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
        reasons += _views_problems(setup)
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


def _views_problems(setup: JobSetup) -> list[str]:
    """List the reasons why several views of a record would all be the same."""
    problems = []
    if not setup.dataset.augments:
        problems.append(
            f"views are augmented ones, but {setup.dataset.title} augments nothing: leave it at 1"
        )
    if not setup.job.training.augment:
        problems.append("views are augmented ones: set training.augment to true, or leave it at 1")
    return problems


def _without_losses(phase: Phase) -> Phase:
    """Return a phase without the silos' losses, which are exact statistics of records."""
    fields = tuple(item for item in phase.schema.fields if not item.name.startswith(model_update.TRAINING))

    def contribute(silo: SiloView, broadcast: Tensors, state: Tensors) -> Contribution:
        made = phase.contribute(silo, broadcast, state)
        names = {item.name for item in fields}
        return replace(made, tensors={name: item for name, item in made.tensors.items() if name in names})

    return replace(phase, schema=Schema(fields), contribute=contribute)


def set_threads(threads: int) -> None:
    """Set torch's intra-op threads, which are part of the job because they change the last bits of a run."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _check_sums(setup: JobSetup, ceilings: Ceilings) -> None:
    """Refuse sums that exceed a ceiling or could wrap around.

    Of the training rounds, the first two and the first with a release are checked.

    Raises:
        JobError: TF-101.
        TooLargeError: TF-632.
    """
    job, plan = setup.job, setup.plan
    releases = setup.privacy.releases if setup.privacy is not None else ()
    first = job.done + 1
    numbers = {first, min(first + 1, job.rounds), *[number for number in releases if number >= first][:1]}
    try:
        exchanges = (
            *plan.beginning(),
            *(exchange for number in sorted(numbers) for exchange in plan.round(number)),
            *plan.ending(),
        )
        most = ceilings.message_bytes
        for exchange in exchanges:
            schema = exchange.phases[0].schema
            size = sum(item.bytes for item in schema.fields)
            if most is not None and size > most:
                raise TooLargeError("max_message_bytes", f"terms of {size} bytes", most)
            codec.check_schema(schema, len(job.sites))
    except ContributionError as error:
        raise JobError([str(error)]) from None
    except (ValueError, TypeError) as error:
        raise JobError([f"the method cannot be planned with these options: {error}"]) from None


def _check_without_global_model(setup: JobSetup) -> None:
    """Refuse what needs a global model where the method has none.

    Raises:
        JobError: TF-101, naming each setting.
    """
    if setup.method.own_model is None:
        return
    problems = []
    if setup.job.average_last > 1:
        problems.append(
            f"average_last: {setup.method.name} has no global model, of which a mean could be kept"
        )
    if setup.job.local_baseline_epochs:
        problems.append(
            f"local_baseline_epochs: {setup.method.name} has no global model from which such a baseline "
            "would start"
        )
    if _standardises(setup.setting):
        problems.append(_no_moments("model_options", setup.method))
    known: dict[int, list[str]] = {}  # by setting, which silos with the same model share
    for site, setting in sorted(setup.site_settings.items()):
        if id(setting) not in known:
            known[id(setting)] = _site_model_problems(setup, setting, setup.job.model_at(site).model)
        problems += [f"site_models.{site}{problem}" for problem in known[id(setting)]]
    if problems:
        raise JobError(problems)


def _site_model_problems(setup: JobSetup, setting: Setting, name: str) -> list[str]:
    """List the reasons why a silo's own model cannot be built or does not match the job's sums."""
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
    """Return the schemas of a method's sums with a setting's model."""
    own = replace(setup, setting=setting)
    return [item.schema for item in (*own.before_phases(), *own.training_phases(1), *own.after_phases())]


def _check_head(setup: JobSetup, model_options: dict[str, Any]) -> None:
    """Refuse options of the backbone's head where the method has a head of its own.

    Raises:
        JobError: TF-101, naming each option.
    """
    options = sorted(name for name in HEAD_OPTIONS if model_options.get(name))
    if options and brings_head(setup.method, setup.setting):
        reason = f"{setup.method.name} has a head of its own, without it"
        raise JobError([f"model_options.{name}: {reason}" for name in options])


def _check_encoder(setup: JobSetup) -> None:
    """Refuse a frozen encoder without weights of its own, or with a method that trains nothing then.

    Raises:
        JobError: TF-101, naming each setting.
    """
    job, method = setup.job, setup.method
    problems = []
    for site, setting in [("", setup.setting), *sorted(setup.site_settings.items())]:
        try:
            model = model_update.shared_template(setting)
        except (ValueError, TypeError):
            continue  # cannot be built, which the check of the sums tells
        if not models.is_frozen(model):
            continue
        name = job.model_at(site).model
        if method.needs_encoder:
            problems.append(f"encoder: {name} is frozen, but {method.name} {method.needs_encoder}")
        elif not model_update.trained_parameters(model):
            problems.append(f"encoder: {name} is frozen, and {method.name}'s head has nothing that trains")
        fixed = {key for key in model.state_dict() if not key.startswith(HEAD)}
        drawn = fixed - {STANDARDISE_MEAN, STANDARDISE_STD}
        if job.encoder == "frozen" and drawn and job.initial_model_sha256 is None:
            problems.append(
                f"encoder: Expected a pretrained start (`initial_model_sha256`) for a frozen {name}, whose "
                "weights are random without it; name one, or set `encoder` to 'random' if that is wanted"
            )
    if job.encoder == "random" and job.initial_model_sha256 is not None:
        problems.append("encoder: Expected 'frozen' with a pretrained start, but got 'random'")
    if problems:
        raise JobError(list(dict.fromkeys(problems)))


def brings_head(method: Method, setting: Setting) -> bool:
    """Check whether a method, with its options in this setting, replaces the backbone's head."""
    if method.head is None:
        return False
    return method.head(setting.config, _width(setting), setting.num_classes) is not None


SITE_RULES = frozenset({"min_class_count"})
"""Rules of a site whose names no option of a job may have, so that no method takes them from a job."""


def look_up(get: Any, name: Any, key: str, problems: list[str]) -> Any:
    """Look up a name in a registry; None, with the problem noted, if there is no such entry.

    Args:
        get: lookup function of the registry.
        name: as the job has it.
        key: of the name in the job.
        problems: list to which a problem is added.
    """
    if not isinstance(name, str):
        return None  # missing or no text, which the job's own validation has noted
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
