"""``tightframe ledger`` as a site's administrator, an auditor and a data protection officer type it."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
from click.testing import Result
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.ledgers import CAP, DELTA, SiteKeys, charge, open_ledger
from tests.support.outputs import checked
from tests.support.securesum.certificates import Issued, issue, make_root
from typer.testing import CliRunner

from tightframe.errors import SiteConfigError, TightframeError
from tightframe.privacy.events import Gaussian, SubsampledGaussian
from tightframe.privacy.ledger.entries import Cap, LedgerError, TamperError
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.privacy.ledger.store import head_file
from tightframe.rounds.site_ledger.keys import signature_check
from tightframe.rounds.sums.vault import remember
from tightframe.securesum.site.journal import Revealed, StateSummed
from tightframe_app.ledger import commands

JSON = ("--format", "json")


def run(*arguments: object, width: int = 110) -> Result:
    texts = [str(item) for item in arguments]
    return CliRunner().invoke(commands.app, texts, env={"COLUMNS": str(width)})


def flat(text: str) -> str:
    """What is printed without its line breaks."""
    return " ".join(text.split())


def pem(path: Path, root: Issued) -> Path:
    path.write_bytes(root.x509.public_bytes(Encoding.PEM))
    return path


@pytest.fixture(scope="module")
def keys() -> SiteKeys:
    return SiteKeys()


@pytest.fixture
def root(tmp_path: Path, keys: SiteKeys) -> Path:
    return pem(tmp_path / "rootCA.pem", keys.root)


@pytest.fixture
def state(tmp_path: Path, keys: SiteKeys) -> Path:
    """Two jobs on one data set, one with a retry, and another data set. Plain releases only: quick."""
    path = ledger_path(tmp_path / "state", "site-1")
    with open_ledger(path, keys, create=True) as ledger:
        for fingerprint in ("ab" * 32, "cd" * 32):
            ledger.note_data("ward-7", fingerprint)
        for number in range(8):
            ledger.charge(charge(f"round {number} class sums", alone=Gaussian(3.0)), cap=CAP)
        ledger.charge(charge("round 7 class sums", attempt=1, alone=Gaussian(3.0)), cap=CAP)
        training = SubsampledGaussian(20.0, 1.0, 5)  # full batches: priced in closed form
        ledger.charge(charge("training", job_id="c3d4", job_name="fedetf_isic_dp", event=training), cap=CAP)
        ledger.charge(charge("counts", dataset_id="ward-8", neighbours="patient"), cap=CAP)
    return tmp_path / "state"


def exact(mu: float) -> float:
    """Epsilon of one Gaussian, by scipy."""
    import math

    from scipy.optimize import brentq
    from scipy.special import ndtr

    return float(
        brentq(
            lambda e: ndtr(mu / 2 - e / mu) - math.exp(e) * ndtr(-mu / 2 - e / mu) - DELTA, 0, 50, xtol=1e-12
        )
    )


def test_show(state: Path, root: Path) -> None:
    done = run("show", "--state-dir", state, "--epsilon", "8")
    said = flat(done.stdout)
    assert done.exit_code == 0, done.output
    assert "ward-7 (protects a record)" in said and "ward-8 (protects a patient)" in said
    one, all_of_it = exact(1 / 6), exact((9 / 36 + 5 / 400) ** 0.5)
    row = next(line for line in done.stdout.splitlines() if "round 0 class sums" in line)
    assert "2030-06-01 12:00:" in row and "release, z 6" in row
    assert row.split()[-1] == f"{one + 0.0005:.3f}", "rounded up"
    assert "round 7 class sums 1 release, z 6" in said and "5 steps, sigma 20, q 1" in said
    assert f"epsilon at delta 1e-05 {all_of_it + 0.0005:.3f} (exact {all_of_it + 0.0005:.3f}, RDP " in said
    assert f"if no other silo adds noise {exact((9 / 9 + 5 / 400) ** 0.5) + 0.0005:.3f}" in said
    assert f"left {8 - all_of_it - 0.0005:.3f} of 8" in said and "versions of the records 2" in said
    assert "12 entries" not in said and "13 entries; checked: hashes only; give --root" in said
    signed = flat(run("show", "--state-dir", state, "--root", root).stdout)
    assert "checked: hashes and signatures" in signed and "left" not in signed


def test_as_json(state: Path, root: Path) -> None:
    told = checked("ledger show", run("show", "--state-dir", state, "--epsilon", "8", *JSON).stdout)
    ward, _ = told["data_sets"]
    spent = exact((9 / 36 + 5 / 400) ** 0.5)
    assert ward["spent"]["guaranteed"] == pytest.approx(spent, abs=1e-6) == ward["charges"][-1]["epsilon"]
    assert ward["left"] == pytest.approx(8 - spent, abs=1e-6) and len(ward["fingerprints"]) == 2
    told = checked("ledger explain", run("explain", "--state-dir", state, "--epsilon", "8", *JSON).stdout)
    assert "10 releases" in " ".join(told["data_sets"][0]["paragraphs"]) and told["data_sets"][0]["fits"]
    told = checked("ledger verify", run("verify", "--state-dir", state, "--root", root, *JSON).stdout)
    assert told["valid"] and told["entries"] == 13 == told["signers"][0]["entries"]
    connection = sqlite3.connect(ledger_path(state, "site-1"))
    with connection:
        connection.execute("UPDATE entries SET time = '2020' WHERE sequence = 5")
    connection.close()
    done = run("verify", "--state-dir", state, "--root", root, *JSON)
    told = checked("ledger verify", done.stdout)
    assert done.exit_code == 1 and not told["valid"] and told["code"] == "TF-702"


def test_show_of_one_data_set_at_another_delta(state: Path) -> None:
    said = flat(
        run("show", "--state-dir", state, "--dataset", "ward-8", "--delta", "1e-3", "--epsilon", "0.1").stdout
    )
    assert "ward-8" in said and "ward-7" not in said and "at delta 0.001" in said
    assert "left nothing: the cap is passed by" in said
    assert run("show", "--state-dir", state, "--dataset", "ward-9").exit_code == 2


def test_jobs_that_released_exact_totals_are_counted_beside_what_was_charged(
    tmp_path: Path, keys: SiteKeys
) -> None:
    opened = [
        Revealed(job, 0, slot, ("a", "b", "site-1"), ("update",))
        for job in ("j1", "j2", "j3")
        for slot in (0, 1)
    ]
    with open_ledger(ledger_path(tmp_path, "site-1"), keys, create=True) as ledger:
        remember(ledger, opened)
        assert (
            "nothing has been charged yet 3 jobs without differential privacy released exact totals"
            in flat(run("explain", "--state-dir", tmp_path).stdout)
        )
        ledger.charge(charge(job_id="j2"), cap=CAP)
    said = flat(run("explain", "--state-dir", tmp_path).stdout)
    assert (
        "2 jobs without differential privacy released exact totals, which no epsilon counts; evaluations "
        "(TF-627) and rounds (TF-625) have limits of their own (by data set: tightframe site release show). "
        "Of all data sets here: j1, j3" in said
    )
    # No proved limit covers them, so none is promised for all that was released.
    assert "whoever sees all of these noisy releases" in said and "everything" not in said
    assert "Not counted: the exact totals of 2 jobs" in said and "no limit is proved" in said
    told = checked("ledger explain", run("explain", "--state-dir", tmp_path, "--epsilon", "8", *JSON).stdout)
    assert told["exact_jobs"] == ["j1", "j3"]


def test_a_simulated_private_job_is_charged_in_a_ledger_of_its_own(tmp_path: Path, keys: SiteKeys) -> None:
    run_folder = tmp_path / "site-1" / "simulate_job"
    sums = ledger_path(run_folder / "secure_sum" / "simulate_job", "site-1")
    with open_ledger(sums, keys, create=True) as ledger:
        remember(ledger, [Revealed("simulate_job", 0, 0, ("a", "b", "site-1"), ("update",))])
    config = run_folder / "app_site-1" / "config" / "config_fed_client.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"executors": [{"executor": {"args": {"job_name": "heart"}}}]}))
    exact_one = flat(run("explain", sums).stdout)
    assert "1 job without differential privacy" in exact_one and ": heart (simulate_job) 1 entr" in exact_one
    assert run("explain", "--state-dir", tmp_path / "site-1").stdout == run("explain", sums).stdout
    charges = ledger_path(run_folder / "silo_state", "site-1")
    with open_ledger(charges, keys, create=True) as ledger:
        ledger.charge(charge(job_id="simulate_job"), cap=CAP)
    said = run("explain", sums, width=400).stdout
    assert "without differential privacy" not in said and "nothing has been charged" not in said
    assert str(charges) in said
    for place in (tmp_path / "site-1", tmp_path):
        assert "1 job charged 1 release" in flat(run("explain", "--state-dir", place).stdout)
    sites = tmp_path / "sites.json"
    sites.write_text('{"sites": {}}')
    for command in ("verify", "explain"):
        refused = run(command, "-c", sites).exception
        assert isinstance(refused, SiteConfigError) and "is a simulation's" in str(refused)
        assert "--state-dir simulator_workspace/SITE" in str(refused)


def test_a_resumed_job_is_charged_as_the_first_of_its_chain(tmp_path: Path, keys: SiteKeys) -> None:
    with open_ledger(ledger_path(tmp_path, "site-1"), keys, create=True) as ledger:
        ledger.charge(charge(job_id="first"), cap=CAP)
        for job, lineage in (("second", "first"), ("other-2", "other")):
            opened = Revealed(job, 0, 0, ("a", "b", "site-1"), ("update",))
            remember(ledger, [StateSummed(lineage, job, 1, b"x" * 32), opened])
            remember(ledger, [Revealed(job, 0, 1, opened.survivors, ())])  # a seal
    told = checked("ledger explain", run("explain", "--state-dir", tmp_path, "--epsilon", "8", *JSON).stdout)
    assert told["exact_jobs"] == ["other-2"]


def test_verify(state: Path, root: Path) -> None:
    done = run("verify", ledger_path(state, "site-1"), "--root", root)
    said = flat(done.stdout)
    assert done.exit_code == 0 and said.startswith("whole: ")
    assert re.search(r"secure sums \d+ steps? in these entries", said)
    assert "entries 13" in said and "signed by site-1, certificate" in said and ": 13 entries" in said
    proved, _, rest = said.partition("What this does not prove")
    assert "none was changed, moved or removed" in proved
    for limit in ("older copy", "noise was drawn as charged", "the site's key", "the site's clock"):
        assert limit in rest
    head = next(line.split()[-1] for line in done.stdout.splitlines() if line.strip().startswith("head"))
    assert head.startswith("13:")
    again = flat(run("verify", "--state-dir", state, "--root", root, "--known", head).stdout)
    assert (
        "continues the heads given with --known" in again
        and "any entries after the newest of the given heads" in again
    )
    done = run("verify", "--state-dir", state, "--root", root, "--known", "14:" + "0" * 64)
    assert done.exit_code == 1 and "Expected 14 entries, as a head that was written down says" in flat(
        done.stderr
    )
    assert run("verify", "--state-dir", state, "--root", root, "--known", "x").exit_code == 2


def test_verify_names_the_first_wrong_entry(state: Path, root: Path, tmp_path: Path) -> None:
    path = ledger_path(state, "site-1")
    another = pem(tmp_path / "another.pem", make_root())
    done = run("verify", path, "--root", another)
    assert done.exit_code == 1 and "signature does not hold" in flat(done.stderr) and done.stdout == ""
    assert run("verify", path, "--root", another, "--root", root).exit_code == 0, "a site of two projects"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE entries SET time = '2020' WHERE sequence = 5")
    connection.close()
    done = run("verify", path, "--root", root)
    assert (
        done.exit_code == 1 and "invalid:" in done.stderr and "TF-702: Expected entry 5" in flat(done.stderr)
    )
    for command in ("show", "explain"):
        with pytest.raises(TamperError):
            raise run(command, path).exception or AssertionError("it was read")


def test_verify_makes_a_lost_head_file_anew(state: Path, root: Path) -> None:
    path = ledger_path(state, "site-1")
    head_file(path).unlink()
    done = run("verify", path, "--root", root)
    assert done.exit_code == 1 and "--renew-head" in flat(done.stderr) and not head_file(path).exists()
    assert run("verify", path, "--root", root, "--renew-head").exit_code == 0
    assert run("verify", path, "--root", root).exit_code == 0


def test_certificates_without_a_role(tmp_path: Path, root: Path, keys: SiteKeys) -> None:
    path = tmp_path / "ledger.sqlite"
    signer = issue(keys.root, "site-1", role=None).signer()
    check = signature_check([keys.root.anchor(missing_role=True)])
    with open_ledger(path, keys, create=True, signer=signer, check=check) as ledger:
        ledger.charge(charge(), cap=CAP)
    done = run("verify", path, "--root", root)
    assert done.exit_code == 1 and "role" in flat(done.stderr)
    assert run("verify", path, "--root", root, "--missing-role").exit_code == 0


def test_explain(state: Path) -> None:
    done = run(
        "explain", "--state-dir", state, "--dataset", "ward-7", "--epsilon", "8", "--release-noise", "12"
    )
    said = flat(done.stdout)
    assert done.exit_code == 0, done.output
    spent = exact((9 / 36 + 5 / 400) ** 0.5)
    assert "Data set ward-7 From 2030-06-01 to 2030-06-01, 2 jobs charged 10 releases" in said
    assert "protects single records" in said and f"Spent: epsilon {spent + 0.0005:.3f} at delta 1e-05" in said
    assert "times as sure as before" in said and "1 in 100,000" in said
    assert "If none of them added any, it would be epsilon" in said
    assert f"The cap counts {spent + 0.0005:.3f}." in said and "Not counted" not in said
    assert "Job 'fedmr_isic_dp' (a1b2): 9 noisy sums or counts, by itself epsilon" in said
    assert "Retries of failed rounds among them: 1; they stay charged." in said
    assert "Job 'fedetf_isic_dp' (c3d4): 5 steps of training" in said
    assert "do not simply add up" in said and "refused before training" in said
    assert "Versions of the records so far: 2. A new one never restores the budget" in said
    # mu^2 of the cap by bisection on the closed form, less what was spent; releases at z = 12 cost 1/144 each
    low, high = 1.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exact(middle) <= 8 else (low, middle)
    releases = int((low**2 - 9 / 36 - 5 / 400) * 144)
    steps = int((low**2 - 9 / 36 - 5 / 400) * 400)
    assert f"- {releases} more releases at noise multiplier 12" in said
    assert (
        f"- {steps} more training steps at noise multiplier 20 and sampling rate 1, that is {steps}.0 epochs"
        in said
    )


def test_explain_what_if(state: Path) -> None:
    arguments = ["explain", "--state-dir", state, "--dataset", "ward-8", "--epsilon", "8"]
    said = flat(run(*arguments, "--sigma", "10", "--records", "50").stdout)
    assert "protects patients, with all their records" in said and "do not simply add up" not in said
    assert "noise multiplier 10 and sampling rate 1," in said, "a batch of 64 is all of 50 records"
    assert "more releases at noise multiplier 6" in said, "the last one's"
    assert run(*arguments, "--sigma", "10").exit_code == 2
    assert run(*arguments, "--records", "10").exit_code == 2
    assert isinstance(run(*arguments, "--release-noise", "0").exception, TightframeError)
    without = flat(run("explain", "--state-dir", state).stdout)
    assert "What would fit" not in without and "Left of the cap" not in without


def test_an_empty_ledger_and_one_with_data_only(tmp_path: Path, keys: SiteKeys, root: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    open_ledger(path, keys, create=True).close()
    assert "nothing has been charged yet" in flat(run("show", path).stdout)
    assert "nothing has been charged yet" in flat(run("explain", path).stdout)
    assert run("verify", path, "--root", root).exit_code == 0
    with open_ledger(path, keys) as ledger:
        ledger.note_data("ward-7", "ab" * 32)
    assert "Their budget is whole" in flat(run("explain", path, "--epsilon", "8").stdout)
    assert "(nothing was charged)" in run("show", path, "--epsilon", "8").stdout


def test_which_ledger(state: Path, keys: SiteKeys, root: Path, tmp_path: Path) -> None:
    path = ledger_path(state, "site-1")
    assert run("show").exit_code == 2 and run("show", path, "--state-dir", state).exit_code == 2
    assert run("show", tmp_path / "missing").exit_code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    for command in ("show", "explain"):  # before a site's first private job
        none = run(command, "--state-dir", empty)
        assert (
            none.exit_code == 0
            and "the first job with secure sums or differential privacy creates it" in none.stdout
        )
    assert run("verify", "--state-dir", empty, "--root", root).exit_code == 2, "nothing is verified"
    assert run("show", "--state-dir", tmp_path / "nowhere").exit_code == 2
    open_ledger(ledger_path(state, "site-2"), keys, create=True).close()
    done = run("show", "--state-dir", state)
    assert done.exit_code == 2 and "--site" in done.stderr
    assert "ward-7" in run("show", "--state-dir", state, "--site", "site-1").stdout
    assert isinstance(run("show", "--state-dir", state, "--site", "site-3").exception, LedgerError)
    assert isinstance(run("verify", root, "--root", root).exception, LedgerError), "no ledger at all"
    assert run("verify", path, "--root", path).exit_code == 2


def test_the_sites_file_says_what_no_option_says(state: Path, keys: SiteKeys, tmp_path: Path) -> None:
    config = tmp_path / "tightframe.json"

    def write(**values: object) -> Path:
        config.write_text(json.dumps({"state_dir": str(state), **values}))
        return config

    policy = {"epsilon_cap": 4.0, "delta_cap": 1e-6}
    write(dataset_id="ward-7", policy=policy)
    typed = ["--state-dir", state, "--dataset", "ward-7", "--epsilon", "4", "--delta", "1e-6"]
    for command in ("show", "explain"):
        said = flat(run(command, "-c", config).stdout)
        assert said.startswith(flat(run(command, *typed).stdout)), "as if it had been typed"
        assert "of 4" in said and "also in this ledger, and not shown: ward-8" in said
    said = flat(
        run("explain", "-c", config, "--epsilon", "8", "--delta", "1e-5", "--dataset", "ward-8").stdout
    )
    assert (
        "of 8." in said and "at delta 1e-05" in said and "Data set ward-8" in said and "ward-7 F" not in said
    )
    other = tmp_path / "other"
    open_ledger(ledger_path(other, "site-1"), keys, create=True).close()
    for place in (["--state-dir", other], [ledger_path(other, "site-1")]):
        assert "nothing has been charged yet" in flat(run("explain", "-c", config, *place).stdout)
    said = flat(run("explain", "-c", write(dataset_id="ward-9")).stdout)
    assert "nothing has been charged on ward-9 yet" in said and "ward-7, ward-8" in said
    assert "of 8." in flat(run("explain", "-c", write()).stdout), "all, with the cap of `standard`"
    said = flat(run("explain", "-c", write(policy={"epsilon_cap": None})).stdout)
    assert "Spent:" in said and "Left of the cap" not in said, "no cap, nothing left of it"
    config.write_text("{}")
    missing = run("explain", "-c", config).exception
    assert isinstance(missing, SiteConfigError) and missing.code == "TF-201"


@pytest.mark.parametrize("width", [70, 110])
def test_output_fits_its_width_and_steers_no_terminal(
    tmp_path: Path, keys: SiteKeys, root: Path, width: int
) -> None:
    path = tmp_path / "ledger.sqlite"
    with open_ledger(path, keys, create=True) as ledger:
        ledger.charge(
            charge("[bold]:smile:", job_name="x" * 200, dataset_id="[/red]"), cap=Cap(8.0, DELTA, 0)
        )
    for arguments in (
        ["show", path, "--epsilon", "8"],
        ["explain", path, "--epsilon", "8"],
        ["verify", path, "--root", root],
    ):
        done = run(*arguments, width=width)
        assert done.exit_code == 0 and max(len(line) for line in done.stdout.splitlines()) <= width
    assert "[bold]:smile:" in flat(run("show", path).stdout) and "[/red]" in run("explain", path).stdout


def test_help() -> None:
    for command, parts in {
        "show": ("--config", "--state-dir", "--epsilon", "--delta", "RDP", "what is left of a cap"),
        "verify": ("--root", "rootCA.pem", "--known", "Exit code 0: whole", "TF-702", "--renew-head"),
        "explain": ("plain words", "data protection officer", "--release-noise", "--sigma", "--records"),
    }.items():
        said = flat(run(command, "--help").stdout)
        assert all(part in said for part in parts), said
    assert all(command in run("--help").stdout for command in ("show", "verify", "explain"))
