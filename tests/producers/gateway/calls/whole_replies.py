"""What clients of a fleet ask and get, and whether the log has the very same: once, whole and rightly labelled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.schemas.arrays import unpack
from tests.support.engines import plain_logprobs

PATIENCE_S = 240
EXACT = 5e-5


@dataclass
class Reply:
    """What a client got."""

    streams: bool
    status: int = 0
    id: str = ""
    text: str = ""
    end: str | None = None


async def ask(http: httpx.AsyncClient, number: int, length: int, reply: Reply | None = None) -> Reply:
    """One reply of `length` tokens, every other one streamed; what came of it stands in `reply` meanwhile."""
    reply = reply or Reply(number % 2 == 0)
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": f"{number} + 1 ="}],
        "max_tokens": length,
        "stream": reply.streams,
        # No early end, so that all are under way when it happens, and no token that has no text.
        "logit_bias": {"0": -100, "1": -100, "2": -100},
    }
    if not reply.streams:
        answer = await http.post("/v1/chat/completions", json=body, timeout=PATIENCE_S)
        reply.status, reply.text = answer.status_code, answer.text
        if answer.status_code == 200:
            message = answer.json()
            (choice,) = message["choices"]
            reply.id, reply.text, reply.end = message["id"], choice["message"]["content"], choice["finish_reason"]
        return reply
    async with http.stream("POST", "/v1/chat/completions", json=body, timeout=PATIENCE_S) as stream:
        reply.status = stream.status_code
        rest = ""
        async for text in stream.aiter_text():
            *lines, rest = (rest + text).split("\n")  # a reply may hold any other sign that ends a line
            for line in lines:
                if line.startswith("data: {"):
                    _take(reply, json.loads(line[6:]))
    return reply


def _take(reply: Reply, event: dict[str, Any]) -> None:
    assert "error" not in event, event
    assert reply.id in ("", event["id"])
    reply.id = event["id"]
    for choice in event["choices"]:
        reply.text += choice["delta"].get("content") or ""
        reply.end = choice["finish_reason"] or reply.end


def check_replies(
    replies: Iterable[Reply],
    calls: dict[str, dict[str, Any]],
    tokenizer: ChatTokenizer,
    length: int,
    folder_of: Callable[[int], Path],
    before: int,
) -> list[int]:
    """Each client has one whole reply, and what `calls`, by their response, record is the same. Every token has the
    log-probability of the weights that its label names, in `folder_of` the version, after all before it: none is lost,
    doubled or another's. Tokens without a label stand in streams alone, before all others, and are of `before`, what
    the engine that failed had. Gives how many there are in each reply."""
    unlabelled = []
    for reply in replies:
        assert (reply.status, reply.end) == (200, "length"), reply
        call = calls[reply.id]
        ids, versions = unpack(call["output_ids"]).tolist(), unpack(call["output_versions"]).tolist()
        assert len(ids) == length
        assert reply.text == tokenizer.decode(ids), "the client has what was recorded, once"
        lost = versions.count(-1)
        assert versions[:lost] == [-1] * lost
        assert versions[lost:] == sorted(versions[lost:])
        assert not lost or reply.streams, "nobody had seen a token of a plain reply: it began anew"
        prompt, logprobs = unpack(call["prompt_ids"]).tolist(), torch.tensor(unpack(call["output_logprobs"]))
        labels = torch.tensor([before] * lost + versions[lost:])
        for version in labels.unique().tolist():
            plain = plain_logprobs(folder_of(version), prompt, ids)[range(length), ids]
            assert float((plain - logprobs)[labels == version].abs().max()) < EXACT, (version, versions)
        assert [share["tokens"] for share in call["earlier_engines"]] == [lost] * bool(lost)
        assert call["trainable"] is False  # the bias of this test; and a grant would say unknown_version
        unlabelled.append(lost)
    return unlabelled
