"""New weights under running requests, in both modes: `python -m benchmarks.bench_interrupt [--engine vllm]`.

A real engine process and the reloader's own swap, once in the course of `--load` streamed requests, alternating:
`keep` freezes them in the engine, `abort` ends them and the client sends prompt and partial tokens again. Measured for
each request: the longest silence between two of its chunks; for all: how long they take together, and the tokens that
are computed again with the new weights, prompts included. The printed ratios are abort over keep; each mode is also
compared with the same requests and no swap."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.serving import KINDS, client_of, served
from millrace.consumers.reloader.swap import freeze, swap
from millrace.infra.engines.base import Engine, Sampling
from millrace.infra.engines.control import EngineControl, PauseMode
from millrace.infra.engines.resubmit import ResubmittingEngine
from millrace.schemas.labels import make_label
from tests.support.tiny_model import write_model

MODES: tuple[PauseMode, ...] = ("keep", "abort")
PROMPT = [5] * 32


@dataclass(frozen=True)
class Reply:
    """One request: its longest silence, and how many of its tokens the old weights sampled (all: no swap)."""

    silence: float
    before: int
    tokens: int


@dataclass(frozen=True)
class Round:
    """All requests of a round: seconds together, longest silences, tokens computed again."""

    seconds: float
    silences: list[float]
    recomputed: int
    interrupted: int


async def ask(engine: Engine, tokens: int, name: str, underway: set[str]) -> Reply:
    """One streamed request; `underway` gets its name when a third of its tokens have come."""
    silence, last, before, count = 0.0, 0.0, 0, 0
    async for chunk in engine.generate(PROMPT, Sampling(tokens, ignore_eos=True), request_id=name):
        now = time.perf_counter()
        if last:
            silence = max(silence, now - last)
        last, count = now, count + len(chunk.token_ids)
        if count >= tokens // 3:
            underway.add(name)
        before = chunk.spans[0].end if chunk.spans else before
    assert count == tokens, "every token arrives, whatever happened"
    return Reply(silence, before, tokens)


async def one_round(
    kind: str, control: EngineControl, mode: PauseMode | None, folder: Path, label: str, load: int, tokens: int
) -> Round:
    """`load` requests at once; None: nothing is swapped."""
    plain = client_of(kind, control)
    engine: Engine = ResubmittingEngine(plain) if mode == "abort" else plain
    underway: set[str] = set()
    began = time.perf_counter()
    asked = [asyncio.create_task(ask(engine, tokens, f"{label}-{n}", underway)) for n in range(load)]
    if mode is not None:
        while len(underway) < load:
            await asyncio.sleep(0.002)
        await freeze(control, mode)
        await swap(control, partial(control.load, folder), label, acknowledged)
    replies = await asyncio.gather(*asked)
    seconds = time.perf_counter() - began
    cut = [reply for reply in replies if reply.before < reply.tokens]
    again = engine.recomputed if isinstance(engine, ResubmittingEngine) else sum(len(PROMPT) + r.before for r in cut)
    await engine.close()
    return Round(seconds, [reply.silence for reply in replies], again, len(cut))


async def acknowledged() -> None:
    """Nobody waits for it here."""


async def measure(kind: str, control: EngineControl, folders: list[Path], rounds: int, load: int, tokens: int) -> None:
    """Print the table."""
    found: dict[PauseMode | None, list[Round]] = {None: [], "keep": [], "abort": []}
    await one_round(kind, control, None, folders[0], "warm-up", load, tokens)
    version = 0
    for _ in range(rounds):
        for mode in found:
            version += 1
            label = make_label("bench", version)
            found[mode].append(await one_round(kind, control, mode, folders[version % 2], label, load, tokens))
    await control.close()
    calm = statistics.median(each.seconds for each in found[None])
    print(f"{rounds} rounds of {load} requests of {tokens} tokens; without a swap {calm:.2f} s together (median)")
    medians: dict[PauseMode, tuple[float, float, float]] = {}
    for mode in MODES:
        silences = [silence for each in found[mode] for silence in each.silences]
        seconds = statistics.median(each.seconds for each in found[mode])
        cut = sum(each.interrupted for each in found[mode])
        again = sum(each.recomputed for each in found[mode]) / max(1, cut)
        medians[mode] = (statistics.median(silences), seconds, again)
        stall, worst = statistics.median(silences) * 1000, max(silences) * 1000
        print(
            f"{mode:6} stall {stall:5.0f} ms median, {worst:5.0f} ms worst; "
            f"together {seconds:.2f} s, {seconds / calm:.2f} of no swap; "
            f"{again:.0f} tokens computed again for each request that was cut, {cut} of {rounds * load}"
        )
    ratios = [b / a if a else 1.0 for a, b in zip(medians["keep"], medians["abort"], strict=True)]
    print(f"abort over keep: stall {ratios[0]:.2f}, time {ratios[1]:.2f}, tokens computed again {ratios[2]:.2f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=KINDS, default="vllm")
    parser.add_argument("--load", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=300, help="of each reply")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = [write_model(root / f"v{seed}", seed) for seed in range(2)]
        control = stack.enter_context(served(given.engine, folders[0], root))
        asyncio.run(measure(given.engine, control, folders, given.rounds, given.load, given.tokens))


if __name__ == "__main__":
    main()
