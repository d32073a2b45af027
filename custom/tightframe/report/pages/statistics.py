"""Statistics before training on the server's page: Table 1 by class, and a histogram of each column."""

from __future__ import annotations

from functools import partial

from tightframe.report.drawing import plots
from tightframe.report.drawing.markup import Markup, Part, figure, folded, section, table, tag
from tightframe.results.statistics import (
    ColumnStatistics,
    Count,
    Moments,
    OfClass,
    SurvivalStatistics,
    TableStatistics,
)
from tightframe.results.words import count_in_words, plural

MOST_SERIES = 4
"""Most classes that each have their own colour."""
WITHHELD = "withheld"
_UNKNOWN = ("not known", "-")


def sections(stats: TableStatistics) -> list[Part]:
    """Return Table 1, and the columns' histograms with all counts."""
    timed = [] if stats.survival is None else [_survival(stats.survival)]
    return [_table_1(stats), *timed, _columns(stats)]


def in_words(stats: TableStatistics) -> str:
    """Explain how to read the numbers."""
    if stats.noisy:
        assert stats.epsilon is not None and stats.delta is not None  # noqa: S101 - of noisy ones
        return (
            f"Every number has the noise of differential privacy (epsilon {stats.epsilon:g}, delta "
            f"{stats.delta:g}, for one {stats.neighbours} more or less): {stats.noise_deviation:.1f} records "
            "(standard deviation) in a count by class. In brackets: where the exact number lies, as far as "
            f"the noise goes, at {stats.level or 0:.0%}. Nothing is withheld."
            + (" Each patient counts with one record." if stats.neighbours == "patient" else "")
        )
    least = stats.least[0] if stats.least[0] == stats.least[1] else f"{stats.least[0]} to {stats.least[1]}"
    return (
        f"Numbers are exact sums. A silo withholds a cell of fewer than {least} {stats.whom} (its own "
        "`min_class_count`), and further ones that would give it away, before the sum; a number that fewer "
        f"than {stats.holders} silos disclose is not opened. Such numbers are marked, and never shown as "
        "zero."
    )


def _table_1(stats: TableStatistics) -> Markup:
    names = list(stats.records) if len(stats.records) > 1 else []  # one class is all records
    rows: list[list[Part]] = [
        [
            "records",
            count_in_words(stats.all_records),
            *(_share(stats.records[name], stats.shares.get(name)) for name in names),
        ]
    ]
    for item in stats.columns:
        parts = [item.overall, *(item.classes[name] for name in names)]
        unit = f" ({item.unit})" if item.unit else ""
        if item.kind == "number":
            rows.append([f"{item.column}{unit}: mean (deviation)", *map(_mean, parts)])
            quartiles = {
                share: [_quantile(part, place, item.edges) for part in parts]
                for place, share in enumerate(("lower quartile", "median", "upper quartile"))
            }
            if all(text in _UNKNOWN for texts in quartiles.values() for text in texts):
                rows.append([f"{item.column}: quartiles", *[_UNKNOWN[0]] * len(parts)])
            else:
                rows += [[f"{item.column}: {share} between", *texts] for share, texts in quartiles.items()]
        else:
            # A level of times already names its bin and event.
            timed = stats.survival is not None and item is stats.columns[-1]
            for place, level in enumerate(item.names):
                row_name = level if timed else f"{item.column} = {level}"
                rows.append([row_name, *(_of_all(part, part.counts[place]) for part in parts)])
        if any(part.missing.value != 0 or part.missing.withheld for part in parts):
            rows.append([f"{item.column}: no value", *(count_in_words(part.missing) for part in parts)])
    return section(
        "Table 1",
        tag("p", in_words(stats)),
        table(["", "all", *names], rows),
        tag(
            "p",
            "Shares are of the records with a value; there is none where a number is withheld. A mean `of` "
            "so many records is without others that hide a few without a value. Quartiles are "
            "from the histograms: they lie between these limits, wherever values lie in their bins and "
            "withheld records in theirs. Each site has rounded its mean and deviation to an eighth of their "
            "standard error, or less, unless its `min_class_count` is 1; a mean is withheld at a site where "
            "few patients make it.",
        ),
    )


