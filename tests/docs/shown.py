"""The picture of docs/reading.md: what `millrace trajectory` shows of a small whole world. `python -m
tests.docs.shown` writes it; a test compares."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.terminal_theme import MONOKAI

from millrace.consumers.tell.command import account_of
from millrace.consumers.tell.topics import PolicyTopics
from millrace.consumers.tell.trees import account_tree
from millrace.infra.log.history.rows import as_stored
from millrace.infra.terminal import Terminal
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

FILE = Path(__file__).parents[2] / "docs" / "trajectory.svg"
WIDTH = 132


def world() -> Conversations:
    """The world that the page's examples are about."""
    return Conversations(5, texts=("Is it raining?", "It rains in Oslo.", "Look again, please."))


def withheld(source: Conversations) -> str:
    """A trajectory that trained and of which a reply was withheld."""
    return str(source.rows("trajectories")[6][1]["id"])


def picture() -> str:
    """The SVG. It loads nothing: a browser takes the monospaced font that it has."""
    source = world()
    told = account_of(PolicyTopics(source.bus, NS, POLICY, as_stored), withheld(source))
    console = Terminal(file=StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(account_tree(told), highlight=False)
    svg = console.export_svg(title="millrace trajectory ID", theme=MONOKAI, unique_id="trajectory")
    svg = re.sub(r"@font-face \{.*?\}\n|<!--.*?-->\n", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.replace("Fira Code", "ui-monospace").splitlines()) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture())
