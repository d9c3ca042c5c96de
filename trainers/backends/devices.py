"""The device that a backend computes on, or why not on the GPU that is there.

Invariant: a GPU that torch cannot use is an error, never a reason to train on the CPU in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from millrace.infra.process import cuda
from millrace.trainers.errors import REMEDIES, BadConfiguration


def on_gpu(device: str | None) -> bool:
    """Whether a backend that is asked for `device` (cpu, cuda, None for what there is) computes on a GPU.
    BadConfiguration where it should and torch cannot."""
    if torch.cuda.is_available():
        return device != "cpu"
    has_card = device is None and torch.version.cuda is not None and cuda.usable()
    if device == "cuda" or has_card:
        raise BadConfiguration(
            f"torch {torch.__version__} cannot use the GPU of this machine (driver {cuda.driver()}: {_reason()}): "
            "install the driver that this CUDA needs, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return False


def _reason() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition(". ")[0]
    return "no device is visible"


def check_bf16(device: torch.device) -> None:
    """BadConfiguration where the card computes no bfloat16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadConfiguration(
            f'{torch.cuda.get_device_name(device)} computes no bfloat16: set [learner] precision = "fp32"'
        )


@contextmanager
def fitting(model: str) -> Iterator[None]:
    """Inside, memory of the card that runs out becomes BadConfiguration, with who holds it and what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BadConfiguration(f"{model} does not fit in the card ({memory_text(error)}): {REMEDIES}") from None


def memory_text(error: torch.OutOfMemoryError) -> str:
    """What torch says of the card's memory, other processes of it too, without its advice for programmers."""
    return " ".join(str(error).partition("If reserved but")[0].split())
