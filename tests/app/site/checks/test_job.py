"""``tightframe site check --job``: what the site will refuse of a job, by the code that will refuse it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from PIL import Image
from scipy.optimize import brentq
from scipy.special import ndtr
from tests.app.site.checks import test_all_checks as test_site_check
from tests.app.site.checks.test_all_checks import NOW, PROJECT, SITE, _change, _found, _problems
from tests.attacks import test_rare_values as rare
from tests.support.jobs import SMALL
from tests.support.ledgers import SiteKeys, charge, open_ledger
from tests.support.tables import contract, taken, ward_rows, write
from typer.testing import CliRunner

from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.profiles import Rules
from tightframe.config.refusals import BelowPolicyError
from tightframe.config.site import SiteEntry, parse_single, read_object
from tightframe.data.isic.folder import IMAGES
from tightframe.privacy.accounting import BudgetError
from tightframe.privacy.events import Gaussian
from tightframe.privacy.ledger.entries import Cap, DatasetError, Remembered
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.checks.enrolment import UNKNOWN, check_rows
from tightframe.rounds.silo.private_view import PrivateSilo
from tightframe.rounds.silo.view import RequestedSum
from tightframe.rounds.sums.release import release_profile
from tightframe.rounds.sums.vault import locked_ledger, remember
from tightframe.securesum.site.journal import (
    CohortAccepted,
    Entry,
    Evaluated,
    ProfileUsed,
    StaticOpened,
    Trained,
)
from tightframe_app.cli import app
from tightframe_app.jobs import folders
from tightframe_app.site.checks.all_checks import check_site
from tightframe_app.site.checks.findings import Finding, Scope
from tightframe_app.site.checks.job import check_policy
from tightframe_app.site.memory import memory_of

hospital = test_site_check.hospital
SITES = ("hospital-a", "hospital-b", "hospital-c")
DELTA = 1e-5


@pytest.fixture
def job_folder(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        values = {
            **SMALL,
            "sites": ["hospital-a", "hospital-b", "hospital-c"],
            "update_norm": 100.0,
            **changes,
        }
        folders.write_job(folders.job_files(parse_job(values)), tmp_path / "job")
        return tmp_path / "job"

    return write


def test_what_the_policy_refuses_of_a_job(hospital: Path, job_folder: Callable[..., Path]) -> None:
    """For the lead, who has the site's policy but not its records or its kit."""
    folder = job_folder(summation="plain", class_rules="off", min_sites=2)
    line = ["site", "check", "-c", str(hospital), "-j", str(folder)]
    done = CliRunner().invoke(app, line, env={"COLUMNS": "300"})
    assert done.exit_code == 1
    for rule in ("require_secure_sum", "clear_metrics", "class_rules_off", "minimum_cohort"):
        assert f"TF-614: {rule}: the job asks for" in done.output
    (text,) = _refused(hospital, job_folder(update_norm=None))
    assert text.startswith(
        "TF-614: max_update_norm: the job asks for no update_norm, at most 1000 is allowed"
    )
    (text,) = _refused(hospital, job_folder(max_weight_share=0.7))
    assert text == "TF-614: max_weight_share: the job asks for 0.7, at most 0.6 is allowed"
    job = folders.read_job(job_folder())
    assert _problems(hospital, job=job) == []
    assert any(item.area.startswith("job") and item.state == "ok" for item in _found(hospital, job=job))


def test_a_job_for_others_of_other_records_or_that_cannot_be(hospital: Path, job_folder: Any) -> None:
    job = folders.read_job(job_folder())
    problems = _problems(hospital, job={**job, "sites": ["x", "y", "z"]})
    assert any("the job is for x, y, z, not for hospital-a" in text for text in problems)
    other = {
        **job,
        "dataset": "fed_heart_disease",
        "dataset_options": {},
        "model": "mlp",
        "model_options": {},
    }
    assert any(
        "TF-201: the job asks for fed_heart_disease" in text for text in _problems(hospital, job=other)
    )
    assert any(text.startswith("job: rounds") for text in _problems(hospital, job={**job, "rounds": 0}))
    unknown = _problems(hospital, job={**job, "method": "nothing"})
    assert any("TF-101: method: " in text for text in unknown)


def test_who_may_submit(hospital: Path, job_folder: Any) -> None:
    job = folders.read_job(job_folder())
    _change(hospital, policy__allowed_submitters=["lead@hospital"])
    assert _problems(hospital, job=job, submitter="lead@hospital", records=False) == []
    (problem,) = _problems(hospital, job=job, submitter="mallory@elsewhere", records=False)
    assert "TF-614: allowed_submitters: the job asks for mallory@elsewhere" in problem
    found = _found(hospital, job=job, records=False)
    assert any(item.state == "note" and "--submitter" in item.text for item in found)


