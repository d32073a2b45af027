"""The release profile: every setting that acts on one silo's term before the sum.

Two totals over one cohort that differ in such a setting are two equations in the same silos' terms. A few of
them reveal one silo's term: its update, or the mean and the number of its records of a class. So without
noise a data set has one profile, until a person at the site accepts another.

The weights of the terms are part of it, and the settings that decide how many steps a silo takes for its
number of records: small steps add up to the silo's gradient times a weight given by this number. Where
untrained features are summed by class or as products, their encoder is part of it, and the form of its
inputs: another one gives more equations in the same records; so is the closed form's head whose losses are
summed.

Settings that apply the same function to every silo's records weigh silos, too, once updates are long or many
steps add up: a norm shortens them by the learning rate, FedProx's mu and a weight decay weigh them by steps.
So do settings from pooled statistics, which one silo's false numbers can steer: means, deviations, class
counts. Another seed does not help: its gradients are other functions of the same records, and an attacker
with similar records solves for them from several seeds' totals. No width was found at which seeds are
independent: with 400 similar records, mu 0 and 0.3 / rate, two seeds and half the records drawn, two small
silos' joint update came out to 33 % at width 4,096, 38 % at 64 and 64, 80 % at 8 (61 % from four jobs), where
the whole total, best scaled, is 64 to 96 % off, and with one mu 100 %. Of class sums of features in training
the seed is part of the profile, as the encoder is of frozen ones.

A new option of a job belongs here or does not: ``tests/rounds/sums/test_release.py`` asks for the decision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import compress
from typing import Any

from tightframe.config.job import Training
from tightframe.config.site import SiteEntry
from tightframe.learning import model_update
from tightframe.learning.model_update import UPDATE
from tightframe.learning.one_sum.feature_sums import PREFIX
from tightframe.learning.one_sum.temperature import LOSSES
from tightframe.models.frozen import HEAD, encoder_sha256, is_frozen, tensors_sha256
from tightframe.phases import Field, Phase, Schema, Tensors
from tightframe.rounds.few_records.rule import least_class_values
from tightframe.rounds.job_checks import HEAD_OPTIONS, STANDARDISE_MEAN, STANDARDISE_STD, own_tensors
from tightframe.rounds.moments import PREFIX as STATISTICS
from tightframe.rounds.phases import table_statistics
from tightframe.rounds.riders.class_rules import summed_classes, sums_by_class
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.common import Formed
from tightframe.securesum.site.journal import Profile

FORM_ONLY = frozenset({"image_size", "twin_scale", "drugs", "vocabulary"})
"""Options of data sets that change the form of records, or which twin is generated, but not which records
count.

They are part of a profile's features, not of its records."""

OWN_WEIGHT, DECLARED = "own weight", "as declared"
FEATURES, ENCODER = "features", "encoder"
FEATURES_TRAINED = "features in training"
MOMENTS, COUNTS = "moments", "counts"
LAST_LAYER, LEFT_LAYER = "head", "head that a withdrawal leaves"
SUMMED = "summed records"
COLUMNS = "sums of columns"
TRAINING = "training"
"""Name of the entry on how models are trained; earlier builds had one for each seed, ``training from
...``."""
_UPDATE = UPDATE.rstrip("/")


