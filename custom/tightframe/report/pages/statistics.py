"""Statistics before training on the server's page: Table 1 by class, and a picture of each column."""

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
"""Classes up to which each has its own colour."""
WITHHELD = "withheld"
_UNKNOWN = ("not known", "-")


def sections(found: TableStatistics) -> list[Part]:
    """Return Table 1, and the columns' histograms with all of their numbers."""
    timed = [] if found.survival is None else [_survival(found.survival)]
    return [_table_1(found), *timed, _columns(found)]


def in_words(found: TableStatistics) -> str:
    """Say how to read the numbers."""
    if found.noisy:
        assert found.epsilon is not None and found.delta is not None  # noqa: S101 - of noisy ones
        return (
            f"Every number has the noise of differential privacy (epsilon {found.epsilon:g}, delta "
            f"{found.delta:g}, for one {found.neighbours} more or less): {found.noise_deviation:.1f} records "
            "(standard deviation) in a count by class. In brackets: where the exact number lies, as far as "
            f"the noise goes, at {found.level or 0:.0%}. Nothing is withheld."
            + (" Each patient counts with one record." if found.neighbours == "patient" else "")
        )
    least = found.least[0] if found.least[0] == found.least[1] else f"{found.least[0]} to {found.least[1]}"
    return (
        f"Numbers are exact sums. A silo withholds a cell of fewer than {least} {found.whom} (its own "
        "`min_class_count`), and further ones that would give it away, before the sum; a number that fewer "
        f"than {found.holders} silos tell is not opened. Such numbers are marked, and never shown as zero."
    )


