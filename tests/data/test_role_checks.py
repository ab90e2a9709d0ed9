"""Images checked against each other before any query; whole runs of it are in tests/auditing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dime_jax import data
from dime_jax.data import role_checks
from dime_jax.data.groups import connect
from dime_jax.data.role_checks import CandidateCopy
from dime_jax.data.roles import Roles


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), st.booleans()), max_size=12))
def test_the_copy_that_is_named_is_the_first_of_the_first_role(pairs):
    """Against a search through all images: members before held-out images before candidates, exact before near."""
    exact = np.array([(a, b) for a, b, same in pairs if same], int).reshape(-1, 2)
    close = np.array([(a, b) for a, b, same in pairs if not same], int).reshape(-1, 2)
    groups, equal = connect(12, np.concatenate([exact, close])), connect(12, exact)
    roles = {"members": range(4), "heldout": range(4, 8), "candidates": range(8, 12)}
    expected = []
    for one in roles["candidates"]:
        found = [
            CandidateCopy(f"i{one}", role, f"i{other}", kind)
            for role, indices in roles.items()
            for kind, grouping in (("exact", equal), ("near", groups))
            for other in indices
            if other != one and grouping[one] == grouping[other] >= 0
        ]
        expected += found[:1]
    given_roles = Roles(
        data.from_images(np.zeros((12, 2, 2, 1), np.uint8), ids=[f"i{i}" for i in range(12)]),
        data.Split(np.arange(4), np.arange(4, 8)),
        np.arange(8, 12),
    )
    assert role_checks._candidate_copies(data.Duplicates(groups, exact, close), given_roles) == expected
