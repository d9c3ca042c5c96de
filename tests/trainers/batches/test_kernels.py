"""A kernel for stretches gets the same question that attention by runs answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from millrace.trainers.batches import kernels
from millrace.trainers.batches.attention import packed_attention
from millrace.trainers.batches.kernels import Request, Stretches, TorchVarlen, VarlenKernel, kernel_for, stretches
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.batches.sample import Sample

HEADS, GROUPS, WIDTH = 4, 2, 8


class Definition(VarlenKernel):
    """What flash attention computes for stretches of unlike lengths, as its documentation says it, one by one."""

    name = "definition"

    def refusal(self, request: Request) -> str | None:
        return None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        where: Stretches,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        out = []
        for index in range(len(where.queries) - 1):
            q = query[where.queries[index] : where.queries[index + 1]]
            k, v = (
                x[where.keys[index] : where.keys[index + 1]].repeat_interleave(HEADS // GROUPS, 1) for x in (key, value)
            )
            assert len(q) <= where.longest_query
            assert len(k) <= where.longest_key
            scores = torch.einsum("qhd,khd->hqk", q, k) * (scaling or WIDTH**-0.5)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            gap = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
            seen = (gap >= 0) & (gap < (len(k) + 1 if window is None else window))
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        return torch.cat(out)


def packed(words: list[list[int]], share: bool) -> MicroBatch:
    samples = [
        Sample(
            tokens=np.array([1, *word], np.int32),
            mask=np.array([0] + [1] * len(word), np.uint8),
            logprobs=np.zeros(1 + len(word), np.float32),
            versions=np.zeros(1 + len(word), np.int32),
            reward=0.0,
            seq=0,
            group="g",
            trajectory=str(index),
        )
        for index, word in enumerate(words)
    ]
    return pack(samples, share=share)


@settings(deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8),
    share=st.booleans(),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 0.5]),
    scaling=st.sampled_from([None, 0.2]),
    seed=st.integers(0, 100),
)
def test_one_call_equals_attention_by_runs(
    words: list[list[int]],
    share: bool,
    window: int | None,
    softcap: float | None,
    scaling: float | None,
    seed: int,
) -> None:
    batch = packed(words, share)
    length = batch.tokens.shape[1]
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1, heads, length, WIDTH, generator=draw) for heads in (HEADS, GROUPS, GROUPS)]
    pull = torch.randn(1, length, HEADS, WIDTH, generator=draw)
    answers = []
    for siblings in ([], [Definition()]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "KERNELS", siblings)
            learning = [row.clone().requires_grad_() for row in rows]
            out, _ = packed_attention(
                torch.nn.Module(),
                *learning,
                None,
                scaling=scaling,
                runs=batch.runs,
                paths=batch.paths,
                sliding_window=window,
                softcap=softcap,
            )
            (out * pull).sum().backward()
            answers.append([out, *(row.grad for row in learning)])
    for ours, plain in zip(*answers, strict=True):
        assert torch.allclose(ours, plain, atol=1e-5), (ours - plain).abs().max()


def test_torchs_kernel_takes_the_call() -> None:
    """Its operator exists and takes these arguments: without a card only shapes are computed."""
    batch = packed([[1, 2, 3], [1, 2], [2]], share=True)
    where = stretches(batch.runs, batch.paths, torch.device("cpu"))
    assert where.places is not None
    lengths = (batch.tokens.shape[1], len(where.places), len(where.places))
    with FakeTensorMode():
        bounds = [torch.empty(len(where.keys), dtype=torch.int32, device="cuda") for _ in range(2)]
        there = Stretches(*bounds, where.longest_query, where.longest_key, None)
        rows = [
            torch.empty(length, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
            for length, heads in zip(lengths, (HEADS, GROUPS, GROUPS), strict=True)
        ]
        out = TorchVarlen().attend(rows[0], rows[1], rows[2], there, 0.3, 5, None)
        assert out.shape == rows[0].shape


CARD = Request(torch.device("cuda"), torch.bfloat16, 128, 128)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"window": 4}, None),
        ({"device": torch.device("cpu")}, "not on a GPU"),
        ({"dtype": torch.float32}, "float32"),
        ({"width": 192}, "heads of 192 and 128"),
        ({"width": 512, "value_width": 512}, "heads of 512"),
        ({"softcap": 50.0}, "a cap on scores"),
        ({"sinks": True}, "sinks"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_no_kernel_computes_goes_by_runs(
    change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_capability", lambda _device: (9, 0))
    refusal = TorchVarlen().refusal(replace(CARD, **change))
    assert (refusal is None) if reason is None else (reason in (refusal or ""))


def test_an_old_card_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_capability", lambda _device: (7, 5))
    assert kernel_for(CARD) is None
