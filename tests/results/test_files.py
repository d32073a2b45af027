"""Result files: what is written is what is read; older files, later ones, and what is none of ours."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.results.anything import models
from tests.support.results.building import evaluated, row

from tightframe import federation
from tightframe.errors import RunError
from tightframe.files import write_atomically
from tightframe.report.writing import write
from tightframe.results.files import MAX_BYTES, ResultFile, ResultsError
from tightframe.results.local_report import SiloReport
from tightframe.results.model_card import Card
from tightframe.results.outcome import Ended, Outcome
from tightframe.results.rows import Row, read_rows, write_rows
from tightframe.results.status import Status
from tightframe.rounds.server import resume

BEFORE = Path(__file__).parent / "before_formats"
READING = ("scores_deviation", "read_at", "reading")
"""What only the last model's line of ``metrics.jsonl`` has."""
WHOLE: tuple[type[ResultFile], ...] = (Outcome, Card, SiloReport, Status)
KINDS = ("exact", "noisy")
some = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plain(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_written(values: Any) -> Any:
    """What was written before there were these keys."""
    later = (
        "format",
        "phases",
        "disclosed",
        "withdrawn",
        "absent_classes",
        *(("job", "classes") if "silo" in values else ()),
    )
    kept = {key: value for key, value in values.items() if key not in later}
    for part, keys in (("privacy", ("pld", "alone", "exact_jobs")), ("personal", ("findings",))):
        if isinstance(kept.get(part), dict):
            kept[part] = {key: item for key, item in kept[part].items() if key not in keys}
    return kept


@pytest.mark.whole
@pytest.mark.parametrize("of", WHOLE)
@given(data=st.data())
@settings(some, max_examples=10)  # each of which draws every field
def test_a_file_is_read_as_it_was_written(of: type[ResultFile], data: st.DataObject) -> None:
    made = data.draw(models(of))
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder))
        assert of.read(Path(folder)) == made
        assert next(iter(plain(Path(folder) / of.NAME))) == "format"


@given(st.lists(models(Row), max_size=3))
@some
def test_rows_are_read_as_they_were_written_but_for_their_matrices(rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), rows)
        found = read_rows(Path(folder))
    assert [item.as_json() for item in found] == [item.as_json() for item in rows]
    last = max((place for place, item in enumerate(rows) if item.evaluation is not None), default=None)
    assert [item.model_dump() for item in found] == [
        _without_counts(item, reading=place == last) for place, item in enumerate(rows)
    ]


def _without_counts(item: Row, *, reading: bool) -> dict[str, Any]:
    values = item.model_dump()
    for fold in (values["evaluation"] or {}).values():
        for name in ("confusion", "scores", *(() if reading else READING)):
            fold.pop(name, None)
    return values


@given(models(Row))
@some
def test_a_checkpoint_keeps_rows_whole(item: Row) -> None:
    values = json.loads(json.dumps(item.model_dump(mode="json", by_alias=True)))
    assert Row.model_validate(values) == item


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[federation.Result, Path]:
    folder = tmp_path_factory.mktemp("run")
    names = ["site-1", "site-2", "site-3"]
    result = federation.run(
        "fedmr",
        names,
        2,
        dataset="fed_heart_disease",
        model="mlp",
        model_options={"widths": [4], "standardise": True},
        training={"epochs": 1, "batch_size": 64},
        personalise=True,
        local_baseline_epochs=1,
        folder=folder,
    )
    return result, folder


@pytest.mark.whole
def test_the_files_of_a_run_are_its_values(run: tuple[federation.Result, Path]) -> None:
    result, folder = run
    server, outcome = folder / "server", result.outcome
    assert isinstance(outcome, Ended) and outcome.folder == server
    assert Outcome.read(server) == Outcome.model_validate(outcome.as_json())
    assert plain(server / "outcome.json") == outcome.as_json()
    assert not {"rows", "folder", "title", "temporary"} & set(outcome.as_json())
    assert [item.as_json() for item in read_rows(server)] == [item.as_json() for item in outcome.rows]
    card = Card.read(server)
    assert card.evaluation == outcome.evaluation is not None and card.job == outcome.job
    report = SiloReport.read(folder / "site-2")
    assert report.local_only is not None and report.personal is not None and report.silo == "site-2"
    assert plain(folder / "site-2" / "local_report.json") == report.as_json()


def test_a_run_writes_the_keys_that_it_always_has(run: tuple[federation.Result, Path]) -> None:
    """Readers outside know the keys of the files; only their form's number and the later keys are new."""
    _, folder = run
    for name, place in (
        ("outcome.json", "server"),
        ("model.json", "server"),
        ("local_report.json", "site-1"),
    ):
        old, new = plain(BEFORE / "exact" / name), plain(folder / place / name)
        assert list(as_written(new)) == list(as_written(old)) and new["format"] == 1
    old_rows, new_rows = lines(BEFORE / "exact" / "metrics.jsonl"), lines(folder / "server" / "metrics.jsonl")
    for old, new in zip(old_rows, new_rows[1:], strict=True):  # the silos' flags of classes come first now
        phases = 2 if new["kind"] == "statistics" else 1
        assert list(as_written(new)) == list(old) and (new["format"], new["phases"]) == (1, phases)
        for fold in ("validation", "test") if new["evaluation"] else ():
            later = {"read_at", "reading"} if fold == "test" and new["round"] == 2 else set()
            assert set(new["evaluation"][fold]) == set(old["evaluation"][fold]) | later


