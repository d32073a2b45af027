"""What a job names, from the registries, and the options that it gives to that."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from tightframe.errors import JobError
from tightframe.problems import listed


def named(get: Any, name: Any, key: str, problems: list[str]) -> Any:
    """What a registry has under a name; None, and the problem noted, if that is nothing."""
    if not isinstance(name, str):
        return None  # missing or no text: the job's own validation has said so
    try:
        return get(name)
    except JobError as error:
        problems += [f"{key}: {problem}" for problem in error.problems]
        return None


def options_of(
    owner: Any, attribute: str, raw: dict[str, Any], key: str, problems: list[str], place: str = ""
) -> Any:
    """The options that a job gives to what it names, validated by that; None if they are wrong.

    Args:
        owner: a registry's entry; None has no options.
        attribute: of the entry, which has the options' model.
        raw: values that the options are among.
        key: of the options.
        problems: what is wrong is added here.
        place: where in the job the values lie, if not at its top: ``site_models.site-1.``.
    """
    values = raw.get(key, {})
    if owner is None or not isinstance(values, dict):
        return None
    model: type[BaseModel] = getattr(owner, attribute)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems += listed(error, f"{place}{key}.", model)
        return None