def release_profile(setup: JobSetup, entry: SiteEntry) -> Profile | None:
    """Return the settings that form a silo's terms in a job; None with differential privacy.

    Args:
        entry: configuration of the site; its policy is resolved as in production.
    """
    job, policy = setup.job, entry.policy.resolve(production=True)
    if job.privacy is not None:
        return None
    if setup.layout is not None:
        profile = {"records": _canonical(_record_options(setup)), "class_rules": job.class_rules}
        profile["statistics"] = f"bins {setup.layout.bins}"
        if ends := setup.layout.ends:
            profile["statistics"] += f", times to {', '.join(f'{end:g}' for end in ends)}"
        profile["own min_class_count"] = f"{policy.class_count(synthetic=False)} patients"
        return tuple(sorted(profile.items()))
    if not setup.trains:  # only an evaluation leaves, as at the closing of any job
        profile = {
            "records": _canonical(_record_options(setup)),
            "class_rules": job.class_rules,
            "score_bins": str(job.evaluation.score_bins),
            "own min_test_count": f"{policy.min_test_count} patients",
        }
        return tuple(sorted(profile.items()))
    phases = tuple(_phases(setup))
    values: dict[str, Any] = {
        "weights": job.weights,
        "update_norm": "none" if job.update_norm is None else f"{job.update_norm:g}",
        "update_bound": _update_bound(job.update_norm, job.update_bound),
        "class_rules": job.class_rules,
        "prototype_sites": "all" if job.prototype_sites is None else ", ".join(sorted(job.prototype_sites)),
        "records": _canonical(_record_options(setup)),
        "steps": _steps(job.training),
        "score_bins": str(job.evaluation.score_bins),
        "own full_batches": "yes" if policy.full_batches else "no",
        "own min_class_count": f"{policy.class_count(synthetic=False)} patients",
        "own offer_prototypes": "yes" if entry.offer_prototypes else "no",
        "own min_test_count": f"{policy.min_test_count} patients",
    }
    if job.weights != "uniform":
        values["max_weight_share"] = f"{job.max_weight_share:g}"
    if updates := _updates(phases):
        values["updates"] = updates
    if sums := _class_sums(setup, phases):
        values["class_sums"] = sums
        if start := _features_trained(setup, phases):
            values[FEATURES_TRAINED] = start
        if least := least_class_values(policy, setup):
            values["own class_values"] = str(least)
        values["site_models"] = _canonical(
            {site: model.model_dump(mode="json") for site, model in sorted(job.site_models.items())}
        )
    if features := _features(setup, phases):
        values[FEATURES] = features
    if setup.method.one_sum is None:
        values[TRAINING] = _training(setup)
    if losses := _losses(setup, phases):
        values["losses"] = losses
    return tuple(sorted(values.items()))


def _training(setup: JobSetup) -> str:
    """Describe the settings of a silo's training that have no entry of their own, except the seed.

    The rounds are included where a method weighs its losses by the share of rounds done. So is a given start,
    which can be the same function as another with layers of other norms, hence other gradients.
    """
    job = setup.job
    more: dict[str, Any] = {}
    if job.initial_model_sha256 is not None:
        more["initial_model_sha256"] = job.initial_model_sha256
    if setup.method.counts_rounds or job.training.loop is not None:
        more["rounds"] = job.rounds
    return _canonical(
        {
            "method": job.method,
            "method_options": setup.setting.config.model_dump(mode="json"),
            "model": job.model,
            "model_options": job.model_options,
            "encoder": job.encoder,
            "inputs": {"shape": setup.setting.input_shape, **_form_options(setup)},
            "start": job.start,
            **more,
            "training": job.training.model_dump(mode="json", exclude={"amp"}),
        }
    )


def _features(setup: JobSetup, phases: Iterable[Phase]) -> str:
    """Describe the untrained features that are summed by class or as products: model, weights, inputs.

    They are those of the closed forms (with ``start`` before any training), and of a frozen encoder.
    """
    job, model = setup.job, model_update.shared_template(setup.setting)
    if not any(_of_unmoved_features(phase.schema, is_frozen(model)) for phase in phases):
        return ""
    # "classes kept": earlier builds did not, so that a site with sums of theirs is asked once.
    options = {name: value for name, value in job.model_options.items() if name not in HEAD_OPTIONS}
    start = (
        (job.initial_model_sha256 or f"seed {job.seed}") if own_tensors(model.state_dict()) else "no weights"
    )
    form = _canonical({"shape": setup.setting.input_shape, **_form_options(setup)})
    return f"{job.model} {_canonical(options)} of {form}, {start}, classes kept"


def _features_trained(setup: JobSetup, phases: Iterable[Phase]) -> str:
    """Name the start of features in training that are summed by class.

    At a small rate they stay those of the start, so that each seed's sums are other equations in a class's
    records: of 10 records of 13 columns at two hospitals 6 were read from four jobs, all from eleven.
    """
    sums = {item.name for phase in phases for item in phase.schema.fields if sums_by_class(item)}
    if all(name.startswith(PREFIX) for name in sums):
        return ""
    sha256 = setup.job.initial_model_sha256
    return f"seed {setup.job.seed}" + ("" if sha256 is None else f" of {sha256}")


