"""How long a gateway takes to know its sessions again after a kill, by the calls that its capture log holds.

    python -m benchmarks.bench_start --ended 180000

The log is written entry by entry, without a gateway: copies of one session of one call that has ended, behind it some
that live, and as many entries as there can be behind the newest checkpoint. The time is that of a new process, to the
end of `Sessions.rebuild`, against one over an empty log. The state in the checkpoint is that of at most `FOLDED` calls,
which fills what a gateway remembers of ended sessions."""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra import durable
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.serve import spare_collector
from millrace.producers.gateway.sessions import checkpoint
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.producers.gateway.sessions.streaming_marks import StreamingMarks
from millrace.producers.gateway.spending import Spending
from tests.support import chat_tokenizer
from tests.support.in_process import POLICY, InProcess, Played

FOLDED = 180_000
LIVE = 100
WORD = "word-00000000"


BODIES = {"chat/completions": "messages", "responses": "input"}
"""route -> where its body says what is asked"""


async def session(folder: Path, route: str) -> tuple[list[Entry], list[str]]:
    """The entries of one session as a gateway writes them, its start, its call and its end; and the ids in them."""
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(folder)))
    ids = renderer.tokenizer.encode(f"{WORD}<|im_end|>")
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": -0.5}] * len(ids)},
        "finish_reason": "stop",
        "weight_versions": [{"version": "policy@0", "start": 0, "end": len(ids)}],
    }
    gateway = InProcess(folder / "one", renderer, lambda _: Played(parts=[orjson.dumps({"choices": [choice]})]))
    body = {"model": "m", BODIES[route]: [{"role": "user", "content": f"Hi {WORD}"}]}
    answer = await gateway.ask("POST", f"/v1/{route}", orjson.dumps(body))
    (live,) = gateway.sessions.live.values()
    await gateway.gateway.end(live, status="completed", stop_condition="idle")
    entries = [kept.entry for kept in gateway.log.read()]
    await gateway.close()
    return entries, [live.id, answer.json["id"].removeprefix("resp_")]  # ids of items hold what stands behind it


def copies(entries: list[Entry], ids: list[str], begin: int, end: int) -> Iterator[Entry]:
    """The same session again, under other ids and other words of the same length."""
    for number in range(begin, end):
        for entry in entries:
            value, headers = entry.value, dict(entry.headers)
            for id in [*ids, WORD]:
                other = f"{id[:-8]}{number:08d}"
                value = value.replace(id.encode(), other.encode())
                headers = {name: text.replace(id, other) for name, text in headers.items()}
            yield Entry(entry.key, headers, value)


def written(folder: Path, ended: int, route: str = "chat/completions") -> None:
    """A log of so many calls, and its checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        entries, ids = asyncio.run(session(Path(scratch), route))
    log = CaptureLog(folder, max_waiting=1 << 50)
    for entry in copies(entries, ids, 0, min(ended, FOLDED)):
        log.append(entry)
    sessions, begun = Sessions(folder, POLICY), time.process_time()
    sessions.rebuild(log)
    print(f"  folding {log.end} entries: {time.process_time() - begun:.1f} s of CPU", flush=True)
    for entry in copies(entries, ids, min(ended, FOLDED), ended):
        log.append(entry)
    sessions.checkpoint(log, Spending({}), StreamingMarks(folder))()
    behind = checkpoint.ENTRIES // len(entries)
    for entry in copies(entries, ids, ended, ended + behind):
        log.append(entry)
    for entry in copies(entries[:2], ids, ended + behind, ended + behind + LIVE):
        log.append(entry)
    durable.write(folder / "acked", str(log.end), sync=False)
    log.close()


def start(folder: Path) -> None:
    """What a process does that is started over a folder."""
    begun, imported = time.perf_counter(), time.process_time()
    spare_collector()
    log = CaptureLog(folder)
    live = Sessions(folder, POLICY).rebuild(log, Spending({}), StreamingMarks(folder))
    wall, cpu = time.perf_counter() - begun, time.process_time() - imported
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    size = (folder / checkpoint.FILE).stat().st_size >> 10 if (folder / checkpoint.FILE).exists() else 0
    print(f"  {live} live: {wall:.2f} s, {cpu:.2f} s of CPU, {memory} MB, checkpoint of {size} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ended", type=int, default=180_000)
    parser.add_argument("--start", type=Path, help="be the process that is started over this folder")
    given = parser.parse_args()
    if given.start is not None:
        return start(given.start)
    with tempfile.TemporaryDirectory() as scratch:
        for ended in (0, given.ended):
            folder = Path(scratch, str(ended))
            folder.mkdir()
            print(f"{ended} ended calls")
            if ended:
                written(folder, ended)
            subprocess.run([sys.executable, "-m", "benchmarks.bench_start", "--start", str(folder)], check=True)


if __name__ == "__main__":
    main()
