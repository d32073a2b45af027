"""The ledger: charge before noise, the cap over all jobs, repeats, data sets, and what a refusal says."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from tests.support.ledgers import CAP, DATA, DELTA, SiteKeys, charge, open_ledger, ticking
from tests.support.securesum.certificates import AT, issue, make_root

from tightframe.data.columns import marked
from tightframe.privacy.accounting import BudgetError, guaranteed
from tightframe.privacy.events import Event, Gaussian, PrivacyValueError, SubsampledGaussian
from tightframe.privacy.ledger import rules
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.entries import (
    Cap,
    DataNoted,
    DatasetError,
    LedgerError,
    NeighboursError,
    Remembered,
    RepeatError,
    TamperError,
)
from tightframe.privacy.ledger.ledger import Ledger, ledger_expected, ledger_path
from tightframe.privacy.ledger.rows import ENTRY, HEAD
from tightframe.privacy.ledger.store import head_file, read_head_file, read_secret, secret_file
from tightframe.privacy.ledger.summary import spendings
from tightframe.securesum import primitives
from tightframe.securesum.primitives import encode_fields

STEPS = SubsampledGaussian(2.19, 64 / 351, 300)  # epsilon 8.0035 by RDP


@pytest.fixture(scope="module")
def keys() -> SiteKeys:
    return SiteKeys()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ledger_path(tmp_path, "site-1")


@pytest.fixture
def ledger(path: Path, keys: SiteKeys) -> Any:
    with open_ledger(path, keys, create=True) as opened:
        yield opened


def test_a_charge_says_everything(ledger: Ledger, path: Path, keys: SiteKeys) -> None:
    wanted = charge("round 3 training", attempt=2, event=STEPS, alone=Gaussian(2.0))
    entry = ledger.charge(wanted, cap=Cap(9.0, DELTA, 0))
    assert entry.content == wanted and entry.sequence == 1 and entry.retry == 0
    assert AT <= entry.time < AT + timedelta(minutes=1) and entry.time.tzinfo is not None
    ledger.close()
    whole = read_ledger(path, check=keys.check)
    assert whole.entries == (entry,) and whole.signatures and whole.head.hash == entry.hash
    stored = sqlite3.connect(path).execute("SELECT content FROM entries").fetchone()[0]
    assert "epsilon" not in stored and json.loads(stored)["event"] == STEPS.as_value(), (
        "derived, never stored"
    )


def test_epsilon_is_that_of_all_jobs_on_the_data(ledger: Ledger) -> None:
    big = Cap(100.0, DELTA, 0)
    for job in ("one", "two"):
        ledger.charge(charge("training", job_id=job, event=STEPS), cap=big)
    ledger.charge(charge("class sums", job_id="two"), cap=big)
    ledger.charge(charge("other", dataset_id="ward-8"), cap=big)
    accountant = RDPAccountant()
    accountant.history = [(2.19, 64 / 351, 600), (6.0, 1.0, 1)]
    assert ledger.spent(DATA, "record", DELTA).rdp == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)
    only = ledger.spent(DATA, "record", DELTA, job_id="one", prv=False)
    assert only.rdp == pytest.approx(8.0035, abs=1e-4) and only.prv is None
    assert ledger.spent("ward-8", "record", DELTA).exact == guaranteed([Gaussian(6.0)], DELTA)
    assert ledger.spent("ward-9", "patient", DELTA).guaranteed == 0.0


def test_if_no_other_silo_adds_noise(ledger: Ledger) -> None:
    ledger.charge(charge(alone=Gaussian(3.0)), cap=CAP)
    ledger.charge(charge("training", event=SubsampledGaussian(9.0, 1.0, 2)), cap=CAP)
    found = ledger.spent(DATA, "record", DELTA, alone=True).exact
    assert found == guaranteed([Gaussian(3.0), Gaussian(9.0), Gaussian(9.0)], DELTA)


def test_the_cap_is_held_before_anything_is_written(ledger: Ledger, path: Path) -> None:
    """99 releases at z = 6 come to 7.955, and 100 to 8.0037."""
    ledger.charge_all([charge(f"release {number}") for number in range(99)], cap=CAP)
    before = path.read_bytes(), ledger.verify().head
    with pytest.raises(BudgetError) as raised:
        ledger.charge(charge("one more"), cap=CAP)
    said = str(raised.value)
    assert said.startswith("TF-701: Expected the charges on 'ward-7' to stay within epsilon 8 at delta 1e-05")
    assert "'one more' of job 'fedmr_isic_dp' (attempt 0) they come to 8.004" in said
    assert "Spent: 7.956 by 99 charges. Left: 0.044." in said
    assert "0 such releases would fit; one would with a noise multiplier of at least" in said
    assert "Nothing was charged." in said
    assert (path.read_bytes(), ledger.verify().head) == before and len(ledger.entries()) == 99
    noise = float(said.partition("at least ")[2].split()[0].rstrip("."))
    ledger.charge(charge("one more", event=Gaussian(noise)), cap=CAP)
    with pytest.raises(BudgetError):
        ledger.charge(charge("and more", event=Gaussian(noise)), cap=CAP)


def test_what_was_not_charged_is_not_called_spent(ledger: Ledger) -> None:
    """50 releases at z = 3 come to 14.5 by themselves, and 20 of them to 7.9."""
    planned = [charge(f"planned {number}", event=Gaussian(3.0)) for number in range(50)]
    with pytest.raises(BudgetError) as raised:
        rules.hold(ledger.entries(), planned, CAP)
    said = str(raised.value)
    assert "Nothing was spent before: what is asked for is too much by itself." in said
    assert "Spent:" not in said and "Left:" not in said
    beside = int(said.partition("the request has ")[2].split()[0])
    total = guaranteed([Gaussian(3.0)] * beside, DELTA)
    assert total <= 8.0 < guaranteed([Gaussian(3.0)] * (beside + 1), DELTA)
    assert f"with which that is {total + 0.0005:.3f}." in said
    ledger.charge(planned[0], cap=CAP)
    with pytest.raises(BudgetError, match=r"Spent: 1\.\d+ by 1 charge\. .* has \d+ charges, with"):
        rules.hold(ledger.entries(), planned[1:], CAP)
    with pytest.raises(BudgetError, match="Nothing was spent before") as raised:
        rules.hold(ledger.entries(), [charge("all at once", dataset_id="ward-8", event=Gaussian(0.1))], CAP)
    assert "the request has" not in str(raised.value)


def test_what_would_fit_of_training_does_fit(ledger: Ledger) -> None:
    ledger.charge(charge("training", event=SubsampledGaussian(2.19, 64 / 351, 200)), cap=CAP)
    too_much = charge("more training", event=SubsampledGaussian(2.19, 64 / 351, 150))
    with pytest.raises(BudgetError, match=r"\d+ of its 150 steps would fit, or all of them with") as raised:
        ledger.charge(too_much, cap=CAP)
    words = str(raised.value).split()
    steps = int(words[words.index("of", words.index("Left:")) - 1])
    noise = float(words[words.index("least") + 1].rstrip("."))
    rate = 64 / 351
    rules.hold(ledger.entries(), [charge("b", event=SubsampledGaussian(2.19, rate, steps))], CAP)
    rules.hold(ledger.entries(), [charge("b", event=SubsampledGaussian(noise, rate, 150))], CAP)
    for event in (SubsampledGaussian(2.19, rate, steps + 1), SubsampledGaussian(noise - 4e-4, rate, 150)):
        with pytest.raises(BudgetError):
            rules.hold(ledger.entries(), [charge("b", event=event)], CAP)
    assert len(ledger.entries()) == 1


def test_a_spent_budget_says_so(ledger: Ledger) -> None:
    ledger.charge(charge(), cap=CAP)
    with pytest.raises(BudgetError, match=r"Left: 0\.000\. Nothing fits any more"):
        ledger.charge(charge("b"), cap=Cap(0.1, DELTA, 0))


def test_charges_that_belong_together_are_all_or_none(ledger: Ledger) -> None:
    fits, does_not = charge("training"), charge("class sums", event=Gaussian(0.5))
    with pytest.raises(BudgetError, match="'class sums'"):
        ledger.charge_all([fits, does_not], cap=CAP)
    assert ledger.entries() == ()
    other = charge("elsewhere", dataset_id="ward-8")
    entries = ledger.charge_all([fits, other], cap=CAP)
    assert [entry.sequence for entry in entries] == [1, 2] and ledger.entries() == entries
    assert ledger.charge_all([], cap=CAP) == ()


def test_a_callers_own_check_sees_the_entries_that_its_charges_are_added_to(ledger: Ledger) -> None:
    first = ledger.charge(charge(), cap=CAP)

    def refuse(entries: Any) -> None:
        assert entries == (first,)
        raise BudgetError("the job's promise")

    with pytest.raises(BudgetError, match="promise"):
        ledger.charge_all([charge("one more")], cap=CAP, check=refuse)
    assert ledger.entries() == (first,)


def test_the_head_file_follows_each_kind_of_entry(ledger: Ledger, path: Path) -> None:
    """Else an older copy of the file would pass."""
    for write in (
        lambda: ledger.charge(charge(), cap=CAP),
        lambda: ledger.note_data(DATA, "ab" * 32),
        lambda: ledger.remember(Remembered(({"kind": "anything"},))),
    ):
        write()
        assert read_head_file(head_file(path)) == ledger.verify().head


def test_a_repeat_is_a_new_attempt_and_charged(ledger: Ledger) -> None:
    first = ledger.charge(charge(), cap=CAP)
    with pytest.raises(RepeatError, match=r"TF-705: Expected 'round 0 class sums' .* charged once"):
        ledger.charge(charge(), cap=CAP)
    with pytest.raises(RepeatError, match="charged once"):
        ledger.charge_all([charge("b"), charge("b")], cap=CAP)
    again = ledger.charge(charge(attempt=1), cap=CAP)
    assert (first.retry, again.retry) == (0, 1) and len(ledger.entries()) == 2
    assert ledger.spent(DATA, "record", DELTA).exact == guaranteed([Gaussian(6.0)] * 2, DELTA)


def test_identical_bytes_are_sent_again_without_a_charge(ledger: Ledger) -> None:
    first = ledger.charge(charge(), cap=CAP)
    assert ledger.charge(charge(), cap=CAP, resend=True) == first
    spent_cap = Cap(0.001, DELTA, 0)
    assert ledger.charge(charge(), cap=spent_cap, resend=True) == first, "it was paid for"
    for other in (
        charge(attempt=1),
        charge("never"),
        charge(event=Gaussian(7.0)),
        charge(cohort=("site-1",)),
    ):
        with pytest.raises(RepeatError, match="resend"):
            ledger.charge(other, cap=CAP, resend=True)
    assert ledger.entries() == (first,)


def test_a_server_cannot_drain_the_budget_by_failing_rounds(ledger: Ledger) -> None:
    """Retries are counted by the site's own ledger, whatever attempt numbers the server gives."""
    for attempt in (0, 7):
        ledger.charge(charge(attempt=attempt), cap=CAP)
    for attempt in (100, 3):
        ledger.charge(charge("round 1 training", attempt=attempt), cap=CAP)
    ledger.charge(charge("round 1 training", attempt=0), cap=CAP)
    with pytest.raises(
        RepeatError, match=r"TF-705: Expected at most 3 charged retries in job 'fedmr_isic_dp'"
    ):
        ledger.charge(charge("round 1 training", attempt=8), cap=CAP)
    ledger.charge(charge("round 2 training"), cap=CAP)
    ledger.charge(charge(job_id="another", attempt=1), cap=CAP)
    with pytest.raises(RepeatError):
        ledger.charge_all([charge("c"), charge("c", attempt=1)], cap=Cap(8.0, DELTA, retries=0))


