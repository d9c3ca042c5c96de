"""A GPU that cannot be used says why, and nobody trains on the CPU instead."""

from __future__ import annotations

import pytest
import torch

from millrace.infra.process import cuda
from millrace.trainers.backends.deepspeed.backend import DeepSpeedBackend
from millrace.trainers.backends.devices import check_bf16, fitting, on_gpu
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.errors import BadConfiguration

OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by ..."
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is "
    "free. Process 71 has 60.00 GiB memory in use. Of the allocated memory 17.00 GiB is allocated by PyTorch. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def fail() -> None:
    raise RuntimeError(OLD)


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(cuda, "usable", lambda: True)
    monkeypatch.setattr(cuda, "driver", lambda: "470.1")


@pytest.mark.usefixtures("old_driver")
@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("backend", [TorchBackend, DeepSpeedBackend])
def test_a_driver_that_is_too_old_is_no_reason_for_the_cpu(device: str | None, backend: type) -> None:
    with pytest.raises(BadConfiguration, match=r"driver 470\.1: The NVIDIA driver on your system is too old.*CUDA_VIS"):
        backend(device=device)


@pytest.mark.usefixtures("old_driver")
def test_who_asks_for_the_cpu_gets_it() -> None:
    assert not on_gpu("cpu")


def test_a_machine_without_a_card_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "usable", lambda: False)
    assert not on_gpu(None)
    with pytest.raises(BadConfiguration, match="cannot use the GPU"):
        on_gpu("cuda")


def test_a_card_without_bf16_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(BadConfiguration, match=r'Tesla T4 computes no bfloat16: .*precision = "fp32"'):
        check_bf16(torch.device("cuda"))
    check_bf16(torch.device("cpu"))


def test_a_model_that_does_not_fit_names_who_has_the_memory() -> None:
    with pytest.raises(BadConfiguration) as out, fitting("the actor"):
        raise torch.OutOfMemoryError(FULL)
    message = str(out.value)
    assert message.startswith("the actor does not fit in the card (CUDA out of memory.")
    assert "Process 71 has 60.00 GiB" in message
    assert "PYTORCH_ALLOC_CONF" not in message
    assert "activation_checkpointing" in message
