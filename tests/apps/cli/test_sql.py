"""`millrace sql` through the command line: an answer as table, CSV, JSON and Parquet, files of queries, and errors."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.apps.cli.sql import MAX_ROWS, AnswerFormat, form_of, prompt, values
from millrace.consumers.warehouse.client import open_asking
from millrace.consumers.warehouse.endpoint.serve import open_endpoint
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra import local_keys
from millrace.infra.config import Settings
from millrace.infra.errors import ConfigError
from millrace.infra.process.net import free_ports
from tests.support.asked_tables import fill


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sql")
    with TableDirectory(Settings(home=folder).warehouse_home) as directory:
        fill(directory)
    return folder


@pytest.fixture(autouse=True)
def _here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(home))
    monkeypatch.chdir(tmp_path)


def run(*words: str, stdin: str = "") -> tuple[int, str]:
    """Exit code and output."""
    found = CliRunner().invoke(app, ["sql", *words], input=stdin)
    return found.exit_code, found.output


def test_a_table() -> None:
    code, said = run("SELECT off, name FROM steps ORDER BY off LIMIT 2")
    assert (code, [line.split() for line in said.splitlines()]) == (0, [["off", "name"], ["0", "0"], ["1", "1"]])


def test_a_row_in_a_pipe_is_one_line_however_wide() -> None:
    """A value is as long as it likes, and may hold lines."""
    code, output = run("SELECT off, repeat('long ', 200) AS text, 'a\\nb' AS lines FROM steps ORDER BY off LIMIT 3")
    heading, *rows = output.splitlines()
    assert (code, heading.split()) == (0, ["off", "text", "lines"])
    assert [(row.split()[0], row.count("long "), row.split()[-1]) for row in rows] == [(n, 200, r"a\nb") for n in "012"]


def test_a_column_is_described_on_one_line() -> None:
    heading, *rows = run("DESCRIBE steps")[1].splitlines()
    assert heading.split()[:2] == ["name", "type"]
    assert {"off", "name"} <= {row.split()[0] for row in rows}
    assert all(row[0].isalpha() for row in rows)


def test_a_long_table_ends_and_says_so() -> None:
    code, said = run("SELECT off FROM steps ORDER BY off")
    assert code == 0
    assert f"the first {MAX_ROWS:,} rows" in said
    assert len(said.splitlines()) == MAX_ROWS + 2


@pytest.mark.parametrize(
    ("form", "said"), [("csv", '"a"\n1\n2\n'), ("jsonl", '{"a":1}\n{"a":2}\n'), ("json", '[\n{"a":1},\n{"a":2}\n]\n')]
)
def test_other_formats(form: str, said: str) -> None:
    assert run("SELECT arrayJoin([1, 2]) AS a", "--format", form) == (0, said)


@pytest.mark.slow
def test_who_asks_an_endpoint_loads_no_engine_and_no_library_of_http(tmp_path: Path) -> None:
    """It answers sooner than any of these is loaded."""
    heavy = (
        "chdb",
        "clickhouse_connect",
        "httpx",
        "numpy",
        "pyarrow",
        "pydantic_settings",
        "asyncio",
        "prompt_toolkit",
    )
    code = (
        "import sys\nfrom millrace.apps.cli.main import app\n"
        "app(['sql', 'SELECT 41 + 1 AS a'], standalone_mode=False)\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    config = Settings(home=tmp_path, warehouse={"port": free_ports(1)[0]})
    local_keys.make_keys(config)
    url = f"http://127.0.0.1:{config.warehouse.port}"
    with TableDirectory(config.warehouse_home, url=url) as directory:
        serving = open_endpoint(directory.handle, config)
        environment = {**os.environ, "MILLRACE_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
        )
        serving.close()
    assert (done.stdout.split(), done.stderr) == (["a", "42", "[]"], "")


def test_a_pipe_or_a_device_is_not_replaced_by_the_answer(tmp_path: Path) -> None:
    """Of root, `-o /dev/null` made it a file for the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    code, said = run("SELECT 1 AS a", "--format", "csv", "--out", "pipe")
    assert (code, "is a device or a pipe" in said) == (1, True)
    assert "Traceback" not in said
    assert [(path.name, path.is_fifo()) for path in tmp_path.iterdir()] == [("pipe", True)]


