"""Members and held-out images side by side: the one record for what is known of both."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Pair(NamedTuple, Generic[T_co]):
    """The same thing for the members and for the held-out images."""

    member: T_co
    heldout: T_co

    def map(self, function: Callable[[T_co], U]) -> "Pair[U]":
        """Apply a function to each side."""
        return Pair(function(self.member), function(self.heldout))
