"""``tightframe transcript``: check a run's record of its secure sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightframe.securesum.errors import MessageError
from tightframe.securesum.rules import minimum_survivors
from tightframe_app import formats
from tightframe_app.screens import console, facts_of, print_list, shown, table_of

if TYPE_CHECKING:
    from tightframe.securesum.identity import Anchor
    from tightframe.securesum.messages import Params
    from tightframe.securesum.transcript import Report

WIDTH = 100

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep ``verify`` as a subcommand although it is the only one."""


@app.command("verify")
def transcript_verify(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, readable=True, help="A transcript.jsonl of the server or of a site."
        ),
    ],
    root: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="The project's root certificate: rootCA.pem of a startup kit.",
        ),
    ],
    missing_role: Annotated[
        bool,
        typer.Option(
            "--missing-role",
            help="Accept certificates without a role, which only test provisioning issues.",
        ),
    ] = False,
    any_static_cohort: Annotated[
        bool,
        typer.Option(
            "--any-static-cohort",
            help="Accept that static fields (counts) were opened for more than one set of sites, "
            "as a site's policy or its owner can permit.",
        ),
    ] = False,
    form: formats.Form = "text",
) -> None:
    """Check every signature and rule in a transcript, and report what that proves.

    Needs only the project's root certificate: no key, no network, no running job. Get the root from
    somebody you trust, not from whoever gave you the transcript.

    Exit code 0: valid. 1: invalid; the line and the reason are printed (TF-616). 2: a file cannot be
    used at all.
    """
    from tightframe.securesum.identity import Anchor

    anchor = Anchor(_root_certificate(root), missing_role=missing_role)
    report = _verified(file, anchor, any_static_cohort, form)
    if form == "json":
        _show_json(file, report, anchor)
        return
    _print(file, report, anchor)


def verify_of_job(file: Path, root: Path, job_id: str) -> None:
    """Check a transcript as ``transcript verify`` does, and that hospitals signed it for one job.

    Raises:
        typer.Exit: 1, with a printed reason, if it is invalid, of another job or unsigned.
    """
    from tightframe.securesum.identity import Anchor

    anchor = Anchor(_root_certificate(root))
    report = _verified(file, anchor)
    if report.job != job_id:
        _refuse("another job's:", file, f"of job {job_id}, but it is of {shown(report.job)}")
    if not report.epochs:  # the first line, with the job's id, is only the server's claim
        _refuse(
            "signed by nobody:",
            file,
            "that hospitals have signed (TF-616), but it has no session: the run ended before there was one, "
            "or the sessions were left out",
        )
    _print(file, report, anchor)


def _refuse(what: str, file: Path, expected: str) -> NoReturn:
    reason = f" {shown(str(file))}: expected a transcript {expected}"
    console(WIDTH, stderr=True).print(Text.assemble((what, "bold red"), reason))
    raise typer.Exit(1)


def _verified(
    file: Path, anchor: Anchor, any_static_cohort: bool = False, form: formats.Form = "text"
) -> Report:
    """Return the report on a valid transcript; for an invalid one print why, and exit with 1."""
    from tightframe.securesum.identity import BY_ROOT
    from tightframe.securesum.transcript import TranscriptError, verify

    try:
        report = verify(_lines(file), anchor, any_static_cohort=any_static_cohort)
    except TranscriptError as error:
        text = str(error)
        if error.expected == BY_ROOT:
            text += " The root is not that of this transcript's sites: give their federation's rootCA.pem."
        text += _written_by_another(file)
    else:
        if (wrong := out_of_order(report)) is None:
            return report
        text = f"Expected sums in the order of the job's plan, but {wrong}."
    code = TranscriptError.code
    if form == "json":
        from tightframe_app.outputs import TranscriptVerified

        formats.show(TranscriptVerified(valid=False, file=str(file), code=code, reason=text))
        raise typer.Exit(1)
    reason = f" {shown(str(file))}: {code}: {shown(text)}"
    console(WIDTH, stderr=True).print(Text.assemble(("invalid:", "bold red"), reason))
    raise typer.Exit(1)


