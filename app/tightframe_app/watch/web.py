"""The page of ``tightframe watch --web``: the terminal's content, a table of silos, and curves.

Its only source is the run's status: totals that the server has anyway, names of silos, and codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from tightframe.report.drawing import layout, plots
from tightframe.report.drawing.markup import (
    Markup,
    Part,
    facts,
    figure,
    folded,
    join,
    section,
    table,
    tag,
    without,
)
from tightframe.report.drawing.plots import Series
from tightframe.results.parts.dropouts import NOT_MEASURED
from tightframe.results.status import Moment, Status
from tightframe.results.words import plural
from tightframe.results.words import shown as number
from tightframe_app.live.options import announce, lines_of, tell
from tightframe_app.live.server import Content, Live
from tightframe_app.watch import silos
from tightframe_app.watch.status import NOT_KNOWN, TRAINED, Verdict
from tightframe_app.watch.view import (
    View,
    accuracy_words,
    cost_words,
    done,
    loss_words,
    privacy_words,
    round_words,
    standing,
)

KIND = "Tightframe: a run of a federation, live"


class WatchPage:
    """The page of one watched job.

    Args:
        port: to serve it on; None for a free one.
        out: console for messages about its link.
    """

    def __init__(self, job_id: str, port: int | None, out: Console) -> None:
        self._view = View(job_id)
        self.live = Live(f"Job {job_id}", KIND, content(self._view), port=port or 0, say=partial(tell, out))

    def show(self, view: View) -> None:
        """Show a view on the page."""
        self._view = view
        self.live.show(content(view))

    def end(self, verdict: Verdict) -> None:
        """Show how the run ended, as the page's last content."""
        self.live.show(content(self._view, verdict))


@contextmanager
def watch_page(job_id: str, port: int | None, out: Console) -> Iterator[WatchPage]:
    """Serve the page of a job, and print its link.

    Args:
        port: to serve it on; None for a free one.

    Raises:
        LiveError: TF-816 if the port cannot be used.
    """
    page = WatchPage(job_id, port, lines_of(out))
    with page.live:
        announce(page.live, lines_of(out))
        yield page


def content(view: View, verdict: Verdict | None = None) -> Content:
    """Return the page's content.

    Args:
        view: as on the terminal.
        verdict: at the run's end.
    """
    status = view.last
    name = view.seen.name if view.seen is not None else "" if status is None else status.job_name
    now = standing(view) if verdict is None else verdict.title
    summary = f"{name or 'job'}: {now}"
    if status is not None and status.kind == "train" and verdict is None:
        summary += f", round {round_words(status)}"
    parts = [tag("div", *_top(view, verdict, name), id="top")]
    if status is not None:
        silent = {} if view.seen is None else view.seen.silent
        parts += [_silos(status, silent), _course(status), _privacy(status)]
    return Content(
        f"{now} \N{EN DASH} {name or 'Tightframe'}", summary, join(parts), over=verdict is not None
    )


def _top(view: View, verdict: Verdict | None, name: str) -> Iterator[Part]:
    status = view.last
    if verdict is not None:
        kind = {TRAINED: "good", NOT_KNOWN: "warn"}.get(verdict.code, "bad")
        kind = "warn" if verdict.title.startswith(NOT_MEASURED.upper()) else kind
        yield layout.notice(kind, tag("b", verdict.title), *verdict.lines)
    if view.lost is not None and verdict is None:
        yield layout.notice(
            "warn",
            tag("b", "The server does not answer."),
            f"What follows is what was seen last; the job does not need this watch ({view.why}).",
        )
    if status is not None:
        yield tag(
            "p",
            tag(
                "progress", max="1", value=f"{done(status):.3f}", aria_label="part of the rounds that is done"
            ),
            f" round {round_words(status)}",
        )
        yield _tiles(status)
    engine = () if view.seen is None else view.seen.told
    yield facts(
        [
            ("job", f"{name} ({view.job_id})" if name else view.job_id),
            ("state", None if verdict is not None else standing(view)),
            ("the engine says", "; ".join(engine) or None),
            ("so far", None if status is None else cost_words(status)),
        ]
    )


