"""Encodes and decodes one 5,120-token model call, envelope and body: `python -m benchmarks.bench_codec`.

The named limit is 0.2 ms for both together; the printed ratio is the measured time over it (below 1 is within)."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from millrace.schemas import arrays, codec
from millrace.schemas.ids import new_id, now_micros

LIMIT_US = 200.0
TOKENS = 5120


def model_call() -> dict[str, Any]:
    """A call with a prompt of half the tokens and a reply of the other half."""
    half = np.arange(TOKENS // 2, dtype=np.int32)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 4096, "seed": None, "stop": [], "n": 1}
    text = dict.fromkeys(("tokenizer_hash", "template_hash", "engine_incarnation"), "0" * 64)
    return text | {
        "call_id": new_id(), "response_id": new_id(), "choice": 0, "lineage": new_id(), "opened": None,
        "supersedes": None, "turn": 0, "prefix_len": 0, "prompt_ids": arrays.pack(half),
        "output_ids": arrays.pack(half), "output_logprobs": arrays.pack(np.zeros(len(half), np.float32)),
        "output_versions": arrays.pack(np.zeros(len(half), np.int32)), "request": b"q" * 2048, "response": b"a" * 8192,
        "sampling": sampling, "finish_reason": "stop", "stop_condition": None, "engine": "vllm",
        "engine_version": "0.32.0", "usage": {"prompt": len(half), "completion": len(half), "cached": 0},
        "cost": None, "latency_us": 1, "ttft_us": 1, "trainable": True, "untrainable_reason": None,
        "request_base": None, "request_kept": {}, "identified_by": None,
    }  # fmt: skip


def event(body: bytes) -> dict[str, Any]:
    """The envelope around it."""
    nothing = ("parent_trajectory", "parent_event", "spawn_call", "log_time", "source_place", "source_hash")
    return dict.fromkeys((*nothing, "trace_id", "span_id", "governance")) | {
        "id": new_id(), "kind": "model_call", "tenant": "acme", "policy": "sort", "group": "17",
        "root_trajectory": new_id(), "trajectory": new_id(), "attempt": new_id(), "step": 3, "actor": "policy",
        "split": "train", "event_time": now_micros(), "capture_time": now_micros(), "source": "gateway-0",
        "source_epoch": 1, "source_seq": 12345, "prev_hash": bytes(32), "hash": bytes(32), "hash_version": 2,
        "body_encoding": "plain", "body": body,
    }  # fmt: skip


def main(rounds: int = 20, each: int = 200) -> None:
    """Prints the medians over `rounds` of `each` events."""
    call = model_call()
    data = codec.encode("Event", event(codec.encode_body("model_call", call)))
    encode, decode = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(each):
            codec.encode("Event", event(codec.encode_body("model_call", call)))
        middle = time.perf_counter()
        for _ in range(each):
            _, record = codec.decode(data)
            codec.decode_body(record["kind"], record["body"])
        encode.append((middle - start) / each * 1e6)
        decode.append((time.perf_counter() - middle) / each * 1e6)
    both = statistics.median(encode) + statistics.median(decode)
    print(f"{len(data)} bytes: encode {statistics.median(encode):.0f} us, decode {statistics.median(decode):.0f} us")
    print(f"together {both:.0f} us, ratio to the limit of {LIMIT_US:.0f} us: {both / LIMIT_US:.2f}")


if __name__ == "__main__":
    main()
