"""The job with differential privacy through NVFlare, a process for every task: charged, kept, told."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.engine.asking import FILE
from tests.support.engine.simulation import REDUCED, simulate_job

from tightframe.privacy.ledger.chain import read_ledger
from tightframe_app.jobs import folders, recipes

SITES = ["site-1", "site-2"]
SERVER = "app/config/config_fed_server.json"


def test_each_silos_ledger_outlasts_its_processes_and_consoles_see_the_run(tmp_path: Path) -> None:
    # Every record in every step: what sampled steps cost takes a second in each of many processes. Plain sums
    # take one process an exchange and silo in place of two; ``tests/rounds/private`` has them secure.
    changes = {**REDUCED, "rounds": 2, "privacy.noise_multiplier": 2.0, "training.batch_size": 512}
    changes["summation"] = "plain"
    job = recipes.get("fedmr_isic_dp").job(sites=SITES, changes=changes)
    files = folders.job_files(job)
    server = json.loads(files[SERVER])
    server.setdefault("components", []).append({"id": "console", "path": "asking.Console", "args": {}})
    folder = tmp_path / "private"
    folders.write_job({**files, SERVER: json.dumps(server)}, folder)
    # By the engine's own command with one thread, one worker serves all silos in turn.
    done = simulate_job(folder, tmp_path, threads=1, engine_command=True)
    assert done.code == 0, done.output
    assert done.outcome["privacy"]["epsilon"] == 8.0 and done.outcome["evaluation"] is None
    assert not (done.server / "tb_events").exists(), "no board is asked for"
    for site in SITES:
        state = done.workspace / site / "simulate_job" / "silo_state"
        entries = read_ledger(state / "privacy" / site / "ledger.sqlite", check=None).entries
        purposes = [entry.charge.purpose for entry in entries if entry.charge is not None]
        assert purposes == ["round 1 training", "round 1 class sums", "round 2 training"]
    told = [row["privacy"] for row in done.rows if row["kind"] == "train"]
    assert [sum(item["silos"] for item in one["histogram"]) for one in told] == [len(SITES)] * 2
    assert (
        done.outcome["privacy_spent"] == told[-1] and f"up to epsilon {told[-1]['range'][1]:g}" in done.output
    )
    asked = [json.loads(line) for line in (done.server / FILE).read_text().splitlines()]
    seen = [item["stats"]["tightframe"] for item in asked]
    places = {(item["kind"], item["round"]) for item in seen if item["state"] == "summing"}
    assert {("train", 1), ("train", 2), ("closing", 2)} <= places
    # What the first round cost is seen while the second one goes on.
    second = [item for item in seen if (item["kind"], item["round"]) == ("train", 2)]
    assert second[0]["privacy"] == told[0] and second[0]["epsilon"] == told[0]["range"][1]
    assert all(item["joined"] == SITES and not item["refused"] for item in seen if item["round"])
    assert {frozenset(item["answer"]) for item in asked} == {frozenset(seen[0])}
