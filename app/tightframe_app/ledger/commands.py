"""``tightframe ledger``: show, explain, verify and restart a site's privacy ledger."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightframe.errors import TightframeError
from tightframe.privacy.events import Gaussian, SubsampledGaussian
from tightframe.results.words import plural, rounded_up
from tightframe_app import formats
from tightframe_app.ledger.query import (
    ROOT_HELP,
    WIDTH,
    Config,
    File,
    MissingRole,
    Options,
    Query,
    Site,
    StateDir,
    charges_beside,
    ledger_of,
    run_of,
    taking_options,
)
from tightframe_app.screens import console, facts_of, print_list, shown, table_of
from tightframe_app.site.checks.findings import CONFIG_HELP, Scope, file_of
from tightframe_app.site.memory import memory_of, with_id

if TYPE_CHECKING:
    from tightframe.privacy.events import Gaussian, SubsampledGaussian
    from tightframe.privacy.ledger.chain import Verified
    from tightframe.privacy.ledger.entries import Entry
    from tightframe.privacy.ledger.rows import Check
    from tightframe.privacy.ledger.summary import Spending
    from tightframe.securesum.identity import Anchor
    from tightframe_app.outputs import LedgerShown, LedgerVerified

app = typer.Typer(no_args_is_help=True)

LOST = ("TF-604", "TF-620", "TF-702")
"""Codes of lost or altered records, as opposed to temporarily unreadable ones."""
FORGOTTEN = """\
If you begin a new ledger, this site forgets
- how much privacy budget its records have spent: jobs can spend it again;
- for which silos its counts were opened: if they are also opened for others, the difference of the two
  totals reveals exactly the counts of the silos that are in only one of them;
