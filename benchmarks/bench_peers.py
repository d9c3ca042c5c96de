"""A GRPO step against peers: `python -m benchmarks.bench_peers [--steps 4] [--groups 8]`, and on a GPU
`--device cuda --shape 0.6b --bf16 --budget 16384 --rows 4`.

The same model (random, of the --shape, or that of --model), batch (long-tailed replies), AdamW and clip, each contender
in a process of its own:

    millrace      Trainer and the torch backend: packed rows
    trl           TRL's GRPOTrainer, which gets the sampled batch instead of generating (loss type dapo, no KL)
    transformers  the loop that one would write: padded rows, log softmax, backward
    packed        the loop that one would write for a GPU: packed rows, torch's attention for sequences of unlike
                  lengths, compiled layers, the head in pieces, fused AdamW

Weights, moments and loss are float32; with --bf16 layers compute in bfloat16, ours by Compute, the peers' by autocast.
--budget is the tokens of our micro-batches, --rows the samples of theirs.

Printed: real tokens a second, their share of the device's peak (MFU, where --peak-tflops or the device's name gives
one), peak memory, the ratio of speed and memory to millrace's and of speed to TRL's, and how far the weights end from
millrace's, which shows that the work was the same. On a CPU memory is what a step takes above what was resident before
it, on CUDA all that torch allocated at once."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from millrace.trainers import flops
from tests.support.forked import Fork

SIZE, PROMPT = 8, 96
LR, BETAS, CLIP = 1e-4, (0.9, 0.99), (0.2, 0.28)
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
EIGHT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("qwen2", SMALL),
    "tiny": ("qwen3", SMALL | {"hidden_size": 96, "head_dim": 16, "intermediate_size": 256, "vocab_size": 512}),
    "0.6b": ("qwen3", QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}),
    "1.7b": ("qwen3", QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}),
    "8b": ("qwen3", QWEN3 | EIGHT),
}
"""kind of model and its configuration; of the last three with Qwen's own dimensions"""
REPLIES = dict.fromkeys(("0.6b", "1.7b", "8b"), (6.2, 0.8, 2048))
"""mean and deviation of the logarithm of a reply's tokens, and the most of them, where not (4.0, 0.9, 512)"""
PIECE = 1024
"""rows of the packed loop's head at once"""
ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; sys.argv = {command}; from benchmarks.bench_peers import main; main()"
"""a contender's"""


@dataclass(frozen=True, slots=True)
class Setup:
    """How every contender computes. budget: tokens of our micro-batches; rows: samples of the peers'."""

    steps: int = 4
    device: str = "cpu"
    bf16: bool = False
    budget: int = 2048
    rows: int = 8
    checkpointing: bool = False

    @property
    def flags(self) -> list[str]:
        """The same, for a child's command line."""
        numbers = ["--steps", str(self.steps), "--budget", str(self.budget), "--rows", str(self.rows)]
        modes = [*(["--bf16"] if self.bf16 else []), *(["--checkpointing"] if self.checkpointing else [])]
        return [*numbers, "--device", self.device, *modes]

    def autocast(self) -> AbstractContextManager[Any]:
        """What a peer's forward pass runs in."""
        return torch.autocast(self.device, torch.bfloat16) if self.bf16 else nullcontext()


def make(root: Path, groups: int, setup: Setup, given: Path | None = None, shape: str = "small") -> None:
    """Writes the model, unless one is given, and the batch: per sample a prompt, a reply, log-probabilities of the
    reply, a reward."""
    if given is None:
        kind, settings = SHAPES[shape]
        torch.manual_seed(0)
        with torch.device(setup.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32)
        model.tie_weights()
        model.cpu().save_pretrained(root / "model")
    else:
        (root / "model").symlink_to(given.resolve())
    model = load(root).to(setup.device)
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        prompt = draw.integers(3, model.config.vocab_size, PROMPT).tolist()
        mean, deviation, most = REPLIES.get(shape, (4.0, 0.9, 512))
        for length in np.clip(draw.lognormal(mean, deviation, SIZE), 8, most).astype(int):
            reply = draw.integers(3, model.config.vocab_size, int(length)).tolist()
            with torch.no_grad():
                logits = model(torch.tensor([prompt + reply], device=setup.device)).logits[0, PROMPT - 1 : -1].cpu()
            logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(reply)[:, None])[:, 0]
            noisy = logprobs.numpy() + draw.normal(0, 0.1, len(reply))
            rows.append([prompt, reply, noisy.tolist(), float(draw.random() < 0.5)])
    (root / "batch.json").write_text(json.dumps(rows))


