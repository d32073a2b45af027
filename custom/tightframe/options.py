"""Base of every options model, its validation errors as one line per problem, and what its fields mean."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Tag, ValidationError

_ITEM = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")


class StrictModel(BaseModel):
    """Frozen options that refuse unknown keys, values of another type, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return what descriptions, or docstrings' ``Attributes``, say of each field, those of base classes too.

    >>> class Colour(StrictModel):
    ...     '''A colour.
    ...
    ...     Attributes:
    ...         red, green: in 0 to 1;
    ...             None for the usual.
    ...     '''
    ...     red: float | None = None
    ...     green: float | None = None
    >>> meanings(Colour)["green"]
    'in 0 to 1; null for the usual.'
    """
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        names: list[str] = []
        doc = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        for line in doc.partition("\nAttributes:\n")[2].splitlines():
            if line and not line.startswith(" "):
                break
            if item := _ITEM.fullmatch(line):
                names = item[1].split(", ")
                texts |= dict.fromkeys(names, item[2])
            else:
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names if line.strip()}
    texts |= {name: field.description for name, field in model.model_fields.items() if field.description}
    return {name: _as_written(text) for name, text in texts.items()}


def _as_written(text: str) -> str:
    """Return a docstring's text with values as a file has them.

    >>> _as_written("``own``; None takes ours, False none.")
    '`own`; null takes ours, false none.'
    """
    for ours, files in (("``", "`"), ("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{ours}\b" if ours.isalpha() else ours, files, text)
    return text


UNION_TAG = "|"
"""First character of the tag of a union's member, which is no key of the values."""


def listed(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> list[str]:
    """List the problems of a validation, one line each: the key, what was expected, what came.

    Args:
        prefix: of the keys, for example ``method_options.``.
        model: that was validated; with it the line for an unknown key suggests a known one.
    """
    lines = []
    for item in error.errors(include_url=False):
        keys_to = tuple(part for part in item["loc"] if not str(part).startswith(UNION_TAG))
        place = ".".join(map(str, keys_to))
        where = f"{prefix}{place}" if place else prefix.rstrip(".") or "job"
        if item["type"] == "extra_forbidden" and (keys := _keys(model, item["loc"][:-1])) is not None:
            lines.append(f"{where}: {unknown_name('key', str(item['loc'][-1]), keys)}")
            continue
        if item["type"] == "model_type":
            lines.append(f"{where}: Expected a block of keys, but got {item['input']!r}")
            continue
        shown = "" if item["type"] in ("missing", "value_error") else f" (got {item['input']!r})"
        lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return lines


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Return an error message for an unknown name that suggests a known one.

    Args:
        kind: of thing that the name is for.
        known: names that exist.

    >>> unknown_name("site", "site-22", ["site-1", "site-2"])
    "no such site: did you mean 'site-2'? Known are site-1, site-2"
    """
    if not known:
        return f"no such {kind}: none is known here"
    return f"no such {kind}: {did_you_mean(name, known)}Known are {', '.join(known)}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a question after the known name nearest to another; empty if none is near.

    >>> did_you_mean("site-22", ["site-1", "site-2"])
    "did you mean 'site-2'? "
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _keys(model: Any, place: Sequence[str | int]) -> list[str] | None:
    """Return the keys of the model at a place within a model's values; None if there is no model."""
    for part in place:
        if str(part).startswith(UNION_TAG):
            model = _member(model, str(part))
            continue
        annotation = _unwrapped(model)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(str(part))
            model = None if field is None else field.annotation
        else:
            model = next(reversed(get_args(annotation)), None)  # type of a mapping's or list's values
    annotation = _unwrapped(model)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return None


def _member(union: Any, tag: str) -> Any:
    """Return the member of a union that has a tag; None if none has."""
    for member in get_args(union):
        if get_origin(member) is Annotated and Tag(tag) in get_args(member)[1:]:
            return member
    return None


def _unwrapped(annotation: Any) -> Any:
    """Return a type without ``Annotated`` and without ``| None``; None for any other union."""
    if get_origin(annotation) is Annotated:
        return _unwrapped(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        rest = [part for part in get_args(annotation) if part is not NoneType]
        return _unwrapped(rest[0]) if len(rest) == 1 else None
    return annotation
