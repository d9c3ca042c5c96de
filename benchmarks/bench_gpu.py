"""Training on one card, in under eight minutes: `make gpu`, or `python -m benchmarks.bench_gpu [--parts ...]`.

    correctness   three steps by each backend, attention, fusion and way of saving memory, against float32 on the CPU;
                  each twice, since what is repeatable gives the same bytes
    speed         a GRPO step against TRL and the packed loop (`bench_peers`), at 0.6b and 1.7b, rows of 4k and 16k
    profile       one step by kind of kernel
    publication   what a version costs the step beside which it leaves the card and is written, at 1.7b
    experts       a step of a mixture by each way to compute its experts: one after another, or grouped
    memory        the budget that the card is found to have room for, and a step with it and with default settings
    long          samples of 32,768 tokens with checkpointing: on a card at 1.7b; on a CPU by two context ranks, against
                  one process (--tokens: how long)

    large         not among the parts that run by themselves, since 8b takes minutes to make: a step with an adapter,
                  and one with the optimizer in main memory

It needs neither registry nor engine. `--device cpu` runs each part with tiny shapes, so that what is prepared on a CPU
runs on a card. Goals: at least .95 of the packed loop and 4 times TRL at 0.6b, MFU of .30 and a version for .05 of a
step at 1.7b, no default that runs out of memory. It ends with 1 where a result is not the CPU's, a default runs out of
memory, or a version costs more."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import bench_peers
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.base import Backend
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.models.build import random_state
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches import kernels
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import TrainerError
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.adapter import Lora
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks
from tests.support.samples import VOCABULARY, random_samples, small_state
from tests.support.steps import train_in_cell, train_share

KINDS = ("qwen2", "qwen3", "llama", "gemma2")
EXACT, NARROW = 2e-5, 1e-2
"""largest difference of a weight after three steps of 1e-3, in fp32 and in bf16; updates reach 6e-3"""
KERNELS = {
    "matrix products": ("::mm", "addmm", "bmm", "gemm", "cutlass", "nvjet", "cublas", "xmma", "mm_"),
    "attention": ("flash", "fmha", "attention"),
    "optimizer": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy", "cast"),
    "reductions": ("reduce", "softmax", "norm", "sum"),
    "fused by triton": ("triton",),
}
"""kind -> what a kernel's name has; the first counts, the rest is elementwise"""


def backends(device: str) -> Iterator[tuple[str, Callable[[], Backend], float]]:
    """Name, what makes it, the largest difference."""
    torch_of = partial(TorchBackend, device=device)
    yield "torch fp32", torch_of, EXACT
    yield "torch fp32, not repeatable", partial(torch_of, deterministic=False), EXACT
    ways: dict[str, Compute] = {
        "": Compute(bf16=True, fusion="none"),
        ", compiled": Compute(bf16=True, fusion="compile"),
        ", checkpointing": Compute(bf16=True, checkpointing=True, fusion="none"),
        ", selective": Compute(bf16=True, checkpointing="selective", fusion="none"),
        ", compiled, checkpointing": Compute(bf16=True, checkpointing=True, fusion="compile"),
        ", optimizer in main memory": Compute(bf16=True, optimizer_offload=True, fusion="none"),
        ", default": Compute(bf16=True),
    }
    for name, compute in ways.items():
        if device == "cuda" or "compile" not in name:
            yield f"torch bf16{name}", partial(torch_of, compute=compute), NARROW
    for stage in (1, 3):
        yield f"deepspeed z{stage}", partial(make_backend, "deepspeed:d1", stage=stage), EXACT
    if device == "cuda":
        yield "megatron", partial(make_backend, "megatron:d1"), EXACT


