"""``tightframe site``: commands for a hospital's own site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tightframe.errors import SiteConfigError
from tightframe_app import formats
from tightframe_app.federation.commands import TRAINING_SOCKET
from tightframe_app.screens import lines, shown
from tightframe_app.site import models, releases
from tightframe_app.site.checks.findings import CONFIG_HELP, Scope, file_of
from tightframe_app.site.checks.printed import show_check
from tightframe_app.site.membership import commands as membership

app = typer.Typer(no_args_is_help=True)
app.add_typer(releases.cohort, name="cohort")
app.add_typer(releases.release, name="release")
app.add_typer(models.app, name="model")
app.command("join")(membership.join)
app.command("start")(membership.start)
app.command("page")(membership.page)
app.command("leave")(membership.leave)
out = lines()

CUT_OFF = """\
Job {jobs} runs here. Stopping ends this site's part in it for good, and the job may not be able
to continue without this site. Its charges to this site's ledger remain."""

CUT_OFF_ALL = """\
Job {jobs} runs here. Stopping the server ends it for all sites; it can go on as a new job
(tightframe jobs export --resume). Charges to the sites' ledgers remain."""

SERVICE = """\
systemd runs it as {unit}.service: `sudo systemctl stop {unit}` ends it for good. To systemd, an engine that
has to be killed here has crashed, and is restarted."""
AGAIN = "systemd will restart it unless its unit says otherwise: run `sudo systemctl stop {unit}` now"


@app.command("check")
def check(
    config: Annotated[
        list[Path],
        typer.Option("--config", "-c", help=CONFIG_HELP),
    ],
    job: Annotated[
        Path | None, typer.Option("--job", "-j", help="A job folder, to check what this site would refuse.")
    ] = None,
    production: Annotated[
        bool, typer.Option("--production", help="Check all requirements of production.")
    ] = False,
    site: Annotated[
        str | None,
        typer.Option("--site", "-s", help="This site's name; by default the one in its certificate."),
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option("--kit", exists=True, file_okay=False, help="The startup kit's folder `startup`."),
    ] = None,
    submitter: Annotated[str | None, typer.Option(help="The person who would submit the job.")] = None,
    records: Annotated[
        bool, typer.Option("--records/--no-records", help="Read every record, which can take minutes.")
    ] = True,
    engine_kit: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="With two accounts: the engine's own startup kit."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With a file for several sites: every line of every site.")
    ] = False,
    form: formats.Form = "text",
    more: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Check everything that this site needs, and report all problems at once; nothing is changed.

    Checks configuration, policy, records, identity, the engine's files, disk, ledger, device, package and
    clock. With `--job` it reports whether this site would refuse a job: because of its policy, of the
    cohort for which its counts are open, or of what is left of its privacy budget; nothing is charged.
    Exit code 1 if there is a problem, 2 if there is nothing to check. With a file for several sites, each
    site has one line and its problems, and a note that several have is there once; --verbose shows all.
    """
    from tightframe_app.jobs import folders as job_folders

    scope = Scope(
        _only([*config, *(more or ())]),
        production=production,
        site=site,
        kit=kit,
        job=None if job is None else job_folders.read_job(job),
        folder=job,
        submitter=submitter,
        records=records,
        progress=out.print if form == "text" else lambda text: None,
        engine_kit=engine_kit,
    )
    show_check(scope, form=form, every_line=verbose)


@app.command("stop")
def stop(
    kit: Annotated[
        Path,
        typer.Option("--kit", exists=True, file_okay=False, help="The startup kit whose processes to end."),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, even if a job runs.")] = False,
    when_idle: Annotated[
        bool, typer.Option("--when-idle", help="Wait until no job runs here; do not ask.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the processes to end before killing them.")
    ] = 30.0,
) -> None:
    """End the engine's processes of this kit, a site's or the server's, and no others.

    Names the running job, and asks before interrupting it. Exit code 0 if no process of the kit is left,
    even if none ran; 1 if you declined, or one is left; 2 if it cannot be done from here.
    """
    from tightframe_app.site import stop as site_stop

    opened = site_stop.opened(kit)
    processes = site_stop.running(opened.folder)
    site_stop.check_owner(processes)
    if when_idle:
        processes = site_stop.wait_idle(opened.folder, lambda text: out.print(_text(text)))
    if not processes:
        out.print(f"{opened.name}: no process of this kit runs")
        return
    for item in processes:
        out.print(_text(f"{opened.name}: {item.described()}"))
    if (unit := site_stop.service(processes)) is not None:
        out.print(_text(SERVICE.format(unit=unit)))
    if names := site_stop.jobs(processes):
        cut_off = CUT_OFF_ALL if opened.kind == "server" else CUT_OFF
        out.print(_text(cut_off.format(jobs=", ".join(names))))
        if not (yes or _agreed("Stop it?")):
            out.print("nothing was stopped; --when-idle waits for the job's end, --yes does not ask")
            raise typer.Exit(1)
    ended = site_stop.stop(opened.folder, processes, timeout=timeout)
    for item in ended.killed:
        out.print(_text(f"did not end in {timeout:g} seconds and was killed: {item.described()}"))
    if unit is not None and any(item.role in ("client", "server") for item in ended.killed):
        out.print(_text(AGAIN.format(unit=unit)))
    for item in ended.left:
        out.print(_text(f"still running: {item.described()}; does a service manager restart it?"))
    if ended.left:
        raise typer.Exit(1)
    out.print("stopped: no process of this kit is left")


@app.command("serve")
def serve(
    kit: Annotated[
        Path,
        typer.Option("--kit", exists=True, file_okay=False, help="The training account's own startup kit."),
    ],
    socket: Annotated[
        Path, typer.Option(help="Socket for the engine's client, in a folder of this account.")
    ] = TRAINING_SOCKET,
) -> None:
    """Start the engine client's jobs in this account, the only one that can read records, state and key.

    For sites with two accounts, as a service. Only the account `engine_account` in the kit's
    local/tightframe.json may request jobs, and only jobs that are signed under the project's root. Runs
    until it is stopped, and then ends all jobs.
    """
    import logging

    from tightframe.flare.accounts import service

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    service.run(kit, socket)


def _only(configs: Sequence[Path]) -> Path:
    """Return the one site configuration, which may be named by its kit's folder."""
    if len(configs) > 1:
        text = f"expected one site's, got {len(configs)}: call this once for each of"
        raise typer.BadParameter(f"{text} {', '.join(map(str, configs))}", param_hint="--config")
    (config,) = configs
    return file_of(config) or config