def test_releases_of_a_job_are_capped(ledger: Ledger) -> None:
    cap = Cap(8.0, DELTA, retries=1, releases=2)
    ledger.charge_all([charge("a"), charge("b")], cap=cap)
    with pytest.raises(BudgetError, match="TF-701: Expected at most 2 releases"):
        ledger.charge(charge("c"), cap=cap)
    ledger.charge(charge("b", attempt=1), cap=cap)
    ledger.charge(charge("training", event=SubsampledGaussian(20.0, 0.01, 1)), cap=cap)
    ledger.charge(charge("c", job_id="another"), cap=cap)


def test_the_first_charge_fixes_whom_noise_protects(ledger: Ledger) -> None:
    ledger.charge(charge(), cap=CAP)
    with pytest.raises(NeighboursError, match=r"TF-706: .*'ward-7' to protect a record"):
        ledger.charge(charge("b", neighbours="patient"), cap=CAP)
    with pytest.raises(NeighboursError):
        ledger.spent(DATA, "patient", DELTA)
    with pytest.raises(NeighboursError):  # a plan, which is not written
        rules.hold(ledger.entries(), [charge("b", neighbours="patient")], CAP)
    with pytest.raises(NeighboursError):
        ledger.charge_all(
            [charge("b", dataset_id="new"), charge("c", dataset_id="new", neighbours="patient")], cap=CAP
        )
    ledger.charge(charge("b", dataset_id="ward-8", neighbours="patient"), cap=CAP)


