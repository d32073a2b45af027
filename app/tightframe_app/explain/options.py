"""Topics of ``tightframe explain``, from the docstrings of the values' models."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from tightframe import data, methods, models
from tightframe.config import job, site
from tightframe.config.policy import Policy
from tightframe.config.profiles import PROFILES
from tightframe.data import DATASETS, DatasetSpec, contract
from tightframe.data.images.contract import Augment, Picture, Window
from tightframe.methods import METHODS
from tightframe.models import BACKBONES, BackboneSpec
from tightframe.options import meanings
from tightframe.phases import Method
from tightframe.results import local_report, model_card, outcome, rows, statistics
from tightframe.results.parts.ranges import UpdateNorms
from tightframe.results.status import Status
from tightframe_app.explain import topics
from tightframe_app.explain.topics import Topic, Value


def topic(name: str, model: type[BaseModel], prefix: str = "", about: str = "") -> Topic:
    """Return the topic of a model's values.

    Args:
        model: with a docstring, or descriptions, for each field.
        about: replaces the docstring's first line.
    """
    texts = meanings(model)
    texts |= {
        key: texts.get(key, "") + _choices(field.annotation, texts.get(key, ""))
        for key, field in model.model_fields.items()
    }
    values = tuple(
        Value(
            prefix + key,
            "required" if field.is_required() else _default(field.get_default()),
            texts.get(key, ""),
        )
        for key, field in model.model_fields.items()
    )
    return Topic(name, about or _first(model), values)


def _choices(annotation: Any, meaning: str) -> str:
    """Return the possible names, unless the meaning has them all.

    >>> _choices(Literal["a", "b"] | None, "`a`: the first."), _choices(Literal["a"], "`a`: all.")
    (' One of `a`, `b`.', '')
    """
    kinds = [annotation, *get_args(annotation)]
    names = [f"`{name}`" for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    return "" if all(name in meaning for name in names) else f" One of {', '.join(names)}."


def _default(value: Any) -> str:
    """Return a default in the guides' notation.

    >>> [_default(value) for value in (None, True, (32, 64), {}, 1e-5)]
    ['null', 'true', '32, 64', 'none', '1e-05']
    """
    if isinstance(value, BaseModel):
        return "a block"
    if value is None:
        return "null"
    if value in ((), [], {}):
        return "none"
    if isinstance(value, tuple | list):
        return ", ".join(map(_default, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _policy() -> Topic:
    """Return a site's rules, each with its value in every profile, or their common one."""
    texts = meanings(Policy)
    rules = []
    for name in Policy.model_fields:
        if name == "profile":
            continue
        values = [profile[name] for profile in PROFILES.values()]
        shown = [_default(value) for value in values]
        rules.append(
            Value(
                f"policy.{name}", shown[0] if len(set(shown)) == 1 else "; ".join(shown), texts.get(name, "")
            )
        )
    about = f"A site's rules, with their values in the profiles ({'; '.join(PROFILES)})."
    return Topic("policy", about, tuple(rules))


def computed() -> dict[str, list[Topic]]:
    """Return all our topics by kind, for ``tightframe_app.kept``."""
    return {
        topics.BLOCKS: _blocks(),
        topics.CONTRACTS: _contracts(),
        topics.STATUS: [_status()],
        topics.RESULTS: _results(),
        topics.METHODS: [_method(item) for item in METHODS],
        topics.MODELS: [_model(item) for item in BACKBONES],
        topics.DATA: [_data(item.load()) for item in DATASETS],
    }


def of_package(kind: str, name: str) -> Topic:
    """Return the options of an installed package's method, model or data set.

    Args:
        kind: ``topics.METHODS``, ``MODELS`` or ``DATA``.
    """
    if kind == topics.METHODS:
        return _method(methods.get(name))
    return _model(models.get(name)) if kind == topics.MODELS else _data(data.get(name))


def _blocks() -> list[Topic]:
    """Return the topics of a job's and a site's values."""
    of_job: dict[str, type[BaseModel]] = {
        "training": job.Training,
        "evaluation": job.Evaluation,
        "privacy": job.Privacy,
        "evaluate_only": job.EvaluateOnly,
        "statistics": job.Statistics,
        "withdraw": job.Withdraw,
        "resume": job.Resume,
    }
    return [
        topic("job", job.JobConfig),
        *(topic(name, model, f"{name}.") for name, model in of_job.items()),
        topic("site", site.SiteEntry),
        topic("server", site.ServerEntry, "server."),
        _policy(),
    ]


def _contracts() -> list[Topic]:
    """Return the topics of a table's contract, and of the picture in a contract of pictures."""
    of_contract: dict[str, type[BaseModel]] = {
        "columns": contract.Column,
        "label": contract.Label,
        "label.classes": contract.Class,
        "label.findings": contract.FindingColumn,
        "fold": contract.Folds,
        "survival": contract.Survival,
    }
    of_picture: dict[str, type[BaseModel]] = {
        "picture": Picture,
        "picture.window": Window,
        "picture.augment": Augment,
    }
    table = topic("contract", contract.Contract)
    inner = [topic(name, model, f"{name}.").values for name, model in of_contract.items()]
    of_pictures = [topic(name, model, f"{name}.").values for name, model in of_picture.items()]
    return [
        replace(table, values=(*table.values, *chain.from_iterable(inner))),
        Topic("picture", _first(Picture), tuple(chain.from_iterable(of_pictures))),
    ]


def _method(method: Method) -> Topic:
    return topic(method.name, method.config, about=f"The method {method.title}.")


def _model(model: BackboneSpec) -> Topic:
    return topic(model.name, model.options, about=f"The model `{model.name}`. {_first(model.options)}")


def _data(spec: DatasetSpec) -> Topic:
    of_job = topic(spec.name, spec.options, "dataset_options.")
    of_site = topic(spec.name, spec.site, f"data.{spec.name}.")
    about = f"The data set {spec.title}: `dataset_options` of a job, and a site's entry in `data`."
    return Topic(spec.name, about, (*of_job.values, *of_site.values))


def _status() -> Topic:
    """Return the topic of a run's status in ``tightframe watch`` and consoles."""
    shown = topic("status", Status, about="What can be seen of a run while it goes on.")
    keys = tuple(replace(value, default="") for value in shown.values if value.name != "format")
    return replace(shown, values=keys)


def _results() -> list[Topic]:
    """Return the topics of keys in a run's files whose names do not explain them."""
    kinds: dict[str, dict[str, type[BaseModel]]] = {
        "outcome.json": {"": outcome.Outcome, "personal.": outcome.Personal},
        "metrics.jsonl": {"": rows.Row, "update_norms.": UpdateNorms},
        "model.json": {"": model_card.Card},
        "local_report.json": {
            "": local_report.SiloReport,
            "personal.": local_report.SiloPersonal,
            "privacy.": local_report.SiloPrivacy,
            "disclosed.": local_report.Disclosure,
        },
        "statistics.json": {"": statistics.TableStatistics, "columns.classes.counts.": statistics.Count},
    }
    return [
        Topic(
            name,
            f"Keys of `{name}`.",
            tuple(
                replace(value, default="")
                for prefix, model in parts.items()
                for value in topic(name, model, prefix).values
                if value.means and value.name != "format"
            ),
        )
        for name, parts in kinds.items()
    ]


def _first(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").partition("\n")[0].replace("``", "`")
