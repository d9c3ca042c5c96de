"""How a model's samples are computed: together in a packed row, each in a row of its own, or not at all.

What the model asks of its attention and whether its layers carry a state along the row is read from its configuration
and its modules. Then a short batch is computed the way that follows from it and compared with plain `transformers`,
eager, on each sample alone. Windows are narrowed meanwhile, so that samples of a few tokens are longer than them.

    packed rows         attention alone looks along the row, and `packed_attention` computes all that it asks
    rows of their own   a state along the row, masks of the model's own, or other arguments of its attention
    refused             neither gives the numbers of plain transformers

The same batch is computed in training mode too. Layers that draw numbers there, or compute something else, stay as they
answer: a ratio of policies is that of the policies then.

Invariants: the weights are not copied or changed and no number is drawn; the outcome is a function of config.json and
is found once a process.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from millrace.trainers.backends.models import rows
from millrace.trainers.backends.models.architectures import TESTED_KINDS
from millrace.trainers.backends.models.forward import run
from millrace.trainers.backends.models.head import instead
from millrace.trainers.backends.models.stages import name_of
from millrace.trainers.batches import attention
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.private_apis.transformers import attention_of, set_attention
from millrace.trainers.weights.model_class import tensors_of

log = logging.getLogger("millrace.models")

TOLERANCE = 1e-3
"""largest distance of a token's hidden state from plain transformers', over its length, in float32"""
LENGTHS = (11, 7, 7)
WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size")
TRIES = 2
"""batches that are tried, since rounding alone may send a token to another expert"""
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse")
"""entries of `layer_types` that carry no state along the row"""


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is computed. attention: the name that transformers knows it by. because: why not in packed rows.
    gap: as measured; None where plain transformers computes no finite number to compare with. is_still: whether its
    layers train as they answer."""

    attention: str = attention.NAME
    because: str = ""
    gap: float | None = 0.0
    is_still: bool = False

    @property
    def packs(self) -> bool:
        """Whether samples share a row."""
        return self.attention == attention.NAME


_ways: dict[bytes, Way] = {}


def settle(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], configuration: bytes) -> Way:
    """Makes a whole `model` compute in the way that is right for it. `weights`: its parameters; the model's own are not
    read. BadConfiguration, with the reasons, where no way is."""
    key = hashlib.sha256(configuration).digest()
    way = _ways.get(key)
    if way is None:
        way = find(model, weights)
        _ways[key] = way
        _tell(model, way)
    use(model, way.attention)
    if way.is_still:
        _still(model)
    return way


