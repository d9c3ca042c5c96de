"""Bytes that the warehouse keeps for a token of a sample: `python -m benchmarks.bench_tokens`. The limit is 2.5.

The text is this repository's own, cut by a byte-pair vocabulary of up to 32,000 that is trained on it. Groups of eight
samples share a prompt; the other half of each is sampled, with log-probabilities of a bigram model whose last digits
are random, as a real model's are. The ratio to zstd-1 of the same arrays, as a producer would batch them, is printed
too."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cramjam
import numpy as np
from tokenizers import ByteLevelBPETokenizer

from millrace.consumers.warehouse.open_store import make_tables
from millrace.consumers.warehouse.store.directory import TableDirectory

LIMIT, VOCABULARY, GROUP = 2.5, 32_000, 8
ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "consumers", "infra", "streams", "formats", "producers", "trainers", "tests")
KEPT = ("lineages.tokens", "lineages.mask", "lineages.logprobs", "lineages.versions")


def ids() -> np.ndarray:
    """The repository's text, as tokens."""
    files = sorted(file for name in FOLDERS for file in (ROOT / name).rglob("*") if file.suffix in (".md", ".py"))
    texts = [file.read_text() for file in files]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    return np.concatenate([np.array(tokenizer.encode(text).ids, np.int32) for text in texts])


def logprobs(tokens: np.ndarray) -> np.ndarray:
    """Of each token behind the one before it."""
    pairs = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    both, first = Counter(pairs), Counter(tokens[:-1].tolist())
    found = np.array([0.0, *(np.log(both[pair] / first[pair[0]]) for pair in pairs)])
    random = np.random.default_rng(0)
    return (found - random.exponential(0.1, len(found))).astype(np.float32)


def samples(tokens: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, mask, log-probabilities and versions of each sample, group after group."""
    half, said = length // 2, logprobs(tokens)
    mask = np.repeat(np.array([0, 1], np.uint8), half)
    for group, first in enumerate(range(0, len(tokens) - half * (GROUP + 1), half * (GROUP + 1))):
        for sample in range(1, GROUP + 1):
            at = first + sample * half
            whole = np.concatenate([tokens[first : first + half], tokens[at : at + half]])
            behind = np.concatenate([np.zeros(half, np.float32), said[at : at + half]])
            yield whole, mask, behind, np.where(mask, group // 8, -1).astype(np.int32)


def main() -> None:
    """Prints bytes a token by column, and the ratio to the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    options = parser.parse_args()
    rows, raw = [], bytearray()
    for number, arrays in enumerate(samples(ids(), options.length)):
        rows.append(["sort", str(number // GROUP), number, *([array.tolist()] for array in arrays)])
        raw += b"".join(array.tobytes() for array in arrays)
    count = len(rows) * options.length
    with tempfile.TemporaryDirectory() as folder, TableDirectory(Path(folder) / "w") as store:
        make_tables(store)
        with store.client("millrace_log") as client:
            client.insert("trajectories", rows, column_names=["policy", "group", "off", *KEPT])
        found = dict(
            store.rows(
                "SELECT name, data_compressed_bytes FROM system.columns WHERE database = 'millrace_log'"
                " AND table = 'trajectories' AND startsWith(name, 'lineages.') AND data_compressed_bytes > 0"
            )
        )
    for name, size in found.items():
        print(f"{name}: {size / count:.2f} bytes a token")
    kept, batched = sum(found.values()) / count, len(cramjam.zstd.compress(bytes(raw), level=1)) / count
    print(f"{count} tokens: {kept:.2f} bytes each, {batched:.2f} in a producer's batch (ratio {kept / batched:.2f})")
    print(f"ratio to the limit of {LIMIT} bytes: {kept / LIMIT:.2f}")


if __name__ == "__main__":
    main()