- how its sums were formed: if they are also formed in another way, the totals can reveal its own update."""


@dataclass(frozen=True)
class WhatIf:
    """Releases and training to fit into the budget; None is the last of its kind in the ledger."""

    release: Gaussian | None
    training: SubsampledGaussian | None

    def fitting(self, spending: Spending, epsilon: float) -> list[str]:
        """Describe what would still fit under a cap."""
        from tightframe.privacy.ledger.summary import fits

        release = self.release or spending.last(Gaussian)
        training = self.training or spending.last(SubsampledGaussian)
        assert release is None or isinstance(release, Gaussian)  # noqa: S101 - for the type checker
        assert training is None or isinstance(training, SubsampledGaussian)  # noqa: S101
        return fits(spending, epsilon, release=release, training=training)


@app.command("show")
@taking_options
def ledger_show(options: Options, form: formats.Form = "text") -> None:
    """List every charge with the epsilon up to and including it, and what is left of a cap.

    The chain of hashes is always checked, and signatures if --root is given. Epsilon is recomputed from
    the events: by the closed form if every record took part in every release, otherwise by privacy-loss
    distributions (PLD), or by RDP where these are too expensive, with RDP and PRV for comparison.
    """
    from tightframe.privacy.ledger.summary import left_text, spent_text

    out = console(WIDTH)
    query = options.query(needed=form == "json")
    verified, spent = _read(query, options)
    if form == "json":
        formats.show(_shown(query, verified, spent))
        return
    for spending in spent:
        protects = f"(protects a {spending.neighbours})" if spending.neighbours else "(nothing was charged)"
        out.print(Text(shown(spending.dataset_id), style="bold"), protects)
        out.print(Padding(_charges(spending), (0, 0, 0, 2)))
        facts = [
            ("charges", str(len(spending.entries))),
            (f"epsilon at delta {query.delta:g}", spent_text(spending.spent)),
            ("if no other silo adds noise", _up(spending.alone)),
            ("versions of the records", str(len(spending.fingerprints))),
        ]
        if query.epsilon is not None:
            facts.append(("left", left_text(spending, query.epsilon)))
        out.print(Padding(facts_of(facts), (0, 0, 0, 2)))
        out.print()
    _print_checked(out, verified, query, options)


@app.command("verify")
def ledger_verify(
    config: Config = None,
    root: Annotated[list[Path] | None, typer.Option(exists=True, dir_okay=False, help=ROOT_HELP)] = None,
    file: File = None,
    state_dir: StateDir = None,
    site: Site = None,
    missing_role: MissingRole = False,
    known: Annotated[
        list[str] | None,
        typer.Option(help="COUNT:HASH of a head printed earlier, which must still be in the ledger."),
    ] = None,
    renew_head: Annotated[
        bool,
        typer.Option(
            "--renew-head", help="Rewrite a lost head file if all else is valid. Find out the cause first."
        ),
    ] = False,
    kit: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="The kit's folder `startup`: another head is kept beside it."
        ),
    ] = None,
    form: formats.Form = "text",
) -> None:
    """Check every signature and the chain of a ledger, and report what that proves and what it does not.

    With the site's file (--config) it finds ledger and root by itself; otherwise give --root. Needs no key.
    Exit code 0: whole. 1: altered; the first wrong entry is named (TF-702). 2: it
    cannot be read at all. Write the printed head down, or send it to somebody: only such a head, given
    with --known, can distinguish a ledger from an older copy of itself.
    """
    from tightframe.privacy.ledger.chain import read_ledger, renew_head_file
    from tightframe.privacy.ledger.entries import LostError, TamperError
    from tightframe.rounds.site_ledger import LedgerPaths, check_not_lost, check_witness
    from tightframe.rounds.site_ledger.keys import signature_check
    from tightframe.rounds.sums.common import package_errors
    from tightframe.rounds.sums.vault import journal_of

    out, heads = console(WIDTH), [_parse_head(text) for text in known or ()]
    check = signature_check([_anchor(item, missing_role) for item in root]) if root else None
    memory = None if config is None else memory_of(config, site, kit)
    if memory is not None and check is None:
        check = memory.check()
    if memory is not None and file is None and state_dir is None:
        path, places = memory.places.ledger, memory.places
        state_dir = Path(str(memory.entry.state_dir))
    else:
        path = ledger_of(file, state_dir, site, needed=True)
        root_of_kit = None if kit is None else kit.resolve().parent
        places = LedgerPaths.of_site(state_dir or path, path.parent.name, root_of_kit)
    if check is None:
        raise typer.BadParameter(
            "expected a project's root certificate, or --config beside a startup kit", param_hint="--root"
        )
    if state_dir is not None and not path.exists():
        check_not_lost(places, None)
    try:
        verified = (renew_head_file if renew_head else read_ledger)(path, check=check, known=heads)
        check_witness(
            places,
            verified.head.ledger,
            lambda count, hashed: read_ledger(path, check=None, known=[(count, hashed)]),
        )
        if state_dir is not None:
            check_not_lost(places, verified.entries)
        with package_errors():
            remembered = journal_of(verified.entries)
    except (TamperError, LostError) as error:
        if form == "json":
            from tightframe_app.outputs import LedgerVerified

            wrong = LedgerVerified(valid=False, ledger=str(path), code=error.code, reason=str(error))
            formats.show(wrong)
            raise typer.Exit(1) from None
        reason = f" {shown(str(path))}: {shown(str(error))}"
        console(WIDTH, stderr=True).print(Text.assemble(("invalid:", "bold red"), reason))
        raise typer.Exit(1) from None
    report = _verified(path, verified, len(remembered), len(heads))
    if form == "json":
        formats.show(report)
    else:
        _print_verified(out, report)


def _verified(path: Path, verified: Verified, secure_sums: int, known: int) -> LedgerVerified:
    """Return the report on an intact ledger.

    Args:
        secure_sums: number of its entries on secure sums.
        known: number of heads that it continues.
    """
    from tightframe.rounds.site_ledger.keys import signer_name
    from tightframe_app.outputs import LedgerVerified, Signer

    signers = [
        Signer(
            name=signer_name(certificate),
            certificate=name,
            entries=sum(entry.signer == name for entry in verified.entries),
        )
        for name, certificate in sorted(verified.certificates.items())
    ]
    return LedgerVerified(
        valid=True,
        ledger=str(path),
        id=verified.head.ledger,
        entries=len(verified.entries),
        secure_sum_entries=secure_sums,
        first=verified.entries[0].time if verified.entries else None,
        last=verified.entries[-1].time if verified.entries else None,
        signers=tuple(signers),
        head=f"{verified.head.count}:{verified.head.hash}",
        proves=tuple(proves(known)),
        does_not_prove=tuple(does_not_prove(known)),
    )


def _print_verified(out: Console, report: LedgerVerified) -> None:
    """Print the report on an intact ledger: content, signers, and what they prove."""
    out.print(Text.assemble(("whole:", "bold green"), f" {shown(report.ledger)}"))
    facts = [("entries", str(report.entries)), ("ledger", str(report.id))]
    # An entry may have several steps of a sum.
    facts.append(("secure sums", f"{plural(report.secure_sum_entries or 0, 'step')} in these entries"))
    if report.first is not None and report.last is not None:
        facts.append(("from, to", f"{_time(report.first)}, {_time(report.last)}"))
    for one in report.signers:
        many = "1 entry" if one.entries == 1 else f"{one.entries} entries"
        facts.append(("signed by", f"{shown(one.name)}, certificate {one.certificate[:16]}: {many}"))
    facts.append(("head", str(report.head)))
    out.print(Padding(facts_of(facts), (0, 0, 0, 2)))
    print_list(out, "What this proves", report.proves)
    print_list(out, "What this does not prove", report.does_not_prove)


@app.command("begin")
def ledger_begin(
    config: Annotated[Path, typer.Option("--config", "-c", exists=True, help=CONFIG_HELP, callback=file_of)],
    site: Annotated[str, typer.Option("--site", "-s", help="This site's provisioned name.")],
    kit: Annotated[
        Path | None,
        typer.Option("--kit", exists=True, file_okay=False, help="The startup kit's folder `startup`."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Begin a new ledger after the old one is lost for good, as decided by those who answer for the records.

    First restore the newest backup. This is for a site that has none: it refuses jobs (TF-620, TF-702,
    TF-604) until a person has confirmed what is forgotten. The old files are moved aside, not
    deleted, and the new ledger records that it was begun this way. A site's first ledger does not need
    this command.
    """
    out, memory = console(WIDTH), memory_of(config, site, kit)
    site_ledger = memory.site_ledger()
    try:
        site_ledger.open().close()
    except TightframeError as error:
        if error.code not in LOST:
            raise
        loss = error
    else:
        where = shown(str(memory.places.ledger))
        out.print(f"{where} is whole, as far as can be checked: no new ledger was begun")
        return
    out.print(shown(str(loss)), soft_wrap=True)
    out.print(FORGOTTEN, markup=False)
    continues = loss.code == "TF-620" and memory.places.ledger.is_file()
    where = shown(str(memory.places.ledger))
    if continues:
        out.print(f"What {where} has stays, charges too: only what is not in it is forgotten.")
    if not yes and not typer.confirm("Begin a new ledger at this site?"):
        out.print("nothing was changed")
        raise typer.Exit(1)
    site_ledger.begin_anew(loss.code)
    out.print(
        f"{f'{where} goes on' if continues else f'a new ledger begins at {where}'}; it records this decision"
    )


