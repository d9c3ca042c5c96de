"""How a model in training is spread over ranks, and how that is written: AReaL's allocation grammar.

    layout      torch:d2t2   megatron:d4t2p2c2e4   megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)
    allocation  sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4

d data, t tensor, p pipeline, c context, e expert parallel; each at most once, left out when 1. d, t, p and c multiply
to the world; experts are spread over ranks that the others already count. `(attn|ffn)` gives the experts a tensor size
of their own. Components are joined by `+` (ranks of their own) or `|` (the same ranks; binds tighter).

Invariant: `parse(str(x)) == x` for every layout and allocation that passes `check`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from millrace.schemas import bounds
from millrace.trainers.errors import BadConfiguration

TORCH, DEEPSPEED, MEGATRON = "torch", "deepspeed", "megatron"
DIMENSIONS = {TORCH: "dtpce", DEEPSPEED: "d", MEGATRON: "dtpce", "vllm": "dtp", "sglang": "dtp"}
"""Dimensions that each backend has."""
ALIASES = {"fsdp": TORCH, "archon": TORCH}
ENGINES = ("vllm", "sglang")
"""Backends that serve and do not train."""

ACTOR, CRITIC, REFERENCE, TEACHER, REWARD_MODEL = "actor", "critic", "reference", "teacher", "reward_model"
FROZEN = (REFERENCE, TEACHER, REWARD_MODEL)
ROLES = (ACTOR, CRITIC, *FROZEN)
"""Roles of a backend's models; they name the components of an allocation. The actor and the critic learn."""