def _check(hospital: Path, folder: Path) -> tuple[int, str]:
    """Exit code, and what is printed without its line breaks."""
    line = ["site", "check", "-c", str(hospital), "--production", "--no-records", "--job", str(folder)]
    done = CliRunner().invoke(app, line)
    return done.exit_code, " ".join(done.output.split())


def _looked(hospital: Path, folder: Path) -> list[Finding]:
    return _found(hospital, job=folders.read_job(folder), records=False)


def _refused(hospital: Path, folder: Path) -> list[str]:
    return [item.text for item in _looked(hospital, folder) if item.state == "problem" and item.of_job]


def _state(hospital: Path) -> dict[str, str]:
    """All that the site remembers: files with the SHA-256 of what is in them.

    Empty ones and ``-shm`` aside: SQLite lays them beside a file that it reads, and they hold nothing.
    """
    found = [path for path in (hospital.parents[1] / "state").rglob("*") if path.is_file()]
    files = [path for path in found if path.stat().st_size and not path.name.endswith("-shm")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write(hospital: Path, *entries: Entry) -> None:
    """Add to what the site remembers."""
    with locked_ledger(memory_of(hospital, "hospital-a", None).site_ledger()) as ledger:
        remember(ledger, entries)


def _keys() -> SiteKeys:
    keys = SiteKeys()
    keys.root, keys.signer = PROJECT, SITE.signer()
    return keys


@pytest.fixture
def ledger(hospital: Path) -> Path:
    """The site's ledger after a job that spent most of a cap of epsilon 4: eight releases."""
    _change(hospital, dataset_id="skin", policy__epsilon_cap=4.0, policy__delta_cap=DELTA)
    path = ledger_path(hospital.parents[1] / "state", "hospital-a")
    with open_ledger(path, _keys(), create=True, clock=lambda: NOW) as opened:
        for number in range(8):
            opened.charge(
                charge(f"round {number} class sums", dataset_id="skin", event=Gaussian(4.5)),
                cap=Cap(4.0, DELTA, 0),
            )
    return path


def exact(mu: float) -> float:
    """Epsilon of one Gaussian at ``DELTA``, by scipy."""
    return float(
        brentq(
            lambda e: ndtr(mu / 2 - e / mu) - math.exp(e) * ndtr(-mu / 2 - e / mu) - DELTA, 0, 50, xtol=1e-12
        )
    )


def _enrolment(hospital: Path, folder: Path, state: Path) -> BudgetError | None:
    """What the silo itself says when it enrols; it notes its records in the ledger."""
    entry, _ = parse_single(read_object(hospital))
    job, keys = parse_job(folders.read_job(folder)), _keys()
    context = SiloContext(
        "hospital-a",
        job,
        entry,
        state,
        job_id="a-job-of-its-own",
        production=True,
        ledger_dir=hospital.parents[1] / "state",
        identity=lambda: (keys.signer, keys.root.anchor()),
    )
    silo = PrivateSilo(context, prepare(job), torch.device("cpu"), 0, RequestedSum(SITES, 1))
    try:
        silo.check_budget()
    except BudgetError as error:
        return error
    return None


@pytest.mark.parametrize(("epsilon", "fits"), [(3.0, False), (0.5, True)])
def test_a_job_is_held_against_what_is_left_of_the_cap(
    hospital: Path, ledger: Path, job_folder: Callable[..., Path], tmp_path: Path, epsilon: float, fits: bool
) -> None:
    """It says what the silo says at its enrolment, and leaves ledger and journal as they were."""
    folder = job_folder(weights="uniform", privacy={"epsilon": epsilon, "delta": DELTA})
    before = _state(hospital)
    code, said = _check(hospital, folder)
    told = _refused(hospital, folder)
    assert _state(hospital) == before, "looking charges nothing and notes nothing"
    left = math.floor((4.0 - exact(math.sqrt(8) / 4.5)) * 1000) / 1000
    assert f"8 entries, whole; left: epsilon {left:.3f} of 4 (delta 1e-05); see" in said
    refused = _enrolment(hospital, folder, tmp_path / "enrolment")
    assert (refused is None) == fits
    if refused is None:
        assert code == 0 and told == [] and "fit into the privacy budget" in said
        after = re.search(rf"brings it from (\S+) to (\S+) of 4 \(epsilon at delta {DELTA:g}\)", said)
        assert after is not None and float(after[1]) == pytest.approx(4 - left, abs=2e-3)
        assert float(after[1]) < float(after[2]) < float(after[1]) + epsilon
    else:
        (would,) = re.findall(r"Would fit: --set privacy\.epsilon=(\S+) ", str(refused))
        assert "planned 0" not in str(refused)
        for more, found in ((0.0, []), (0.02, [ANY])):
            privacy = {"epsilon": float(would) + more, "delta": DELTA}
            assert _refused(hospital, job_folder(weights="uniform", privacy=privacy)) == found
        assert code == 1 and f"Left: {left:.3f}." in str(refused)
        assert told == [str(refused)] and str(refused).startswith("TF-701: ")
        assert (
            "this site will refuse this job as it is: inform the lead" in said
            and "before this site takes part" not in said
        )
    assert _state(hospital) != before, "the enrolment itself does write"


def test_what_jobs_with_privacy_need_of_the_site_is_the_sites_to_mend(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    """No `dataset_id`: no export could help. No ledger: nothing to hold it against but the cap."""
    folder = job_folder(weights="uniform", privacy={"epsilon": 3.0})
    code, said = _check(hospital, folder)
    assert code == 1 and "TF-201: Expected `dataset_id`" in said and "1 problem: correct it before" in said
    assert "inform the lead" not in said
    _change(hospital, dataset_id="skin")
    assert _check(hospital, folder)[0] == 0
    ledger = ledger_path(hospital.parents[1] / "state", "hospital-a")
    ledger.parent.mkdir(parents=True)
    ledger.with_name(ledger.name + ".head").touch()
    code, said = _check(hospital, folder)
    assert code == 1 and "TF-620: " in said and "privacy budget not checked" in said


def test_records_under_another_name_are_found_before_a_run(
    hospital: Path, ledger: Path, job_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """In the words of the run, with privacy or without, and where the pictures were written anew."""
    private = {"weights": "uniform", "privacy": {"epsilon": 0.5, "delta": DELTA}}
    assert _enrolment(hospital, job_folder(**private), tmp_path / "enrolment") is None
    for changes in (private, {}):
        folder = job_folder(**changes)
        _change(hospital, dataset_id="skin")
        assert "TF-703" not in _check(hospital, folder)[1]
        _change(hospital, dataset_id="another")
        before = _state(hospital)
        code, said = _check(hospital, folder)
        assert code == 1 and "TF-703: Expected these records to go by `dataset_id` 'skin'" in said
        assert _state(hospital) == before
    for path in sorted((tmp_path / "records" / IMAGES).iterdir()):
        with Image.open(path) as shown:
            shown.convert("L").save(path, quality=60)
    code, said = _check(hospital, job_folder(**private))
    assert code == 1 and "or pictures look the same, for most records" in said
    with pytest.raises(DatasetError, match=r"TF-703: .*'skin'.* pictures look the same"):
        _enrolment(hospital, job_folder(**private), tmp_path / "again")


def test_a_job_that_goes_on_is_not_said_to_fit(
    hospital: Path, ledger: Path, job_folder: Callable[..., Path]
) -> None:
    """Its site has charged for it: what it may still charge is looked at with each charge, and not here."""
    with open_ledger(ledger, _keys(), clock=lambda: NOW) as opened:
        mine = charge("round 1 training", dataset_id="skin", event=Gaussian(40.0))
        opened.charge(replace(mine, job_id=UNKNOWN), cap=Cap(4.0, DELTA, 0))
    folder = job_folder(weights="uniform", privacy={"epsilon": 3.0, "delta": DELTA})
    code, said = _check(hospital, folder)
    assert code == 0 and "each charge is checked when it is made" in said
    assert "fit into the privacy budget" not in said


def test_a_site_whose_name_is_not_known_is_told_what_was_not_looked_at(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    folder, config = job_folder(), hospital.parents[1] / "copied.json"
    config.write_text(hospital.read_text())
    _, said = _check(config, folder)
    told = (
        "not compared with earlier jobs (cohort, sums, exact evaluations); nor with this site's records: name"
    )
    assert f"{told} its site with --site" in said
    assert "not compared with" not in _check(hospital, folder)[1]


def test_a_job_is_held_against_the_cohort_that_counts_are_open_for(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    _change(hospital, dataset_id="skin")
    _write(hospital, StaticOpened("skin", SITES, "job-1"), StaticOpened("else", ("x", "y"), "job-2"))
    before = _state(hospital)
    assert _refused(hospital, job_folder()) == []
    four = job_folder(sites=[*SITES, "hospital-d"], min_sites=3)
    (told,) = _refused(hospital, four)
    assert told.startswith("TF-612: ") and "the one that it is open for" in told
    assert "`tightframe site cohort accept`" in told
    code, said = _check(hospital, four)
    assert code == 1 and "this site will refuse this job" in said
    assert _state(hospital) == before, "no lock, no cut: a job may be writing"
    _write(hospital, CohortAccepted("skin", (*SITES, "hospital-d")))
    assert _refused(hospital, four) == []
    assert [text[:6] for text in _refused(hospital, job_folder())] == ["TF-612"]
    _change(hospital, policy__static_cohort="any")
    assert _refused(hospital, job_folder()) == []


def test_a_newcomer_is_told_that_older_totals_tell_its_counts(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    """As its peers are told by `site cohort accept`: they subtract, and it is what is left."""
    _change(hospital, dataset_id="skin")

    def told(**changes: Any) -> list[str]:
        folder = job_folder(**changes)
        return [
            item.text for item in _looked(hospital, folder) if "subtract them from this job's" in item.text
        ]

    (text,) = told()
    assert "hospital-b, hospital-c" in text and "of skin" in text and "ask them before you take part" in text
    private = {"weights": "uniform", "privacy": {"epsilon": 8.0, "delta": DELTA}}
    assert told(**private) == [], "its totals carry noise"
    assert told(summation="plain") == []
    _write(hospital, StaticOpened("skin", SITES, "job-1"))
    assert told() == [], "it is no newcomer any more"


def test_a_job_is_held_against_the_way_in_which_sums_were_formed(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    _change(hospital, dataset_id="skin")
    entry, _ = parse_single(read_object(hospital))
    profile = release_profile(prepare(parse_job(folders.read_job(job_folder()))), entry)
    assert profile is not None
    _write(hospital, ProfileUsed("skin", profile, "job-1"))
    assert _refused(hospital, job_folder()) == []
    other = job_folder(update_norm=1.0)
    (text,) = _refused(hospital, other)
    assert text.startswith("TF-617: ") and "`tightframe site release accept`" in text
    (problem,) = _problems(hospital, job=folders.read_job(other), folder=other, records=False)
    assert problem.endswith(f"To decide: tightframe site release accept -c {hospital} --job {other}")


def test_a_given_model_is_refused_until_a_person_accepts_it(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    given = job_folder(initial_model_sha256="a" * 64)
    (text,) = _refused(hospital, given)
    assert text.startswith(f"TF-626: given_models: the job asks for the given model {'a' * 64}")
    command = text.partition("a person here accepts it: ")[2].split()
    assert command == (
        f"tightframe site model accept -c {hospital} --source WHO-MADE-IT --sha256 {'a' * 64}".split()
    )
    _change(hospital, policy__given_models="none")
    (text,) = _refused(hospital, given)
    assert text.startswith("TF-626: given_models: ") and "model accept" not in text, "which would not help"
    _change(hospital, policy__given_models="accepted")
    assert CliRunner().invoke(app, [*command[1:], "--yes"]).exit_code == 0
    assert _refused(hospital, given) == []
    _change(hospital, accepted_models={"a" * 64: "its makers; accepted by M."})
    assert _refused(hospital, given) == []


def _accepted(hospital: Path, folder: Path, *more: str) -> str:
    """What ``site release accept`` says, called with the kit's folder."""
    command = ["site", "release", "accept", "-c", str(hospital.parents[1]), "--job", str(folder), "--yes"]
    done = CliRunner().invoke(app, [*command, *more])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_job_is_held_against_what_earlier_exact_evaluations_have_told(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    _change(hospital, dataset_id="skin")
    folder = job_folder(rounds=2)

    def told() -> list[str]:
        return [item.text for item in _looked(hospital, folder) if "exact evaluations" in item.text]

    (text,) = told()
    assert (
        "open 3 of 11 models, 0 opened by earlier jobs; " in text
        and "50.0% of what the test records hold" in text
    )
    assert "another job of this form is refused" not in text
    _change(hospital, policy__max_evaluations=5)
    assert told()[0].endswith("; after it another job of this form is refused (TF-627)")
    _change(hospital, policy__max_evaluations=11)
    _write(hospital, Evaluated("skin", "job-1", 1, "train-0", bytes(32), 9, 70, 80))
    (text,) = told()
    assert text.startswith("TF-627: ") and '"evaluation": {"models": 2, ' in text
    assert text in _refused(hospital, folder)
    found = _found(hospital, job=folders.read_job(folder), records=False, production=False)
    assert text in [item.text for item in found], "a file beside a kit is production's"
    (problem,) = _problems(hospital, job=folders.read_job(folder), folder=folder, records=False)
    accept = f"tightframe site release accept -c {hospital} --job {folder} --evaluations"
    assert problem.endswith(f"To decide: {accept}")
    assert "Refused all the same? TF-617 takes the option for what it names (" in _accepted(hospital, folder)
    said = _accepted(hospital, folder, "--evaluations")
    assert said.endswith("What else the job needs: `tightframe site check --job` with it.")
    assert "With those of this job: 12 models, " in said and "; allowed: 11 models, 50.0% of" in said
    assert 'Another job would disclose less: "evaluation": {"models": 2, ' in said
    (text,) = told()
    assert "open 3 of 11 models, 9 opened by earlier jobs; " in text
    assert text.endswith("; that is more than allowed: a person at this site accepted one run of it")
    said = _accepted(hospital, job_folder(rounds=2, evaluation={"models": 1}), "--evaluations")
    assert "So this job fits as it is: it needs no such consent now." in said
    _change(hospital, data={})
    assert "this site's records" in _accepted(hospital, folder, "--evaluations")


def test_a_job_is_held_against_exact_rounds_of_earlier_jobs(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    _change(hospital, dataset_id="skin", policy__max_evaluations=None, policy__evaluated_share=None)

    def told(weights: str = "exact") -> list[Finding]:
        folder = job_folder(model="mlp", model_options={"widths": [2]}, rounds=2, weights=weights)
        needles = ("sums of layers", "sums of what is trained")
        found = _looked(hospital, folder)
        return [item for item in found if any(needle in item.text for needle in needles)]

    for weights in ("exact", "uniform"):
        (found,) = told(weights=weights)
        assert found.state == "ok" and "earlier jobs took 0.0% of theirs" in found.text
    _write(hospital, Trained("skin", "job-1", 1, "train-0", "job-1", bytes(32), 2, 2, 13, 40, 4))
    (found,) = told()
    unless = "refused unless other sites have more records than this one: TF-625: "
    assert found.state == "note" and found.text.startswith(unless)
    assert found.text.endswith("`tightframe site release accept --rounds`")
    (found,) = told(weights="uniform")
    assert found.state == "problem" and found.of_job and "They took 100.0% of" in found.text
    said = _accepted(hospital, hospital.parents[1] / "job", "--rounds")
    assert "With the 2 of this job 119.0%, if the other sites" in said
    assert "A job of fewer rounds would disclose less: none of these sums fit without" in said
    (found,) = told(weights="uniform")
    assert found.state == "ok" and "earlier jobs took 100.0% of theirs; that is more: a person" in found.text


def test_a_site_is_told_which_classes_it_leaves_out_of_class_sums(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    def told(**changes: Any) -> list[str]:
        folder = job_folder(method="fedmr", model="mlp", **changes)
        return [item.text for item in _looked(hospital, folder) if "out of the class sums" in item.text]

    assert told(rounds=2, model_options={"widths": [1]}) == []
    (text,) = told(rounds=40, model_options={"widths": [8]})
    assert "leaves MEL, NV, BCC out" in text
    assert f"than the {8 * (40 - 1)} values" in text, "the first round's sum has flags only"
    values = json.loads(hospital.read_text())
    hospital.write_text(
        json.dumps({**values, "policy": {**values.get("policy", {}), "min_class_count": 100}})
    )
    (text,) = told(rounds=2, model_options={"widths": [1]})
    assert (
        "leaves MEL" in text and "than 100 patients with training records of each (`min_class_count`)" in text
    )
    assert told(rounds=2, model_options={"widths": [1]}, class_rules="off") == []


def test_a_journal_that_cannot_be_read_is_the_sites_to_mend(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    with locked_ledger(memory_of(hospital, "hospital-a", None).site_ledger()) as ledger:
        ledger.remember(Remembered(({"entry": "of a later version"},)))
    problems = _problems(hospital, job=folders.read_job(job_folder()), records=False)
    assert "TF-604" in problems[-1] and _refused(hospital, job_folder()) == []


NOISE = {"epsilon": 2.0, "delta": 1e-5, "releases": 1, "evaluation": "noisy"}
PRIVACY = {"method": "fedncm", "weights": "uniform", "privacy": NOISE}
RUN = dict.fromkeys(("lineage", "previous"), "first")
HASHES = dict.fromkeys(("checkpoint_sha256", "state_sha256"), "0" * 64)
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "require_secure_sum": (True, {"summation": "plain"}),
    "minimum_cohort": (4, {}),
    "colluders": (2, {}),
    "semi_honest_server": (False, {"server_trust": "semi_honest"}),
    "weights": (["power_of_two"], {"weights": "exact"}),
    "max_weight_share": (0.5, {"max_weight_share": 0.6}),
    "max_update_norm": (10.0, {"update_norm": 100.0}),
    "class_rules_off": (False, {"class_rules": "off"}),
    "allow_sign_split": (False, {"method": "fedilc", "method_options": {"variant": "geometric"}}),
    "pinned_only": (True, {}),
    "required_privacy": (True, {}),
    "epsilon_cap": (1.0, PRIVACY),
    "delta_cap": (1e-6, PRIVACY),
    "max_releases": (1, PRIVACY),
    "neighbours": ("patient", PRIVACY),
    "private_noise": ("own", {**PRIVACY, "method": "fedsgd", "privacy": {**NOISE, "noise": "shared"}}),
    "clear_metrics": ([], {"summation": "plain"}),
    "max_evaluations": (1, {"rounds": 3}),
    "max_score_bins": (2, {}),
    "min_answer_grid": (1.0, {"answer_grid": 0.5}),
    "allowed_methods": (["fedmr"], {}),
    "allowed_submitters": (["lead"], {}),
    "min_withdrawn": (9, {"method": "fedncm", "withdraw": {**RUN, **HASHES, "min_withdrawn": 8}}),
    "records_per_feature": (1, {"method": "fed3r", "weights": "uniform"}),
    "given_models": ("none", {"initial_model_sha256": "0" * 64}),
    "max_parameters": (10, {}),
    "max_message_bytes": (100, {}),
    "max_sites": (2, {}),
    "max_rounds": (1, {"rounds": 2}),
    "max_epochs": (1, {"training": {**SMALL["training"], "epochs": 2}}),
    "max_batch_values": (100, {}),
}
"""Rules that the check finds without ledger or records: each with a value, and what of a job violates it."""
ELSEWHERE = {
    "records": ("min_class_count", "evaluated_share", "min_test_count", "min_row_bits"),
    "what other silos declare": ("max_records", "static_cohort"),
    "certificates and the folder's signature": ("pins", "central_provisioning", "signed_jobs"),
    "the engine's files": ("egress_guard", "log_streaming"),
    "the ledger": ("charged_retries",),
    "nothing: they refuse no job": ("full_batches", "epsilon_shown", "tell_refusals"),
}
"""All other rules, by what they are compared with."""


def test_each_rule_of_a_policy_is_compared_or_needs_more_than_the_job() -> None:
    """A rule that is added to the policy must be decided on here."""
    rules = [*REFUSED, *(name for names in ELSEWHERE.values() for name in names)]
    assert sorted(rules) == sorted(set(Rules.model_fields) - {"profile"})


@pytest.mark.parametrize("rule", REFUSED)
def test_a_job_below_a_rule_is_found_without_ledger_and_records(rule: str) -> None:
    value, changes = REFUSED[rule]
    job, scope = parse_job({**SMALL, **changes}), Scope(Path("tightframe.json"), submitter="mallory")

    def told(**rules: Any) -> list[str]:
        policy = PolicyBlock.model_validate({"profile": "research", **rules}).resolve(production=False)
        found = check_policy(job, "site-1", SiteEntry(), policy, scope)
        return [item.text for item in found if item.state == "problem"]

    (problem,) = told(**{rule: value})
    assert problem.split(": ")[1] == rule
    assert told() == []


def test_a_cohort_below_the_policy_is_named_once_with_what_to_do(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    _change(hospital, policy__minimum_cohort=5)
    wanted = "TF-614: minimum_cohort: the job asks for 3 silos, at least 5 is required: more silos must"
    for production in (True, False):  # with a ledger, and as its lead checks it
        job = folders.read_job(job_folder())
        (problem,) = _problems(hospital, job=job, records=False, production=production)
        assert problem.startswith(f"job of hospital-a: {wanted}")
    five = {"sites": [f"hospital-{letter}" for letter in "abcde"], "min_sites": 4}
    (text,) = _refused(hospital, job_folder(**five))
    assert text.startswith("TF-614: minimum_cohort: the job asks for min_sites 4, at least 5 is required")
    assert _refused(hospital, job_folder(**five, whole_sums=True)) == []
    _change(hospital, policy={})
    job = folders.read_job(job_folder(class_rules="off"))
    (problem,) = _problems(hospital, job=job, records=False, production=False)
    assert "TF-614: class_rules_off" in problem, "beside a kit the profile is production's"


def test_an_upper_bound_is_allowed_and_a_policy_is_no_fault(
    hospital: Path, job_folder: Callable[..., Path]
) -> None:
    _change(hospital, dataset_id="skin", policy__epsilon_cap=4.0, policy__minimum_cohort=3)
    code, said = _check(hospital, job_folder(weights="uniform", privacy={"epsilon": 8.0}))
    assert "TF-614: epsilon_cap: the job asks for 8, at most 4 is allowed" in said
    assert code == 1 and "before this site takes part" not in said
    assert "this site will refuse this job as it is: inform the lead." in said
    _change(hospital, device="cuda:7")
    code, said = _check(hospital, job_folder(weights="uniform", privacy={"epsilon": 8.0}))
    assert "1 problem: correct it before this site takes part" in said, "its own, and no other"
    assert "this site will refuse this job as it is: inform the lead" in said


def test_that_no_contract_is_named_is_said_before_any_job_and_is_no_matter_for_the_lead(
    hospital: Path, job_folder: Callable[..., Path], tmp_path: Path
) -> None:
    table = {"dataset": "table", "dataset_options": {"contract": contract()}, "model": "mlp"}
    folder = job_folder(**table, model_options={"widths": [2]})
    file = write(tmp_path / "ward.csv", ward_rows())
    named = taken(file, parse_job(folders.read_job(folder)))
    given = named["table"]["contract"]

    def unopened() -> str:
        (text,) = [item.text for item in _found(hospital) if item.text.startswith("table: not opened")]
        return text

    _change(hospital, data={"table": {"file": str(file)}})
    _change(hospital, policy__min_row_bits=0, policy__evaluated_share=None)
    needle = "; no job is taken (TF-614) until this entry names its `contract`"
    assert needle in unopened()
    _change(hospital, policy__class_rules_off=True)
    assert needle not in unopened(), "then any is taken"
    _change(hospital, policy__class_rules_off=False)
    code, said = _check(hospital, folder)
    closed = "".join(said.split())  # a narrow column breaks the hash
    for words in (
        f"{given}, the one that this site's entry names (none yet) is required",
        f'whoever answers for the records may write "contract": "{given}" into \'table\'',
    ):
        assert code == 1 and "".join(words.split()) in closed
    assert said.endswith(
        "this site will refuse this job until whoever answers for the records has named its contract in the "
        "entry."
    )
    _change(hospital, data={"table": {"file": str(file), "contract": "a" * 64}}, policy__max_sites=2)
    code, said = _check(hospital, folder)
    assert code == 1 and "names is required" in said, "it names another one"
    assert "this site will refuse this job as it is: inform the lead" in said, "for its sites"
    _change(hospital, data=named, policy__max_sites=None)
    assert needle not in unopened()
    assert _check(hospital, folder)[0] == 0


def test_an_own_training_loop_is_shown_by_its_package_or_refused(
    hospital: Path, job_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    (packages / "clinic_loop-3.1.dist-info").mkdir(parents=True)
    (packages / "clinic_loop.py").write_text(
        "from tightframe.learning.own_loop import TrainingLoop\n"
        "LOOP = TrainingLoop('careful', lambda training: 0.0)\n"
    )
    (packages / "clinic_loop-3.1.dist-info" / "METADATA").write_text("Name: clinic_loop\nVersion: 3.1\n")
    (packages / "clinic_loop-3.1.dist-info" / "entry_points.txt").write_text(
        "[tightframe.training]\ncareful = clinic_loop:LOOP\n"
    )
    monkeypatch.syspath_prepend(packages)
    job = folders.read_job(job_folder(training={"loop": "careful"}))
    (text,) = _problems(hospital, job=job)
    assert "TF-614: training_loops: the job asks for training.loop 'careful'" in text
    _change(hospital, training_loops=["careful"])
    assert _problems(hospital, job=job) == []
    told = [item.text for item in _found(hospital, job=job)]
    assert "training.loop careful: here that is clinic_loop:LOOP of clinic_loop 3.1" in told


@pytest.mark.whole
def test_a_simulation_says_that_a_real_site_would_refuse_its_evaluations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eleven exact evaluations of rows of three yes/no columns, which a site in production refuses."""
    files, rules = rare.tables(tmp_path, numbers=False), {"profile": "standard", "min_row_bits": 0}
    job = rare.job(method="fedavg", model="mlp", model_options={"widths": [8]})
    sites = {s: {"data": taken(path, job), "policy": rules} for s, path in files.items()}
    (tmp_path / "sites.json").write_text(json.dumps({"sites": sites}))
    needle = "in production a site with this policy refuses the job"
    found = check_site(Scope(tmp_path / "sites.json", job=job.model_dump(mode="json")))
    told = [item.text for item in found if item.state == "note" and "TF-627" in item.text]
    assert len(told) == 4 and all(text.startswith(needle) for text in told)
    with caplog.at_level("WARNING"):
        rare.run(files, tmp_path / "run", job, min_row_bits=0)
        warned = [line for line in caplog.messages if needle in line and "TF-627" in line]
        assert len(warned) == 4
        caplog.clear()
        rare.run(files, tmp_path / "off", job, min_row_bits=0, evaluated_share=None)
        assert needle not in caplog.text


@pytest.mark.parametrize(("epsilon", "hidden"), [(2, True), (60, False)])
def test_an_evaluation_whose_noise_hides_all_scores_is_said_to_tell_nothing(
    tmp_path: Path, epsilon: float, hidden: bool
) -> None:
    entries = {site: {"data": {"table": {"file": str(path)}}} for site, path in rare.tables(tmp_path).items()}
    (tmp_path / "sites.json").write_text(json.dumps({"sites": entries}))
    (tmp_path / "one.json").write_text(json.dumps(entries["site-1"]))
    private = {"epsilon": epsilon, "evaluation": "noisy"}
    job = rare.job(method="fedncm", weights="uniform", update_norm=None, privacy=private)
    for file, site, of in (
        ("sites", None, "80 records"),
        ("one", "site-1", "80 records (were all sites as this one)"),
    ):
        scope = Scope(tmp_path / f"{file}.json", job=job.model_dump(mode="json"), site=site)
        told = [item.text for item in check_site(scope) if "hides scores" in item.text]
        assert len(told) == hidden
        assert all(f"hides scores of a test fold of {of}: " in text for text in told)


@pytest.mark.whole
def test_every_site_of_a_simulation_is_told_what_its_records_forbid(tmp_path: Path) -> None:
    """Possible rows, by column, and records to withdraw; how many they are stays at the site."""
    few = rare.job(method="fedavg", model="mlp", model_options={"widths": []})
    file = tmp_path / "withdrawn.csv"
    entries = {
        site: {
            "data": taken(path, few),
            "policy": {"profile": "standard"},
            "withdrawn": {"table": str(file)},
        }
        for site, path in rare.tables(tmp_path, numbers=False).items()
    }
    (tmp_path / "sites.json").write_text(json.dumps({"sites": entries}))

    def problems(job: JobConfig) -> list[str]:
        found = check_site(Scope(tmp_path / "sites.json", job=job.model_dump(mode="json")))
        return [item.text for item in found if item.state == "problem"]

    told = problems(few)
    assert len(told) == 4 and all(text.startswith("TF-628: ") for text in told)
    assert "This table has 2 to the 1.9, by column: d0 1.0, d1 0.9. " in told[0], "d3 is as d1"
    # 64 units train on none of the values that the 60 patients of a site have: see ``common_values``.
    told = problems(rare.job(method="fedavg", model="mlp"))
    assert len(told) == 4 and all("This table has 2 to the 0.0, by column: none. " in text for text in told)
    entry = SiteEntry.model_validate(entries["site-1"])
    with pytest.raises(BelowPolicyError) as caught:
        check_rows(SiloContext("site-1", few, entry, tmp_path, job_id=UNKNOWN), prepare(few))
    assert "d0 1.0" in str(caught.value) and "d0" not in str(caught.value.outside())

    wide = rare.job(method="fedavg", model="mlp", model_options={"widths": [512]})
    (units,) = [text for text in problems(wide) if "TF-628" not in text]
    assert units.startswith("site-1, site-2, site-3, site-4: TF-625: ")
    assert "512 units" in units and "trained on 180 declared records, at most 90 units" in units
    (tmp_path / "one.json").write_text(json.dumps({**entries["site-1"], "withdrawn": {}}))
    alone = check_site(Scope(tmp_path / "one.json", job=wide.model_dump(mode="json"), site="site-1"))
    assert any("unless other sites have more" in item.text and "TF-625" in item.text for item in alone)

    run = {"lineage": "first", "previous": "first"}
    hashes = {"checkpoint_sha256": "0" * 64, "state_sha256": "0" * 64}
    leaving = rare.job(withdraw={**run, **hashes}, model_options={"standardise": False})
    file.write_text("record,site-1-3\n")
    first, *others = [text for text in problems(leaving) if "TF-628" not in text]
    assert "(TF-523)" in first and len(others) == 3 and all(text.startswith("TF-214: ") for text in others)