def _text(text: str) -> str:
    return shown(text, breaks=True)


def _agreed(question: str) -> bool:
    """Ask a yes-or-no question; no answer, as without a terminal, is a no."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        out.print()
        return False


@app.command()
def features(
    config: Annotated[
        Path,
        typer.Option("--config", "-c", help=CONFIG_HELP, callback=file_of),
    ],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete them; the next job computes them again.")
    ] = False,
    form: formats.Form = "text",
) -> None:
    """Show the features of records that this site keeps on disk (`feature_cache`), or delete them all."""
    from tightframe.config.site import parse_single, read_object
    from tightframe.rounds import feature_folders

    entry, _ = parse_single(read_object(config), str(config))
    if entry.state_dir is None:
        raise SiteConfigError(
            f"Expected `state_dir` in {config}, which is where features are kept, but it is not set.",
            code="TF-201",
        )
    state = Path(entry.state_dir)
    files_on_disk = list(feature_folders.stored(state))
    size = sum(path.stat().st_size for path in files_on_disk)
    if delete:
        feature_folders.delete_all(state)
    if form == "json":
        from tightframe_app.outputs import Features

        kind = entry.feature_cache
        formats.show(Features(feature_cache=kind, files=len(files_on_disk), bytes=size, deleted=delete))
        return
    files = "1 file" if len(files_on_disk) == 1 else f"{len(files_on_disk)} files"
    summary = f"{files} of features, {size / 2**20:.1f} MiB, in {state}"
    out.print(f"deleted: {summary}" if delete else f"{summary} (feature_cache: {entry.feature_cache})")
