"""A patient who alone has had a drug, in an honest sum of products; and a table of few possible rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.made_eicu import order, unit, write_tables
from tests.support.tables import FOUR, taken, write

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.eicu import EicuOptions, EicuSite
from tightframe.data.eicu.silo import open_site
from tightframe.data.table.common_values import common_in, common_values
from tightframe.errors import TightframeError
from tightframe.learning.few_records.distinct_rows import BITS
from tightframe.learning.one_sum.feature_sums import pooled
from tightframe.learning.one_sum.withdrawal import TOTAL
from tightframe.results.files import CHECKPOINT
from tightframe.rounds.checkpoint import load_state

DRUGS, NUMBERS, PER = 4, 5, 80
HEADER = ("id", *(f"d{place}" for place in range(DRUGS)), *(f"n{place}" for place in range(NUMBERS)), "ill")


def tables(folder: Path, *, numbers: bool = True) -> dict[str, Path]:
    """Four hospitals. At the first, one patient has had d2, and another one has d3 unlike d1."""
    draw, made = np.random.default_rng(5), {}
    for site in FOUR:
        drugs = draw.random((PER, DRUGS)) < 0.4
        drugs[:, 2], drugs[:, 3] = False, drugs[:, 1]
        if site == FOUR[0]:
            drugs[7, 2], drugs[9, 1], drugs[9, 3] = True, True, False
        values = draw.uniform(5, 95, (PER, NUMBERS)).round(2) if numbers else np.zeros((PER, NUMBERS))
        rows = [
            [
                f"{site}-{row}",
                *("yes" if had else "no" for had in drugs[row]),
                *map(str, values[row]),
                str(int(row % 3 == 0)),
                "train" if row < 60 else "test",
            ]
            for row in range(PER)
        ]
        made[site] = write(folder / f"{site}.csv", rows, header=(*HEADER, "fold"))
    return made


def job(**values: Any) -> JobConfig:
    columns = [{"column": name, "kind": "boolean"} for name in HEADER[1 : 1 + DRUGS]]
    columns += [{"column": name, "kind": "number", "low": 0, "high": 100} for name in HEADER[1 + DRUGS : -1]]
    label = {"column": "ill", "classes": [{"code": "0"}, {"code": "1"}]}
    contract = {"title": "Ward", "columns": columns, "label": label, "record": "id"}
    made = {
        "job_name": "drugs",
        "method": "fed3r",
        "model": "identity",
        "dataset": "table",
        "dataset_options": {"contract": {**contract, "fold": {"column": "fold"}}},
        "rounds": 1,
        "update_norm": 100.0,
        "sites": FOUR,
        "min_sites": 4,
    }
    return parse_job({**made, **values})


def run(files: dict[str, Path], where: Path, what: JobConfig, **policy: Any) -> Path:
    rules = {"profile": "standard", **policy}
    made = {
        site: SiteEntry.model_validate({"data": taken(path, what), "policy": rules})
        for site, path in files.items()
    }
    federation.run_job(what, entries=made, folder=where)
    return where


@pytest.mark.whole
def test_no_patient_stands_alone_in_a_row_of_the_products(tmp_path: Path) -> None:
    """Of the drug's row of X^T X, and of the difference of two drugs', only one patient is a term."""
    files = tables(tmp_path)
    read = {}
    for least in (1, 5):
        ended = run(files, tmp_path / str(least), job(), min_class_count=least)
        extra = load_state(ended / "server" / CHECKPOINT).state.extra
        total = {
            name.removeprefix(TOTAL): item.double() / 2.0**BITS
            for name, item in extra.items()
            if name.startswith(TOTAL)
        }
        gram = pooled(total).gram.numpy()
        read[least] = (gram[2], gram[1] - gram[3])
    patients = (("d0", "d1", *HEADER[5:-1]), 8), (("d0", *HEADER[5:-1]), 10)
    for (columns, line), alone, hidden in zip(patients, read[1], read[5], strict=True):
        places = [HEADER.index(name) - 1 for name in columns]
        told = files[FOUR[0]].read_text().splitlines()[line].split(",")
        values = [told[place + 1] for place in places]
        record = [
            float(value == "yes") if value in ("yes", "no") else float(value) / 50 - 1 for value in values
        ]
        scale = np.abs(alone).max() / max(1.0, np.abs(record).max())
        assert scale > 0 and np.allclose(alone[places] / scale, record, atol=0.01)
        assert not hidden.any(), "nobody's record"


def test_no_patient_alone_breaks_a_relation_of_columns() -> None:
    """Either of two drugs, and two weights: the difference of rows of X^T X was one patient's record."""
    draw = np.random.default_rng(3)
    drugs, weight = np.eye(3, dtype=bool)[draw.integers(0, 3, 120)][:, :2], draw.uniform(-1, 1, 120)
    drugs[5] = True
    after = weight.copy()
    after[8] += 0.3
    numbers = draw.normal(size=(120, 6))
    rows = np.column_stack([*drugs.T, drugs.any(1), weight, after, numbers]).astype(np.float32)
    found = common_values(rows, np.arange(120), 5)
    made = found.apply(torch.from_numpy(rows), range(120)).numpy()
    for relation in (rows, made):
        either = relation[:, 2] - relation[:, 0] - relation[:, 1]
        heavier = relation[:, 4] - relation[:, 3]
        alone = [int((np.abs(broken) > 1e-4).sum()) for broken in (either, heavier)]
        assert alone == ([1, 1] if relation is rows else [0, 0])
    assert len(found.values) == 2, "and nothing else is touched"