def _table_1(found: TableStatistics) -> Markup:
    names = list(found.records) if len(found.records) > 1 else []  # one class is all records
    rows: list[list[Part]] = [
        [
            "records",
            count_in_words(found.all_records),
            *(_share(found.records[name], found.shares.get(name)) for name in names),
        ]
    ]
    for item in found.columns:
        parts = [item.overall, *(item.classes[name] for name in names)]
        unit = f" ({item.unit})" if item.unit else ""
        if item.kind == "number":
            rows.append([f"{item.column}{unit}: mean (deviation)", *map(_mean, parts)])
            told = {
                share: [_quantile(part, place, item.edges) for part in parts]
                for place, share in enumerate(("lower quartile", "median", "upper quartile"))
            }
            if all(text in _UNKNOWN for texts in told.values() for text in texts):
                rows.append([f"{item.column}: quartiles", *[_UNKNOWN[0]] * len(parts)])
            else:
                rows += [[f"{item.column}: {share} between", *texts] for share, texts in told.items()]
        else:
            # A level of times names its bin and event by itself.
            timed = found.survival is not None and item is found.columns[-1]
            for place, level in enumerate(item.names):
                named = level if timed else f"{item.column} = {level}"
                rows.append([named, *(_of_all(part, part.counts[place]) for part in parts)])
        if any(part.missing.value != 0 or part.missing.withheld for part in parts):
            rows.append([f"{item.column}: no value", *(count_in_words(part.missing) for part in parts)])
    return section(
        "Table 1",
        tag("p", in_words(found)),
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


def _survival(found: SurvivalStatistics) -> Markup:
    """Show the curves that are known, and the test of whether they are the same."""
    ends = [f"{end:g}" for end in found.ends]
    known = {name: curve for name, curve in found.curves.items() if curve is not None}
    said = (
        "Kaplan-Meier estimates by class; all times of a bin count as its end, and 95 % limits are "
        "Greenwood's."
    )
    if found.noisy:
        said = (
            "Kaplan-Meier estimates by class from noisy counts; all times of a bin count as its end. The "
            "95 % limits include sampling and the noise of differential privacy, and so does the test."
        )
        if found.lacks:
            said += f" Not told: {'; '.join(found.lacks)}."
        if found.untested:
            said += f" No log-rank test: {found.untested}."
    elif found.lacks:
        said += f" Withheld: {'; '.join(found.lacks)}. Fewer bins "
        said += "(`statistics.time_bins`, or `time_ends`) withhold less."
    if found.log_rank is not None:
        degrees = plural(found.degrees or 0, "degree")
        unit = f" {found.unit}" if found.unit else ""
        until = "" if found.until is None else f" up to {found.until:g}{unit}"
        said += f" Log-rank test of equal curves{until}: {found.log_rank:.4g}, {degrees} of freedom, "
        said += f"p = {found.p:.3g}."
    head = [f"by{f' ({found.unit})' if found.unit else ''}"]
    head += [f"{name}: {what}" for name in known for what in ("at risk", "events", "survival")]
    rows: list[list[Part]] = []
    longest = max((len(curve.events) for curve in known.values()), default=0)
    ends = ends[:longest]
    for place, end in enumerate(ends):
        row: list[Part] = [end]
        for curve in known.values():
            if place >= len(curve.events):
                row += ["too few" if found.noisy else WITHHELD, "", ""]
                continue
            limits = (curve.low[place], curve.high[place])
            low, high = limits
            at = curve.survival[place]
            told = "-" if at is None else f"{at:.3f}"
            if low is not None and high is not None:
                told += f" [{low:.3f}, {high:.3f}]"
            row += [str(curve.at_risk[place]), str(curve.events[place]), told]
        rows.append(row)
    lines = [
        plots.Series(name, [*curve.survival, *[None] * (longest - len(curve.events))], place)
        for place, (name, curve) in enumerate(list(known.items())[:MOST_SERIES])
    ]
    bins = range(1, len(ends) + 1)
    picture = partial(plots.lines, "Survival", bins, lines, x_name="bin of time", low=0.0, high=1.0)
    shown = [figure(picture, "Share without the event after each bin.")] if lines else []
    return section(
        "Noisy survival" if found.noisy else "Survival",
        tag("p", said),
        *shown,
        table(head, rows) if known else None,
    )


def _columns(found: TableStatistics) -> Markup:
    parts: list[Part] = []
    for item in found.columns:
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
    """Return the counts by class; of more classes than there are colours, all of them together."""
    if len(item.classes) <= MOST_SERIES:
        return {name: [count.value or 0 for count in part.counts] for name, part in item.classes.items()}
    counts = [[part.counts[place].value or 0 for part in item.classes.values()] for place in _places(item)]
    return {"all classes": [sum(values) for values in counts]}


def _places(item: ColumnStatistics) -> range:
    return range(len(item.names))


def _share(count: Count, share: float | None) -> str:
    told = count_in_words(count)
    return told if share is None else f"{told} ({share:.1%})"


def _of_all(part: OfClass, count: Count) -> str:
    """Return a level's number, with its share of the records with a value if all of these are known."""
    total = sum(one.value or 0 for one in part.counts)
    known = all(one.complete for one in part.counts) and total
    return _share(count, (count.value or 0) / total if known else None)


def _mean(part: OfClass) -> str:
    found = part.moments
    if found is None or found.records is None:
        return WITHHELD
    if found.mean is None:
        return "too few to tell" if found.records else "no records"
    told = f"{found.mean:.4g}{_limits(found.mean_interval)}"
    if found.deviation is not None:
        told += f" ({found.deviation:.4g}{_limits(found.deviation_interval)})"
    elif found.deviation_interval is not None:
        told += f" (at most {found.deviation_interval[1]:.4g})"
    # Values that hide a few missing ones are in no mean (``disclosure``).
    hiding = part.missing.withheld and not found.withheld
    return told + _without(found) + (f", of {found.records} records" if hiding else "")


def _without(found: Moments) -> str:
    at = f", of {found.records} records, {WITHHELD} at {plural(found.withheld, 'silo')}"
    return at if found.withheld else ""


def _limits(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.4g}, {interval[1]:.4g}]"


def _quantile(part: OfClass, place: int, edges: list[float]) -> str:
    if len(part.quantiles) <= place:
        return _UNKNOWN[1]
    if (part.quantiles[place].low, part.quantiles[place].high) == (edges[0], edges[-1]):
        return _UNKNOWN[0]
    return f"{part.quantiles[place].low:.4g}\u2013{part.quantiles[place].high:.4g}"