@pytest.mark.parametrize("kind", KINDS)
def test_files_from_before_there_was_a_format_are_read_whole(kind: str) -> None:
    folder = BEFORE / kind
    for of in (Outcome, Card, SiloReport):
        values = plain(folder / of.NAME)
        assert as_written(of.read(folder).as_json()) == as_written(values)
    assert [as_written(item.as_json()) for item in read_rows(folder)] == lines(folder / "metrics.jsonl")


def test_a_status_from_before_is_read_whole() -> None:
    values = plain(BEFORE / "status.json")
    found = Status.checked(values, "the status").as_json()
    assert found.pop("format") == 1 and found.pop("course") == [] and found == values


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_from_before_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RunError, match=r"^TF-521: .*format 3, but got 2: another version"):
        resume.read(BEFORE / kind / "checkpoint.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_made_of_files_from_before(kind: str, tmp_path: Path) -> None:
    for name in ("outcome.json", "metrics.jsonl", "model.json"):
        (tmp_path / name).write_bytes((BEFORE / kind / name).read_bytes())
    assert "Course of training" in write(tmp_path).read_text()


def test_rows_from_before_get_the_number_of_their_phases(tmp_path: Path) -> None:
    rows = [row(1, "train", ["a"], phase=place, phases=3) for place in range(3)] + [row(2, "train", ["a"])]
    values = [as_written(item.as_json()) for item in rows]
    write_atomically(tmp_path / "metrics.jsonl", "".join(json.dumps(item) + "\n" for item in values).encode())
    found = read_rows(tmp_path)
    assert [item.phases for item in found] == [3, 3, 3, 1]
    assert [item.makes_model for item in found] == [False, False, True, True]


@pytest.mark.parametrize("of", WHOLE)
@pytest.mark.parametrize("form", [2, 10**30, 0, -1, True, "1", 1.5, None, [1]])
def test_a_form_that_is_not_known_is_refused(of: type[ResultFile], form: Any) -> None:
    later = type(form) is int and form > 1
    words = (
        "a later version of Tightframe wrote it. Read it with that" if later else "it is no file of results"
    )
    with pytest.raises(ResultsError, match=rf"TF-802: Expected the file to be of format 1.*{words}"):
        of.checked({"format": form}, "the file")


def test_a_later_file_names_its_version(tmp_path: Path) -> None:
    values = plain(BEFORE / "exact" / "outcome.json") | {"format": 2, "versions": {"tightframe": "2.3.1"}}
    (tmp_path / "outcome.json").write_text(json.dumps(values))
    with pytest.raises(ResultsError, match=r"outcome\.json .* of format 2: Tightframe 2\.3\.1 wrote it"):
        Outcome.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1, "train", ["a"]).as_json() | {"format": 2}))
    with pytest.raises(ResultsError, match=r"metrics\.jsonl, line 1 to be of format 1 or earlier"):
        read_rows(tmp_path)
    with pytest.raises(ValueError, match="Expected a format from 1 to 1, but got 2"):
        Row.model_validate(row(1, "train", ["a"]).model_dump() | {"format": 2})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": None}, r"rounds: .*no `format` in it: Tightframe 0\.1\.0 wrote it.* Read it with that"),
        ({"rounds": None, "versions": {}}, "a version before there were format numbers wrote it"),
        (
            {"rounds": None, "versions": {"tightframe": "\x1b[2J"}},
            "a version before there were format numbers",
        ),
        ({"rounds": None, "format": 1}, r"rounds: Input should be a valid integer\.$"),
    ],
)
def test_an_older_file_that_does_not_fit_says_which_version_wrote_it(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    values = plain(BEFORE / "exact" / "outcome.json") | change
    (tmp_path / "outcome.json").write_text(json.dumps(values))
    with pytest.raises(ResultsError, match=words):
        Outcome.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10**5, b"\xff", b"[]", b"3", b"null", b"NaN"])
def test_what_is_no_file_of_results_is_named(content: bytes, tmp_path: Path) -> None:
    for of in (Outcome, Card, SiloReport):
        (tmp_path / of.NAME).write_bytes(content)
        with pytest.raises(ResultsError, match=rf"TF-802: .*{of.NAME}"):
            of.read(tmp_path)


def test_a_file_that_is_too_large_or_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"Expected to read .*outcome\.json, but got: No such file"):
        Outcome.read(tmp_path)
    with (tmp_path / "outcome.json").open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    with pytest.raises(ResultsError, match="it is no file of results"):
        Outcome.read(tmp_path)


def test_numbers_that_are_none_are_neither_read_nor_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite"):
        evaluated(accuracy=float("nan"))
    diverged = row(1, "train", ["a"]).model_copy(update={"training": {"loss": float("inf")}})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_rows(tmp_path, [diverged])
    assert not list(tmp_path.iterdir())