def test_fingerprints_never_reset_a_budget(ledger: Ledger) -> None:
    first = ledger.note_data(DATA, "ab" * 32)
    assert first is not None and first.content == DataNoted(DATA, "ab" * 32)
    ledger.charge(charge(), cap=CAP)
    spent = ledger.spent(DATA, "record", DELTA)
    assert ledger.note_data(DATA, "ab" * 32) is None
    assert ledger.note_data(DATA, "cd" * 32) is not None, "a new image came"
    assert ledger.spent(DATA, "record", DELTA) == spent
    with pytest.raises(DatasetError, match=r"TF-703: Expected these records to go by `dataset_id` 'ward-7'"):
        ledger.note_data("fresh-name", "cd" * 32)
    assert len(ledger.entries()) == 3
    for wrong in ("", "zz" * 32, "AB" * 32, "ab" * 8, "ab" * 100, None):
        with pytest.raises(PrivacyValueError, match="`fingerprint`"):
            ledger.note_data(DATA, wrong)  # type: ignore[arg-type]
        with pytest.raises(PrivacyValueError, match="`sketch`"):
            ledger.note_data(DATA, "ab" * 32, wrong or "0")


def test_records_of_which_most_are_known_have_no_second_budget(ledger: Ledger) -> None:
    sketch, near, far = bytes(range(64)), bytes([*range(25), *[99] * 39]), bytes([*range(24), *[98] * 40])
    ledger.note_data(DATA, "ab" * 32)  # as a version wrote it that had no sketches
    assert ledger.note_data(DATA, "ab" * 32, sketch.hex()) is not None
    assert ledger.note_data(DATA, "ab" * 32, sketch.hex()) is None
    (spending,) = spendings(ledger.entries(), DELTA)
    assert spending.fingerprints == ("ab" * 32,), "one version of the records"
    for most in (near, sketch):
        with pytest.raises(DatasetError, match="ward-7"):
            ledger.note_data("fresh-name", "ef" * 32, most.hex())
    assert ledger.note_data(DATA, "cd" * 32, near.hex()) is not None, "records came, under their name"
    assert ledger.note_data("another", "ef" * 32, far.hex()) is not None
    assert ledger.note_data("without", "01" * 32) is not None


