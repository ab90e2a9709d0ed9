"""Range checks of values that users pass in."""

import numpy as np
import pytest

from dime_jax._util import validate


@pytest.mark.parametrize(("ends", "low", "high"), [("()", False, False), ("[)", True, False), ("[]", True, True)])
def test_the_ends_of_the_unit_interval_are_allowed_by_their_brackets(ends, low, high):
    for value, allowed in ((0, low), (1, high), (0.5, True), (-0.1, False), (1.1, False), (np.nan, False)):
        for shown, given in ((value, value), (np.array([0.5, value]), [0.5, value])):
            if allowed:
                validate.check_unit(given, "delta", ends)
            else:
                with pytest.raises(ValueError, match=r"^delta must be in .0, 1., got ") as error:
                    validate.check_unit(given, "delta", ends)
                assert f"in {ends[0]}0, 1{ends[1]}, got {shown}" in str(error.value)
