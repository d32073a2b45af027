"""Results that need torch and seconds to compute, kept in files beside the code that computes them.

    python -m tightframe_app.kept

rewrites them. Tests recompute and compare them.
"""

from __future__ import annotations

from dataclasses import asdict

from tightframe_app.explain import options, topics
from tightframe_app.jobs import method_table
from tightframe_app.kept_files import write


def main() -> None:
    """Compute and keep all results."""
    sums = method_table.computed(None, method_table.LIKE)
    write(method_table.KEPT, [asdict(item) for item in sums])
    kinds = options.computed()
    write(topics.KEPT, {kind: [asdict(topic) for topic in entries] for kind, entries in kinds.items()})


if __name__ == "__main__":
    main()
