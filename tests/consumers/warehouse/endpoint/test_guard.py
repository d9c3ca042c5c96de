"""Nothing that reads beyond the tables, writes, or changes the engine gets past the guard, however it is written; what
people and stock clients ask does."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.warehouse.directory import Directory
from millrace.consumers.warehouse.endpoint import allowed
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.guard import Functions
from millrace.consumers.warehouse.endpoint.handles import handle
from millrace.consumers.warehouse.endpoint.reading import Asked, Limits, Reader, bounded
from tests.support.asked_tables import CANARY, ROWS, asked_tables

pytestmark = pytest.mark.slow


class World(NamedTuple):
    """An open warehouse, who reads it, and the folder that it lies in."""

    directory: Directory
    reader: Reader
    folder: Path

    def ask(self, sql: str, **params: str) -> str:
        """The answer as text. Raises QueryError."""
        return b"".join(self.reader.ask(Asked(sql, params)).pieces()).decode(errors="replace")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("asked")
    with asked_tables(folder) as directory:
        yield World(directory, Reader(directory.handle, Limits(seconds=20)), folder)


# What D2 of the prototype found, and what else an engine offers. {f}: a file with the canary, {o}: a file to write.
EXPRESSIONS = (
    "file('{f}')",
    "FILE('{f}')",
    "`file`('{f}')",
    "\"file\"('{f}')",
    "file/**/('{f}')",
    "file(concat('{f}', ''))",
    "arrayMap(file, ['{f}'])",
    "arrayMap(x -> file(x), ['{f}'])",
    "arrayFilter(x -> file(x) != '', ['{f}'])",
    "arraySort(x -> file(x), ['{f}', '{f}'])",
    "if(1, file('{f}'), '')",
    "(SELECT file('{f}'))",
    "tuple(file('{f}')).1",
    "max(file('{f}'))",
    "any(file('{f}')) OVER ()",
    "quantile(length(file('{f}')) / 100)(1)",
    "aiGenerate('x')",
    "AIGenerate('x')",
    "aiEmbed('x')",
    "dictGet('d', 'a', 1)",
    "joinGet('others.secret', 'a', 1)",
    "catboostEvaluate('{f}', 1)",
    "evalMLMethod(1, 2)",
    "getServerSetting('path')",
    "getMacro('x')",
    "getClientHTTPHeader('Authorization')",
    "filesystemAvailable()",
    "addressToLine(1)",
    "generateSerialID('x')",
    "zookeeperSessionUptime()",
    "hasColumnInTable('others', 'secret', 'a')",
    "showCertificate()",
    "sleep(3)",
    "sleepEachRow(3)",
    "logTrace('x')",
    "icebergTruncate(1, 2)",
    "formatRow('Protobuf', 1 AS a)",
    "formatRowNoNewline('Template', 1)",
    "polygonsIntersectionCartesian([[(0., 0.)]], [[(1., 1.)]])",
    "polygonAreaSpherical([[[(0., 0.)]]])",
)
SOURCES = (
    "file('{f}', 'LineAsString')",
    "`file`('{f}', LineAsString, 'a String')",
    "FILE('{f}', 'LineAsString')",
    "fileCluster('default', '{f}', 'LineAsString')",
    "url('file://{f}', 'LineAsString', 'a String')",
    "url('http://127.0.0.1:1/', 'LineAsString', 'a String')",
    "urlCluster('default', 'http://127.0.0.1:1/', 'LineAsString', 'a String')",
    "s3('http://127.0.0.1:1/b/x', 'LineAsString')",
    "gcs('http://127.0.0.1:1/b/x', 'LineAsString')",
    "remote('127.0.0.1', 'others', 'secret')",
    "remoteSecure('127.0.0.1', 'others', 'secret')",
    "cluster('default', 'others', 'secret')",
    "clusterAllReplicas('default', others.secret)",
    "mysql('127.0.0.1:1', 'a', 'b', 'c', 'd')",
    "postgresql('127.0.0.1:1', 'a', 'b', 'c', 'd')",
    "mongodb('127.0.0.1:1', 'a', 'b', 'c', 'd', 'e String')",
    "redis('127.0.0.1:1', 'k', 'k String')",
    "sqlite('{f}', 't')",
    "odbc('DSN=x', 'a', 'b')",
    "jdbc('jdbc:x', 'a', 'b')",
    "hdfs('hdfs://127.0.0.1:1/x', 'LineAsString', 'a String')",
    "azureBlobStorage('x', 'y', 'z')",
    "iceberg('http://127.0.0.1:1/b/x')",
    "icebergLocal('{f}')",
    "deltaLakeLocal('{f}')",
    "paimonLocal('{f}')",
    "executable('cat', 'LineAsString', 'a String', (SELECT 1))",
    "executable('../../bin/cat {f}', 'LineAsString', 'a String')",
    "input('a String')",
    # A structure holds expressions, in a text that may be put together.
    "values('a String, b String ALIAS file(\\'{f}\\')', ('x'))",
    "values(concat('a String, b String ALIAS fi', 'le(\\'{f}\\')'), ('x'))",
    "values('a UInt8 DEFAULT toUInt8(file(\\'{f}\\'))', (1))",
    "(SELECT b FROM values('a String, b String ALIAS file(\\'{f}\\')', ('x')))",
    "(SELECT b FROM generateRandom('a String, b String ALIAS file(\\'{f}\\')') LIMIT 1)",
    "null('a UInt8 DEFAULT toUInt8(file(\\'{f}\\'))')",
    "dictionary('d')",
    "merge('others', '.*')",
    "merge('system', 'processes')",
    "loop(others.secret)",
    "loop('others', 'secret')",
    "filesystem('{f}')",
    "mergeTreeIndex('others', 'secret')",
    "mergeTreeProjection('others', 'secret', 'p')",
    "viewIfPermitted(SELECT a FROM others.secret ELSE null('a String'))",
    "view(SELECT file('{f}') AS a)",
    "view(SELECT a FROM others.secret)",
    "eval('SELECT a FROM others.secret')",
    "viewExplain('EXPLAIN', '', (SELECT 1))",
    "fuzzQuery('SELECT 1')",
    "format(LineAsString, 'x')",
    "python('world')",
    "Python(world)",
    "Python('CANARY')",
    "arrowstream('{f}')",
    "prometheusQuery('others', 'secret', 'up', 1)",
    "bigquery('a', 'b', 'c')",
    "others.secret",
    "others.`secret`",
    "`others`.secret",
    "system.processes",
    "system.errors",
    "system.zookeeper",
    "system.query_log",
    "system.named_collections",
    "system.stack_trace",
    "system.user_directories",
    "system.server_settings",
    "system.`processes`",
    "`system`.processes",
    '"system"."processes"',
)
STATEMENTS = (
    "SELECT 1 INTO OUTFILE '{o}'",
    "SELECT 1 INTO OUTFILE '{o}' FORMAT CSV",
    "SELECT 1 INTO/**/OUTFILE '{o}' TRUNCATE",
    "SELECT 1 FORMAT CSV INTO OUTFILE '{o}'",
    "SELECT 1 FORMAT Template",
    "SELECT 1 FORMAT Protobuf",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "SELECT 1 FORMAT CSV SETTINGS max_threads = 1",
    "SELECT * FROM (SELECT 1 SETTINGS max_memory_usage = 0)",
    "SELECT 1 UNION ALL (SELECT 2 SETTINGS readonly = 0)",
    "WITH x AS (SELECT 1 SETTINGS max_execution_time = 0) SELECT * FROM x",
    "EXPLAIN SELECT 1 SETTINGS limit = 1",
    "SELECT file('{f}') SETTINGS limit = 1",
    "SET readonly = 0",
    "SET ROLE writer",
    "SET DEFAULT ROLE writer TO default",
    "USE others",
    "SYSTEM STOP MERGES",
    "SYSTEM SHUTDOWN",
    "SYSTEM FLUSH LOGS",
    "SYSTEM DROP MARK CACHE",
    "KILL QUERY WHERE 1",
    "KILL QUERY WHERE 1 ASYNC",
    "KILL MUTATION WHERE 1",
    "INSERT INTO millrace_log.places VALUES (1, '', [])",
    "INSERT INTO millrace_log.places SELECT 1, '', []",
    "INSERT INTO FUNCTION file('{o}', 'CSV') SELECT 1",
    "INSERT INTO TABLE FUNCTION null('a Int8') SELECT 1",
    "INSERT INTO millrace_log.places FROM INFILE '{f}' FORMAT CSV",
    "CREATE TABLE millrace.t (a Int8) ENGINE = Memory",
    "CREATE TABLE millrace.t (a String) ENGINE = File('LineAsString', '{f}')",
    "CREATE TEMPORARY TABLE t (a Int8)",
    "CREATE VIEW millrace.v AS SELECT file('{f}')",
    "CREATE DATABASE d",
    "CREATE FUNCTION f AS x -> file(x)",
    "CREATE USER u",
    "CREATE NAMED COLLECTION c AS a = 1",
    "CREATE DICTIONARY d (a String) PRIMARY KEY a SOURCE(FILE(PATH '{f}' FORMAT 'CSV')) LIFETIME(0) LAYOUT(FLAT())",
    "ALTER TABLE millrace_log.places DELETE WHERE 1",
    "ALTER TABLE millrace_log.places DROP PARTITION ID 'all'",
    "DELETE FROM millrace_log.places WHERE 1",
    "UPDATE millrace_log.places SET name = '' WHERE 1",
    "TRUNCATE TABLE millrace_log.places",
    "DROP TABLE millrace_log.places",
    "DROP DATABASE millrace_log SYNC",
    "DETACH TABLE millrace_log.places PERMANENTLY",
    "RENAME TABLE millrace_log.places TO millrace_log.p",
    "EXCHANGE TABLES millrace_log.places AND others.secret",
    "OPTIMIZE TABLE millrace_log.places FINAL",
    "BACKUP TABLE millrace_log.places TO File('{o}')",
    "RESTORE TABLE millrace_log.places FROM File('{f}')",
    "GRANT ALL ON *.* TO default",
    "REVOKE ALL ON *.* FROM default",
    "BEGIN TRANSACTION",
    "EXECUTE AS default SELECT 1",
    "CHECK TABLE others.secret",
    "WATCH millrace.steps",
    "EXTERNAL DDL FROM MySQL(x) CREATE TABLE t (a Int)",
    "SHOW PROCESSLIST",
    "SHOW GRANTS",
    "SHOW ACCESS",
    "SHOW USERS",
    "SHOW CREATE USER default",
    "SHOW CREATE TABLE others.secret",
    "DESCRIBE file('{f}', 'LineAsString')",
    "DESC TABLE url('http://127.0.0.1:1/')",
    "DESCRIBE others.secret",
    "DESCRIBE (SELECT file('{f}'))",
    "EXPLAIN SELECT * FROM file('{f}', 'LineAsString')",
    "EXPLAIN ESTIMATE SELECT * FROM others.secret",
    "EXPLAIN TABLE OVERRIDE mysql('127.0.0.1:1', 'a', 'b', 'c', 'd') COLUMNS (a Int)",
    "EXPLAIN CURRENT TRANSACTION",
    "EXPLAIN PIPELINE INSERT INTO millrace_log.places SELECT 1, '', []",
    "EXPLAIN AST INSERT INTO millrace_log.places SELECT 1, '', []",
    "EXPLAIN SYNTAX ALTER TABLE millrace_log.places DELETE WHERE 1",
    "SELECT 1 PARALLEL WITH SELECT 2",
    "SELECT 1; SELECT 2",
    "SELECT 1; SYSTEM STOP MERGES",
    "SELECT 1;; SET readonly = 0",
    "SELECT 1\0; SYSTEM STOP MERGES",
    "SELECT * APPLY file FROM (SELECT '{f}' AS a)",
    "SELECT * APPLY(file) FROM (SELECT '{f}' AS a)",
    "SELECT * APPLY(x -> file(x)) FROM (SELECT '{f}' AS a)",
    "SELECT COLUMNS('a') APPLY file FROM (SELECT '{f}' AS a)",
    "SELECT * REPLACE (file('{f}') AS a) FROM (SELECT '' AS a)",
    "SELECT 1 AS a ORDER BY a WITH FILL FROM length(file('{f}'))",
    "SELECT 1 LIMIT length(file('{f}'))",
    "SELECT 1 AS a ORDER BY a WITH FILL INTERPOLATE (a AS file('{f}'))",
    "SELECT count() OVER (ORDER BY file('{f}')) FROM numbers(1)",
    "SELECT 1 FROM numbers(1) WINDOW w AS (PARTITION BY file('{f}'))",
    "SELECT 1 FROM numbers(1) ARRAY JOIN [file('{f}')] AS a",
    "SELECT a FROM numbers(1) AS n JOIN others.secret AS s ON 1",
    "SELECT a FROM numbers(1) AS n, others.secret AS s",
    "SELECT 1 IN others.secret",
    "SELECT '{c}' IN VALUES('a String ALIAS file(\\'{f}\\')', ('x'))",
    "SELECT b FROM VALUES('a String, b String ALIAS file(\\'{f}\\')', ('x'))",
    "SELECT b FROM `values`('a String, b String ALIAS file(\\'{f}\\')', ('x'))",
    "SELECT '{c}' IN (SELECT a FROM others.secret)",
    "SELECT * FROM others.secret EXCEPT SELECT ''",
    "FROM others.secret SELECT a",
    "(SELECT a FROM others.secret)",
    "((SELECT a FROM others.secret) UNION ALL (SELECT a FROM others.secret))",
    "WITH RECURSIVE t AS (SELECT file('{f}') AS a UNION ALL SELECT a FROM t WHERE 0) SELECT a FROM t",
    "WITH file('{f}') AS a SELECT a",
    "WITH (x -> file(x)) AS g SELECT g('{f}')",
    "SELECT arrayMap(g, ['{f}']), 1 AS g, file",
    "SELECT 1 AS file, arrayMap(file, ['{f}'])",
    "",
    ";",
    "-- nothing",
    "DROP TABLE",
    "not sql at all",
)
ATTACKS = (
    *(f"SELECT {one}" for one in EXPRESSIONS),
    *(f"SELECT * FROM {one}" for one in SOURCES),
    *STATEMENTS,
)


def written(attack: str, folder: Path) -> str:
    """The attack with the files of `folder`."""
    return attack.replace("{f}", str(folder / "canary")).replace("{o}", str(folder / "out.csv")).replace("{c}", CANARY)


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


SERVED = (
    "SELECT 1",
    "select 1 as a format JSON",
    "SELECT count(), sum(off), uniqExact(name) FROM millrace_log.places",
    "SELECT * FROM steps ORDER BY off LIMIT 3",
    "SELECT s.off FROM millrace.steps AS s JOIN millrace_log.places AS p ON p.off = s.off LIMIT 1",
    "WITH few AS (SELECT * FROM steps LIMIT 5) SELECT count() FROM few WHERE off IN (SELECT off FROM steps)",
    "SELECT off, row_number() OVER (PARTITION BY off % 2 ORDER BY off) FROM steps LIMIT 3",
    "SELECT quantiles(0.5, 0.9)(off), sumIf(off, off > 3), avgOrNull(off), argMax(name, off) FROM steps",
    "SELECT arraySum(arrayMap(x -> x * 2, tokens)), arrayReduce('max', tokens) FROM millrace_log.places LIMIT 1",
    "SELECT groupArray(3)(name), groupUniqArrayArray(tokens), sumForEach(tokens) FROM millrace_log.places",
    "SELECT CASE WHEN off > 1 THEN 'a' ELSE 'b' END, multiIf(1, 2, 3), coalesce(NULL, 1) FROM steps LIMIT 1",
    "SELECT cast(1 AS Decimal(9, 2)), 1::String, toDate('2026-01-01') + INTERVAL 1 DAY, now64(3) > now()",
    "SELECT toStartOfHour(now()), dateDiff('day', today(), today()), formatDateTime(now(), '%Y')",
    "SELECT JSONExtractString('{\"a\": \"b\"}', 'a'), '{\"a\": 1}'::JSON.a",
    "SELECT substring('abc', 1, 2), position('b' IN 'abc'), trim(BOTH ' ' FROM ' a '), extract(YEAR FROM now()) > 1",
    "SELECT number FROM numbers(3) ORDER BY number WITH FILL FROM 0 TO 5 STEP 1",
    "SELECT * FROM generateSeries(1, 3)",
    "SELECT grouping(off) FROM steps GROUP BY GROUPING SETS ((off), ()) LIMIT 1",
    "SELECT off % 3 AS k, count() FROM steps GROUP BY k WITH TOTALS HAVING count() > 1 ORDER BY k LIMIT 1 BY k",
    "SELECT a FROM (SELECT 1 AS a) ARRAY JOIN [1, 2] AS b",
    "SELECT * EXCEPT (tokens) FROM millrace_log.places LIMIT 1",
    "SELECT * APPLY(toString) FROM steps LIMIT 1",
    "SELECT COLUMNS('o') APPLY max FROM steps",
    "SELECT 1 UNION ALL SELECT 2 EXCEPT SELECT 3",
    "SELECT exists(SELECT 1), 1 IN (1, 2), NOT 1, NULL IS NULL, 'a' LIKE 'b', 'a' ILIKE 'A'",
    "SELECT ';' AS a, '-- no' AS b, 'file(1)' AS c, 'SETTINGS' AS d",
    "SELECT s.a.file FROM (SELECT CAST(tuple('x'), 'Tuple(file String)') AS a) AS s",
    "SHOW TABLES",
    "SHOW TABLES FROM millrace_log LIKE 'p%'",
    "SHOW DATABASES",
    "SHOW CREATE TABLE millrace_log.places",
    "SHOW CREATE VIEW steps",
    "SHOW COLUMNS FROM steps",
    "DESCRIBE TABLE steps",
    "DESCRIBE (SELECT 1 AS a)",
    "EXISTS TABLE steps",
    "EXPLAIN SELECT * FROM steps",
    "EXPLAIN indexes = 1 SELECT * FROM steps WHERE off = 1",
    "EXPLAIN PIPELINE SELECT 1",
    "EXPLAIN ESTIMATE SELECT * FROM millrace_log.places",
    "SELECT version(), timezone(), currentUser(), currentDatabase(), hostName(), uptime() >= 0",
    # what clickhouse-connect, @clickhouse/client, Grafana and DBeaver ask by themselves
    "SELECT name, value, readonly FROM system.settings LIMIT 10000",
    "SELECT name, engine_full FROM system.databases",
    "SELECT name, database, engine, comment FROM system.tables WHERE database = 'millrace'",
    "SELECT name, type, comment FROM system.columns WHERE database = 'millrace' AND table = 'steps'",
    "SELECT name FROM system.functions UNION ALL SELECT name FROM system.data_type_families",
    "SELECT timezone(), version(), 1 AS check",
    "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'millrace'",
    "SELECT toUnixTimestamp(toStartOfInterval(now(), INTERVAL 60 SECOND)) * 1000 AS t, count() FROM steps GROUP BY t",
    "/* grafana dashboard=x, user=1 */ SELECT 1",
)


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
    *allowed.CATEGORIES,
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
    assert set(functions.known.values()) <= CATEGORIES
    outside = {name for name in functions.known if SUSPICIOUS.search(name) and functions.allows(name)}
    assert outside <= REVIEWED
    assert not functions.allows("file")
    assert functions.allows("sumIf")
    assert functions.allows("uniqExactArrayOrNullIf")
    assert not functions.allows("fileIf")


def test_no_allowed_name_is_also_a_source_that_is_not_allowed(world: World) -> None:
    with handle(world.directory.handle) as engine:
        functions = Functions.of(engine)
        sources = engine.text("SELECT name FROM system.table_functions").split()
    both = {one for one in sources if functions.allows(one) and one.lower() not in allowed.TABLE_FUNCTIONS}
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
        world.reader._bind(engine, bounded({}, Limits()))
        with pytest.raises(QueryError) as refused:
            engine.text(sql)
    assert refused.value.name in ("ACCESS_DENIED", "READONLY")
