"""``tightframe site``: what a hospital does at its own site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from tightframe_app.screens import console, lines

app = typer.Typer(help="At a hospital's own site.", no_args_is_help=True)
cohort = typer.Typer(
    help="For which silos this site's counts may be opened (class counts, class sums, evaluation).",
    no_args_is_help=True,
)
app.add_typer(cohort, name="cohort")
out = lines()

LEAK = """\
What this gives away: a site's counts hardly change from job to job. The total over
  {before}
was opened already. Once the total over
  {after}
is opened too, whoever has both can subtract them and so learns, exactly,
  {difference}
Secure sums do not prevent it; only noise (differential privacy) would."""

CUT_OFF = """\
Job {jobs} runs here. Stopping ends this site's part in it for good, and without this site
the job may have to end. What it has charged to this site's ledger stays charged."""

REFUSED = """\
this site will refuse this job as it is: tell the lead. The site's policy, cap and cohort are decisions of
those who answer for the records, and no fault to be mended for a job."""

SERVICE = """\
systemd runs it as {unit}.service: `sudo systemctl stop {unit}` ends it for good. A client that has to be
killed here counts as a crash there, and is started anew."""
AGAIN = "systemd will start it anew, unless its unit says otherwise: `sudo systemctl stop {unit}` now"

Config = Annotated[
    Path, typer.Option("--config", "-c", help="The site's own local/tightframe.json (it names `state_dir`).")
]
Site = Annotated[str, typer.Option("--site", "-s", help="This site's provisioned name.")]
WIDTH = 120
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@app.command("check")
def check(
    config: Config,
    job: Annotated[
        Path | None, typer.Option("--job", "-j", help="A job folder: what this site would refuse of it.")
    ] = None,
    production: Annotated[
        bool, typer.Option("--production", help="Hold everything against what production needs.")
    ] = False,
    site: Annotated[
        str | None, typer.Option("--site", "-s", help="This site's name; its certificate's by default.")
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option("--kit", exists=True, file_okay=False, help="The startup kit's folder `startup`."),
    ] = None,
    submitter: Annotated[str | None, typer.Option(help="Who would submit the job.")] = None,
    records: Annotated[
        bool, typer.Option("--records/--no-records", help="Read every record, which can take minutes.")
    ] = True,
) -> None:
    """Look at everything that this site needs, and tell all problems at once; nothing is changed.

    Configuration, policy, records, identity, the engine's files, disk, ledger, device, package and clock.
    `--job` tells what this site would refuse of a job: by its policy, by the cohort that its counts are open
    for, and by what is left of its privacy budget; nothing is charged. Exit code 1 if there is a problem,
    2 if there is nothing to look at.
    """
    from tightframe_app import job_folders
    from tightframe_app.site_check import look
    from tightframe_app.site_findings import Asked

    asked = Asked(
        config,
        production=production,
        site=site,
        kit=kit,
        job=None if job is None else job_folders.read_job(job),
        submitter=submitter,
        records=records,
        progress=out.print,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    own = refusals = 0
    for finding in look(asked):
        own += finding.state == "problem" and not finding.of_job
        refusals += finding.state == "problem" and finding.of_job
        table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.area, _shown(finding.text))
    console(WIDTH).print(table)
    if own:
        many = "1 problem: mend it" if own == 1 else f"{own} problems: mend them"
        out.print(f"{many} before this site takes part")
    if refusals:
        out.print(REFUSED)
    if own or refusals:
        raise typer.Exit(1)
    out.print("no problem was found")