def test_records_of_which_columns_are_known_have_no_second_budget(ledger: Ledger) -> None:
    """One combination with 25 equal places is enough; what is under another secret does not count."""
    one, far, secret = bytes(range(64)), bytes([*range(24), *[98] * 40]), "12" * 8
    near = bytes([*range(25), *[99] * 39])
    columns = secret + (one + bytes([200] * 64)).hex()
    ledger.note_data(DATA, "ab" * 32)  # as a version wrote it that had no columns
    assert ledger.note_data("other", "cd" * 32, columns=secret + near.hex()) is not None, "nothing to compare"
    assert ledger.note_data(DATA, "ef" * 32, columns="34" * 8 + one.hex()) is not None, "another secret"
    with pytest.raises(DatasetError, match=r"'other'.* because columns hold the same values"):
        ledger.note_data(DATA, "ab" * 32, columns=columns)
    assert ledger.note_data("third", "01" * 32, columns=secret + far.hex()) is not None
    assert ledger.note_data("third", "01" * 32, columns=secret + far.hex()) is None
    assert ledger.note_data("fourth", "02" * 32, columns="") is not None, "a table that has none"
    for wrong in ("0", "zz" * 8, secret + "00", secret[:-2]):
        with pytest.raises(PrivacyValueError, match="`columns`"):
            ledger.note_data(DATA, "ab" * 32, columns=wrong)


