"""Records withdrawn from a run of a provisioned federation: the model without them, to the bit; else nothing.

The oracle is a run in this process, with plain arrays that never had the records.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.fuel.flare_api.flare_api import new_secure_session
from safetensors.numpy import load_file
from tests.support.production.federation import LEAD, SERVER, SITES, Federation, running
from tests.support.production.private import Search
from tests.support.production.reach import reachable

from tightframe import data, federation
from tightframe.config.job import parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.data.base import FOLDS
from tightframe.data.withdrawn import record_ids
from tightframe.phases import Fold
from tightframe.rounds.run_state import state_sha256
from tightframe.rounds.server import resume
from tightframe.rounds.server.coordinator import Result

EACH = 5
"""Records of one class that each of three hospitals withdraws: 15, of which ten must be."""
FEW = {"records_per_feature": 0}
"""Rule of these hospitals: products of a few withdrawn records' features may leave."""
SMALL = ("dataset_options.image_size=16", "model_options.J=2", "model_options.width=24")
Names = Mapping[str, list[str]]


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with running(tmp_path_factory.mktemp("federation")) as made:
        for site in SITES:  # the second job and those after it read what the first one stored
            configure(made, site, lambda values: values.update(feature_cache="kept"))
            configure(made, site, lambda values: values["policy"].update(FEW))
        yield made


def submitted(consortium: Federation, job: Path) -> tuple[str, Path]:
    """Sign and run a job as the lead; the engine's last word, and the results as downloaded."""
    with contextlib.closing(new_secure_session(LEAD, str(consortium.kit(LEAD)))) as session:
        job_id = session.submit_job(str(consortium.signed(job)))
        until = time.monotonic() + 200
        while not str((meta := session.get_job_meta(job_id))["status"]).startswith("FINISHED"):
            assert time.monotonic() < until, f"{job_id} is not over: {meta}"
            time.sleep(0.5)
        return meta["status"], Path(session.download_job_result(job_id))


def export(
    consortium: Federation, folder: str, *arguments: str, name: str = "fed3r_isic"
) -> tuple[Path, str]:
    path = consortium.folder / folder
    return path, consortium.run_here("jobs", "export", "fed3r_isic", *arguments, "-o", str(path))


