"""One federation for all faults: to set it up takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.faults.federation import WRONG_CLOCK, Six, running, set_up


@pytest.fixture(scope="session")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Six]:
    """Six hospitals, one of them ten minutes ahead of the others, which is no fault."""
    made = set_up(tmp_path_factory.mktemp("six"))
    made.skew[WRONG_CLOCK] = 600
    with running(made) as federation:
        yield federation
