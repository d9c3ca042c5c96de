"""What the engine says of bytes that are no text is an error like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.handles import Handle
from millrace.consumers.warehouse.store.directory import TableDirectory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sql", ["SELECT throwIf(1, unhex('41BD42'))", "SELECT toUInt8(unhex('BDBD'))"])
def test_an_error_may_quote_bytes_that_are_no_text(sql: str, tmp_path: Path) -> None:
    with TableDirectory(tmp_path, memory_mb=512) as directory, directory.handle() as connection:
        handle = Handle(connection)
        with pytest.raises(QueryError, match="�"):
            handle.text(sql)
        with pytest.raises(QueryError, match="�"):
            list(handle.pieces(sql, "TSV", {}))
