"""Who answers a call: never one that must not, the caches first, the load bounded by the speed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.calls.routing import (
    BLOCK,
    FEW,
    OVER,
    EngineView,
    PrefixMemory,
    RouteWish,
    SpeedMeter,
    chain_of,
    rank,
)

VIEWS = st.lists(
    st.builds(
        EngineView,
        st.sampled_from("abcdefgh"),
        st.none() | st.integers(0, 4),
        st.integers(0, 200),
        st.none() | st.floats(1e-4, 10) | st.floats(),
        st.integers(0, 8),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda view: view.name,
)
WISHES = st.builds(
    RouteWish,
    st.booleans(),
    st.integers(0, 4),
    st.none() | st.integers(0, 4),
    st.none() | st.sampled_from("abcdefgh"),
    st.lists(st.integers(), min_size=8, max_size=8),
    st.text(max_size=3),
    st.lists(st.sampled_from("abcdefgh"), max_size=3),
)


def fits(view: EngineView, wish: RouteWish) -> bool:
    return view.version is not None and view.version >= wish.minimum and wish.version in (None, view.version)


@given(VIEWS, WISHES)
def test_nobody_answers_who_must_not(views: list[EngineView], wish: RouteWish) -> None:
    ranked = rank(views, wish)
    assert len({view.name for view in ranked}) == len(ranked)
    for view in ranked:
        assert view in views
        assert not view.is_draining
        assert view.name not in wish.failures
        if wish.has_grant or wish.version is not None:
            assert fits(view, wish)
    open_ones = [view for view in views if not view.is_draining and view.name not in wish.failures]
    some_fit = [view for view in open_ones if fits(view, wish)]
    if some_fit:
        assert all(fits(view, wish) for view in ranked)
    may = some_fit or ([] if wish.has_grant or wish.version is not None else open_ones)
    assert bool(ranked) == bool(may)
    if any(not view.is_dead for view in may):
        assert not any(view.is_dead for view in ranked)


@given(VIEWS, WISHES, st.randoms())
def test_the_order_depends_on_what_is_known_alone(views: list[EngineView], wish: RouteWish, random: object) -> None:
    mixed = list(views)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert {view.name for view in rank(mixed, wish)} == {view.name for view in rank(views, wish)}
    assert rank(views, wish) == rank(views, wish)
    assert rank(mixed, wish)[:1] == rank(views, wish)[:1]


@given(VIEWS, WISHES)
def test_a_session_keeps_its_engine_but_where_that_has_more_than_its_share(
    views: list[EngineView], wish: RouteWish
) -> None:
    ranked = rank(views, wish)
    former = next((view for view in ranked if view.name == wish.former), None)
    if former is not None and former.calls < FEW:
        assert ranked[0] is former
    equals = [EngineView(view.name, view.version, view.calls, 1.0) for view in ranked]
    again = rank(equals, wish)
    total = 1 + sum(view.calls for view in equals)
    for view in again[:1]:
        is_least = view.calls == min(one.calls for one in equals)
        assert is_least or view.calls < max(FEW, OVER * total / len(equals) + 1)


def test_the_prompt_leads_to_who_has_read_it_and_the_load_away() -> None:
    wish = RouteWish(chain=range(8))
    near, far = EngineView("near", 1, 3, 1.0, match=7), EngineView("far", 1, 0, 1.0, match=3)
    assert rank([far, near], wish) == [near, far]
    assert rank([far, EngineView("near", 1, FEW, 1.0, match=7)], wish)[0] == far
    assert rank([EngineView("far", 1, 2, 1.0, match=8), near], wish)[0].name == "far", "the longer match"
    assert rank([far, near], wish._replace(former="far"))[0] == far, "the session's own goes first"


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(50, 400))
def test_a_slow_engine_has_proportionally_less(times: list[float], calls: int) -> None:
    count: Counter[str] = Counter()
    for _ in range(calls):
        views = [EngineView(str(at), 1, count[str(at)], time) for at, time in enumerate(times)]
        count[rank(views, RouteWish())[0].name] += 1
    whole = sum(1 / time for time in times)
    for at, time in enumerate(times):
        assert abs(count[str(at)] - calls / time / whole) <= len(times)


def test_what_nobody_measured_is_taken_for_usual() -> None:
    views = [EngineView("new", 1, 2), EngineView("slow", 1, 2, 5.0), EngineView("fast", 1, 2, 1.0)]
    assert [view.name for view in rank(views, RouteWish())] == ["fast", "new", "slow"]


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8), st.lists(st.integers(0, 3), max_size=6))
def test_the_memory_finds_the_longest_beginning(prompts: list[list[int]], prompt: list[int]) -> None:
    def wide(blocks: list[int]) -> list[int]:
        return [block for block in blocks for _ in range(BLOCK)]

    memory = PrefixMemory()
    for one in prompts:
        memory.add(chain_of(wide(one)))

    def shared(one: list[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(one, prompt, strict=False)) if a != b), min(len(one), len(prompt))
        )

    chain = chain_of([*wide(prompt), 1])
    assert len(chain) == len(prompt)
    assert memory.match(chain) == max(map(shared, prompts), default=0)
    memory.clear()
    assert memory.match(chain) == 0


def test_the_memory_forgets_ends_before_beginnings() -> None:
    memory = PrefixMemory(most=4)
    first, second = chain_of([1] * BLOCK * 3), chain_of([1] * BLOCK + [2] * BLOCK * 2)
    memory.add(first)
    memory.add(second)
    assert (memory.match(first), memory.match(second)) == (2, 3)


def test_a_measure_lapses() -> None:
    meter = SpeedMeter()
    assert meter.token_s(0) is None
    meter.add(1.0, 0, 0)
    assert meter.token_s(0) is None
    meter.add(2.0, 10, 0)
    assert meter.token_s(1) == 0.2
    for _ in range(60):
        meter.add(1.0, 1, 5)
    assert 0.99 < (meter.token_s(6) or 0) <= 1
    assert meter.token_s(100) is None