def find(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Way:
    """The first way that gives plain transformers' numbers. BadConfiguration where none does."""
    training = model.training
    model.train(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), narrow(model):
            return _find(model, weights)
    finally:
        model.train(training)


def _find(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Way:
    case = _Case(model, weights)
    stretches = _stretches(model.config)
    if stretches:
        raise BadConfiguration(f"{_name(model)}: {stretches}")
    reversible = {type(module).__name__ for module in model.modules() if hasattr(module, "backward_pass")}
    if reversible:
        raise BadConfiguration(
            f"{_name(model)}: {', '.join(reversible)} trains on rows of whole chunks alone: name another model"
        )
    batches = [_batch(int(model.config.get_text_config().vocab_size), seed) for seed in range(TRIES)]
    try:
        truths = [_alone(case, batch.members) for batch in batches]
        unpadded = [pack(batch.members[-1:]) for batch in batches]  # of which transformers makes no mask
        ahead = _looks_ahead(case, batches[0])
    except Exception as error:  # any model's own code
        raise BadConfiguration(f"{_name(model)}: plain transformers cannot compute it: {_line(error)}") from error
    if ahead:
        raise BadConfiguration(
            f"{_name(model)}: its tokens see later ones, or their number: name a causal model, or set is_decoder"
        )
    finite = all(bool(torch.isfinite(truth).all()) for truth in truths)
    because: list[str] = []
    state = carries(model)
    if state:
        because.append(f"its layers carry a state along the row ({', '.join(state)})")
    for name in (attention.NAME, rows.NAME, rows.EAGER):
        if name == attention.NAME and state:
            continue
        use(model, name)
        try:
            gap = _gap(case, batches, truths, is_packed=name == attention.NAME)
            if name != attention.NAME:
                ends = [truth[-batch.trainable :] for truth, batch in zip(truths, unpadded, strict=True)]
                gap = max(gap, _gap(case, unpadded, ends, is_packed=False))
        except Exception as error:  # any model's own code: what it raises says why this way is none
            because.append(_line(error))
            continue
        if not finite or gap <= TOLERANCE:
            is_still = _trains_otherwise(case, batches, truths) if finite else False
            return Way(name, "; ".join(dict.fromkeys(because)), gap if finite else None, is_still)
        where = {attention.NAME: "in packed rows", rows.NAME: "in rows of their own"}.get(name, "in rows, eager")
        because.append(f"{where} its hidden states are off by {gap:.1e}")
    raise BadConfiguration(
        f"{_name(model)} cannot be trained here: {'; '.join(because)}. docs/architectures.md lists the models that can"
    )


def _trains_otherwise(case: _Case, batches: Sequence[MicroBatch], truths: Sequence[torch.Tensor]) -> bool:
    """Whether a model whose way is set draws numbers in training mode, or computes others. BadConfiguration where it
    computes none."""
    model = case.behind
    packs = attention_of(model.config) == attention.NAME
    before = torch.get_rng_state()
    model.train(True)
    try:
        gap = _gap(case, batches, truths, is_packed=packs)
    except Exception as error:  # any model's own code
        raise BadConfiguration(f"{_name(model)} cannot be trained: in training mode, {_line(error)}") from error
    finally:
        model.train(False)
    return gap > TOLERANCE or not torch.equal(before, torch.get_rng_state())


def _still(model: PreTrainedModel) -> None:
    """Keeps layers of a model as they answer, whatever mode it is in; not those that compute again for backward, which
    ask for its mode."""
    model.train(False)
    for module in model.modules():
        if not any(hasattr(part, "gradient_checkpointing") for part in module.modules()):
            object.__setattr__(module, "train", MethodType(_stay, module))
    model.train(True)


def _stay(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return module


def check_stages(model: PreTrainedModel, parts: Iterable[PreTrainedModel], weights: Mapping[str, torch.Tensor]) -> None:
    """BadConfiguration unless pipeline stages, one after another, compute what a whole `model` does, whose way is
    known. weights: of the whole one; the models' own are not read."""
    batch = _batch(int(model.config.get_text_config().vocab_size), 0)

    def hidden_of(part: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
        case = _Case(part, {name: weights[name_of(part, name)] for name in tensors_of(part)})
        head = rows.head_of(case) if hasattr(part, "score") or part.get_output_embeddings() else torch.nn.Identity()
        with instead(head, lambda hidden: hidden):
            return run(case, batch, **inputs)

    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            truth = hidden_of(model.train(False))
            hidden = None
            for part in parts:
                use(part.train(False), attention_of(model.config))
                hidden = hidden_of(part, **({} if hidden is None else {"inputs_embeds": hidden}))
            gap = torch.inf if hidden is None else float((hidden - truth).norm() / truth.norm().clamp(min=1e-6))
    except BadConfiguration:
        raise
    except Exception as error:  # any model's own code
        raise BadConfiguration(f"{_name(model)} makes no pipeline stages: {_line(error)}: choose p1") from error
    finally:
        model.train(training)
    if not gap <= TOLERANCE and bool(torch.isfinite(truth).all()):
        raise BadConfiguration(
            f"{_name(model)} in pipeline stages computes something else, off by {gap:.1e}: choose p1"
        )


def carries(model: PreTrainedModel) -> list[str]:
    """What in a model, beside attention, takes something from one token of a row to later ones, by name."""
    convolutions = {type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Conv1d)}
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return sorted(convolutions | {str(kind) for kind in kinds if not _attends(str(kind))})


def _stretches(config: PretrainedConfig) -> str:
    """Why rotary embeddings of a sample would depend on the longest one beside it; empty where they do not. Those that
    grow with the sample (dynamic) do so beyond `context_length` alone, where no sample is."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):  # one for each kind of layer
        original = part.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if part.get("rope_type") == "longrope" and original and original < text.max_position_embeddings:
            factor = part.get("factor") or text.max_position_embeddings / original
            scale = part.get("attention_factor") or math.sqrt(1 + math.log(max(1, factor)) / math.log(original))
            return (
                "its rotary embeddings (longrope) change with the longest sample of a batch: set "
                f"max_position_embeddings = {original} in config.json and, beside rope_type there, attention_factor = "
                f"{scale}"
            )
    return ""


def _attends(kind: str) -> bool:
    return kind in ATTENTION or kind.endswith(("sliding_attention", "full_attention", "sparse_attention"))


def use(model: torch.nn.Module, name: str) -> None:
    """Makes every layer of a model attend by the attention of this name."""
    for config in configurations(model):
        set_attention(config, name)


def configurations(model: torch.nn.Module) -> list[PretrainedConfig]:
    """Of the model and of its modules, each once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PretrainedConfig)}.values())


