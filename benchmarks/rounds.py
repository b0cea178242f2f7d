"""The order in which sides are measured."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_turn(rounds: int, *sides: Callable[[], T]) -> list[list[T]]:
    """What each side found, round by round. Every second round has them the other way round: a machine that gets slower
    or faster meanwhile favours none."""
    found: list[list[T]] = [[] for _ in sides]
    for number in range(rounds):
        places = range(len(sides))
        for place in places if number % 2 == 0 else reversed(places):
            found[place].append(sides[place]())
    return found
