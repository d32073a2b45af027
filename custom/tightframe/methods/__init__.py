"""Methods: a plain list, and an entry point for those of other packages.

A third-party package offers a method by an entry point of the group ``tightframe.methods`` whose
object is a ``Method``; only the one that a job names is imported.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from tightframe.errors import JobError
from tightframe.methods import fedavg, fedmr
from tightframe.phases import Method

ENTRY_POINTS = "tightframe.methods"

METHODS: list[Method] = [fedavg.METHOD, fedmr.METHOD]


def get(name: str) -> Method:
    """The method that a job calls ``name``.

    Raises:
        JobError: if there is none, listing the known names, or if an entry point is no method.
    """
    for method in METHODS:
        if method.name == name:
            return method
    offered = entry_points(group=ENTRY_POINTS)
    for entry in offered:
        if entry.name == name:
            method = entry.load()
            if not isinstance(method, Method):
                raise JobError([f"Expected {entry.value!r} to be a Method, but got {method!r}"])
            return method
    known = sorted({method.name for method in METHODS} | {entry.name for entry in offered})
    raise JobError([f"Expected a method of {known}, but got {name!r}"])


__all__ = ["METHODS", "get"]
