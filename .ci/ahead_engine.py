"""Pytest plugin of ``.ci/ahead``: the installed engine counts as tested, so that what else breaks is seen."""

import nvflare

from tightframe.flare.doors import rules

rules.TESTED = (*rules.TESTED, nvflare.__version__)
