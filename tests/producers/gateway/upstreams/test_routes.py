"""Who answers a model: a pure choice, whatever the rules."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.errors import ApiError
from millrace.infra.config.upstreams import GatewayRoute, GatewayUpstream, route_fault
from millrace.producers.gateway.upstreams.routes import RouteRule, chain, choose, exact, fits
from millrace.schemas import bounds

NAMES = ("a", "b", "c")
DIALECTS = ("chat", "messages", "responses")
names = st.sampled_from(NAMES)
models = st.text("abp@*.[", max_size=5)
spoken = st.fixed_dictionaries({name: st.frozensets(st.sampled_from(DIALECTS)) for name in NAMES})
rules = st.lists(st.builds(RouteRule, models, names), max_size=5)


@given(models, st.text("abp@.[", max_size=6))
def test_a_star_is_any_text_and_nothing_else_is_special(pattern: str, model: str) -> None:
    assert fits(pattern, model) == fnmatch.fnmatchcase(model, pattern.replace("[", "[[]"))


@settings(max_examples=300)
@given(rules, spoken, st.sampled_from([("p",), ("p", "b"), None]), models, st.sampled_from(DIALECTS))
def test_the_first_rule_that_fits_and_speaks_decides(
    rules: Sequence[RouteRule],
    spoken: Mapping[str, frozenset[str]],
    policies: tuple[str, ...] | None,
    model: str,
    dialect: str,
) -> None:
    ours = any(model == policy or model.startswith(policy + "@") for policy in policies or ())
    named = [rule for rule in rules if fits(rule.model, model)]
    able = [rule for rule in named if dialect in spoken[rule.upstream]]
    if not ours and not able and (named or policies is None):
        with pytest.raises(ApiError) as refused:
            choose(rules, lambda name, what: what in spoken[name], policies, model, dialect)
        assert refused.value.status == 404
        return
    chosen = choose(rules, lambda name, what: what in spoken[name], policies, model, dialect)
    if ours or not able:
        assert chosen is None
    else:
        assert chosen is able[0]


@given(names, st.dictionaries(names, st.sampled_from(["", *NAMES])), st.frozensets(names))
def test_nobody_is_asked_twice_and_only_who_speaks(first: str, behind: Mapping[str, str], able: frozenset[str]) -> None:
    asked = chain(first, behind, able.__contains__)
    assert len(set(asked)) == len(asked)
    assert set(asked) <= able
    assert (first in able) == (asked[:1] == [first])


def test_models_that_are_named_in_full() -> None:
    assert exact([RouteRule("b", "x"), RouteRule("a-*", "x"), RouteRule("b", "y"), RouteRule("a", "x")]) == ["b", "a"]


@pytest.mark.parametrize(
    ("behind", "upstream", "said"),
    [
        ({"a": "b", "b": ""}, "a", None),
        ({"a": "b", "b": ""}, "c", "'c' is none of"),
        ({"a": "c"}, "a", "fallback: 'c' is none of"),
        ({"a": "b", "b": "a"}, "a", "a -> b -> a is a circle"),
        ({"a": "a"}, "a", "a -> a is a circle"),
        ({"c": "a", "a": "b", "b": "a"}, "a", "is a circle"),
    ],
)
def test_settings_that_lead_nowhere_are_refused(behind: Mapping[str, str], upstream: str, said: str | None) -> None:
    known = {name: GatewayUpstream(url="http://u/v1", fallback=next_) for name, next_ in behind.items()}
    found = route_fault(known, [GatewayRoute(model="*", upstream=upstream)])
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


def test_a_name_beyond_its_bound_is_refused_before_any_rule_is_asked() -> None:
    with pytest.raises(ApiError, match=f"longer than {bounds.NAME_BYTES}") as refused:
        choose([RouteRule("*a*b*", "x")], lambda *_: True, "p", "a" * 200_000, "chat")
    assert (refused.value.status, len(str(refused.value)) < 100) == (400, True)
