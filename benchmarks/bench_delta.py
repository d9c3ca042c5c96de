"""What a delta saves: `python -m benchmarks.bench_delta [--million 16] [--steps 3]`.

Two models. One of `--million` random bfloat16 weights (standard deviation 0.02, as trained ones), stepped by AdamW at
1e-6, the rate of reinforcement learning on models that are worth it: an update is far below half a bit of most
weights, so most stay as they are. And the tiny float32 model of the demonstration at 5e-4, of which nearly every bit
pattern changes. Gradients are random, so the optimizer moves every weight; clipping, sparsity and convergence would
only save more. The ratio is the bytes of a delta over those of the whole version; speeds are over the whole version's
bytes, on one thread, with a plain zstd of the same file beside them."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cramjam
import torch
from safetensors.torch import save

from millrace.trainers.weights import delta
from millrace.trainers.weights.tensorfile import open_file, open_folder
from tests.support.tiny_model import write_model


def versions(weights: dict[str, torch.Tensor], lr: float, steps: int, dtype: torch.dtype) -> Iterator[bytes]:
    """The weight files of version 0 and `steps` more, two optimizer steps each, of fp32 masters served in `dtype`."""
    masters = {name: weight.float().requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, weight_decay=0.0, betas=(0.9, 0.999))
    for version in range(steps + 1):
        for _ in range(2 if version else 0):
            for master in masters.values():
                master.grad = torch.randn_like(master)
            optimizer.step()
        yield save({name: master.detach().to(dtype) for name, master in masters.items()}, metadata={"format": "pt"})


def measure(title: str, files: Iterator[bytes], folder: Path) -> None:
    """Print the figures of each version of one model."""
    former: Path | None = None
    for version, data in enumerate(files):
        path = folder / f"{title}-{version}.safetensors"
        path.write_bytes(data)
        if former is not None:
            _row(title, version, former, path)
            former.unlink()
        former = path


def _row(title: str, version: int, former: Path, path: Path) -> None:
    old, new = open_file(former), open_file(path)
    size = path.stat().st_size
    began = time.perf_counter()
    made = delta.encode(old.tensors, new)
    encoded = time.perf_counter()
    link = delta.decode(made)
    same = all(data.data == new.tensors[name].data.data for name, data in delta.compose(old.tensors, [link]))
    applied = time.perf_counter()
    plain = len(cramjam.zstd.compress(path.read_bytes(), level=delta.LEVEL))
    packed = time.perf_counter()
    if not same:
        raise SystemExit("what came out is not what went in")
    total = sum(tensor.data.size // tensor.size for tensor in new.tensors.values())
    mega = size / 1e6
    print(
        f"{title:<18} version {version}: {link.changed / total:7.2%} changed, {len(made):>10,} of {size:>11,} bytes: "
        f"ratio {len(made) / size:.4f} (zstd alone {plain / size:.3f}); encode {mega / (encoded - began):.0f} MB/s, "
        f"apply {mega / (applied - encoded):.0f} MB/s, zstd {mega / (packed - applied):.0f} MB/s"
    )


def main() -> None:
    """Parses the flags, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_delta", description=__doc__)
    parser.add_argument("--million", type=float, default=16, help="weights of the large model, in millions")
    parser.add_argument("--steps", type=int, default=3, help="versions of each")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = max(1, int(options.million * 1e6) // (8 * 1024))
    large = {f"layers.{n}.weight": torch.randn(rows, 1024) * 0.02 for n in range(8)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure("bf16 at lr 1e-6", versions(large, 1e-6, options.steps, torch.bfloat16), folder)
        tensors = open_folder(write_model(folder / "tiny"))
        tiny = {n: torch.frombuffer(bytearray(t.data), dtype=torch.float32).view(t.shape) for n, t in tensors.items()}
        measure("fp32 at lr 5e-4", versions(tiny, 5e-4, options.steps, torch.float32), folder)


if __name__ == "__main__":
    main()
