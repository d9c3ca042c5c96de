"""The allocation grammar: what is written is what is meant, and what cannot be says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.layout import DIMENSIONS, Allocation, Component, Layout, parse, parse_allocation
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.errors import BadConfiguration

SIZE = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn, world: int | None = None) -> Layout:
    backend = draw(st.sampled_from(sorted(DIMENSIONS)))
    if world is not None:
        return Layout(backend, d=world)
    sizes = {dim: draw(SIZE) for dim in DIMENSIONS[backend] if dim != "e"}
    ranks = sizes["d"] * sizes.get("t", 1) * sizes.get("c", 1)
    if "e" in DIMENSIONS[backend]:
        sizes["e"] = draw(st.sampled_from([e for e in range(1, ranks + 1) if ranks % e == 0]))
        etps = [t for t in range(1, ranks + 1) if ranks % (sizes["e"] * t) == 0]
        sizes["etp"] = draw(st.sampled_from(etps))
    made = Layout(backend, **sizes)
    try:
        made.check()
    except BadConfiguration:
        return Layout(backend, **{**sizes, "e": 1, "etp": 1})
    return made


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    named = sum(shape) > 2 or max(shape) > 1 or draw(st.booleans())
    places, index = [], 0
    for size in shape:
        world = draw(SIZE)
        place = []
        for _ in range(size):
            layout = draw(layouts(world if size > 1 else None))
            place.append(Component(f"role-{index}" if named else "", layout))
            index += 1
        places.append(tuple(place))
    return Allocation(tuple(places))


@given(layouts())
def test_a_layout_reads_back_as_it_was_written(layout: Layout) -> None:
    assert parse(str(layout)) == layout


@given(allocations())
def test_an_allocation_reads_back_as_it_was_written(allocation: Allocation) -> None:
    assert parse_allocation(str(allocation)) == allocation


@given(layouts(), st.integers(1, 64))
def test_ranks_make_a_layout_or_a_reason(layout: Layout, world: int) -> None:
    if world % layout.cell:
        with pytest.raises(BadConfiguration, match=f"^{world} ranks? (is|are|leave) "):
            layout.within(world)
    elif layout.e == layout.etp == 1:
        made = layout.within(world)
        assert made.world == world
        assert (made.t, made.p, made.c) == (layout.t, layout.p, layout.c)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("torch:d2t2", Layout("torch", d=2, t=2)),
        ("fsdp:d4", Layout("torch", d=4)),
        ("archon:d2t2p2c2e4", Layout("torch", 2, 2, 2, 2, 4)),
        ("deepspeed:d4", Layout("deepspeed", d=4)),
        ("megatron:e2t2d2", Layout("megatron", d=2, t=2, e=2)),
        ("vllm:d2t2p2", Layout("vllm", d=2, t=2, p=2)),
        ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", Layout("megatron", d=4, t=2, p=2, c=2, e=2, etp=4)),
        ("megatron:(attn:d4p2t2c2|ffn:p2t4e2)", Layout("megatron", d=4, t=2, p=2, c=2, e=2, etp=4)),
        ("torch:(attn:d2t2|ffn:t2e2)", Layout("torch", d=2, t=2, e=2, etp=2)),
        ("torch:d2t2e4", Layout("torch", d=2, t=2, e=4)),
    ],
)
def test_layouts(text: str, layout: Layout) -> None:
    assert parse(text) == layout


def test_an_allocation_counts_colocated_ranks_once() -> None:
    both = parse_allocation("sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d2t2")
    assert both.world == 6
    assert [component.name for component in both.components] == ["rollout", "actor", "critic"]
    assert both["critic"] == Layout("torch", d=2, t=2)
    assert parse_allocation("vllm:d2+fsdp:d4").world == 6
    with pytest.raises(BadConfiguration, match=r"no component teacher in .* it names rollout, actor, critic"):
        both["teacher"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d2t2", "names no backend; write torch:d2t2"),
        ("", "nothing names no backend"),
        ("torch", "torch names no backend"),
        ("jax:d2", "no backend jax: choose torch, "),
        ("torch:", "nothing is no list of sizes"),
        ("torch:d0", "d0 is no list of sizes"),
        ("torch:d02", "d02 is no list of sizes"),
        ("torch:d", "d is no list of sizes"),
        ("torch:2d", "2d is no list of sizes"),
        ("torch:d2d4", "d is given twice"),
        ("torch:d2x2", "torch has no dimension x, only d, t, p, c, e"),
        ("deepspeed:d2t2", "deepspeed has no dimension t, only d"),
        ("vllm:d2c2", "vllm has no dimension c"),
        ("torch:d1e2", "experts on 2 ranks do not divide the 1 ranks"),
        ("torch:d3e2", "experts on 2 ranks do not divide the 3 ranks"),
        ("torch:d2t2c2e2", "e2 is no multiple of 4, the ranks that hold parts of one sequence"),
        ("torch:(attn:d2t2c2|ffn:t2e3)", "attn has 8 ranks a stage .* ffn 6"),
        ("torch:(attn:d4t4|ffn:t2e2)", "torch splits experts by tensor over 1 rank or t = 4, not over 2"),
        ("torch:(attn:d2t2c2|ffn:t2e1)", "e1 is no multiple of 2"),
        ("megatron:(attn:d4p2|ffn:d4p1)", "attn has p2 and ffn p1"),
        ("megatron:(attn:d4|ffn:d2)", "attn has 4 ranks a stage .* ffn 2 x 1"),
        ("megatron:(attn:d4e2|ffn:d4)", "attn has no dimension e"),
        ("megatron:(attn:d4|ffn:d4c2)", "ffn has no dimension c"),
        ("megatron:(attn:d4", "brackets that do not match"),
        ("megatron:d4)", "brackets that do not match"),
        ("vllm:(attn:d4|ffn:d4)", "vllm has no expert parallelism"),
        ("torch[actor]:d2", "a layout by itself has no name"),
        ("torch:d2+vllm:d2", "2 components where one layout is meant"),
    ],
)
def test_what_is_no_layout_says_why(text: str, reason: str) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm:d1+torch:d1+torch:d1", "three or more components need names"),
        ("torch:d2|torch:d2", "colocated components need names"),
        ("torch[a]:d2|torch[b]:d4", "colocated components share their ranks, but a has 2, b has 4"),
        ("torch[a]:d2+torch[a]:d2", "two components are named a"),
        ("torch[]:d2", r"\[\] is no name"),
        ("torch[a b]:d2", r"\[a b\] is no name"),
        ("torch:d2+", "nothing names no backend"),
    ],
)
def test_what_is_no_allocation_says_why(text: str, reason: str) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        parse_allocation(text)


def test_too_few_ranks_for_a_layout() -> None:
    with pytest.raises(BadConfiguration, match="3 ranks are too few: torch with t2 x p2 needs"):
        Layout(t=2, p=2).within(3)
    with pytest.raises(BadConfiguration, match="6 ranks leave some over: torch with c4 needs"):
        Layout(c=4).within(6)
    with pytest.raises(BadConfiguration, match="experts on 4 ranks do not divide the 2 ranks"):
        Layout(e=4).within(2)


def test_a_layout_chooses_its_backend() -> None:
    made = make_backend("fsdp:d2", device="cpu")
    assert isinstance(made, TorchBackend)
    assert made.parallel == Layout(d=2)
    with pytest.raises(BadConfiguration, match="vllm serves and does not train; train with torch"):
        make_backend("vllm:d2")
    with pytest.raises(BadConfiguration, match="the torch backend splits along"):
        TorchBackend(parallel=Layout("megatron"))


@pytest.mark.parametrize(
    ("spaced", "plain"),
    [
        (" torch:d2t2 ", "torch:d2t2"),
        ("fsdp[actor]:d4 + vllm[rollout]:d2", "fsdp[actor]:d4+vllm[rollout]:d2"),
        ("fsdp[actor]:d4 | fsdp[critic]:d4", "fsdp[actor]:d4|fsdp[critic]:d4"),
        ("megatron:( attn:d4t2 | ffn:d4e2 )", "megatron:(attn:d4t2|ffn:d4e2)"),
    ],
)
def test_spaces_around_what_joins_mean_nothing(spaced: str, plain: str) -> None:
    assert parse_allocation(spaced) == parse_allocation(plain)


@pytest.mark.parametrize("digits", [11, 500, 5000, 100_000])
def test_sizes_of_many_digits_are_refused(digits: int) -> None:
    with pytest.raises(BadConfiguration, match=r"sizes are at most|letters"):
        parse("torch:d" + "9" * digits)
