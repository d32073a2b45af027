"""The page around a report: one file, no script, nothing loaded from anywhere, light, dark and on paper."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter

from tightframe.report.drawing.markup import Markup, Part, join, tag

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--shade:#0003;--rule:#d5dae0;--panel:#f5f7f9;
--warn:#8a4b00;--warnbg:#fff4e0;
--bad:#a4141b;--badbg:#fdecec;--good:#116329;--goodbg:#e8f6ec;
--s0:#0b6fb8;--s1:#c2570c;--s2:#1b7f5c;--s3:#8a3fa0;--on:#fff;--heat:#4a97d3}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e6e9ec;--soft:#a3adb8;--shade:#fff4;
--rule:#3a424c;--panel:#1d232a;--warn:#ffc46b;--warnbg:#3a2a10;--bad:#ff9d9d;--badbg:#43191c;--good:#86d99c;--goodbg:#15351f;
--s0:#5cb3f0;--s1:#f39a55;--s2:#5ecfa6;--s3:#cf92e0;--on:#0b0e11;--heat:#1a659f}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--shade:transparent;--rule:#bbb;--panel:#fff;
--warn:#000;--warnbg:#fff;--bad:#000;
--badbg:#fff;--good:#000;--goodbg:#fff;--s0:#0b6fb8;--s1:#c2570c;--s2:#1b7f5c;--s3:#8a3fa0;--on:#fff;--heat:#4a97d3}
.scroll{overflow:visible!important}details::details-content{content-visibility:visible;display:block;height:auto}
section{break-inside:auto}figure,tr,.said{break-inside:avoid}h2,h3{break-after:avoid}body{font-size:10.5pt}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:1.7rem;line-height:1.2;margin:.2em 0 .4em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.2em 0 .6em;padding-top:.6em;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.4em 0 .4em}
p,li{max-width:46em;overflow-wrap:anywhere}
.kind{color:var(--soft);margin:0;font-size:.85rem;letter-spacing:.02em}
.said{border-left:4px solid var(--rule);background:var(--panel);padding:.6em .9em;
margin:.8em 0;max-width:none}
.said p{margin:.2em 0}
.good{border-color:var(--good);background:var(--goodbg)}.bad{border-color:var(--bad);background:var(--badbg)}
.warn{border-color:var(--warn);background:var(--warnbg)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:12px;margin:1em 0}
.tile{border:1px solid var(--rule);border-radius:6px;padding:.6em .8em;min-width:0}
.tile b{display:block;font-size:1.5rem;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.2}
.tile span{display:block;color:var(--soft);font-size:.85rem;line-height:1.35}
.scroll{overflow-x:auto;max-width:100%;
background:linear-gradient(90deg,var(--paper) 50%,transparent) 0 0/28px 100% no-repeat local,
linear-gradient(270deg,var(--paper) 50%,transparent) 100% 0/28px 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/12px 100% no-repeat,
linear-gradient(270deg,var(--shade),transparent) 100% 0/12px 100% no-repeat}
table{border-collapse:collapse;font-size:.88rem;margin:.6em 0;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:.2em 0}
th,td{padding:.28em .9em .28em 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);
white-space:nowrap;max-width:28em}
td.wrap,th.wrap{white-space:normal;overflow-wrap:anywhere;min-width:12em}
thead th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom;max-width:10em;
overflow-wrap:break-word}tbody th{font-weight:500}
.missing{color:var(--soft);font-style:italic}abbr.missing{text-decoration:underline dotted;cursor:help}
nav.contents ul{list-style:none;margin:.2em 0 1em;padding:0;columns:15em;column-gap:1.5em}
nav.contents li{break-inside:avoid;padding:.18em 0}
nav.contents h2{font-size:.9rem;margin:1.2em 0 0;padding:0;border:0}
a{color:var(--s0)}:target{scroll-margin-top:.5em}
:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
dl{margin:.6em 0;font-size:.92rem}
dl>div{display:grid;grid-template-columns:minmax(8.5em,15em) minmax(0,1fr);gap:.2em 1em;padding:.28em 0;
border-bottom:1px solid var(--rule)}
dt{color:var(--soft);overflow-wrap:anywhere}dd{margin:0;overflow-wrap:anywhere}
code,pre{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.86em;overflow-wrap:anywhere}
pre{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:.7em .9em;
white-space:pre-wrap}
figure{margin:1em 0 1.4em}figcaption{color:var(--soft);font-size:.88rem;max-width:50em;margin-top:.3em}
details{margin:.5em 0}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
footer{margin-top:3em;border-top:1px solid var(--rule);color:var(--soft);font-size:.85rem}
svg{display:block;max-width:100%;height:auto}.phone{display:none}
svg text{font:12px system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:var(--ink)}
svg text.note{fill:var(--soft);font-size:11px}svg text.count{font-size:11px}
.grid{stroke:var(--rule);stroke-width:1}.grid.ink{stroke:var(--soft)}
.l{fill:none;stroke-width:2}.l.s0{stroke:var(--s0)}.l.s1{stroke:var(--s1);stroke-dasharray:7 3}
.l.s2{stroke:var(--s2);stroke-dasharray:2 3}.l.s3{stroke:var(--s3);stroke-dasharray:10 3 2 3}
.m{stroke-width:1.6}.m.s0{fill:var(--s0);stroke:var(--s0)}.m.s1{fill:var(--s1);stroke:var(--s1)}
.m.s2{fill:var(--s2);stroke:var(--s2)}.m.s3{fill:var(--s3);stroke:var(--s3)}.m.hollow{fill:var(--paper)}
.b.s0{fill:var(--s0)}.b.s1{fill:var(--s1)}.b.s2{fill:var(--s2)}.b.s3{fill:var(--s3)}
.cell{fill:var(--panel)}.heat{fill:var(--heat)}
.p.in{fill:var(--s0)}.p.late{fill:var(--s1)}.p.out{fill:var(--bad)}.p.refused{fill:var(--s3)}.p.idle{fill:var(--panel);stroke:var(--rule)}
.p.absent{fill:var(--rule)}
svg text.sign{fill:var(--on);font-weight:700}svg text.sign.absent{fill:var(--ink)}
@media screen and (max-width:700px){.desk{display:none}.phone{display:block}}
@media (max-width:520px){main{padding:16px 12px 32px}h1{font-size:1.35rem}
dl>div{grid-template-columns:1fr;gap:0}tr:has(.wrap) th{white-space:normal;min-width:6em}
td.wrap{min-width:9em}}
"""


