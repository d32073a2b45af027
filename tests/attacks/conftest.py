"""Four hospitals with heart disease, enrolled in the job that a module's ``VALUES`` describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.attacks.malicious_server import Federation, Records


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    from tests.support.attacks.malicious_server import hearts  # which imports torch

    return hearts(4)


@pytest.fixture
def federation(hospitals: dict[str, Records], tmp_path: Path, request: pytest.FixtureRequest) -> Federation:
    from tests.support.attacks.malicious_server import Federation

    return Federation(request.module.VALUES, hospitals, state=tmp_path).enroll()
