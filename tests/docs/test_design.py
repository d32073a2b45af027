"""``docs/where.md`` and ``docs/design.md`` against the tree: every path and name that they give is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "custom" / "tightframe"
ROOTS = (PACKAGE, PACKAGE / "rounds", ROOT)
"""Against which paths are given; the diagram of the rooms draws those of ``rounds`` below it."""
PAGES = ("where.md", "design.md", "decisions.md")


def named(page: str) -> list[str]:
    """Paths in a page: in backticks or at the start of a line of a diagram, with a slash or ending in .py."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    ticked = re.findall(r"`([a-zA-Z_./]*[a-zA-Z_](?:/|\.py|\.md))`", text)
    drawn = re.findall(r"^ {4,}((?:[a-z_]+/)+[a-z_]*(?:\.py)?|[a-z_]+\.py)(?= |$)", text, flags=re.MULTILINE)
    return [*ticked, *drawn]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_is_there(page: str) -> None:
    paths = named(page)
    assert len(paths) >= (1 if page == "decisions.md" else 10)
    missing = [
        path
        for path in paths
        if not re.search("[A-Z]", path.split("/")[0])
        and "NAME" not in path
        and not any((root / path).exists() for root in ROOTS)
    ]
    assert missing == []


def test_twenty_questions_are_answered() -> None:
    items = re.split(r"^(\d+)\. ", (ROOT / "docs/where.md").read_text(), flags=re.MULTILINE)[1:]
    assert [int(number) for number in items[::2]] == list(range(1, 21))
    assert all(re.search(r": .*`", " ".join(item.split())) for item in items[1::2])
    named_code = [re.findall(r"`(\w+)\.(\w+)`", item) for item in items[1::2]]
    for owner, method in (pair for pairs in named_code for pair in pairs if pair[0][0].isupper()):
        sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
        assert f"class {owner}" in sources and f"def {method}(" in sources, f"{owner}.{method}"


def test_a_module_that_a_docstring_names_is_there() -> None:
    """``learning.halves.gradient_weight``: the longest module of it is there, and has what follows."""
    modules = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    rooms = {name.partition(".")[0] for name in modules} - {"config"}  # also a variable's name
    wrong = []
    for path in modules.values():
        for name in re.findall(r"``(?:tightframe\.)?([a-z_]+(?:\.\w+)+)``", path.read_text(encoding="utf-8")):
            if name.partition(".")[0] not in rooms or name.endswith((".html", ".json", ".jsonl", ".py")):
                continue
            parts = name.split(".")
            ends = [place for place in range(len(parts), 0, -1) if ".".join(parts[:place]) in modules]
            source = modules[".".join(parts[: ends[0]])].read_text(encoding="utf-8") if ends else ""
            if not ends or any(part not in source for part in parts[ends[0] :]):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == [], "name it as `find custom/tightframe` does"
