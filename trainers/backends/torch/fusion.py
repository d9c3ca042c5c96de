"""Elementwise work of layers in fewer kernels: liger-kernel's where it knows the model, else what torch compiles.

    auto      liger where it is installed and knows the kind of model, else compile; none on a CPU and in fp32
    liger     its norms, rotary embeddings and gated activations
    compile   each layer's forward pass, made once for all lengths; code is cached on the disk by torch
    none      the layers as transformers has them

Attention, head and loss are not theirs: those are `kernels.py` and `label_logprobs.py`, whatever is chosen here.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from millrace.trainers.errors import BadConfiguration
from millrace.trainers.private_apis.liger import knows

log = logging.getLogger("millrace.fusion")

Fusion = Literal["auto", "liger", "compile", "none"]
LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}


def fuse(model: PreTrainedModel, layers: Sequence[torch.nn.Module], choice: Fusion, device: torch.device) -> Fusion:
    """Makes `layers` of `model` compute so; answers with what was chosen. BadConfiguration for what cannot be."""
    kind = str(model.config.model_type)
    chosen = _choose(kind, device) if choice == "auto" else choice
    if chosen == "liger":
        if not _has_liger():
            raise BadConfiguration('[learner] fusion: liger-kernel is not installed: install it, or choose "compile"')
        if device.type != "cuda":
            raise BadConfiguration('[learner] fusion: liger-kernel computes on a GPU alone: choose "none" here')
        if not knows(kind):
            raise BadConfiguration(f'[learner] fusion: liger-kernel does not know {kind} models: choose "compile"')
        apply_liger_kernel(model, LIGER)
    elif chosen == "compile":
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if device.type == "cuda":
        log.info("%s (%s): fusion %s", type(model).__name__, kind, chosen)
    return chosen


def _choose(kind: str, device: torch.device) -> Fusion:
    if device.type != "cuda":
        return "none"
    if _has_liger() and knows(kind):
        return "liger"
    can_compile = find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return "compile" if can_compile else "none"


def _has_liger() -> bool:
    return find_spec("liger_kernel") is not None
