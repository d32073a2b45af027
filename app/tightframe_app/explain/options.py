"""Names, defaults and meanings of values, from the docstrings of the models that hold them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel

from tightframe.options import did_you_mean, meanings

if TYPE_CHECKING:
    from tightframe.data import DatasetSpec
    from tightframe.models import BackboneSpec
    from tightframe.phases import Method
    from tightframe.registry import Listed


@dataclass(frozen=True)
class Value:
    """A value that somebody may set.

    Attributes:
        name: with the blocks that it stands in, such as ``training.epochs``.
        default: as a configuration has it, ``none`` (nothing in it) or ``required``; of a policy's rule that
            of each profile; empty where nobody sets the value.
        means: what it is.
    """

    name: str
    default: str
    means: str

    @property
    def shown_default(self) -> str:
        """The default in brackets, after a blank; empty if there is none."""
        return f" ({self.default})" if self.default else ""


@dataclass(frozen=True)
class Topic:
    """Values that belong together.

    Attributes:
        name: by which they are asked for.
        about: what they are, in a sentence.
        values: in the order of the model.
    """

    name: str
    about: str
    values: tuple[Value, ...]


def topic(name: str, model: type[BaseModel], prefix: str = "", about: str = "") -> Topic:
    """Return a model's values.

    Args:
        model: with a docstring, or descriptions, for each field.
        about: in place of the first line of the docstring.
    """
    told = meanings(model)
    told |= {
        key: told.get(key, "") + _choices(field.annotation, told.get(key, ""))
        for key, field in model.model_fields.items()
    }
    given = tuple(
        Value(
            prefix + key,
            "required" if field.is_required() else _default(field.get_default()),
            told.get(key, ""),
        )
        for key, field in model.model_fields.items()
    )
    return Topic(name, about or _first(model), given)


def _choices(annotation: Any, told: str) -> str:
    """Return the names to choose from, unless the meaning gives them all.

    >>> _choices(Literal["a", "b"] | None, "`a`: the first."), _choices(Literal["a"], "`a`: all.")
    (' One of `a`, `b`.', '')
    """
    kinds = [annotation, *get_args(annotation)]
    names = [f"`{name}`" for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    return "" if all(name in told for name in names) else f" One of {', '.join(names)}."


def _default(value: Any) -> str:
    """Return a default as the guides write it.

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
    """Return a site's rules, each with its value in every profile, or the one that all have."""
    from tightframe.config.policy import Policy
    from tightframe.config.profiles import PROFILES

    told = meanings(Policy)
    given = []
    for name in Policy.model_fields:
        if name == "profile":
            continue
        values = [rules[name] for rules in PROFILES.values()]
        shown = [_default(value) for value in values]
        given.append(
            Value(
                f"policy.{name}", shown[0] if len(set(shown)) == 1 else "; ".join(shown), told.get(name, "")
            )
        )
    about = f"A site's rules, with their values in the profiles ({'; '.join(PROFILES)})."
    return Topic("policy", about, tuple(given))


def blocks() -> dict[str, Callable[[], Topic]]:
    """Return what a job and a site may say, by name, without importing torch."""
    from tightframe.config import job, site

    of_job: dict[str, type[BaseModel]] = {
        "training": job.Training,
        "evaluation": job.Evaluation,
        "privacy": job.Privacy,
        "evaluate_only": job.EvaluateOnly,
        "statistics": job.Statistics,
        "withdraw": job.Withdraw,
        "resume": job.Resume,
    }
    return {
        "job": partial(topic, "job", job.JobConfig),
        **{name: partial(topic, name, model, f"{name}.") for name, model in of_job.items()},
        "site": partial(topic, "site", site.SiteEntry),
        "server": partial(topic, "server", site.ServerEntry, "server."),
        "policy": _policy,
    }


def of_methods() -> dict[str, Callable[[], Topic]]:
    """Return the options of our methods, by name."""
    from tightframe.methods import METHODS

    return {item.name: partial(_method, item) for item in METHODS}


def _method(method: Method) -> Topic:
    return topic(method.name, method.config, about=f"The method {method.title}.")


def of_models() -> dict[str, Callable[[], Topic]]:
    """Return the options of our models, by name."""
    from tightframe.models import BACKBONES

    return {item.name: partial(_model, item) for item in BACKBONES}


def _model(model: BackboneSpec) -> Topic:
    return topic(model.name, model.options, about=f"The model `{model.name}`. {_first(model.options)}")


def of_data() -> dict[str, Callable[[], Topic]]:
    """Return what a job and a site say of our data sets, by name."""
    from tightframe.data import DATASETS

    return {item.name: partial(_listed, item) for item in DATASETS}


def _listed(listed: Listed[DatasetSpec]) -> Topic:
    return _data(listed.load())


def _data(spec: DatasetSpec) -> Topic:
    job = topic(spec.name, spec.options, "dataset_options.")
    site = topic(spec.name, spec.site, f"data.{spec.name}.")
    about = f"The data set {spec.title}: `dataset_options` of a job, and a site's entry in `data`."
    return Topic(spec.name, about, (*job.values, *site.values))


def of_packages() -> dict[str, Callable[[], Topic]]:
    """Return the options of methods, models and data sets that installed packages add, by name."""
    from importlib.metadata import entry_points

    from tightframe import data, methods, models

    made: list[tuple[str, Callable[[str], Topic]]] = [
        (methods.ENTRY_POINTS, lambda name: _method(methods.get(name))),
        (models.ENTRY_POINTS, lambda name: _model(models.get(name))),
        (data.ENTRY_POINTS, lambda name: _data(data.get(name))),
    ]
    return {entry.name: partial(of, entry.name) for group, of in made for entry in entry_points(group=group)}


def status() -> dict[str, Callable[[], Topic]]:
    """Return what ``tightframe watch`` and consoles show of a run."""
    from tightframe.results.status import Status

    shown = topic("status", Status, about="What can be seen of a run while it goes on.")
    keys = tuple(replace(value, default="") for value in shown.values if value.name != "format")
    return {"status": lambda: replace(shown, values=keys)}


def named() -> dict[str, Callable[[], Topic]]:
    """Return all topics by name."""
    ours = {**blocks(), **status(), **of_methods(), **of_models(), **of_data()}
    return {**of_packages(), **ours}


def _first(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").partition("\n")[0].replace("``", "`")


def find(word: str) -> list[Topic]:
    """Return the topics, or topics with one value alone, that a word names.

    Raises:
        typer.BadParameter: if there is none, naming one that is near.
    """
    known = blocks()
    if word not in known:
        all_blocks = [make() for make in known.values()]
        if single := [item for item in (_single(item, word) for item in all_blocks) if item.values]:
            return single
        known = named()
        if word not in known:
            values = [value.name for item in all_blocks for value in item.values]
            meant = did_you_mean(word, [*known, *values])
            raise typer.BadParameter(f"no such word as {word!r}: {meant}`tightframe explain` lists them all")
    return [known[word]()]


def _single(item: Topic, word: str) -> Topic:
    """Return a topic with the values of a name alone, which is given with its block or without."""
    chosen = [value for value in item.values if word in (value.name, value.name.rpartition(".")[2])]
    return replace(item, values=tuple(chosen))
