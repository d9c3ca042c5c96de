"""How passes are computed: the number format, and what is kept from forward to backward. The optimizer does not know:
its weights, moments and gradients are fp32 always, and so are losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from millrace.trainers.backends.models.head import LOGITS


@dataclass(frozen=True, slots=True)
class Compute:
    """bf16: layers compute in bfloat16, from copies of the fp32 weights. checkpointing: a layer keeps its input alone
    and computes the rest again in backward. logits: how many exist at once."""

    bf16: bool = False
    checkpointing: bool = False
    logits: int = LOGITS

    def prepare(self, model: PreTrainedModel) -> None:
        """Before the model is spread over ranks."""
        if self.checkpointing and model.training:
            model.gradient_checkpointing_enable({"use_reentrant": False})

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
