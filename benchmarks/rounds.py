"""The order in which the sides of a pair are measured."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_turn(rounds: int, *sides: Callable[[], T]) -> list[list[T]]:
    """The figures of each side, round by round.

    Every second round swaps the sides, so that a machine that slows down or speeds up favours neither.
    """
    found: list[list[T]] = [[] for _ in sides]
    for number in range(rounds):
        places = range(len(sides))
        for place in places if number % 2 == 0 else reversed(places):
            found[place].append(sides[place]())
    return found
