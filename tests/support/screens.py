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


CONTRASTS = """(() => {
  const colour = text => {
    const found = text.match(/^rgba?\\((.+)\\)$/);
    const [r, g, b, a = 1] = found ? found[1].split(/[ ,/]+/).map(Number) : [0, 0, 0, 0];
    return [r, g, b, a];
  };
  const over = (below, above, alpha) => below.map((part, i) => above[i] * alpha + part * (1 - alpha));
  const light = rgb => rgb.map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode, item = node.parentElement;
    if (!node.textContent.trim() || !item.checkVisibility() || item.closest("title,desc,script")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const at = range.getClientRects()[0];
    if (!at || at.right > innerWidth || at.left < 0) continue;
    const style = getComputedStyle(item), svg = item.closest("svg") !== null;
    let ground = [255, 255, 255];
    const stack = document.elementsFromPoint((at.left + at.right) / 2, (at.top + at.bottom) / 2);
    for (const one of stack.reverse()) {
      if (["text", "line", "path", "polyline"].includes(one.tagName)) continue;
      const of = getComputedStyle(one), shape = one.tagName === "rect";
      const [r, g, b, a] = colour(shape ? of.fill : of.backgroundColor);
      ground = over(ground, [r, g, b], a * (shape ? Number(of.fillOpacity) : 1));
    }
    const [r, g, b, a] = colour(svg ? style.fill : style.color);
    const [low, high] = [light(ground), light(over(ground, [r, g, b], a))].sort((x, y) => x - y);
    const large = parseFloat(style.fontSize) >= (Number(style.fontWeight) >= 700 ? 18.66 : 24);
    found.push([(high + 0.05) / (low + 0.05), large ? 3 : 4.5, node.textContent.trim()]);
  }
  return found;
})()"""


def contrast_problems(browser: Browser) -> list[str]:
    """Return texts of the open page that WCAG 2.2 finds hard to see (1.4.3), in light and in dark colours."""
    problems = []
    for scheme in ("light", "dark"):
        browser.colours(scheme)
        browser.size(DESK, browser.value("document.documentElement.scrollHeight"))
        found = browser.value(CONTRASTS)
        assert len(found) > 10
        problems += [
            f"{scheme}: {said!r} {ratio:.2f}, not {least}" for ratio, least, said in found if ratio < least
        ]
    browser.colours("light")
    return problems


def chart_problems(browser: Browser, address: str, widths: tuple[int, ...] = (DESK, PHONE)) -> list[str]:
    """Return what is wrong with the charts of a page on screens of these widths; it must have some."""
    browser.open(address)
    browser.value("document.querySelectorAll('details').forEach(item => { item.open = true; })")
    problems = [problem for width in widths for problem in shown_problems(browser, width)]
    assert browser.value(MEASURED)
    return problems


def shown_problems(browser: Browser, width: int) -> list[str]:
    """Return what is wrong with the open page and its charts on a screen of this width."""
    browser.size(width)
    whole = browser.value("document.documentElement.scrollWidth")
    problems = [f"the page is {whole} wide at {width}"] if whole > width else []
    for chart in browser.value(MEASURED):
        found = {key: value for key, value in chart.items() if value and key not in ("name", "shown")}
        if found or chart["shown"] != 1:
            problems.append(f"{chart['name']} at {width}: {found}, {chart['shown']} shown")
    return problems
