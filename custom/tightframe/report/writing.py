"""Make the page of a folder of results and write it beside them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe.errors import TightframeError
from tightframe.files import write_atomically
from tightframe.report.reading import ServerResults, read
from tightframe.results.files import PAGE, ResultsError

if TYPE_CHECKING:
    from tightframe.report.pages.clinical import Wanted


def write(folder: Path, out: Path | None = None, wanted: Wanted | None = None) -> Path:
    """Make the report of a folder's results; a silo's can be read by its owner only.

    Args:
        folder: of a server's or a silo's results.
        out: path of the page; ``report.html`` in the folder by default.
        wanted: operating points and prevalences of the clinical reading.

    Returns:
        The page's path.

    Raises:
        ResultsError: TF-801, TF-802 (see ``reading.read``), TF-803 if the page cannot be written, TF-804 if
            a wanted class is not in the results.
    """
    from tightframe.report.pages import clinical, server, silo

    results, target, wanted = read(folder), out or folder / PAGE, wanted or clinical.DEFAULT
    if isinstance(results, ServerResults):
        page, mode = server.page(results, wanted), 0o644
    else:
        page, mode = silo.page(results, wanted), 0o600
    try:
        write_atomically(target, page.encode(), mode=mode)
    except OSError as error:
        raise ResultsError(
            f"Expected to write the report to {target}, but got: {error.strerror or error}.", code="TF-803"
        ) from None
    return target


def leave(folder: Path, log: logging.Logger) -> None:
    """Write the report at the end of a run; log a failure, as the results are already on disk."""
    try:
        write(folder)
    except TightframeError as error:
        log.error("the report could not be written, the results are there: %s", error)
    except Exception:
        log.exception("the report could not be written, the results are there: TF-500")
