"""How passes are computed: the number format, what is kept from forward to backward, which kernels. The optimizer does
not know: its weights, moments and gradients are fp32 always, and so are losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from millrace.trainers.backends.models.head import LOGITS, logits_on
from millrace.trainers.backends.torch.fusion import Fusion, fuse

Checkpointing = bool | Literal["selective"]


@dataclass(frozen=True, slots=True)
class Compute:
    """bf16: layers compute in bfloat16, from copies of the fp32 weights. checkpointing: a layer keeps its input alone
    and computes the rest again in backward; selective: it keeps its attention and every second matrix product too.
    logits: how many exist at once. fusion: see `fusion.py`. optimizer_offload: with bf16, weights in fp32, their
    gradients and moments are in main memory, where the optimizer steps."""

    bf16: bool = False
    checkpointing: Checkpointing = False
    logits: int = LOGITS
    fusion: Fusion = "auto"
    optimizer_offload: bool = False

    def on(self, device: torch.device) -> Compute:
        """The same for a device: what is chosen by its kind is chosen."""
        logits = logits_on(device) if self.bf16 and self.logits == LOGITS else self.logits
        return replace(self, logits=logits, fusion="none" if self.fusion == "auto" and not self.bf16 else self.fusion)

    def prepare(self, model: PreTrainedModel, layers: Sequence[torch.nn.Module], device: torch.device) -> Fusion:
        """Before the model is spread over ranks. Answers with how its layers are fused."""
        if self.checkpointing and model.training:
            settings: dict[str, Any] = {"use_reentrant": False}
            if self.checkpointing == "selective":
                settings["context_fn"] = _selective
            model.gradient_checkpointing_enable(settings)
        return fuse(model, layers, self.fusion, device)

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """What FSDP2 does with each unit's shards: gathers them as bf16, sums their gradients in fp32."""
        if not self.bf16:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def narrow(self, model: PreTrainedModel) -> None:
        """A model that is spread over nobody: its parameters become the bf16 copies. Buffers (rotary frequencies) stay
        as they are, as under FSDP2."""
        if self.bf16:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)


def _selective() -> Any:
    """What one layer keeps between its passes, in both of them."""
    products: Counter[bool] = Counter()

    def choose(context: Any, operator: Any, *_arguments: object, **_keywords: object) -> CheckpointPolicy:
        if "attention" in str(operator) or "attn" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
