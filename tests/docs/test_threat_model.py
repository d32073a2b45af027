"""The threat model names a test for what it claims; each of them exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "threat-model.md"


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 80
    defined = {
        file: {
            node.name
            for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        for file in {file for file, _ in named}
        if (TESTS / file).is_file()
    }
    assert [f"{file}::{test}" for file, test in named if test not in defined.get(file, ())] == []
