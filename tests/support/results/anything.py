"""Any values of a result file's model, by its annotations."""

from __future__ import annotations

import types
import typing
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from tightframe.results.parts.dropouts import Lost

Model = TypeVar("Model", bound=BaseModel)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
_SECONDS = st.datetimes(datetime(2000, 1, 1), datetime(2099, 12, 31), timezones=st.just(UTC))
_LOST = st.builds(
    Lost,
    kind=st.text(),
    round=st.integers(min_value=0),
    at=_SECONDS.map(lambda time: time.strftime("%Y-%m-%dT%H:%M:%SZ")),
    code=st.text(),
)


def models(of: type[Model]) -> st.SearchStrategy[Model]:
    """Any values of a model, some of the optional ones left out."""
    required: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for name, field in of.model_fields.items():
        if name != "format":
            place = required if field.is_required() else optional
            place[name] = _values(field.annotation)
    return st.fixed_dictionaries(required, optional=optional).map(of.model_validate)


def _values(annotation: Any) -> st.SearchStrategy[Any]:
    simple: dict[Any, st.SearchStrategy[Any]] = {
        Any: _JSON,
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
        type(None): st.none(),
        Lost: _LOST,
    }
    if annotation in simple:
        return simple[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return models(annotation)
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_values(item) for item in inside])
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is dict:
        return st.dictionaries(_values(inside[0]), _values(inside[1]), max_size=3)
    if origin is list or (origin is tuple and inside[-1] is ...):
        found = st.lists(_values(inside[0]), max_size=3)
        return found if origin is list else found.map(tuple)
    if origin is tuple:
        return st.tuples(*[_values(item) for item in inside])
    raise TypeError(f"Expected an annotation of a result file, but got {annotation}.")
