"""Budgets of keys bind what has a price, and the settings say what has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.apps.check import check
from millrace.infra.config import Settings, load
from millrace.infra.errors import ConfigError

PRICES = {"prompt": 1.0, "completion": 2.0}
given_prices = st.none() | st.just(PRICES)


def settings(own: object, other: object, route: object, *, whole: bool, budget: bool) -> Settings:
    gateway: dict[str, object] = {
        "keys": {"bot": {"key": "x", "budget": 5.0 if budget else None}},
        "upstreams": {"far": {"url": "http://h/v1"}},
        "routes": [{"model": "gpt-*", "upstream": "far", "prices": route}],
    }
    gateway |= {"upstream_url": "http://h/v1"} if whole else {"policies": {"other": {"prices": other}}}
    return Settings.model_validate({"policy": {"prices": own}, "gateway": gateway})


@given(given_prices, given_prices, given_prices, st.booleans(), st.booleans())
def test_a_budget_binds_something_and_what_it_does_not_bind_is_named(
    own: object, other: object, route: object, whole: bool, budget: bool
) -> None:
    names = {"gpt-*": route} | ({"upstream_url": None} if whole else {"[policy] prices": own, "other": other})
    free = [name for name, prices in names.items() if prices is None]
    if budget and len(free) == len(names):
        with pytest.raises(ValueError, match="would never bind") as caught:
            settings(own, other, route, whole=whole, budget=budget)
        assert all(name in str(caught.value) for name in free)
        return
    found = settings(own, other, route, whole=whole, budget=budget).unbound
    assert (found is not None) == bool(budget and free)
    if found is not None:
        assert all((name in found) == (name in free) for name in names)


def test_a_budget_without_any_price_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text('[gateway.keys.bot]\nkey = "x"\nbudget = 1\n')
    with pytest.raises(ConfigError, match=r"gateway.keys.bot.* Set prices, or tokens_per_minute"):
        load(file)


def test_check_warns_of_what_no_budget_binds() -> None:
    found = [
        answer for answer in check(settings(None, PRICES, PRICES, whole=False, budget=True)) if "budget" in answer.said
    ]
    assert [(answer.question, answer.word) for answer in found] == [("budgets", "warning")]
    assert "policy ([policy] prices)" in found[0].said
