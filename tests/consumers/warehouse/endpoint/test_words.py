"""The words of a canonical text, and the statements of a text."""

from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.warehouse.endpoint.words import identifier, identifiers, literal, paths, words
from millrace.consumers.warehouse.statements import split

NAMES = st.text(min_size=1, max_size=12).filter(lambda text: "\0" not in text)


def test_calls_members_and_strings_are_told_apart() -> None:
    found = words("SELECT f(a), t.file, 'g(x)', `h i`(1), {p:Array(String)} FROM system.tables AS x APPLY file")
    assert [word.text for word in found if word.is_called] == ["f", "h i"]
    assert [word.text for word in found if word.member] == ["file", "tables"]
    assert found[-1].text == "file"
    assert not found[-1].member
    assert "g" not in [word.text for word in found]


def test_names_with_dots_are_found_whole() -> None:
    assert paths("SELECT a.b.c, `system`.`zoo keeper`, x FROM y") == [("a", "b", "c"), ("system", "zoo keeper")]


def test_parameters_for_names_are_found() -> None:
    assert identifiers("SELECT {a:Identifier}, {b: Identifier}, '{c:Identifier}', {d:String}") == ["a", "b"]


@given(NAMES)
def test_a_quoted_name_is_read_back(name: str) -> None:
    found = words(f"SELECT {identifier(name)}(1)")
    assert [word.text for word in found if word.is_called] == [name]


@given(NAMES, NAMES)
def test_no_literal_hides_a_call(before: str, after: str) -> None:
    found = words(f"SELECT {literal(before)}, evil(1), {literal(after)}, evil(2)")
    assert [word.text for word in found if word.is_called] == ["evil", "evil"]


def test_semicolons_end_statements_outside_strings_and_comments_alone() -> None:
    text = "select ';' as a; -- no; end\n select `b;` /* ; */ ;; # x;\n select $t$;$t$; select 2"
    done, rest = split(text)
    assert done == ["select ';' as a", "-- no; end\n select `b;` /* ; */", "# x;\n select $t$;$t$"]
    assert rest == "select 2"


def test_comments_alone_are_no_statement() -> None:
    assert split("-- nothing;\n/* at all */ ;") == ([], "")
    assert split("select 'open") == ([], "select 'open")


@given(st.lists(st.sampled_from(["select 1", "select 'a;b'", "select `c;d`", "/*;*/ select 3"]), max_size=5))
def test_joined_statements_come_apart_again(statements: list[str]) -> None:
    assert split("".join(f"{one};\n" for one in statements)) == (statements, "")
