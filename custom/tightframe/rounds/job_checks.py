"""Checks of a job's parts against each other: one for each pair that may be incompatible.

A check lists problems, each beginning with the value's place in the job; ``setup.prepare`` raises them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tightframe import methods, models
from tightframe.errors import ContributionError, JobError, TooLargeError
from tightframe.learning import model_update
from tightframe.models.frozen import HEAD
from tightframe.phases import Method, Schema, Setting
from tightframe.rounds import codec

if TYPE_CHECKING:
    from tightframe.config.policy import Ceilings
    from tightframe.rounds.setup import JobSetup

HEAD_OPTIONS = ("dropout", "head_bias", "single_logit")
"""Options of backbones that affect only the backbone's own head."""
STANDARDISE_MEAN, STANDARDISE_STD = "standardise.mean", "standardise.std"
"""Parameters of a model that standardises its inputs; they never train."""


def _evaluate_only(setup: JobSetup) -> list[str]:
    """Refuse to evaluate a model of the server's where the method has none."""
    if setup.job.evaluate_only is None or setup.method.own_model is None:
        return []
    return [f"evaluate_only: {setup.method.name} has no global model: silos evaluate their own in its runs"]


def _own_loop(setup: JobSetup) -> list[str]:
    """Refuse a site's training loop with a method that consists of its local training.

    Each site knows its loops (``config.site.check_training_loop``).
    """
    method = setup.method
    if setup.job.training.loop is None:
        return []
    if method.own_training is None:
        able = ", ".join(item.name for item in methods.METHODS if item.own_training is not None)
        return [
            f"training.loop: {method.name} trains in a way of its own, which no loop replaces; "
            f"these allow one: {able}"
        ]
    reason = method.own_training(setup.setting.config)
    return [] if reason is None else [f"training.loop: not possible with {method.name}: {reason}"]


def _plain_sums(setup: JobSetup) -> list[str]:
    """Refuse plain sums that disclose of a silo what the class rules withhold."""
    method = setup.method
    if setup.job.summation != "plain" or method.needs_secure_sums is None:
        return []
    reason = method.needs_secure_sums(setup.setting.config)
    return [] if reason is None else [f"summation: Expected 'secure', got 'plain': {reason}"]


def _findings(setup: JobSetup) -> list[str]:
    """Refuse options that need one class per record where records have several findings."""
    job, method = setup.job, setup.method
    if not setup.dataset.multi_label or job.statistics is not None:
        return []
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
    return problems


def _encoder(setup: JobSetup) -> list[str]:
    """Refuse a frozen encoder without weights of its own, or with a method that trains nothing then."""
    job, method = setup.job, setup.method
    problems = []
    for site, setting in [("", setup.setting), *sorted(setup.site_settings.items())]:
        try:
            model = model_update.shared_template(setting)
        except (ValueError, TypeError):
            continue  # cannot be built, which the check of the sums reports
        if not models.is_frozen(model):
            continue
        name = job.model_at(site).model
        if method.needs_encoder:
            problems.append(f"encoder: {name} is frozen, but {method.name} {method.needs_encoder}")
        elif not model_update.trained_parameters(model):
            problems.append(f"encoder: {name} is frozen, and {method.name}'s head has nothing that trains")
        if job.encoder == "frozen" and own_tensors(model.state_dict()) and job.initial_model_sha256 is None:
            problems.append(
                f"encoder: Expected a pretrained start (`initial_model_sha256`) for a frozen {name}, whose "
                "weights are random without it; name one, or set `encoder` to 'random' if that is wanted"
            )
    if job.encoder == "random" and job.initial_model_sha256 is not None:
        problems.append("encoder: Expected 'frozen' with a pretrained start, but got 'random'")
    return list(dict.fromkeys(problems))


def own_tensors(names: Iterable[str]) -> set[str]:
    """Return the names of an encoder's own tensors: all but the head's, and moments, which totals give."""
    moments = {STANDARDISE_MEAN, STANDARDISE_STD}
    return {name for name in names if not name.startswith(HEAD)} - moments


def _start(setup: JobSetup) -> list[str]:
    """Refuse a start whose head the method or the model cannot take."""
    if setup.start is None:
        return []
    start, method = setup.start.name, setup.method
    if method.own_model is not None:
        return [f"start: {method.name} has no global model, whose head it would set"]
    try:
        if brings_head(method, setup.setting):
            return [
                f"start: {method.name} has a head of its own, which is not the linear one that {start} sets; "
                "leave `start` out, or choose a method with the model's own head (fedavg)"
            ]
        setup.before_phases()
    except ValueError as error:
        return [f"start: {error}"]
    return []


