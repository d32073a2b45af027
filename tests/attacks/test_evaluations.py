"""Exact evaluations are equations on the test records, and those of several jobs add up.

Whoever reads the totals solves them (``tests/rounds/test_evaluation_bits.py``); whoever steers the model
reads one record's values out of twenty. So each hospital counts, and remembers, what it has told.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.attacks.kits import accept_release
from tests.support.attacks.malicious_server import Federation, Records, hearts, identity
from tests.support.tables import write

from tightframe.config.policy import PolicyBlock
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.silo import open_site
from tightframe.errors import PolicyError, SecureSumError
from tightframe.results.local_report import SiloReport
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import Evaluated, History

FEW = PolicyBlock(profile="standard", max_evaluations=5, evaluated_share=None, min_row_bits=0)


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(3)


def federation(data: dict[str, Records], state: Path, job_id: str, **changes: Any) -> Federation:
    return Federation({"rounds": 2}, data, state=state, job_id=job_id, **{"policy": FEW, **changes})


def run(found: Federation) -> None:
    for exchange in found.enroll().setup.plan:
        found.sum(*exchange.place)


def refused(found: Federation, name: str = "hospital-1") -> str:
    with pytest.raises(SecureSumError) as caught:
        found.ask_to_enroll(name, found.params())
    assert caught.value.code == "TF-627"
    return str(caught.value)


def journal(found: Federation, name: str = "hospital-1") -> History:
    return History(read_journal(found.sessions[name].context.ledger_paths, check=None))


@pytest.mark.whole
def test_jobs_that_differ_in_the_seed_add_up_and_a_new_process_remembers(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    first = federation(hospitals, tmp_path, "job-a")
    run(first)
    reported = SiloReport.read(first.sessions["hospital-1"].context.run_dir).disclosed
    assert reported is not None and reported.evaluated == ("3 models (at most 5 over all jobs)",)
    told = journal(first).evaluated("hearts")
    assert told[0] == 3 and min(told) > 0, "a start of the author's choice of seed, and two models"
    # Each federation has hospitals of its own processes, over the same folders.
    other = Federation({"rounds": 2, "seed": 1}, hospitals, state=tmp_path, job_id="job-b", policy=FEW)
    said = refused(other)
    assert "within 5 models" in said and "3 models in this job after 3 in earlier ones" in said
    assert '"models": 2, "score_bins": 32} would fit' in said, "the start's and the last"
    small = {"rounds": 2, "seed": 1, "evaluation": {"models": 2}}
    run(Federation(small, hospitals, state=tmp_path, job_id="job-c", policy=FEW))
    assert "no smaller `evaluation` would fit" in refused(
        Federation(small, hospitals, state=tmp_path, job_id="job-d", policy=FEW)
    )


@pytest.mark.whole
def test_a_private_jobs_report_counts_the_exact_jobs_before_it(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    run(federation(hospitals, tmp_path, "job-a"))
    values = {"rounds": 1, "weights": "uniform", "privacy": {"epsilon": 8.0, "delta": 1e-5}}
    private = Federation(values, hospitals, state=tmp_path, job_id="job-b", policy=FEW)
    run(private)
    reported = SiloReport.read(private.sessions["hospital-1"].context.run_dir).privacy
    assert reported is not None and reported.exact_jobs == 1


@pytest.mark.whole
def test_a_person_accepts_the_evaluations_of_one_run(hospitals: dict[str, Records], tmp_path: Path) -> None:
    run(federation(hospitals, tmp_path, "job-a"))
    again = federation(hospitals, tmp_path, "job-b")
    refused(again)
    for name in hospitals:
        done = accept_release(again, name, tmp_path, identity, "--evaluations")
        assert done.exit_code == 0, done.output
        assert "3 models" in done.output and "can be computed" in done.output
    run(again)
    refused(federation(hospitals, tmp_path, "job-c"))
    found = journal(again)
    assert found.evaluated("hearts")[0] == 6


@pytest.mark.whole
def test_two_jobs_set_up_at_once_tell_no_more_than_one_after_the_other(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    one, other = (federation(hospitals, tmp_path, job).enroll() for job in ("job-a", "job-b"))
    for found, number in itertools.product((one, other), (1, 2)):
        found.sum("train", number)
    one.sum("closing", 2)
    with pytest.raises(SecureSumError, match=r"^TF-627: "):
        other.sum("closing", 2)
    assert journal(one).evaluated("hearts")[0] == 5


def test_bits_of_small_folds_run_out_before_models_do(hospitals: dict[str, Records], tmp_path: Path) -> None:
    """And noise tells nothing that counts here."""
    tight = PolicyBlock(profile="standard", evaluated_share=0.01, min_row_bits=0)
    said = refused(federation(hospitals, tmp_path, "job-a", policy=tight))
    assert (
        "of what the test records hold" in said and "models" not in said.partition(":")[2].partition('"')[0]
    )
    private = {
        "rounds": 2,
        "weights": "uniform",
        "privacy": {"epsilon": 8.0, "delta": 1e-5},
    }
    found = Federation(private, hospitals, state=tmp_path, job_id="job-b", policy=tight)
    assert found.sessions["hospital-1"]._evaluations() is None
    found.ask_to_enroll("hospital-1", found.params())


def ward(
    folder: Path, kinds: Sequence[str], cells: Callable[[np.random.Generator], np.ndarray], rows: int = 150
) -> tuple[dict[str, Records], dict[str, Any]]:
    """Three hospitals' files of columns of these kinds, and the data set's options."""
    draw, names = np.random.default_rng(1), [f"c{place}" for place in range(len(kinds))]
    each = {"boolean": {}, "number": {"low": 0, "high": 100}}
    columns = [{"column": name, "kind": kind, **each[kind]} for name, kind in zip(names, kinds, strict=True)]
    label = {"column": "ill", "classes": [{"code": "0"}, {"code": "1"}]}
    options = {"contract": {"title": "Ward", "columns": columns, "label": label, "record": "id"}}
    data = {}
    for name in ("hospital-1", "hospital-2", "hospital-3"):
        lines = [
            [f"{name}-{row}", *map(str, found), str(row % 2)] for row, found in enumerate(cells(draw)[:rows])
        ]
        file = write(folder / f"{name}.csv", lines, header=("id", *names, "ill"))
        site = TableSite.model_validate({"file": str(file)})
        data[name] = Records(open_site(site, TableOptions.model_validate(options)))
    return data, options


def test_numbers_beside_short_columns_hide_these_only_as_far_as_scores_show_them(tmp_path: Path) -> None:
    """Seven yes/no columns and three laboratory values: 45 of 83 test records were read from ten models.

    Of 83 a guess from the columns' rates has 35.
    """

    def cells(draw: np.random.Generator) -> np.ndarray:
        had, values = draw.random((150, 7)) < 0.4, draw.gamma(4, 6.25, (150, 3)).clip(0.1, 100).round(1)
        return np.concatenate([np.where(had, "yes", "no"), values.astype(str)], axis=1)

    data, options = ward(tmp_path, ["boolean"] * 7 + ["number"] * 3, cells)
    told = {}
    for models in (3, 11):
        job = table_job(tmp_path / str(models), data, options, models)
        found = job.sessions["hospital-1"]._evaluations()
        assert found is not None
        told[models] = found.fits(found.most)
    assert told == {3: True, 11: False}


def table_job(state: Path, data: dict[str, Records], options: dict[str, Any], models: int) -> Federation:
    values = {
        "dataset": "table",
        "dataset_options": options,
        "rounds": 10,
        "evaluation": {"models": models},
    }
    return Federation(values, data, state=state, policy=PolicyBlock(profile="standard"))


@pytest.mark.parametrize("columns", ["opposites", "of pairs", "two narrow places"])
def test_columns_that_a_contract_adds_hide_nothing(columns: str, tmp_path: Path) -> None:
    """All 91 of 91 test records of seven yes/no columns were read, from one allowed job.

    The lead asked for ten more columns of each, copies and opposites: 77 bits a record. Or for numbers near 5
    or 95: 49 bits. With "and", "or" and "xor" of all pairs it was 68 of 91. All have seven.
    """

    def cells(draw: np.random.Generator) -> np.ndarray:
        had = draw.random((190, 7)) < 0.4
        if columns == "opposites":
            return np.where(np.concatenate([had, *[~had, had] * 5], axis=1), "yes", "no")
        if columns == "of pairs":
            one, other = (
                had[:, list(each)] for each in zip(*itertools.combinations(range(7), 2), strict=True)
            )
            return np.where(np.concatenate([had, one & other, one | other, one ^ other], axis=1), "yes", "no")
        return (np.where(had, 95, 5) + draw.uniform(-0.05, 0.05, had.shape)).round(4)

    kinds, models = {
        "opposites": (["boolean"] * 77, 11),
        "of pairs": (["boolean"] * 70, 5),
        "two narrow places": (["number"] * 7, 5),
    }[columns]
    data, options = ward(tmp_path, kinds, cells, 190)
    job = table_job(tmp_path, data, options, models)
    found = job.sessions["hospital-1"]._evaluations()
    assert found is not None and found.held.test < 9 * 35 and not found.fits(found.most)
    with pytest.raises(PolicyError, match="2 to the 24 possible rows") as caught:
        job.ask_to_enroll("hospital-1", job.params())
    assert caught.value.code == "TF-628"


def test_what_is_told_is_on_record_before_the_term_leaves(
    hospitals: dict[str, Records], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A term that others can open counts even if the silo's answer was its process's last act."""
    found = federation(hospitals, tmp_path, "job-a").enroll()
    session = found.sessions["hospital-1"]
    written: list[list[Any]] = []
    commit = session._secure._vault.commit  # type: ignore[union-attr]

    def noted(entries: Any, *rest: Any) -> None:
        written.append([entry for entry in entries if isinstance(entry, Evaluated)])
        commit(entries, *rest)

    monkeypatch.setattr(session._secure._vault, "commit", noted)  # type: ignore[union-attr]
    found.sum("train", 1)
    assert [len(each) for each in written] == [1, 0], "with the masked term, not with the shares"
