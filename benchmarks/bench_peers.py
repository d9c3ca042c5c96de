"""A GRPO step against peers: `python -m benchmarks.bench_peers [--steps 4] [--groups 8]`.

The same random model, batch (long-tailed replies), AdamW and clip, each contender in a process of its own:

    millrace      Trainer and the torch backend: packed rows
    trl           TRL's GRPOTrainer, which gets the sampled batch instead of generating (loss type dapo, no KL)
    transformers  the loop that one would write: padded rows, log softmax, backward

Printed: real tokens a second, peak memory of a step above what was resident before it, the ratio of both to
millrace's, and how far the weights end from millrace's, which shows that the work was the same."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZE, PROMPT, ROWS = 8, 96, 8
LR, BETAS, CLIP = 1e-4, (0.9, 0.99), (0.2, 0.28)
VOCABULARY = 4096


def make(root: Path, groups: int) -> None:
    """Writes the model, and the batch: per sample a prompt, a reply, log-probabilities of the reply, a reward."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(root / "model")
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(groups):
        prompt = draw.integers(3, VOCABULARY, PROMPT).tolist()
        for length in np.clip(draw.lognormal(4.0, 0.9, SIZE), 8, 512).astype(int):
            reply = draw.integers(3, VOCABULARY, int(length)).tolist()
            with torch.no_grad():
                logits = model(torch.tensor([prompt + reply])).logits[0, PROMPT - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(reply)[:, None])[:, 0]
            noisy = logprobs.numpy() + draw.normal(0, 0.1, len(reply))
            rows.append([prompt, reply, noisy.tolist(), float(draw.random() < 0.5)])
    (root / "batch.json").write_text(json.dumps(rows))


def read(root: Path) -> tuple[list[Any], torch.Tensor]:
    """The rows, and GRPO's advantage of each."""
    rows = json.loads((root / "batch.json").read_text())
    rewards = torch.tensor([row[3] for row in rows]).view(-1, SIZE)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return rows, advantages.flatten()


def padded(rows: list[Any], advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """[B, S] tensors: prompts of one length, replies padded on the right."""
    longest = max(len(row[1]) for row in rows)

    def pad(values: list[Any], filler: float) -> torch.Tensor:
        return torch.tensor([value + [filler] * (longest - len(value)) for value in values])

    prompts = torch.tensor([row[0] for row in rows])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": pad([row[1] for row in rows], 0),
        "completion_mask": pad([[1] * len(row[1]) for row in rows], 0),
        "old_per_token_logps": pad([row[2] for row in rows], 0.0),
        "advantages": advantages,
    }


