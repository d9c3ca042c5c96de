"""The same question in the directory, through a running endpoint and of a server by URL: the same answers and the same
errors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.warehouse.client import Asking, InDirectory, OverHttp, open_asking
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.query import QueryLimits
from millrace.consumers.warehouse.endpoint.serve import open_endpoint
from millrace.consumers.warehouse.store.server import Server
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError
from millrace.infra.local_keys import warehouse_key
from millrace.infra.process.net import free_ports
from tests.support.asked_tables import ROWS, asked_tables, fill
from tests.support.stores import SERVERS, server_url

pytestmark = pytest.mark.slow

PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
VALUES = PLAIN | st.integers(-(1 << 60), 1 << 60) | st.lists(PLAIN, max_size=4)


@pytest.fixture(scope="module", params=["directory", "endpoint", *SERVERS])
def asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    folder = tmp_path_factory.mktemp("asking")
    if request.param in ("over_http", "server"):
        with server_url(request.param, folder) as url:
            with Server(url) as server:
                server.prepare()
                fill(server)
            with open_asking(Settings(home=folder / "home", warehouse={"url": url})) as found:
                yield found
        return
    with asked_tables(folder) as directory:
        if request.param == "directory":
            with InDirectory(directory, QueryLimits()) as found:
                yield found
            return
        config = Settings(home=folder / "home", warehouse={"port": free_ports(1)[0]})
        serving = open_endpoint(directory.handle, config)
        with OverHttp(serving.url, "millrace", warehouse_key(config), 60, {}) as found:
            yield found
        serving.close()


def kind(value: Any) -> str:
    """The type of a parameter."""
    return (
        "Array(String)"
        if isinstance(value, Sequence) and not isinstance(value, str)
        else ("String" if isinstance(value, str) else "Int64")
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
def test_a_parameter_comes_back_as_it_went(asking: Asking, value: Any) -> None:
    found = asking.table(f"SELECT {{a:{kind(value)}}} AS a", {"a": value})
    assert found.to_pylist() == [{"a": value}]


def test_answers_come_in_any_format(asking: Asking) -> None:
    assert b"".join(asking.ask("SELECT 1 AS a", "CSVWithNames")) == b'"a"\n1\n'
    assert asking.table("SELECT off FROM steps").num_rows == ROWS
    assert asking.table("SELECT off FROM steps WHERE 0").column_names == ["off"]


def test_an_unknown_table_is_answered_with_those_that_there_are(asking: Asking) -> None:
    with pytest.raises(QueryError, match="Tables: steps; those of the log as it is are in millrace_log"):
        list(asking.ask("SELECT 1 FROM nowhere"))


def test_errors_are_what_the_engine_said(asking: Asking) -> None:
    with pytest.raises(QueryError) as refused:
        list(asking.ask("SELEC 1"))
    assert refused.value.said == "Syntax error: failed at position 7 (1): 1."
    with pytest.raises(QueryError, match="only"):
        list(asking.ask("DROP TABLE steps"))


def test_a_warehouse_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(WarehouseError, match="there is no warehouse"):
        open_asking(Settings(home=tmp_path))


def test_an_endpoint_that_went_away_is_said() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with OverHttp(url, "millrace", "k", 5, {}) as gone, pytest.raises(WarehouseError, match="does not answer"):
        list(gone.ask("SELECT 1"))
