"""``tightframe methods``: every method, the fields of its sums, and their size.

All are generated from the sums that a job would declare and hash into its transcript. Those of the usual
setting are kept in ``method_sums.json`` (``tightframe_app.kept``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightframe_app import formats, kept_files
from tightframe_app.screens import console, shown

if TYPE_CHECKING:
    from rich.table import Table

    from tightframe.phases import Field, Phase
    from tightframe.rounds.plan import Exchange
    from tightframe.rounds.setup import JobSetup

LIKE = "fedmr_isic"
ROUNDS = 4
KEPT = Path(__file__).with_name("method_sums.json")
NO_UPDATE = "in place of the update:"
_MODEL, _BUFFERS, _LOSSES = "update/", "buffer/", "training/"


@dataclass(frozen=True)
class Sums:
    """Sums of a method in one setting.

    Attributes:
        name, title, paper: the method's.
        sums: number of sums in a round; each takes two exchanges with every silo, after a drop-out three.
        upload: bytes of a silo's terms in the largest round.
        upload_once: bytes of those formed once, before the first round or after the last.
        each_round: fields of a silo's terms in a round, other than the model's update and the mean losses.
        once: fields of sums formed once, before the first round or after the last.
        private: why there is no form with record-level differential privacy; None if there is one.
        shares_noise: whether silos can make the noise of training together (``privacy.noise: shared``).
        rounded: whether silos on different processors agree on the next model only within rounding.
        opened: what the sum of a model of one sum opens -> count of numbers; else empty.
        follows: how the model follows from it, in one sentence; else empty.
        own_training: whether a site's own training loop may replace ours.
        logits_only: whether a network that returns only logits suffices.
    """

    name: str
    title: str
    paper: str
    sums: int
    upload: int
    upload_once: int
    each_round: tuple[str, ...]
    once: tuple[str, ...]
    private: str | None
    shares_noise: bool
    rounded: bool
    opened: Mapping[str, int]
    follows: str
    own_training: bool
    logits_only: bool


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show one method only, with its paper and all its fields.")
    ] = None,
    like: Annotated[
        str, typer.Option(help="Job whose data and model the numbers are for; see `tightframe jobs list`.")
    ] = LIKE,
    contract: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Or a contract: of the job exported with it."),
    ] = None,
    form: formats.Form = "text",
) -> None:
    """List the methods: the fields that a silo contributes to their sums, and the number of bytes.

    In addition to the fields listed, every method that trains sums the mean losses, an evaluation, and the
    model's update, unless its own line says what it sums in place of that. With secure sums, the silos verify
    every total and compute each model from it themselves.
    """
    sums = kept(name) if like == LIKE and contract is None else []
    sums = sums or computed(name, like, contract)
    like = like if contract is None else str(contract)
    if form == "json":
        from tightframe_app.jobs import presets
        from tightframe_app.outputs import Methods, MethodSums

        listed = [{**asdict(item), **presets.described(item.name)} for item in sums]
        formats.show(Methods(like=like, methods=tuple(MethodSums.model_validate(item) for item in listed)))
        return
    if name is None:
        console(140).print(_table(sums, like))
        return
    for line in _lines(sums[0], like):
        console(100).print(shown(line), soft_wrap=True)


def computed(name: str | None, like: str, contract: Path | None = None) -> list[Sums]:
    """Return the sums of a method, or of all methods that allow a job with the contract."""
    from tightframe.errors import JobError
    from tightframe.methods import METHODS, get

    if name is not None:
        return [describe(get(name).name, like, contract)]
    sums = []
    for method in METHODS:
        try:
            sums.append(describe(method.name, like, contract))
        except JobError:
            if contract is None:
                raise
    return sums


def kept(name: str | None = None) -> list[Sums]:
    """Return the kept sums of a method, or of all; empty for an unknown name."""
    entries = [item for item in kept_files.read(KEPT) if name is None or item["name"] == name]
    try:
        return [
            Sums(**{**item, "each_round": tuple(item["each_round"]), "once": tuple(item["once"])})
            for item in entries
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"Expected {KEPT} to be of this code, but it is stale: {kept_files.ANEW}."
        ) from error


def describe(name: str, like: str = LIKE, contract: Path | None = None) -> Sums:
    """Return the sums of a method with its default options in a recipe's setting, or on a contract's records.

    Raises:
        JobError: if there is no such method or recipe, or the two cannot be combined.
    """
    setup = setup_of(name, like, contract)
    numbers = range(1, setup.job.rounds + 1)
    largest = max(numbers, key=lambda number: _bytes_of(setup.plan.round(number)))
    outside = (*setup.statistics_phases(), *setup.before_phases(), *setup.after_phases())
    method = setup.method
    private = (
        "it has no private form here" if method.private is None else method.private(setup.setting.config)
    )
    return Sums(
        name=method.name,
        title=method.title,
        paper=method.paper,
        sums=max(len(setup.plan.round(number)) for number in numbers),
        upload=_bytes_of(setup.plan.round(largest)),
        upload_once=sum(item.bytes for phase in outside for item in phase.schema.fields),
        each_round=_described(setup.training_phases(largest)),
        once=tuple(text for text in _described(outside) if text != NO_UPDATE),
        private=private,
        shares_noise=private is None and method.gradient_rate is not None,
        rounded=setup.rounded,
        opened={} if method.one_sum is None else method.one_sum.opened(setup.setting),
        follows="" if method.one_sum is None else method.one_sum.follows,
        own_training=method.own_training is not None,
        logits_only=method.network == "logits",
    )


def setup_of(name: str, like: str, contract: Path | None = None) -> JobSetup:
    """Return the setup of a recipe's rehearsal with another method and its default options.

    With a contract it is that of the job from ``tightframe jobs export --method --contract``.
    """
    from tightframe.methods import get
    from tightframe.rounds.setup import prepare
    from tightframe_app.jobs import pairs, presets, recipes

    if contract is not None:
        return prepare(pairs.pair_with_contract(name, contract).job())
    needs = {f"training.{key}": value for key, value in presets.of(name).training.items()}
    changes: dict[str, Any] = {"method": name, "rounds": get(name).rounds or ROUNDS, **needs}
    return prepare(recipes.get(like).job(changes=changes))


def _bytes_of(exchanges: Iterable[Exchange]) -> int:
    """Return the bytes of a silo's terms without an evaluation."""
    return sum(item.bytes for exchange in exchanges for item in exchange.phase.schema.fields)


