"""Whom the engine knows: one user whose two roles are the writer, which may do everything, and the reader.

A reader's handle takes the role `READER` before it runs anything. Invariant: what the engine's own privileges refuse a
reader (inserts, new tables, `file()`, `url()` and `remote()` as tables) is refused even where the guard of the endpoint
is mistaken. They are the second wall, never the only one: the embedded engine does not ask them of everything."""

from __future__ import annotations

READER = "reader"
WRITER = "writer"
READABLE = ("millrace", "millrace_log", "system", "information_schema", "INFORMATION_SCHEMA")
"""databases that a reader may select from"""


def users() -> str:
    """The engine's users file (`users_config` of its configuration)."""
    reads = "".join(f"<query>GRANT SELECT, SHOW ON {database}.*</query>" for database in READABLE)
    return (
        "<clickhouse><profiles><default/></profiles><quotas><default/></quotas><roles>"
        f"<{WRITER}><grants><query>GRANT ALL ON *.* WITH GRANT OPTION</query></grants></{WRITER}>"
        f"<{READER}><grants>{reads}</grants></{READER}></roles>"
        "<users><default><password></password><networks><ip>::/0</ip></networks>"
        "<profile>default</profile><quota>default</quota><grants>"
        f"<query>GRANT {WRITER}</query><query>GRANT {READER}</query></grants></default></users></clickhouse>"
    )