def test_the_secret_is_drawn_once_and_beside_the_ledger(ledger: Ledger, path: Path, keys: SiteKeys) -> None:
    assert read_secret(path) is None
    secret = ledger.secret()
    assert len(secret) == 32 and ledger.secret() == secret == read_secret(path)
    assert secret_file(path).stat().st_mode & 0o777 == 0o600
    with open_ledger(path, keys) as again:
        assert again.secret() == secret
    ledger.note_data(DATA, "ab" * 32, columns=marked([bytes(512)], secret))
    assert secret not in path.read_bytes() and secret.hex().encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": ""},
        {"job_name": "a\nb"},
        {"purpose": "\x1b[2J"},
        {"dataset_id": "x" * 201},
        {"dataset_id": None},
        {"attempt": -1},
        {"attempt": True},
        {"neighbours": "family"},
        {"event": None},
        {"event": 8.0},
        {"alone": 1.0},
        {"cohort": ()},
        {"cohort": ["site-1"]},
        {"cohort": ("",)},
    ],
)
def test_wrong_charges_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(PrivacyValueError, match=r"TF-700: Expected `?[a-z]"):
        charge(**changes)


@pytest.mark.parametrize(
    "values",
    [
        (0.0, DELTA, 1),
        (math.nan, DELTA, 1),
        (math.inf, DELTA, 1),
        (8.0, 0.0, 1),
        (8.0, 1.0, 1),
        (8.0, DELTA, -1),
    ],
)
def test_wrong_caps_are_named(values: tuple[float, float, int]) -> None:
    with pytest.raises(PrivacyValueError):
        Cap(*values)
    with pytest.raises(PrivacyValueError):
        Cap(8.0, DELTA, 1, releases=-1)


events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Gaussian, st.floats(2, 50)),
    st.builds(SubsampledGaussian, st.sampled_from([1.0, 3.0]), st.just(0.02), st.integers(1, 300)),
)


@settings(max_examples=10)
@given(st.lists(events, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_charges_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Event], random: Any
) -> None:
    keys, big = SiteKeys(), Cap(1e5, DELTA, 0)
    found = set()
    for _ in range(2):
        path = tmp_path_factory.mktemp("order") / "ledger.sqlite"
        with open_ledger(path, keys, create=True) as ledger:
            ledger.charge_all(
                [charge(f"{number}", event=event) for number, event in enumerate(drawn)], cap=big
            )
            found.add(ledger.spent(DATA, "record", DELTA, prv=False))
        random.shuffle(drawn)
    assert len(found) == 1