def test_an_answer_takes_the_place_of_another(tmp_path: Path) -> None:
    for number in (1, 2):
        assert run(f"SELECT {number} AS a", "--out", "answer.csv")[0] == 0
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("answer.csv", f'"a"\n{number}\n')]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_what_is_in_the_log_steers_no_terminal(home: Path, form: str) -> None:
    """On a terminal, by a process of its own: DEL, C1 and bidi too, which the engine escapes nowhere."""
    main, side = pty.openpty()
    query = "SELECT concat('a', char(27, 127), '\u202e\x9b', 'z') AS a"
    with subprocess.Popen(
        [str(Path(sys.executable).parent / "millrace"), "sql", "-f", form, query], stdout=side, stderr=side
    ) as process:
        os.close(side)
        said = b""
        with suppress(OSError):  # its end
            while piece := os.read(main, 4096):
                said += piece
    os.close(main)
    assert (process.returncode, "z" in said.decode()) == (0, True), said
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", said.decode())


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    assert run("SELECT off FROM steps", "-o", "out.parquet")[0] == 0
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 100_000
    assert run("SELECT 1 FROM nowhere", "-o", "out.csv")[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_a_file_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("-- two\nSELECT 1 AS a; SELECT 'x;y' AS b")
    assert run("q.sql", "-f", "jsonl") == (0, '{"a":1}\n{"b":"x;y"}\n')
    assert run("-f", "jsonl", stdin="SELECT 2 AS a") == (0, '{"a":2}\n')


def test_parameters() -> None:
    code, said = run("SELECT {a:String} AS a, {b:UInt8} AS b", "-p", "a=it's = \\t", "-p", "b=2", "-f", "jsonl")
    assert (code, json.loads(said)) == (0, {"a": "it's = \\t", "b": 2})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("SELECT 1 FROM nowhere",), "Tables: steps"),
        (("SELEC 1",), "Syntax error"),
        (("DROP TABLE steps",), "read-only"),
        ((";",), "there is no query"),
        (("SELECT 1", "-o", "out.txt"), "-o FILE needs"),
        (("SELECT 1; SELECT 2", "-o", "out.csv"), "takes the answer of one query"),
        (("SELECT 1", "-p", "a"), "write it as name=value"),
        (("nowhere.sql",), "cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(words: tuple[str, ...], said: str) -> None:
    code, output = run(*words)
    assert code == 1
    assert output.startswith("error: ")
    assert said in output
    assert len(output.splitlines()) == 1


def test_a_prompt_answers_until_its_end_and_keeps_what_was_asked_to_itself(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Settings(home=home)
    with (
        create_pipe_input() as keys,
        create_app_session(input=keys, output=DummyOutput()),
        open_asking(config) as asking,
    ):
        keys.send_text("SELECT\n41 + 1 AS a;\nSELECT 1 FROM nowhere;\nSELECT 'still' AS b;\nquit;\n")
        prompt(asking, config, {})
    said = capsys.readouterr()
    assert "42" in said.out
    assert "still" in said.out
    assert "error: Unknown table" in said.err
    kept = home / "sql_history"
    assert "41 + 1" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


def test_the_form_follows_option_and_name() -> None:
    assert form_of(None, None) is AnswerFormat.TABLE
    assert form_of(None, Path("a.CSV")) is AnswerFormat.CSV
    assert form_of(None, Path("a.ndjson")) is AnswerFormat.JSONL
    assert form_of(AnswerFormat.PARQUET, Path("a")) is AnswerFormat.PARQUET
    with pytest.raises(ConfigError):
        form_of(AnswerFormat.TABLE, Path("a.csv"))
    assert values(["a=b=c"]) == {"a": "b=c"}
