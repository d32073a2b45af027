"""Fuzz the readers of what others may have written, for minutes: ``python -m tests.fuzz ledger``.

Without a target all take turns. What a reader raises that is no named error is shown with the seed that
makes it again: ``python -m tests.fuzz --seed 123 ledger``.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.targets import TARGETS, Target


def main() -> int:
    """Run the command line; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target")
    parser.add_argument("--seed", type=int, help="make one example again, with its traceback")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.targets) - set(TARGETS)):
        parser.error(f"no such target: {', '.join(unknown)}; known are {', '.join(TARGETS)}")
    failed = 0
    for name in chosen.targets or TARGETS:
        with tempfile.TemporaryDirectory(prefix="tightframe-fuzz-") as folder:
            target = TARGETS[name](Path(folder))
            if chosen.seed is not None:
                target.check(chosen.seed)
                print(f"{name}: seed {chosen.seed} is refused by name, or read")
                continue
            failed += _run(name, target, chosen.minutes * 60)
    return 1 if failed else 0


def _run(name: str, target: Target, seconds: float) -> int:
    """Try random seeds for some time; show each kind of failure once."""
    ends, seen, tried = time.monotonic() + seconds, dict[str, int](), 0
    while time.monotonic() < ends:
        seed, tried = secrets.randbits(48), tried + 1
        try:
            target.check(seed)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] == 1:
                print(f"--- {name}, seed {seed}: {kind}: {str(error)[:300]}", flush=True)
                own = [
                    item
                    for item in traceback.extract_tb(error.__traceback__)
                    if "tests/fuzz" not in item.filename
                ]
                print("".join(traceback.format_list(own[:2] + own[-4:])), flush=True)
    print(
        f"{name}: {tried} examples in {seconds:.0f} s, {len(seen)} kinds of foreign errors: {seen}",
        flush=True,
    )
    return len(seen)


if __name__ == "__main__":
    sys.exit(main())
