"""``tightframe site cohort``: what a hospital sees, is told, and decides."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.app.site.checks.test_all_checks import _kit
from tests.support.outputs import checked
from typer.testing import CliRunner, Result

from tightframe.errors import SiteConfigError, TightframeError
from tightframe.rounds.notes import VERIFIED
from tightframe.rounds.state_files import STATE
from tightframe.rounds.sums.revealed import REVEALED
from tightframe.rounds.sums.vault import locked_ledger, remember
from tightframe.rounds.withdrawn_list import NAMES
from tightframe.securesum.errors import StaticCohortError
from tightframe.securesum.site.journal import (
    CohortAccepted,
    Entry,
    Evaluated,
    EvaluationsAccepted,
    History,
    ProfileAccepted,
    ProfileUsed,
    RoundsAccepted,
    StateSummed,
    StaticOpened,
    Trained,
)
from tightframe_app.cli import app
from tightframe_app.site.memory import Memory, memory_of

SITE, DATASET = "hospital-a", "fed_isic2019:0123456789abcdef"
BEFORE = ("hospital-a", "hospital-b", "hospital-c", "hospital-d")
SMALLER = ("hospital-a", "hospital-b", "hospital-c")
OTHER = ("hospital-a", "hospital-b", "hospital-c", "hospital-e")
OPENED: tuple[Entry, ...] = (
    StaticOpened(DATASET, BEFORE, "job-1"),
    StaticOpened("another", ("hospital-a", "hospital-x", "hospital-y"), "job-2"),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    _kit(tmp_path / "site[1]" / "startup")
    path = tmp_path / "site[1]" / "local" / "tightframe.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"state_dir": str(tmp_path / "state")}))
    return path


@pytest.fixture
def journal(config: Path) -> Memory:
    """What the site remembers after two jobs."""
    memory = memory_of(config, SITE, None)
    write(memory, OPENED)
    return memory


def write(memory: Memory, entries: Sequence[Entry]) -> None:
    with locked_ledger(memory.site_ledger()) as ledger:
        remember(ledger, entries)


@pytest.fixture
def cohort(config: Path) -> Callable[..., Result]:
    def run(command: str, *arguments: str, site: str = SITE, answer: str | None = None) -> Result:
        line = ["site", "cohort", command, "-c", str(config), "-s", site, *arguments]
        return CliRunner().invoke(app, line, input=answer)

    return run


def accept(cohort: Callable[..., Result], silos: tuple[str, ...], *more: str, **changes: str) -> Result:
    return cohort("accept", "--dataset", DATASET, "--silos", ", ".join(silos), *more, **changes)


def test_show_names_every_data_set_and_how_its_cohort_came_about(
    cohort: Callable[..., Result], journal: Memory
) -> None:
    done = cohort("show")
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "another: hospital-a, hospital-x, hospital-y (opened in job 'job-2')",
        f"{DATASET}: hospital-a, hospital-b, hospital-c, hospital-d (opened in job 'job-1')",
    ]
    write(journal, [CohortAccepted(DATASET, SMALLER)])
    assert f"{DATASET}: hospital-a, hospital-b, hospital-c (accepted by hand)" in cohort("show").output


def test_show_as_json(config: Path, cohort: Callable[..., Result], journal: Memory) -> None:
    told = checked("site cohort show", cohort("show", "--format", "json").output)["cohorts"]
    assert [item["how"] for item in told] == ["opened", "opened"]
    assert {item["dataset"]: tuple(item["silos"]) for item in told}[DATASET] == BEFORE
    evaluation = Evaluated(DATASET, "job-1", 1, "train-0", bytes(32), 2, 150_000, 200_000)
    write(journal, [ProfileUsed(DATASET, (("weights", "exact"),), "job-1"), evaluation])
    command = ["site", "release", "show", "-c", str(config), "-s", SITE, "--format", "json"]
    told = checked("site release show", CliRunner().invoke(app, command).output)
    used = {"dataset": DATASET, "settings": {"weights": "exact"}, "job": "job-1"}
    evaluated = {"dataset": DATASET, "models": 2, "validation": 0.15, "test": 0.2}
    evaluated["allowed"] = {"models": 11, "validation": 0.5, "test": 0.5}
    evaluated["left"] = {"models": 9, "validation": 0.35, "test": 0.3}
    trained = {"dataset": DATASET, "sums": 0, "taken": 0.0, "left": 1.0, "sums_left": None}
    known = {"format": 1, "site": SITE, "formed": [used], "evaluated": [evaluated]}
    assert told == {**known, "trained": [trained]}
    write(
        journal,
        [
            Trained(DATASET, "job-1", number, "train-0", "job-1", bytes(32), 2, 2, 13, 40, 25)
            for number in (1, 2)
        ],
    )
    told = checked("site release show", CliRunner().invoke(app, command).output)
    assert told["trained"] == [{**trained, "sums": 2, "taken": 0.32, "left": 0.68, "sums_left": 4}]
    config.write_text(json.dumps({**json.loads(config.read_text()), "policy": {"records_per_feature": 0}}))
    told = checked("site release show", CliRunner().invoke(app, command).output)
    assert told["trained"] == [{**trained, "sums": 2, "taken": None, "left": None}]
    write(journal, [ProfileUsed(DATASET, (("steps", "batches of 32"), ("weights", "exact")), "job-1")])
    said = CliRunner().invoke(app, command[:-2]).output
    assert "All are of one job" in said and "alike" not in said and "several jobs" not in said


def test_each_consent_is_shown_with_its_time_and_the_job_that_used_it_first(
    config: Path, journal: Memory
) -> None:
    other = (("steps", "batches of 32"), ("weights", "other"))
    write(journal, [ProfileUsed(DATASET, (("weights", "exact"),), "job-1"), ProfileAccepted(DATASET, other)])
    write(journal, [CohortAccepted(DATASET, SMALLER)])
    command = ["site", "release", "show", "-c", str(config)]
    said = CliRunner().invoke(app, command).output
    (when,) = re.findall(r"on (\S+ \S+) UTC: weights other; not used yet\n", said)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(f"{when}+00:00")) < timedelta(minutes=5)
    assert f"UTC: the cohort {', '.join(SMALLER)}; not used yet\n" in said
    write(journal, [ProfileUsed(DATASET, other, "job-3"), ProfileUsed(DATASET, other, "job-4")])
    folder = config.parents[1] / "job-3" / f"app_{SITE}" / "config"
    folder.mkdir(parents=True)
    job = {"executors": [{"executor": {"args": {"job_name": "masses", "method": "fedavg"}}}]}
    (folder / "config_fed_client.json").write_text(json.dumps(job))
    said, day = CliRunner().invoke(app, command).output, when.partition(" ")[0]
    assert f"UTC: weights other; first used in job masses, fedavg (job-3) of {day}\n" in said
    three = f"job-1 of {day}, masses, fedavg (job-3) of {day}, job-4 of {day}"
    assert f"Of {three} none are counted" in " ".join(said.split())
    runs = [EvaluationsAccepted(DATASET, b"c" * 32), RoundsAccepted(DATASET, b"d" * 32)]
    write(journal, [*runs, Evaluated(DATASET, "job-5", 1, "train-0", b"c" * 32, 1, 0, 70_000)])
    said = CliRunner().invoke(app, command).output
    assert "UTC: all exact evaluations of one run of a job; first used in job job-5 of" in said
    assert "UTC: all exact rounds of one run of a job; not used yet\n" in said
    assert f"used in job job-5 of {day})" in said, "whose sums are formed as those before"


def test_what_all_releases_give_together_is_said_and_the_site_is_the_certificates(
    config: Path, journal: Memory
) -> None:
    def show() -> str:
        done = CliRunner().invoke(app, ["site", "release", "show", "-c", str(config)])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    write(journal, [ProfileUsed(DATASET, (("steps", "batches of 32"), ("weights", "exact")), "job-1")])
    assert "All were formed alike" in show() and "batches of 32" not in show()
    assert (
        "sums of trained layers and features so far: none. Of job-1 of" in show()
        and "none are counted" in show()
    )
    write(journal, [Evaluated(DATASET, "job-1", 1, "train-0", b"c" * 32, 1, 0, 70_000)])
    assert "7.0% of what the test records hold." in show() and show().count("none are counted") == 1
    write(journal, [Trained(DATASET, "job-1", 1, "train-0", "job-1", bytes(32), 2, 2, 13, 40, 25)])
    told = "1 in 1 job, 16.0% of what the records allow (`records_per_feature` 2); 84.0% is left, for 5 more"
    assert told in show() and "none are counted" not in show()
    assert "Allowed over all jobs: 11 models, 50.0% of what the validation" in show()
    assert "Left: 10 models, 50.0% of" in show() and "hold, 43.0% of what the test records hold." in show()
    write(journal, [ProfileAccepted(DATASET, (("steps", "batches of 32"), ("weights", "other")))])
    assert "All were formed alike" in show()
    write(journal, [ProfileUsed(DATASET, (("steps", "batches of 32"), ("weights", "exact")), "job-1b")])
    write(journal, [StateSummed("job-1b", job, 1, b"x" * 32) for job in ("job-1b", "job-1c", "job-1d")])
    for withdrawal, noted in (
        ("job-1c", "s withdraws resumed\n"),
        ("job-1d", "s withdraws resumed s resumed\n"),
    ):
        folder = Path(str(journal.entry.state_dir)) / withdrawal / SITE / STATE
        folder.mkdir(parents=True)
        (folder / NAMES).write_text("{}")
        (folder / VERIFIED).write_text(noted)
    (day,) = {str(each) for each in memory_of(config, None, None).first_days.values()}
    first, again = f"job-1 of {day}", f"job-1b of {day}"
    assert f"(used in job {first}, accepted by hand, used in job {again})" in show()
    assert f"Job job-1c of {day} withdrew records from the chain of job {again}" in show()
    assert f"Job job-1d of {day} went on with job {again}." in show()
    write(journal, [ProfileUsed(DATASET, (("steps", "batches of 32"),), "job-2")])
    assert "No setting that several jobs have differs" in show() and "alike" not in show()
    write(journal, [ProfileUsed(DATASET, (("steps", "batches of 32"), ("weights", "uniform")), "job-3")])
    assert "used in job job-3 of" in (said := show())
    assert "weights: exact or uniform" in said and REVEALED["weights"] in said
    assert REVEALED["steps"] not in said and "learns exactly" not in said
    write(journal, [ProfileUsed(DATASET, (("training from seed 1", "one way"),), "job-4")])
    assert REVEALED["training"] not in show()
    write(journal, [ProfileUsed(DATASET, (("training", "another"),), "job-5")])
    assert "training from seed 1: one way or another" in (said := show()) and REVEALED["training"] in said
    write(journal, [CohortAccepted(DATASET, SMALLER)])
    assert "learns exactly the counts of hospital-d together" in show()


def test_show_before_anything_was_opened(cohort: Callable[..., Result], tmp_path: Path) -> None:
    done = cohort("show")
    assert done.exit_code == 0 and "has not opened counts of any data set yet" in done.output
    assert not (tmp_path / "state").exists(), "looking leaves nothing behind"


def test_a_site_sees_its_own_journal_only(
    cohort: Callable[..., Result], journal: Memory, tmp_path: Path
) -> None:
    done = cohort("show", site="hospital-b")
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-615"
    shutil.rmtree(tmp_path / "site[1]" / "startup")
    assert "has not opened counts" in cohort("show", site="hospital-b").output


def test_accept_opens_the_counts_for_the_new_cohort_and_only_for_it(
    cohort: Callable[..., Result], journal: Memory
) -> None:
    before = History(journal.read())
    before.check_static(DATASET, BEFORE)
    with pytest.raises(StaticCohortError):
        before.check_static(DATASET, SMALLER)
    done = accept(cohort, SMALLER, "--yes")
    assert done.exit_code == 0, done.output
    assert f"{DATASET}: this site's counts may now be opened for {', '.join(SMALLER)}" in done.output
    assert journal.read() == [*OPENED, CohortAccepted(DATASET, SMALLER)], "nothing is taken away"
    after = History(journal.read())
    after.check_static(DATASET, SMALLER)
    for cohort_not_accepted in (BEFORE, OTHER):
        with pytest.raises(StaticCohortError):
            after.check_static(DATASET, cohort_not_accepted)
    after.check_static("another", ("hospital-a", "hospital-x", "hospital-y"))


@pytest.mark.parametrize(
    ("silos", "difference"),
    [
        (SMALLER, "the counts of hospital-d together"),
        ((*BEFORE, "hospital-e"), "the counts of hospital-e together"),
        (OTHER, "the counts of hospital-d together\n  minus the counts of hospital-e together"),
        (
            ("hospital-a", "hospital-b", "hospital-e"),
            "the counts of hospital-c, hospital-d together\n  minus the counts of hospital-e together",
        ),
    ],
)
def test_it_says_what_is_given_away_before_it_asks(
    cohort: Callable[..., Result], journal: Memory, silos: tuple[str, ...], difference: str
) -> None:
    done = accept(cohort, silos, answer="y\n")
    assert done.exit_code == 0
    said, asked, _ = done.output.partition("Accept it at this site?")
    assert asked, "it asks"
    assert f"The total over\n  {', '.join(BEFORE)}\nwas opened already" in said
    assert f"Once the total over\n  {', '.join(silos)}\nis opened too" in said
    assert f"learns exactly\n  {difference}\n" in said
    assert "Secure sums do not prevent it" in said
    assert journal.read()[-1] == CohortAccepted(DATASET, silos)


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_without_a_yes_nothing_is_changed(
    cohort: Callable[..., Result], journal: Memory, answer: str
) -> None:
    kept = journal.read()
    done = accept(cohort, SMALLER, answer=answer)
    assert done.exit_code == 1 and "may now be opened" not in done.output
    assert journal.read() == kept


def test_what_holds_already_is_not_written_again(cohort: Callable[..., Result], journal: Memory) -> None:
    done = accept(cohort, BEFORE)
    assert done.exit_code == 0 and "is open for" in done.output and "already" in done.output
    assert journal.read() == list(OPENED)


def test_the_difference_is_told_from_every_cohort_so_far(
    config: Path, cohort: Callable[..., Result], journal: Memory
) -> None:
    """A lead that goes by way of a larger one was shown to open hospital-f alone, and opened hospital-e."""
    five = (*BEFORE, "hospital-e")
    assert accept(cohort, (*five, "hospital-f"), "--yes").exit_code == 0
    done = accept(cohort, five, "--yes")
    for before in (BEFORE, (*five, "hospital-f")):
        assert f"The total over\n  {', '.join(before)}\nwas opened already" in done.output
    write(journal, [ProfileUsed(DATASET, (("weights", "exact"),), "job-1")])
    for said in (done.output, CliRunner().invoke(app, ["site", "release", "show", "-c", str(config)]).output):
        for name in ("hospital-e", "hospital-f"):
            assert f"learns exactly the counts of {name} together" in " ".join(said.split())


@pytest.mark.parametrize(
    "silos",
    [
        ("hospital-b", "hospital-c", "hospital-d"),  # without this site
        ("hospital-a", "hospital-b"),  # two: a sum minus one's own is the other's
        ("hospital-a", "hospital-a", "hospital-b"),
        (),
        ("hospital-a", *(f"h-{number}" for number in range(250))),
    ],
)
def test_strangers_and_cohorts_that_cannot_be_are_refused(
    cohort: Callable[..., Result], journal: Memory, silos: tuple[str, ...]
) -> None:
    done = accept(cohort, silos, "--yes")
    assert done.exit_code == 2 and "--silos" in done.output
    assert journal.read() == list(OPENED)


@pytest.mark.parametrize("site", ["hospital-b", "hospital-z"])
def test_a_site_without_that_data_set_has_nothing_to_accept(
    cohort: Callable[..., Result], journal: Memory, config: Path, tmp_path: Path, site: str
) -> None:
    shutil.rmtree(tmp_path / "site[1]" / "startup")
    done = accept(cohort, (*SMALLER, "hospital-z"), "--yes", site=site)
    assert done.exit_code == 2 and "--dataset" in done.output
    assert not (tmp_path / "state" / "privacy" / site).exists()
    done = cohort("accept", "--dataset", "unknown", "--silos", ",".join(SMALLER), "--yes")
    assert done.exit_code == 2 and "--dataset" in done.output
    assert memory_of(config, SITE, None).read() == list(OPENED)


def test_a_configuration_that_cannot_be_used_is_a_named_error(
    cohort: Callable[..., Result], config: Path
) -> None:
    config.write_text("{}")
    for done in (cohort("show"), accept(cohort, SMALLER, "--yes")):
        assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-201"
        assert "state_dir" in str(done.exception)
    config.write_text('{"state_dir": "relative"}')
    done = cohort("show")
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-202"
    config.unlink()
    done = cohort("show")
    assert isinstance(done.exception, FileNotFoundError) and str(config) in str(done.exception)


def test_a_journal_that_was_altered_is_not_taken_for_an_empty_one(
    cohort: Callable[..., Result], journal: Memory
) -> None:
    with sqlite3.connect(journal.places.ledger) as database:
        database.execute("DELETE FROM entries")
    database.close()
    for done in (cohort("show"), accept(cohort, SMALLER, "--yes")):
        assert isinstance(done.exception, TightframeError) and done.exception.code == "TF-702"


def test_without_the_sites_key_nothing_is_decided(
    cohort: Callable[..., Result], journal: Memory, config: Path
) -> None:
    kept = journal.read()
    (config.parent.parent / "startup" / "fed_client.json").unlink()
    assert "hospital-d" in cohort("show").output, "looking needs no key"
    done = accept(cohort, SMALLER, "--yes")
    assert isinstance(done.exception, SiteConfigError) and done.exception.code == "TF-615"
    assert "--kit" in str(done.exception) and memory_of(config, SITE, None).read() == kept


def test_a_ledger_is_verified_and_explained_with_the_root_of_the_kit(config: Path, journal: Memory) -> None:
    verified = CliRunner().invoke(app, ["ledger", "verify", "-c", str(config)])
    assert verified.exit_code == 0 and "whole:" in verified.output, verified.output
    told = CliRunner().invoke(app, ["ledger", "explain", "-c", str(config)])
    assert "checked: hashes and signatures" in told.output, told.output
    write(journal, [StaticOpened(DATASET, SMALLER, "job-3")])
    connection = sqlite3.connect(journal.places.ledger)
    with connection:
        connection.execute("UPDATE entries SET time = '2020' WHERE sequence = 1")
    connection.close()
    for command in ("verify", "explain"):
        done = CliRunner().invoke(app, ["ledger", command, "-c", str(config)])
        assert done.exit_code != 0, done.output
    alone = CliRunner().invoke(app, ["ledger", "verify", "--state-dir", str(config.parents[2] / "state")])
    assert alone.exit_code == 2 and "--root" in alone.output
