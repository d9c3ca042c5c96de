"""Version directories that are adapters, on a base of `tiny_model`; and what a plain forward with one gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from millrace.schemas.records import WeightVersion
from millrace.trainers.weights import checkpoint, lora
from millrace.trainers.weights.adapter import B, Lora
from tests.support.announced import weight_event
from tests.support.tiny_model import write_model

LORA = Lora(rank=4, alpha=8, publish="adapter")


def write_base(root: Path, seed: int = 0) -> Path:
    """Version 0, full weights."""
    model = write_model(root / "model", seed)
    return checkpoint.write(root / "weights", 0, checkpoint.adopt(model)).path


def write_adapter(base: Path, version: int, kind: Lora = LORA) -> Path:
    """An adapter as a learner writes it; its B are random, so that every version differs from every other."""
    begun = lora.prepare(checkpoint.read(base), kind)
    assert begun.adapter is not None
    draw = torch.Generator().manual_seed(version)
    weights = {
        name: 0.3 * torch.randn(tensor.shape, generator=draw) if name.endswith(B) else tensor
        for name, tensor in begun.adapter.weights.items()
    }
    state = replace(begun, adapter=replace(begun.adapter, weights=weights))
    return checkpoint.write(base.parent, version, state).path


def adapter_event(version: int, folder: Path) -> WeightVersion:
    """Its event."""
    return {**weight_event(version, folder), "mode": "adapter"}


@torch.inference_mode()
def adapter_differences(
    folder: Path, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float]
) -> list[float]:
    """|engine - plain forward with the adapter merged in| for each output token."""
    from transformers import AutoModelForCausalLM

    state = checkpoint.read(folder)
    assert state.adapter is not None
    model = AutoModelForCausalLM.from_pretrained(state.adapter.base, dtype=torch.float32).eval()
    model.load_state_dict(dict(lora.merge(state).weights))
    found = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [abs(found[i, token].item() - value) for i, (token, value) in enumerate(zip(output, logprobs, strict=True))]
