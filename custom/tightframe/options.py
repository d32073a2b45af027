"""Base of every options model, and its problems listed one a line in words that say what to write."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """Frozen values as written: unknown keys, other types and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def listed(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> list[str]:
    """One line for each problem that pydantic found, with what came.

    Args:
        error: of the validation.
        prefix: of the keys, for example ``method_options.``.
        model: what was validated; with it a key that does not exist is answered with those that do.
    """
    lines = []
    for item in error.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        where = f"{prefix}{place}" if place else prefix.rstrip(".") or "job"
        if item["type"] == "extra_forbidden" and (keys := _keys(model, item["loc"][:-1])) is not None:
            lines.append(f"{where}: {no_such('key', str(item['loc'][-1]), keys)}")
            continue
        if item["type"] == "model_type":
            lines.append(f"{where}: Expected a block of keys, but got {item['input']!r}")
            continue
        shown = "" if item["type"] in ("missing", "value_error") else f" (got {item['input']!r})"
        lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return lines


def no_such(what: str, found: str, known: Sequence[str]) -> str:
    """What to write instead of a name that does not exist.

    >>> no_such("site", "site-22", ["site-1", "site-2"])
    "no such site: did you mean 'site-2'? Known are site-1, site-2"
    """
    if not known:
        return f"no such {what}: none is known here"
    near = difflib.get_close_matches(found, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"no such {what}: {meant}Known are {', '.join(known)}"


def _keys(model: Any, place: Sequence[str | int]) -> list[str] | None:
    """The keys that a model has at a place of its values; None where no model is known to lie there."""
    for part in place:
        found = _bare(model)
        if isinstance(found, type) and issubclass(found, BaseModel):
            field = found.model_fields.get(str(part))
            model = None if field is None else field.annotation
        else:
            model = next(reversed(get_args(found)), None)  # what a mapping or a list holds
    found = _bare(model)
    return list(found.model_fields) if isinstance(found, type) and issubclass(found, BaseModel) else None


def _bare(annotation: Any) -> Any:
    """A type without ``Annotated`` and without ``| None``."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        rest = [part for part in get_args(annotation) if part is not NoneType]
        return _bare(rest[0]) if len(rest) == 1 else None
    return annotation