def _withdrawal(setup: JobSetup) -> list[str]:
    """Refuse a withdrawal from a run whose model is not a function of sums over its records alone."""
    if setup.job.withdraw is None:
        return []
    problems, method = [], setup.method
    advice = "start a new job without the records instead"
    if method.withdraw is None:
        able = ", ".join(item.name for item in methods.METHODS if item.withdraw is not None)
        problems.append(
            f"withdraw: {method.name} trains step by step, and no record can be taken out of what comes of "
            f"that; it can with {able}; {advice}"
        )
    if setup.statistics_phases():
        problems.append(
            "withdraw: not possible with `model_options.standardise`, because every record's features depend "
            f"on the moments of all records; {advice}"
        )
    if getattr(setup.dataset_options, "oversample_minority", False):
        problems.append(
            "withdraw: not possible with `dataset_options.oversample_minority`, because how often a record "
            f"counts depends on all records; {advice}"
        )
    return problems


def views(setup: JobSetup) -> list[str]:
    """List the reasons why several views of a record would all be the same."""
    problems = []
    if not setup.dataset.augments:
        problems.append(
            f"views are augmented ones, but {setup.dataset.title} augments nothing: leave it at 1"
        )
    if not setup.job.training.augment:
        problems.append("views are augmented ones: set training.augment to true, or leave it at 1")
    return problems


def check_parts(setup: JobSetup) -> None:
    """Refuse a job whose parts are incompatible.

    Raises:
        JobError: TF-101, naming each problem of every check.
    """
    _refuse(problem for check in CHECKS for problem in check(setup))


def check_models(setup: JobSetup) -> None:
    """Refuse models that do not fit the method; after ``check_sums``, which reports what cannot be built.

    Raises:
        JobError: TF-101, naming each problem of every check.
    """
    _refuse(problem for check in MODEL_CHECKS for problem in check(setup))


def _refuse(problems: Iterable[str]) -> None:
    if listed := list(problems):
        raise JobError(listed)


def check_sums(setup: JobSetup, ceilings: Ceilings) -> None:
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


def _without_global_model(setup: JobSetup) -> list[str]:
    """Refuse options that need a global model where the method has none."""
    if setup.method.own_model is None:
        return []
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
    if standardises(setup.setting):
        problems.append(_no_moments("model_options", setup.method))
    known: dict[int, list[str]] = {}  # by setting; silos with the same model share one
    for site, setting in sorted(setup.site_settings.items()):
        if id(setting) not in known:
            known[id(setting)] = _site_model_problems(setup, setting, setup.job.model_at(site).model)
        problems += [f"site_models.{site}{problem}" for problem in known[id(setting)]]
    return problems


def _site_model_problems(setup: JobSetup, setting: Setting, name: str) -> list[str]:
    """List the reasons why a silo's own model cannot be built or does not match the job's sums."""
    try:
        width, sums = _width(setting), _schemas(setup, setting)
    except (ValueError, TypeError) as error:
        return [f".model: {error}"]
    problems = []
    if standardises(setting):
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


def standardises(setting: Setting) -> bool:
    """Check whether a setting's model standardises its inputs."""
    return STANDARDISE_MEAN in dict(model_update.shared_template(setting).named_parameters())


def _width(setting: Setting) -> int:
    return model_update.shared_width(setting)


def _schemas(setup: JobSetup, setting: Setting) -> list[Schema]:
    """Return the schemas of a method's sums with a setting's model."""
    own = replace(setup, setting=setting)
    return [item.schema for item in (*own.before_phases(), *own.training_phases(1), *own.after_phases())]


def _head(setup: JobSetup) -> list[str]:
    """Refuse options of the backbone's head where the method has a head of its own."""
    options = sorted(name for name in HEAD_OPTIONS if setup.job.model_options.get(name))
    if not options or not brings_head(setup.method, setup.setting):
        return []
    return [
        f"model_options.{name}: {setup.method.name} has a head of its own, without it" for name in options
    ]


def brings_head(method: Method, setting: Setting) -> bool:
    """Check whether a method, with its options in this setting, replaces the backbone's head."""
    if method.head is None:
        return False
    return method.head(setting.config, _width(setting), setting.num_classes) is not None


CHECKS = (
    _evaluate_only,
    _own_loop,
    _plain_sums,
    _findings,
    _encoder,
    _start,
    _withdrawal,
)
MODEL_CHECKS = (_without_global_model, _head)
