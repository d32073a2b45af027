"""``tightframe transcript verify`` as an auditor types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support import runs
from tests.support.outputs import checked
from tests.support.securesum.certificates import AT, Issued, issue, make_root
from tests.support.securesum.replay import VECTORS
from tests.support.securesum.transcripts import NAMES, PARAMS, Run, edited, rechained, short_run, whole_run
from typer.testing import CliRunner

from tightframe import __version__
from tightframe.rounds.sums.simulated_identity import simulated_root_pem
from tightframe.securesum.messages import GROUPS, SumId
from tightframe.securesum.transcript import EpochReport, Report, SumReport
from tightframe_app import cli
from tightframe_app.transcripts import out_of_order

Verify = Callable[..., Result]


def pem(*certificates: Issued) -> bytes:
    return b"".join(item.x509.public_bytes(Encoding.PEM) for item in certificates)


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    """Write a transcript and its root to files, and run the command over them."""

    def call(
        run: Run, *options: str, lines: Sequence[bytes] | None = None, root: bytes | None = None
    ) -> Result:
        file, anchor = tmp_path / "transcript.jsonl", tmp_path / "rootCA.pem"
        file.write_bytes(b"".join(run.lines if lines is None else lines))
        anchor.write_bytes(pem(run.root) if root is None else root)
        arguments = ["transcript", "verify", str(file), "--root", str(anchor), *options]
        return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "100"})

    return call


def flat(text: str) -> str:
    """What is printed without its line breaks."""
    return " ".join(text.split())


def test_a_valid_transcript_of_the_server(verify: Verify) -> None:
    run = whole_run()
    done = verify(run)
    report, said = run.verify(), flat(done.stdout)
    assert done.exit_code == 0 and done.stderr == "" and done.stdout.startswith("valid: ")
    assert f"sites 4: {', '.join(NAMES)}" in said
    assert "written by the server, Tightframe 0.1.0" in said and "started 2030-06-01 12:00:00 UTC" in said
    assert "sums 3 opened, 2 failed, 3 with missing sites" in said
    assert "complete yes; the run ended early: too few silos" in said
    assert "identities provisioned" in said and report.head in said
    assert "no line for epoch/slot 2/0: not used, or omitted" in said
    assert "server assumed" in said and "server is" not in said
    # epoch, sites, threshold, smallest, colluders, server, weights, static, slots
    assert "0 4 3 3 1 malicious power_of_two may open 4" in said
    assert "2 3 3 3 1 malicious power_of_two shut 4" in said
    assert f"site-1 {report.epochs[0].keys['site-1']} 0, 2" in said
    assert f"site-4 {report.epochs[0].keys['site-4']} 0 " in said
    assert "1/train-0/0 0 site-2 opened: update site-3: a share is not the one signed" in said
    assert "3/train-0/0 0 site-2, site-3 failed, TF-611 -" in said
    assert "0/train-0/0 0" not in said, "a sum of everybody is not worth a line"


def test_as_json(verify: Verify) -> None:
    run = whole_run()
    report, told = run.verify(), checked("transcript verify", verify(run, "--format", "json").stdout)
    assert told["valid"] and told["head"] == report.head and told["keys"].keys() == set(NAMES)
    assert [item["failure"] for item in told["sums"]] == [item.failure for item in report.sums]
    done = verify(run, "--format", "json", lines=run.lines[1:])
    told = checked("transcript verify", done.stdout)
    assert done.exit_code == 1 and not told["valid"] and told["code"] == "TF-616" and told["head"] is None


def test_of_format_2_everybody_signed_the_survivors_of_each_sum(verify: Verify) -> None:
    lines = (VECTORS / "transcript-format-2-server.jsonl").read_bytes().splitlines(keepends=True)
    root = (VECTORS / "transcript-format-2-root.pem").read_bytes()
    said = flat(verify(short_run(), lines=lines, root=root).stdout)
    assert "at least a threshold of sites signed the list of each opened sum" in said
    assert "4 of 4 totals were verified" in said


def test_what_it_proves_and_what_not(verify: Verify) -> None:
    proved, _, rest = flat(verify(whole_run()).stdout).partition("What this does not prove")
    for promise in (
        "with these keys",
        "made from the same state",
        "if one was missing, at least a threshold of sites signed the list of those left",
        "below the threshold",
    ):
        assert promise in proved.partition("What this proves")[2]
    for limit in (
        "published totals (epoch/slot) are the ones that were opened",
        "no line is missing at the end",
        "records or training were honest",
        "if the root's own key was misused",
        "claims of the file's writer",
    ):
        assert limit in rest
    assert "SIMULATED" not in proved + rest and "without a role" not in rest


def test_simulated_identities_are_said_first(verify: Verify) -> None:
    said = flat(verify(whole_run(simulated=True)).stdout)
    assert "identities SIMULATED: they prove nothing about who took part" in said
    assert "What this does not prove - Who took part: the identities are SIMULATED" in said


def test_a_site_s_view(verify: Verify) -> None:
    run = short_run("site-1")
    assert "written by site site-1," in flat(verify(run).stdout)
    done = verify(run, lines=run.lines[:-1])
    assert done.exit_code == 0 and "complete NO: there is no end line" in flat(done.stdout)
    assert "a site's own view has none" in flat(done.stdout)


def test_an_unfinished_transcript_of_the_server(verify: Verify) -> None:
    run = whole_run()
    said = flat(verify(run, lines=run.lines[:-1]).stdout)
    assert "complete NO: there is no end line" in said and "own view" not in said


def test_without_a_session_nothing_is_proved(verify: Verify) -> None:
    run = Run()
    run.end()
    done = verify(run)
    assert done.exit_code == 0 and "What this proves - Nothing" in flat(done.stdout)
    assert "complete yes" in flat(done.stdout) and "Keys" not in done.stdout


def test_a_session_without_sums_promises_none(verify: Verify) -> None:
    run = Run()
    run.epoch()
    said = flat(verify(run).stdout)
    assert "with these keys" in said and "same state" not in said


@pytest.mark.whole
@pytest.mark.parametrize("width", ["60", "100", "300"])
def test_output_fits_its_width(width: str, tmp_path: Path) -> None:
    run = whole_run()
    (tmp_path / "t").write_bytes(b"".join(run.lines))
    (tmp_path / "root").write_bytes(pem(run.root))
    program = "from tightframe_app.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "transcript", "verify", "t", "--root", "root"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": width},
    )
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= min(100, int(width))


def test_an_invalid_transcript(verify: Verify) -> None:
    run = whole_run()
    lines = rechained(
        [*run.lines[:2], edited(run.lines[2], lambda value: value.update(slot=3)), *run.lines[3:]]
    )
    done = verify(run, lines=lines)
    assert done.exit_code == 1 and done.stdout == ""
    assert "TF-616: Line 3: Expected the slot in the receipt of site-1 to be 3" in flat(done.stderr)
    assert flat(done.stderr).endswith("that Tightframe 0.1.0 wrote it: use that version for it as well.")
    begun = edited(run.lines[0], lambda value: value.update(version=__version__))
    done = verify(run, lines=[begun, b"{}"])
    assert done.exit_code == 1 and "wrote it" not in flat(done.stderr)
    done = verify(run, lines=[])
    assert done.exit_code == 1 and "Line 1:" in flat(done.stderr)
    done = verify(run, root=pem(make_root()))
    assert done.exit_code == 1 and "Line 2:" in flat(done.stderr) and "site-1" in flat(done.stderr)
    later = make_root(start=AT + timedelta(days=1), end=AT + timedelta(days=900))
    done = verify(run, root=pem(later))  # of a federation that began after the run
    assert "The root is not that of this transcript's sites" in flat(done.stderr)
    assert "valid at" not in done.stderr


def test_a_line_without_an_end(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read up to the limit only, and refused for its length."""
    run = short_run()
    limit = max(len(line) for line in run.lines)
    for module in ("transcript", "transcript.lines"):
        monkeypatch.setattr(f"tightframe.securesum.{module}.MAX_LINE", limit)
    assert verify(run).exit_code == 0
    done = verify(run, lines=[run.lines[0], b"x" * 10 * limit])
    assert done.exit_code == 1
    assert f"Line 2: Expected the line to be at most {limit} bytes, but found {limit + 2}." in flat(
        done.stderr
    )