def out_of_order(report: Report) -> str | None:
    """Describe a sum that is out of the order of the plan that the schemas name; None if none is.

    The plan is read from the parameters, which sites sign, as the schema in a sum's line, and the sum in a
    failed one's, are the writer's claims.
    """
    from tightframe.rounds.order import KINDS, may_follow, place_of, position
    from tightframe.rounds.sums.common import SEAL
    from tightframe.securesum.transcript import SERVER

    params = {item.params.epoch: item.params for item in report.epochs}
    phases = {name.partition("/")[0] for item in params.values() for name in item.schemas} - {SEAL}
    if {phase.rpartition("-")[0] for phase in phases} - set(KINDS):
        return None  # no plan can be read from these schemas
    first, reached, opened = min(params, default=0), (0, 0, 0), None
    for item in report.sums:
        place, rests_on, epoch = place_of(item.sum_id), item.rests_on, params[item.epoch]
        if set(item.missing) == set(epoch.roster):
            continue  # no site signed that it was asked
        if item.schema.partition("/")[0] != (SEAL if place[0] == SEAL else item.sum_id.phase):
            return f"the sum of {item.sum_id} has the fields of another one, {item.schema}"
        if place[0] == SEAL:
            continue
        # In a new epoch the server continues from its last opened sum, which a site does not know.
        last = opened if rests_on is None else rests_on
        # A job that continues another begins where that stopped; version 1 names no total.
        begins = (item.epoch == first or report.view == SERVER) and epoch.lineage == epoch.job
        checkable = report.form > 1 and (begins or last is not None)
        if checkable and not may_follow(epoch.schemas, None if last is None else place_of(last), place):
            behind = "as the first one" if last is None else f"behind that of {last}"
            return f"the sum of {item.sum_id} was asked {behind}"
        if position(place) < reached:
            return f"the sum of {item.sum_id} was asked after a later one"
        reached = position(place)
        if item.groups and report.view == SERVER:
            opened = item.sum_id
    return None


def _print(file: Path, report: Report, anchor: Anchor) -> None:
    out = console(WIDTH)
    out.print(Text.assemble(("valid:", "bold green"), f" {shown(str(file))}"))
    _print_summary(out, report)
    print_list(out, "What this proves", proves(report))
    print_list(out, "What this does not prove", does_not_prove(report, anchor))


def _show_json(file: Path, report: Report, anchor: Anchor) -> None:
    from tightframe_app.outputs import TranscriptSum, TranscriptVerified

    keys: dict[str, list[str]] = {}
    for epoch in report.epochs:
        for site, key in epoch.keys.items():
            of_site = keys.setdefault(site, [])
            of_site += [] if key in of_site else [key]
    sums = [
        TranscriptSum(
            round=item.sum_id.round,
            phase=item.sum_id.phase,
            attempt=item.sum_id.attempt,
            epoch=item.epoch,
            slot=item.slot,
            groups=item.groups,
            missing=item.missing,
            failure=item.failure,
            blamed=item.blamed,
        )
        for item in report.sums
    ]
    formats.show(
        TranscriptVerified(
            valid=True,
            file=str(file),
            job=report.job,
            written_by=report.view,
            version=report.version,
            started=report.started,
            simulated=report.simulated,
            complete=report.complete,
            ended_early=report.reason,
            keys={site: tuple(of_site) for site, of_site in sorted(keys.items())},
            sums=tuple(sums),
            totals_verified=len(report.totals),
            totals_unverified=len(report.unchecked),
            head=report.head,
            proves=tuple(proves(report)),
            does_not_prove=tuple(does_not_prove(report, anchor)),
        )
    )


