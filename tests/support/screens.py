"""What a browser measures of a page's charts."""

from __future__ import annotations

from tests.support.browser import DESK, PHONE, Browser

LEAST = 10.0
"""Pixels of type that can be read."""

MEASURED = """(() => [...document.querySelectorAll("figure")].filter(of => of.checkVisibility()).map(of => {
  const shown = [...of.querySelectorAll("svg")].filter(item => item.checkVisibility());
  const svg = shown[0], all = svg.getBoundingClientRect(), scale = all.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll("text")].filter(item => item.textContent.trim())
    .map(item => ({said: item.textContent, at: item.getBoundingClientRect(),
      turned: item.closest("[transform]") !== null,
      size: parseFloat(getComputedStyle(item).fontSize) * scale}));
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  let scrolls = false;
  for (let item = svg; item; item = item.parentElement)
    scrolls ||= item.scrollWidth > item.clientWidth && item !== svg;
  return {
    name: svg.querySelector("title").textContent, shown: shown.length, scrolls,
    outside: all.left < 0 || all.right > innerWidth + 0.5,
    small: texts.filter(item => item.size < LEAST).map(item => item.said),
    cut: texts.filter(({at}) => at.left < all.left - 0.5 || at.right > all.right + 0.5
      || at.top < all.top - 0.5 || at.bottom > all.bottom + 0.5).map(item => item.said),
    crossed: texts.filter(a => !a.turned).flatMap((a, i, level) => level.slice(i + 1)
      .filter(b => over(a.at, b.at)).map(b => a.said + " | " + b.said)),
  };
}))()""".replace("LEAST", str(LEAST))


def chart_problems(browser: Browser, address: str, widths: tuple[int, ...] = (DESK, PHONE)) -> list[str]:
    """Return what is wrong with the charts of a page on screens of these widths; it must have some."""
    problems = []
    for width in widths:
        browser.size(width)
        if width == widths[0]:
            browser.open(address)
            browser.value("document.querySelectorAll('details').forEach(item => { item.open = true; })")
        charts = browser.value(MEASURED)
        assert charts
        for chart in charts:
            found = {key: value for key, value in chart.items() if value and key not in ("name", "shown")}
            if found or chart["shown"] != 1:
                problems.append(f"{chart['name']} at {width}: {found}, {chart['shown']} shown")
    return problems