@app.command("stop")
def stop(
    kit: Annotated[
        Path,
        typer.Option(
            "--kit", exists=True, file_okay=False, help="The startup kit whose processes shall end."
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, also if a job runs.")] = False,
    when_idle: Annotated[
        bool, typer.Option("--when-idle", help="Wait until no job runs here; ask nothing.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds from asking the processes to end to killing them.")
    ] = 30.0,
) -> None:
    """End this site's part of the engine: its processes of this kit, and no others.

    Says which job runs, and asks before it is cut off. Exit code 0 if no process of the kit is left, also if
    none was there; 1 if you said no, or one is left; 2 if it cannot be done from here.
    """
    from tightframe_app import site_stop

    opened = site_stop.site_kit(kit)
    found = site_stop.running(opened.folder)
    site_stop.check_owner(found)
    if when_idle:
        found = site_stop.wait_idle(opened.folder, lambda text: out.print(_shown(text)))
    if not found:
        out.print(f"{opened.name}: no process of this kit runs")
        return
    for one in found:
        out.print(_shown(f"{opened.name}: {one.described()}"))
    if (unit := site_stop.service(found)) is not None:
        out.print(_shown(SERVICE.format(unit=unit)))
    if names := site_stop.jobs(found):
        out.print(_shown(CUT_OFF.format(jobs=", ".join(names))))
        if not (yes or _agreed("Stop it?")):
            out.print("nothing was stopped; --when-idle waits for the job's end, --yes asks nothing")
            raise typer.Exit(1)
    ended = site_stop.stop(opened.folder, found, timeout=timeout)
    for one in ended.killed:
        out.print(_shown(f"did not end in {timeout:g} seconds and was killed: {one.described()}"))
    if unit is not None and any(one.role == "client" for one in ended.killed):
        out.print(_shown(AGAIN.format(unit=unit)))
    for one in ended.left:
        out.print(_shown(f"still there: {one.described()}; does a service manager start it anew?"))
    if ended.left:
        raise typer.Exit(1)
    out.print("stopped: no process of this kit is left")


@cohort.command("show")
def cohort_show(config: Config, site: Site) -> None:
    """Show for which silos this site's counts were opened, for each data set."""
    from tightframe.rounds.secure.common import named
    from tightframe.rounds.secure.vault import Vault, read_journal
    from tightframe.securesum.journal import CohortAccepted, StaticOpened

    path = _journal(config, site)
    if not path.exists():
        out.print(f"{site} has not opened counts of any data set yet: there is no journal at {path}")
        out.print("the first job with secure sums fixes the cohort; is the name right?")
        return
    with named(), Vault(path.parent, path, on_disk=False).locked():
        entries = read_journal(path)
    cohorts = {entry.dataset: entry for entry in entries if isinstance(entry, StaticOpened | CohortAccepted)}
    if not cohorts:
        out.print(f"{site} has not opened counts of any data set yet: the first cohort will be the one")
    for dataset, entry in sorted(cohorts.items()):
        how = "accepted by hand" if isinstance(entry, CohortAccepted) else f"opened in job {entry.lineage!r}"
        out.print(f"{dataset}: {', '.join(entry.roster)} ({how})")


@cohort.command("accept")
def cohort_accept(
    config: Config,
    site: Site,
    dataset: Annotated[str, typer.Option(help="As `tightframe site cohort show` names it.")],
    silos: Annotated[str, typer.Option(help="The new cohort: all silos, separated by commas.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let this site's counts be opened for another cohort from now on; says what that gives away."""
    from tightframe.rounds.secure.common import named
    from tightframe.rounds.secure.vault import Vault, append_entries, read_journal
    from tightframe.securesum.journal import CohortAccepted, StaticOpened
    from tightframe.securesum.rules import MAX_SITES, MIN_SITES

    roster = tuple(sorted({part.strip() for part in silos.split(",") if part.strip()}))
    if site not in roster or not MIN_SITES <= len(roster) <= MAX_SITES:
        raise typer.BadParameter(
            f"expected {MIN_SITES} to {MAX_SITES} silos with this one, {site}, but got {list(roster)}",
            param_hint="--silos",
        )
    path = _journal(config, site)
    vault = Vault(path.parent, path, on_disk=False)
    with named(), vault.locked():
        entries = read_journal(path)
    known: list[tuple[str, ...]] = []
    for entry in entries:
        if isinstance(entry, StaticOpened | CohortAccepted) and entry.dataset == dataset:
            known = [entry.roster] if isinstance(entry, CohortAccepted) else [*known, entry.roster]
    if not known:
        raise typer.BadParameter(
            f"{site} has opened no counts of {dataset!r}; see `tightframe site cohort show`",
            param_hint="--dataset",
        )
    before = known[-1]
    if set(known) == {roster}:
        out.print(f"{dataset} is open for {', '.join(roster)} already")
        return
    gone, new = sorted(set(before) - set(roster)), sorted(set(roster) - set(before))
    parts = [f"the counts of {', '.join(names)} together" for names in (gone, new) if names]
    difference = "\n  minus ".join(parts)
    out.print(LEAK.format(before=", ".join(before), after=", ".join(roster), difference=difference))
    if not yes and not typer.confirm("Accept it at this site?"):
        out.print("nothing was changed")
        raise typer.Exit(1)
    with vault.locked():  # no job writes meanwhile
        append_entries(path, [CohortAccepted(dataset, roster)])
    out.print(f"{dataset}: this site's counts may now be opened for {', '.join(roster)}")


def _agreed(question: str) -> bool:
    """What a person answers; no answer, as from a script without a terminal, is a no."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        out.print()
        return False


def _journal(config: Path, site: str) -> Path:
    """The journal of a site.

    Raises:
        FileNotFoundError: if there is no such configuration.
        SiteConfigError: TF-201 if it names no ``state_dir``; TF-202 if it is wrong.
    """
    from tightframe.config.site import parse_single, read_object
    from tightframe.errors import SiteConfigError
    from tightframe.rounds.context import JOURNAL, lasting_journal

    if not config.is_file():
        raise FileNotFoundError(f"Expected the site's configuration at {config}: there is no such file.")
    entry, _ = parse_single(read_object(config), str(config))
    if entry.state_dir is None:
        raise SiteConfigError(f"Expected `state_dir` in {config}: the journal lies there.", code="TF-201")
    return lasting_journal(Path(entry.state_dir), site) / JOURNAL


def _shown(text: str) -> str:
    """Text with values of a file, in which nothing can steer a terminal."""
    return "".join(
        part if part.isprintable() or part == "\n" else part.encode("unicode_escape").decode()
        for part in text
    )
