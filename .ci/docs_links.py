"""Make a site of guides that link to files outside ``docs/``, and add what is generated.

Guides are read on a code host too, so their links are those of the repository. A Markdown file outside
``docs/`` becomes a page below ``outside/``, another file is copied there, and a folder keeps its words alone.
A mark ``<!--explain:...-->`` becomes what ``tightframe explain`` prints, from the package's own texts.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = PurePosixPath("outside")
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
NOTEBOOKS = ("notebook.md",)
"""Guides whose cells of code run in order, by a test."""
NAME = re.compile(r"<code>[^<\n]*</code>")
"""Code in a line of text; that of a block has tags of its own within."""
COMMANDS = re.compile(r'<div class="language-sh highlight">.*?</div>', re.S)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.M | re.S)


def place(page: str) -> PurePosixPath:
    """Return a page's path in the repository, from that in the site."""
    path = PurePosixPath(page)
    return path.relative_to(OUTSIDE) if path.is_relative_to(OUTSIDE) else "docs" / path


def target(page: str, link: str) -> tuple[PurePosixPath, str] | None:
    """Return file and anchor that a relative link leads to; None for the web and for the page itself."""
    path, _, anchor = link.partition("#")
    if not path or ":" in path:
        return None
    found = os.path.normpath(place(page).parent / path)
    return PurePosixPath(found), f"#{anchor}" if anchor else ""


def of_site(path: PurePosixPath) -> PurePosixPath:
    """Return a file's path in the site, from that in the repository."""
    return path.relative_to("docs") if path.is_relative_to("docs") else OUTSIDE / path


def public_names() -> dict[str, str]:
    """Return each public name of the package and the module that defines it, without importing either."""
    tree = ast.parse((ROOT / "custom" / "tightframe" / "__init__.py").read_text())
    homes = [node.value for node in tree.body if isinstance(node, ast.Assign) and _name(node) == "_HOMES"]
    return dict(ast.literal_eval(homes[0]))


def _name(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


def reference() -> str:
    """Return the page of the public names, which mkdocstrings fills from their docstrings."""
    heads = "".join(f"\n::: {module}.{name}\n" for name, module in public_names().items())
    first = "# The package's names\n\n`from tightframe import run`; each is shown where it is defined.\n"
    return first + heads


def notebook(markdown: str) -> str:
    """Return a guide as a notebook (nbformat 4.5): fenced Python as cells of code."""
    cells: list[dict[str, Any]] = []
    for place, part in enumerate(CODE.split(markdown)):
        text = part.strip("\n")
        if not text:
            continue
        cell: dict[str, Any] = {
            "id": f"cell-{len(cells)}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if place % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell |= {"cell_type": "markdown"}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1)


def on_files(files: Files, config: Any) -> Files:
    """Add the reference, and the files that pages link to, those of added pages too."""
    files.append(File.generated(config, "api.md", content=reference()))
    for page in NOTEBOOKS:
        text = notebook((ROOT / "docs" / page).read_text(encoding="utf-8"))
        files.append(File.generated(config, page.replace(".md", ".ipynb"), content=text))
    for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, str(OUTSIDE / name), abs_src_path=str(ROOT / name)))
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for _, link in LINK.findall(page.content_string):
            found = target(page.src_uri, link)
            if found is None or found[0].is_relative_to("docs") or not (ROOT / found[0]).is_file():
                continue
            uri = str(of_site(found[0]))
            if files.get_file_from_path(uri) is None:
                file = File.generated(config, uri, abs_src_path=str(ROOT / found[0]))
                files.append(file)
                waiting += [file] if uri.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put what ``tightframe explain`` says into its places, and write links as they are in the site."""
    from tightframe_app.explain.pages import filled

    here, markdown = page.file.src_uri, filled(markdown)

    def written(link: re.Match[str]) -> str:
        words, to = link.groups()
        found = target(here, to)
        if found is None:
            return link.group()
        path, anchor = found
        if not (ROOT / path).is_file():
            return words
        return f"[{words}]({os.path.relpath(of_site(path), PurePosixPath(here).parent)}{anchor})"

    parts = FENCE.split(markdown)
    text = "".join(part if place % 2 else LINK.sub(written, part) for place, part in enumerate(parts))
    if here in NOTEBOOKS:
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n[This page as a notebook]({PurePosixPath(here).stem}.ipynb)\n{rest}"
    return text


def on_post_page(output: str, **_: Any) -> str:
    """Let names in a line of text break after a low line, and options nowhere."""

    def kept(code: str) -> str:
        return OPTION.sub(r'<span class="option">\g<0></span>', code)

    output = NAME.sub(lambda code: kept(code.group().replace("_", "_<wbr>")), output)
    return COMMANDS.sub(lambda block: kept(block.group()), output)