def proves(report: Report) -> list[str]:
    """List what a valid transcript proves."""
    if not report.epochs:
        return ["Nothing: no session was set up, so nothing in it is signed."]
    proven = [
        "These sites, with these keys, certified by this root, took part: in every epoch all of its sites "
        "signed the same settings and the same set of keys.",
    ]
    if report.opened:
        proven += [
            "For every opened sum, each site not listed as missing signed that it sent a masked term, and "
            "all terms were made from the same state (the same model).",
            "The sites agreed on the participants: "
            + (
                "if one was missing, at least a threshold of sites signed the list of those left."
                if report.form != 2
                else "at least a threshold of sites signed the list of each opened sum."
            ),
            "As far as the record shows, nothing was opened below the threshold or the smallest number of "
            "sites, and no slot or sum was used twice.",
        ]
    if report.totals:
        proven.append(
            f"{len(report.totals)} of {len(report.totals) + len(report.unchecked)} totals were verified: all "
            "sites in the next sum signed the total's hash, and the sites of the total combinations of their "
            "own terms, which had to add up to the total's before any share of the next sum was given."
        )
    return proven


def does_not_prove(report: Report, anchor: Anchor) -> list[str]:
    """List what a valid transcript does not prove, the most important first."""
    unproven = []
    if report.simulated:
        unproven.append(
            "Who took part: the identities are SIMULATED, made by the program itself. The signatures only "
            "show that the record is consistent."
        )
    else:
        unproven.append(
            "Who owns a key, if the root's own key was misused: compare the keys above with those that the "
            "sites themselves give you."
        )
    if anchor.missing_role:
        unproven.append("That a certificate was issued to a site: certificates without a role were accepted.")
    unproven += [
        *_unverified(report),
        "That no line is missing at the end, or that the file's owner omitted no sum: nobody signs the chain "
        "of hashes. Compare it with the transcripts of the other parties.",
        "That records or training were honest: a masked term enters the sum, whatever its content.",
        "Times, names of schemas, which groups were opened, who was blamed, and why a sum failed or the run "
        "ended: these are claims of the file's writer.",
    ]
    return unproven


def _unverified(report: Report) -> list[str]:
    """List what is not proved about totals."""
    unproven = []
    if report.unchecked:
        names = ", ".join(f"{item.epoch}/{item.slot} ({item.sum_id})" for item in report.unchecked)
        unproven.append(
            f"That these published totals (epoch/slot) are the ones that were opened: {names}. No opened sum "
            "rests on them; their hashes are claims of the server alone."
        )
    if any(not item.recomputed for item in report.totals):
        unproven.append(
            "That the combinations add up to the verified totals: the totals' integers are not in this file. "
            "It is the word of the sites that gave shares for the next sum, which checked it."
        )
    if shown_terms := sorted({name for item in report.totals for name in item.proved}):
        unproven.append(
            f"That {', '.join(shown_terms)} had the terms by which some totals were verified: the server "
            "showed them to the other sites, by signed receipts; this file does not have them."
        )
    return unproven


def _print_summary(out: Console, report: Report) -> None:
    writer = "the server" if report.view == "server" else f"site {report.view}"
    missing = [item for item in report.sums if item.missing]
    rows = [
        ("job", report.job),
        ("written by", f"{writer}, Tightframe {report.version}"),
        ("started", report.started.strftime("%Y-%m-%d %H:%M:%S UTC")),
        (
            "identities",
            "SIMULATED: they prove nothing about who took part" if report.simulated else "provisioned",
        ),
        ("sites", f"{len(report.sites)}: {', '.join(report.sites)}"),
        (
            "sums",
            f"{len(report.opened)} opened, {len(report.failed)} failed, {len(missing)} with missing sites",
        ),
        ("totals", f"{len(report.totals)} verified by the sites, {len(report.unchecked)} not"),
        ("complete", _completeness(report)),
        ("last line", f"SHA-256 {report.head}"),
    ]
    if report.skipped:
        places = ", ".join(f"{epoch}/{slot}" for epoch, slot in report.skipped)
        rows.append(("no line for", f"epoch/slot {places}: not used, or omitted"))
    out.print(facts_of(rows))
    if report.epochs:
        _print_epochs(out, report)
    if any(item.missing or item.failure or item.blamed for item in report.sums):
        _print_troubled(out, report)