def test_it_outlives_processes_and_keys(path: Path, keys: SiteKeys) -> None:
    with open_ledger(path, keys, create=True) as ledger:
        ledger.charge(charge(), cap=CAP)
    renewed = issue(keys.root, "site-1", key="rsa").signer()
    with open_ledger(path, keys, signer=renewed) as ledger:
        ledger.charge(charge("b"), cap=CAP)
    whole = read_ledger(path, check=keys.check)
    assert [entry.sequence for entry in whole.entries] == [1, 2] and len(whole.certificates) == 2
    assert len({entry.signer for entry in whole.entries}) == 2


def test_a_site_of_two_projects(path: Path, keys: SiteKeys) -> None:
    from tightframe.rounds.site_ledger.keys import signature_check

    other = make_root("another project")
    with open_ledger(path, keys, create=True) as ledger:
        ledger.charge(charge(), cap=CAP)
    with pytest.raises(TamperError, match="TF-702: Expected the head record to be signed by this site"):
        open_ledger(path, keys, check=signature_check([other.anchor()]))
    both = signature_check([other.anchor(), keys.root.anchor()])
    with open_ledger(path, keys, signer=issue(other, "site-1").signer(), check=both) as ledger:
        ledger.charge(charge("b"), cap=CAP)
        assert len(ledger.entries()) == 2


def test_no_ledger_is_never_a_new_one(path: Path, keys: SiteKeys) -> None:
    with pytest.raises(LedgerError, match=r"TF-704: Expected the ledger at .*, but there is none"):
        open_ledger(path, keys)
    assert not path.exists() and not ledger_expected(path)
    with open_ledger(path, keys, create=True):
        pass
    assert ledger_expected(path) and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LedgerError, match="Expected no ledger"):
        open_ledger(path, keys, create=True)
    path.unlink()
    assert ledger_expected(path), "the head file is left"
    with pytest.raises(LedgerError, match="found one or traces of one"):
        open_ledger(path, keys, create=True)
    assert not list(path.parent.glob(".*")), "nothing temporary stays"


@pytest.mark.parametrize("what", ["text", "empty", "another database", "a folder", "cut", "garbage inside"])
def test_a_file_that_is_no_ledger(path: Path, keys: SiteKeys, what: str) -> None:
    with open_ledger(path, keys, create=True) as ledger:
        ledger.charge_all([charge(f"{number}") for number in range(30)], cap=CAP)
    whole = path.read_bytes()
    path.unlink()
    if what == "a folder":
        path.mkdir()
    elif what == "another database":
        with sqlite3.connect(path) as made:
            made.execute("CREATE TABLE entries (x)")
    else:
        middle = len(whole) // 2
        path.write_bytes(
            {
                "text": b"hello " * 100,
                "empty": b"",
                "cut": whole[:middle],
                "garbage inside": whole[:middle] + os.urandom(8192) + whole[middle + 8192 :],
            }[what]
        )
    with pytest.raises((LedgerError, TamperError), match=r"TF-70[24]") as raised:
        open_ledger(path, keys)
    if what in ("text", "empty", "another database", "a folder"):
        assert isinstance(raised.value, LedgerError)


@pytest.mark.parametrize(
    ("pragma", "said"),
    [
        ("application_id=7", "but found another file"),
        ("journal_mode=DELETE", "in WAL mode"),
        ("user_version=2", "to be of version 1, but found 2"),
    ],
)
def test_a_ledger_of_other_settings_or_an_unknown_version_is_refused(
    path: Path, keys: SiteKeys, pragma: str, said: str
) -> None:
    with open_ledger(path, keys, create=True):
        pass
    with sqlite3.connect(path) as sql:
        sql.execute(f"PRAGMA {pragma}")
    sql.close()
    with pytest.raises(LedgerError, match=said):
        open_ledger(path, keys)