def _losses(setup: JobSetup, phases: Iterable[Phase]) -> str:
    """Describe the closed form's head, at whose scores validation records' losses are summed."""
    if not any(item.name == LOSSES for phase in phases for item in phase.schema.fields):
        return ""
    job, solved = setup.job, setup.method if setup.start is None else setup.start
    config = setup.setting.config if setup.start is None else setup.start.config()
    options = {name: job.model_options[name] for name in HEAD_OPTIONS if name in job.model_options}
    return f"{solved.name} {_canonical({**config.model_dump(mode='json'), **options})}"


def with_weight(profile: Profile | None, declared: float, applied: float) -> Profile | None:
    """Return a profile with the weight of this silo's own terms, where a job weighs terms and caps weights.

    A weight that is not lowered follows from the silo's own records. A lowered one follows from others'
    declarations: by changing these one gets two equations under one job's settings.
    """
    if profile is None or not caps_weights(profile):
        return profile
    return tuple(sorted([*profile, (OWN_WEIGHT, DECLARED if applied == declared else repr(applied))]))


def records_name(setup: JobSetup) -> str | None:
    """Return the name of records whose exact sums disclose them if another job's have a few more or fewer.

    Such sums are pooled statistics, a table's statistics, and sums by class or products of features: of
    features in training, too, which at a small rate are the start's. Head, moments and counts change with
    records as well, but are known only once such totals are opened.

    Returns:
        A name for each form in which records enter: another form is another profile by itself. None if the
        job has no such sums, and for a withdrawal, whose rules say how many records may leave.
    """
    if setup.privacy is not None or setup.job.withdraw is not None:
        return None
    if setup.layout is None:
        fields = (item for phase in _phases(setup) for item in phase.schema.fields) if setup.trains else ()
        if not any(
            item.products or sums_by_class(item) or item.name.startswith(STATISTICS) for item in fields
        ):
            return None
    form = _canonical([setup.job.dataset, _record_options(setup), _form_options(setup)])
    return f"{SUMMED} from form {hashlib.sha256(form.encode()).hexdigest()[:16]}"


def columns_summed(setup: JobSetup) -> str | None:
    """Return how a job sums a table's columns: by cell, in statistics, or whole; None if it does neither.

    Statistics withhold small cells. Sums of whole columns over the same records less the cells that are told
    are these cells. Records of other folds, which are in statistics alone, hide them.
    """
    if setup.layout is not None:
        return "by cell"
    of_table = setup.job.dataset == table_statistics.TABLE
    return "whole" if of_table and records_name(setup) is not None else None


def formed_by(setup: JobSetup, schema: Schema, received: Tensors, model: Tensors) -> Formed:
    """Return the settings of a term that the run's state decides: others' flags and numbers enter it.

    - The classes that its sums over classes include: the difference of two totals over other classes is a
      class's part.
    - The state of an untrained encoder, with the mean and deviation of its inputs: another one computes other
      features from the same records.
    - The pooled statistics used in training: the same mean and deviation, which scale gradients and so what a
      norm cuts off, and the counts that weigh classes in a loss.
    - The closed form's head whose losses are summed: with heads that differ a little, a total discloses the
      features of the one record whose loss is not saturated.
    """
    names = setup.dataset.class_names
    by_name = summed_classes(schema, received, len(names))
    formed = {name: tuple(compress(names, classes.tolist())) for name, classes in by_name.items()}
    frozen = is_frozen(model_update.shared_template(setup.setting))
    trained = setup.method.one_sum is None and any(map(_of_records, schema.fields))
    # With a frozen encoder in all exchanges, so that a person is asked before the training, and once.
    schemas = [phase.schema for phase in setup.kinds] if frozen and trained else [schema]
    unmoved = any(_of_unmoved_features(each, frozen) for each in schemas)
    if unmoved:
        formed[ENCODER] = (encoder_sha256(model),)
    if trained:
        pooled = {name: item for name, item in received.items() if name.startswith(STATISTICS)}
        scales = {name: model[name] for name in (STANDARDISE_MEAN, STANDARDISE_STD) if name in model}
        if scales and not (frozen and unmoved):
            formed[MOMENTS] = (tensors_sha256(scales),)
        if pooled:
            formed[COUNTS] = (tensors_sha256(pooled),)
    if LOSSES in schema:
        head = {name: item for name, item in model.items() if name.startswith(HEAD)}
        formed[head_name(setup)] = (tensors_sha256(head),)
    return formed


