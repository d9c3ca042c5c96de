"""A transformers model on the CPU as an engine: a thread that samples all requests in one batch, token by token.

Meant for tests, chaos runs and machines without vLLM; exact rather than fast. Same meanings as vLLM's pause modes and
labels, with two differences: a load that fails leaves the old weights untouched, and a load always recomputes the
cached keys of running requests, so no token is ever sampled from a mixture of versions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from millrace.infra.engines.base import Chunk, Engine, LabelSpan, Sampling, Usage
from millrace.infra.engines.control import PauseMode
from millrace.infra.engines.inprocess.batch import BatchRow, RunningRows, draw
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable

T = TypeVar("T")

ANY_LENGTH = 2**31
"""context of a model whose positions have no end"""


@dataclass(eq=False, slots=True)
class _Request:
    """One request between its event loop and the sampling thread; its finished chunks wait in `queue`."""

    id: str
    loop: asyncio.AbstractEventLoop
    stream: bool
    queue: asyncio.Queue[Chunk | EngineError]
    open: int
    is_cancelled: bool = False
    replies: dict[int, Chunk] = field(default_factory=dict)


class InprocessEngine(Engine):
    """Loads the Hugging Face directory `model_dir` in float32 and samples at most `max_rows` choices at a time.

    `label` is the weight version until `set_version`. `seed` feeds requests that bring none (default: fresh
    entropy, so that two engines never sample the same)."""

    kind = "inprocess"

    def __init__(
        self, model_dir: str | Path, *, label: str = "default", max_rows: int = 64, seed: int | None = None
    ) -> None:
        folder = Path(model_dir)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.requires_grad_(False).train(False)
        if any("sliding" in kind for kind in getattr(self._model.config, "layer_types", None) or ()):
            raise EngineError("sliding-window attention is not supported in process: use vLLM for this model")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ends = _end_tokens(folder)
        config = self._model.config.get_text_config()
        lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        self.context = int(next(filter(None, lengths), ANY_LENGTH))
        self._vocabulary = int(config.vocab_size)
        self._max_rows = max_rows
        self._shared = torch.Generator()
        if seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(seed)
        self._batch = RunningRows(self._model)
        self._waiting: deque[BatchRow] = deque()
        self._sampled = 0
        self._label = label
        self._paused = False
        self._draining: list[Future[None]] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

        self._wake = threading.Condition()
        self._closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="inprocess-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the seam

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        prompt = [int(token) for token in prompt_ids]
        self._check(prompt, sampling)
        limit = min(sampling.max_tokens, self.context - len(prompt))
        request = _Request(request_id, asyncio.get_running_loop(), stream, asyncio.Queue(), sampling.n)
        rows = []
        for index in range(sampling.n):
            generator = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed + index)
            rows.append(BatchRow(prompt, sampling, limit, request, index, generator))
        with self._wake:
            self._check_alive()
            self._waiting.extend(rows)
            self._wake.notify()
        completion = 0
        open_choices = sampling.n
        try:
            while open_choices:
                chunk = await request.queue.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                completion += len(chunk.token_ids)
                open_choices -= chunk.finish_reason is not None
                if not open_choices:
                    chunk.usage = Usage(len(prompt), completion, 0)
                yield chunk
        finally:
            request.is_cancelled = True

    async def health(self) -> bool:
        return self._death is None and not self._closing

    async def weight_version(self) -> str:
        return await self._call(lambda: self._label)

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------------ control

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def occupancy(self) -> tuple[int, int, int]:
        """Choices that are sampled, choices that wait, tokens that were sampled since the start."""
        return len(self._batch.rows), len(self._waiting), self._sampled

    @property
    def death(self) -> BaseException | None:
        """What ended the sampling thread, if anything did."""
        return self._death

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Sample no more until `resume`: requests in flight are frozen (keep), ended with what they have (abort) or
        finished first (wait). New requests queue."""

        def act() -> None:
            self._paused = True
            if mode == "abort":
                self._finish_all()

        await self._call(act)
        if mode == "wait":
            drain_end: Future[None] = Future()

            def drain() -> None:
                if self._batch.rows:
                    self._draining.append(drain_end)
                else:
                    drain_end.set_result(None)

            await self._call(drain)
            await asyncio.wrap_future(drain_end)

    async def resume(self) -> None:
        """Go on sampling."""

        def act() -> None:
            self._paused = False

        await self._call(act)

    async def load(self, folder: str | Path) -> None:
        """Replace the weights by those of `folder`. Raises EngineError, and keeps the old, when they do not fit."""
        await self._call(lambda: self._load(Path(folder)))

    async def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights by `tensors`, by name. Raises EngineError, and keeps the old, when they do not fit."""
        await self._call(lambda: self._put(tensors, "what was received"))

    async def set_version(self, label: str) -> None:
        """Stamp tokens sampled from now on with `label`."""

        def act() -> None:
            self._label = label

        await self._call(act)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As vLLM answers it: False while running requests hold cached keys, unless these are reset as well."""

        def act() -> bool:
            if self._batch.rows and not reset_running_requests:
                return False
            self._batch.recompute()
            return True

        return await self._call(act)

    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        """End these requests, or all, with what they have. Returns how many choices that were."""
        return await self._call(lambda: self._finish_all(set(request_ids)))

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._calls or self._closing or self._can_sample()):
                        self._wake.wait()
                    calls, self._calls = self._calls, deque()
                for act, future in calls:
                    try:
                        future.set_result(act())
                    except Exception as error:
                        future.set_exception(error)
                if self._closing:
                    return
                with self._wake:
                    rows = self._admissible()
                if rows:
                    self._batch.admit(rows)
                if self._batch.rows and (not self._paused or self._draining):
                    self._step()
                if self._draining and not self._batch.rows:
                    for waiter in self._draining:
                        waiter.set_result(None)
                    self._draining.clear()
        except BaseException as error:
            self._death = error
            raise
        finally:
            self._bury()

    def _can_sample(self) -> bool:
        if self._paused:
            return bool(self._draining)
        return bool(self._waiting or self._batch.rows)

    def _admissible(self) -> list[BatchRow]:
        rows: list[BatchRow] = []
        while not self._paused and self._waiting:
            if len(self._batch.rows) + len(rows) >= self._max_rows:
                break
            row = self._waiting.popleft()
            if not row.ticket.is_cancelled:
                rows.append(row)
        return rows

    def _step(self) -> None:
        rows = self._batch.rows
        tokens, raw = draw(self._batch.logits, rows, self._shared)
        logprobs = raw.gather(1, tokens[:, None])[:, 0].tolist()
        positions: list[int] = []
        out: list[tuple[BatchRow, Chunk]] = []
        for position, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs, strict=True)):
            if row.ticket.is_cancelled:
                continue
            if not row.labels or row.labels[-1][0] != self._label:
                row.labels.append((self._label, len(row.output)))
            row.output.append(token)
            chunk = Chunk(row.index, [token], [logprob])
            if row.sampling.top_logprobs:
                best = raw[position].topk(row.sampling.top_logprobs)
                chunk.tops = [list(zip(best.indices.tolist(), best.values.tolist(), strict=True))]
            reason = self._finish(row, token)
            if reason is None:
                positions.append(position)
            else:
                chunk.finish_reason, chunk.stop_reason = reason
                chunk.spans = _spans(row)
            out.append((row, chunk))
        self._sampled += len(out)
        self._batch.keep(positions)
        if positions:
            self._batch.advance(tokens[positions])
        self._deliver(out)

    def _finish(self, row: BatchRow, token: int) -> tuple[str, str | int | None] | None:
        sampling = row.sampling
        if token in self._ends and not sampling.ignore_eos:
            return "stop", None
        if token in sampling.stop_ids:
            return "stop", token
        if sampling.stop:
            text = self._tokenizer.decode(row.output, skip_special_tokens=True)
            for stop in sampling.stop:
                if stop in text:
                    return "stop", stop
        return ("length", None) if len(row.output) >= row.limit else None

    def _finish_all(self, ids: set[str] | None = None) -> int:
        """Abort running rows and, where ids are named, waiting ones of these requests."""
        aborts = [row for row in self._batch.rows if not ids or row.ticket.id in ids]
        self._batch.keep([place for place, row in enumerate(self._batch.rows) if ids and row.ticket.id not in ids])
        with self._wake:
            waiting = [row for row in self._waiting if ids and row.ticket.id in ids]
            for row in waiting:
                self._waiting.remove(row)
        aborts += waiting
        self._deliver([(row, Chunk(row.index, [], [], "abort", None, _spans(row))) for row in aborts])
        return len(aborts)

    def _deliver(self, out: list[tuple[BatchRow, Chunk]]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Request, Chunk]]] = {}
        for row, chunk in out:
            request: _Request = row.ticket
            if not request.stream:
                reply = request.replies.setdefault(row.index, Chunk(row.index, [], [], tops=[]))
                reply.token_ids += chunk.token_ids
                reply.logprobs += chunk.logprobs
                reply.tops = [*reply.tops, *chunk.tops]
                if chunk.finish_reason is None:
                    continue
                reply.finish_reason, reply.stop_reason, reply.spans = (
                    chunk.finish_reason,
                    chunk.stop_reason,
                    chunk.spans,
                )
                request.open -= 1
                if not request.open:
                    batches.setdefault(request.loop, []).extend(
                        (request, request.replies[i]) for i in sorted(request.replies)
                    )
                continue
            batches.setdefault(request.loop, []).append((request, chunk))
        for loop, batch in batches.items():
            _hand_over(loop, batch)

    def _load(self, folder: Path) -> None:
        try:
            tensors = {name: tensor for file in _weight_files(folder) for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise EngineError(f"cannot read the weights in {folder}: {error}") from error
        self._put(tensors, f"the weights in {folder}")

    def _put(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Takes tensors by their names in files, which transformers converts to those of the model."""
        try:
            loaded, about = type(self._model).from_pretrained(
                None,
                config=self._model.config,
                state_dict=dict(tensors),
                dtype=torch.float32,
                output_loading_info=True,
            )
        except RuntimeError as error:  # shapes, and conversions that fail
            raise EngineError(f"{source}: not of this architecture: {error}") from error
        differences = sorted({*about["missing_keys"], *about["unexpected_keys"]})
        if differences:
            raise EngineError(f"{source}: not of this architecture: {', '.join(differences[:3])} differ")
        self._model.load_state_dict(loaded.state_dict())
        self._batch.recompute()

    def _bury(self) -> None:
        """Nobody waits for a thread that has ended."""
        with self._wake:
            rows = [*self._batch.rows, *self._waiting]
            calls, self._calls = self._calls, deque()
            self._waiting.clear()
            self._closing = True
        error = EngineUnavailable(f"the in-process engine has ended: {self._death or 'closed'}; start it again")
        for request in {row.ticket for row in rows}:
            _hand_over(request.loop, [(request, error)])
        for _, future in calls:
            future.set_exception(error)
        for waiter in self._draining:
            waiter.set_exception(error)

    # ------------------------------------------------------------------ helpers

    async def _call(self, act: Callable[[], T]) -> T:
        """Run `act` in the thread, between two steps."""
        future: Future[T] = Future()
        with self._wake:
            self._check_alive()
            self._calls.append((act, future))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def _check_alive(self) -> None:
        if self._closing:
            raise EngineUnavailable(f"the in-process engine has ended: {self._death or 'closed'}; start it again")

    def _check(self, prompt: list[int], sampling: Sampling) -> None:
        if sampling.grammar is not None:
            raise EngineRejected("the in-process engine holds outputs to no grammar: use another kind", 400)
        if not prompt:
            raise EngineRejected("the prompt is empty", 400)
        if len(prompt) >= self.context:
            raise EngineRejected(f"the prompt has {len(prompt)} tokens, the model takes {self.context - 1}", 400)
        tokens = [*prompt, *(token for token, _ in sampling.logit_bias)]
        strangers = [token for token in tokens if not 0 <= token < self._vocabulary]
        if strangers:
            raise EngineRejected(f"token id {strangers[0]} is out of vocabulary", 400)


def _spans(row: BatchRow) -> tuple[LabelSpan, ...]:
    ends = [start for _, start in row.labels[1:]] + [len(row.output)]
    return tuple(LabelSpan(label, start, end) for (label, start), end in zip(row.labels, ends, strict=True))


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    batch: Sequence[tuple[_Request, Chunk] | tuple[_Request, EngineError]],
) -> None:
    def put() -> None:
        for request, chunk in batch:
            request.queue.put_nowait(chunk)

    if not loop.is_closed():
        loop.call_soon_threadsafe(put)


def _weight_files(folder: Path) -> list[Path]:
    """The model's safetensors, by its index where there is one: a directory may hold other tensors beside them."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / "model.safetensors"]


def _end_tokens(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
