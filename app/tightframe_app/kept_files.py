"""Files of kept results, which ``tightframe_app.kept`` computes."""

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
