"""Answers that take torch and seconds to work out, kept in files beside the code that works them out.

    python -m tightframe_app.kept

writes them anew. Tests work each of them out again and compare.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANEW = "write it anew with `python -m tightframe_app.kept`"


def read(file: Path) -> Any:
    """Return what a file keeps."""
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, answers: Any) -> None:
    """Keep answers in a file."""
    file.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Work all of them out, and keep them."""
    from dataclasses import asdict

    from tightframe_app.explain import options, topics
    from tightframe_app.jobs import method_table

    sums = method_table.computed(None, method_table.LIKE)
    write(method_table.KEPT, [asdict(item) for item in sums])
    kinds = options.computed()
    write(topics.KEPT, {kind: [asdict(topic) for topic in found] for kind, found in kinds.items()})


if __name__ == "__main__":
    main()
