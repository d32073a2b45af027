"""Registry: names of a job to objects, by plain lists and entry points of installed packages.

Only what is installed at a site can be named, and only the entry that is named is imported. A run in one
process may bring objects of its own (``offering``), which only that run can name.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar

from tightframe.errors import JobError

OBJECT = "object:"
"""Prefix of the names of a run's own objects, which no list of ours and no package can take."""

METHODS, BACKBONES, DATASETS = "tightframe.methods", "tightframe.backbones", "tightframe.datasets"
"""Groups of the entry points by which installed packages offer theirs."""

_OBJECTS: ContextVar[Mapping[str, Any]] = ContextVar("objects of a run", default={})  # noqa: B039 (never changed)


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """Name that a job uses."""


Item = TypeVar("Item", bound=Named)


@dataclass(frozen=True)
class Listed(Generic[Item]):
    """An item of ours that is imported when it is named.

    Attributes:
        name: what a job calls it.
        module: whose ``SPECS``, name -> item, has it.
    """

    name: str
    module: str

    def load(self) -> Item:
        """Import and return the item."""
        item: Item = import_module(self.module).SPECS[self.name]
        return item


def find(own: Sequence[Item | Listed[Item]], name: str, *, group: str, kind: type[Item], what: str) -> Item:
    """Return the item that a job calls ``name``: one of ours, or of an installed package.

    Args:
        own: our list, which comes first: no package can take the name of one of ours.
        name: what the job says.
        group: entry-point group; an entry's name is the item's.
        kind: what an entry must load.
        what: for messages, for example ``a method``.

    Raises:
        JobError: if there is none, listing the known names, if two packages offer it, or if an entry is
            of another kind.
    """
    if name.startswith(OBJECT):
        if isinstance(registered := _OBJECTS.get().get(name), kind):
            return registered
        raise JobError(
            [
                f"Expected {what} that is installed, but {name!r} was an object of the process that ran this "
                "job: nothing else can run it or use its model; register the object by an entry point of "
                f"{group} instead"
            ]
        )
    for item in own:
        if item.name == name:
            return item.load() if isinstance(item, Listed) else item
    offered = entry_points(group=group)
    named = [entry for entry in offered if entry.name == name]
    if len(places := sorted({entry.value for entry in named})) > 1:
        raise JobError([f"Expected {what} {name!r} from one installed package, but {places} offer it"])
    if named:
        loaded = named[0].load()
        if not isinstance(loaded, kind):
            raise JobError([f"Expected {named[0].value!r} to be a {kind.__name__}, but got {loaded!r}"])
        return loaded
    known = sorted({item.name for item in own} | {entry.name for entry in offered})
    names = {item.lower(): item for item in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"; did you mean {names[near[0]]!r}?" if near else ""
    raise JobError([f"Expected {what} of {known}, but got {name!r}{hint}"])


def object_name(own: str) -> str:
    """Return a new name for an object of this process, never given twice: a job with it equals no other.

    Args:
        own: what the object is called, for people.
    """
    return f"{OBJECT}{re.sub(r'[^A-Za-z0-9_-]+', '_', own)}:{secrets.token_hex(4)}"


@contextmanager
def offering(objects: Sequence[Named]) -> Iterator[None]:
    """Let ``find`` know a run's own objects by their names, in this thread and until the end of the block."""
    token = _OBJECTS.set({**_OBJECTS.get(), **{item.name: item for item in objects}})
    try:
        yield
    finally:
        _OBJECTS.reset(token)


def is_object(name: str) -> bool:
    """Return whether a name is that of an object of the run in this process (``offering``)."""
    return name.startswith(OBJECT) and name in _OBJECTS.get()


def deferred(module: str, function: str) -> Callable[..., Any]:
    """Return a function whose module is imported when it is called first.

    A registry that a process reads for one of its names need not load what all of them need.

    >>> deferred("math", "sqrt")(4)
    2.0
    """

    def call(*arguments: Any) -> Any:
        return getattr(import_module(module), function)(*arguments)

    return call
