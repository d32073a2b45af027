"""Which methods run under differential privacy, as the guides say it and as jobs are taken or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from tests.docs.test_methods import ROOT, _values, read, rows

from tightframe import methods
from tightframe.errors import JobError
from tightframe.phases import Method
from tightframe.rounds.setup import prepare

DOCS: Path = ROOT / "docs"
_OPTION = re.compile(r"`(\w+): (\w+)`")
_LED = "have a form for it](privacy-engineering.md#methods)"


def told() -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Of each method that the table has: the options that it needs, and those that are refused."""
    found = {}
    for names, under in rows(read(DOCS / "privacy-engineering.md"), "| method | under privacy |"):
        for name in re.findall(r"`(.*?)`", names):
            needed = _OPTION.findall(under) if under.startswith("with ") else []
            refused = re.findall(rf"`{name}` with {_OPTION.pattern} is refused", under)
            found[name] = (dict(needed), dict(refused))
    return found


def refusal(method: str, options: dict[str, Any]) -> str | None:
    """Why a job with privacy and these options of the method is refused; None if it is taken."""
    values = _values(method) | {"method_options": options, "weights": "uniform", "privacy": {}}
    try:
        prepare(values)
    except JobError as error:
        return str(error)
    return None


def choices(method: Method) -> list[dict[str, Any]]:
    """The defaults, and each choice among names with the other options at their defaults."""
    fields = {name: field.annotation for name, field in method.config.model_fields.items()}
    named = {name: get_args(of) for name, of in fields.items() if get_origin(of) is Literal}
    return [{}, *({name: value} for name, values in named.items() for value in values)]


@pytest.mark.parametrize("method", methods.METHODS, ids=lambda method: method.name)
def test_the_table_has_the_methods_that_run_under_privacy(method: Method) -> None:
    if method.name not in told():
        refusals = [refusal(method.name, options) for options in choices(method)]
        assert None not in refusals and "- privacy: " in str(refusals[0])
        return
    needed, refused = told()[method.name]
    assert refusal(method.name, dict(needed)) is None
    for options in ({},) * bool(needed) + (refused,) * bool(refused):
        assert f"- privacy: {method.name}: " in str(refusal(method.name, dict(options)))


def test_the_pages_that_speak_of_it_name_the_same_methods_or_none() -> None:
    """One page has the table, the others lead there."""
    names = {method.name for method in methods.METHODS}
    whole = read(DOCS / "methods.md")
    sentence = whole.partition("**Differential privacy**")[2].partition("All others are refused")[0]
    assert _LED in sentence and not names & set(re.findall(r"`(.*?)`", sentence))
    assert _LED in read(DOCS / "jobs.md")
