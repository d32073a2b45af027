"""The clinical reading of a model's scores: calibration, operating points, net benefit, class by class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tightframe.metrics import clinical
from tightframe.metrics.clinical import Point, Scores, Share
from tightframe.report.drawing import curves
from tightframe.report.drawing.markup import Markup, Part, figure, folded, section, table, tag, without
from tightframe.report.drawing.plots import Series
from tightframe.results.files import ResultsError
from tightframe.results.parts.evaluation import FoldMetrics
from tightframe.results.words import in_their_case

TITLE = "The scores, read clinically"
MOST_DRAWN = 24
"""Classes up to which each has its own pictures."""


@dataclass(frozen=True)
class Wanted:
    """Values that a reader sets.

    Attributes:
        specificity, sensitivity: least values at an operating point.
        prevalence: of a class (None: of every class) in the model's target population; a class that is not
            named has that of the test records.
    """

    specificity: float = 0.9
    sensitivity: float = 0.9
    prevalence: Mapping[str | None, float] = field(default_factory=dict)


DEFAULT = Wanted()


def reading(fold: FoldMetrics, whose: str, wanted: Wanted = DEFAULT, copies: int = 1) -> Markup | None:
    """Show calibration, operating points and net benefit from score histograms; None without histograms.

    Args:
        fold: metrics of the model on some records.
        whose: owner of these records, in words.
        copies: how often each record is counted, where silos share their test records.

    Raises:
        ResultsError: TF-804, if a prevalence is of a class that the results do not have.
    """
    if not fold.scores or (fold.noisy and fold.scores_deviation is None):
        _named(wanted, ())
        return None
    wanted = _named(wanted, tuple(fold.scores))
    by_class = {name: _scores(fold, name, copies) for name in fold.scores}
    readable = {name: scores for name, scores in by_class.items() if scores.told}
    silent = [name for name in by_class if name not in readable]
    if not readable:
        return section(TITLE, tag("p", "No class has enough records of its own, and of others, to show."))
    bins = next(iter(readable.values())).bins
    parts: list[Part] = [
        tag("p", _words(fold, whose, bins)),
        tag("h3", "Calibration"),
        table(
            ["class", "share of the test records", "mean score", "Brier score", "ECE"],
            [_calibration(name, scores) for name, scores in readable.items()],
        ),
    ]
    for title, points in (
        (
            f"At a specificity of at least {wanted.specificity:g}",
            {name: clinical.at_specificity(scores, wanted.specificity) for name, scores in readable.items()},
        ),
        (
            f"At a sensitivity of at least {wanted.sensitivity:g}",
            {name: clinical.at_sensitivity(scores, wanted.sensitivity) for name, scores in readable.items()},
        ),
    ):
        parts += [
            tag("h3", title),
            table(
                [
                    "class",
                    "score from",
                    "sensitivity",
                    "specificity",
                    "best between the bins" if not fold.noisy else "",
                    "prevalence",
                    "PPV",
                    "NPV",
                ],
                [_rule(name, readable[name], point, wanted) for name, point in points.items()],
            ),
        ]
    parts.append(tag("p", _notes(fold, silent)))
    if len(readable) <= MOST_DRAWN:
        parts.append(tag("h3", "Calibration and decision curves"))
        # Of two classes one is the other, mirrored.
        first = list(readable)[-1] if len(by_class) == 2 and fold.findings is None else None
        for name, scores in readable.items():
            pictures = list(_pictures(name, scores, noisy=fold.noisy))
            if name == first:
                parts += [tag("p", tag("b", name)), *pictures]
            else:
                parts.append(folded(name, *pictures))
    return section(TITLE, *parts)


def _scores(fold: FoldMetrics, name: str, copies: int) -> Scores:
    positives, negatives = (np.asarray(counts, np.float64) / copies for counts in (fold.scores or {})[name])
    limits = None
    if fold.noisy:
        interval = fold.findings[name].records_interval if fold.findings else fold.records_interval
        limits = (0.0, math.inf) if interval is None else interval
    return Scores(positives, negatives, fold.scores_deviation if fold.noisy else None, limits)


def _named(wanted: Wanted, classes: Sequence[str]) -> Wanted:
    """Return the wanted values under the class names of the results.

    Raises:
        ResultsError: TF-804 for another class.
    """
    shares = {
        None if name is None else in_their_case(name, classes): share
        for name, share in wanted.prevalence.items()
    }
    wanted = replace(wanted, prevalence=shares)
    unknown = [name for name in wanted.prevalence if name is not None and name not in classes]
    if unknown:
        there = ", ".join(classes) if classes else "none, as the results have no score histograms"
        raise ResultsError(
            f"Expected the prevalence of a class of the results ({there}), but got {', '.join(unknown)!r}.",
            code="TF-804",
        )
    return wanted


def _words(fold: FoldMetrics, whose: str, bins: int) -> str:
    limits = (
        "Brackets are 95 % limits for the noise alone."
        if fold.noisy
        else "Brackets are 95 % limits for the number of test records (Wilson's)."
    )
    return (
        f"From the score histograms ({bins} bins) of {whose}: "
        + ("each finding by itself" if fold.findings is not None else "each class against all others")
        + ". Nothing more was asked of a silo for it. At an edge of a bin sensitivity and specificity are "
        + ("as exact as the noise leaves them" if fold.noisy else "exact")
        + f". A range with \u2013 holds wherever the scores lie in their bins. {limits}"
    )


def _notes(fold: FoldMetrics, silent: Sequence[str]) -> str:
    notes = (
        "The thresholds were chosen on the same test records: expect a little less elsewhere. PPV and NPV "
        "hold for people among whom the class is as frequent as stated, and otherwise like these records."
    )
    if silent:
        needed = "enough noisy records" if fold.noisy else "records of both kinds"
        notes += f" Not known, without {needed}: {', '.join(silent)}."
    return notes


def _calibration(name: str, scores: Scores) -> list[Part]:
    return [
        name,
        f"{scores.prevalence:.3f}",
        _range(clinical.mean_score(scores)),
        _range(clinical.brier(scores)),
        _range(clinical.calibration_error(scores)),
    ]


def _rule(name: str, scores: Scores, point: Point | None, wanted: Wanted) -> list[Part]:
    if point is None:
        return [name, *[without("No threshold on these records reaches it.", "-")] * 7]
    prevalence = _prevalence(name, scores, wanted)
    values = clinical.predictive_values(scores, point.edge, prevalence) if 0 < prevalence < 1 else None
    ppv, npv = values or (None, None)
    return [
        name,
        "above all" if point.edge == scores.bins else f"{point.threshold:.6g}",
        _share(point.sensitivity),
        _share(point.specificity),
        "" if point.reachable is None else f"up to {_down(point.reachable)}",
        f"{prevalence:.4g}",
        _share(ppv),
        _share(npv),
    ]


def _pictures(name: str, scores: Scores, *, noisy: bool) -> Iterator[Markup]:
    bins = [
        (item.low, item.high, item.share.value, item.share.low, item.share.high)
        for item in clinical.calibration(scores)
        if item.share is not None
    ]
    yield figure(
        partial(curves.calibration, f"Calibration of {name}", bins),
        f"{name}: share of the class among the records of each bin of scores. "
        + ("Bins that the noise hides are left out." if noisy else "Few records make long bars."),
    )
    edges = range(1, scores.bins)
    benefits = [clinical.net_benefit(scores, edge) for edge in edges]
    thresholds = [edge / scores.bins for edge in edges]
    yield figure(
        partial(
            curves.decision,
            f"Decision curve of {name}",
            thresholds,
            [
                Series("by the model", [None if item is None else item.value for item in benefits], 0),
                Series("everybody", [clinical.treat_all(scores.prevalence, at) for at in thresholds], 1),
                Series("lower limit", [None if item is None else item.low for item in benefits], 2),
                Series("upper limit", [None if item is None else item.high for item in benefits], 3),
            ],
        ),
        f"{name}: net true positives a person if one treats from a score on, at the prevalence of these test "
        f"records, {scores.prevalence:.3f}; the line at 0 is to treat nobody. Scores are taken for "
        "probabilities.",
    )


def _prevalence(name: str, scores: Scores, wanted: Wanted) -> float:
    return wanted.prevalence.get(name, wanted.prevalence.get(None, scores.prevalence))


def _share(share: Share | None) -> str:
    """Return a proportion with its interval, limits rounded outwards.

    >>> _share(Share(0.5, 0.4001, 0.5999))
    '0.500 [0.400, 0.600]'
    """
    if share is None or math.isnan(share.value):
        return "-"
    return f"{share.value:.3f} [{_down(share.low)}, {_up(share.high)}]"


def _range(bounds: tuple[float, float]) -> str:
    """Return bounds, rounded outwards.

    >>> _range((0.1234, 0.1301))
    '0.123\u20130.131'
    """
    if math.isnan(bounds[0]):
        return "-"
    return f"{_down(bounds[0])}\u2013{_up(bounds[1])}"


def _down(value: float) -> str:
    return f"{math.floor(value * 1000 + 1e-9) / 1000:.3f}"


def _up(value: float) -> str:
    return f"{math.ceil(value * 1000 - 1e-9) / 1000:.3f}"
