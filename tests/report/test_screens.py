"""Charts in a browser: whole, readable and without scrolling, on a desk's screen and on a phone's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.support.browser import DESK, PHONE, Browser
from tests.support.screens import chart_problems

from tightframe.report.drawing import curves, layout, matrix, plots
from tightframe.report.drawing.markup import Drawing, figure, section
from tightframe.report.drawing.plots import Series

CLASSES = ["nevus", "melanoma", "basal cell carcinoma", "actinic keratosis", "squamous cell carcinoma"]
NUMBERS = [0.0, 1.0, 0.33, None, 0.999]


def crowded() -> Iterator[Drawing]:
    """Each kind of chart, with long names, many values and large numbers."""
    xs = list(range(100000, 100500))
    waves = [Series(f"a run of some length {i}", [i + math.sin(x / 20) for x in xs], i) for i in range(4)]
    yield partial(plots.lines, "lines", xs, waves, x_name="round")
    notes = [(name, f"n = {10 ** (2 * i)}") for i, name in enumerate(CLASSES)]
    yield partial(plots.bars, "bars", notes, [("recall", NUMBERS)])
    three = ("the final model", "the silo's own model", "the personal model")
    yield partial(plots.bars, "bars of three", notes, [(name, NUMBERS) for name in three])
    for names in ([str(i) for i in range(0, 100, 5)], CLASSES, [str(i) for i in range(300)]):
        values = [float(i % 7) for i, _ in enumerate(names)]
        stacked = {"absent": values, "present": values, "a third class with a long name": values}
        yield partial(plots.columns, f"{len(names)} columns", names, stacked, x_name="age, years")
    for count in (2, 8, 14, 24):
        names = (CLASSES * 20)[:count]
        counts = [[i * j * 37 % 913 for j in range(count)] for i in range(count)]
        yield partial(matrix.confusion, f"{count} classes", names, counts)
    silos = ["hospital-1", "a hospital with a very long name", "site-3"]
    for count in (4, 20, 120):
        named = ["stat", "1.1", *(str(i) for i in range(2, count))]
        kinds = [matrix.KINDS[i % len(matrix.KINDS)] for i in range(count)]
        row = [matrix.Cell(kind, sign, "told") for kind, sign, _ in kinds]
        yield partial(matrix.grid, f"{count} exchanges", silos, named, [row] * len(silos))
    bins = [(i / 10, (i + 1) / 10, (i + 0.5) / 10, i / 10, (i + 1) / 10) for i in range(10)]
    yield partial(curves.calibration, "calibration", bins)
    thresholds = [i / 50 for i in range(1, 50)]
    kinds = ("by the model", "everybody", "lower limit", "upper limit")
    benefit = [Series(name, [0.3 - at / 2 for at in thresholds], i) for i, name in enumerate(kinds)]
    yield partial(curves.decision, "decision", thresholds, benefit)
    settings = [("fedmr / fedavg_etf, a setting's long name", 0.02, (-0.3, 0.5), [0.01, -0.03])] * 2
    yield partial(plots.forest, "forest", settings, "difference in balanced accuracy")


def test_no_chart_is_cut_scrolls_or_is_too_small_to_read(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    drawn = [figure(draw, "What it shows.") for draw in crowded()]
    page.write_text(layout.page("Charts", "test", section("All", *drawn)), encoding="utf-8")
    assert chart_problems(browser, page.as_uri(), (1280, 701, 700, 390, 360)) == []


def test_no_cell_of_a_silos_page_is_cut_and_what_left_it_needs_no_scrolling(
    browser: Browser, run: Path
) -> None:
    cut = """[...document.querySelectorAll("td,th,dd")]
      .filter(item => item.scrollWidth > item.clientWidth + 1)
      .map(item => item.textContent)"""
    browser.open((run / "site-1" / "report.html").as_uri())
    for width in (DESK, PHONE):
        browser.size(width)
        assert browser.value(cut) == []
        left = "document.querySelector('#what-left-this-silo .scroll')"
        assert browser.value(f"{left}.scrollWidth <= {left}.clientWidth"), width