def configure(consortium: Federation, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = consortium.kit(name) / "local" / "tightframe.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values))


def name_records(consortium: Federation, names: Names) -> None:
    """Each hospital writes its own file, which its configuration names."""
    for site in SITES:
        file = consortium.folder / f"{site}-withdrawn.csv"
        file.write_text("# letters\n" + "".join(f"record,{name}\n" for name in names[site]))
        configure(consortium, site, lambda values: values.update(withdrawn={"fed_isic2019": str(file)}))  # noqa: B023


@pytest.fixture(scope="module")
def whole(consortium: Federation) -> Path:
    """Results of the run from which records are withdrawn."""
    job, _ = export(consortium, "job", "--sites", ",".join(SITES), *_sets(*SMALL))
    status, results = submitted(consortium, job)
    assert status == "FINISHED:COMPLETED", consortium.said(SERVER)[-3000:]
    return results


@pytest.fixture(scope="module")
def tuned(consortium: Federation, whole: Path) -> str:
    """Id of an ended job that continued from the model of the run."""
    model = whole / "workspace" / "model.safetensors"
    configure(
        consortium, SERVER, lambda values: values.setdefault("server", {}).update(initial_model=str(model))
    )
    given = hashlib.sha256(model.read_bytes()).hexdigest()
    for site in SITES:
        configure(consortium, site, lambda values: values.update(accepted_models={given: "the run's own"}))
    more = _sets(*SMALL, "job_name=tuned", f"initial_model_sha256={given}")
    job, _ = export(consortium, "tuned", "--sites", ",".join(SITES), *more)
    status, results = submitted(consortium, job)
    assert status == "FINISHED:COMPLETED", consortium.said(SERVER)[-3000:]
    configure(consortium, SERVER, lambda values: values["server"].pop("initial_model"))
    return results.name


@pytest.fixture(scope="module")
def names(consortium: Federation) -> Names:
    """Training records of one class, at each hospital."""
    return {site: _of_class(consortium, site, 2)[:EACH] for site in SITES}


def _sets(*values: str) -> list[str]:
    return [text for value in values for text in ("--set", value)]


def _opened(consortium: Federation, site: str) -> Any:
    spec, options = data.get("fed_isic2019"), {"image_size": 16}
    values = {"root": str(consortium.records(site)), "center": SITES.index(site) + 1}
    return spec.open(spec.site.model_validate(values), spec.options(**options))


def _of_class(consortium: Federation, site: str, label: int) -> list[str]:
    opened = _opened(consortium, site)
    ids = record_ids(opened, "train")
    return [ids[place] for place in np.flatnonzero(opened.labels("train") == label)]


def in_process(consortium: Federation, results: Path, names: Names) -> Result:
    """The same job here, of arrays without the named records, under the policies that sites have."""
    silos, entries = {}, {}
    for site in SITES:
        kept = json.loads((consortium.kit(site) / "local" / "tightframe.json").read_text())
        entries[site] = SiteEntry.model_validate({"policy": kept["policy"]})
        opened = _opened(consortium, site)
        parts: dict[Fold, tuple[Any, Any]] = {}
        for fold in FOLDS:
            stay = [place for place, name in enumerate(record_ids(opened, fold)) if name not in names[site]]
            of = opened.records(fold)
            pictures = torch.stack([of[place][0] for place in stay]).numpy()
            parts[fold] = (pictures, opened.labels(fold)[stay])
        silos[site] = ArrayData(parts, source="pictures", num_classes=8)
    job = parse_job(json.loads((results / "workspace" / "model.json").read_text())["job"])
    return federation.run_job(job.origin, data=silos, entries=entries)


def same(results: Path, expected: Result) -> bool:
    """Whether model and all of the server's state are the same bits."""
    found = load_file(results / "workspace" / "model.safetensors")
    tensors = {name: value.numpy() for name, value in expected.state.model.items()}
    stored, _ = resume.read(results / "workspace" / "checkpoint.safetensors")
    return (
        found.keys() == tensors.keys()
        and all(found[name].tobytes() == tensors[name].tobytes() for name in found)
        and state_sha256(stored.state) == state_sha256(expected.state)
    )


def outcome(results: Path) -> dict[str, Any]:
    return dict(json.loads((results / "workspace" / "outcome.json").read_text()))


@pytest.fixture(scope="module")
def withdrawn(consortium: Federation, whole: Path, tuned: str, names: Names) -> Path:
    """Results of the withdrawal."""
    name_records(consortium, names)
    job, told = export(consortium, "next", "--withdraw-from", str(whole))
    assert "at least 10 must be withdrawn" in told
    assert f"will NOT be covered: tuned in {whole.parent / tuned}" in told, "of what lies beside it"
    status, results = submitted(consortium, job)
    assert status == "FINISHED:COMPLETED", consortium.said(SERVER)[-3000:]
    return results


def test_the_model_is_that_of_a_run_without_the_records_to_the_bit(
    consortium: Federation, whole: Path, withdrawn: Path, names: Names
) -> None:
    none = {site: [] for site in SITES}
    assert same(whole, in_process(consortium, whole, none)), "production and this process agree before"
    again = in_process(consortium, whole, names)
    assert same(withdrawn, again) and not same(whole, again)
    told = outcome(withdrawn)
    assert told["withdrawn"]["records"] == EACH * len(SITES) and told["trained"] is True
    for site in SITES:
        (model,) = consortium.kit(site).glob(f"{withdrawn.name}/model.safetensors")
        assert model.read_bytes() == (withdrawn / "workspace" / "model.safetensors").read_bytes()
        log = (consortium.kit(site) / withdrawn.name / "log.txt").read_text()
        assert f"withdraws {EACH} training, 0 validation and 0 test records from run {whole.name}" in log


def test_a_model_that_continued_from_the_run_is_listed_though_its_job_has_ended(
    consortium: Federation, withdrawn: Path, tuned: str
) -> None:
    """The engine has moved that job's results into its store."""
    (item,) = outcome(withdrawn)["withdrawn"]["not_covered"]
    assert (item["job_name"], item["how"]) == ("tuned", "starts from its model")
    assert Path(item["folder"]) == consortium.state(SERVER) / "jobs" / tuned
    assert "NOT covered: tuned" in (withdrawn / "workspace" / "log.txt").read_text()
    assert "NOT covered: tuned" in (withdrawn / "workspace" / "report.html").read_text()


def test_neither_server_nor_lead_learns_whom_a_hospital_named(
    consortium: Federation, withdrawn: Path, names: Names
) -> None:
    search = Search()
    for site in SITES:
        for name in names[site]:
            search.text(site, name)
    found, searched = search.files(reachable(consortium))
    assert found == {} and searched > 20
    own, _ = search.files([consortium.folder / "hospital-1-withdrawn.csv"])
    assert set(own) == {"hospital-1"}, "and the search finds them where they are"


def test_features_on_a_hospitals_disk_are_its_own_and_later_jobs_read_them(
    consortium: Federation, whole: Path, tuned: str
) -> None:
    search = Search()
    for site in SITES:
        stored = list(consortium.state(site).rglob("features/**/*.safetensors"))
        assert stored and {path.stat().st_mode & 0o777 for path in stored} == {0o600}
        for path in stored:
            search.parts(site, load_file(path)["features"].tobytes())
        read, computed = ((consortium.kit(site) / job / "log.txt").read_text() for job in (tuned, whole.name))
        assert "records for stored features" in read and "computing features" not in read
        assert "computing features" in computed
    found, searched = search.files(reachable(consortium))
    assert found == {} and searched > 20


def test_one_record_more_is_not_withdrawn_from_the_same_run(
    consortium: Federation, whole: Path, withdrawn: Path, names: Names
) -> None:
    """The two totals would differ by it. The hospital's list outlives its jobs."""
    more = dict(names) | {"hospital-1": [*names["hospital-1"], _of_class(consortium, "hospital-1", 2)[EACH]]}
    name_records(consortium, more)
    job, _ = export(consortium, "more", "--withdraw-from", str(whole))
    status, results = submitted(consortium, job)
    assert status == "FINISHED:EXECUTION_EXCEPTION"
    assert "hospital-1 refused: TF-524" in outcome(results)["reason"]
    assert not (results / "workspace" / "model.safetensors").exists()
