"""A server holds one namespace: what a second one meets, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from millrace.consumers.warehouse.ingest import Ingest
from millrace.consumers.warehouse.opened import open_for_rows
from millrace.consumers.warehouse.owner import OWNER
from millrace.consumers.warehouse.server import Server
from millrace.consumers.warehouse.tables import LOG
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.stores import SERVERS, server_url

pytestmark = pytest.mark.slow

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
    with pytest.raises(WarehouseError, match=f"are those of namespace {NS},"):
        open_for_rows(settings(url, "two", 0))
    with Server(url) as server:
        assert server.rows(f"SELECT namespace FROM {OWNER}") == [(NS,)]
