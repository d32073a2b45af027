"""Output of ``tightframe site check``."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.table import Table
from rich.text import Text

from tightframe_app import formats
from tightframe_app.screens import console, lines, shown
from tightframe_app.site.checks.findings import Finding, Scope, State

out = lines()

REFUSED = """\
this site will refuse this job as it is: inform the lead. The site's policy, cap and cohort are decisions of
those who answer for the records, not errors to correct for a job."""

UNNAMED = """\
this site will refuse this job until whoever answers for the records has named its contract in the entry."""

WIDTH = 120
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def show_check(scope: Scope, *, form: formats.Form = "text", every_line: bool = False) -> None:
    """Check a site, and print the findings.

    Args:
        every_line: print every line of every site, with a file for several sites.

    Raises:
        typer.Exit: with code 1 if there is a problem.
    """
    from tightframe_app.site.checks.all_checks import check_site

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    findings = list(dict.fromkeys(check_site(scope)))  # withdrawn records are checked twice
    problems = [finding for finding in findings if finding.state == "problem"]
    refusals = sum(finding.of_job for finding in problems)
    site_problems = len(problems) - refusals
    if form == "json":
        from tightframe_app.outputs import SiteCheck, SiteFinding

        listed = tuple(SiteFinding.model_validate(finding) for finding in findings)
        formats.show(SiteCheck(valid=not problems, findings=listed))
        raise typer.Exit(1 if problems else 0)
    for finding in findings if every_line else in_blocks(findings):
        table.add_row(
            Text(finding.state, style=STYLES[finding.state]), finding.area, shown(finding.text, breaks=True)
        )
    console(WIDTH).print(table)
    if site_problems:
        many = "1 problem: correct it" if site_problems == 1 else f"{site_problems} problems: correct them"
        out.print(f"{many} before this site takes part")
    if refusals:
        unnamed = all(f.text.startswith("TF-614: contract: ") for f in problems if f.of_job)
        out.print(UNNAMED if unnamed else REFUSED)
    if site_problems or refusals:
        raise typer.Exit(1)
    out.print("no problem was found")


def in_blocks(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings in one block per site, of a summary and the problems, for a file of several sites."""
    blocks: list[Finding] = []
    if len(sites := {item.site for item in findings} - {""}) < 2:
        return list(findings)
    for finding in findings:
        if finding.site and any(item.area == finding.site for item in blocks):
            continue
        if not finding.site:
            blocks.append(finding)
            continue
        block = [item for item in findings if item.site == finding.site]
        counts = {state: sum(item.state == state for item in block) for state in ("problem", "note", "ok")}
        parts = [
            f"{number} {word}{'s' if number > 1 and word != 'ok' else ''}"
            for word, number in counts.items()
            if number
        ]
        state: State = "problem" if counts["problem"] else "ok"
        rest = "; --verbose shows all" if counts["ok"] else ""
        blocks.append(Finding(finding.site, state, f"{', '.join(parts)}{rest}"))
        blocks += [item for item in block if item.state == "problem"]
    after = max(place for place, item in enumerate(blocks) if item.site or item.area in sites) + 1
    return [*blocks[:after], *_notes(findings), *blocks[after:]]


def _notes(findings: Sequence[Finding]) -> list[Finding]:
    """Return the sites' notes, each text once, for a file of several sites."""
    every = list(dict.fromkeys(item.site for item in findings if item.site))
    sites: dict[tuple[str, str], list[str]] = {}
    for item in findings:
        if item.site and item.state == "note":
            sites.setdefault((item.area.partition(" of ")[0], item.text), []).append(item.site)
    return [
        Finding(area, "note", f"{'all sites' if where == every else ', '.join(where)}: {text}")
        for (area, text), where in sites.items()
    ]
