"""Records taken out of an ended run of one sum: the model without them, to the bit; what is not opened."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.methods.test_one_sum import PIXELS, digits, equal

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.errors import JobError, RunError
from tightframe.learning import one_sum
from tightframe.learning.one_sum import withdrawal
from tightframe.learning.one_sum.temperature import between
from tightframe.learning.one_sum.withdrawal import EVALUATED, records_in, stored_total
from tightframe.methods.fed3r import solve
from tightframe.phases import Fold
from tightframe.results.files import CHECKPOINT, MODEL
from tightframe.results.rows import Row
from tightframe.rounds import checkpoint
from tightframe.rounds.run_state import state_sha256
from tightframe.rounds.server import resume
from tightframe.rounds.server.coordinator import Result
from tightframe.rounds.setup import prepare
from tightframe.rounds.sums.secure_server import SecureSums
from tightframe.rounds.withdrawn_list import LIST
from tightframe.securesum import transcript
from tightframe.securesum.identity import Anchor

SILOS = ("a", "b", "c", "d")
FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
JOB: dict[str, Any] = {
    "job_name": "one-sum",
    "method": "fed3r",
    **PIXELS,
    "rounds": 1,
    "sites": list(SILOS),
    "min_sites": 4,
    "summation": "secure",
}
pytestmark = pytest.mark.whole
Names = Mapping[str, Sequence[str]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Runs that end with an error on purpose fill no screen."""
    caplog.set_level(logging.CRITICAL, logger="tightframe.run")