def load(root: Path) -> Any:
    """The model as transformers has it, in float32."""
    return AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)


def read(root: Path) -> tuple[list[Any], torch.Tensor]:
    """The rows, and GRPO's advantage of each."""
    rows = json.loads((root / "batch.json").read_text())
    rewards = torch.tensor([row[3] for row in rows]).view(-1, SIZE)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return rows, advantages.flatten()


def padded(rows: list[Any], advantages: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    """[B, S] tensors: prompts of one length, replies padded on the right."""
    longest = max(len(row[1]) for row in rows)

    def pad(values: list[Any], filler: float) -> torch.Tensor:
        return torch.tensor([value + [filler] * (longest - len(value)) for value in values])

    prompts = torch.tensor([row[0] for row in rows])
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": pad([row[1] for row in rows], 0),
        "completion_mask": pad([[1] * len(row[1]) for row in rows], 0),
        "old_per_token_logps": pad([row[2] for row in rows], 0.0),
        "advantages": advantages,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


class Meter:
    """Seconds of each step after the first two, and peak memory from the second on, in bytes."""

    def __init__(self, cuda: bool) -> None:
        self.seconds: list[float] = []
        self.peak = self._before = 0
        self._count = 0
        self._cuda = cuda

    def begin(self) -> None:
        """A step begins."""
        self._count += 1
        if self._count == 2:
            self._forget()
        self._started = self._now()

    def end(self) -> None:
        """A step ended."""
        if self._count > 2:
            self.seconds.append(self._now() - self._started)
        self.peak = torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM") - self._before

    def _forget(self) -> None:
        """The peak counts from here."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")

    def _now(self) -> float:
        """Seconds, once the device has done what it was told."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _status(name: str) -> int:
    """Bytes of this process."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def samples(root: Path) -> list[Any]:
    """The batch as ours trains it."""
    from millrace.trainers.batches.sample import Sample

    rows, _ = read(root)
    return [
        Sample(
            tokens=np.array(prompt + reply, np.int32),
            mask=np.array([0] * len(prompt) + [1] * len(reply), np.uint8),
            logprobs=np.array([0.0] * len(prompt) + logprobs, np.float32),
            versions=np.array([-1] * len(prompt) + [0] * len(reply), np.int32),
            reward=reward,
            seq=index // SIZE,
            group=str(index // SIZE),
            trajectory=str(index),
            truncated=False,
        )
        for index, (prompt, reply, logprobs, reward) in enumerate(rows)
    ]


def millrace(root: Path, setup: Setup, meter: Meter) -> dict[str, torch.Tensor]:
    """Ours."""
    from millrace.trainers.algorithms.registry import algorithm
    from millrace.trainers.backends.base import Adam
    from millrace.trainers.backends.torch.backend import TorchBackend
    from millrace.trainers.backends.torch.compute import Compute
    from millrace.trainers.learning import Schedule, Trainer
    from millrace.trainers.weights.checkpoint import adopt

    batch = samples(root)
    backend = TorchBackend(Adam(BETAS), device=setup.device, compute=Compute(setup.bf16, setup.checkpointing))
    backend.form(0, 1, None, 60.0)
    chosen = algorithm("grpo", minibatches=1, clip_low=CLIP[0], clip_high=CLIP[1])
    trainer = Trainer(backend, chosen, Schedule(LR), budget=setup.budget)
    trainer.load(adopt(root / "model"))
    for version in range(setup.steps + 2):
        meter.begin()
        trainer.train(batch, minibatches=[range(len(batch) // SIZE)], version=version)
        meter.end()
    state = backend.gather()
    assert state is not None
    return state.weights


def trl(root: Path, setup: Setup, meter: Meter) -> dict[str, torch.Tensor]:
    """TRL's own trainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows, advantages = read(root)
    total = torch.tensor(sum(len(row[1]) for row in rows), device=setup.device)
    batch = padded(rows, advantages, setup.device) | {"num_items_in_batch": total}

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return dict(batch)

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end()

    model = load(root)
    words = Tokenizer(WordLevel({str(n): n for n in range(model.config.vocab_size)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    accumulate = len(rows) // setup.rows
    config = GRPOConfig(
        output_dir=str(root / "trl"),
        per_device_train_batch_size=setup.rows,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_generations=SIZE,
        max_steps=setup.steps + 2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=BETAS[1],
        epsilon=CLIP[0],
        epsilon_high=CLIP[1],
        beta=0.0,
        loss_type="dapo",
        bf16=setup.bf16,
        gradient_checkpointing=setup.checkpointing,
        use_cpu=setup.device == "cpu",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": ["1"] * len(rows)})
    trainer = Given(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[Timed()],
    )
    trainer.train()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def transformers(root: Path, setup: Setup, meter: Meter) -> dict[str, torch.Tensor]:
    """The plain loop."""
    rows, advantages = read(root)
    model = load(root).to(setup.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    total = sum(len(row[1]) for row in rows)
    for _ in range(setup.steps + 2):
        meter.begin()
        for start in range(0, len(rows), setup.rows):
            stop = start + setup.rows
            batch = padded(rows[start:stop], advantages[start:stop], setup.device)
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with setup.autocast():
                logits = model(tokens, attention_mask=mask).logits[:, PROMPT - 1 : -1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
            ratio = torch.exp(logprobs - batch["old_per_token_logps"])
            pull = batch["advantages"][:, None]
            loss = -torch.minimum(ratio * pull, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * pull)
            ((loss * batch["completion_mask"]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.end()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def packed(root: Path, setup: Setup, meter: Meter) -> dict[str, torch.Tensor]:
    """The loop for a GPU."""
    rows, advantages = read(root)
    model, state, cuda = load(root).to(setup.device), dict[str, Any](), setup.device == "cuda"

    def attend(module: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if cuda and setup.bf16:
            q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
            bounds, longest = state["bounds"], max(state["lengths"])
            settings: Any = {"window_size": (-1, 0), "enable_gqa": True}
            return varlen_attn(q, k, v, bounds, bounds, longest, longest, **settings)[None], None
        parts = zip(*(x.split(state["lengths"]) for x in (q, k, v)), strict=True)
        heads = ([x.transpose(0, 1)[None] for x in part] for part in parts)
        out = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)[0] for part in heads]
        return torch.cat(out, 1).transpose(0, 1)[None], None

    AttentionInterface.register("packed_loop", attend)
    model.set_attn_implementation("packed_loop")
    model.train()
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if cuda:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    total = sum(len(row[1]) for row in rows)
    bins: list[list[int]] = [[]]
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i][1])):
        if sum(len(rows[i][0] + rows[i][1]) for i in [*bins[-1], index]) > setup.budget:
            bins.append([])
        bins[-1].append(index)

    def piece(hidden: Any, labels: Any, old: Any, pull: Any) -> torch.Tensor:
        logits = model.lm_head(hidden).float()
        ratio = torch.exp(torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0] - old)
        return -torch.minimum(ratio * pull, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * pull).sum() / total

    for _ in range(setup.steps + 2):
        meter.begin()
        for members in filter(None, bins):
            texts = [rows[i][0] + rows[i][1] for i in members]
            state["lengths"] = [len(text) for text in texts]
            ends = np.cumsum([0, *state["lengths"]])
            state["bounds"] = torch.tensor(ends, dtype=torch.int32, device=setup.device)
            tokens = torch.tensor([*chain(*texts)], device=setup.device)
            positions = torch.cat([torch.arange(len(text), device=setup.device) for text in texts])
            places = np.concatenate(
                [np.arange(end - len(rows[i][1]), end) for i, end in zip(members, ends[1:], strict=True)]
            )
            at = torch.tensor(places, device=setup.device)
            old = torch.tensor([*chain(*(rows[i][2] for i in members))], device=setup.device)
            pull = torch.cat([advantages[i].expand(len(rows[i][1])) for i in members]).to(setup.device)
            with setup.autocast():
                hidden = model.model(tokens[None], position_ids=positions[None]).last_hidden_state[0][at - 1]
                pieces = zip(*(x.split(PIECE) for x in (hidden, tokens[at], old, pull)), strict=True)
                loss = sum(checkpoint(piece, *part, use_reentrant=False) for part in pieces)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.end()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


CONTENDERS: dict[str, Callable[[Path, Setup, Meter], dict[str, torch.Tensor]]] = {
    "millrace": millrace,
    "trl": trl,
    "transformers": transformers,
    "packed": packed,
}


def contend(name: str, root: Path, setup: Setup) -> None:
    """In a child: the weights go to one file, the figures to another."""
    if setup.device == "cpu":
        torch.set_num_threads(1)
    meter = Meter(setup.device == "cuda")
    weights = CONTENDERS[name](root, setup, meter)
    save_file({key: tensor.cpu().contiguous() for key, tensor in weights.items()}, root / f"{name}.safetensors")
    figures = {"seconds": sorted(meter.seconds)[len(meter.seconds) // 2], "peak": meter.peak}
    (root / f"{name}.json").write_text(json.dumps(figures))


def run(name: str, root: Path, setup: Setup) -> dict[str, float]:
    """A contender's figures: seconds of a step, peak bytes."""
    command = ["bench_peers", *setup.flags, "--contender", name, str(root)]
    # TRL would spread over all GPUs that it sees
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    environment = os.environ | (one if setup.device == "cuda" else {})
    log = root / f"{name}.log"
    if Fork(PROGRAM.format(command=command), environment, ROOT, log).wait():
        sys.exit(f"{name} failed:\n{log.read_text(errors='replace')}")
    figures: dict[str, float] = json.loads((root / f"{name}.json").read_text())
    return figures


def peak(setup: Setup, tflops: float | None) -> tuple[str, float | None]:
    """The device in words, and its peak in FLOPs a second: as given, or as its name says."""
    if setup.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch finds no GPU (check nvidia-smi)")
        name = torch.cuda.get_device_name()
    else:
        name = "one thread"
    return name, flops.peak(name) if tflops is None else tflops * 1e12


def main() -> None:
    """Prints a row a contender."""
    usual = Setup()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--groups", type=int, default=8, help=f"of {SIZE} samples")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=usual.device)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the random model")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="millrace always")
    parser.add_argument("--checkpointing", action="store_true", help="layers are computed again in backward")
    parser.add_argument("--model", type=Path, help="directory in Hugging Face layout, in place of a small random one")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--budget", type=int, default=usual.budget)
    parser.add_argument("--rows", type=int, default=usual.rows)
    parser.add_argument("--peak-tflops", type=float, help="of the device, dense bf16; default: by its name")
    parser.add_argument("--contender", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    setup = Setup(chosen.steps, chosen.device, chosen.bf16, chosen.budget, chosen.rows, chosen.checkpointing)
    if chosen.contender:
        contend(chosen.contender[0], Path(chosen.contender[1]), setup)
        return
    if chosen.groups * SIZE % setup.rows:
        parser.error(f"--rows {setup.rows} does not divide the {chosen.groups * SIZE} samples")
    device, rate = peak(setup, chosen.peak_tflops)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root, chosen.groups, setup, chosen.model, chosen.shape)
        if setup.device == "cuda":
            torch.cuda.empty_cache()
        compare(root, setup, device, rate, [name for name in CONTENDERS if name in {"millrace", *chosen.only}])


def compare(root: Path, setup: Setup, device: str, rate: float | None, contenders: Sequence[str]) -> None:
    """Runs each contender on what `make` wrote, and prints the table."""
    rows, _ = read(root)
    tokens = sum(len(row[0]) + len(row[1]) for row in rows)
    longest = max(len(row[1]) for row in rows)
    print(f"{len(rows)} samples, {tokens} tokens, replies up to {longest}; {device}; median of {setup.steps}")
    print(f"MFU of {rate / 1e12:g} TFLOP/s" if rate else "no MFU: the device's peak is not known; --peak-tflops")
    figures: dict[str, dict[str, float]] = {}
    mine: dict[str, torch.Tensor] = {}
    apart: dict[str, float] = {}
    for contender in contenders:
        figures[contender] = run(contender, root, setup)
        weights = load_file(root / f"{contender}.safetensors")
        mine = mine or weights
        apart[contender] = max(float((weights[key].float() - mine[key].float()).abs().max()) for key in mine)
    shapes = [(key, tuple(tensor.shape)) for key, tensor in mine.items()]
    each = flops.per_token(shapes, json.loads((root / "model" / "config.json").read_text()), tokens / len(rows))
    ours, theirs = figures["millrace"], figures.get("trl", {}).get("seconds", math.nan)
    print(f"{'':14} tokens/s   ratio  to TRL    MFU   peak MB   ratio   weights differ by")
    for contender, found in figures.items():
        speed = tokens / found["seconds"]
        share = f"{flops.mfu(speed, each, rate):.3f}" if rate else "-"
        print(
            f"{contender:14} {speed:8.0f}  {ours['seconds'] / found['seconds']:6.2f}  {theirs / found['seconds']:6.2f}"
            f"  {share:>5}  {found['peak'] / 2**20:8.0f}  {found['peak'] / ours['peak']:6.2f}   {apart[contender]:.1e}"
        )


if __name__ == "__main__":
    main()
