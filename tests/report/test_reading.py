"""A report of results that an earlier version wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import ROOT

from tightframe.report.reading import _transcript
from tightframe.results.files import ResultsError
from tightframe.securesum.transcript.lines import FORMAT

VECTORS = ROOT / "tests" / "securesum" / "vectors"


@pytest.mark.parametrize("form", range(1, FORMAT))
def test_a_transcript_of_an_earlier_format_is_read(form: int) -> None:
    read = _transcript(VECTORS / f"transcript-format-{form}-server.jsonl")
    assert read.version == "1.2.3" and read.complete
    assert [item.survivors for item in read.sums][1] == ("site-001", "site-002", "site-003")


def test_one_that_cannot_be_read_says_which_version_wrote_it(tmp_path: Path) -> None:
    """Builds of one format differed for two days."""
    lines = (VECTORS / "transcript-format-2-server.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "transcript.jsonl"
    path.write_bytes(b"".join([lines[0].replace(b'"format":2', b'"format":3'), *lines[1:]]))
    with pytest.raises(ResultsError, match=r"TF-802: .*line 3: .*Tightframe 1\.2\.3 wrote it: use that"):
        _transcript(path)
