"""``tightframe federation``: the set-up steps around the engine's provisioning."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from tightframe.files import quoted, write_json
from tightframe.securesum.rules import MIN_SITES
from tightframe_app import formats
from tightframe_app.screens import lines, shown

app = typer.Typer(no_args_is_help=True)

PROFILES = ("strict", "standard", "research")
SITE_STATE, SERVER_STATE = Path("/var/lib/tightframe"), Path("/var/lib/tightframe-server")
TRAINING_SOCKET = Path("/run/tightframe/training.sock")
CONFIG = "tightframe.json"
out = lines()

Kit = Annotated[
    Path,
    typer.Option("--kit", exists=True, file_okay=False, help="The startup kit from `nvflare package`."),
]


@app.command("init")
def init(
    project: Annotated[str, typer.Argument(help="The federation's name, as in its root certificate.")],
    server: Annotated[
        str, typer.Option(help="HOST or HOST=ORGANISATION: the name by which sites reach the server.")
    ],
    site: Annotated[list[str], typer.Option(help="NAME or NAME=ORGANISATION of a hospital; repeat it.")],
    lead: Annotated[
        list[str], typer.Option(help="EMAIL=ORGANISATION of a person who submits jobs; repeat it.")
    ],
    member: Annotated[
        list[str] | None,
        typer.Option(help="EMAIL=ORGANISATION of a person with read access only; repeat it."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's only port.")] = 8002,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write; existing files are kept.")
    ] = Path("federation"),
) -> None:
    """Write a federation's profile and a request file for each participant.

    No key is generated here. When a hospital joins, run the command again with one more --site: only that
    request file is written, and the others stay as they are.
    """
    from tightframe_app.federation import request_files

    participants = [_participant("--server", server, "server")]
    participants += [_participant("--site", text, "client") for text in site]
    participants += [_participant("--lead", text, "admin", "lead") for text in lead]
    participants += [_participant("--member", text, "admin", "member") for text in member or []]
    try:
        content = request_files.files(project, port, participants)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    if len(site) < MIN_SITES:
        _say(f"note: secure sums need at least {MIN_SITES} hospitals, got {len(site)}")
    new, existing = request_files.write(content, output)
    for path in new:
        _say(f"written: {output / path}")
    for path in existing:
        _say(f"exists already: {output / path}")
    profile = quoted(output / request_files.PROFILE)
    _say("")
    _say("The keeper of the federation's root key, once, on a separate machine:")
    _say(f"  nvflare cert init --profile {profile} -o ca")
    _say("Each participant, on the machine that will use its key (send it the request file):")
    _say("  tightframe site join NAME.yml")
    _say("The keeper of the root key, who calls each of them:")
    _say(f"  tightframe federation certify NAME.request.zip ... -c ca --profile {profile}")
    _say("Each participant, with the root's fingerprint given by telephone:")
    _say("  tightframe site join NAME.signed.zip")
    _say("The server and each hospital, last:  tightframe site start KIT")


@app.command("certify")
def certify(
    request: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="NAME.request.zip ...")],
    ca: Annotated[Path, typer.Option("--ca", "-c", exists=True, help="Folder with the root's key.")],
    profile: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The federation's project.yml.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="The code of a key that its sender has read out; repeat it. Otherwise you are asked."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for NAME.signed.zip.")] = Path("."),
) -> None:
    """Certify requests as the keeper of the root key, after calling each sender.

    Shows name, kind or role, organisation, and the code of the key of each, and certifies it if that code is
    the one that was read out: everything else in a request can be copied by whoever carries it. Exit code 1:
    not all were certified.
    """
    from tightframe_app.federation import certifying

    def confirmed(item: certifying.Request) -> bool:
        _say(f"{item.described()}: key {item.code}")
        if key is not None:
            return item.code.replace(" ", "") in [text.replace(" ", "").lower() for text in key]
        try:
            return typer.confirm("Did they read this code of their key to you by telephone?", default=False)
        except typer.Abort:
            return False

    requests = [certifying.Request.read(path) for path in request]
    certified, declined = certifying.certify(requests, ca, profile, output, confirmed)
    for item, answer in certified:
        _say(f"certified: {item.name}; return {answer}")
    for item in declined:
        _say(f"not certified: {item.name}, whose key nobody has confirmed")
    if declined:
        raise typer.Exit(1)


@app.command("add-site")
def add_site(
    name: Annotated[str, typer.Argument(help="The site's (or the server's) name, as in its certificate.")],
    kit: Kit,
    policy: Annotated[str, typer.Option(help="strict, standard or research: the policy to start from.")] = (
        "standard"
    ),
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder for lasting state; {SITE_STATE} by default, {SERVER_STATE} at the server."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A table's file, or DATASET=JSON: "
            '--data \'fed_isic2019={"root": "/data/isic", "center": 0}\''
        ),
    ] = None,
    dataset_id: Annotated[
        str | None,
        typer.Option(help="This site's own name for its records, under which their budget is recorded."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that jobs may use here.")] = 0,
    gpu_memory: Annotated[int, typer.Option(min=0, help="GiB of memory on each of them.")] = 0,
    training_account: Annotated[
        str | None,
        typer.Option(help="With two accounts, the one that trains; give it for both kits of the site."),
    ] = None,
    engine_account: Annotated[
        str | None,
        typer.Option(help="With two accounts, the engine client's; for the training account's kit."),
    ] = None,
    socket: Annotated[
        Path, typer.Option(help="With two accounts, the socket of the training account's service.")
    ] = TRAINING_SOCKET,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the site's own files; each is kept as *.before.")
    ] = False,
) -> None:
    """Configure a startup kit at its site: allow lists, rights, guard, policy and location of the records.

    Only the kit's local/ is written, and no file of the site's own is replaced without --force. With two
    accounts the engine's kit (--training-account alone) holds nothing about records, policy and state.
    """
    from tightframe_app.federation import kits

    opened = kits.Kit.open(kit)
    if opened.name != name:
        raise typer.BadParameter(f"expected the kit of {name}, got that of {opened.name}", param_hint="--kit")
    if policy not in PROFILES:
        raise typer.BadParameter(f"expected one of {list(PROFILES)}, got {policy!r}", param_hint="--policy")
    if engine_account is not None and training_account is None:
        raise typer.BadParameter("expected both accounts of the site", param_hint="--training-account")
    if engine_account is not None and engine_account == training_account:
        raise typer.BadParameter(
            "expected an account other than the one that trains", param_hint="--engine-account"
        )
    engine_only = training_account is not None and engine_account is None
    if engine_only and (data or dataset_id or state_dir):
        text = "expected no records and no state in the kit of the engine's account"
        raise typer.BadParameter(text, param_hint="--training-account")
    state = (state_dir or (SITE_STATE if opened.kind == "site" else SERVER_STATE)).absolute()
    if opened.kind == "server":
        if data or dataset_id:
            raise typer.BadParameter("expected no records at the server", param_hint="--data")
        if training_account is not None:
            raise typer.BadParameter(
                "expected a site's kit, got the server's", param_hint="--training-account"
            )
        files: dict[str, Any] = {
            "resources.json": kits.server_resources(state),
            "authorization.json": kits.AUTHORIZATION,
        }
    else:
        pin = opened.pin()  # this also checks that peers will accept the kit
        files = {
            "resources.json": kits.site_resources(
                gpus, gpu_memory, None if training_account is None else (training_account, socket)
            ),
            "privacy.json": kits.PRIVACY,
            "authorization.json": kits.AUTHORIZATION,
        }
        if not engine_only:
            more = {"dataset_id": dataset_id, "engine_account": engine_account}
            files[CONFIG] = kits.site_configuration(policy, state, records(data or []), more, device)
    if not engine_only:
        kits.own_folder(state)
    written, existing = opened.add(files, force=force)
    for file in written:
        _say(f"written: {opened.local / file}")
    for file in existing:
        _say(f"exists already: {opened.local / file}")
    if opened.kind == "server":
        _say(f"jobs and results will be kept in {state}")
        return
    if engine_only:
        _say(f"the training account, {training_account}, starts jobs, through {socket}")
        return
    if not data:
        _say(f"no records yet: configure them under `data` in {opened.local / CONFIG}")
    _say(f"this site's pin, for its peers:  {name}={pin}")
    where = quoted(opened.local / CONFIG)
    _say(f"now check everything:  tightframe site check -c {where} --production")


@app.command("pins")
def pins(
    kit: Kit,
    add: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PIN of a peer, from that peer itself and not through the server."),
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(help="NAME=PIN that a peer no longer has, after a renewal.")
    ] = None,
    form: formats.Form = "text",
) -> None:
    """Print this site's pin, and add or remove pins of its peers.

    A pin is the SHA-256 of a site's public key. A peer with a pin must have that key, whatever the keeper
    of the root key signs. While a peer renews its key it has two pins, the old and the new one.
    """
    from tightframe_app.federation import kits

    opened = kits.Kit.open(kit)
    if opened.kind != "site":
        raise typer.BadParameter("expected a site's kit, got the server's", param_hint="--kit")
    own_pin = opened.pin()
    if form == "json":
        if add or remove:
            raise typer.BadParameter("expected text where pins are changed", param_hint="--format")
        _show_pins(opened.name, own_pin, opened.local / CONFIG)
        return
    _say(f"{opened.name}={own_pin}")
    if not add and not remove:
        return
    config = opened.local / CONFIG
    if not config.is_file():
        raise FileNotFoundError(
            f"Expected the site's configuration at {config}, but there is no such file. Run first:  "
            f"tightframe federation add-site {opened.name} --kit {quoted(kit)}"
        )
    changes = [
        (where, *_pin(where, text, opened.name, own_pin))
        for where, texts in (("--add", add), ("--remove", remove))
        for text in texts or []
    ]
    _change_pins(config, changes)


def _show_pins(name: str, own_pin: str, config: Path) -> None:
    """Print a site's pins as JSON."""
    from tightframe.config.site import parse_single, read_object
    from tightframe_app.outputs import Pins

    peers = None
    if config.is_file():
        entry, _ = parse_single(read_object(config), str(config))
        by_peer = entry.policy.resolve(production=True).pins
        peers = {peer: tuple(pins) for peer, pins in sorted(by_peer.items())}
    formats.show(Pins(site=name, pin=own_pin, peers=peers))


