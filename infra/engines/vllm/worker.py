"""The receiving end of broadcasts, inside every worker process of vLLM.

vLLM resolves `--worker-extension-cls` to `Extension` here, and so learns of the weight-transfer backend `gloo`, which
it does not have itself: its own need a GPU on both sides. Its routes stay the same: `/init_weight_transfer_engine`
names the group, `/update_weights` names the bytes.

Invariants: all bytes are here and their sha256 is right before any weight is touched, so a transfer that fails leaves
the model as it was; a group serves one transfer."""

from __future__ import annotations

import pkgutil
from dataclasses import asdict, dataclass
from typing import Any, cast

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from millrace.infra.engines.kind import RECEIVER
from millrace.schemas.json_values import JsonObject

BACKEND = "gloo"


@dataclass
class TransferGroup(WeightTransferInitInfo):
    """Where the sender's store listens, and how many workers of this engine join (ranks 1 to `ranks`)."""

    host: str
    port: int
    ranks: int
    timeout_s: float


@dataclass
class Notice(WeightTransferUpdateInfo):
    """header: base64 of the weight file's first bytes; digest: sha256 hex of the whole file."""

    header: str
    digest: str


class WeightReceiver(WeightTransferEngine[TransferGroup, Notice]):
    """Joins the group that was named last, once for each update."""

    init_info_cls = TransferGroup
    update_info_cls = Notice
    _group: TransferGroup | None = None

    def init_transfer_engine(self, init_info: TransferGroup) -> None:
        """Remember the group; it is joined when there is something to receive."""
        self._group = init_info

    def start_weight_update(self) -> None:
        """Nothing: weights are touched once they are here."""

    def finish_weight_update(self) -> None:
        """Nothing: an update is whole when it was received."""

    def update_weights(self, update_info: JsonObject) -> None:
        """Receive, check and load. Without the synchronization of an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Notice) -> None:
        """Raises CorruptCheckpoint or RuntimeError, the model unchanged, when the bytes do not come."""
        group, self._group = self._group, None
        if group is None:
            raise RuntimeError("no group was named for this update: call /init_weight_transfer_engine first")
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + 1
        tensors = pkgutil.resolve_name(RECEIVER)(asdict(group), asdict(update_info), rank)
        model, finalize = cast(Any, self.model), cast(Any, finalize_layerwise_reload)  # vLLM does not type them
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        finalize(model, self.model_config)

    def shutdown(self) -> None:
        """Forget a group that was named and never joined."""
        self._group = None


class Extension:
    """Adds nothing to the worker but this module's import."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