def _completeness(report: Report) -> str:
    if not report.complete:
        why = "the run is still going, was interrupted, or lines were removed"
        at_site = (
            ""
            if report.view == "server"
            else "; a site's own view has none, because no site hears of the end"
        )
        return f"NO: there is no end line ({why}{at_site})"
    return "yes" if report.reason is None else f"yes; the run ended early: {report.reason}"


def _print_epochs(out: Console, report: Report) -> None:
    table = table_of(
        "epoch", "sites", "threshold", "smallest", "colluders", "server assumed", "weights", "static", "slots"
    )
    for epoch in report.epochs:
        params = epoch.params
        table.add_row(
            str(params.epoch),
            str(len(params.roster)),
            str(params.threshold),
            str(minimum_survivors(params)),
            str(params.colluders),
            "malicious" if params.trust == "malicious" else "semi-honest",
            shown(params.weights),
            _static(params),
            str(params.slots),
        )
    _print_table(
        out, "Rules that every site signed (with the assumptions on colluders and the server)", table
    )
    keys = table_of("site", "SHA-256 of its public key (its pin)", "epochs")
    epochs_of: dict[tuple[str, str], list[str]] = {}
    for epoch in report.epochs:
        for site, key in epoch.keys.items():
            epochs_of.setdefault((site, key), []).append(str(epoch.params.epoch))
    for (site, key), epochs in sorted(epochs_of.items()):
        keys.add_row(shown(site), key, ", ".join(epochs))
    _print_table(out, "Keys", keys)


def _print_troubled(out: Console, report: Report) -> None:
    table = table_of("sum (round/phase/try)", "epoch", "missing", "result", "blamed")
    for item in report.sums:
        if item.missing or item.failure or item.blamed:
            table.add_row(
                shown(str(item.sum_id)),
                str(item.epoch),
                shown(", ".join(item.missing) or "-"),
                f"failed, {item.failure}" if item.failure else f"opened: {', '.join(item.groups)}",
                shown("; ".join(f"{site}: {why}" for site, why in sorted(item.blamed.items())) or "-"),
            )
    _print_table(out, "Sums that failed, or that have missing or blamed sites", table)


def _static(params: Params) -> str:
    """Describe whether an epoch's counts, class sums and evaluation may be opened, if it has any."""
    if params.may_open_static:
        return "may open"
    return "none" if params.static_open else "shut"


def _print_table(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(Text(title, style="bold"))
    out.print(Padding(table, (0, 0, 0, 2)))


def _lines(file: Path) -> Iterator[bytes]:
    from tightframe.securesum.transcript import MAX_LINE

    with file.open("rb") as stream:
        # One byte more than allowed in a line, so that an endless one is refused without reading it all.
        yield from iter(partial(stream.readline, MAX_LINE + 2), b"")


def _written_by_another(file: Path) -> str:
    """Name the other version that wrote a transcript; empty for this one, or for none."""
    from tightframe import __version__
    from tightframe.securesum.transcript.lines import parse, written_by_another

    try:
        first = parse(next(_lines(file), b"").removesuffix(b"\n"))
    except MessageError:
        return ""
    return written_by_another(first.get("version"), __version__)


def _root_certificate(path: Path) -> bytes:
    """Return the only certificate in a PEM file, in DER, which must be a CA's, not a site's."""
    from cryptography.hazmat.primitives.serialization import Encoding

    from tightframe.rounds.site_ledger.keys import read_root

    try:
        return read_root(path).public_bytes(Encoding.DER)
    except ValueError:
        raise typer.BadParameter(
            f"expected one root certificate in PEM, but {shown(str(path))} holds something else",
            param_hint="--root",
        ) from None