_SECTION = re.compile(r'<section id="([^"]+)"><h2>(.*?)</h2>')
FEW = 3
"""Sections up to which a page needs no contents list."""


def policy(script: str | None = None) -> str:
    """Return the content security policy of a page: it may be shown, and nothing in it can fetch anything.

    Args:
        script: the only one that runs, by its hash; it may ask the page's own server. None for no script.
    """
    parts = ["default-src 'none'", f"style-src {_hash(STYLE)}"]
    if script is not None:
        parts += [f"script-src {_hash(script)}", "connect-src 'self'"]
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(title: str, kind: str, *parts: Part, script: str | None = None) -> str:
    """Return a whole page, with a list of its sections before the first of them.

    Args:
        kind: what kind of a report it is, above the title.
        script: a script of this package that a live page runs; a report has none.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="robots", content="noindex"),
        tag("title", title),
        tag("style", Markup(STYLE)),
        None if script is None else tag("script", Markup(script), type="module"),
    )
    content = join(parts)
    if script is None:
        content = _with_contents(content)
    body = tag("body", tag("main", tag("p", kind, class_="kind"), tag("h1", title), content))
    return str(join([Markup("<!DOCTYPE html>\n"), tag("html", head, "\n", body, lang="en"), "\n"]))


def _with_contents(content: Markup) -> Markup:
    """Put the list of sections before the first one; a page of few has none."""
    seen: Counter[str] = Counter()

    def once(found: re.Match[str]) -> str:
        """Give sections whose titles differ in signs only places of their own."""
        seen[found[1]] += 1
        place = found[1] if seen[found[1]] == 1 else f"{found[1]}-{seen[found[1]]}"
        return f'<section id="{place}"><h2>{found[2]}</h2>'

    content = Markup(_SECTION.sub(once, content))
    found = list(_SECTION.finditer(content))
    if len(found) <= FEW:
        return content
    links = [tag("li", tag("a", Markup(of[2]), href=f"#{of[1]}")) for of in found]
    listed = tag(
        "nav",
        tag("h2", "Contents", id="contents"),
        tag("ul", *links),
        class_="contents",
        aria_labelledby="contents",
    )
    start = found[0].start()
    return join([Markup(content[:start]), listed, Markup(content[start:])])


def notice(kind: str, *parts: Part) -> Markup:
    """Return something to be read first: ``good``, ``bad`` or ``warn``."""
    return tag("div", *(tag("p", part) for part in parts), class_=f"said {kind}")


def tiles(values: list[tuple[str, str]]) -> Markup:
    """Return the few numbers that are looked for first: a value and what it is."""
    return tag(
        "div",
        *(tag("div", tag("b", value), tag("span", name), class_="tile") for value, name in values),
        class_="tiles",
    )
