"""What a real vLLM server loads in tests so that a long reply lasts seconds on any machine: a test that pauses it in
the middle comes in time, however busy the machine is."""

from __future__ import annotations

import time

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

LONG = 400
"""tokens that a request allows from which on it is a long one: what tests pause allows 450"""
STEP_S = 0.01
ARGS = ("--logits-processors", "millrace.tests.support.unhurried:Unhurried")
"""arguments of the server"""


class Unhurried(LogitsProcessor):
    """Steps in which a long request takes part last `STEP_S` longer; what they give stays as it was."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._long: dict[int, bool] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # one that is gets left out of greedy steps

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._long, batch_update, lambda params, *_: _is_long(params) or None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._long:
            time.sleep(STEP_S)
        return logits


def _is_long(params: SamplingParams) -> bool:
    return (params.max_tokens or 0) >= LONG