class Meter:
    """Seconds of each step after the first two, and peak memory above what was resident before them, in bytes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = self._before = 0
        self._count = 0

    def begin(self) -> None:
        """A step begins."""
        self._count += 1
        if self._count == 2:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            self._before = _status("VmRSS")
        self._started = time.perf_counter()

    def end(self) -> None:
        """A step ended."""
        if self._count > 2:
            self.seconds.append(time.perf_counter() - self._started)
        self.peak = _status("VmHWM") - self._before


def _status(name: str) -> int:
    """Bytes of this process."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def millrace(root: Path, steps: int, meter: Meter, **more: Any) -> dict[str, torch.Tensor]:
    """Ours."""
    from trainers import checkpoint
    from trainers.algorithms.registry import algorithm
    from trainers.backends.fsdp import Adam, TorchBackend
    from trainers.batches.sample import Sample
    from trainers.learning import Schedule, Trainer

    rows, _ = read(root)
    samples = []
    for index, (prompt, reply, logprobs, reward) in enumerate(rows):
        size, new = len(prompt), len(reply)
        samples.append(
            Sample(
                tokens=np.array(prompt + reply, np.int32),
                mask=np.array([0] * size + [1] * new, np.uint8),
                logprobs=np.array([0.0] * size + logprobs, np.float32),
                versions=np.array([-1] * size + [0] * new, np.int32),
                reward=reward,
                seq=index // SIZE,
                group=str(index // SIZE),
                trajectory=str(index),
                truncated=False,
            )
        )
    backend = TorchBackend(Adam(BETAS), device="cpu")
    backend.form(0, 1, None, 60.0)
    chosen = algorithm("grpo", minibatches=1, clip_low=CLIP[0], clip_high=CLIP[1])
    trainer = Trainer(backend, chosen, Schedule(LR), budget=2048, **more)
    trainer.load(checkpoint.adopt(root / "model"))
    for version in range(steps + 2):
        meter.begin()
        trainer.train(samples, minibatches=[range(len(rows) // SIZE)], version=version)
        meter.end()
    state = backend.gather()
    assert state is not None
    return state.weights


def trl(root: Path, steps: int, meter: Meter) -> dict[str, torch.Tensor]:
    """TRL's own trainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows, advantages = read(root)
    batch = padded(rows, advantages) | {"num_items_in_batch": torch.tensor(sum(len(row[1]) for row in rows))}

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return dict(batch)

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end()

    words = Tokenizer(WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    accumulate = len(rows) // ROWS
    config = GRPOConfig(
        output_dir=str(root / "trl"),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_generations=SIZE,
        max_steps=steps + 2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=BETAS[1],
        epsilon=CLIP[0],
        epsilon_high=CLIP[1],
        beta=0.0,
        loss_type="dapo",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    model = Qwen2ForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
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


def transformers(root: Path, steps: int, meter: Meter) -> dict[str, torch.Tensor]:
    """The plain loop."""
    rows, advantages = read(root)
    model = Qwen2ForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    total = sum(len(row[1]) for row in rows)
    for _ in range(steps + 2):
        meter.begin()
        for start in range(0, len(rows), ROWS):
            batch = padded(rows[start : start + ROWS], advantages[start : start + ROWS])
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            logits = model(tokens, attention_mask=mask).logits[:, PROMPT - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
            ratio = torch.exp(logprobs - batch["old_per_token_logps"])
            pull = batch["advantages"][:, None]
            loss = -torch.minimum(ratio * pull, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * pull)
            ((loss * batch["completion_mask"]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.end()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


CONTENDERS: dict[str, Callable[[Path, int, Meter], dict[str, torch.Tensor]]] = {
    "millrace": millrace,
    "trl": trl,
    "transformers": transformers,
}


def contend(name: str, root: Path, steps: int) -> None:
    """In a child: the weights go to a file, the figures to the last line."""
    torch.set_num_threads(1)
    meter = Meter()
    weights = CONTENDERS[name](root, steps, meter)
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, root / f"{name}.safetensors")
    print(json.dumps({"seconds": sorted(meter.seconds)[len(meter.seconds) // 2], "peak": meter.peak}))


def main() -> None:
    """Prints a row a contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--contender", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.contender:
        contend(chosen.contender[0], Path(chosen.contender[1]), chosen.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make(root, chosen.groups)
        rows, _ = read(root)
        tokens = sum(len(row[0]) + len(row[1]) for row in rows)
        longest = max(len(row[1]) for row in rows)
        print(f"{len(rows)} samples, {tokens} tokens, replies up to {longest}; one thread; median of {chosen.steps}")
        print(f"{'':14} tokens/s   ratio   peak MB   ratio   weights differ by")
        ours: dict[str, float] = {}
        mine: dict[str, torch.Tensor] = {}
        for contender in CONTENDERS:
            command = [sys.executable, "-m", "benchmarks.bench_peers", "--steps", str(chosen.steps)]
            command += ["--contender", contender, name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{contender} failed:\n{done.stderr}")
            found = json.loads(done.stdout.splitlines()[-1])
            weights = load_file(root / f"{contender}.safetensors")
            ours, mine = ours or found, mine or weights
            apart = max(float((weights[key] - mine[key]).abs().max()) for key in mine)
            print(
                f"{contender:14} {tokens / found['seconds']:8.0f}  {ours['seconds'] / found['seconds']:6.2f}"
                f"  {found['peak'] / 2**20:8.0f}  {found['peak'] / ours['peak']:6.2f}   {apart:.1e}"
            )


if __name__ == "__main__":
    main()
