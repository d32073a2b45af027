"""Messages: one form each, and every part of that form is checked before it is used."""

from __future__ import annotations

import pytest
from tests.securesum.protocol import World, make_params, names

from tightframe.securesum.encoding import RingOverflowError, check_no_wrap
from tightframe.securesum.errors import ParametersError
from tightframe.securesum.messages import FieldSpec

ONE = names(3)[0]


def test_a_bound_beyond_the_floats_is_refused_with_the_named_error() -> None:
    """The sum could reach 2**1984, which no float holds and no logarithm of a float tells."""
    huge = FieldSpec("huge", (1,), 32, 960, 1e308, "update")
    with pytest.raises(RingOverflowError, match=r"could reach 2\*\*1984\.74"):
        check_no_wrap(huge.ring, huge.bits, huge.bound, 3)
    with pytest.raises(ParametersError, match="huge"):
        World(3).sites[ONE].advertise(make_params(3, schemas={"train": (huge,)}).to_bytes())