@contextmanager
def narrow(model: torch.nn.Module) -> Iterator[None]:
    """Inside, windows of attention are at most `WINDOW` tokens wide."""
    changes: list[tuple[object, str, int]] = []
    for owner in [*configurations(model), *model.modules()]:
        for name in WINDOWS:
            width = vars(owner).get(name)
            if isinstance(width, int) and not isinstance(width, bool) and width > WINDOW:
                changes.append((owner, name, width))
                setattr(owner, name, WINDOW)
    try:
        yield
    finally:
        for owner, name, width in changes:
            setattr(owner, name, width)


class _Case(torch.nn.Module):
    """A model that computes with weights which are not its own parameters."""

    def __init__(self, model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._model, self._weights = [model], dict(weights)

    @property
    def behind(self) -> PreTrainedModel:
        return self._model[0]

    def forward(self, **inputs: object) -> object:
        return torch.func.functional_call(self._model[0], self._weights, (), inputs, tie_weights=True)


def _alone(case: _Case, samples: Sequence[Sample]) -> torch.Tensor:
    """Hidden states [M, H] of each sample alone, by plain transformers."""
    use(case.behind, rows.EAGER)
    outputs = []
    with instead(rows.head_of(case), lambda hidden: hidden):
        for member in samples:
            tokens = torch.from_numpy(member.tokens.astype(np.int64))[None]
            hidden = case(input_ids=tokens, use_cache=False).logits
            outputs.append(hidden[0, np.flatnonzero(member.mask) - 1])
    return torch.cat(outputs).float()


def _looks_ahead(case: _Case, batch: MicroBatch) -> bool:
    """Whether a token's hidden state depends on tokens after it."""
    longest = batch.members[-1]
    size = longest.length // 2
    prefix = _sample(longest.tokens[:size], 0)
    uncut, cut = _alone(case, [longest])[: size - 1], _alone(case, [prefix])
    return bool((uncut - cut).norm() > TOLERANCE * uncut.norm())


def _gap(case: _Case, batches: Sequence[MicroBatch], truths: Sequence[torch.Tensor], *, is_packed: bool) -> float:
    """The smallest over the batches of the largest distance of a token's hidden state. BadConfiguration where packed
    attention is not asked at all."""
    gaps = []
    scalar = hasattr(case.behind, "score")
    for batch, truth in zip(batches, truths, strict=True):
        with instead(rows.head_of(case), lambda hidden: hidden), attention.count_calls() as calls:
            distances = (
                run(case, batch)[0, batch.at] if scalar else run(case, batch, logits_to_keep=batch.at)[0]
            ).float()
        if is_packed and not calls:
            raise BadConfiguration("its attention is written out in its own layers")
        if distances.shape != truth.shape:
            raise BadConfiguration(f"it answers {tuple(distances.shape)} where {tuple(truth.shape)} was asked")
        far = (distances - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-6)
        gaps.append(float(far.nan_to_num(nan=torch.inf).max()))
    return min(gaps)


def _batch(vocabulary: int, seed: int) -> MicroBatch:
    draw = np.random.Generator(np.random.PCG64(seed))
    return pack([_sample(draw.integers(vocabulary, size=length), index) for index, length in enumerate(LENGTHS)])


def _sample(tokens: NDArray[np.integer], index: int) -> Sample:
    size = len(tokens)
    return Sample(
        tokens=tokens.astype(np.int32),
        mask=np.array([0] + [1] * (size - 1), np.uint8),
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        reward=None,
        seq=0,
        group="probe",
        trajectory=str(index),
    )


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0][:200] if lines else "nothing more"
    return text if isinstance(error, BadConfiguration) else f"{type(error).__name__}: {text}"


def _tell(model: PreTrainedModel, way: Way) -> None:
    if not way.packs:
        log.warning(
            "%s: each sample is computed in a row of its own%s, because %s",
            _name(model),
            ", by transformers' eager attention" if way.attention == rows.EAGER else "",
            way.because,
        )
    if model.config.model_type not in TESTED_KINDS:
        log.warning(
            "%s: untested: docs/architectures.md does not have it, and a short comparison at load is all that was made",
            _name(model),
        )
    if way.gap is None:
        log.warning("%s: its weights give no finite number, so nothing was compared", _name(model))
