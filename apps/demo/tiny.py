"""A model small enough to learn on a laptop in a minute: Qwen2 with 228,384 parameters over characters.

Vocabulary of 32: PAD 0, BOS 1, EOS 2, then the characters of CHARACTERS from 3, an unknown, and fillers that no text
produces. The chat template writes a user message as `s` + content + `=` after one BOS, and a reply as its text and EOS,
so a chat request reads exactly as the warm start's samples do.

`python -m millrace.apps.demo.tiny DIR` makes one that sorts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from millrace.apps.demo import sort_digits
from millrace.infra.terminal import put
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import TrainerError
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.sampling import SampledReply, sample
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = "0123456789+=>abcdefs"
VOCABULARY = 32
REPLY = sort_digits.DIGITS + 1
"""Tokens of a right reply, EOS included."""

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 's' + message['content'] + '=' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('this model knows user and assistant messages only') }}{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; every id decodes."""
    words = ["<pad>", "<bos>", "<eos>", *CHARACTERS, "<unk>"]
    words += [f"<filler{index}>" for index in range(VOCABULARY - len(words))]
    base = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    base.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=TEMPLATE,
    )


def random_state(seed: int) -> State:
    """The untrained model with its tokenizer, in Hugging Face layout."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,  # heads of 32: the least that engines compute on a CPU
        num_key_value_heads=3,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    weights = {name: tensor.detach() for name, tensor in Qwen2ForCausalLM(config).named_parameters()}
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        tokenizer().save_pretrained(name)
        GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS).save_pretrained(name)
        assets = {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}
    return State(weights, assets, seed=seed)


def encode(digits: str) -> list[int]:
    """The prompt tokens of one user message: BOS s digits =."""
    return [BOS, *(3 + CHARACTERS.index(character) for character in f"s{digits}=")]


def decode(tokens: Sequence[int]) -> str:
    """The text of reply tokens, EOS dropped; ids that are no character become `?`, so that a verifier rejects them."""
    return "".join(
        CHARACTERS[token - 3] if 3 <= token < 3 + len(CHARACTERS) else "?" for token in tokens if token != EOS
    )


def to_sample(
    prompt: Sequence[int],
    reply: Sequence[int],
    logprobs: Sequence[float],
    *,
    reward: float | None,
    seq: int,
    name: str,
    version: int,
    is_truncated: bool = False,
) -> Sample:
    """One turn as a sample: the prompt masked, the reply trainable."""
    size, reply_size = len(prompt), len(reply)
    return Sample(
        tokens=np.array([*prompt, *reply], np.int32),
        mask=np.array([0] * size + [1] * reply_size, np.uint8),
        logprobs=np.array([0.0] * size + list(logprobs), np.float32),
        versions=np.array([-1] * size + [version] * reply_size, np.int32),
        reward=reward,
        seq=seq,
        group=str(seq),
        trajectory=name,
        truncated=is_truncated,
    )


def reward(digits: str, reply: SampledReply) -> float:
    """1.0 for the sorted digits followed by EOS."""
    return sort_digits.verify(digits, decode(reply.tokens)) if reply.finished else 0.0


def accuracy(backend: TorchBackend, digits: Sequence[str], generator: torch.Generator | None, n: int = 1) -> float:
    """Mean reward of n sampled replies a prompt (greedy without a generator)."""
    replies = sample(backend.model, [encode(d) for d in digits], n=n, max_tokens=REPLY, end=EOS, generator=generator)
    return float(np.mean([reward(digits[r.prompt], r) for r in replies]))


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What the warm start reached: SFT steps, sampled accuracy on held-out prompts, last loss, seconds."""

    steps: int
    accuracy: float
    loss: float
    seconds: float


def make_sort_policy(
    directory: Path,
    seed: int = 0,
    *,
    target: float = 0.3,
    max_steps: int = 600,
    progress: Callable[[int, float], None] = lambda step, accuracy: None,
) -> WarmStart:
    """Trains the tiny model by SFT until it sorts `target` of held-out prompts when sampled; saves it to `directory` in
    Hugging Face layout. TrainerError when `max_steps` do not suffice."""
    start = time.monotonic()
    backend = TorchBackend(Adam(weight_decay=0.01), device="cpu")
    backend.form(0, 1, None, 60.0)
    backend.load(random_state(seed))
    trainer = Trainer(backend, Sft(), Schedule(lr=1e-3, warmup=20))
    source = sort_digits.prompts(seed)
    held_out = list(islice(sort_digits.prompts(seed, evaluation=True), 256))
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, max_steps + 1):
        samples = [_lesson(digits, index) for index, digits in enumerate(islice(source, 128))]
        report = trainer.train(samples, minibatches=[range(len(samples))], version=0)
        if step >= 40 and step % 5 == 0:
            share = accuracy(backend, held_out, generator)
            progress(step, share)
            if share >= target:
                state = backend.gather()
                backend.tear_down()
                if state is not None:
                    checkpoint.export(directory, state)
                return WarmStart(step, share, report.metrics["loss"], time.monotonic() - start)
    raise TrainerError(f"{max_steps} steps of SFT stayed below {target:.0%}; try another seed or more steps")


def _lesson(digits: str, index: int) -> Sample:
    reply = [*encode(sort_digits.answer(digits))[2:-1], EOS]
    return to_sample(encode(digits), reply, [0.0] * len(reply), reward=None, seq=index, name=str(index), version=0)


def main(
    directory: Annotated[Path, typer.Argument(help="where the model goes")],
    target: Annotated[float, typer.Option(min=0, max=1, help="share of prompts that it sorts at least")] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="of the weights and the lessons")] = 0,
) -> None:
    """Make a tiny model that sorts six digits now and then, in Hugging Face layout. It takes about a minute."""

    def show(step: int, share: float) -> None:
        put(f"step {step}: sorts {share:.0%}")

    make_sort_policy(directory, seed, target=target, progress=show)


if __name__ == "__main__":
    typer.run(main)