def _described(phases: Iterable[Phase]) -> tuple[str, ...]:
    """Describe the fields other than updates and mean losses, each once, by kind."""
    fields = [item for phase in phases for item in phase.schema.fields]
    others = [item for item in dict.fromkeys(fields) if not item.name.startswith((_MODEL, _BUFFERS, _LOSSES))]
    texts: list[str] = []
    if fields and not any(item.name.startswith(_MODEL) for item in fields):
        texts.append(NO_UPDATE)
    for group in dict.fromkeys(item.name.partition("/")[0] for item in others):
        members = [item for item in others if item.name.partition("/")[0] == group]
        if len(members) > 5:
            texts.append(f"{group}: {sum(item.size for item in members):,} numbers in {len(members)} fields")
        else:
            texts += [_field(item) for item in members]
    return tuple(dict.fromkeys(texts))


def _field(item: Field) -> str:
    shape = " x ".join(str(size) for size in item.shape) or "1"
    return f"{item.name} ({shape})" + (", by class" if item.per_class else "")


def _table(sums: Sequence[Sums], like: str) -> Table:
    from rich.table import Table

    table = Table(
        "method",
        "per round, besides update and losses",
        "once",
        "sums per round",
        "upload per round (and once), bytes",
        "record-level DP",
        title=f"in the setting of {like}; `tightframe methods NAME` shows more",
        title_justify="left",
        show_lines=True,
    )
    for column in table.columns:
        column.overflow = "fold"  # a name is not cut
    for place in (3, 4):
        table.columns[place].justify = "right"
    for item in sums:
        table.add_row(
            f"{item.name}\n{item.title}",
            "\n".join(item.each_round) or "nothing",
            "\n".join(item.once) or "nothing",
            str(item.sums),
            f"{item.upload:,}" + (f"\n({item.upload_once:,})" if item.upload_once else ""),
            ("yes, noise own or shared" if item.shares_noise else "yes") if item.private is None else "no",
        )
    return table


def _lines(item: Sums, like: str) -> list[str]:
    from tightframe_app.jobs import presets

    replaced = item.each_round[:1] == (NO_UPDATE,)
    beside = "in place of the model's update, besides" if replaced else "besides the model's update and"
    each_round = "; ".join(item.each_round[replaced:]) or "nothing"
    once = "; ".join(item.once) or "nothing"
    more = f", and {item.upload_once:,} once" if item.upload_once else ""
    export = f"tightframe jobs export --method {item.name} --contract CONTRACT.json"
    opened = "; ".join(f"{count:,} of {what}" for what, count in item.opened.items())
    release = (
        [f"  one exchange opens, as one sum: {opened}", f"  the model: {item.follows}"] if opened else []
    )
    return [
        f"{item.name}: {item.title}",
        f"paper: {item.paper}",
        f"with the data and the model of {like}, its default options:",
        *release,
        f"  sums per round: {item.sums}, each with two exchanges with every silo (three after a drop-out)",
        f"  bytes that a silo sends: {item.upload:,} in a round{more} (without evaluation and protocol)",
        f"  per round, {beside} the mean losses: {each_round}",
        f"  once, before the first round or after the last one: {once}",
        "  the next model, which each silo computes: "
        + (
            "the same within rounding, checked against the server's"
            if item.rounded
            else "the same to the bit"
        ),
        f"  record-level differential privacy: {_private(item)}",
        f"  a site's own training loop in place of ours: {'yes' if item.own_training else 'no'}",
        f"  needs of a network: {'logits' if item.logits_only else 'features and head'}",
        *presets.lines(item.name),
        f"options:  tightframe explain {item.name}",
        f"export a job:  {export}  (or --data DATASET; `tightframe data init` writes a contract)",
    ]


def _private(item: Sums) -> str:
    if item.private is not None:
        return f"no: {item.private}"
    if item.shares_noise:
        return "yes; the noise is each silo's own, or made by all silos together (privacy.noise: shared)"
    if item.opened:
        return "yes; all silos make the noise of the one release together"
    return "yes; the noise of training is each silo's own"
