"""Who plays which role on which ranks of a world, and which micro-batches go there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.trainers.backends.layout import ACTOR, CRITIC, ENGINES, ROLES, TORCH, Allocation, Component, Layout
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class RolePlace:
    """Ranks `first` to `first + world - 1` play these roles. cells: those ranks by the cell that they belong to; what a
    cell knows its first rank tells."""

    roles: tuple[str, ...]
    layout: Layout
    first: int = 0
    cells: tuple[tuple[int, ...], ...] = ()

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each cell."""
        return tuple(cell[0] for cell in self.cells)

    def dealt(self, cell: int, count: int) -> list[list[int]]:
        """By cell of this place: which of an actor's cell's `count` micro-batches it computes. Round
        robin over all micro-batches of the actor, so the shares of two cells differ by at most one."""
        cells = len(self.cells)
        return [[m for m in range(count) if (cell * count + m) % cells == index] for index in range(cells)]


def places_of(allocation: Allocation) -> list[RolePlace]:
    """The actor's place first, with every role that has no other. BadConfiguration for an allocation that no learner
    can have."""
    places = []
    for components in allocation.places:
        layout = components[0].layout
        for component in components:
            if component.layout.backend in ENGINES:
                raise BadConfiguration(f"{component}: engines are processes of their own; leave it out")
            if component.name not in ROLES:
                raise BadConfiguration(f"{component}: no role {component.name}: choose {', '.join(ROLES)}")
            if component.layout != layout:
                raise BadConfiguration(
                    f"{components[0]}|{component}: roles that share ranks share a layout; make it one"
                )
        places.append(RolePlace(tuple(component.name for component in components), layout))
    other = [place.layout.backend for place in places if place.layout.backend != TORCH]
    if other and len(places) > 1:
        raise BadConfiguration(f"{allocation}: roles with ranks of their own run on torch, not on {other[0]}")
    mine = [place for place in places if ACTOR in place.roles]
    if not mine:
        raise BadConfiguration(f"{allocation}: nobody is the actor; name one, such as torch[actor]:d1")
    return [*mine, *(place for place in places if ACTOR not in place.roles)]


def written(places: Sequence[RolePlace]) -> str:
    """The allocation that these places are, in its grammar."""
    return str(Allocation(tuple(tuple(Component(role, place.layout) for role in place.roles) for place in places)))


def within(place: int, role: str) -> str:
    """What a role is to the backend of its place: a critic by itself is all that learns there."""
    return ACTOR if place > 0 and role == CRITIC else role


def by_cell(cells: Sequence[int], first: int) -> tuple[tuple[int, ...], ...]:
    """The ranks from `first` on, by the cell that each says it belongs to."""
    return tuple(
        tuple(first + index for index, cell in enumerate(cells) if cell == wanted) for wanted in sorted(set(cells))
    )
