"""``tightframe report DIR`` as it is typed, and results that cannot be reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.securesum.transcripts import short_run, whole_run
from typer.testing import CliRunner

from tightframe.errors import TightframeError
from tightframe.report.writing import leave, write
from tightframe.results.files import ResultsError
from tightframe_app import cli

OUTCOME: dict[str, Any] = {
    "trained": False,
    "reason": "TF-504: aborted",
    "job_name": "a-job",
    "method": "fedavg",
    "rounds_done": 0,
    "rounds": 2,
    "roster": ["a", "b"],
    "synthetic": False,
    "summation": "secure",
    "sums": "secure",
    "rules": ["no differential privacy: a total itself is exact"],
    "seconds": 1.5,
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What a server has left that was stopped before anything was asked."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "outcome.json").write_text(json.dumps(OUTCOME))
    return folder


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)], env={"COLUMNS": "60"})


def code(done: Any) -> str:
    assert isinstance(done.exception, TightframeError), done.output
    return done.exception.code


def test_it_writes_the_page_beside_the_results_or_elsewhere(results: Path, tmp_path: Path) -> None:
    done = call(results)
    assert done.exit_code == 0 and done.stdout.strip() == str(results / "report.html")
    assert done.stderr.startswith(("TRAINED", "NOT TRAINED")), "how the run ended, for people"
    page = (results / "report.html").read_text()
    assert "TF-504: aborted" in page and "a-job" in page
    assert call(results, "--out", tmp_path / "new" / "page.html").exit_code == 0
    assert (tmp_path / "new" / "page.html").read_text() == page
    assert (results / "report.html").stat().st_mode & 0o777 == 0o644


def test_a_folder_without_results_is_named_and_so_are_those_below(results: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = call(empty)
    assert code(done) == "TF-801" and "a run writes them when it ends" in str(done.exception)
    with pytest.raises(ResultsError, match=f"there are results in {results}"):
        write(tmp_path)
    assert call(tmp_path / "nothing").exit_code == 2
    assert not list(empty.iterdir())


def test_a_workspace_stands_for_the_only_run_in_it(results: Path, tmp_path: Path) -> None:
    silo = tmp_path / "site-1"
    silo.mkdir()
    (silo / "local_report.json").write_text("{}")
    done = call(tmp_path)
    assert done.exit_code == 0 and done.stdout.strip() == str(results / "report.html")
    other = tmp_path / "runs" / "second"
    other.mkdir(parents=True)
    (other / "outcome.json").write_text(json.dumps(OUTCOME))
    done = call(tmp_path)
    assert (
        code(done) == "TF-801" and str(other) in str(done.exception) and str(results) in str(done.exception)
    )


@pytest.mark.parametrize("typed", ["1", "0", "mel", "mel=2", "nan"])
def test_a_prevalence_that_is_none_is_refused(results: Path, typed: str) -> None:
    done = call(results, "--prevalence", typed)
    assert done.exit_code == 2 and "above 0 and below 1" in " ".join(done.output.replace("│", "").split())
    assert not (results / "report.html").exists()


def test_a_silo_s_results_are_not_mixed_with_the_server_s(results: Path) -> None:
    (results / "local_report.json").write_text("{}")
    done = call(results)
    assert code(done) == "TF-801" and "has both" in str(done.exception)
    assert not (results / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("outcome.json", "{", "Expected JSON in .*outcome.json"),
        ("outcome.json", "[" * 100_000, "Expected JSON in .*outcome.json"),
        ("outcome.json", "[]", "outcome.json.* the whole"),
        ("outcome.json", json.dumps(OUTCOME | {"rounds": "many", "roster": 3}), "rounds: .*; roster: "),
        ("outcome.json", json.dumps(OUTCOME | {"seconds": float("nan")}), "seconds: .*finite"),
        ("metrics.jsonl", '{"round": 1, "kind": "train"}', "metrics.jsonl, line 1.*silos: Field required"),
        ("metrics.jsonl", "\n", "Expected JSON in .*line 1"),
        ("transcript.jsonl", "", "the file is empty"),
        ("transcript.jsonl", '{"line":"run"', "transcript.jsonl, line 1: Expected the line"),
    ],
)
def test_a_broken_file_is_named(results: Path, name: str, content: str, told: str) -> None:
    (results / name).write_text(content)
    with pytest.raises(ResultsError, match=told) as caught:
        write(results)
    assert caught.value.code == "TF-802" and not (results / "report.html").exists()


def test_a_transcript_may_lack_its_end_but_no_part_of_a_line_and_must_be_the_server_s(results: Path) -> None:
    path = results / "transcript.jsonl"
    whole = b"".join(whole_run().lines)
    path.write_bytes(whole)
    page = write(results).read_text()
    assert "3 opened, 2 not opened" in page and "<dd>yes</dd>" in page
    path.write_bytes(b"".join(whole_run().lines[:-1]))
    assert "no: it has no last line" in write(results).read_text()
    path.write_bytes(whole[:-20])
    with pytest.raises(ResultsError, match=f"line {len(whole_run().lines)}: Expected the line"):
        write(results)
    path.write_bytes(b"".join(short_run("site-1").lines))
    with pytest.raises(ResultsError, match="TF-802: Expected the server's transcript"):
        write(results)


def test_a_page_that_cannot_be_written(results: Path) -> None:
    (results / "report.html").mkdir()
    done = call(results)
    assert code(done) == "TF-803" and "--out" not in str(done.exception)
    assert [path.name for path in results.iterdir() if path.name.startswith(".")] == [], (
        "no half of it is left"
    )


def test_at_the_end_of_a_run_a_page_that_fails_is_logged_and_costs_nothing(
    results: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("test")
    (results / "metrics.jsonl").write_text("{")
    leave(results, log)
    assert "the report could not be written, the results are there: TF-802: " in caplog.text
    (results / "metrics.jsonl").unlink()

    def broken(found: object, wanted: object) -> str:
        raise RuntimeError("a plot")

    from tightframe.report.pages import server

    monkeypatch.setattr(server, "page", broken)
    leave(results, log)
    assert "TF-500" in caplog.text and "RuntimeError: a plot" in caplog.text
    assert not (results / "report.html").exists()
    monkeypatch.undo()
    leave(results, log)
    assert (results / "report.html").is_file()
