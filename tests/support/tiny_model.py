"""Tiny random Qwen2 directories in Hugging Face layout, with a byte-level BPE chat tokenizer.

Invariants: the same seed gives the same bytes; embeddings are untied (vLLM on CPU does not rebuild a tied ``lm_head``
on reload); matrices are scaled up so that two seeds give clearly different log-probabilities; every directory carries a
``manifest.json`` of sha256 sums like a learner's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millrace.trainers.weights import manifest
from millrace.trainers.weights.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB = 512
EOS = 2
CONTEXT = 1024

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Train the 512-entry BPE chat tokenizer (deterministic) and save it under ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(60)], trainer)
    while core.get_vocab_size() < VOCAB:
        core.add_tokens([f"<|x{core.get_vocab_size()}|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_model(
    folder: Path, seed: int = 0, *, hidden: int = 64, layers: int = 2, config: PretrainedConfig | None = None
) -> Path:
    """Save a random model of ``seed`` with tokenizer and manifest under ``folder``; returns ``folder``.

    ``hidden`` other than the default gives a directory whose tensors do not fit the default architecture; ``config``
    another architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder.mkdir(parents=True, exist_ok=True)
    config = config or Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_manifest(folder)
    return folder


def write_manifest(folder: Path) -> Manifest:
    """(Re)write the manifest over every other file of `folder`."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != manifest.NAME]
    listing = Manifest({path.name: manifest.file_hash(path) for path in files})
    (folder / manifest.NAME).write_bytes(listing.to_bytes())
    return listing