def test_a_full_disk_charges_nothing_and_says_so(path: Path, keys: SiteKeys) -> None:
    """A limit on the size of files stands for it, in a process of its own."""
    with open_ledger(path, keys, create=True) as ledger:
        ledger.charge(charge(), cap=CAP)
    program = """
import resource, sys
from pathlib import Path
from tests.support.ledgers import CAP, charge, ticking
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.entries import LedgerError
from tightframe.securesum.identity import KeySigner
path, key, certificate = map(Path, sys.argv[1:])
signer = KeySigner.from_pem(key.read_bytes(), certificate.read_bytes())
with Ledger(path, signer, check=lambda *_: None, clock=ticking()) as ledger:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        ledger.charge(charge("b"), cap=CAP)
    except LedgerError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("left:", len(ledger.entries()))
"""
    key, certificate = path.with_name("key"), path.with_name("certificate")
    key.write_bytes(keys.signer.private_pem())
    certificate.write_bytes(keys.signer.certificate)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(key), str(certificate)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{root}/custom:{root}/app"},
    )
    assert "TF-704: Expected to use the ledger" in done.stdout and "left: 1" in done.stdout
    assert len(read_ledger(path, check=keys.check).entries) == 1


def test_a_signer_that_fails_charges_nothing(path: Path, keys: SiteKeys) -> None:
    class Broken:
        certificate = keys.signer.certificate
        calls = 0

        def sign(self, message: bytes) -> bytes:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("the card was pulled out")
            return keys.signer.sign(message)

    with open_ledger(path, keys, create=True):
        pass
    with open_ledger(path, keys, signer=Broken()) as ledger:
        with pytest.raises(RuntimeError, match="pulled out"):
            ledger.charge(charge(), cap=CAP)
        assert ledger.entries() == ()


def test_it_can_be_read_where_nothing_can_be_written(path: Path, keys: SiteKeys, tmp_path: Path) -> None:
    """A copy without SQLite's files beside it, as an auditor gets it."""
    with open_ledger(path, keys, create=True) as ledger:
        ledger.charge(charge(), cap=CAP)
    copy = tmp_path / "audit" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    shutil.copy(head_file(path), head_file(copy))
    copy.parent.chmod(0o500)
    try:
        assert len(read_ledger(copy, check=keys.check).entries) == 1
    finally:
        copy.parent.chmod(0o700)


def test_signed_strings_are_no_string_of_the_protocol(keys: SiteKeys) -> None:
    """The same form, so that the same key signs them; tags that nothing else has.

    The bytes are those that ledgers have been signed with since their first version.
    """
    zeros = bytes(7)
    start = b"\xff\x00tightframe/secure-sum/1\x00t" + zeros
    entry = start + b"\x16privacy-ledger/entry/1s" + zeros + b"\x02ab"
    head = start + b"\x15privacy-ledger/head/1s" + zeros + b"\x01xi" + bytes(15) + b"\x03"
    head += b"s" + zeros + b"\x01ys" + zeros + b"\x01z"
    assert encode_fields(ENTRY, "ab") == entry
    assert encode_fields(HEAD, "x", 3, "y", "z") == head
    assert keys.signer.sign(encode_fields(ENTRY, "ab" * 32))
    source = Path(primitives.__file__).parents[1]
    elsewhere = [
        file
        for file in source.rglob("*.py")
        if "privacy" not in file.parts and "privacy-ledger" in file.read_text()
    ]
    assert elsewhere == []


def test_times_are_utc(path: Path, keys: SiteKeys) -> None:
    from datetime import timezone

    east = timezone(timedelta(hours=9))
    with open_ledger(path, keys, create=True, clock=lambda: AT.astimezone(east)) as ledger:
        assert ledger.charge(charge(), cap=CAP).time == AT
    stored = sqlite3.connect(path).execute("SELECT time FROM entries").fetchone()[0]
    assert datetime.fromisoformat(stored).tzinfo == UTC and stored.endswith("+00:00")


def test_clock_of_tests_moves_on() -> None:
    clock = ticking()
    assert clock() < clock()
