"""``docs/methods.md`` and its pages against what is registered: methods, options, models, commands."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.docs.test_links import anchors_of
from typer.testing import CliRunner

from tightframe import methods, models
from tightframe.config import job, site
from tightframe.config.policy import Policy
from tightframe.phases import Method
from tightframe.rounds.setup import prepare
from tightframe_app.cli import app
from tightframe_app.explain import pages
from tightframe_app.jobs import presets, recipes

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "methods.md"
PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
BASELINES = ROOT / "docs" / "methods" / "baselines.md"
ALWAYS = ("Edge cases", "What leaves a silo", "Reproduce", "Measured here")
OWN_PAGE = (*ALWAYS, "Equations", "Options", "Where", "Printed")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page_of(name: str) -> Path:
    own = ROOT / "docs" / "methods" / f"{name}.md"
    return own if own.is_file() else BASELINES


def part_of(name: str) -> str:
    """The method's own page, or its section of the baselines' page."""
    page = page_of(name)
    if page != BASELINES:
        return read(page)
    sections = re.split(r"^## ", read(page), flags=re.MULTILINE)
    found = [part for part in sections if f"(`{name}`)" in part.splitlines()[0]]
    assert len(found) == 1, f"{page.name} has {len(found)} sections `## TITLE (`{name}`)`, not one"
    return found[0]


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of every row of the tables that have this header."""
    cells = []
    for table in text.split(f"{header}\n")[1:]:
        for line in table.splitlines()[1:]:
            if not line.startswith("|"):
                break
            cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells


@pytest.mark.parametrize("method", methods.METHODS, ids=lambda method: method.name)
def test_every_option_is_explained_in_the_methods_part_with_its_default(method: Method) -> None:
    fields = method.config.model_fields
    assert explained(part_of(method.name)) == {name: shown(field.default) for name, field in fields.items()}


