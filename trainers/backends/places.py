"""Who plays which role on which ranks of a world, and which micro-batches go there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.trainers.backends.layout import ACTOR, CRITIC, ENGINES, ROLES, TORCH, Allocation, Component, Layout
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class RolePlace:
    """Ranks `first` to `first + world - 1` play these roles. cells: those ranks, a tuple for each cell; the
    first rank of a cell sends what the cell has computed."""

    roles: tuple[str, ...]
    layout: Layout
    first: int = 0
    cells: tuple[tuple[int, ...], ...] = ()

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each cell."""
        return tuple(cell[0] for cell in self.cells)

    def shares(self, cell: int, count: int) -> list[list[int]]:
        """How this place's cells divide the `count` micro-batches of cell `cell` of the actor: a list of their
        numbers for each cell here. Those of all the actor's cells go round robin: two shares differ by one at most."""
        cells = len(self.cells)
        return [[m for m in range(count) if (cell * count + m) % cells == index] for index in range(cells)]


def places_of(allocation: Allocation) -> list[RolePlace]:
    """The places of an allocation, the actor's first; roles that the allocation does not name live there. Raises
    BadConfiguration for an allocation that no learner can have."""
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
    strangers = [place.layout.backend for place in places if place.layout.backend != TORCH]
    if strangers and len(places) > 1:
        raise BadConfiguration(f"{allocation}: roles with ranks of their own run on torch, not on {strangers[0]}")
    actors = [place for place in places if ACTOR in place.roles]
    if not actors:
        raise BadConfiguration(f"{allocation}: nobody is the actor; name one, such as torch[actor]:d1")
    return [*actors, *(place for place in places if ACTOR not in place.roles)]


def format_places(places: Sequence[RolePlace]) -> str:
    """These places as an allocation, in the grammar of `layout`."""
    return str(Allocation(tuple(tuple(Component(role, place.layout) for role in place.roles) for place in places)))


def backend_role(place: int, role: str) -> str:
    """The role that a place's own backend gives the model: a critic with ranks of its own is trained as that backend's
    ACTOR, since it is all that learns there."""
    return ACTOR if place > 0 and role == CRITIC else role


def by_cell(cells: Sequence[int], first: int) -> tuple[tuple[int, ...], ...]:
    """The ranks from `first` on, one tuple for each cell. cells: the cell of each rank."""
    return tuple(
        tuple(first + index for index, cell in enumerate(cells) if cell == index_of_cell)
        for index_of_cell in sorted(set(cells))
    )
