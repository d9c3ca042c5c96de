"""Megatron-core on a CPU: answers its device look-ups, changes no mathematics.

Megatron-core asks for a CUDA device in many places where any device would do. `install` makes those questions answer
`cpu`, for the life of the process, so only processes of their own may call it, before anything imports megatron.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch
import torch._dynamo  # before the patches: it lists torch's functions by identity
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
CUDA_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


class _Elsewhere(TorchFunctionMode):
    """device="cuda" means the CPU, nothing is pinned, and a tensor's type has the name that optimizers compare."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return CUDA_NAMES.get(answer, answer)
        return answer


class _Stream:
    """A stream that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


_mode: _Elsewhere | None = None


def install() -> None:
    """Once a process, and for good."""
    global _mode
    if _mode is not None:
        return
    _patch_torch()
    compiled, torch.compile = torch.compile, _eager
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Transformer Engine and Apex, which a CPU has no use for
        _patch_megatron()
    torch.compile = compiled
    _mode = _Elsewhere()
    _mode.__enter__()


def _eager(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


def _nothing(*_: Any, **__: Any) -> None: ...


def _patch_torch() -> None:
    stream = _Stream()
    for name, answer in {
        "current_device": lambda: CPU,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "set_device": _nothing,
        "_lazy_init": _nothing,
        "Stream": _Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, mark=_nothing)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and tensor is not None else tensor
    )
    moe_utils.te_general_gemm = None