def _change_pins(config: Path, changes: list[tuple[str, str, str]]) -> None:
    """Change the pins in a site's configuration, which must be valid afterwards."""
    from tightframe.config.site import parse_single, read_object

    values = read_object(config)
    parse_single(values, str(config))
    policy = values.setdefault("policy", {})
    by_peer: dict[str, list[str]] = {peer: list(pins) for peer, pins in (policy.get("pins") or {}).items()}
    for where, peer, pin in changes:
        peer_pins = by_peer.setdefault(peer, [])
        if where == "--add" and pin not in peer_pins:
            peer_pins.append(pin)
        elif where == "--remove":
            if pin not in peer_pins:
                raise typer.BadParameter(f"{peer} does not have the pin {pin}", param_hint=where)
            peer_pins.remove(pin)
    # A peer without its last pin keeps an empty list, which refuses its possibly compromised key.
    policy["pins"] = dict(sorted(by_peer.items()))
    entry, _ = parse_single(values, str(config))
    write_json(config, values, mode=config.stat().st_mode & 0o777)
    for peer, peer_pins in policy["pins"].items():
        if not peer_pins:
            _say(f"kept: {peer}, no pin: it is refused until it has one")
            continue
        _say(f"kept: {peer}, {len(peer_pins)} pin{'s' if len(peer_pins) > 1 else ''}: {', '.join(peer_pins)}")
    if not entry.policy.resolve(production=True).pinned_only:
        _say("`pinned_only` is off in this site's policy: a peer without a pin is accepted")
    _say("this applies from this site's next job on")


