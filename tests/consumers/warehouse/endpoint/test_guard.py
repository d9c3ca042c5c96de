"""Nothing that reads beyond the tables, writes, or changes the engine gets past the guard, however it is written, also
without the engine's own privileges; what people and stock clients ask does."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.warehouse.endpoint import permissions
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.guard import Functions
from millrace.consumers.warehouse.endpoint.handles import handle
from millrace.consumers.warehouse.endpoint.query import Query, QueryLimits, QueryRunner, engine_settings
from millrace.consumers.warehouse.store.directory import TableDirectory
from tests.consumers.warehouse.attacks import ATTACKS, SERVED, written
from tests.support.asked_tables import CANARY, ROWS, asked_tables

pytestmark = pytest.mark.slow


class World(NamedTuple):
    """An open warehouse, who reads it, and the folder that it lies in."""

    directory: TableDirectory
    reader: QueryRunner
    folder: Path

    def ask(self, sql: str, **params: str) -> str:
        """The answer as text. Raises QueryError."""
        return b"".join(self.reader.ask(Query(sql, params)).pieces()).decode(errors="replace")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("asked")
    with asked_tables(folder) as directory:
        reader = QueryRunner(directory.handle, QueryLimits(seconds=20))
        reader._role = False  # the guard alone: a server by URL has no second wall
        yield World(directory, reader, folder)


def unharmed(world: World) -> None:
    """Nothing was written or stopped, and nothing of the engine differs for those who come later."""
    assert sorted(path.name for path in world.folder.iterdir()) == ["canary", "tables"]
    assert world.directory.rows("SELECT count() FROM millrace_log.places") == [(ROWS,)]
    found = world.directory.rows(
        "SELECT count() FROM system.tables WHERE database IN ('millrace', 'millrace_log', 'others')"
    )
    assert found == [(3,)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(world: World, attack: str) -> None:
    with pytest.raises(QueryError) as refused:
        world.ask(written(attack, world.folder))
    assert refused.value.said
    assert CANARY not in refused.value.said or CANARY in attack.replace("{c}", CANARY)


def test_after_all_attacks_nothing_is_harmed_and_merges_run(world: World) -> None:
    for attack in ATTACKS:
        with suppress(QueryError):
            world.ask(written(attack, world.folder))
    unharmed(world)
    world.directory.run("CREATE TABLE others.merged (a Int8) ENGINE = MergeTree ORDER BY a")
    world.directory.run("INSERT INTO others.merged VALUES (1)")
    world.directory.run("INSERT INTO others.merged VALUES (2)")
    world.directory.run("OPTIMIZE TABLE others.merged FINAL")  # raises where merges are stopped
    count = world.directory.rows("SELECT count() FROM system.parts WHERE table = 'merged' AND active")
    world.directory.run("DROP TABLE others.merged SYNC")
    assert count == [(1,)]


WRAPS = (
    "{}",
    "SELECT * FROM ({})",
    "WITH cte AS ({}) SELECT * FROM cte",
    "SELECT * FROM numbers(1) WHERE toString(number) IN ({})",
    "SELECT * FROM view({})",
    "SELECT exists({})",
    "SELECT ({}) AS scalar",
    "SELECT 1 UNION ALL {}",
    "EXPLAIN {}",
    "EXPLAIN PIPELINE {}",
    "DESCRIBE ({})",
    "SELECT a FROM ({}) AS x JOIN numbers(1) AS y ON 1",
    "SELECT arrayMap(x -> ({}), [1])",
    "({})",
    "{} LIMIT 1",
    "{};",
    "{} -- end",
    "/* start */ {} FORMAT JSON",
    "SELECT 1 INTERSECT {}",
    "EXPLAIN AST {}",
    "EXPLAIN SYNTAX {}",
    "EXPLAIN QUERY TREE {}",
)
SPACES = (" ", "\n", "\t", " /* ; */ ", " -- '\n", " /* ' */ ", "\u00a0", " # x\n")
CORE = tuple(one for one in ATTACKS if one.startswith("SELECT ") and ";" not in one)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    attack=st.sampled_from(CORE),
    wraps=st.lists(st.sampled_from(WRAPS), max_size=4),
    space=st.sampled_from(SPACES),
    case=st.sampled_from([str, str.lower, str.upper]),
)
def test_an_attack_is_refused_however_it_is_wrapped(
    world: World, attack: str, wraps: list[str], space: str, case: type[str]
) -> None:
    text = attack
    for wrap in wraps:
        text = wrap.replace("{}", text)
    parts = re.split(r"('[^']*'|\"[^\"]*\"|`[^`]*`)", text)
    text = "".join(part if at % 2 else case(part.replace(" ", space)) for at, part in enumerate(parts))
    asked = written(re.sub(r"\{([FOCfoc])\}", lambda found: found[0].lower(), text), world.folder)
    with pytest.raises(QueryError) as refused:
        world.ask(asked)
    assert CANARY not in refused.value.said or CANARY in asked, "a syntax error repeats the query"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.from_regex(r"(SELECT|WITH|FROM|file|\(|\)|'|`|;|,| |1|x)*", fullmatch=True))
def test_noise_is_an_answer_or_an_error_of_the_engine(world: World, text: str) -> None:
    with suppress(QueryError):
        assert CANARY not in world.ask(text)


@pytest.mark.parametrize(
    ("sql", "params"),
    [
        ("SELECT * FROM {a:Identifier}.{b:Identifier}", {"a": "others", "b": "secret"}),
        ("SELECT * FROM {a:Identifier}.{b:Identifier}", {"a": "system", "b": "processes"}),
        ("SELECT * FROM {a:Identifier}", {"a": "others.secret"}),
        ("SELECT * FROM {a:Identifier}", {"a": "`others`.`secret`"}),
        ("SELECT arrayMap({a:Identifier}, ['x'])", {"a": "file"}),
        ("SELECT {a:Identifier}('x')", {"a": "file"}),
        ("SELECT * FROM {a:Identifier}", {}),
        ("SELECT {a:Int32}", {"a": "1; SYSTEM STOP MERGES"}),
        ("SELECT {a:String}", {}),
    ],
)
def test_parameters_are_no_way_around(world: World, sql: str, params: dict[str, str]) -> None:
    with pytest.raises(QueryError):
        world.ask(sql, **params)


@pytest.mark.parametrize("sql", SERVED)
def test_what_people_ask_is_served(world: World, sql: str) -> None:
    world.ask(sql)


def test_values_of_parameters_are_plain_text(world: World) -> None:
    assert world.ask("SELECT {a:String}, {b:Array(UInt8)}", a="file", b="[1,2]") == "file\t[1,2]\n"
    assert world.ask("SELECT count() FROM {t:Identifier}", t="steps") == f"{ROWS}\n"


SUSPICIOUS = re.compile(
    r"file|http|remote|^ai|exec|disk|keeper|python|server|llm|macro|dict|model|catboost|sleep|address|env|config|shell"
    r"|fetch|download|cluster|zoo|serial|secret|password|introspect|trace|process|socket|dns|host|thread",
    re.IGNORECASE,
)
REVIEWED = {"hostname", "servertimezone", "isipaddressinrange", "timeseriespredictlineartogrid"}
"""they say or compute something of this machine that is no secret"""
CATEGORIES = {
    *permissions.CATEGORIES,
    *(
        "AI",
        "Dictionary",
        "Embedded Dictionary",
        "Encryption",
        "Geo Polygon",
        "Internal",
        "Introspection",
        "Machine Learning",
        "Other",
    ),
    *("Time Series", "", "named"),
}
"""those that were looked at: a release of the engine with another one fails here, and somebody decides"""


def test_every_function_of_this_engine_was_looked_at(world: World) -> None:
    with handle(world.directory.handle) as engine:
        functions = Functions.of(engine)
    assert set(functions.categories.values()) <= CATEGORIES
    outside = {name for name in functions.categories if SUSPICIOUS.search(name) and functions.allows(name)}
    assert outside <= REVIEWED
    assert not functions.allows("file")
    assert functions.allows("sumIf")
    assert functions.allows("uniqExactArrayOrNullIf")
    assert not functions.allows("fileIf")


def test_no_allowed_name_is_also_a_source_that_is_not_allowed(world: World) -> None:
    with handle(world.directory.handle) as engine:
        functions = Functions.of(engine)
        sources = engine.text("SELECT name FROM system.table_functions").split()
    both = {one for one in sources if functions.allows(one) and one.lower() not in permissions.TABLE_FUNCTIONS}
    assert both <= {"format"}, "`format` is a function of strings, too; as a source it reads its own text alone"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM file('/etc/hostname', 'LineAsString')",
        "SELECT * FROM url('http://127.0.0.1:1/', 'LineAsString', 'a String')",
        "SELECT * FROM others.secret",
        "INSERT INTO millrace_log.places VALUES (1, '', [])",
        "CREATE TABLE millrace.t (a Int8) ENGINE = Memory",
        "DROP TABLE millrace_log.places",
        "SET max_memory_usage = 0",
        "SET readonly = 0",
    ],
)
def test_the_engines_own_privileges_refuse_what_a_mistaken_guard_lets_pass(world: World, sql: str) -> None:
    with handle(world.directory.handle) as engine:
        QueryRunner(world.directory.handle, QueryLimits())._bind(engine, engine_settings({}, QueryLimits()))
        with pytest.raises(QueryError) as refused:
            engine.text(sql)
    assert refused.value.name in ("ACCESS_DENIED", "READONLY")