def test_options(verify: Verify) -> None:
    root = make_root()
    run = Run(root, sites={name: issue(root, name, role=None) for name in NAMES})
    epoch = run.epoch()
    run.opened(run.record(epoch, 0, missing=["site-1"]), GROUPS)
    assert "role" in flat(verify(run).stderr)
    done = verify(run, "--missing-role")
    assert done.exit_code == 1 and "the static group" in flat(done.stderr)
    done = verify(run, "--missing-role", "--any-static-cohort")
    assert done.exit_code == 0 and "certificates without a role were accepted" in flat(done.stdout)


@pytest.mark.parametrize("what", ["no pem", "empty", "two", "a site's", "der", "no constraints"])
def test_a_root_that_cannot_be_used(verify: Verify, what: str) -> None:
    run = short_run()
    site = run.sites["site-1"]
    root = {
        "no pem": b"hello",
        "empty": b"",
        "two": pem(run.root, make_root()),
        "a site's": pem(site),
        "der": run.root.certificate,
        "no constraints": pem(make_root(extensions=[])),
    }[what]
    done = verify(run, root=root)
    assert done.exit_code == 2 and "--root" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.jsonl", "--root", "root.pem"],
        ["file", "--root", "missing.pem"],
        [".", "--root", "root.pem"],
        ["file", "--root", "."],
        ["file"],
        [],
    ],
)
def test_unusable_arguments(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = short_run()
    Path("file").write_bytes(b"".join(run.lines))
    Path("root.pem").write_bytes(pem(run.root))
    assert CliRunner().invoke(cli.app, ["transcript", "verify", "file", "--root", "root.pem"]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["transcript", "verify", *arguments]).exit_code == 2


def test_a_transcript_cannot_steer_the_terminal(verify: Verify) -> None:
    run = short_run()
    for change in ({"reason": "\x1b[2J[bold]\u202e:smile:"}, {"reason": "x" * 200}):
        lines = [*run.lines[:-1], edited(run.lines[-1], lambda value, change=change: value.update(change))]
        done = verify(run, lines=lines)
        assert done.exit_code == 0 and "\x1b" not in done.stdout and "\u202e" not in done.stdout
    done = verify(run, lines=[edited(run.lines[0], lambda value: value.update({"\x1b[2J": 1}))])
    assert done.exit_code == 1 and "\x1b" not in done.stderr
    first = edited(run.lines[-1], lambda value: value.update(reason="[/x]\x1b[2J"))
    assert r"[/x]\x1b[2J" in verify(run, lines=[*run.lines[:-1], first]).stdout


NAMED = ("statistics-0/a", "train-0/b", "closing-0/c", "personal-0/d", "seal")
S, T1, T2, C, P = (
    SumId(*of)
    for of in ((0, "statistics-0"), (1, "train-0"), (2, "train-0"), (2, "closing-0"), (2, "personal-0"))
)


def asked(sum_id: SumId, rests_on: SumId | None = None, **changes: Any) -> SumReport:
    """A sum as a transcript tells it."""
    schema = next((name for name in NAMED if name.startswith(f"{sum_id.phase}/")), "seal")
    return replace(SumReport(0, 0, sum_id, schema, ("update",), (), None, {}, rests_on), **changes)


def wrong_in(
    *sums: SumReport,
    schemas: Sequence[str] = NAMED,
    form: int = 3,
    view: str = "server",
    **changes: Any,
) -> str | None:
    """Return what is wrong in the order of a transcript's sums; ``changes`` are of the parameters."""
    made = replace(PARAMS, schemas=dict.fromkeys(schemas, ()), **changes)
    epochs = tuple(EpochReport(replace(made, epoch=number), AT, {}) for number in (0, 1))
    report = Report(view, "job-7", "1", AT, form, epochs, sums, (), (), False, True, None, "")
    return out_of_order(report)


def in_order(*sums: SumReport, **changes: Any) -> bool:
    return wrong_in(*sums, **changes) is None


RUN = asked(S), asked(T1, S), asked(T2, T1), asked(C, T2)
SHUT = {"groups": (), "failure": "TF-501"}
UNSIGNED = {"missing": PARAMS.roster, **SHUT}


def test_the_order_of_the_plan_that_the_schemas_name() -> None:
    """Each sum behind the one that it rests on; where none is named, not after a later one."""
    retried = replace(T1, attempt=1)
    assert in_order(*RUN) and in_order(asked(S), asked(T1, S, **SHUT), asked(retried, S))
    for wrong in ([asked(T1)], [asked(S), asked(T2, S)], [asked(S), asked(C, S)]):
        assert not in_order(*wrong)
    assert not in_order(asked(S), asked(T2, S, epoch=1))
    assert in_order(asked(T2), asked(C, T2), lineage="job-1"), "a job that continues another one"
    assert not in_order(asked(T2), asked(P, T1), lineage="job-1")
    assert wrong_in(asked(T2), form=2) == "the sum of 2/train-0/0 was asked as the first one"
    assert str(wrong_in(asked(S), asked(T2, S))).endswith("behind that of 0/statistics-0/0")
    assert in_order(asked(T1), asked(T2), form=1) and not in_order(asked(T2), asked(T1), form=1)
    assert in_order(*RUN, asked(SumId(1, "seal-0"), C), asked(P, T2)), "the last total's seal is of no place"


def test_a_later_epoch_goes_on_from_what_the_server_opened_before() -> None:
    """Its first sum names no total; which of its sums was opened a site does not learn."""
    later, skipped = asked(T1, epoch=1), asked(T2, epoch=1)
    for view in ("server", "site-1"):
        assert in_order(asked(S), later, asked(T2, epoch=1), view=view)
        assert not in_order(asked(T1), view=view)
        assert not in_order(asked(S), skipped, later, view=view)
        assert in_order(asked(S), skipped, view=view) == (view != "server")
        assert in_order(asked(S, **SHUT), asked(S, epoch=1), view=view)
        assert in_order(asked(S, **SHUT), later, view=view) == (view != "server")
        assert in_order(asked(S), skipped, form=1, view=view), "version 1 let other sums stay shut"
        assert in_order(asked(T2), asked(P, epoch=1), lineage="job-1", view=view)
        assert in_order(asked(T1), asked(C, epoch=1), lineage="job-1", view=view) == (view != "server")


def test_no_word_of_the_writer_alone_takes_the_order_away() -> None:
    """Which schema a line names, and that a failed sum without a receipt was asked, nobody has signed."""
    wrong = asked(S), asked(T2, S)
    for line in (asked(SumId(2, "x-0"), **UNSIGNED), asked(C, S, schema="seal", **UNSIGNED)):
        assert not in_order(*wrong, line)
    for schema in ("seal", "closing-0/c"):
        assert not in_order(asked(S), asked(T2, S, schema=schema))
    assert not in_order(asked(S), asked(SumId(1, "seal-0"), S, schema="train-0/b"))
    assert not in_order(asked(S), asked(SumId(1, "x-0"), S))
    assert in_order(asked(S), asked(C, S, **UNSIGNED), asked(T1, S)), "nobody answered the closing"
    assert in_order(*wrong, schemas=(*NAMED, "other")), "the sites signed schemas that name no plan"


def test_help() -> None:
    said = flat(CliRunner().invoke(cli.app, ["transcript", "verify", "--help"]).stdout)
    for part in ("--root", "rootCA.pem", "Exit code 0: valid.", "TF-616", "--missing-role"):
        assert part in said
    assert "verify" in CliRunner().invoke(cli.app, ["transcript", "--help"]).stdout


@pytest.mark.whole
def test_transcripts_of_a_run(tmp_path: Path) -> None:
    """What a run of four silos writes, at the server and at each silo, with one silo away for a round."""

    def silent(task: str, site: str, request: Any) -> bool:
        return task == "contribute" and site == "site-2" and runs.in_round(request, 1)

    runs.run(runs.job(), tmp_path, silent=silent)
    (tmp_path / "root.pem").write_bytes(simulated_root_pem(runs.JOB_ID))
    assert x509.load_pem_x509_certificate((tmp_path / "root.pem").read_bytes())
    found = sorted(tmp_path.rglob("transcript.jsonl"))
    assert len(found) == 5, "the server's and four silos'"
    for file in found:
        arguments = ["transcript", "verify", str(file), "--root", str(tmp_path / "root.pem")]
        done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "100"})
        assert done.exit_code == 0, done.stderr
        assert "SIMULATED" in done.stdout
        view = json.loads(file.read_bytes().splitlines()[0])["view"]
        sums = [json.loads(line) for line in file.read_bytes().splitlines()]
        short = [line for line in sums if line["line"] == "sum" and len(line["survivors"]) == 3]
        assert bool(short) == (view != "site-2")
        if view == "server":
            assert "complete yes" in flat(done.stdout) and "site-2 opened: update" in flat(done.stdout)
