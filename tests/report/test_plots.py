"""Markup and plots by themselves: escaping, gaps, and what does not fit."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from tests.support.pages import SVG, Page, said

from tightframe.report.drawing import layout, matrix, plots
from tightframe.report.drawing.frame import ticks
from tightframe.report.drawing.markup import Markup, section, tag
from tightframe.report.drawing.plots import Series
from tightframe.results.rows import Row, names


def tree(markup: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(markup))  # noqa: S314 - made by this program


def test_text_is_escaped_and_markup_is_not_escaped_twice() -> None:
    inner = tag("b", "<i>&\"'")
    assert inner == "<b>&lt;i&gt;&amp;&quot;&#x27;</b>"
    assert tag("p", inner, "<", title='" onload="x') == f'<p title="&quot; onload=&quot;x">{inner}&lt;</p>'
    assert tag("p", "a\u202eb\x1bc") == "<p>a\\u202eb\\x1bc</p>", "nothing steers the display"


def test_a_gap_interrupts_a_line_and_a_lone_point_is_still_drawn() -> None:
    found = tree(
        plots.lines("t", [0, 1, 2, 3, 4], [Series("loss", [4.0, 3.0, None, 1.0, None], 0)], x_name="round")
    )
    (piece,) = found.findall(f"{SVG}polyline")
    (first, second) = [tuple(map(float, point.split(","))) for point in (piece.get("points") or "").split()]
    assert first[0] < second[0] and first[1] < second[1], "to the right, and down"
    tips = [said(item) for item in found.findall(f"{SVG}path")]
    assert tips == ["loss, 0: 4", "loss, 1: 3", "loss, 3: 1"]


def test_a_line_goes_on_where_nothing_was_to_be_and_few_values_among_many_rounds_are_all_drawn() -> None:
    xs, measured = list(range(301)), {0: 4.0, 131: 3.0, 217: 2.0, 300: 1.0}

    def drawn(**more: Any) -> ElementTree.Element:
        series = Series("loss", [measured.get(x) for x in xs], 0, **more)
        return tree(plots.lines("t", xs, [series], x_name="round"))

    points = [f"loss, {x}: {value:g}" for x, value in measured.items()]
    for more, pieces in (({}, []), ({"skipped": [x not in measured for x in xs]}, [4])):
        found = drawn(**more)
        assert [said(item) for item in found.findall(f"{SVG}path")] == points
        lines = [(item.get("points") or "").split() for item in found.findall(f"{SVG}polyline")]
        assert [len(line) for line in lines] == pieces


def test_values_are_drawn_to_scale() -> None:
    bars = tree(plots.bars("t", [("a", ""), ("b", ""), ("c", "")], [("x", [0.25, 1.0, None])]))
    quarter, whole = [float(item.get("width", "")) for item in bars.findall(f"{SVG}rect")]
    assert quarter == pytest.approx(whole / 4, abs=0.1)
    columns = tree(plots.columns("t", ["1", "2"], {"up": [1.0, 2.0], "down": [3.0, 0.0]}, x_name="x"))
    heights = [float(item.get("height", "")) for item in columns.iter(f"{SVG}rect")][2:]
    assert heights == pytest.approx([heights[0], 3 * heights[0], 2 * heights[0], 0.0], abs=0.2)
    shares = tree(matrix.confusion("t", ["a", "b"], [[1, 3], [0, 0]]))
    heat = [
        float(item.get("fill-opacity", "")) for item in shares.iter(f"{SVG}rect") if item.get("fill-opacity")
    ]
    assert heat == pytest.approx([0.06 + 0.94 / 4, 0.06 + 0.94 * 3 / 4], abs=1e-3)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.0), (0.0, 1e-12), (-3.0, 7e9), (0.99, 1.01), (5.0, 5.0), (0, 3)]
)
def test_an_axis_covers_what_it_shows(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9 and marks[-1] >= high and 2 <= len(marks) <= 9
    assert marks == sorted(set(marks))


def test_a_hundred_classes_and_five_hundred_rounds_fit() -> None:
    many = [f"class {i}" for i in range(100)]
    picture = tree(matrix.confusion("t", many, [[int(i == j) for j in range(100)] for i in range(100)]))
    assert float(picture.get("width", "")) <= 740 and len(list(picture.iter(f"{SVG}text"))) == 2
    cells = [matrix.Cell("late" if 100 <= i < 110 else "in", "", "a") for i in range(500)]
    grid = tree(matrix.grid("t", ["a"], [str(i) for i in range(500)], [cells]))
    assert float(grid.get("width", "")) <= 740
    *_, before, late, after = grid.findall(f"{SVG}rect")
    assert [said(item) for item in (before, late, after)] == [
        "a, 0 to 99: in",
        "a, 100 to 109: late",
        "a, 110 to 499: in",
    ]
    widths = [float(item.get("width", "")) for item in (before, late, after)]
    assert widths[0] == pytest.approx(10 * widths[1], rel=0.02) and sum(widths) > 600
    assert len(list(grid.iter(f"{SVG}text"))) < 60
    xs = list(range(500))
    picture = tree(plots.lines("t", xs, [Series("s", [float(x) for x in xs], 0)], x_name="round"))
    assert len(picture.findall(f"{SVG}path")) <= 61


def test_nothing_at_all_is_no_error() -> None:
    for empty in (
        plots.lines("t", [], [], x_name="x"),
        plots.bars("t", [], [("x", [])]),
        plots.columns("t", [], {"x": []}, x_name="x"),
        matrix.confusion("t", [], []),
        matrix.grid("t", [], [], []),
    ):
        assert tree(empty).get("role") == "img"


def test_exchanges_are_named_by_round_phase_and_try() -> None:
    rows = [
        Row(
            round=number,
            kind=kind,
            phase=phase,
            phases=1 + (number == 1),
            silos=["a"],
            dropped={},
            seconds=1,
            bytes_down=0,
            bytes_up=0,
        )
        for number, kind, phase in ((0, "statistics", 0), (1, "train", 0), (1, "train", 1), (2, "train", 0))
    ]
    again = [row.model_copy(update={"kind": "closing"}) for row in rows[-1:]] * 2
    assert names([*rows, *again]) == [
        ("statistics", "stat"),
        ("round 1, phase 1", "1.1"),
        ("round 1, phase 2", "1.2"),
        ("round 2", "2"),
        ("closing", "close"),
        ("closing, try 2", "close"),
    ]


def test_sections_of_one_sound_have_places_of_their_own() -> None:
    found = Page(layout.page("t", "k", *(section(title, "x") for title in ("a b", "a-b", "A <b>", "é", "c"))))
    assert [item.get("id") for item in found.tree.iter("section")] == ["a-b", "a-b-2", "a-b-3", "part", "c"]
    assert [link.get("href") for link in found.tree.iter("a")] == ["#a-b", "#a-b-2", "#a-b-3", "#part", "#c"]
    assert not list(Page(layout.page("t", "k", section("a"), section("b"))).tree.iter("nav")), "few"