def _tiles(status: Status) -> Markup:
    joined = f"{len(status.answered)} of {len(status.joined)}"
    values = [
        (f"{status.round} of {status.rounds}", "round"),
        (joined, "silos answered, of those that joined"),
    ]
    if status.balanced_accuracy is not None:
        noisy = "noisy " if status.noisy else ""
        values.append(
            (
                number(status.balanced_accuracy),
                f"{noisy}balanced accuracy, model of round {status.evaluated_round}",
            )
        )
    if status.loss is not None:
        values.append((number(status.loss), "training loss"))
    if status.epsilon_promised is not None and status.epsilon is not None:
        values.append(
            (f"\N{LESS-THAN OR EQUAL TO} {status.epsilon:g}", "epsilon, of silos that report a range")
        )
    return layout.tiles(values)


def _silos(status: Status, silent: silos.Silent) -> Markup:
    """Show the silos that take part, are awaited, or are missing, and why."""
    awaited = silos.missing(status)
    body: list[list[Part]] = [
        [name, now, note or without("nothing is to be said of it", "none")]
        for name, now, note in silos.each(status, silent)
    ]
    body_states = {row[1] for row in body}
    count = (
        f"{plural(len(awaited), 'silo')} training: {', '.join(awaited)}."
        if awaited and "training" in body_states and "waited for" not in body_states
        else f"Waiting for {plural(len(awaited), 'silo')}: {', '.join(awaited)}."
        if awaited
        else "Nobody is waited for."
    )
    return section(
        "Silos",
        tag("p", count),
        table(["silo", "now", "note"], body, wrapped=[2]) if body else tag("p", "None has joined yet."),
        *(tag("p", note) for note in status.notes),
    )


def _course(status: Status) -> Markup:
    """Draw loss and balanced accuracy of the rounds so far."""
    course = status.course
    if not course:
        return section(
            "Course of training",
            tag("p", f"No round has reported a number yet. Loss: {loss_words(status)}."),
        )
    xs = [item.round for item in course]
    pictures: list[Part] = []
    if any(item.balanced_accuracy is not None for item in course):
        series = [Series("test", [item.balanced_accuracy for item in course], 0)]
        if any(item.balanced_accuracy_interval for item in course):
            ends = [item.balanced_accuracy_interval for item in course]
            series += [
                Series(f"{which} end of the noise", [None if end is None else end[i] for end in ends], 2 + i)
                for i, which in enumerate(("lower", "upper"))
            ]
        pictures.append(
            figure(
                partial(
                    plots.lines, "Balanced accuracy by round", xs, series, x_name="round", low=0.0, high=1.0
                ),
                "Balanced accuracy of each round's model on the test records. Last: "
                f"{accuracy_words(status)}.",
            )
        )
    if any(item.loss is not None for item in course):
        losses = Series("training", [item.loss for item in course], 2)
        pictures.append(
            figure(
                partial(plots.lines, "Loss by round", xs, [losses], x_name="round"),
                f"Loss of local training, mean over silos. Last: {loss_words(status)}.",
            )
        )
    rows = [[str(item.round), _loss(item, status), _accuracy(item)] for item in course]
    head = ["round", "training loss", "test balanced accuracy"]
    return section("Course of training", *pictures, folded("All rounds in numbers", table(head, rows)))


def _loss(item: Moment, status: Status) -> Part:
    if item.loss is not None:
        return number(item.loss)
    if item.round == 0:
        return without("round 0 is the model before training", "none")
    private = status.epsilon_promised is not None
    return without("losses stay at the silos" if private else "this round's sum opened none", "none")


def _accuracy(item: Moment) -> Part:
    if item.balanced_accuracy is None:
        return without("this round's model was not evaluated, or not yet", "none")
    limits = item.balanced_accuracy_interval
    limits_text = f" [{number(limits[0])}, {number(limits[1])}]" if limits else ""
    return f"{number(item.balanced_accuracy)}{limits_text}"


def _privacy(status: Status) -> Markup:
    """Draw the ranges of epsilon that silos report, never a silo's own that its policy does not disclose."""
    title = "Privacy spent"
    if status.epsilon_promised is None:
        return section(title, tag("p", "The job has no differential privacy."))
    ranged = [(item.round, item.epsilon) for item in status.course if item.epsilon is not None]
    parts: list[Part] = [tag("p", f"{privacy_words(status)[:1].upper()}{privacy_words(status)[1:]}.")]
    if ranged:
        parts.append(plots.epsilons(dict(ranged), {x: status.epsilon_promised for x, _ in ranged}))
        rows: list[list[Part]] = [[str(x), f"{low:g} to {high:g}"] for x, (low, high) in ranged]
        parts.append(folded("All rounds in numbers", table(["round", "epsilon of the silos"], rows)))
    return section(title, *parts)