def _survival(survival: SurvivalStatistics) -> Markup:
    """Show the known survival curves and the log-rank test."""
    ends = [f"{end:g}" for end in survival.ends]
    known = {name: curve for name, curve in survival.curves.items() if curve is not None}
    text = (
        "Kaplan-Meier estimates by class; all times of a bin count as its end, and 95 % limits are "
        "Greenwood's."
    )
    if survival.noisy:
        text = (
            "Kaplan-Meier estimates by class from noisy counts; all times of a bin count as its end. The "
            "95 % limits include sampling and the noise of differential privacy, and so does the test."
        )
        if survival.lacks:
            text += f" Withheld: {'; '.join(survival.lacks)}."
        if survival.untested:
            text += f" No log-rank test: {survival.untested}."
    elif survival.lacks:
        text += f" Withheld: {'; '.join(survival.lacks)}. Fewer bins "
        text += "(`statistics.time_bins`, or `time_ends`) withhold less."
    if survival.log_rank is not None:
        degrees = plural(survival.degrees or 0, "degree")
        unit = f" {survival.unit}" if survival.unit else ""
        until = "" if survival.until is None else f" up to {survival.until:g}{unit}"
        text += f" Log-rank test of equal curves{until}: {survival.log_rank:.4g}, {degrees} of freedom, "
        text += f"p = {survival.p:.3g}."
    head = [f"by{f' ({survival.unit})' if survival.unit else ''}"]
    head += [f"{name}: {what}" for name in known for what in ("at risk", "events", "survival")]
    rows: list[list[Part]] = []
    longest = max((len(curve.events) for curve in known.values()), default=0)
    ends = ends[:longest]
    for place, end in enumerate(ends):
        row: list[Part] = [end]
        for curve in known.values():
            if place >= len(curve.events):
                row += ["too few" if survival.noisy else WITHHELD, "", ""]
                continue
            limits = (curve.low[place], curve.high[place])
            low, high = limits
            at = curve.survival[place]
            cell = "-" if at is None else f"{at:.3f}"
            if low is not None and high is not None:
                cell += f" [{low:.3f}, {high:.3f}]"
            row += [str(curve.at_risk[place]), str(curve.events[place]), cell]
        rows.append(row)
    lines = [
        plots.Series(name, [*curve.survival, *[None] * (longest - len(curve.events))], place)
        for place, (name, curve) in enumerate(list(known.items())[:MOST_SERIES])
    ]
    bins = range(1, len(ends) + 1)
    picture = partial(plots.lines, "Survival", bins, lines, x_name="bin of time", low=0.0, high=1.0)
    shown = [figure(picture, "Share without the event after each bin.")] if lines else []
    return section(
        "Noisy survival" if survival.noisy else "Survival",
        tag("p", text),
        *shown,
        table(head, rows) if known else None,
    )


def _columns(stats: TableStatistics) -> Markup:
    parts: list[Part] = []
    for item in stats.columns:
        unit = f", {item.unit}" if item.unit else ""
        starred = [_starred(item, place) for place in range(len(item.names))]
        names = [f"{name} *" if star else name for name, star in zip(item.names, starred, strict=True)]
        picture = partial(plots.columns, item.column, names, _series(item), x_name=f"{item.column}{unit}")
        counts = [count for part in item.classes.values() for count in part.counts]
        much = "Some" if any(count.value is not None for count in counts) else "All"
        note = f" * {much} of it is withheld, and not drawn." if any(starred) else ""
        what = "lower edges of the bins" if item.kind == "number" else "levels"
        parts.append(figure(picture, f"{item.column}{unit}: records by class; {what}.{note}"))
        head = [item.column, *item.classes]
        rows: list[list[Part]] = [
            [name, *(count_in_words(part.counts[place]) for part in item.classes.values())]
            for place, name in enumerate(item.names)
        ]
        if much == "All":
            every = "each bin" if item.kind == "number" else "each level"
            rows = [[every, *[WITHHELD] * len(item.classes)]]
        rows.append(["no value", *(count_in_words(part.missing) for part in item.classes.values())])
        parts.append(folded(f"{item.column} by class", table(head, rows)))
    return section("The columns", *parts)


def _starred(item: ColumnStatistics, place: int) -> bool:
    counts = [part.counts[place] for part in item.classes.values()]
    return any(count.interval is None and not count.complete for count in counts)


def _series(item: ColumnStatistics) -> dict[str, list[int]]:
    """Return the counts by class; with more classes than colours, their total."""
    if len(item.classes) <= MOST_SERIES:
        return {name: [count.value or 0 for count in part.counts] for name, part in item.classes.items()}
    counts = [[part.counts[place].value or 0 for part in item.classes.values()] for place in _places(item)]
    return {"all classes": [sum(values) for values in counts]}


def _places(item: ColumnStatistics) -> range:
    return range(len(item.names))


def _share(count: Count, share: float | None) -> str:
    text = count_in_words(count)
    return text if share is None else f"{text} ({share:.1%})"


def _of_all(part: OfClass, count: Count) -> str:
    """Return a level's count, with its share of the records with a value if all their counts are known."""
    total = sum(one.value or 0 for one in part.counts)
    known = all(one.complete for one in part.counts) and total
    return _share(count, (count.value or 0) / total if known else None)


def _mean(part: OfClass) -> str:
    moments = part.moments
    if moments is None or moments.records is None:
        return WITHHELD
    if moments.mean is None:
        return "too few to show" if moments.records else "no records"
    text = f"{moments.mean:.4g}{_limits(moments.mean_interval)}"
    if moments.deviation is not None:
        text += f" ({moments.deviation:.4g}{_limits(moments.deviation_interval)})"
    elif moments.deviation_interval is not None:
        text += f" (at most {moments.deviation_interval[1]:.4g})"
    # Records with a value that are withheld to hide a few without one are in no mean (``disclosure``).
    hiding = part.missing.withheld and not moments.withheld
    return text + _without(moments) + (f", of {moments.records} records" if hiding else "")


def _without(moments: Moments) -> str:
    at = f", of {moments.records} records, {WITHHELD} at {plural(moments.withheld, 'silo')}"
    return at if moments.withheld else ""


def _limits(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.4g}, {interval[1]:.4g}]"


def _quantile(part: OfClass, place: int, edges: list[float]) -> str:
    if len(part.quantiles) <= place:
        return _UNKNOWN[1]
    if (part.quantiles[place].low, part.quantiles[place].high) == (edges[0], edges[-1]):
        return _UNKNOWN[0]
    return f"{part.quantiles[place].low:.4g}\u2013{part.quantiles[place].high:.4g}"
