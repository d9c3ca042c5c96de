"""Who a caller is, by the key of its request alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.dialects.errors import ApiError
from millrace.infra.config import load
from millrace.infra.local_keys import WORKERS, make_keys, workers_key
from millrace.producers.gateway.http.callers import Caller, Callers, digest, key_of
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.ownership import Hints
from millrace.producers.gateway.sessions.sessions import Sessions
from tests.support.gateway_world import POLICY

JUDGE = frozenset({"tests"})
OPTIONS = GatewayOptions(
    POLICY,
    keys={"sk-bot": "acme", "sk-judge": "acme", "sk-workers": "local"},
    key_names={"sk-bot": "bot", "sk-judge": "judge"},
    rollout_key="sk-workers",
    verifiers=JUDGE,
    judges={"sk-judge": JUDGE},
)


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path, POLICY)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        (bearer("sk-bot"), "sk-bot"),
        ({"authorization": " bearer   sk-bot "}, "sk-bot"),
        ({"authorization": "sk-bot"}, "sk-bot"),
        ({"x-api-key": "sk-bot"}, "sk-bot"),
        ({"authorization": "Bearer", "x-api-key": "sk-bot"}, "sk-bot"),
        (bearer("sk-one") | {"x-api-key": "sk-two"}, "sk-one"),
        ({"authorization": "Basic c2s6"}, "Basic"),
        ({}, ""),
    ],
)
def test_where_a_request_bears_its_key(headers: dict[str, str], key: str) -> None:
    assert key_of(headers) == key


def test_any_string_has_a_digest_of_its_own() -> None:
    odd = b"sk-\xff".decode(errors="surrogateescape")
    assert len({digest(key) for key in ("", "sk-", odd)}) == 3


def test_what_a_static_key_says(sessions: Sessions) -> None:
    callers = Callers(OPTIONS, sessions)
    assert callers.identify(bearer("sk-bot")) == Caller("acme", None, key="bot")
    assert callers.identify(bearer("sk-judge")) == Caller("acme", None, judges=JUDGE, key="judge")
    assert callers.identify(bearer("sk-workers")) == Caller("local", None, takes_grants=True)
    for headers in (bearer("sk-other"), bearer("sk-bo"), {}):
        with pytest.raises(ApiError) as refused:
            callers.identify(headers)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("options", [GatewayOptions(POLICY), OPTIONS])
def test_a_session_key_speaks_for_its_live_session_alone(sessions: Sessions, options: GatewayOptions) -> None:
    callers = Callers(options, sessions)
    session = sessions.make_session("acme", Hints(None, ""), (), 0)
    own = sessions.key_of(session)
    for key, code in ((f"{own}0", "invalid_api_key"), (own, "session_expired")):
        with pytest.raises(ApiError) as refused:
            callers.identify(bearer(key))
        assert (refused.value.status, refused.value.code) == (401, code)
    sessions.add(session)
    caller = callers.identify(bearer(own))
    assert (caller.tenant, caller.session, caller.takes_grants) == ("acme", session, False)


def test_without_keys_everybody_is_the_one_tenant_and_judges_nothing_reserved(sessions: Sessions) -> None:
    callers = Callers(GatewayOptions(POLICY, verifiers=JUDGE), sessions)
    for headers in ({}, bearer("anything")):
        assert callers.identify(headers) == Caller("local", None)


def test_a_key_that_nobody_names_is_not_the_workers(tmp_path: Path) -> None:
    flags = {"home": str(tmp_path), "gateway.keys": {"bot": {"key": "sk-bot"}, "b": {"key": "sk-b"}}}
    settings = load(flags=flags)
    make_keys(settings, WORKERS)
    callers = Callers(GatewayOptions.of(settings, 1), Sessions(tmp_path, POLICY))
    for key in ("sk-bot", "sk-b"):
        assert callers.identify(bearer(key)).takes_grants is False
        assert callers.identify(bearer(key)).barred_sources(frozenset({"verifier"})) == {"verifier"}
    workers = callers.identify(bearer(workers_key(settings)))
    assert (workers.takes_grants, workers.tenant, workers.barred_sources(JUDGE)) == (True, "rollouts", frozenset())
    named = load(flags={**flags, "rollout.key": "bot"})
    callers = Callers(GatewayOptions.of(named, 1), Sessions(tmp_path, POLICY))
    assert callers.identify(bearer("sk-bot")).takes_grants is True
    with pytest.raises(ApiError, match="Incorrect"):
        callers.identify(bearer(workers_key(settings)))
