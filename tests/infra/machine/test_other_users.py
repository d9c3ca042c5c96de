"""What another user of the machine gets of a deployment: nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.infra.config import load, variables
from millrace.infra.connect import connect
from millrace.infra.local_keys import broker_key, engine_key, make_home, make_keys, workers_key
from millrace.infra.log.base import Outgoing
from millrace.infra.machine import deployment as under_test
from millrace.infra.machine.deployment import Deployment
from millrace.infra.machine.programs import programs
from millrace.infra.process.net import LOCALHOST, free_ports

NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
STRANGER = """
import sys
from pathlib import Path
from confluent_kafka import Consumer, KafkaException
home, bootstrap = Path(sys.argv[1]), sys.argv[2]
try:
    print("HOME", [str(path) for path in home.iterdir()])
except PermissionError:
    print("home is closed")
try:
    print("KEY", (home / "keys" / "broker").read_text())
except PermissionError:
    print("key is closed")
reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "stranger", "log_level": 0})
try:
    print("TOPICS", list(reader.list_topics(timeout=5).topics))
except KafkaException:
    print("broker is closed")
"""


def test_home_is_closed_also_one_that_was_open(tmp_path: Path) -> None:
    home, mask = tmp_path / "home", os.umask(0o022)
    try:
        home.mkdir(mode=0o755)
        make_home(home)
        (home / "later").write_text("x")
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "later").stat().st_mode) == 0o600
    finally:
        os.umask(mask)


def test_keys_are_made_once_and_what_the_settings_say_goes_first(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        made = load(flags={"home": str(tmp_path / "home")})
        assert (engine_key(made), broker_key(made)) == ("", "")
        make_keys(made)
        keys = engine_key(made), broker_key(made)
        assert all(len(key) == 64 for key in keys)
        assert keys[0] != keys[1]
        make_keys(made)
        assert keys == (engine_key(made), broker_key(made))
        files = sorted((tmp_path / "home" / "keys").iterdir())
        assert [(path.name, stat.S_IMODE(path.stat().st_mode)) for path in files] == [
            ("broker", 0o600),
            ("engine", 0o600),
            ("warehouse", 0o600),
            ("workers", 0o600),
        ]
        assert workers_key(made) == files[-1].read_text() not in keys
        given = {"key": "a word of one's own", "tenant": "local"}
        beside = {"home": str(tmp_path / "home"), "gateway.keys": {"me": given}}
        assert workers_key(load(flags=beside)) == workers_key(made), "no key is the workers' unless it is named so"
        assert workers_key(load(flags={**beside, "rollout.key": "me"})) == given["key"]
        mine = load(flags={"home": str(tmp_path / "home"), "engine.key": "k", "kafka.options": {"sasl.username": "u"}})
        assert (engine_key(mine), broker_key(mine)) == ("k", "")
        beside = {"home": str(tmp_path / "two"), "kafka.local": False, "kafka.key_file": str(files[0])}
        assert broker_key(load(flags=beside)) == keys[1]
        assert broker_key(load(flags={**beside, "kafka.key_file": ""})) == ""
    finally:
        os.umask(mask)


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_nobody_reads_neither_home_nor_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka, gateway, engine, warehouse = free_ports(4)
    flags = {
        "home": str(tmp_path / "home"),
        "kafka.bootstrap": f"{LOCALHOST}:{kafka}",
        "gateway.port": str(gateway),
        "engine.url": f"http://{LOCALHOST}:{engine}",
        "warehouse.port": str(warehouse),
    }
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    made, mask = load(flags=flags), os.umask(0o022)
    monkeypatch.setattr(under_test, "programs", lambda s, e: [p for p in programs(s, e) if p.name == "broker"])
    deployment = Deployment(made, variables(flags))
    try:
        deployment.up()
        with connect(made) as bus:
            bus.publisher().publish(Outgoing(f"{made.namespace}.raw", b"k", b"said by alice", {}, 0)).result(60)
        command = [sys.executable, "-c", STRANGER, str(made.home), made.kafka.bootstrap]
        said = subprocess.run([*NOBODY, *command], capture_output=True, text=True, timeout=120, cwd="/")
        assert said.stdout.splitlines() == ["home is closed", "key is closed", "broker is closed"], said.stderr
        for path in made.home.rglob("*"):
            assert not stat.S_IMODE(path.lstat().st_mode) & 0o007 or path.is_symlink(), path
    finally:
        deployment.down()
        os.umask(mask)
