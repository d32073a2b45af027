"""The page's Table 1 says of each number what it is: exact, withheld, or noisy."""

from __future__ import annotations

from typing import Any

from tests.support.pages import Page

from tightframe.report.drawing import layout
from tightframe.report.pages import participation, statistics
from tightframe.results.statistics import (
    ColumnStatistics,
    Count,
    Moments,
    OfClass,
    Quantile,
    TableStatistics,
)

FEW = OfClass(
    counts=[Count(value=12), Count(value=30, withheld=1), Count(value=None, withheld=2)],
    missing=Count(value=0, withheld=1),
    moments=Moments(records=44, withheld=1, mean=61.25, deviation=8.5),
    quantiles=[Quantile(share=share, low=50, high=60) for share in (0.25, 0.5, 0.75)],
)
CLOSED = OfClass(
    counts=[Count(value=None)] * 3, missing=Count(value=None), moments=Moments(records=None, withheld=2)
)


def found(classes: dict[str, OfClass], **changes: Any) -> TableStatistics:
    column = ColumnStatistics(
        column="age <b>",
        kind="number",
        unit="years",
        names=["0", "40", "80"],
        edges=[0, 40, 80, 120],
        classes=classes,
        overall=FEW,
    )
    values: dict[str, Any] = {
        "title": "Ward",
        "contract": "0" * 64,
        "records": {name: Count(value=50) for name in classes},
        "all_records": Count(value=50 * len(classes)),
        "columns": [column],
        "silos": ["a", "b", "c"],
        "least": (5, 10),
        "holders": 3,
        "grid": 2.0**-20,
    }
    return TableStatistics(**{**values, **changes})


def shown(statistics_of: TableStatistics) -> Page:
    return Page(layout.page("Ward", "a page", *statistics.sections(statistics_of)))


def test_withheld_numbers_are_marked_and_never_zero() -> None:
    page, (column,) = shown(found({"well": FEW, "ill": CLOSED})), found({"ill": CLOSED}).columns
    rows = {row[""]: row for row in page.tables("Table 1")[0]}
    assert (
        rows["age <b> (years): mean (deviation)"]["well"] == "61.25 (8.5), of 44 records, withheld at 1 silo"
    )
    assert rows["age <b> (years): mean (deviation)"]["ill"] == "withheld"
    assert rows["age <b>: median between"] == {
        "": "age <b>: median between", "all": "50\u201360", "well": "50\u201360", "ill": "-",
    }  # fmt: skip
    assert rows["age <b>: no value"]["well"] == "0 + withheld at 1 silo"
    bins = {row["age <b>"]: row for row in page.tables("The columns")[0]}
    assert bins["40"]["well"] == "30 + withheld at 1 silo" and bins["80"]["well"] == "withheld"
    assert {row["ill"] for row in bins.values()} == {"withheld"}
    assert "Some of it is withheld, and not drawn" in page.text and "5 to 10 patients" in page.text
    assert "5 to 10 records" in shown(found({"well": FEW, "ill": CLOSED}, named=False)).text
    closed = shown(found({"ill": CLOSED}, columns=[column.model_copy(update={"overall": CLOSED})]))
    assert "All of it is withheld, and not drawn" in closed.text
    assert [row["age <b>"] for row in closed.tables("The columns")[0]] == ["each bin", "no value"], "folded"
    assert [row[""] for row in closed.tables("Table 1")[0]][1:3] == [
        "age <b> (years): mean (deviation)", "age <b>: quartiles",
    ]  # fmt: skip
    words = " ".join(page.picture("age <b>").itertext())
    assert "80 *" in words and "40 *" in words


def test_two_exchanges_of_a_kind_are_explained_once() -> None:
    named = [("statistics, phase 1", "stat.1"), ("statistics, phase 2", "stat.2"), ("round 1", "1")]
    assert participation._keys(named) == "; stat: statistics"


def test_many_classes_are_drawn_together_and_listed_one_by_one() -> None:
    names = [f"class {number}" for number in range(6)]
    page = shown(found(dict.fromkeys(names, FEW)))
    assert set(names) <= set(page.tables("The columns")[0][0])
    assert "all classes" in " ".join(page.picture("age <b>").itertext())


def test_a_noisy_number_has_its_limits() -> None:
    near = Count(value=12, interval=(4, 20))
    part = OfClass(
        counts=[near] * 3,
        missing=near,
        moments=Moments(
            records=36, mean=60.0, deviation=9.0, mean_interval=(55, 65), deviation_interval=(6, 12)
        ),
    )
    noisy = found(
        {"well": part, "ill": part},
        noisy=True,
        epsilon=2.0,
        delta=1e-5,
        neighbours="patient",
        noise_deviation=4.0,
        level=0.95,
    )
    assert not noisy.withheld
    page = shown(noisy)
    rows = {row[""]: row for row in page.tables("Table 1")[0]}
    assert rows["age <b> (years): mean (deviation)"]["ill"] == "60 [55, 65] (9 [6, 12])"
    assert rows["age <b>: no value"]["well"] == "12 [4, 20]"
    assert "epsilon 2, delta 1e-05" in page.text and "Each patient counts with one record" in page.text
