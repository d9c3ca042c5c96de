"""Agent frameworks, each in an environment of its own, before a gateway with a scripted model: a table of what held.

    python -m benchmarks.frameworks [--only NAME] [--cache DIR] [--here]

Each program holds two turns of conversation with tools, two of them at once, and is told nothing but `base_url` and a
key. `--here` takes the environment that this runs in and the programs that it can run. Environments lie in a temporary
folder and are deleted; `--cache` keeps downloads. See docs/frameworks.md."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frameworks import script
from benchmarks.frameworks.judge import Row, judge

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 180.0
UV = Path(sys.prefix).parent / ".venv-tools" / "bin" / "uv"


@dataclass(frozen=True)
class Environment:
    """What is installed together. `version_of`: the distribution that the table names; `apart`: why it has several root
    trajectories, where that is its way."""

    name: str
    packages: tuple[str, ...]
    version_of: str
    program: str
    variants: tuple[str, ...] = ("",)
    flavour: script.Flavour = script.native
    apart: str = ""


ENVIRONMENTS = (
    Environment("OpenAI SDK", ("openai",), "openai", "openai_sdk.py"),
    Environment("Anthropic SDK", ("anthropic",), "anthropic", "anthropic_sdk.py", ("", "stream")),
    Environment("LangChain", ("langchain-openai",), "langchain-openai", "langchain_chat.py"),
    Environment(
        "LangGraph",
        ("langgraph", "langchain-openai", "langchain-anthropic"),
        "langgraph",
        "langgraph_agent.py",
        ("chat", "stream", "responses", "messages"),
    ),
    Environment("OpenAI Agents SDK", ("openai-agents",), "openai-agents", "openai_agents.py", ("responses", "chat")),
    Environment(
        "Pydantic AI",
        ("pydantic-ai-slim[openai,anthropic]",),
        "pydantic-ai-slim",
        "pydantic_agent.py",
        ("chat", "responses", "messages"),
    ),
    Environment("LiteLLM SDK", ("litellm", "mcp"), "litellm", "litellm_sdk.py", ("chat", "messages")),
    Environment(
        "smolagents", ("smolagents[openai]",), "smolagents", "smolagents_agent.py", flavour=script.final_answer
    ),
    Environment(
        "LlamaIndex",
        ("llama-index-core", "llama-index-llms-openai-like"),
        "llama-index-core",
        "llamaindex_agent.py",
    ),
    Environment(
        "DSPy",
        ("dspy",),
        "dspy",
        "dspy_react.py",
        flavour=script.fields,
        apart="no conversation: each request is one message, written anew",
    ),
    Environment("AutoGen", ("autogen-agentchat", "autogen-ext[openai]"), "autogen-agentchat", "autogen_agent.py"),
    Environment("AG2", ("ag2[openai]",), "ag2", "ag2_agent.py"),
    Environment("CrewAI", ("crewai",), "crewai", "crewai_crew.py", apart="each task is a conversation of its own"),
    Environment("CAMEL", ("camel-ai", "mcp<2"), "camel-ai", "camel_agent.py"),
    Environment(
        "Inspect",
        ("inspect-ai", "openai", "anthropic"),
        "inspect-ai",
        "inspect_agent.py",
        ("chat", "responses", "messages"),
        apart="a probe of its own comes first",
    ),
    Environment("Claude Agent SDK", ("claude-agent-sdk",), "claude-agent-sdk", "claude_agent.py"),
    Environment(
        "Vercel AI SDK",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
        "ai",
        "ai_sdk.mjs",
        ("responses", "chat", "compatible", "messages"),
    ),
    Environment("Codex CLI", ("@openai/codex", "@modelcontextprotocol/sdk", "zod"), "@openai/codex", "codex_cli.mjs"),
)


@contextmanager
def installed(chosen: Environment, folder: Path, cache: Path, here: bool) -> Iterator[tuple[list[str], str]]:
    """The command that runs the program, and the version of what it is about. Raises CalledProcessError."""
    if here:
        import importlib.metadata

        yield [sys.executable, str(PROGRAMS / chosen.program)], importlib.metadata.version(chosen.version_of)
        return
    home = folder / "environment"
    try:
        if chosen.program.endswith(".mjs"):
            home.mkdir()
            _run(["npm", "install", "--no-save", "--cache", str(cache / "npm"), *chosen.packages], home)
            shutil.copy(PROGRAMS / chosen.program, home)
            told = json.loads((home / "node_modules" / chosen.version_of / "package.json").read_text())
            yield ["node", str(home / chosen.program)], told["version"]
        else:
            os.environ["UV_CACHE_DIR"] = str(cache / "uv")
            _run([str(UV), "venv", "-q", "-p", sys.executable, str(home)], folder)
            _run([str(UV), "pip", "install", "-q", "-p", str(home), *chosen.packages], folder)
            ask = f"import importlib.metadata as m; print(m.version({chosen.version_of!r}))"
            python = str(home / "bin" / "python")
            yield [python, str(PROGRAMS / chosen.program)], _run([python, "-c", ask], folder).strip()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=900).stdout


async def hold(command: list[str], folder: Path, flavour: script.Flavour, variant: str) -> Row:
    """Run a program before a new gateway."""
    folder.mkdir()
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    async with script.stage(folder, flavour) as (w, witness, url):
        program = await asyncio.create_subprocess_exec(
            *command,
            f"{url}/v1",
            "some-key",
            variant,
            cwd=folder,
            env={**inherited, "HOME": str(folder)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that what it starts ends with it
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                out, errors = await program.communicate()
        except TimeoutError:
            os.killpg(program.pid, signal.SIGKILL)
            out, errors = await program.communicate()
            errors += f"\nended after {PATIENCE_S:g} s".encode()
        asked = [(tuple(one.prompt), tuple(ids)) for one in w.engine.asked for ids in one.ids]
        return judge(witness.seen, w.events(), asked, last_line(out), _last(errors))


def last_line(out: bytes) -> dict[str, Any] | None:
    """What a program said came of it."""
    for line in reversed(out.decode(errors="replace").splitlines()):
        if line.startswith('{"answers"'):
            return dict(json.loads(line))
    return None


def _last(errors: bytes) -> str:
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def line(name: str, version: str, variant: str, row: Row, apart: str = "") -> str:
    """A row of the table."""
    words = {True: "yes", False: "no"} if row.calls else {True: "-", False: "-"}
    columns = [
        f"{name} {version}" + (f", {variant}" if variant else ""),
        row.api,
        row.calls,
        "yes" if row.finished else "no",
        words[row.wire],
        row.roots,
        row.lineages,
        words[row.exact],
        words[row.kept],
        "; ".join(filter(None, [row.trouble, apart if row.roots > 1 else ""])),
    ]
    return "| " + " | ".join(str(column).replace("|", "/").replace("\n", " ") for column in columns) + " |"


HEAD = "| framework | API | calls | finished | wire unaltered | roots | lineages | exact tokens | nothing lost | why |"


def main() -> None:
    """Prints the table, a row as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[one.name for one in ENVIRONMENTS], help="may be repeated")
    parser.add_argument("--cache", type=Path, help="where downloads are kept")
    parser.add_argument("--here", action="store_true", help="install nothing")
    chosen = parser.parse_args()
    print(HEAD, "|" + " --- |" * HEAD.count(" |"), sep="\n", flush=True)
    for environment in ENVIRONMENTS:
        if chosen.only and environment.name not in chosen.only:
            continue
        if chosen.here and not _is_here(environment):
            continue
        with tempfile.TemporaryDirectory(prefix="frameworks-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            try:
                with installed(environment, folder, chosen.cache or folder, chosen.here) as (command, version):
                    for variant in environment.variants:
                        held = hold(command, folder / f"run-{variant}", environment.flavour, variant)
                        row = line(environment.name, version, variant, asyncio.run(held), environment.apart)
                        print(row, flush=True)
            except subprocess.CalledProcessError as error:
                print(f"| {environment.name} | is not installed: {_last(error.stderr.encode())} |", flush=True)


def _is_here(environment: Environment) -> bool:
    module = environment.version_of.replace("-", "_")
    return environment.name.endswith("SDK") and importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    main()
