"""Cost of a round of the secure sum against an earlier version of it, in turns on this machine.

    git worktree add --detach /tmp/before c62465d
    python benchmarks/secure_sum_before.py /tmp/before --json secure_sum_before.json

c62465d is the last version whose server sent models, and whose silos did not verify totals. Sums have no
drop-outs; each rests on the total of the one before, and two first ones do not count. CPU time is of one
thread, that of a site the median of all sites that make masks, with 100 sites three of them; bytes and memory
are of one site; checks are all sites' and the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = ((6, 4_000_000), (20, 4_000_000), (100, 5_000_000))
MANY, LIGHT = 50, 3
"""Sites from which on only some make masks, and how many do."""
LIMIT, CHECKS = 1.3, 0.5
"""Goals: ratios of CPU time at a site and at the server, and seconds of all checks in the first case."""
PARTS = (
    "exchanges",
    "up_bytes",
    "down_bytes",
    "site_s",
    "server_s",
    "checks_s",
    "masking_vectors",
    "site_vectors",
    "server_vectors",
)


def measure(ours: Any, sites: int, size: int, sums: int) -> dict[str, float]:
    """Return medians of CPU seconds, bytes and exchanges.

    Args:
        ours: the module ``secure_sum_ours`` of either version.
        sites: n.
        size: m.
        sums: number of sums, besides two first ones: they rest on no total, and make the server's files.
    """
    ours.SLOTS = sums + 2
    light = LIGHT if sites > MANY else 0
    federation, keystream = ours.Federation(sites, size, light=light), ours.Keystream()
    federation.set_up()
    with keystream.watch():
        rounds = [federation.run(0, keystream) for _ in range(sums + 2)][2:]
    verified = hasattr(ours, "Checks")
    return {
        "exchanges": getattr(rounds[-1], "exchanges", 3 if verified else 2),
        "up_bytes": rounds[-1].up_bytes,
        # Before, the request named the model by its hash, and the model of 32-bit floats came beside it.
        "down_bytes": rounds[-1].down_bytes + (0 if verified else 4 * size),
        "site_s": statistics.median(map(_site_ms, rounds)) / 1000,
        "server_s": statistics.median(one.server_ms for one in rounds) / 1000,
        "checks_s": statistics.median(getattr(one, "checks_ms", 0.0) for one in rounds) / 1000,
    }


def _site_ms(one: Any) -> float:
    return sum(statistics.median(part) for part in (one.encode_ms, one.mask_ms, one.reveal_ms))


def weigh(ours: Any, sites: int, size: int) -> dict[str, float]:
    """Return peaks of memory in vectors of m numbers; see ``Federation.weigh``."""
    ours.SLOTS = 2
    federation = ours.Federation(sites, size)
    federation.set_up()
    if hasattr(ours, "Checks"):
        found = federation.weigh()
    else:
        ours.PeakMemory = _EarlierPeakMemory
        tracemalloc.start()
        found = federation.weigh()
        found = {"masking": found["site"], "site": found["site with packing"], "server": found["server"]}
    return {f"{name}_vectors": value for name, value in found.items()}


class _EarlierPeakMemory:
    """What the earlier benchmark calls for memory, measured by the same allocations as today's."""

    def start(self) -> _EarlierPeakMemory:
        """Start measuring."""
        self._before, self.bytes = tracemalloc.get_traced_memory()[0], 0
        return self

    def call(self, work: Callable[[], Any], held: int = 0) -> Any:
        """Run ``work``; ``held`` bytes are the caller's."""
        tracemalloc.reset_peak()
        result = work()
        self.bytes = max(self.bytes, tracemalloc.get_traced_memory()[1] - self._before - held)
        return result


def versus(before: Path, sites: int, size: int, turns: int) -> dict[str, Any]:
    """Measure both versions in turns; return each part's values before and after, and its ratios.

    Args:
        before: checkout of the earlier version.
        sites: n.
        size: m.
        turns: of each version.
    """
    sums = 1 if sites > MANY else 3
    folders = {"before": before.resolve(), "after": HERE.parent}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(turns):
        for name, folder in folders.items():
            found[name].append(_worker(folder, sites, size, sums))
    for name, folder in folders.items():
        weighed = _worker(folder, sites, size, 0)
        found[name] = [one | weighed for one in found[name]]
    return {
        "sites": sites,
        "size": size,
        "turns": turns,
        "parts": {part: _part(found, part) for part in PARTS},
    }


def _part(found: dict[str, list[dict[str, float]]], part: str) -> dict[str, Any]:
    values = {name: [one[part] for one in turns] for name, turns in found.items()}
    ratios = [
        after / before
        for before, after in zip(values["before"], values["after"], strict=True)
        if before  # there were no checks before
    ]
    medians = {name: statistics.median(items) for name, items in values.items()}
    spread = [min(ratios), statistics.median(ratios), max(ratios)] if ratios else None
    return medians | {"ratio": spread}


def _worker(folder: Path, sites: int, size: int, sums: int) -> dict[str, float]:
    """Measure one version in a process of its own; without sums, weigh it."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "custom")}
    command = [sys.executable, __file__, str(folder), "--worker", str(sites), str(size), str(sums)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    values: dict[str, float] = json.loads(done.stdout)
    return values


def show(result: dict[str, Any]) -> None:
    """Print one case."""
    print(f"\nn = {result['sites']}, m = {result['size']:.3g}, {result['turns']} turns")
    for name, part in result["parts"].items():
        ratio = "" if part["ratio"] is None else "{1:.2f} times ({0:.2f} to {2:.2f})".format(*part["ratio"])
        print(f"  {name:<16} {part['before']:>12.4g} {part['after']:>12.4g}  {ratio}")
    for verdict in verdicts(result):
        print(f"  {verdict}")
    sys.stdout.flush()


def verdicts(result: dict[str, Any]) -> list[str]:
    """Return which goals one case meets."""
    parts = result["parts"]
    found = [
        (f"{part} {parts[part]['ratio'][1]:.2f} times", parts[part]["ratio"][1] <= LIMIT, LIMIT)
        for part in ("site_s", "server_s")
    ]
    if (result["sites"], result["size"]) == CASES[0]:
        checks = parts["checks_s"]["after"]
        found.append((f"checks_s {checks:.2f}", checks <= CHECKS, CHECKS))
    return [f"{'passed' if passed else 'FAILED'} {what}, at most {limit}" for what, passed, limit in found]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout of the earlier version")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help=f"indices of {CASES}")
    parser.add_argument("--turns", type=int, default=3, help="of each version")
    parser.add_argument("--json", type=Path, help="file to write the results to, after each case")
    parser.add_argument("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        sys.path.insert(0, str(arguments.before / "benchmarks"))
        import secure_sum_ours

        sites, size, sums = arguments.worker
        case = secure_sum_ours, sites, size
        print(json.dumps(measure(*case, sums) if sums else weigh(*case)))
        return
    results = []
    for place in arguments.cases:
        results.append(versus(arguments.before, *CASES[place], arguments.turns))
        show(results[-1])
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
