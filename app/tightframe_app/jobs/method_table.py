"""``tightframe methods``: every method, what of a silo it puts into sums, and what that costs.

Nothing here is written by hand: the sums are those that a job would declare, and hash into its transcript.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightframe_app.screens import console, shown

if TYPE_CHECKING:
    from rich.table import Table

    from tightframe.phases import Field, Phase
    from tightframe.rounds.setup import JobSetup

LIKE = "fedmr_isic"
ROUNDS = 4
NO_UPDATE = "in place of the update:"
_MODEL, _BUFFERS, _TOLD = "update/", "buffer/", "training/"


@dataclass(frozen=True)
class Sums:
    """What a method sums, in one setting.

    Attributes:
        name, title, paper: the method's.
        sums: a round; each is two exchanges with every silo.
        upload: bytes of a silo's terms in the round with the most of them.
        each_round: what a silo's terms are beside the model's update and the means of its losses.
        once: the same of what is summed once, before the first round or after the last one.
        private: why there is no form with record-level differential privacy; None if there is one.
    """

    name: str
    title: str
    paper: str
    sums: int
    upload: int
    each_round: tuple[str, ...]
    once: tuple[str, ...]
    private: str | None


def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method only, with its paper and every field.")
    ] = None,
    like: Annotated[
        str, typer.Option(help="Numbers are for this job's data and model, see `tightframe jobs list`.")
    ] = LIKE,
) -> None:
    """List the methods: what of a silo leaves it, in sums, and with how many bytes.

    Beside what is listed every method sums the model's update, the means of its losses, and
    an evaluation.
    """
    from tightframe.methods import METHODS, get

    wanted = METHODS if name is None else [get(name)]
    found = [describe(method.name, like) for method in wanted]
    if name is None:
        console(140).print(_table(found, like))
        return
    for line in _lines(found[0], like):
        console(100).print(shown(line), soft_wrap=True)


def describe(name: str, like: str = LIKE) -> Sums:
    """What a method sums with its default options in a recipe's setting.

    Raises:
        JobError: if there is no such method or recipe, or the two do not go together.
    """
    setup = setup_of(name, like)
    numbers = range(1, ROUNDS + 1)
    largest = max(numbers, key=lambda number: _bytes(setup, number))
    outside = (*setup.statistics_phases(), *setup.before_phases(), *setup.after_phases())
    method = setup.method
    private = (
        "no form of it is known here" if method.private is None else method.private(setup.setting.config)
    )
    return Sums(
        name=method.name,
        title=method.title,
        paper=method.paper,
        sums=max(len(setup.plan.round(number)) for number in numbers),
        upload=_bytes(setup, largest),
        each_round=_told(setup.training_phases(largest)),
        once=tuple(text for text in _told(outside) if text != NO_UPDATE),
        private=private,
    )


def setup_of(name: str, like: str) -> JobSetup:
    """A recipe's rehearsal with another method, whose options are its defaults."""
    from tightframe.rounds.setup import prepare
    from tightframe_app.jobs import pairs, recipes

    needs = {f"training.{key}": value for key, value in pairs.NEEDS.get(name, {}).items()}
    changes: dict[str, Any] = {"method": name, "rounds": ROUNDS, **needs}
    return prepare(recipes.get(like).job(changes=changes))


def _bytes(setup: JobSetup, number: int) -> int:
    """Bytes of a silo's terms in a round, without an evaluation."""
    fields = (item for exchange in setup.plan.round(number) for item in exchange.phase.schema.fields)
    return sum(item.bytes for item in fields)


def _told(phases: Iterable[Phase]) -> tuple[str, ...]:
    """Every field that is no part of an update and no mean of a loss; those of one shape and kind as one."""
    fields = [item for phase in phases for item in phase.schema.fields]
    others = [item for item in fields if not item.name.startswith((_MODEL, _BUFFERS, _TOLD))]
    texts: list[str] = []
    if fields and not any(item.name.startswith(_MODEL) for item in fields):
        texts.append(NO_UPDATE)
    for group in dict.fromkeys(item.name.partition("/")[0] for item in others):
        mine = [item for item in others if item.name.partition("/")[0] == group]
        if len(mine) > 4:
            texts.append(f"{group}: {sum(item.size for item in mine):,} numbers in {len(mine)} fields")
        else:
            texts += [_field(item) for item in mine]
    return tuple(dict.fromkeys(texts))


def _field(item: Field) -> str:
    shape = " x ".join(str(size) for size in item.shape) or "1"
    return f"{item.name} ({shape})" + (", by class" if item.per_class else "")


def _table(found: Sequence[Sums], like: str) -> Table:
    from rich.table import Table

    table = Table(
        "method",
        "beside update and losses, a round",
        "once",
        "sums a round",
        "bytes up a round",
        "record-level DP",
        title=f"in the setting of {like}; `tightframe methods NAME` tells more",
        title_justify="left",
        show_lines=True,
    )
    for column in (3, 4):
        table.columns[column].justify = "right"
    for item in found:
        table.add_row(
            f"{item.name}\n{item.title}",
            "\n".join(item.each_round) or "nothing",
            "\n".join(item.once) or "nothing",
            str(item.sums),
            f"{item.upload:,}",
            "yes" if item.private is None else "no",
        )
    return table


def _lines(item: Sums, like: str) -> list[str]:
    beside, once = ("; ".join(texts) or "nothing" for texts in (item.each_round, item.once))
    made = f"tightframe jobs export {like} --set method={item.name} --set job_name=NAME -o FOLDER"
    return [
        f"{item.name}: {item.title}",
        f"paper: {item.paper}",
        f"with the data and the model of {like}, its default options:",
        f"  sums a round: {item.sums}, each two exchanges with every silo",
        f"  bytes that a silo sends for them: {item.upload:,} (evaluation and protocol not counted)",
        f"  a round, beside the model's update and the means of losses: {beside}",
        f"  once, before the first round or after the last one: {once}",
        "  record-level differential privacy: " + ("yes" if item.private is None else f"no: {item.private}"),
        f"export a job:  {made}",
    ]