def explained(text: str) -> dict[str, str]:
    """Names and defaults of what a part of a guide has of ``tightframe explain``, each with its meaning."""
    marks = "\n\n".join(mark[0] for mark in pages.MARK.finditer(text))
    found = re.findall(r"^- `([\w.]+)` \((.*?)\): (.*)$", pages.filled(marks), re.MULTILINE)
    assert all(means for *_, means in found) and len({name for name, *_ in found}) == len(found)
    return {name: default for name, default, _ in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_its_sections_and_is_some_methods(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", read(page), flags=re.MULTILINE)
    for wanted in ALWAYS if page == BASELINES else OWN_PAGE:
        assert any(heading.startswith(wanted) for heading in headings), wanted
    assert page in {page_of(method.name) for method in methods.METHODS}


def test_a_part_shows_the_equations_of_its_file() -> None:
    """Every baseline's does, and the page of a method which does not have them itself."""
    marked = {method.name for method in methods.METHODS if f"file:{method.name}" in part_of(method.name)}
    assert marked >= {method.name for method in methods.METHODS if page_of(method.name) == BASELINES}
    for name in marked:
        said = inspect.getdoc(importlib.import_module(f"tightframe.methods.{name}")) or ""
        first, part = said.splitlines()[0], pages.filled(part_of(name))
        assert first in part and ("\nSource: " in part) == ("\nSource: " in said), name
        assert part.count("\n    ") >= said.count("\n    "), "equations, as blocks"


def index() -> dict[str, tuple[str, str, str]]:
    """Title, link and group of every method in the index."""
    section = read(INDEX).partition("## What leaves a silo")[2].partition("\n## ")[0]
    found = {}
    for group in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        for title, link, name in re.findall(r"\[([^]]*)\]\(([^)]*)\) `(\w+)`", group):
            assert name not in found
            found[name] = (title, link, group.splitlines()[0])
    return found


def test_the_index_has_every_method_and_leads_to_its_part() -> None:
    listed = index()
    assert {name: title for name, (title, *_) in listed.items()} == {
        method.name: method.title for method in methods.METHODS
    }, "docs/methods.md, What leaves a silo: [TITLE](PAGE) `NAME`"
    for name, (_, link, _) in listed.items():
        place, _, anchor = link.partition("#")
        assert (INDEX.parent / place) == page_of(name)
        assert anchors_of(f"## {part_of(name).splitlines()[0]}") == {anchor} or not anchor
        assert bool(anchor) == (page_of(name) == BASELINES)


def test_every_job_that_is_ready_to_run_is_of_a_listed_method() -> None:
    assert {recipe.values["method"] for recipe in recipes.RECIPES} <= index().keys()


def test_those_that_send_class_sums_are_what_the_methods_declare() -> None:
    told = {name: group.startswith("**Class sums**") for name, (*_, group) in index().items()}
    for method in methods.METHODS:
        setup = prepare(_values(method.name))
        numbers = range(1, setup.job.rounds + 1)
        planned = [*map(setup.training_phases, numbers), setup.before_phases(), setup.after_phases()]
        sums = any(item.per_class for round_ in planned for phase in round_ for item in phase.schema.fields)
        text = f"docs/methods.md: {method.name} stands under Class sums just if a field of its is by class"
        assert told.get(method.name) == sums, text


def _values(method: str) -> dict[str, Any]:
    training = {"epochs": 1, "momentum": 0.0}
    return {
        **{"job_name": "documented", "method": method, "training": training},
        **{"rounds": methods.get(method).rounds or 4},
        **{"dataset": "fed_isic2019", "dataset_options": {"image_size": 16}, "model": "small_cnn"},
        **{"model_options": {"widths": [8, 8]}, "sites": ["a", "b", "c"], "min_sites": 3},
    }


def test_jobs_leads_to_the_index_of_methods_and_names_every_model_with_its_options() -> None:
    text = read(ROOT / "docs" / "jobs.md")
    assert "\n- `method`, `method_options`: [all methods](methods.md)\n" in text
    (mark,) = [mark[1].split("+") for mark in pages.MARK.finditer(text) if "small_cnn" in mark[1]]
    assert mark == [spec.name for spec in models.BACKBONES]
    for spec in models.BACKBONES:
        fields = spec.options.model_fields
        assert explained(f"<!--explain:{spec.name}-->") == {
            name: shown(field.default) for name, field in fields.items()
        }


def test_jobs_explains_every_value_of_a_job_and_of_a_site() -> None:
    """All that ``config`` may hold, but for ``resume``, which no hand writes, and a policy's profile."""
    blocks = {
        "": (job.JobConfig, site.SiteEntry),
        "policy.": (Policy,),
        "server.": (site.ServerEntry,),
        **{f"{item.__name__.lower()}.": (item,) for item in (job.Training, job.Evaluation, job.Privacy)},
        **{f"{item.__name__.lower()}.": (item,) for item in (job.Statistics, job.Withdraw)},
        "evaluate_only.": (job.EvaluateOnly,),
    }
    marks = [mark[0] for mark in pages.MARK.finditer(read(ROOT / "docs" / "jobs.md"))]
    told = explained("\n\n".join(mark for mark in marks if "small_cnn" not in mark))
    names = {at + name for at, models_ in blocks.items() for model in models_ for name in model.model_fields}
    assert set(told) == names - {"policy.profile"}


def shown(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return json.dumps(default)
    return ", ".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default)


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command, in blocks and in the sentences that say what fills a section."""
    found = []
    for page in (INDEX, *PAGES):
        blocks = re.findall(r"^```sh\n(.*?)^```$", read(page), flags=re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"^`(python .*?)` fills", read(page), flags=re.MULTILINE)
        found += [(page.stem, shlex.split(line)) for line in lines if line.strip()]
    return found


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/methods.py``, with its data sets in the registry."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("methods")


def test_the_benchmark_takes_the_pages_commands_and_their_jobs_are_valid(benchmark: ModuleType) -> None:
    mine = [words for _, words in commands() if words[:2] == ["python", "benchmarks/methods.py"]]
    assert len(mine) >= len(PAGES)
    # A frame of CIFAR-100 needs a width of 99.
    small = {"model": "small_cnn", "model_options": {"widths": [8, 104]}}
    for words in mine:
        arguments = benchmark.parser().parse_args(words[2:])
        bench = benchmark.bench_of(arguments)
        silos = ("silo-0", "silo-1", "silo-2")
        for name, options in arguments.methods:
            values = bench.job(name, options or {}, silos, 0, "off").model_dump()
            assert prepare({**values, **small}).method.name == name
        with torch.device("meta"):  # the network itself, but without drawing millions of weights
            prepare(bench.job("fedavg", {}, silos, 0, "off"))


def test_the_pages_jobs_can_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = [words[1:] for _, words in commands() if words[0] == "tightframe"]
    assert len(mine) >= 2
    for words in mine:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output


def test_the_tables_page_has_every_comparison_that_was_measured() -> None:
    """The same numbers as ``tightframe methods NAME`` shows, none left out."""
    page = pages.filled(read(ROOT / "docs" / "tables.md"))
    assert "FedNH (`scale=1`)" in page and "+11.9 [+7.3, +16.6]" in page and page.count("**seen**") == 16
    for method in methods.METHODS:
        for effect in presets.effects(method.name):
            numbers = re.search(r"[-+][\d.]+ \[.*?\]", effect.line)
            assert numbers is not None
            mark = "**seen**" if effect.seen else "not seen"
            assert f"| {effect.measure} | {numbers[0]} | {effect.seeds} | {mark} |" in page, effect.line


def test_a_comparison_that_only_the_benchmarks_page_has_is_named_by_the_command() -> None:
    found = read(ROOT / "docs" / "benchmarks.md").partition("## Models of one sum")[2]
    for name in presets.ELSEWHERE:
        assert methods.get(name).title.partition(" ")[0] in found
        told = "effect: measured here with five seeds: docs/which.txt; docs/benchmarks.md, Models of one sum"
        assert presets.lines(name)[-1] == told
    shown = read(ROOT / "docs" / "which.txt")
    assert all(methods.get(name).title.partition(" ")[0] in shown for name in presets.ELSEWHERE)


def test_no_other_command_stands_on_the_pages() -> None:
    assert {words[0] for _, words in commands()} == {"python", "tightframe"}
