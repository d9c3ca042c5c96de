"""`millrace mcp` and `millrace a2a`: stand between an agent and its tools or other agents, and capture what passes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli.context import console, entry
from millrace.infra.errors import ConfigError

Session = Annotated[
    str,
    typer.Option(envvar="MILLRACE_SESSION_KEY", help="the session's own key (mr-...), api_key of a millrace.Session"),
]
Gateway = Annotated[str, typer.Option(envvar="MILLRACE_GATEWAY_URL", help="the session's base_url")]
SpoolFolder = Annotated[
    Path | None,
    typer.Option(
        "--spool",
        metavar="DIR",
        help="where events wait for the gateway; default: millrace/intake in $XDG_STATE_HOME or ~/.local/state",
    ),
]
GATEWAY = "http://127.0.0.1:8900/v1"


def mcp(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND ARGS...", help="server to run, on standard input and output"),
    ] = None,
    url: Annotated[str, typer.Option(help="server to stand before instead, over streamable HTTP")] = "",
    port: Annotated[int, typer.Option(help="with --url: where to listen; 0 for any", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="with --url: on which address to listen")] = "127.0.0.1",
    session: Session = "",
    gateway: Gateway = GATEWAY,
    server: Annotated[
        str, typer.Option(help="what records call the server; default: the command's name, or the URL's host")
    ] = "",
    spool: SpoolFolder = None,
) -> None:
    """Capture an agent's tool calls: stand where its MCP server's command or URL stood.

    Every tools/call becomes a tool call of the session's episode, and its answer a tool result, joined to the model's
    own call where one alone fits. Bytes pass unaltered; while the gateway is away they pass too, and events wait.

    Example: millrace mcp -- python my_server.py

    Example: millrace mcp --url http://127.0.0.1:9000/mcp --port 9100
    """
    owner = entry("millrace.producers.intake.run:owner_of")(session, gateway)
    if bool(command) == bool(url):
        raise ConfigError("name one server: `millrace mcp -- COMMAND ARGS...`, or `millrace mcp --url URL --port N`")
    if command:
        entry("millrace.producers.intake.run:stdio")(command, owner, server, spool)
    entry("millrace.producers.intake.run:http")(
        url, host, port, owner, gateway, server, spool, lambda address: console.print(f"listening on {address}")
    )


def a2a(
    url: Annotated[str, typer.Option(help="agent to stand before: the address that its card names")],
    port: Annotated[int, typer.Option(help="where to listen; 0 for any", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="on which address to listen")] = "127.0.0.1",
    session: Session = "",
    gateway: Gateway = GATEWAY,
    key: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_GATEWAY_KEY",
            help="a gateway's key that may start sessions: each delegation is an episode of its own then",
        ),
    ] = "",
    hand_on_key: Annotated[
        bool,
        typer.Option(
            "--hand-on-key", help="tell the agent that episode's key and base_url, in x-millrace-key and x-millrace-url"
        ),
    ] = False,
    agent: Annotated[str, typer.Option(help="what records call the agent; default: the URL's host")] = "",
    spool: SpoolFolder = None,
) -> None:
    """Capture what an agent asks of other agents: stand where an A2A agent's URL stood.

    Every message that is sent becomes a tool call of the session's episode, and what came of it the tool result. With
    a key, what the other agent says on the way is an episode of its own, child of the first. Bytes pass unaltered but
    for the addresses in the agent's card.

    Example: millrace a2a --url http://127.0.0.1:9300 --port 9400
    """
    owner = entry("millrace.producers.intake.run:owner_of")(session, gateway)
    entry("millrace.producers.intake.run:agent")(
        url, host, port, owner, gateway, agent, spool, key, hand_on_key,
        lambda address: console.print(f"listening on {address}"),
    )  # fmt: skip
