from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import printed

from tightframe import data
from tightframe.data.base import SiloData
from tightframe.errors import JobError


def test_a_known_name() -> None:
    spec = data.get("fed_isic2019")
    assert spec.num_classes == 8
    assert spec.num_centers == 6
    options = spec.options.model_validate({"image_size": 64})
    assert spec.input_shape(options) == (3, 64, 64)
    assert spec.twin is not None
    silo: SiloData = spec.twin(2, options)
    assert silo.records("test")[0][0].shape == (3, 64, 64)
    assert spec.input_shape(spec.options()) == (3, 200, 200)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"^TF-101: [\s\S]*fed_isic2019.*'cifar'"):
        data.get("cifar")


@pytest.mark.whole
def test_enrolment_needs_no_torch() -> None:
    """Opening, counting and checking happen in processes that must start fast."""
    code = (
        "import sys\n"
        "from tightframe import data\n"
        "spec = data.get('fed_isic2019')\n"
        "silo = spec.twin(5, spec.options(image_size=48))\n"
        "counted = [len(silo.labels(fold)) for fold in ('train', 'validation', 'test')]\n"
        "silo.check(print)\n"
        "print(counted, 'torch' in sys.modules)\n"
        "silo.records('test')[0]\n"
        "print('torch' in sys.modules)\n"
    )
    assert printed(code) == ["[33, 6, 24] False", "True"]


def test_every_listed_data_set_is_there_under_its_name_and_only_what_is_named_is_imported(root: Path) -> None:
    for listed in data.DATASETS:
        assert listed.load().name == listed.name
        assert data.get(listed.name) is listed.load()
    code = (
        "import sys\n"
        "from tightframe import data\n"
        "data.get('fed_isic2019')\n"
        "print(sorted(name for name in sys.modules if name.startswith('tightframe.data.')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root / "custom")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (
        done.stdout.strip() == "['tightframe.data.base', 'tightframe.data.forms', 'tightframe.data.isic']"
    ), done.stderr
