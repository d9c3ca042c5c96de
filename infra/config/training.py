"""How versions are trained: `[learner]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from millrace.infra.config.base import Positive, Seconds, Section

BACKENDS = ("torch", "fsdp", "archon", "deepspeed", "megatron")
"""what `[learner] backend` may begin with; the second and third are other names of the first"""


class Lora(Section):
    """A low-rank adapter that learns in place of the weights."""

    rank: Annotated[int, Field(ge=0)] = 0
    alpha: Positive = 16
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    publish: Literal["merge", "adapter"] = "merge"


class Learner(Section):
    """How versions are trained."""

    algorithm: str = Field(default="grpo", description="any algorithm of docs/algorithms, by name")
    knobs: dict[str, object] = Field(
        default={}, description='overrides of its preset: { clip_high = 0.3, reward_norm = "group/none" }'
    )
    backend: str = Field(
        default="torch",
        description="what computes (deepspeed and megatron: `make setup` installs them; elsewhere "
        "`pip install -e '.[backends]'`), and how models are spread over learners: torch, "
        '"torch:t2", "megatron:t2p2", "torch[actor]:d2+torch[critic]:d1", ...',
    )
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1, description="of DeepSpeed: what is cut over learners; 1 moments, 2 gradients too, 3 weights too"
    )
    zero_offload: bool = Field(
        default=False, description="of DeepSpeed from stage 1 on: moments and fp32 weights live in main memory"
    )
    reshard: bool = Field(
        default=False, description="of torch: gathered layers are freed between forward and backward, to save memory"
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = Field(
        default="1f1b", description="of torch with pipeline stages (p): in which order they work on micro-batches"
    )
    reference: str = Field(default="", description="directory of the frozen model that a KL penalty compares with")
    teacher: str = Field(default="", description="directory of the model that distillation learns from")
    reward_model: str = Field(
        default="",
        description="directory of the model that scores samples, of `millrace reward-model`; knobs.reward_model_coef",
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        default=1e-5, description="learning rate of AdamW; tiny models take more: the demo 3e-4"
    )
    warmup: Annotated[int, Field(ge=0)] = Field(
        default=10, description="optimizer steps over which the learning rate rises to lr"
    )
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the learning rate goes on after its warm-up"
    )
    decay_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="optimizer steps, warm-up among them, after which linear and cosine stay at lr_floor"
    )
    lr_floor: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="share of lr that they fall to")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of AdamW")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="gradients are clipped to this norm")
    lora: Lora = Field(
        default=Lora(),
        description="a rank above 0 trains an adapter on the targets alone; publish: merge writes full weights, "
        "adapter the adapter alone, which engines with adapters serve on the weights that it began with",
    )
    minibatches: Positive = Field(default=2, description="optimizer steps a version")
    critic_lr: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of a critic; 0: as lr")
    tokens_per_pack: Positive | Literal["auto"] = Field(
        default="auto",
        description="tokens of one packed row of a forward pass; auto: as many as the GPU has room for beside the "
        "model, measured before the first step, and 8192 on a CPU",
    )
    packing: Literal["sequential", "ffd", "kk"] = Field(
        default="sequential", description="how packed rows are filled: in order, first fit decreasing, most evenly"
    )
    prefix_sharing: bool = Field(
        default=False, description="compute tokens once that samples of a group begin with alike, its prompt above all"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="what layers compute in, with torch or deepspeed at stage 2 or 3; weights, moments, gradients and "
        "losses are fp32 always",
    )
    activation_checkpointing: bool | Literal["selective"] = Field(
        default=False,
        description="of torch: layers keep their input alone and compute the rest again in the backward pass; "
        "selective: they keep their attention and every second matrix product too",
    )
    fusion: Literal["auto", "liger", "compile", "none"] = Field(
        default="auto",
        description="of torch: elementwise work of layers in fewer kernels: liger-kernel's, or compiled ones; auto, on "
        "a GPU in bf16: liger where it is installed and knows the model, else compile",
    )
    repeatable: bool = Field(
        default=True,
        description="the same step gives the same bytes again, which `replay prove` needs; on an H100 it "
        "cost a seventh of a step, before layers were fused",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="of torch with one learner and bf16: moments and fp32 weights live in main memory, where the "
        "optimizer steps on as many CPU threads as threads says",
    )
    offload: tuple[Literal["actor", "critic", "reference", "teacher", "reward_model"], ...] = Field(
        default=(), description="roles whose tensors leave the device between their uses; torch alone"
    )
    learners: Annotated[int, Field(ge=0)] = Field(
        default=1, description="processes that `millrace up` starts, or as many as backend needs; 0: none"
    )
    threads: Positive = Field(default=1, description="CPU threads of each")
    host: str = Field(default="127.0.0.1", description="address other learners reach this one at")
    keep: Positive = Field(default=3, description="newest versions whose files are kept")
    keep_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="every n-th version's files are kept for good, to replay from; 0: version 0's alone"
    )
    anchor_every: Positive = Field(
        default=1, description="engines read every n-th version whole, those between as changes to their parent"
    )
    seed: int = Field(default=0, description="of every random choice")
    session_timeout_s: Seconds = Field(default=6, description="silence after which a learner counts as dead")
    collective_timeout_s: Seconds = Field(
        default=120, description="longest wait of learners for each other; above any step and checkpoint"
    )
    max_versions: Annotated[int, Field(ge=0)] = Field(default=0, description="stop at this version; 0: never")
    trackers: tuple[Literal["jsonl", "tensorboard", "mlflow", "wandb"], ...] = Field(
        default=(), description="where the numbers of each version go besides the ledger and telemetry: under home"
    )

    @field_validator("precision", mode="before")
    @classmethod
    def _check_precision(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith(("fp8", "float8", "mxfp8", "nvfp4")):
            raise ValueError(f'{value} has not been measured here, so nobody knows what it learns: choose "bf16"')
        return value

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, value: str) -> str:
        name = value.partition(":")[0].partition("[")[0]
        if name not in BACKENDS:
            raise ValueError(f"no backend {name}; choose {', '.join(BACKENDS)}, or a layout such as torch:t2")
        return value
