"""Makes docs/architectures.md and the list of tested architectures: every causal model of the installed transformers,
tiny and random, computed in every way and compared with plain transformers.

    make architectures        about eight minutes on one core
"""

from __future__ import annotations

import logging
import signal
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.architectures import EXACT, RIGHT, ROUNDING, ROWS, TOLERANCE, Verdict, judge

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architectures.md"
LIST = ROOT / "trainers" / "backends" / "models" / "architectures.py"
SECONDS = 60
"""that one architecture may take"""
OWN = (
    "each sample has a row of its own, filled up to the longest of its micro-batch; layouts cut the data alone (`d`), "
    "and beginnings are not shared"
)
WAYS = ("alone", "packed", "trained", "deepspeed", "megatron", "lora", "reward")
NOTES: dict[str, str] = {
    "megatron trains qwen2, qwen3 and qwen3_moe": "megatron",
    "to adapt; it has": "layers",
    "has no score head": "head",
    "with a score": "score",
    "its tokens see later ones": "causal",
    "transformers makes no": "class",
    "with a vocabulary": "class",
    "in several places": "shared",
    "read its weight": "mamba",
}
MEANINGS = {
    "megatron": "Megatron here computes qwen2, qwen3 and qwen3_moe; a torch layout trains the others",
    "layers": "it has no linear layer that adapters could be put on",
    "head": "its class of `transformers` has another head than `score`",
    "score": "`transformers` has no class of it that scores tokens",
    "causal": "its tokens see later ones, or how many there are",
    "class": "`AutoModelForCausalLM` makes no model of its config.json, or none that it reads again; see below",
    "shared": "adapters: one weight is in several layers",
    "mamba": "adapters: its kernels read the weights of its layers themselves",
}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("millrace.models").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    found = {kind: _judged(kind) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    PAGE.write_text(page(found))
    LIST.write_text(tested(found))


def _judged(kind: str) -> Verdict:
    with tempfile.TemporaryDirectory() as name:
        signal.alarm(SECONDS)
        try:
            verdict = judge(kind, Path(name))
        except TimeoutError as error:
            verdict = Verdict(*[f"untested: {error}"] * len(WAYS))
        finally:
            signal.alarm(0)
    print(kind, *(getattr(verdict, way) for way in WAYS), sep=" | ", flush=True)
    return verdict


def _too_long(*_: object) -> None:
    raise TimeoutError(f"its tiny model takes more than {SECONDS} s")


def page(found: dict[str, Verdict]) -> str:
    """The page of all architectures."""
    computed = {kind: v for kind, v in found.items() if not v.alone.startswith("untested")}
    able = {kind: v for kind, v in computed.items() if v.packed in (RIGHT, ROWS)}
    heads = ("architecture", *WAYS[:-1], "reward model")
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    rows += [row(kind, verdict) for kind, verdict in computed.items()]
    others: dict[str, list[str]] = {}
    for kind, verdict in computed.items():
        for way in WAYS:
            said = getattr(verdict, way)
            if said.startswith("refused") and _cell(said) in ("refused", "no: class"):
                others.setdefault(kind, []).append(f"{way}: {said.removeprefix('refused: ')}")
    reasons = [f"- {kind}: {_plain(lines[0])}" for kind, lines in others.items()]
    untested = [f"- {k}: {_plain(v.alone.removeprefix('untested: '))}" for k, v in found.items() if k not in computed]
    exact = max((v.exact for v in able.values()), default=0.0)
    over = [f"{kind} {v.gap:.1e}" for kind, v in able.items() if v.gap >= TOLERANCE]
    return "\n".join(
        [
            "# Architectures",
            "",
            f"Every causal language model of `transformers` {transformers.__version__}, as a tiny random model that",
            "its own class wrote to disk: log-probabilities (or scores) of each way of training against plain, eager",
            "`transformers` on each sample alone, in float32, attention and experts written out. Windows, caps and",
            "layers with a state are set to show; encoders have `is_decoder` set.",
            "`make architectures` makes this page.",
            "",
            f"Of {len(found)} architectures, {len(able)} train: {_count(able, RIGHT)} in packed rows and",
            f"{_count(able, ROWS)} in rows of their own. With both sides in float64, the largest distance of a",
            f"log-probability is {exact:.1e}; {EXACT:.0e} and more would be an error. In float32",
            f"{TOLERANCE:.0e} and more is an error, or {ROUNDING:.0e} where float64 shows that it is rounding:",
            f"{', '.join(over) or 'no architecture'}.",
            "",
            "Weights come in and go out through the conversion of `transformers` itself: a version has the names and",
            "the layout that `save_pretrained` writes (each expert by itself), which engines load. `trained` is one",
            "step, saved, loaded by `from_pretrained` and compared with the model that trained; the version read",
            "back bit for bit.",
            "",
            "Layers that draw numbers in training mode, or compute something else there (routers with a jitter, those",
            "of phimoe that sample experts), train as they answer, and dropout is 0. rwkv does not halve its hidden",
            "states to answer, so its last norm is given what it is given in training.",
            "",
            "Adapters are put on those of the default layers that a model has; where it has none, on all of its linear",
            "layers, as `[learner.lora] targets` would name them. Layers with one weight in several places take none,",
            "nor do those of Mamba, whose kernels read weights themselves.",
            "",
            "What a model's files hold and no gradient changes is kept bit for bit, in float32: persistent buffers,",
            "such as the bias that corrects an expert's score, scales of layers, decays, and parameters that their",
            "class has frozen. No rule changes them: the bias that balances experts without a loss stays as it was",
            "published. Layers that `transformers` does not read, such as those that predict several tokens, are in",
            "no version. Mixtures of experts compute by grouped matrix products where `transformers` has them for",
            "the class. Of models that read images or sound too, text trains; what it does not reach gets no",
            "gradient.",
            "",
            "| word | meaning |",
            "| --- | --- |",
            "| right | samples share a row and have the numbers that they have alone |",
            f"| own rows | {OWN} |",
            "| refused | the learner says why when it loads the model |",
            *(f"| no: {word} | {meaning} |" for word, meaning in MEANINGS.items()),
            "",
            "At load a model is compared again, with its own weights: a batch of three short samples against plain",
            "`transformers`. A model that is not on this page trains if that comparison holds, and the log calls it",
            "untested. Pipeline stages are compared with the whole model at load, and experts that are to be spread",
            "with what they would compute; tensor and context parallelism are compared for the models of",
            "[conformance.md](conformance.md) alone. Quantised weights are refused: save them in bfloat16 first.",
            "",
            *rows,
            "",
            "## Refused",
            "",
            *reasons,
            "",
            "## Untested",
            "",
            *(untested or ["None."]),
            "",
        ]
    )


def row(kind: str, verdict: Verdict) -> str:
    """Of the page's table."""
    return f"| {kind} | " + " | ".join(_cell(getattr(verdict, way)) for way in WAYS) + " |"


def _count(found: dict[str, Verdict], way: str) -> int:
    return sum(verdict.packed == way for verdict in found.values())


def _cell(said: str) -> str:
    if said in (RIGHT, ROWS):
        return said
    if said.startswith("refused"):
        return next((f"no: {word}" for part, word in NOTES.items() if part in said), "refused")
    return said.split(":")[0]


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;").replace(str(ROOT), "").strip()[:260]


def tested(found: dict[str, Verdict]) -> str:
    """The module that names what was compared."""
    names = [kind for kind, verdict in found.items() if verdict.packed in (RIGHT, ROWS)]
    lines = "".join(f"        {name!r},\n" for name in names)
    return (
        '"""Architectures whose numbers were compared; `make architectures` makes this list."""\n\n'
        "from __future__ import annotations\n\n"
        "TESTED_KINDS = frozenset(\n    (\n" + lines.replace("'", '"') + "    )\n)\n"
        '"""model types"""\n'
    )


if __name__ == "__main__":
    main()
