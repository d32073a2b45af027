"""A field of the update group opens for any silos, so that it must not be a function of records and model.

If it is, two totals for one model over different silos reveal one silo's value. So every method is run twice
with other salts and the same broadcasts: what salts change must not be small beside what records change.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.attacks.malicious_server import HEART, Records
from tests.support.runs import asked, missed

from tightframe import methods
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.profiles import Profile
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.phases import Cohort, Field
from tightframe.rounds.codec import unpack
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.state_files import SALT
from tightframe.rounds.sums.common import Peers

SITES = ("hospital-1", "hospital-2", "hospital-3")
REPEATED = 0.02
"""Largest share of the difference between two silos that is taken for a repetition."""
SLOW = {"epochs": 1, "batch_size": 65_536, "learning_rate": 1e-4, "momentum": 0.0, "weight_decay": 0.0}
"""A hostile job's training: whole batches if it gets them, and steps that leave the model where it is."""
FEDILC = ("fedsgd", "geometric", "geo_substitute", "fishr_arith_fullbatch", "inter_geo", "intra_arith")
VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "fedilc": tuple({"variant": name} for name in (*FEDILC, "intra_geo")),
    "combine": (
        {},
        {"server": "fednova"},
        {"local": "scaffold", "server": "scaffold"},
        {"local": "feddc", "server": "feddc"},
        {"prototypes": "fedmr"},
    ),
    "fedavg": ({}, {"loss": "focal"}),
    "fednova": ({},),
}
CASES = [(item.name, options) for item in methods.METHODS for options in VARIANTS.get(item.name, ({},))]


def tables() -> dict[str, Records]:
    """About sixty records of thirteen columns and two classes at each hospital."""
    rng, silos = np.random.default_rng(104), {}
    for index, name in enumerate(SITES):
        folds = {}
        for fold, size in (("train", 61 + index), ("validation", 12), ("test", 12)):
            inputs = rng.normal(0.3 * index, 1 + 0.1 * index, (size, 13)).astype(np.float32)
            folds[fold] = (inputs, np.arange(size) * (7 + index) % 5 % 2)
        silos[name] = Records(ArrayData(folds, source="records", num_classes=2))
    return silos


def repetitions(values: Mapping[str, Any], folder: Path, profile: Profile) -> dict[str, tuple[Field, float]]:
    """Return each field with the L2 change of its integers by another salt, over that by other records.

    Fields that are the same at all silos say nothing of records and are left out.
    """
    data = tables()
    own = {"sites": list(SITES), "min_sites": 3, "rounds": 2, "training": SLOW, "answer_grid": 0.0}
    job = parse_job({**HEART, **own, **values})
    setup, weights = prepare(job), {name: float(len(data[name].labels("train"))) for name in SITES}
    silos = {}
    for name in SITES:
        policy = PolicyBlock(
            profile=profile,
            allow_sign_split=True,
            max_update_norm=None,
            minimum_cohort=1,
            records_per_feature=0,
        )
        entry = SiteEntry(state_dir=str(folder), policy=policy)
        context = SiloContext(
            name, job, entry, folder / name, records=data[name], job_id="a", production=True, memory_only=True
        )
        context.state_folder.mkdir(parents=True)
        silos[name] = context, Contributor(context)
    state, opened = setup.initial_state(), dict[str, list[str]]()
    changes: dict[str, tuple[Field, np.ndarray]] = {}
    for slot, exchange in enumerate(setup.plan):
        total = missed(setup, exchange, slot) if slot else None
        broadcast = dict(exchange.phase.broadcast(state))
        phase = exchange.phase_for(broadcast)
        twice: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in SITES}
        for salt, name in itertools.product("ab", SITES):
            context, contributor = silos[name]
            (context.state_folder / SALT).write_text(salt * 32)
            message = asked(setup, exchange, state, opened=opened if salt == "a" else {})
            made = contributor.contribute(message, Peers(weights, 2), total=total)
            groups = [unpack(phase.schema, group, term) for group, term in made.term.items()]
            twice[name].append({key: item for group in groups for key, item in group.items()})
        for item in phase.schema.fields:
            before = changes.get(item.name, (item, np.zeros(2)))[1]
            changes[item.name] = item, before + _changes(item, twice)
        totals = {
            item.name: sum(twice[name][1][item.name] for name in SITES).reshape(item.shape)  # type: ignore[attr-defined]
            for item in phase.schema.fields
        }
        cohort = Cohort.of(exchange.round, SITES, weights)
        state, opened = exchange.advance(state, totals, cohort).state, {str(made.sum_id): list(SITES)}
    return {
        name: (item, float(np.sqrt(salts / silos)))
        for name, (item, (salts, silos)) in changes.items()
        if silos
    }


def _changes(field: Field, twice: Mapping[str, list[dict[str, np.ndarray]]]) -> np.ndarray:
    """Return the squared L2 changes of a field by another salt, and by another silo, summed over silos."""
    signed = np.int64 if field.ring == 64 else np.int32
    sent = [[term[field.name].view(signed).astype(float) for term in twice[name]] for name in SITES]
    salts = sum(float(np.square(one - two).sum()) for one, two in sent)
    return np.array(
        [salts, sum(float(np.square(a - b).sum()) for (a, _), (b, _) in itertools.pairwise(sent))]
    )


def _job(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values = {"method": name, "method_options": dict(options), "model_options": {"widths": [16]}}
    values["rounds"] = methods.get(name).rounds or 2
    logarithms = options.get("variant") in ("geometric", "geo_substitute", "inter_geo")  # which have no norm
    return values | ({"update_norm": None} if logarithms else {})


@pytest.mark.whole
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_no_field_that_any_silos_can_open_repeats(
    name: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    found = repetitions(_job(name, options), tmp_path, "standard")
    repeated = {key: ratio for key, (item, ratio) in found.items() if not item.static and ratio < REPEATED}
    assert not repeated, "declare these fields static, or draw what they are computed from"


@pytest.mark.whole
def test_the_comparison_sees_what_repeats(tmp_path: Path) -> None:
    """Counts, FedNova's normaliser, FedCurv's terms; and any update where batches are not drawn."""
    for name, field in (("fednova", "normaliser"), ("fedcurv", "fisher/head.weight")):
        item, ratio = repetitions(_job(name, {}), tmp_path / name, "standard")[field]
        assert item.static and ratio < REPEATED
    whole = repetitions(_job("fedavg", {}), tmp_path / "whole", "research")
    assert whole["update/head.weight"][1] < 1e-4
    halves = {**SLOW, "batch_size": 31, "learning_rate": 1e-3}
    found = repetitions({**_job("fedavg", {}), "training": halves}, tmp_path / "halves", "research")
    assert found["update/head.weight"][1] < REPEATED, "small batches of one epoch are one large one"
