"""Results that need torch and seconds to compute, kept in files beside the code that computes them.

    python -m tightframe_app.kept

rewrites them. Tests recompute and compare them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANEW = "write it anew with `python -m tightframe_app.kept`"


def read(file: Path) -> Any:
    """Return a file's kept results."""
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, results: Any) -> None:
    """Keep results in a file."""
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Compute and keep all results."""
    from dataclasses import asdict

    from tightframe_app.explain import options, topics
    from tightframe_app.jobs import method_table

    sums = method_table.computed(None, method_table.LIKE)
    write(method_table.KEPT, [asdict(item) for item in sums])
    kinds = options.computed()
    write(topics.KEPT, {kind: [asdict(topic) for topic in entries] for kind, entries in kinds.items()})


if __name__ == "__main__":
    main()
