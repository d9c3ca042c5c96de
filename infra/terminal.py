"""Text for a terminal: the one console through which all output goes, and the one door for answers that programs read.

Agents, tools and users choose much of what is in the log, and a terminal obeys some characters: with them a task's name
could set the clipboard, retitle the window or hide a line.

Invariants: of what is printed, only what rich itself makes (colours, cursor moves of live displays) is a control
sequence; control characters (C0 but for newline and tab, DEL, C1) and characters that change the direction of text show
as pictures, and so do halves of surrogate pairs, which no UTF-8 holds. JSON has escapes in their place, which is the
same JSON; other data stays as it is, but for a terminal, which is shown pictures there too. Lines end at the
width of a terminal alone: into a pipe or a file every value goes whole, on one line, however wide a table becomes, and
each row of a `RowTable`, a break in a value written as \\n. No variable of the environment makes a terminal of them."""

from __future__ import annotations

import codecs
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import IO, Any, Literal

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """The text with a picture (␛, ␇, ...) in the place of each character that a terminal would obey."""
    return _CONTROL.sub(_picture, text)


def escape_json(text: str) -> str:
    """JSON text with an escape in the place of each such character; its value is the same."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def put(text: str) -> None:
    """Print text: as it is, but on a terminal without control characters."""
    print(clean(text) if sys.stdout.isatty() else text)


def put_json(value: object) -> None:
    """Print a value as JSON, indented, in ASCII. What is no number, or infinite, is null: JSON has no word for it."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def finite(value: object) -> Any:
    """A value as JSON takes it: what is no number, or infinite, is null; a tuple is a list."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {finite(key): finite(part) for key, part in value.items()}
        case list() | tuple():
            return [finite(part) for part in value]
    return value


def put_bytes(pieces: Iterable[bytes], *, as_json: bool = False) -> None:
    """Write UTF-8: as it is, but on a terminal without control characters, which are escaped where it is JSON."""
    sys.stdout.flush()
    out = _decoded_pieces(pieces, escape_json if as_json else clean) if sys.stdout.isatty() else pieces
    for piece in out:
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _decoded_pieces(pieces: Iterable[bytes], change: Callable[[str], str]) -> Iterable[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield change(decoder.decode(piece)).encode()
    yield change(decoder.decode(b"", final=True)).encode()


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


PIPE_COLUMNS = 1 << 30
"""columns of what is no terminal: more than any line needs"""


class Terminal(Console):
    """A console that prints no control character of its content. Its lines end at `width` where one is given, else at
    that of the terminal, else nowhere: what fills its width (a rule, a panel, an expanded table) is for terminals."""

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        stderr: bool = False,
        width: int | None = None,
        force_terminal: bool | None = None,
        color_system: Literal["auto", "truecolor"] = "auto",
        no_color: bool | None = None,
        highlight: bool = True,
        record: bool = False,
    ) -> None:
        self._forced = force_terminal
        super().__init__(
            file=file,
            stderr=stderr,
            width=width,
            force_terminal=force_terminal,
            color_system=color_system,
            no_color=no_color,
            highlight=highlight,
            record=record,
        )
        self._has_width = width is not None

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks at it."""
        return self.file.isatty() if self._forced is None else self._forced

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and rows."""
        if self._has_width or self.is_terminal:
            return super().size
        return ConsoleDimensions(PIPE_COLUMNS, super().size.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size
        self._has_width = True

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything that can be printed; nested ones come through here, too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


class RowTable(Table):
    """A table of texts, each row of which is one line where no terminal shows it."""

    def add_column(self, header: RenderableType = "", *more: Any, **how: Any) -> None:
        """One more column."""
        super().add_column(TableCell(header), *more, **how)

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """One more row."""
        super().add_row(*(cell if cell is None else TableCell(cell) for cell in cells), **how)


class TableCell:
    """What stands in a cell: text in one line where no terminal shows it; anything else as it is."""

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        yield self._at(console)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._at(console))

    def _at(self, console: Console) -> RenderableType:
        content = self.content
        if console.is_terminal or not isinstance(content, str | Text):
            return content
        if isinstance(content, str):
            return content.replace("\n", "\\n")
        line = content.copy()
        line.plain = content.plain.replace("\n", "\\n")
        return line


class CleanFormatter(logging.Formatter):
    """Log lines without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the lines of an exception below it."""
        return clean(super().format(record))
