"""A start whose weights the job's author made: records in clear from a class sum, and whom it needs now."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.tables import FOUR, taken, write

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.errors import TightframeError
from tightframe.learning import model_update
from tightframe.learning.few_records.distinct_rows import BITS
from tightframe.learning.one_sum.feature_sums import SUMS
from tightframe.learning.one_sum.withdrawal import TOTAL
from tightframe.results.files import CHECKPOINT
from tightframe.rounds.checkpoint import load_state
from tightframe.rounds.setup import prepare

COLUMNS = tuple(f"c{place}" for place in range(8))
"""As many as a network on them needs."""
STEPS, SCALE, SHIFT, TILT = 24, 2.0**-5, 2.0**-10, 2.0**-9
WIDTH = 3 * STEPS
ABOVE = torch.linspace(-0.2, 0.9, STEPS)
"""Thresholds of c0 in the model's inputs."""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four hospitals, 240 patients, two classes."""
    draw, others = np.random.default_rng(2), np.random.default_rng(3)
    folder, made = tmp_path_factory.mktemp("tables"), {}
    for site in FOUR:
        values = [*np.hstack([draw.normal(50, 15, (60, 4)), others.normal(50, 15, (60, 4))]).clip(1, 99)]
        rows = [[f"{site}-{row}", *map(str, of.round(2)), str(row % 2)] for row, of in enumerate(values)]
        made[site] = write(folder / f"{site}.csv", rows, header=("id", *COLUMNS, "ill"))
    return made


def crafted(folder: Path) -> tuple[JobConfig, Path]:
    """An honest-looking job, and the first layer behind its start.

    Of each threshold one hinge on c0, one that is a little higher, which counts whom it does not vanish for,
    and one that leans towards c1.
    """
    columns = [{"column": name, "kind": "number", "low": 0, "high": 100} for name in COLUMNS]
    classes = [{"code": "0"}, {"code": "1"}]
    contract = {"title": "Ward", "columns": columns, "label": {"column": "ill", "classes": classes}}
    job: dict[str, Any] = {
        "job_name": "means",
        "method": "fedncm",
        "model": "mlp",
        "model_options": {"widths": [WIDTH]},
        "dataset": "table",
        "dataset_options": {"contract": {**contract, "record": "id"}},
        "rounds": 1,
        "update_norm": 100.0,
        "sites": FOUR,
        "min_sites": 4,
    }
    tensors = dict(model_update.build_template(prepare(parse_job(job)).setting).state_dict())
    weight, bias = torch.zeros(3, STEPS, len(COLUMNS)), -SCALE * ABOVE.repeat(3, 1)
    weight[:, :, 0], weight[2, :, 1] = SCALE, SCALE * TILT
    bias[1:] += SCALE * torch.tensor([[SHIFT], [TILT]])
    (name,) = (name for name in tensors if name.startswith("backbone") and name.endswith("weight"))
    tensors |= {name: weight.reshape(WIDTH, -1), name.replace("weight", "bias"): bias.flatten()}
    path = folder / "start.safetensors"
    save_file({key: item.contiguous() for key, item in tensors.items()}, path)
    return parse_job({**job, "initial_model_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}), path


def entries(tables: dict[str, Path], job: JobConfig, **values: Any) -> dict[str, SiteEntry]:
    return {
        site: SiteEntry.model_validate({"data": taken(path, job), **values}) for site, path in tables.items()
    }


def read_records(sums: torch.Tensor) -> list[tuple[float, float]]:
    """Return c0 and c1 of each patient who is alone between two thresholds, by differences of a class sum."""
    plain, shifted, tilted = (sums / SCALE).reshape(3, STEPS)
    counts = ((shifted - plain) / SHIFT).round()
    values = torch.stack([plain + counts * ABOVE, (tilted - plain) / TILT - counts])
    alone = (counts[:-1] - counts[1:]) == 1
    between = (values[:, :-1] - values[:, 1:])[:, alone]
    return [((a + 1) * 50, (b + 1) * 50) for a, b in between.T.tolist()]


@pytest.mark.whole
def test_a_crafted_start_reads_records_from_a_class_sum_and_a_person_is_asked_first(
    tables: dict[str, Path], tmp_path: Path
) -> None:
    job, start = crafted(tmp_path)

    def run(name: str, where: dict[str, Path], **values: Any) -> Path:
        made = entries(where, job, **values)
        federation.run_job(job, entries=made, folder=tmp_path / name, initial_model=str(start))
        return tmp_path / name

    policy = {"profile": "standard"}
    nowhere = {site: tmp_path / "no table.csv" for site in tables}  # none is opened
    for name, values in {
        "not asked": {"policy": policy},
        "another": {"policy": policy, "accepted_models": {"0" * 64: "by M."}},
        "none": {
            "policy": {**policy, "given_models": "none"},
            "accepted_models": {job.initial_model_sha256: "by M."},
        },
    }.items():
        with pytest.raises(TightframeError, match="site-1, site-2, site-3 and site-4 refused: TF-626"):
            run(name, nowhere, **values)
    accepted = {job.initial_model_sha256: "by M., who was told what it does"}
    read = [np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2, 9)) for path in tables.values()]
    every = np.concatenate(read)
    ill = every[every[:, 2] == 1, :2]
    # Five are alone between two thresholds. By the rule each counts on the others' side of a unit.
    for limit, number in ((0, 5), (2, 0)):
        limited = {**policy, "records_per_feature": limit}
        ended = run(f"limit {limit}", tables, policy=limited, accepted_models=accepted)
        sums = load_state(ended / "server" / CHECKPOINT).state.extra[TOTAL + SUMS][1] / 2.0**BITS
        told = read_records(sums)
        assert len(told) == number and all(np.abs(ill - record).max(1).min() < 0.3 for record in told)