def proves(known: int) -> list[str]:
    """List what an intact ledger proves."""
    proven = [
        "Every entry was signed by the key of a site that the given root certified, and none was changed, "
        "moved or removed from between others since.",
        "The last entry is the one that the head record and the head file name as the last.",
    ]
    if known:
        proven.append("The ledger continues the heads given with --known: nothing up to them is missing.")
    return proven


def does_not_prove(known: int) -> list[str]:
    """List what an intact ledger does not prove, the most important first."""
    gone = "any entries after the newest of the given heads" if known else "its newest entries"
    return [
        f"That this is the newest state: ledger and head file may both be an older copy, without {gone}.",
        "That noise was drawn as charged, or that nothing was released without a charge: that depends on the "
        "program and on the site's own guard.",
        "That nobody with the site's key wrote entries of their own.",
        "Times: they come from the site's clock.",
    ]


@app.command("explain")
@taking_options
def ledger_explain(
    options: Options,
    release_noise: Annotated[
        float | None, typer.Option(help="What-if: noise multiplier of releases; the last one's by default.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="What-if: noise multiplier of training; the last one's by default.")
    ] = None,
    records: Annotated[int | None, typer.Option(min=1, help="What-if: number of training records.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="What-if: expected records of a step.")] = 64,
    form: formats.Form = "text",
) -> None:
    """Explain in plain words which job spent how much budget on what, what is left, and what would fit.

    For a data protection officer. With the site's file (--config), or --epsilon and --delta of its policy,
    it reports what is left of that cap, and how many releases or epochs still fit; --release-noise,
    --sigma and --records describe others than the last.
    """
    from tightframe.privacy.ledger.summary import explain

    if (sigma is None) != (records is None):
        raise typer.BadParameter("expected --sigma and --records together", param_hint="--sigma")
    training = None
    if sigma is not None and records is not None:
        training = SubsampledGaussian(sigma, min(1.0, batch_size / records), 1)
    what_if = WhatIf(None if release_noise is None else Gaussian(release_noise), training)
    out = console(WIDTH)
    query = options.query(needed=form == "json")
    verified, spent = _read(query, options)
    exact = _exact(verified, query)
    if form == "json":
        from tightframe_app.outputs import DatasetExplained, LedgerExplained

        data_sets = [
            DatasetExplained(
                dataset=spending.dataset_id,
                paragraphs=tuple(explain(spending, query.epsilon, exact)),
                fits=() if query.epsilon is None else tuple(what_if.fitting(spending, query.epsilon)),
            )
            for spending in spent
        ]
        checked = verified.signatures
        explained = LedgerExplained(
            ledger=str(query.path),
            signatures_checked=checked,
            data_sets=tuple(data_sets),
            exact_jobs=tuple(exact),
        )
        formats.show(explained)
        return
    for spending in spent:
        out.print(Text(f"Data set {shown(spending.dataset_id)}", style="bold"))
        for paragraph in explain(spending, query.epsilon, exact):
            out.print(Padding(shown(paragraph), (0, 0, 1, 2)))
        if query.epsilon is not None and (sentences := what_if.fitting(spending, query.epsilon)):
            heading = (
                "What would fit, each by itself (a noise multiplier is the size of the noise over the most "
                "that one record can change):"
            )
            out.print(Padding(heading, (0, 0, 0, 2)))
            for text in sentences:
                out.print(Padding(f"- {text}", (0, 0, 0, 2)))
            out.print()
    _print_checked(out, verified, query, options)


def _read(query: Query, options: Options) -> tuple[Verified, list[Spending]]:
    from tightframe.privacy.ledger.chain import read_ledger
    from tightframe.privacy.ledger.summary import spendings

    verified = read_ledger(query.path, check=_check(options))
    names, wanted = _datasets(verified), query.datasets
    if query.named and wanted is not None and not set(wanted) <= set(names):
        raise typer.BadParameter(f"expected one of {names}, got {wanted[0]!r}", param_hint="--dataset")
    entries = [entry for entry in verified.of_records if wanted is None or _dataset(entry) in wanted]
    return verified, spendings(entries, query.delta)


def _check(options: Options) -> Check | None:
    """Return the check of signatures by the roots given, else by the kit beside the site's file, if any."""
    from tightframe.rounds.site_ledger.keys import signature_check

    if options.root:
        return signature_check([_anchor(item, options.missing_role) for item in options.root])
    if options.config is None or options.file is not None or options.state_dir is not None:
        return None
    return None if Scope(options.config).startup is None else memory_of(options.config, None, None).check()


def _datasets(verified: Verified) -> list[str]:
    return sorted({_dataset(entry) for entry in verified.of_records})


def _dataset(entry: Entry) -> str:
    return str(getattr(entry.content, "dataset_id", ""))


def _anchor(path: Path, missing_role: bool) -> Anchor:
    from tightframe.securesum.identity import Anchor
    from tightframe_app.transcripts import _root_certificate

    return Anchor(_root_certificate(path), missing_role=missing_role)


def _parse_head(text: str) -> tuple[int, str]:
    count, _, hashed = text.partition(":")
    if not count.isdecimal() or len(hashed) != 64:
        raise typer.BadParameter(
            f"expected COUNT:HASH as verify prints it, got {text!r}", param_hint="--known"
        )
    return int(count), hashed


def _shown(query: Query, verified: Verified, spent: list[Spending]) -> LedgerShown:
    """Return the spending by data set."""
    from tightframe.privacy.ledger.entries import Charge
    from tightframe.privacy.ledger.summary import event_text
    from tightframe_app.outputs import ChargeLine, DatasetSpending, LedgerShown, Spent

    data_sets = []
    for spending in spent:
        charges = [
            ChargeLine(
                entry=entry.sequence,
                time=entry.time,
                job=charge.job_name,
                job_id=charge.job_id,
                purpose=charge.purpose,
                retry=entry.retry,
                event=event_text(charge.event),
                epsilon=total,
            )
            for entry, total in spending.entries
            if isinstance(charge := entry.content, Charge)
        ]
        data_set = DatasetSpending(
            dataset=spending.dataset_id,
            neighbours=spending.neighbours,
            charges=tuple(charges),
            spent=Spent.model_validate(spending.spent),
            alone=spending.alone,
            fingerprints=spending.fingerprints,
            left=None if query.epsilon is None else query.epsilon - spending.spent.guaranteed,
        )
        data_sets.append(data_set)
    return LedgerShown(
        ledger=str(query.path),
        entries=len(verified.entries),
        signatures_checked=verified.signatures,
        delta=query.delta,
        epsilon_cap=query.epsilon,
        data_sets=tuple(data_sets),
    )


def _charges(spending: Spending) -> Table:
    from tightframe.privacy.ledger.entries import Charge
    from tightframe.privacy.ledger.summary import event_text

    table = table_of("entry", "time (UTC)", "job", "purpose", "retry", "event", "epsilon")
    for entry, total in spending.entries:
        charge = entry.content
        assert isinstance(charge, Charge)  # noqa: S101 - for the type checker
        table.add_row(
            str(entry.sequence),
            _time(entry.time),
            shown(charge.job_name),
            shown(charge.purpose),
            str(entry.retry) if entry.retry else "",
            event_text(charge.event),
            _up(total),
        )
    return table


def _exact(verified: Verified, query: Query) -> list[str]:
    """Return the jobs that released exact totals, also from the charges' own ledger of a simulated run."""
    from tightframe.privacy.ledger.chain import read_ledger
    from tightframe.privacy.ledger.summary import exact_jobs

    charges = charges_beside(query.path)
    charged = () if charges is None else read_ledger(charges, check=None).entries
    return exact_jobs([*verified.entries, *charged])


def _job_title(job: str, path: Path, options: Options) -> str:
    """Return a job's id, with its name if its folder is in the kit or the simulator."""
    kit = None if options.config is None else Scope(options.config).kit_root
    folder = run_of(path) or (None if kit is None else kit / job)
    return with_id(job, folder, path.parent.name)


def _print_checked(out: Console, verified: Verified, query: Query, options: Options) -> None:
    from tightframe.privacy.ledger.summary import exact_text

    if (charges := charges_beside(query.path)) is not None:
        text = f"the secure sums of a simulated run, whose charges are in {shown(str(charges))}"
        out.print(text, soft_wrap=True)
    elif not verified.of_records:
        out.print("nothing has been charged yet")
    if jobs := _exact(verified, query):
        out.print(shown(exact_text([_job_title(job, query.path, options) for job in jobs])))
    how = "and signatures" if verified.signatures else "only; give --root to check signatures"
    out.print(f"{len(verified.entries)} entries; checked: hashes {how}")
    if query.datasets is not None and not query.named:
        names = set(_datasets(verified))
        for name in sorted(set(query.datasets) - names):
            out.print(f"nothing has been charged on {shown(name)} yet", markup=False)
        if others := sorted(names - set(query.datasets)):
            out.print(f"also in this ledger, and not shown: {shown(', '.join(others))}", markup=False)


def _time(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _up(value: float) -> str:
    return rounded_up(value)
