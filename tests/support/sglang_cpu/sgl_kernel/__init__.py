"""Stands in for SGLang's kernels for CPUs, which are built from its source and lie in no registry: modules of SGLang
import names from here. A dense model in float32 samples with torch's own operations and calls none of them; whoever
does call one hears so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0"
__path__: list[str] = []


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not here: build SGLang's kernels for CPUs")

    return missing


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return call


if not torch.cuda.is_available():
    for _name in ("tensor", "empty", "zeros"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment,misc]