def head_name(setup: JobSetup) -> str:
    """Return the name of the head whose losses are summed: after a withdrawal another, but no second one."""
    return LAST_LAYER if setup.job.withdraw is None else LEFT_LAYER


def with_formed(profile: Profile | None, formed: Formed) -> Profile | None:
    """Return a profile with the settings that a run's state decides."""
    if profile is None:
        return None
    return tuple(sorted([*profile, *((name, _canonical(values)) for name, values in formed.items())]))


def _of_records(item: Field) -> bool:
    """Return True for fields computed from records in training: all but counts and evaluations."""
    return not item.static or bool(item.products) or sums_by_class(item)


def _of_unmoved_features(schema: Schema, frozen: bool) -> bool:
    """Return True for sums by class, or products, of untrained features."""
    return any(
        (item.products or sums_by_class(item)) and (frozen or item.name.startswith(PREFIX))
        for item in schema.fields
    )


def caps_weights(profile: Profile) -> bool:
    """Return True if a job of this profile weighs terms and caps the weights."""
    return any(name == "max_weight_share" for name, _ in profile)


def _phases(setup: JobSetup) -> Iterable[Phase]:
    """Yield the phases of the whole run: a resumed job has the same profile as the one it continues."""
    yield from setup.statistics_phases()
    yield from setup.kinds
    for number in range(2, setup.job.rounds + 1):
        yield from setup.training_phases(number)


def _class_sums(setup: JobSetup, phases: Iterable[Phase]) -> str:
    """Describe how class sums are formed: by the method and its options, or of frozen features, all alike.

    The closed forms of frozen features are computed from the totals, so that their options change no term.
    """
    names = {item.name for phase in phases for item in phase.schema.fields if sums_by_class(item)}
    frozen = {name for name in names if name.startswith(PREFIX)}
    method = f"{setup.job.method} {_canonical(setup.setting.config.model_dump(mode='json'))}"
    return " and ".join([*([method] if names - frozen else []), *(["of frozen features"] if frozen else [])])


def _updates(phases: Iterable[Phase]) -> str:
    """Describe the form in which trained values enter the sum: an update or another, weighted or not."""
    entered = {
        item.name.partition("/")[0]: "weighted" if item.weighted else "as it is"
        for phase in phases
        for item in phase.schema.fields
        if not item.static
    }
    kinds = [_UPDATE] if _UPDATE in entered else sorted(entered)
    return ", ".join(f"{kind} {entered[kind]}" for kind in kinds)


def _steps(training: Training) -> str:
    """Describe the number of steps that a silo takes for its records, and the weights of their gradients.

    Plain steps count alike, so that more epochs multiply every silo's update by the same number. Only the
    author of a site's training loop knows its use of an option: all options count.
    """
    if training.loop is not None:
        return f"own loop {_canonical(training.model_dump(mode='json'))}"
    if training.optimizer == "sgd" and not training.momentum:
        return f"batches of {training.batch_size}"
    how = f"momentum {training.momentum:g}" if training.optimizer == "sgd" else training.optimizer
    return f"batches of {training.batch_size}, epochs {training.epochs}, {how}"


def _update_bound(norm: float | None, bound: float) -> str:
    """Describe the bound of an update's coordinates: within a norm none is larger than the norm."""
    return "as the norm" if norm is not None and norm <= bound else f"{bound:g}"


def _record_options(setup: JobSetup) -> dict[str, Any]:
    """Return the data set's options that decide which records of a silo count, and how often."""
    options = setup.dataset_options.model_dump(mode="json")
    return {name: value for name, value in options.items() if name not in FORM_ONLY}


def _form_options(setup: JobSetup) -> dict[str, Any]:
    """Return the data set's options that decide the form in which a model gets each record."""
    options = setup.dataset_options.model_dump(mode="json")
    return {name: value for name, value in options.items() if name in FORM_ONLY}


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
