"""A server holds one namespace: what a second one meets, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.open_store import open_for_rows, take_server
from millrace.consumers.warehouse.store.owner import OWNER
from millrace.consumers.warehouse.store.server import Server
from millrace.consumers.warehouse.store.tables import LOG
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.stores import SERVERS, server_url
from tests.support.warehouse import differing, digests

pytestmark = pytest.mark.slow


class Died(BaseException):
    """kill -9."""


TTL = f"SELECT name, engine_full FROM system.tables WHERE database = '{LOG}' ORDER BY name"


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with server_url(request.param, tmp_path / "tables") as found:
        yield found


def settings(url: str, namespace: str, keep_days: int) -> Settings:
    return Settings(namespace=namespace, warehouse={"url": SecretStr(url), "keep_days": keep_days})


def test_a_second_namespace_is_refused_and_alters_nothing(url: str) -> None:
    with open_for_rows(settings(url, "one", 30)) as store:
        before = store.rows(TTL)
    with pytest.raises(WarehouseError, match=r"are those of namespace one, and a server holds one.* Give two a"):
        open_for_rows(settings(url, "two", 1))
    with open_for_rows(settings(url, "one", 30)) as store:
        assert store.rows(TTL) == before
        assert any("toIntervalHour(720)" in full for _, full in before)


def test_tables_of_a_former_release_belong_to_whose_rows_came_first(url: str) -> None:
    made = History(3, versions=1)
    with open_for_rows(settings(url, NS, 0)) as store:
        Ingest(made.bus, store, NS, lambda data: data).catch_up()
        store.run(f"DROP VIEW {OWNER}")
        store.run(f"TRUNCATE TABLE {LOG}.blocks")  # a rebuild that died had emptied it
    with pytest.raises(WarehouseError, match=f"are those of namespace {NS},.*`millrace warehouse take --from {NS}`"):
        open_for_rows(settings(url, "two", 0))
    with Server(url) as server:
        assert server.rows(f"SELECT namespace FROM {OWNER}") == [(NS,)]


def test_tables_with_rows_of_several_are_nobodys_until_one_takes_them(url: str) -> None:
    """Also where it dies in between; the process of another that lives on brings nothing in any more."""
    made = History(3, versions=1)
    other = MemoryBus(clock=lambda: 1_790_000_000)
    topic = made.topic("weights")
    other.ensure_topics([TopicSpec(topic.replace(NS, "other", 1), 1)])
    for record in made.bus.read(topic, 0):
        assert record.value is not None
        other.publisher().publish(Outgoing(topic.replace(NS, "other", 1), b"k", record.value, partition=0)).result()
    with open_for_rows(settings(url, NS, 0)) as store:
        Ingest(made.bus, store, NS, lambda data: data).catch_up()
        before = digests(store)
        store.run(f"DROP VIEW {OWNER}")
        running = Ingest(other, store, "other", lambda data: data)
        assert running.catch_up() > 0
        for name in (NS, "other", "third"):
            with pytest.raises(WarehouseError, match=r"rows of the namespaces .*, and a server holds one"):
                open_for_rows(settings(url, name, 0))
        with pytest.raises(WarehouseError, match=f"of {NS} too.* `millrace warehouse take --from other --from {NS}`"):
            take_server(settings(url, "third", 0), ["other"])

        def hook(passed: str) -> None:
            if passed == "rebuild.before_drop":
                raise Died

        former = faults.install(hook)
        try:
            with pytest.raises(Died):
                take_server(settings(url, NS, 0), ["other"])
        finally:
            faults.install(former)
        with pytest.raises(WarehouseError, match="`millrace warehouse take --from other` keeps those of"):
            open_for_rows(settings(url, NS, 0))
        assert take_server(settings(url, NS, 0), ["other"])["other"] > 0
        with pytest.raises(WarehouseError, match=f"are those of namespace {NS},"):
            running.catch_up()
        with open_for_rows(settings(url, NS, 0)):
            assert differing(before, digests(store)) == []


def test_a_directory_has_nothing_to_take(tmp_path: Path) -> None:
    with pytest.raises(WarehouseError, match=r"\[warehouse\] url is empty"):
        take_server(Settings(home=tmp_path, namespace=NS), ["other"])