def learn(backend: Backend, state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The weights after three steps, and how they were computed."""
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, policy("grpo", minibatches=2), Schedule(1e-3), budget=200)
    trainer.load(state)
    for seed in range(3):
        train_share(trainer, random_samples(seed, version=seed), 0, 1, version=seed)
    gathered, how = backend.gather(), trainer.kernels
    backend.tear_down()
    assert gathered is not None
    return {name: tensor.float().cpu() for name, tensor in gathered.weights.items()}, how


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def correctness(device: str) -> bool:
    """Whether every way gives the CPU's weights."""
    print(f"{'':8}{'':30} to fp32 on the CPU   twice the same   attention", flush=True)
    is_right = True
    for kind in KINDS if device == "cuda" else KINDS[1:2]:
        state = small_state(kind, head_dim=16) if kind != "gemma2" else small_state(kind)
        reference, _ = learn(TorchBackend(device="cpu"), state)
        for name, make, limit in backends(device):
            for siblings in _attentions(name, device):
                try:
                    apart, same, how = _compare(make, state, reference, siblings)
                except TrainerError as error:
                    print(f"{kind:8}{name:30} refused: {error}", flush=True)
                    continue
                is_right &= apart <= limit and (same or "not" in name)
                print(f"{kind:8}{name:30} {apart:8.1e} of {limit:.0e}  {same!s:14}  {how}", flush=True)
    return is_right


def _attentions(name: str, device: str) -> list[list[kernels.VarlenKernel]]:
    """The kernels to choose from: those there are, and none, where that makes a difference."""
    return (
        [kernels.KERNELS, []]
        if device == "cuda" and name in ("torch bf16", "torch bf16, compiled")
        else [kernels.KERNELS]
    )


def _compare(
    make: Callable[[], Backend],
    state: State,
    reference: dict[str, torch.Tensor],
    siblings: list[kernels.VarlenKernel],
) -> tuple[float, bool, str]:
    there, kernels.KERNELS = kernels.KERNELS, siblings
    try:
        (first, how), (second, _) = learn(make(), state), learn(make(), state)
    finally:
        kernels.KERNELS = there
    return furthest(reference, first), furthest(first, second) == 0, how.get("attention", "")


def speed(device: str) -> bool:
    """Each in a process of its own, which takes the card back."""
    cases = [(shape, budget, shape == "1.7b") for shape in ("0.6b", "1.7b") for budget in (4096, 16384)]
    for shape, budget, checkpointing in cases if device == "cuda" else [("tiny", 512, False)]:
        groups, only = (
            6 if shape == "1.7b" else 8,
            ["trl", "packed"] if shape == "0.6b" and budget > 4096 else ["packed"],
        )
        flags = ["--device", device, "--shape", shape, "--budget", str(budget), "--steps", "3", "--rows", "4"]
        flags += ["--groups", str(groups if device == "cuda" else 1), "--only", *only]
        flags += [*(["--bf16"] if device == "cuda" else []), *(["--checkpointing"] if checkpointing else [])]
        print(f"\n{shape}, rows of {budget} tokens{', checkpointing' if checkpointing else ''}", flush=True)
        if subprocess.run([sys.executable, "-m", "benchmarks.bench_peers", *flags], check=False).returncode:
            return False
    return True


def prepared(
    root: Path, device: str, shape: str, lora: Lora | None = None, **compute: Any
) -> tuple[Trainer, Callable[[], Any]]:
    """A trainer with an automatic budget, and a step of it, which answers with its report."""
    setup = bench_peers.Setup(device=device, bf16=device == "cuda")
    if not (root / "model").exists():
        bench_peers.make(root, 8 if device == "cuda" else 1, setup, shape=shape)
    backend = TorchBackend(device=device, compute=Compute(bf16=setup.bf16, **compute))
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, policy("grpo", minibatches=1), Schedule(1e-5), budget=None, lora=lora)
    trainer.load(checkpoint.adopt(root / "model"))
    samples = bench_peers.samples(root)
    groups = [range(len(samples) // bench_peers.SIZE)]
    return trainer, lambda: trainer.train(samples, minibatches=groups, version=0)


def profile(device: str) -> bool:
    """One step's kernels by kind; on a CPU its operators."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    with tempfile.TemporaryDirectory() as name:
        _, step = prepared(Path(name), device, "0.6b" if device == "cuda" else "tiny")
        for _ in range(2):
            step()
        began = time.perf_counter()
        step()
        alone = time.perf_counter() - began
        activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        with profiling(activities=[activity]) as trace:
            step()
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in trace.key_averages():
        words = event.key.lower()
        kind = next((kind for kind, parts in KERNELS.items() if any(part in words for part in parts)), "elementwise")
        seconds[kind] += (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e6
        launches[kind] += event.count
    busy = sum(seconds.values())
    print(f"\na step of {alone:.2f} s; busy {busy:.2f} s, {sum(launches.values())} launches")
    for kind, spent in seconds.most_common():
        print(f"{kind:18} {spent:7.3f} s  {spent / busy:5.1%}  {launches[kind]:7d}")
    return True


def publication(device: str) -> bool:
    """Whether a version leaves the step's path. A thread writes it beside the next step, as in a learner; where that
    takes longer than a step, the step after that waits for it, which the last line counts."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as writer:
        trainer, step = prepared(Path(name), device, "1.7b" if device == "cuda" else "tiny", checkpointing=True)
        backend = trainer.backend

        def write(finish: Callable[[], State] | None) -> tuple[float, float]:
            """Seconds until the state is in main memory, and on the disk."""
            assert finish is not None
            began = time.perf_counter()
            state = finish()
            copied = time.perf_counter()
            checkpoint.write(Path(name) / "versions", 1, state)
            return copied - began, time.perf_counter() - copied

        tokens = step().metrics["tokens_computed"]
        for finish in [backend.begin_gather(), backend.begin_gather()]:  # both sets of pinned memory, made once
            assert finish is not None
            finish()
        alone = min(_seconds(step) for _ in range(3))
        began = time.perf_counter()
        finish = backend.begin_gather()
        begun = time.perf_counter() - began
        writing = writer.submit(write, finish)
        del finish
        beside = _seconds(step)
        copied, written = writing.result()
    share = 1 - alone / (begun + beside)
    print(f"\na step of {tokens:.0f} tokens: alone {alone:.3f} s, beside a version {begun:.3f} + {beside:.3f} s")
    print(f"a version costs {share:.1%} of a step (goal: at most 5 %)")
    print(
        f"copied in {copied:.2f} s, written in {written:.2f} s, "
        f"which a step of {tokens * (copied + written) / alone:.0f} tokens hides"
    )
    backend.tear_down()
    return device != "cuda" or share <= 0.05


MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 4096,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
LARGE_LAYERS = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
"""of Qwen3-30B-A3B"""
SMALL_LAYERS = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "moe_intermediate_size": 96, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip


def experts(device: str) -> bool:
    """Whether learners, who leave that to transformers, compute in the faster of two ways. Its third, batched_mm,
    copies an expert's weights for each token: no card holds that, and a CPU took 18 times as long."""
    state = random_state(MIXTURE | (LARGE_LAYERS if device == "cuda" else SMALL_LAYERS))
    backend = TorchBackend(device=device, compute=Compute(bf16=device == "cuda"))
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, policy("grpo", minibatches=1), Schedule(1e-5), budget=8192)
    trainer.load(state)
    count, length = (16, 2048) if device == "cuda" else (4, 512)
    samples = [one_sample(length, backend.vocabulary, index) for index in range(count)]
    default, seconds = backend.model.get_experts_implementation()[""], {}
    for way in ("eager", "grouped_mm"):
        backend.model.set_experts_implementation(way)
        trainer.train(samples, minibatches=[[0]], version=0)
        seconds[way] = min(_seconds(lambda: trainer.train(samples, minibatches=[[0]], version=0)) for _ in range(3))
    print(f"\na mixture's step of {count * length} tokens; learners take {default}", flush=True)
    for way, taken in seconds.items():
        print(f"{way:12} {taken:7.3f} s  {seconds['eager'] / taken:5.2f} times the loop's speed", flush=True)
    backend.tear_down()
    return device != "cuda" or seconds[default] <= 1.05 * min(seconds.values())


def _seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def memory(device: str) -> bool:
    """The budgets that are found, by model and settings; whether each step fits."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("0.6b", {}),
        ("1.7b", {}),
        ("1.7b", {"checkpointing": "selective"}),
        ("1.7b", {"checkpointing": True}),
        ("1.7b", {"checkpointing": True, "optimizer_offload": True}),
    ]
    return _fits(device, cases if device == "cuda" else [("tiny", {})])


def large(device: str) -> bool:
    """Whether 8b trains on one card."""
    lean: dict[str, Any] = {"checkpointing": True}
    ways: list[dict[str, Any]] = [lean | {"lora": Lora(16, 32, ("q_proj", "v_proj"), "adapter")}]
    if device == "cuda":
        torch.set_num_threads(16)  # the optimizer's
        ways.append(lean | {"optimizer_offload": True})
    return _fits(device, [("8b" if device == "cuda" else "tiny", way) for way in ways])


def _fits(device: str, cases: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    print(f"\n{'':6} {'settings':44} rows of   peak GiB   a step", flush=True)
    is_right = True
    for shape, settings in cases:
        with tempfile.TemporaryDirectory() as name:
            try:
                trainer, step = prepared(Path(name), device, shape, **settings)
                step()
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                step()
            except TrainerError as error:
                print(f"{shape:6} {settings!s:44} {error}", flush=True)
                is_right = False
                continue
            peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
            print(
                f"{shape:6} {settings!s:44} {trainer.budget:7d} {peak:8.1f}   {time.perf_counter() - began:.2f} s",
                flush=True,
            )
            began = time.perf_counter()
            trainer.backend.gather()
            print(f"{'':51} gathered in {time.perf_counter() - began:.2f} s", flush=True)
            trainer.backend.tear_down()
    return is_right


def one_sample(tokens: int, vocabulary: int, seq: int) -> Sample:
    """Of random tokens, the first quarter a prompt."""
    draw = np.random.default_rng(seq)
    mask = (np.arange(tokens) >= tokens // 4).astype(np.uint8)
    return Sample(
        tokens=draw.integers(0, vocabulary, tokens).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=float(seq % 2),
        seq=0,
        group="long",
        trajectory=str(seq),
    )


def long(device: str, tokens: int) -> bool:
    """Whether a step of two samples of so many tokens fits on a card, or is the same by two context ranks."""
    if device == "cuda":
        with tempfile.TemporaryDirectory() as name:
            trainer, _ = prepared(Path(name), device, "1.7b", checkpointing=True)
            batch = [one_sample(tokens, trainer.backend.vocabulary, index) for index in range(2)]
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            trainer.train(batch, minibatches=[[0]], version=0)
            seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30
            print(f"\n2 samples of {tokens} tokens at 1.7b: {seconds:.1f} s, {peak:.1f} GiB", flush=True)
        return True
    state = small_state("qwen3", num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=tokens)
    batch = [one_sample(tokens, VOCABULARY, index) for index in range(2)]
    options = {"compute": Compute(checkpointing=True, logits=2**20)}
    made = []
    with Ranks(2) as ranks:
        for layout, world in (("torch:d1", 1), ("torch:c2", 2)):
            began = time.perf_counter()
            answer = ranks.run(
                train_in_cell, world, layout, options, state, policy("grpo", minibatches=1), [batch], tokens
            )
            print(
                f"{layout}: a step of 2 samples of {tokens} tokens in {time.perf_counter() - began:.0f} s", flush=True
            )
            made.append(answer[0])
    (plain_reports, plain), (reports, spread) = made
    loss, norm = (
        abs(reports[0].metrics[name] - plain_reports[0].metrics[name]) / max(1.0, abs(plain_reports[0].metrics[name]))
        for name in ("loss", "grad_norm")
    )
    apart = furthest(plain.weights, spread.weights)
    print(f"c2 against one process: loss {loss:.1e}, gradient norm {norm:.1e}, weights {apart:.1e} apart", flush=True)
    return loss < 2e-6 and norm < 1e-6 and apart < 5e-5


PARTS = {
    "correctness": correctness,
    "speed": speed,
    "profile": profile,
    "publication": publication,
    "experts": experts,
    "memory": memory,
    "long": long,
    "large": large,
}


def main() -> None:
    """Runs the parts, and ends with 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[name for name in PARTS if name != "large"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a long sample")
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        print("no card is used: tiny shapes, which show that each part runs and nothing about speed")
        torch.set_num_threads(1)
    else:
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    failed = []
    for name in chosen.parts:
        began = time.perf_counter()
        part = partial(long, tokens=chosen.tokens) if name == "long" else PARTS[name]
        if not part(chosen.device):
            failed.append(name)
        print(f"# {name}: {time.perf_counter() - began:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
