"""What commands print with ``--format json``, held against the published schemas by jsonschema."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from tests.support import ROOT

PUBLISHED = ROOT / "docs" / "output-schemas.json"


def checked(command: str, printed: str) -> dict[str, Any]:
    """Return what a command printed, if it keeps its schema."""
    values: dict[str, Any] = json.loads(printed)
    schema = json.loads(PUBLISHED.read_text(encoding="utf-8"))[command]
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(values)
    return values
