"""Settings: where they come from, what is refused and how, and that secrets stay secret."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from millrace.infra.config import Settings, is_local, load, mask_values, variables
from millrace.infra.errors import ConfigError
from millrace.schemas import bounds


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> Path:
    path = Path("millrace.toml")
    path.write_text(text)
    return path


def test_defaults_need_no_file(tmp_path: Path) -> None:
    settings = load()
    assert settings.namespace == "dev"
    assert settings.home == tmp_path / ".millrace"
    assert settings.objects == str(tmp_path / ".millrace/objects")
    assert settings.gateway.engine_url == settings.engine.url
    assert settings.gateway.capture_dir == tmp_path / ".millrace/capture"
    assert settings.weights.endswith("objects/dev/weights/policy")
    assert settings.layout.specs()


def test_namespaces_that_share_a_directory_share_nothing_in_it() -> None:
    one, other = (load(flags={"namespace": name, "objects": "/mnt/shared"}) for name in ("one", "other"))
    places = {place for made in (one, other) for place in (made.weights, made.claims, made.archive_root)}
    assert len(places) == 6
    assert not [a for a in places for b in places if a != b and b.startswith(a)]


def test_flags_win_over_environment_wins_over_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write("namespace = 'file'\n[gateway]\nport = 1\nidle_timeout_s = 7\n[policy]\nbatch = 3\n")
    monkeypatch.setenv("MILLRACE_GATEWAY__PORT", "2")
    monkeypatch.setenv("MILLRACE_POLICY__BATCH", "4")
    settings = load(flags={"policy.batch": "5"})
    assert (settings.namespace, settings.gateway.port, settings.gateway.idle_timeout_s) == ("file", 2, 7)
    assert settings.policy.batch == 5


def test_tables_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_GATEWAY__KEYS", '{"a": {"key": "k", "tenant": "t"}}')
    assert load().gateway.keys["a"].key.get_secret_value() == "k"
    monkeypatch.setenv("MILLRACE_GATEWAY__KEYS__B", '{"key": "[begins like a list, but is none"}')
    monkeypatch.setenv("MILLRACE_GATEWAY__KEYS__C__KEY", "{begins like a table, but is none")
    keys = load().gateway.keys
    assert sorted(keys) == ["a", "b", "c"]
    assert keys["c"].key.get_secret_value() == "{begins like a table, but is none"
    for name in ("B", "C__KEY"):
        monkeypatch.delenv(f"MILLRACE_GATEWAY__KEYS__{name}")
    monkeypatch.setenv("MILLRACE_GATEWAY__KEYS", "{")
    with pytest.raises(ConfigError, match="MILLRACE_GATEWAY__KEYS is not JSON"):
        load()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gateway]\nprot = 1", r"\[gateway\] prot is no setting; did you mean port\?"),
        ("[gatewey]\nport = 1", "gatewey is no setting; did you mean gateway"),
        ("namspace = 'x'", "did you mean namespace"),
        ("[learner]\ntokens_per_pack = 0", r"^\[learner\] tokens_per_pack: input should be greater than 0, or 'auto'$"),
        (
            "[learner]\nactivation_checkpointing = 'some'",
            r"^\[learner\] activation_checkpointing: input should be a valid boolean, [^\n]*, or 'selective'$",
        ),
        ("[gateway.keys.me]\nky = 'x'\nkey = 'y'", r"\[gateway.keys.me\] ky is no setting; did you mean key"),
        ("[governance.tenants.acme]\ntrian = true", "did you mean train"),
        ("[policy]\nzzz = 1", "known: awaits, batch, dynamic_sampling"),
        ("[policy]\nbatch = 0", r"\[policy\] batch: input should be greater than 0"),
        ("[policy]\nbatch = 'many'", r"\[policy\] batch: input should be a valid integer"),
        ("[warehouse]\nport = 0", r"\[warehouse\] port: input should be greater than or equal to 1"),
        ("[warehouse]\nread_url = 'http://reader:r@host:8123'", r"\[warehouse\] read_url .* set that too"),
        ("[policy]\nrelease = 'never'", r"\[policy\] release: .*'mask-head'"),
        (
            "[gateway]\ntool_parser = 'mistral'",
            r"\[gateway\] tool_parser: only hermes is supported, not 'mistral': .*renderer",
        ),
        ("namespace = 'a.b'", "namespace"),
        ("[policy", "not TOML"),
        ("[gateway]\nhost = '0.0.0.0'", "set at least one key"),
        ("[kafka]\nbootstrap = 'kafka.example.org:9092'", "local = false"),
        ("[kafka]\nbootstrap = 'localhost'", r"\[kafka\] bootstrap: .*host:port"),
        ("[kafka]\nbootstrap = 'localhost:kafka'", r"\[kafka\] bootstrap: .*host:port"),
        ("[kafka]\nbootstrap = 'a:1,'", r"\[kafka\] bootstrap: .*host:port"),
        ("[engine]\nurl = 'http://10.0.0.1:8000'", "local = false"),
    ],
)
def test_what_is_wrong_is_one_clear_line(text: str, says: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=says):
        load()


@pytest.mark.parametrize("name", ["MILLRACE_GATEWEY__PORT", "MILLRACE_NAMSPACE", "MILLRACE_GATEWAY__PROT"])
def test_a_misspelt_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="did you mean"):
        load()


def test_paths_in_the_file_begin_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("home = 'here'\nobjects = 's3://bucket/x'\n[rollout]\ntasks = 'tasks.jsonl'\n")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    settings = load(tmp_path / "millrace.toml")
    assert settings.home == tmp_path / "here"
    assert settings.objects == "s3://bucket/x"
    assert settings.rollout.tasks == str(tmp_path / "tasks.jsonl")
    assert load(tmp_path / "millrace.toml", {"home": "mine"}).home == other / "mine"


def test_flags_say_the_same_as_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "policy.eta": "1",
        "rollout.sampling": '{"temperature": 0.5}',
        "gateway.keys.me.key": "k",
        "namespace": "n",
    }
    by_flag = load(flags=flags)
    for name, value in variables(flags).items():
        monkeypatch.setenv(name, value)
    assert load() == by_flag
    assert by_flag.rollout.sampling == {"temperature": 0.5}
    with pytest.raises(ConfigError, match="not JSON"):
        load(flags={"rollout.sampling": "{"})


def test_a_misspelt_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean port"):
        load(flags={"gateway.prot": 1})


def test_a_named_file_must_exist() -> None:
    with pytest.raises(ConfigError, match="millrace init"):
        load(Path("other.toml"))


def test_secrets_are_masked_and_reach_the_client() -> None:
    write(
        """
        [kafka]
        bootstrap = "kafka.example.org:9092"
        local = false
        options = { "security.protocol" = "SASL_SSL", "sasl.username" = "me", "sasl.password" = "hunter2" }
        [gateway.keys.me]
        key = "hunter2"
        [telemetry.headers]
        authorization = "hunter2"
        """
    )
    settings = load()
    assert "hunter2" not in repr(settings) + str(mask_values(settings))
    assert mask_values(settings)["kafka"]["options"]["sasl.username"] == "me"
    assert settings.kafka.client_options()["sasl.password"] == "hunter2"


def test_no_key_is_the_workers_unless_it_is_named_so() -> None:
    keys = "[gateway.keys.a]\nkey = 'ka'\n[gateway.keys.b]\nkey = 'kb'\n"
    write("")
    assert load().rollout_key == ""
    write(keys)
    assert load().rollout_key == ""
    write(keys + "[rollout]\nkey = 'b'")
    assert load().rollout_key == "kb"
    write(keys + "[rollout]\nkey = 'c'")
    with pytest.raises(ConfigError, match="'c' is none of"):
        load()


def test_an_empty_key_is_none() -> None:
    write("[gateway]\nhost = '0.0.0.0'\n[gateway.keys.me]\nkey = ''")
    with pytest.raises(ConfigError, match=r"\[gateway.keys.me\] key: .*at least 1"):
        load()


@pytest.mark.parametrize(
    "lines",
    [
        '"sasl.password" = "hunter2"\n"ssl.ca.location" = "ca.pem"',
        'sasl.password = "hunter2"\nssl.ca.location = "ca.pem"',
    ],
)
def test_options_may_be_quoted_or_not_and_files_lie_beside_the_settings(lines: str, monkeypatch) -> None:
    write(f"[kafka.options]\n{lines}")
    settings = load(flags={"kafka.options.sasl.username": "me"})
    assert settings.kafka.client_options() == {
        "sasl.password": "hunter2",
        "ssl.ca.location": str(Path("ca.pem").absolute()),
        "sasl.username": "me",
    }
    monkeypatch.setenv("MILLRACE_KAFKA__OPTIONS", '{"sasl.password": "other"}')
    assert load().kafka.client_options()["sasl.password"] == "other"


@pytest.mark.parametrize(
    "name",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.assertion.private.key.passphrase",
    ],
)
def test_every_secret_option_is_masked(name: str) -> None:
    settings = load(flags={f"kafka.options.{name}": "hunter2"})
    assert "hunter2" not in repr(settings) + str(mask_values(settings))
    assert settings.kafka.client_options() == {name: "hunter2"}


def test_an_error_shows_no_value() -> None:
    write("[gateway.keys.me]\nkey = ['hunter2']")
    with pytest.raises(ConfigError) as caught:
        load()
    assert "hunter2" not in str(caught.value)


def test_a_public_listener_with_keys_is_allowed() -> None:
    write("[gateway]\nhost = '0.0.0.0'\n[gateway.keys.me]\nkey = '0123456789abcdef'")
    assert load().gateway.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)]
)
def test_what_counts_as_local(host: str, local: bool) -> None:
    assert is_local(host) is local


def test_every_key_is_described() -> None:
    missing = [
        f"{name}.{key}"
        for name, section in Settings.model_fields.items()
        for key, field in getattr(section.annotation, "model_fields", {}).items()
        if not field.description
    ]
    assert not missing


PLACES = [
    *([name] for name in Settings.model_fields),
    *(
        [name, key]
        for name, field in Settings.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    ),
]
"""every setting, and every section"""
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.datetimes())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@hypothesis_settings(max_examples=400)
@given(st.sampled_from(PLACES), VALUES)
def test_any_value_anywhere_is_taken_or_refused_in_a_line(place: list[str], value: object) -> None:
    for key in reversed(place):
        value = {key: value}
    assert isinstance(value, dict)
    with suppress(ConfigError):
        load(flags=value)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|there is no"):
        load(Path(name))


@pytest.mark.parametrize(
    ("kept", "refused"),
    [("close_hours = 6", False), ("close_hours = 48", True), ("raw = true\nclose_hours = 25", True)],
)
def test_the_archive_closes_before_topics_forget(kept: str, refused: bool) -> None:
    write(f"[topics]\nlong_hours = 48\n[archive]\nkeep = true\n{kept}\n")
    with pytest.raises(ConfigError, match=r"close_hours .* is not below") if refused else nullcontext():
        load()


@pytest.mark.parametrize(
    ("name", "highest"),
    [
        ("batch", bounds.BATCH),
        ("eta", bounds.ETA),
        ("group_size", bounds.GROUP_SIZE),
        ("lease_s", bounds.WAIT_MS // 1000),
    ],
)
def test_what_becomes_a_decision_is_within_the_bounds_of_one(name: str, highest: int) -> None:
    """Dispatch would answer it with a dead letter."""
    assert getattr(load(flags={f"policy.{name}": str(highest)}).policy, name) == highest
    with pytest.raises(ConfigError, match=rf"\[policy\] {name}: .*less than or equal to {highest}"):
        load(flags={f"policy.{name}": str(highest + 1)})


def test_processes_of_a_gateway_share_a_port_that_is_said() -> None:
    assert load(flags={"gateway.processes": 3, "gateway.port": 8901}).gateway.processes == 3
    for flags, said in (
        ({"gateway.processes": 2, "gateway.port": 0}, "share one port"),
        ({"gateway.processes": 0}, "greater than or equal to 1"),
        ({"gateway.processes": 65}, "less than or equal to 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(flags=flags)