def _participant(option: str, text: str, kind: Any, role: Any = None) -> Any:
    from tightframe_app.federation import request_files

    try:
        return request_files.Participant.parse(text, kind, role)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def records(texts: list[str]) -> dict[str, Any]:
    """Return data set -> location of its records; for a table's file the entry that its first lines suggest.

    Raises:
        DataError: TF-206 if the file is not a table.
    """
    from tightframe.data.table.proposal import guessed

    locations: dict[str, Any] = {}
    for text in texts:
        if os.path.isfile(text):  # Path.is_file raises for JSON too long for a name
            locations["table"] = guessed(Path(text))
            continue
        name, separator, value = text.partition("=")
        try:
            values = json.loads(value)
        except ValueError:
            values = None
        if not separator or not isinstance(values, dict):
            raise typer.BadParameter(
                f"expected a table's file or DATASET={{JSON object}}, got {text!r}", param_hint="--data"
            )
        locations[name.strip()] = values
    return locations


def _pin(where: str, text: str, own_name: str, own_pin: str) -> tuple[str, str]:
    """Parse ``NAME=PIN`` into peer and pin."""
    name, separator, pin = (part.strip() for part in text.partition("="))
    pin = pin.lower()
    if not separator or not re.fullmatch(r"[0-9a-f]{64}", pin):
        raise typer.BadParameter(
            f"expected NAME=PIN, a pin being 64 digits 0-9a-f, got {text!r}", param_hint=where
        )
    _participant(where, name, "client")
    if where == "--add" and name == own_name and pin != own_pin:
        raise typer.BadParameter(f"{name} is this site, and its pin is {own_pin}", param_hint=where)
    return name, pin


def _say(text: str) -> None:
    out.print(shown(text))