_COMPONENT = re.compile(r"(?P<backend>[a-z]+)(?:\[(?P<name>[^\]]*)\])?:(?P<sizes>.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SIZES = re.compile(r"(?:[a-z](?:[1-9][0-9]*))+")
_SIZE = re.compile(r"([a-z])([1-9][0-9]*)")
_HYBRID = re.compile(r"\(\s*attn:(?P<attn>[^|()\s]*)\s*\|\s*ffn:(?P<ffn>[^|()\s]*)\s*\)")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of each dimension. etp: tensor parallel size of the experts, where it is not that of the rest.

    Experts live on e * etp of every d * c * t ranks of a pipeline stage; the others of them hold copies."""

    backend: str = TORCH
    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.d * self.cell

    @property
    def cell(self) -> int:
        """Ranks that train one micro-batch together."""
        return self.t * self.p * self.c

    @property
    def unit(self) -> int:
        """The fewest ranks that can train so; any multiple of them can too, and no other number."""
        experts, together = self.e * self.etp, self.c * self.t
        return self.cell * (experts // math.gcd(together, experts))

    @property
    def split(self) -> str:
        """The dimensions that are larger than 1."""
        return "".join(dim for dim in "dtpce" if getattr(self, dim) > 1)

    def within(self, world: int) -> Layout:
        """The same with as much data parallelism as `world` ranks allow. BadConfiguration when they make no layout."""
        if world < self.cell or world % self.cell:
            size = " x ".join(f"{dim}{getattr(self, dim)}" for dim in self.split if dim in "tpc")
            few = "1 rank is too few" if world == 1 else f"{world} ranks are too few"
            wrong = few if world < self.cell else f"{world} ranks leave some over"
            raise BadConfiguration(f"{wrong}: {self.backend} with {size} needs a multiple of {self.cell}")
        layout = replace(self, d=world // self.cell)
        layout.check()
        return layout

    def check(self) -> None:
        """Raises BadConfiguration, with the reason, when no ranks can be laid out so."""
        if self.backend not in DIMENSIONS:
            raise BadConfiguration(f"no backend {self.backend}: choose {', '.join([*DIMENSIONS, *ALIASES])}")
        for dim in "dtpce":
            size = getattr(self, dim)
            if size < 1:
                raise BadConfiguration(f"{self.backend}: {dim}{size}: sizes start at 1")
            if size > 1 and dim not in DIMENSIONS[self.backend]:
                raise BadConfiguration(
                    f"{self.backend} has no dimension {dim}, only {', '.join(DIMENSIONS[self.backend])}"
                )
        self._check_experts()

    def _check_experts(self) -> None:
        ranks, t, c, e, etp = self.d * self.c * self.t, self.t, self.c, self.e, self.etp
        if etp < 1 or (etp > 1 and "e" not in DIMENSIONS[self.backend]):
            raise BadConfiguration(f"{self.backend}: ffn:t{etp} is no size for experts")
        if ranks % (e * etp):
            raise BadConfiguration(f"{self}: experts on {e * etp} ranks do not divide the {ranks} ranks of d x c x t")
        if self.backend != TORCH or (e == 1 and etp == 1):
            return
        if etp not in (1, t):
            raise BadConfiguration(f"{self}: torch splits experts by tensor over 1 rank or t = {t}, not over {etp}")
        within = c * t if etp == 1 else c
        if e % within:
            raise BadConfiguration(
                f"{self}: e{e} is no multiple of {within}, the ranks that hold parts of one sequence "
                f"({'c x t' if etp == 1 else 'c'}); torch sends each part to its experts"
            )

    def __str__(self) -> str:
        if self.etp == 1:
            return f"{self.backend}:{self._sizes('dtpce')}"
        ffn = Layout(d=self.d * self.c * self.t // (self.e * self.etp), t=self.etp, p=self.p, e=self.e)
        return f"{self.backend}:(attn:{self._sizes('dtpc')}|ffn:{ffn._sizes('dtpe')})"

    def _sizes(self, dims: str) -> str:
        return "".join(f"{dim}{getattr(self, dim)}" for dim in dims if dim == "d" or getattr(self, dim) > 1)


@dataclass(frozen=True, slots=True)
class Component:
    """A role with ranks: its name, "" where it has none, and its layout."""

    name: str
    layout: Layout

    def __str__(self) -> str:
        if not self.name:
            return str(self.layout)
        backend, _, sizes = str(self.layout).partition(":")
        return f"{backend}[{self.name}]:{sizes}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Components by the ranks they share: those of one place are colocated, places are apart."""

    places: tuple[tuple[Component, ...], ...]

    @property
    def components(self) -> tuple[Component, ...]:
        """All, in order."""
        return tuple(component for place in self.places for component in place)

    @property
    def world(self) -> int:
        """Ranks in all; colocated components count once."""
        return sum(place[0].layout.world for place in self.places)

    def __getitem__(self, name: str) -> Layout:
        for component in self.components:
            if component.name == name:
                return component.layout
        names = ", ".join(component.name for component in self.components if component.name)
        raise BadConfiguration(f"no component {name} in {self}; it names {names or 'none'}")

    def __str__(self) -> str:
        return "+".join("|".join(str(component) for component in place) for place in self.places)


def parse(text: str) -> Layout:
    """The layout of one component. BadConfiguration, with the reason, where it is none."""
    allocation = parse_allocation(text)
    if len(allocation.components) > 1:
        raise BadConfiguration(f"{text}: {len(allocation.components)} components where one layout is meant")
    (component,) = allocation.components
    if component.name:
        raise BadConfiguration(f"{text}: a layout by itself has no name; leave [{component.name}] out")
    return component.layout


def parse_allocation(text: str) -> Allocation:
    """Components joined by + and |, with spaces around these or without. BadConfiguration, with the reason, where the
    text is none."""
    if len(text) > bounds.NAME_BYTES:
        raise BadConfiguration(f"{text[:40]}...: a layout of {len(text)} letters; {bounds.NAME_BYTES} are enough")
    places = tuple(
        tuple(_component(part, text) for part in _split(place, "|", text)) for place in _split(text, "+", text)
    )
    allocation = Allocation(places)
    components = allocation.components
    is_colocated = any(len(place) > 1 for place in places)
    if (len(components) >= 3 or is_colocated) and not all(component.name for component in components):
        why = "colocated components" if is_colocated else "three or more components"
        raise BadConfiguration(f"{text}: {why} need names, such as fsdp[actor]:d4")
    names = [component.name for component in components if component.name]
    for name in names:
        if names.count(name) > 1:
            raise BadConfiguration(f"{text}: two components are named {name}")
    for place in places:
        worlds = {component.name: component.layout.world for component in place}
        if len(set(worlds.values())) > 1:
            sizes = ", ".join(f"{name} has {world}" for name, world in worlds.items())
            raise BadConfiguration(f"{text}: colocated components share their ranks, but {sizes}")
    return allocation


def _split(text: str, at: str, text_of_all: str) -> list[str]:
    """Parts of `text` between `at` outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth != 0:
        raise BadConfiguration(f"{text_of_all}: brackets that do not match")
    return [part.strip() for part in parts]


def _component(text: str, source: str) -> Component:
    match = _COMPONENT.fullmatch(text)
    if match is None:
        hint = f"; write torch:{text}" if _SIZES.fullmatch(text) else ""
        raise BadConfiguration(f"{source}: {text or 'nothing'} names no backend{hint}")
    name = match["name"] or ""
    if match["name"] is not None and not _NAME.fullmatch(name):
        raise BadConfiguration(f"{source}: [{name}] is no name; use letters, digits, _ and -")
    backend = ALIASES.get(match["backend"], match["backend"])
    if backend not in DIMENSIONS:
        raise BadConfiguration(f"{source}: no backend {backend}: choose {', '.join([*DIMENSIONS, *ALIASES])}")
    hybrid = _HYBRID.fullmatch(match["sizes"])
    if hybrid is not None:
        layout = _hybrid(backend, hybrid["attn"], hybrid["ffn"], source)
    else:
        layout = Layout(backend, **_sizes(match["sizes"], DIMENSIONS[backend], backend, source))
    try:
        layout.check()
    except BadConfiguration as error:
        raise BadConfiguration(f"{source}: {error}") from None
    return Component(name, layout)


def _hybrid(backend: str, attn: str, ffn: str, source: str) -> Layout:
    if "e" not in DIMENSIONS[backend]:
        raise BadConfiguration(f"{source}: {backend} has no expert parallelism, so no (attn|ffn)")
    outer = Layout(backend, **_sizes(attn, "dtpc", "attn", source))
    inner = _sizes(ffn, "dtpe", "ffn", source)
    etp, e, p = inner.get("t", 1), inner.get("e", 1), inner.get("p", outer.p)
    if p != outer.p:
        raise BadConfiguration(f"{source}: attn has p{outer.p} and ffn p{p}; stages are of whole layers, so equal")
    ranks = outer.d * outer.c * outer.t
    d, rest = divmod(ranks, e * etp)
    if rest or inner.get("d", d) != d:
        prefix = f"{inner['d']} x " if "d" in inner else ""
        raise BadConfiguration(
            f"{source}: attn has {ranks} ranks a stage (d x c x t), ffn {prefix}{e * etp} (d x t x e); make them equal"
        )
    return replace(outer, e=e, etp=etp)


def _sizes(text: str, letters: str, of: str, source: str) -> dict[str, int]:
    if not _SIZES.fullmatch(text):
        raise BadConfiguration(
            f"{source}: {text or 'nothing'} is no list of sizes such as d2t2 (a letter, then a number from 1 on)"
        )
    sizes: dict[str, int] = {}
    for dim, size in _SIZE.findall(text):
        if dim not in letters:
            raise BadConfiguration(f"{source}: {of} has no dimension {dim}, only {', '.join(letters)}")
        if dim in sizes:
            raise BadConfiguration(f"{source}: {dim} is given twice")
        if len(size) > len(str(bounds.INT)):
            raise BadConfiguration(f"{source}: {dim} has a size of {len(size)} digits; sizes are at most {bounds.INT}")
        sizes[dim] = int(size)
    return sizes
