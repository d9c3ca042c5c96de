"""Keys of the gateway in the settings: one caller each, not to be guessed, and the workers a tenant of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.infra.config import load
from millrace.infra.errors import ConfigError

GOOD = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> None:
    Path("millrace.toml").write_text(text)


@pytest.mark.parametrize("tenant", ["alice", "bob"])
def test_one_key_is_one_caller(tenant: str) -> None:
    write(f"[gateway.keys.a]\nkey = '{GOOD}'\ntenant = 'alice'\n[gateway.keys.b]\nkey = '{GOOD}'\ntenant = '{tenant}'")
    with pytest.raises(ConfigError, match="a and b are the same key") as caught:
        load()
    assert GOOD not in str(caught.value)


@pytest.mark.parametrize("key", ["k", GOOD[:-1], "a long random word", "another long random word"])
def test_a_key_that_can_be_guessed_is_for_this_machine_alone(key: str) -> None:
    write(f"[gateway.keys.me]\nkey = '{key}'")
    assert load().gateway.keys
    write(f"[gateway]\nhost = '10.0.0.1'\n[gateway.keys.me]\nkey = '{key}'")
    with pytest.raises(ConfigError, match=r"gateway.keys.me.* can be guessed"):
        load()


def test_keys_of_sessions_are_not_static_keys() -> None:
    write("[gateway.keys.me]\nkey = 'mr-0123456789abcdef'")
    with pytest.raises(ConfigError, match="only keys of sessions"):
        load()


def test_a_shared_secret_is_long() -> None:
    write(f"[gateway]\nsession_secret = '{GOOD}'")
    with pytest.raises(ConfigError, match="session_secret has under 32"):
        load()
    write(f"[gateway]\nsession_secret = '{GOOD * 2}'")
    assert GOOD not in repr(load())


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("https://agents.example.org", True),
        ("http://10.0.0.1:8900/millrace", True),
        ("agents.example.org", False),
        ("https://a?b", False),
        ("ftp://a", False),
    ],
)
def test_a_public_address_is_an_address(url: str, good: bool) -> None:
    write(f"[gateway]\npublic_url = '{url}'")
    if good:
        assert load().gateway.public_url == url
    else:
        with pytest.raises(ConfigError, match="public_url"):
            load()


WORKERS = f"[gateway.keys.bot]\nkey = 'bot'\n[gateway.keys.w]\nkey = '{GOOD}'\n[rollout]\nkey = 'w'\n"


@pytest.mark.parametrize(
    ("more", "tenant", "rules"),
    [
        ("", "rollouts", {"local": True, "rollouts": True}),
        ("[governance.tenants.local]\ntrain = false", "rollouts", {"local": False, "rollouts": False}),
        ("[governance.tenants.rollouts]\ntrain = false", "rollouts", {"rollouts": False}),
        ("[governance.tenants.support]\ntrain = false", "rollouts", {"support": False, "rollouts": True}),
        ("tenant = 'mine'", "mine", {"local": True}),
        ("[rollout]", "local", {"local": True, "rollouts": True}),
    ],
)
def test_the_workers_are_a_tenant_of_their_own(more: str, tenant: str, rules: dict[str, bool]) -> None:
    if more.startswith("tenant"):
        write(WORKERS.replace("[gateway.keys.w]\n", f"[gateway.keys.w]\n{more}\n"))
    elif more == "[rollout]":  # nobody names the workers' key
        write(WORKERS.partition("[rollout]")[0])
    else:
        write(WORKERS + more)
    settings = load()
    assert settings.gateway.keys["w"].tenant == tenant
    assert settings.gateway.keys["bot"].tenant == "local"
    assert {name: rule.train for name, rule in settings.governance.tenants.items()} == rules