def test_columns_that_few_patients_have_or_tell_apart_are_the_others_where_units_train_on_them() -> None:
    """A patient's stays are one."""
    draw, owners = np.random.default_rng(4), np.concatenate([np.arange(120), np.zeros(3, dtype=int)])
    rows = (draw.random((123, 4)) < 0.5).astype(np.float32)
    rows[:, 2], rows[:, 3] = 0, 1 - rows[:, 0]
    rows[10:16, 2], rows[20:26, 3] = 1, rows[20:26, 0]
    rows[120:, 2] = 1  # a seventh patient's
    for wide, found in ((6, []), (7, [3]), (8, [2, 3])):
        assert np.unique(common_values(rows, owners, 5, wide).columns).tolist() == found


def test_few_of_few_patients_are_few_however_many_units_train() -> None:
    """64 patients of two stays each: 6 have a drug, 58 do not, both fewer than 64 units."""
    rows, owners = np.zeros((128, 2), np.float32), np.arange(128) % 64
    rows[owners < 6, 0], rows[owners % 2 == 0, 1] = 1, 1
    found = common_values(rows, owners, 5, 64)
    assert np.unique(found.columns).tolist() == [0] and (found.varied, found.lost) == (2, (0,))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_stay_of_nobody_makes_no_patients_of_another_ones_stays(tmp_path: Path, repeated: bool) -> None:
    """A patient's six stays, or one that a job repeats, alone have a drug: in products, its row is theirs."""
    stays = [unit(place, place, 1, "Expired" if place < 6 else "Alive") for place in range(50)]
    for stay in stays[:1] if repeated else stays[6:12]:
        stay[-1] = "p-rare"
    stays[20][-1] = ""
    stays += [unit(100 + place, 100 + place, 2) for place in range(4)]
    orders = [order(stay[0], 200 + stay[0] % 2) for stay in stays]
    orders += [order(stay[0], 900) for stay in stays if stay[-1] == "p-rare"]
    root = write_tables(
        tmp_path / "made", stays, [[1, "<100", "f", "South"], [2, "<100", "f", "South"]], orders
    )
    options = EicuOptions(drugs=3, train_hospitals=1, oversample_minority=repeated)
    data = open_site(EicuSite(root=root, region="South"), options)
    had = data.matrix.dense(data.rows("train").tolist())[:, 2]
    assert 5 <= had.sum() <= 10
    found = common_in(data, 5)
    assert found is not None and (found.columns == 2).sum() == had.sum(), "each of them is hidden"


@pytest.mark.whole
def test_a_table_of_few_possible_rows_takes_privacy(tmp_path: Path) -> None:
    """Of ten yes/no columns, 195 of 268 different records were found, with label, in one round's update."""
    files = tables(tmp_path, numbers=False)
    trained = {"method": "fedavg", "model": "mlp", "model_options": {"widths": [8]}}
    with pytest.raises(TightframeError, match="site-1, site-2, site-3 and site-4 refused: TF-628"):
        run(files, tmp_path / "few", job(**trained))
    run(files, tmp_path / "none asked", job(**trained), min_row_bits=0)
