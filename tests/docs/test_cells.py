"""Which test runs which command of the guides; and those that none runs, each with the reason."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.test_commands import PAGES, cells, free
from tests.support import ROOT

WHOLE_PAGES = {
    "docs/operations.md": "tests/production/test_production.py",
    "docs/site-guide.md": "tests/production/test_production.py",
    "docs/notebook.md": "tests/docs/test_notebook.py",
    "docs/own-data.md": "tests/docs/test_own_data.py",
    "docs/own-pictures.md": "tests/docs/test_own_pictures.py",
    "docs/statistics.md": "tests/docs/test_statistics.py",
    "docs/extension.md": "tests/test_extension.py",
    "docs/own-training.md": "tests/learning/test_own_loop.py",
    **{
        f"docs/doors/{name}.md": "tests/docs/test_doors.py"
        for name in ("data-scientist", "hospital-it", "data-protection", "researcher")
    },
}
"""Pages whose cells one test runs."""

BENCHMARKS = r"python benchmarks/(methods|papers)\.py .*"
"""Read by their own parsers below; hours, and mostly data sets of others, to run."""

RUN = {
    r"docs/data\.md: python": "tests/data/isic/test_fed_isic2019.py",
    r"docs/data-benchmarks\.md: python": "tests/data/image_sets/test_derived.py",
    r"docs/jobs\.md: python": "tests/app/test_recipes.py",
    r"docs/use\.md: python": "tests/inference/test_model.py",
    r"README\.md: python3 -m venv .*": ".ci/run",
    r"README\.md: nvflare simulator .*": ".ci/run",
    r"CONTRIBUTING\.md: python3 -m venv .*": ".ci/run",
    r"CONTRIBUTING\.md: \.venv/bin/(ruff|mypy|lint-imports|pip)\b.*": ".ci/run",
    r"(README|CONTRIBUTING)\.md: \.venv/bin/pytest (?!--faults).*": ".ci/run",
    r"README\.md: tightframe simulate jobs/fedetf_heart": "tests/docs/test_doors.py",
    r"README\.md: tightframe simulate .* --site-config heart\.json": "tests/engine/test_real_data.py",
    r"README\.md: tightframe site check .*": "tests/app/site/checks/test_job.py",
    r".*: tightframe ledger (explain|verify) .*": "tests/app/test_ledger_guides.py",
    r"docs/jobs\.md: tightframe jobs check mine": "tests/app/test_cli.py",
    r"docs/jobs\.md: tightframe jobs export .* encoder=frozen .*": "tests/rounds/test_frozen_encoder.py",
    r"docs/jobs\.md: tightframe jobs export NAME --resume .*": "tests/app/jobs/test_resuming.py",
    r"docs/jobs\.md: tightframe jobs export NAME --withdraw-from .*": "tests/app/jobs/test_withdrawing.py",
    r"docs/jobs\.md: tightframe watch JOB( --web)?": "tests/app/watch/test_monitoring.py",
    r"docs/jobs\.md: (nvflare job (stats|monitor)|app_command) .*": "tests/production/test_production.py",
    r"docs/jobs\.md: python jobs/fedncm_heart/job\.py.*": "tests/app/test_recipes.py",
    r"docs/monitoring\.md: nvflare simulator jobs/fedmr_isic": ".ci/run",
    r"docs/monitoring\.md: (statsd_exporter|prometheus|curl) .*": "tests/flare/test_prometheus.py",
    r"docs/release\.md: (ssh-keygen|\.ci/release|sha256sum|\(cd) ?.*": "tests/ci/test_release.py",
    r"docs/privacy-engineering\.md: tightframe simulate epsilon4": "tests/engine/test_privacy.py",
    r"docs/use\.md: tightframe predict .*": "tests/inference/test_predict.py",
    r"docs/use\.md: tightframe jobs export .*--evaluate .*": "tests/rounds/test_evaluate_only.py",
    r"docs/use\.md: tightframe jobs export .*--initial-model .*": "tests/app/jobs/test_simulation.py",
    r"docs/use\.md: tightframe export .*": "tests/inference/test_exports.py",
    r"docs/tables\.md: python benchmarks/paper_figures\.py .*": "tests/benchmarks/test_paper_figures.py",
}
"""Page and command -> what runs it, with paths and names of its own."""

NOT_RUN = {
    r"docs/release\.md: (python3\.11 -m venv|(\.venv/bin/)?pip) .*": "asks an index for a gigabyte; "
    "tests/ci/test_release.py makes such a list and checks the commands' form",
    r"CONTRIBUTING\.md: \.venv/bin/pytest --faults .*": "ten minutes of killed processes, run by hand",
    r"CONTRIBUTING\.md: .*mkdocs serve": "serves until Ctrl-C; .ci/run builds the same site",
    r"docs/monitoring\.md: pip install .*": "asks an index; the package's extras are checked by .ci/release",
    r"docs/monitoring\.md: tensorboard .*": "serves until Ctrl-C; the events are read in test_production.py",
    r"docs/use\.md: pip install .*": "asks an index; .ci/run installs the same packages",
}
"""Page and command -> why nothing runs it."""


def commands() -> Iterator[str]:
    """Each command as ``PAGE: COMMAND``, and each cell of Python as ``PAGE: python``."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if name in WHOLE_PAGES:
            continue
        yield from (f"{name}: python" for _ in cells(page, "python"))
        for cell in cells(page, "sh"):
            for line in re.sub(r"\\\n *", "", cell).splitlines():
                for part in re.split(r" && (?!\.venv/bin/pip|sha256sum)", line.partition("  #")[0].strip()):
                    words = re.sub(r"^(PATH=\S+ )?(\.venv/bin/)?(?=tightframe|nvflare)", "", part)
                    if words and not words.startswith("#"):
                        yield f"{name}: {words}"


def test_each_is_run_or_it_is_said_why_not() -> None:
    used, wrong = set(), []
    for command in commands():
        words = command.partition(": ")[2]
        if words.startswith("tightframe ") and free(shlex.split(words)[1:]):
            continue  # test_commands.py runs them
        if re.fullmatch(BENCHMARKS, words):
            continue
        fitting = [pattern for pattern in (*RUN, *NOT_RUN) if re.fullmatch(pattern, command)]
        used |= {*fitting}
        if len(fitting) != 1:
            wrong.append((command, fitting))
    assert wrong == []
    assert used == {*RUN, *NOT_RUN}, "lines that the guides do not have any more"
    for place in {*RUN.values(), *WHOLE_PAGES.values()}:
        assert (ROOT / place).is_file(), place
    assert {name for name in WHOLE_PAGES if (ROOT / name).is_file()} == set(WHOLE_PAGES)


def _script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@pytest.mark.whole
def test_benchmarks_take_what_the_guides_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data sets, partitions, methods with their options, tables and rows are theirs; nothing is trained."""
    found = {"methods": 0, "papers": 0}
    for command in {command.partition(": ")[2] for command in commands()}:
        if not re.fullmatch(BENCHMARKS, command):
            continue
        words = shlex.split(re.sub(r"=(/data/\w+|FOLDER)\b", f"={tmp_path}", command))[1:]
        name = Path(words[0]).stem
        found[name] += 1
        script = _script(name, monkeypatch)
        given = script.parser().parse_args(words[1:])
        if name == "methods":
            assert script.bench_of(given).name == given.data and given.methods
        elif given.table:
            script.chosen(script.TABLES[given.table](), given.rows, given.columns)
        else:
            assert given.all and script.QUEUE[given.scale]
    assert found["methods"] >= 8 and found["papers"] >= 5
