"""The one line `[learner] backend`: which layouts it takes, how many learners train in them, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.learner.group import layouts
from millrace.consumers.learner.group.agreement import Need
from millrace.infra.config import Learner, load
from millrace.infra.errors import ConfigError
from millrace.trainers.backends.layout import Layout
from millrace.trainers.errors import BadConfiguration

SIZES = st.sampled_from([1, 2, 3, 4])
LAYOUTS = st.builds(
    Layout, backend=st.sampled_from(["torch", "megatron"]), t=SIZES, p=SIZES, c=SIZES, e=SIZES, etp=SIZES
)


def fits(layout: Layout, ranks: int) -> bool:
    try:
        return layout.within(ranks).world == ranks
    except BadConfiguration:
        return False


@given(LAYOUTS)
def test_multiples_of_the_unit_make_layouts_and_no_other_number_does(layout: Layout) -> None:
    if not fits(layout, layout.unit):  # torch's experts have rules that no number of ranks changes
        assert not any(fits(layout, ranks) for ranks in range(1, 3 * layout.unit))
        return
    found = [ranks for ranks in range(1, 3 * layout.unit + 1) if fits(layout, ranks)]
    assert found == [layout.unit, 2 * layout.unit, 3 * layout.unit]


@pytest.mark.parametrize(
    ("text", "made", "unit"),
    [
        ("torch", "torch:d1", 1),
        ("fsdp", "torch:d1", 1),
        ("deepspeed:d4", "deepspeed:d4", 1),
        ("torch:t2", "torch:d1t2", 2),
        ("megatron:t2p2", "megatron:d1t2p2", 4),
        ("torch:d2c2", "torch:d2c2", 2),
        ("torch:d2e2", "torch:d2e2", 2),
        ("megatron:(attn:d2t2|ffn:d2e2)", "megatron:d2t2e2", 2),
        ("megatron:(attn:d4t2|ffn:t2e4)", "megatron:(attn:d4t2|ffn:d1t2e4)", 8),
    ],
)
def test_a_line_names_a_layout(text: str, made: str, unit: int) -> None:
    learner = load(flags={"learner.backend": text}).learner
    (place,) = layouts.role_places(learner)
    assert (place.roles, str(place.layout)) == (("actor",), made)
    assert layouts.need_of(learner) == Need(unit)


def test_one_learner_trains_where_the_optimizer_is_in_main_memory_and_a_further_one_waits() -> None:
    need = layouts.need_of(Learner(optimizer_offload=True, precision="bf16"))
    assert [need.most(here) for here in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "same", "need"),
    [
        ("torch[actor]:d2+torch[critic]:d1", "torch[actor]:d1+torch[critic]:d1", Need(1, 1)),
        ("torch[critic]:d2+fsdp[actor]:d4t2", "torch[actor]:d1t2+torch[critic]:d2", Need(2, 2)),
        (
            "torch[actor]:p2+torch[critic]:d1|torch[reference]:d1+torch[teacher]:t2",
            "torch[actor]:d1p2+torch[critic]:d1|torch[reference]:d1+torch[teacher]:d1t2",
            Need(2, 3),
        ),
        ("torch[actor]:d2|torch[critic]:d2", "torch:d1", Need()),
        ("megatron[actor]:t2|megatron[critic]:t2", "megatron:d1t2", Need(2)),
    ],
)
def test_a_line_names_roles(text: str, same: str, need: Need) -> None:
    learner = Learner(backend=text)
    assert (layouts.canonical(learner), layouts.need_of(learner)) == (same, need)
    assert layouts.canonical(Learner(backend=same)) == same


def test_a_backend_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"\[learner\] backend: .*no backend torhc; choose torch, fsdp"):
        load(flags={"learner.backend": "torhc:t2"})


def test_what_is_awaited_is_said_in_the_words_of_the_setting() -> None:
    two, four = Learner(backend="torch:t2"), Learner(backend="megatron:t2p2")
    assert layouts.shortage_text(two, 1) == "1 learner here, torch:t2 trains with 2: start another"
    assert layouts.shortage_text(four, 2) == "2 learners here, megatron:t2p2 trains with 4: start 2 more"
    spare = layouts.spare_text(two, 3)
    assert spare == "3 learners here, torch:t2 trains with multiples of 2: this one waits as a spare"


def test_what_is_awaited_is_said_for_whom() -> None:
    text = "torch[actor]:t2+torch[critic]:d1|torch[reference]:d1+torch[teacher]:d2"
    learner, serving = Learner(backend=text), "critic|reference 1, teacher 2"
    awaited = f"3 learners here, {text} trains with 5 (actor 2, {serving}): start 2 more"
    assert layouts.shortage_text(learner, 3) == awaited
    spare = f"6 learners here, {text} trains with multiples of 2 beside {serving}: this one waits as a spare"
    assert layouts.spare_text(learner, 6) == spare


@pytest.mark.parametrize(
    ("backend", "learners", "started"),
    [
        ("torch", 1, 1),
        ("torch", 3, 3),
        ("torch:t2", 1, 2),
        ("torch:d2t2", 1, 4),
        ("torch:t2", 6, 6),
        ("torch:t2", 0, 0),
        ("torch[actor]:d2+torch[critic]:d1|torch[reference]:d1", 1, 3),
    ],
)
def test_a_deployment_starts_a_cell_at_least(backend: str, learners: int, started: int) -> None:
    assert layouts.learner_count(Learner(backend=backend, learners=learners)) == started