def records(rare: int | None = None) -> dict[str, ArrayData]:
    """800 training digits at four silos, two records a patient in each fold, of different classes.

    Args:
        rare: a class of which each silo has 6 training records only.
    """
    folds = digits()
    made: dict[str, ArrayData] = {}
    for place, site in enumerate(SILOS):
        parts, patients = {}, {}
        for fold in FOLDS:
            images, labels = (item[place::4] for item in folds[fold])
            if rare is not None and fold == "train":
                few = np.flatnonzero(labels == rare)[6:]
                images, labels = np.delete(images, few, axis=0), np.delete(labels, few)
            parts[fold] = (images, labels)
            patients[fold] = np.argsort(np.argsort(labels, kind="stable")) % (len(labels) // 2)
        made[site] = ArrayData(parts, source="digits", num_classes=10, patients=patients)
    return made


def of_class(data: ArrayData, label: int, count: int, skip: int = 0, fold: Fold = "train") -> list[str]:
    """Lines that name records of a class."""
    places = np.flatnonzero(data.labels(fold) == label)[skip : skip + count]
    assert len(places) == count
    return [f"record,{fold}-{place}" for place in places]


def without(data: Mapping[str, ArrayData], names: Names) -> dict[str, ArrayData]:
    """Records as a hospital without the named ones would have them, made without the code under test."""
    made = {}
    for site, silo in data.items():
        parts, patients = {}, {}
        for fold in FOLDS:
            of = silo.patient_ids(fold)
            assert of is not None
            keep = np.array(
                [
                    f"record,{fold}-{place}" not in names.get(site, ())
                    and f"patient,{of[place]}" not in names.get(site, ())
                    for place in range(len(of))
                ]
            )
            images, labels = silo._folds[fold]
            parts[fold] = (images[keep], labels[keep])
            patients[fold] = np.asarray(of, dtype=np.int64)[keep]
        made[site] = ArrayData(parts, source="digits", num_classes=10, patients=patients)
    return made


def entries(folder: Path, names: Names) -> dict[str, SiteEntry]:
    """Configurations of the sites, with their files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for site in SILOS:
        if site in names:  # a site without a file withdraws nothing
            path = folder / f"{site}.csv"
            path.write_text("# of 2026\n" + "\n".join(names[site]) + "\n")
            made[site] = SiteEntry(withdrawn={"digits": str(path)})
        else:
            made[site] = SiteEntry()
    return made


@dataclass
class Ended:
    """A run that has ended."""

    folder: Path
    data: Mapping[str, ArrayData]
    result: Result

    def job(self, least: int | None = None) -> JobConfig:
        return resume.withdrawal_job(self.folder / "server" / CHECKPOINT, least)

    def withdraw(self, names: Names, folder: Path, *, least: int | None = 1, **changes: Any) -> Ended:
        job = self.job(least)
        job = parse_job({**job.model_dump(mode="json"), **changes})
        found = federation.run_job(
            job, data=self.data, entries=entries(folder / "files", names), folder=folder, stopped=self.folder
        )
        return Ended(folder, self.data, found)


def run(data: Mapping[str, ArrayData], folder: Path, **changes: Any) -> Ended:
    job = parse_job({**JOB, **changes})
    return Ended(folder, data, federation.run_job(job, data=data, folder=folder))


def anew(data: Mapping[str, ArrayData], folder: Path, **changes: Any) -> Result:
    """The run that hospitals without the records would make; plain, with the bits that secure sums give."""
    return run(data, folder, **{**changes, "summation": "plain"}).result


def two_classes(data: Mapping[str, ArrayData], each: int = 5) -> dict[str, list[str]]:
    """Records of two classes at three of four silos: 30 by default."""
    return {
        site: [*of_class(data[site], 3, each), *of_class(data[site], 7, each)] for site in ("a", "b", "c")
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of all records."""
    return run(records(), tmp_path_factory.mktemp("first"))


@pytest.fixture
def first(made: Ended, tmp_path: Path) -> Ended:
    """The same with a folder of its own, in which sites note what they withdraw."""
    return Ended(Path(shutil.copytree(made.folder, tmp_path / "first")), made.data, made.result)


@pytest.fixture(scope="module")
def gone(made: Ended, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The run's folder, in which sites have noted what they withdrew, and the run without two classes."""
    folder = tmp_path_factory.mktemp("withdrawn")
    first = Ended(Path(shutil.copytree(made.folder, folder / "first")), made.data, made.result)
    return first.folder, first.withdraw(two_classes(made.data), folder / "one")


@pytest.fixture
def withdrawn(made: Ended, gone: tuple[Path, Ended], tmp_path: Path) -> tuple[Ended, Ended]:
    """Both in folders of their own."""
    place, one = gone
    folders = (
        Path(shutil.copytree(place, tmp_path / "first")),
        Path(shutil.copytree(one.folder, tmp_path / "one")),
    )
    return Ended(folders[0], made.data, made.result), Ended(folders[1], made.data, one.result)


@pytest.mark.parametrize(
    ("method", "summation", "model"),
    [
        ("fed3r", "secure", {}),
        ("fed3r", "plain", {"model": "random_features", "model_options": {"width": 32}}),
        ("fedcgs", "secure", {"model": "mlp", "model_options": {"widths": [24]}, "encoder": "random"}),
        ("fedncm", "plain", {}),
    ],
)
def test_the_model_is_that_of_a_run_without_the_records_to_the_bit(
    method: str, summation: str, model: dict[str, Any], first: Ended, tmp_path: Path
) -> None:
    """Model, total and all else of the state; records of validation and test folds are withdrawn, too."""
    data = first.data
    job: dict[str, Any] = {"method": method, "summation": summation, **model}
    whole = first if parse_job({**JOB, **job}) == parse_job(JOB) else run(data, tmp_path / "whole", **job)
    names = two_classes(data)
    for site, lines in names.items():
        for fold in EVALUATED:
            lines += [*of_class(data[site], 2, 5, fold=fold), *of_class(data[site], 9, 5, fold=fold)]
    found = whole.withdraw(names, tmp_path / "withdrawn", least=10)
    expected = anew(without(data, names), tmp_path / "again", **job)
    assert equal(found.result.state.model, expected.state.model)
    assert state_sha256(found.result.state) == state_sha256(expected.state)
    assert not equal(found.result.state.model, whole.result.state.model)
    final, again = found.result.outcome.final(), expected.outcome.final()
    assert final is not None and again is not None and final.evaluation == again.evaluation
    assert records_in(found.result.state) == 770


def test_no_count_tells_of_a_single_record_that_left_validation_or_test(first: Ended, tmp_path: Path) -> None:
    """The attack: two cards differ in one row of the test counts by one, which is a diagnosis."""
    whole, names = first.result, two_classes(first.data)
    names["a"] += ["record,validation-0", "record,test-1"]
    ended = first.withdraw(names, tmp_path / "one", least=10)
    told = ended.result.outcome.withdrawn
    assert told is not None and told.withheld == ["validation", "test"]
    assert "test records are not evaluated any more" in ended.result.outcome.screen()
    bare = anew(without(first.data, names), tmp_path / "again").state
    assert equal(stored_total(bare), stored_total(ended.result.state)), "the total is without the records"
    # No loss of the validation records is told either: the head has the temperature that it had.
    setting = prepare(first.job(10)).setting
    temperatures = []
    for state in (whole.state, ended.result.state):
        total = {name: item.numpy() for name, item in stored_total(state).items()}
        head = one_sum.solved(setting, solve, state, total).model
        temperatures.append(between(head, state.model))
    assert temperatures[0] == temperatures[1] != 1.0
    more = {site: [*lines, *of_class(first.data[site], 4, 5)] for site, lines in names.items()}
    later = ended.withdraw(more, tmp_path / "two", least=1)
    for made in (ended, later):
        rows = [row.evaluation for row in made.result.outcome.rows if row.evaluation is not None]
        assert rows and all(row.validation.records == row.test.records == 0 for row in rows)
        card = json.loads((made.folder / "server" / "model.json").read_text())
        assert card["evaluation"]["test"]["records"] == 0 and card["evaluated_by"] == []


@pytest.mark.usefixtures("pages")
def test_patients_leave_with_all_records_and_nobody_tells_who_named_none(
    first: Ended, tmp_path: Path
) -> None:
    """Patient 1 has two records in each fold; silo d names nothing."""
    names = {site: ["patient,1", "patient,30", "patient,60"] for site in ("a", "b", "c")}
    data = first.data
    whole = run(data, tmp_path / "whole", class_rules="off", summation="plain")
    ended = whole.withdraw(names, tmp_path / "withdrawn", least=6)
    expected = anew(without(data, names), tmp_path / "again", class_rules="off")
    assert state_sha256(ended.result.state) == state_sha256(expected.state)
    told = ended.result.outcome.withdrawn
    assert told is not None and (told.records, told.stay) == (18, 782)
    assert "18 training records of at least 3 hospitals left" in ended.result.outcome.screen()
    cards = [json.loads((item.folder / "server" / "model.json").read_text()) for item in (ended, whole)]
    assert cards[0]["public_weights"] == cards[1]["public_weights"], "weights would tell who withdraws"
    assert cards[0]["withdrawn"]["records"] == 18 and cards[1]["withdrawn"] is None
    pages = [(item.folder / "server" / "report.html").read_text() for item in (ended, whole)]
    assert ">Withdrawal<" in pages[0] and ">Withdrawal<" not in pages[1]


@pytest.mark.parametrize(
    ("rare", "counts", "left"),
    [
        (6, (2, 2, 2, 0), "class 8 falls below five records at three silos, and so is in no sum"),
        (10, (6, 5, 5, 0), "silo a falls below five, so that its other four leave too"),
        (4, (1, 1, 1, 0), "class 8 was never summed, so that nothing of it is subtracted"),
    ],
)
def test_the_class_rules_hold_as_in_the_run_without_the_records(
    rare: int, counts: Sequence[int], left: str, tmp_path: Path
) -> None:
    data = {
        site: ArrayData(
            {
                fold: tuple(
                    np.delete(item, few if fold == "train" else [], axis=0) for item in silo._folds[fold]
                )  # type: ignore[misc]
                for fold in FOLDS
            },
            source="digits",
            num_classes=10,
            patients={
                fold: np.arange(len(silo.labels(fold)) - (len(few) if fold == "train" else 0))
                for fold in FOLDS
            },
        )
        for site, silo in records().items()
        for few in [np.flatnonzero(silo.labels("train") == 8)[rare:]]
    }
    names = {
        site: [*of_class(data[site], 8, count), *of_class(data[site], 3, 5)]
        for site, count in zip(SILOS, counts, strict=True)
        if count
    }
    whole = run(data, tmp_path / "whole", summation="plain")
    ended = whole.withdraw(names, tmp_path / "withdrawn", least=12)
    expected = anew(without(data, names), tmp_path / "again")
    assert state_sha256(ended.result.state) == state_sha256(expected.state), left
    told = ended.result.outcome.withdrawn
    gone = {(2, 2, 2, 0): 24, (6, 5, 5, 0): 20, (1, 1, 1, 0): 0}[tuple(counts)]  # type: ignore[index]
    assert told is not None and told.records == 15 + gone


@pytest.mark.parametrize(
    ("names", "least", "match"),
    [
        ({"a": 5, "b": 5, "c": 5}, 20, "at least 20 withdrawn records at 3 silos or more.*got 15 at 3"),
        ({"a": 12}, 10, "got enough at 1"),
        ({"a": 8, "b": 8}, 10, "got enough at 2"),
        ({}, 1, "got 0 at 0"),
    ],
)
def test_too_few_records_or_silos_open_nothing_but_their_number(
    names: Mapping[str, int], least: int, match: str, first: Ended, tmp_path: Path
) -> None:
    lines = {site: of_class(first.data[site], 3, count) for site, count in names.items()}

    def lists() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in first.folder.rglob(LIST)}

    before = lists()
    with pytest.raises(RunError, match=rf"^TF-523: [\s\S]*{match}"):
        first.withdraw(lines, tmp_path, least=least)
    opened = json.loads((tmp_path / "server" / "outcome.json").read_text())
    assert not opened["trained"] and not (tmp_path / "server" / MODEL).exists()
    asked = [json.loads(line) for line in (tmp_path / "server" / "transcript.jsonl").read_text().splitlines()]
    assert "before-1" not in json.dumps(asked), "no other sum was asked for"
    assert lists() == before, "no silo's list has begun"


def test_the_number_that_a_refusal_tells_is_no_larger_than_the_rule_needs(
    first: Ended, tmp_path: Path
) -> None:
    """Silo a withdraws 13 of class 3; the sum of what silos say is 15, not 18."""
    seen: list[float] = []
    plain = withdrawal.check_numbers

    def look(totals: Any, *rest: Any) -> None:
        seen.append(float(totals[withdrawal.NAMED]))
        plain(totals, *rest)

    names = {"a": of_class(first.data["a"], 3, 13), "b": of_class(first.data["b"], 3, 5)}
    with pytest.MonkeyPatch.context() as patched, pytest.raises(RunError):
        patched.setattr(withdrawal, "check_numbers", look)
        first.withdraw(names, tmp_path, least=10)
    assert set(seen) == {15.0}


def test_a_class_that_one_or_two_silos_withdraw_from_is_not_opened(first: Ended, tmp_path: Path) -> None:
    """Its class sum would be one hospital's."""
    names = two_classes(first.data)
    names["a"] += of_class(first.data["a"], 5, 5)
    with pytest.raises(RunError, match=r"^TF-523: [\s\S]*classes 5 lose some at fewer"):
        first.withdraw(names, tmp_path)


def test_a_hospital_takes_part_with_no_single_record_of_a_class(
    first: Ended, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others learn that one has too few, and not which; its own log says of which class."""
    caplog.set_level(logging.ERROR, logger="tightframe.silo")
    names = two_classes(first.data)
    names["a"] += of_class(first.data["a"], 5, 1)
    with pytest.raises(RunError, match="1 of 4 silos in round 0 could not contribute") as caught:
        first.withdraw(names, tmp_path)
    assert caught.value.code == "TF-513" and "a:" not in str(caught.value)
    assert "a: nothing can be contributed to this sum: TF-523" in caplog.text
    assert "at least 5 of this silo's training records" in caplog.text and "of classes 5 fewer" in caplog.text
    assert not list(first.folder.rglob(LIST)), "no silo's list has begun"


def test_more_can_be_withdrawn_from_the_run_that_a_withdrawal_makes(
    withdrawn: tuple[Ended, Ended], tmp_path: Path
) -> None:
    """And the hospital may have deleted what is out; other lists from the first run are refused."""
    first, one = withdrawn
    names = two_classes(first.data)
    more = {
        site: [*lines, *of_class(first.data[site], 4, 5)] for site, lines in two_classes(first.data).items()
    }
    two = one.withdraw(more, tmp_path / "two")
    expected = anew(without(first.data, more), tmp_path / "again")
    assert state_sha256(two.result.state) == state_sha256(expected.state)
    job = two.job()
    assert job.withdraw is not None
    assert job.lineage("x") == first.job().lineage("y"), "one lineage"
    # Two withdrawals from one run with other lists would differ by single records.
    with pytest.raises(RunError) as caught:
        first.withdraw(more, tmp_path / "three")
    assert "TF-524" in str(caught.value)
    again = first.withdraw(names, tmp_path / "four")
    assert state_sha256(again.result.state) == state_sha256(one.result.state)


def test_no_list_begins_behind_a_total_that_a_silo_has_not_verified(
    first: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a false total of the numbers, which a server tells one silo and lets nobody verify."""
    names = two_classes(first.data)
    with monkeypatch.context() as lying:
        lying.setattr(SecureSums, "seal", lambda self, *args, **values: True)
        with pytest.raises(RunError, match="TF-523"):
            first.withdraw(names, tmp_path / "refused")
    assert not list(first.folder.rglob(LIST))
    ended = first.withdraw(names, tmp_path / "withdrawn")
    assert len(list(first.folder.rglob(LIST))) == len(SILOS)
    root = x509.load_pem_x509_certificate((ended.folder / "server" / "simulated_root.pem").read_bytes())
    for place in ("server", *SILOS):
        lines = (ended.folder / place / "transcript.jsonl").read_bytes().splitlines(keepends=True)
        found = transcript.verify(lines, Anchor(root.public_bytes(Encoding.DER)))
        assert [item.sum_id.phase for item in found.opened][:5] == [
            "before-0",
            "seal-0",
            "before-1",
            "seal-1",
            "before-2",
        ]


def test_an_older_total_is_not_taken_for_the_new_one(withdrawn: tuple[Ended, Ended], tmp_path: Path) -> None:
    """A server that withdraws anew from the first total, beside the silos' state of the withdrawal."""
    first, one = withdrawn
    forged = tmp_path / "forged"
    shutil.copytree(one.folder, forged)
    path = forged / "server" / CHECKPOINT
    old, new = (checkpoint.load_state(place / "server" / CHECKPOINT) for place in (first.folder, one.folder))
    checkpoint.save_state(
        path.parent,
        old.state,
        round_number=1,
        job_sha256=str(new.described["job_sha256"]),
        run=new.described["run"],
    )
    more = {
        site: [*lines, *of_class(first.data[site], 4, 5)] for site, lines in two_classes(first.data).items()
    }
    replayed = Ended(forged, first.data, one.result)
    with pytest.raises(RunError, match=r"^TF-523: [\s\S]*records that stay to be those of the total"):
        replayed.withdraw(more, tmp_path / "two")


def test_records_that_have_changed_since_are_found_before_anything_is_told(
    first: Ended, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hospital that deleted its records first cannot take out what it gave."""
    caplog.set_level(logging.ERROR, logger="tightframe.silo")
    data = {**first.data, "b": without(first.data, {"b": ["record,train-7"]})["b"]}
    with pytest.raises(RunError, match=r"^TF-513: [\s\S]*1 of 4 silos in round 0 could not contribute"):
        Ended(first.folder, data, first.result).withdraw(two_classes(first.data), tmp_path)
    assert "its sums are other ones by now" in caplog.text
    assert not (tmp_path / "server" / MODEL).exists()


def test_unknown_names_are_refused_before_anything_leaves(first: Ended, tmp_path: Path) -> None:
    names = {**two_classes(first.data), "b": ["record,train-4711", "patient,99999"]}
    with pytest.raises(RunError) as caught:
        first.withdraw(names, tmp_path)
    assert "TF-214" in str(caught.value) and "4711" not in str(caught.value), "the server learns a code"


def test_a_silo_that_is_missing_ends_the_withdrawal(first: Ended, tmp_path: Path) -> None:
    """Also where the run itself would go on with fewer."""
    ended = run(first.data, tmp_path / "whole", min_sites=3)
    shutil.rmtree(ended.folder / "d" / "silo_state")
    with pytest.raises(RunError) as caught:
        ended.withdraw(two_classes(first.data), tmp_path / "withdrawn")
    assert "did not enrol" in str(caught.value) or "TF-522" in str(caught.value)


def test_a_withdrawal_that_was_stopped_is_resumed_as_any_run(
    first: Ended, gone: tuple[Path, Ended], tmp_path: Path
) -> None:
    class PulledPlugError(Exception):
        pass

    def stop(row: Row) -> None:
        if row.kind == "closing":
            raise PulledPlugError

    names, job = two_classes(first.data), first.job(1)
    sites = entries(tmp_path / "files", names)
    with pytest.raises(PulledPlugError):
        federation.run_job(
            job,
            data=first.data,
            entries=sites,
            folder=tmp_path / "stopped",
            stopped=first.folder,
            on_round=stop,
        )
    again = resume.next_job(tmp_path / "stopped" / "server" / CHECKPOINT)
    found = federation.run_job(
        again,
        data=first.data,
        entries=sites,
        folder=tmp_path / "resumed",
        stopped=tmp_path / "stopped",
    )
    _, expected = gone
    assert state_sha256(found.state) == state_sha256(expected.result.state)
    one, two = found.outcome.final(), expected.result.outcome.final()
    assert one is not None and two is not None and one.evaluation == two.evaluation


def test_models_that_continue_from_the_run_are_named(first: Ended, tmp_path: Path) -> None:
    """A head that goes on from its model, and one that goes on from that."""
    values = {**JOB, "job_name": "tuned", "summation": "plain"}
    begun = federation.run_job(
        parse_job(values),
        data=first.data,
        folder=tmp_path / "tuned",
        initial_model=str(first.folder / "server" / MODEL),
    )
    assert begun.outcome.trained
    stranger = tmp_path / "other" / "server"
    stranger.mkdir(parents=True)
    (stranger / "model.json").write_text(json.dumps({"job": {"job_name": "other"}, "model_sha256": "0" * 64}))
    found = first.withdraw(two_classes(first.data), tmp_path / "withdrawn")
    told = found.result.outcome.withdrawn
    assert told is not None and [item.job_name for item in told.not_covered] == ["tuned"]
    assert "NOT covered: tuned" in found.result.outcome.screen()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "fedavg"}, "fedavg trains step by step.*fed3r, fedcgs, fedncm"),
        (
            {"model_options": {"widths": [], "standardise": True}},
            "model_options.standardise`, because every record's features depend",
        ),
        ({"privacy": {"epsilon": 8.0}, "weights": "uniform"}, "withdraw: not possible with `privacy`"),
    ],
)
def test_what_is_no_function_of_sums_over_records_is_refused(
    changes: dict[str, Any], match: str, first: Ended
) -> None:
    values = {**first.job().model_dump(mode="json"), **changes}
    with pytest.raises(JobError, match=match):
        prepare(values)


def test_other_jobs_have_the_hash_that_they_had(first: Ended) -> None:
    assert "withdraw" not in parse_job(JOB).model_dump()
    job = first.job()
    assert job.origin.sha256() == parse_job(JOB).sha256() != job.sha256()
    assert job.withdraw is not None and job.withdraw.min_withdrawn == 10
