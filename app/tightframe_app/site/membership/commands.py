"""``tightframe site join``, ``start``, ``page`` and ``leave``: commands for a hospital's IT."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightframe.errors import JoinError
from tightframe.files import quoted
from tightframe_app.federation import commands as federations
from tightframe_app.live import options as live
from tightframe_app.screens import Terminal, lines, print_list, shown

if TYPE_CHECKING:
    from tightframe_app.site.membership.joining import Answer, Settings

out = lines()
LATER = "later"

RequestFile = Annotated[
    Path,
    typer.Argument(
        exists=True, dir_okay=False, help="The lead's NAME.yml; then the keeper's answer, NAME.signed.zip."
    ),
]
Kit = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, metavar="KIT", help="The startup kit's folder.")
]


def join(
    request: RequestFile,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Where the records lie: a table's file, DATASET=JSON, or `later`; without it you are asked."
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="The root's fingerprint, as the keeper gave it; otherwise the second call asks."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="strict, standard or research; standard by default.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for lasting state; by default state/NAME beside the request.")
    ] = None,
    dataset_id: Annotated[
        str | None,
        typer.Option(
            help="This site's own name for its records; by default the data set's, with `later` the site's."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs that jobs may use here.")] = None,
    gpu_memory: Annotated[int | None, typer.Option(min=0, help="GiB of memory on each of them.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the key and the request; ./NAME.")
    ] = None,
) -> None:
    """Join a federation in two calls: ask for a certificate, then make the kit from the answer.

    The first takes the lead's NAME.yml, and makes a key, which stays here, and a request to send to the
    keeper of the root key. The second takes the answer, NAME.signed.zip: it compares the root's fingerprint,
    packages the startup kit in kits/ beside the request's folder, fills its local/, and checks everything.
    Server and persons join in the same way. `tightframe site start` follows. Exit code 1: made, but the check
    has found a problem.
    """
    from tightframe_app.site.membership import joining

    if policy is not None and policy not in federations.PROFILES:
        raise typer.BadParameter(
            f"expected one of {list(federations.PROFILES)}, got {policy!r}", param_hint="--policy"
        )
    if state_dir is not None and not (parent := state_dir.absolute().parent).is_dir():
        raise typer.BadParameter(
            f"expected a new folder in one that is there, but there is no {parent}: make it first",
            param_hint="--state-dir",
        )
    settings = joining.Settings(
        data=None if not data else {} if data == [LATER] else federations.records(data),
        dataset_id=dataset_id,
        policy=policy,
        state_dir=None if state_dir is None else str(state_dir.absolute()),
        device=device,
        gpus=gpus,
        gpu_memory=gpu_memory,
    )
    if joining.is_answer(request):
        _finish(joining.Answer.read(request), output, fingerprint, settings)
    else:
        _ask(request, output, settings)


def _ask(request: Path, output: Path | None, settings: Settings) -> None:
    from tightframe_app.site.membership import joining

    who = joining.read_request(request)
    folder = joining.request_folder(who, output)
    _say(who.described())
    if who.kind == "site" and settings.data is None:
        settings = settings.updated(joining.Settings(data=_records()))
    key_request = joining.ask(request, who, folder, settings)
    _say(f"key         {folder / who.name}.key, which stays here")
    _say(f"send        {key_request.zipped}  to the keeper of the root key")
    _say(f"code        {key_request.code}, of the key")
    _say("The keeper calls you back. Read the code to them, and write down the root's fingerprint.")
    _say(f"With the answer:  tightframe site join {who.name}.signed.zip")


def _finish(answer: Answer, output: Path | None, fingerprint: str | None, options: Settings) -> None:
    from tightframe_app.federation import kits
    from tightframe_app.site.membership import joining

    who = answer.participant
    folder = joining.find_request(answer, output)
    settings = joining.noted(folder).updated(options)
    _say(who.described())
    if fingerprint is None:
        question = "The root's fingerprint, as the keeper gave it (SHA256:...)"
        fingerprint = _answer(lambda: typer.prompt(question), "--fingerprint")
    answer.check_root(fingerprint)
    place = joining.package(answer, folder, fingerprint)
    _say(f"kit    {place}")
    if who.kind == "user":
        _say(f"From {folder.parent} the commands find it by themselves; elsewhere give --kit.")
        return
    opened = kits.Kit.open(place)
    written = opened.local / ("resources.json" if opened.kind == "server" else kits.CONFIG_FILE)
    if not written.exists() or options.said:
        if opened.kind == "site" and settings.data is None:
            settings = settings.updated(joining.Settings(data=_records()))
        joining.configure(opened, who, folder, settings)
    else:
        _say(f"{written} is there already, and was not changed")
    _say(f"state  {joining.state_folder(who, folder, settings)}: it outlives every job; back it up")
    if opened.kind == "site":
        from tightframe_app.site.checks.findings import Scope
        from tightframe_app.site.checks.printed import show_check

        _say(f"pin    {who.name}={opened.pin()}, for the other hospitals")
        show_check(Scope(written, production=True, progress=out.print))
    _say(f"start it:  tightframe site start {quoted(place)}")


def start(kit: Kit) -> None:
    """Start a site or the server in the foreground, until Ctrl-C or SIGTERM.

    Refuses a kit whose local/ does not shut the engine's doors, and one that runs already, here or as a copy.
    """
    from tightframe_app.federation import kits
    from tightframe_app.site.checks.engine import components
    from tightframe_app.site.membership import starting

    opened = kits.Kit.open(kit)
    doors = f"tightframe.flare.doors.{'Server' if opened.kind == 'server' else 'Site'}Doors"
    configured = (opened.local / "resources.json").is_file()
    if not configured or doors not in [item.get("path") for item in components(opened.local)]:
        raise JoinError(
            f"Expected {opened.local}/resources.json with the engine's doors shut, but they are open. "
            f"Nothing was started. Run first: tightframe site join {opened.name}.signed.zip",
            code="TF-757",
        )
    starting.claim(opened)
    script = str(opened.startup / "sub_start.sh")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execve(script, [script, "--once"], os.environ | {"PATH": path})  # noqa: S606 (the engine's own script)


def page(kit: Kit, port: live.Port = None) -> None:
    """Show what runs here, what left in which sums, what was spent and refused, as a page, until Ctrl-C.

    The page is served on this machine only, by a link that opens once; it only looks, and renews itself. It
    has the policy with every rule, too, and the findings of `tightframe site check`. Start it with the
    account that trains: no other one may read the ledger.
    """
    from tightframe_app.live.server import Live
    from tightframe_app.site import page as pages
    from tightframe_app.site import stop

    looker = pages.Looker(stop.site_kit(kit))
    console = live.lines_of(Terminal(file=sys.stdout))
    known = looker.look()
    first = pages.content(known)
    try:
        with Live(known.site, pages.KIND, first, port=port or 0, say=partial(live.tell, console)) as served:
            live.announce(served, console)
            while True:
                time.sleep(pages.EVERY)
                served.show(pages.content(looker.look()))
    except KeyboardInterrupt:
        _say("the page is closed; the site goes on as it was")


def leave(
    kit: Kit,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    delete_keys: Annotated[
        bool, typer.Option("--delete-keys", help="Delete the private key, too. It cannot come back.")
    ] = False,
    delete_ledger: Annotated[
        bool,
        typer.Option(
            "--delete-ledger", help="Delete ledger and transcripts, too: what these records have spent."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the request, if it is not ./NAME.")
    ] = None,
) -> None:
    """Remove what `site join` has made on this machine, and say what the others have to do.

    Asks first. Ledger, transcripts and keys stay unless an option names them; records, and jobs' logs and
    results, always stay. Exit code 1: you said no.
    """
    from tightframe_app.site import stop
    from tightframe_app.site.membership import leaving

    opened = stop.site_kit(kit)
    going = leaving.departure(opened, output)
    paths = [*going.files, *(going.keys if delete_keys else ()), *(going.ledger if delete_ledger else ())]
    would = "Removed" if yes else "Would be removed"
    _say(f"{going.name} leaves {going.project}. {would} on this machine:")
    for path in paths:
        _say(f"  {path}")
    _say("Kept: the records, and jobs' logs, reports and models")
    for path in (*(() if delete_keys else going.keys), *(() if delete_ledger else going.ledger)):
        _say(f"  {path}")
    if delete_ledger and going.ledger:
        _say("Without its ledger nobody knows any more what these records have spent of their budget.")
    try:
        agreed = yes or typer.confirm("Leave?", default=False)
    except typer.Abort:
        agreed = False
    if not agreed:
        _say("nothing was removed; --yes does not ask")
        raise typer.Exit(1)
    roots = [opened.folder, *([] if going.state is None else [going.state])]
    roots += sorted({key.parent.resolve() for key in going.keys if key.parent != opened.startup})
    leaving.remove(tuple(paths), *roots)
    leaving.note(opened)
    _say(f"{going.name} has left on this machine. A service that starts it has to be disabled, too.")
    _say(f"its pin was  {going.name}={going.pin}")
    print_list(out, "For the lead, who passes it on", leaving.duties(going))


def _records() -> dict[str, Any]:
    question = "Where do the records lie? A table's file, DATASET=JSON, or later"
    text = _answer(lambda: typer.prompt(question, default=LATER), "--data")
    return {} if text == LATER else federations.records([text])


def _answer(ask: Callable[[], Any], option: str) -> str:
    """Ask, and name the option if nobody can answer."""
    try:
        return str(ask()).strip()
    except typer.Abort:
        raise typer.BadParameter(
            "expected an answer, got none; a script gives this option", param_hint=option
        ) from None


def _say(text: str) -> None:
    out.print(shown(text))
