"""Tensor parallelism with sequence parallelism: ranks share each layer's heads, its feed-forward width and the
vocabulary; between them each has its own positions of the row.

    embedding          its words; partial sums are summed and scattered over positions
    norms, residuals   own positions; replicated weights, whose gradients the ranks add up
    q, k, v, gate, up  gathered row, own heads or columns (cut on dimension 0)
    o, down            own columns (cut on dimension 1); partial sums are summed and scattered over positions
    experts, router    own positions; replicated (shared experts too), or spread by expert parallelism (`experts.py`)
    head               gathered row, own words; logits are joined. A scalar head sees own positions.

A row's length must be a multiple of the ranks (`slices.padded`). Names of parameters and their order stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from millrace.trainers.backends.parallel.collectives import Team, gather_rows, join, scatter_rows
from millrace.trainers.backends.parallel.experts import is_experts
from millrace.trainers.errors import BadConfiguration

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
WORDS = ("embed_tokens", "lm_head")


def cuts(model: PreTrainedModel) -> dict[str, int]:
    """The dimension on which each parameter is cut, by name; what is not named is replicated."""
    out = {}
    sparse = tuple(f"{at}." for at, module in model.named_modules() if at.endswith(".mlp") and _is_sparse(module))
    for name, parameter in model.named_parameters():
        if name.startswith(sparse):
            continue  # experts that all tokens visit too
        *path, kind = name.split(".")
        owner = path[-1] if path else ""
        if owner in COLUMNS or (owner in WORDS and kind == "weight"):
            out[name] = 0
        elif owner in ROWS and parameter.ndim == 2:
            out[name] = 1
    return out


def _is_sparse(feed: nn.Module) -> bool:
    return any(is_experts(module) for module in feed.modules())


def check(config: PretrainedConfig, size: int) -> None:
    """BadConfiguration, with the reason, unless a model of `config` divides over `size` ranks."""
    shares = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "words of the vocabulary": config.vocab_size,
        "columns of the feed-forward layers": getattr(config, "intermediate_size", 0),
    }
    for part, count in shares.items():
        if count % size:
            raise BadConfiguration(f"{count} {part} do not divide over t{size}; choose a t that divides them")


def apply(model: PreTrainedModel, team: Team) -> None:
    """Makes a model whose parameters are already cut compute on its part. BadConfiguration where its layers are not of
    the kind that this knows."""
    base: Any = model.base_model
    layers: Any = base.layers
    for layer in layers:
        _apply_layer(layer, team)
    words = base.embed_tokens
    if isinstance(words, nn.Embedding):
        if type(words) is not nn.Embedding:
            raise BadConfiguration(f"{type(words).__name__} does more than look words up; choose t1 for this model")
        base.embed_tokens = SplitWords(words, team)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        base.norm.register_forward_hook(lambda _module, _arguments, rows: gather_rows(rows, team))
        model.set_output_embeddings(SplitHead(head, team))
    score = getattr(model, "score", None)
    if isinstance(score, nn.Linear):
        model.score = Score(score, team)


def _apply_layer(layer: nn.Module, team: Team) -> None:
    attention, feed = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(feed, nn.Module):
        raise BadConfiguration(f"{type(layer).__name__} has no self_attn and mlp; choose t1 for this model")
    parts: Mapping[nn.Module, tuple[str, ...]] = {
        attention: ("q_proj", "k_proj", "v_proj", "o_proj"),
        **({} if _is_sparse(feed) else {feed: ("gate_proj", "up_proj", "down_proj")}),
    }
    for module, names in parts.items():
        missing = [name for name in names if not isinstance(getattr(module, name, None), nn.Linear)]
        if missing:
            raise BadConfiguration(f"{type(module).__name__} has no {missing[0]} to cut; choose t1 for this model")
        module.register_forward_pre_hook(_gathers(team), with_kwargs=True)
        setattr(module, names[-1], Rowwise(getattr(module, names[-1]), team))
    for name, parameter in attention.named_parameters():
        if name.split(".")[0] not in COLUMNS + ROWS and parameter.numel() > getattr(attention, "head_dim", 0):
            raise BadConfiguration(f"{type(attention).__name__} has {name}, of all heads; choose t1 for this model")


def _gathers(team: Team) -> Any:
    def gather(
        _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in keywords:
            return arguments, {**keywords, "hidden_states": gather_rows(keywords["hidden_states"], team)}
        return (gather_rows(arguments[0], team), *arguments[1:]), keywords

    return gather


class _Part(nn.Module):
    """Takes a module's parameters over."""

    def __init__(self, of: nn.Linear | nn.Embedding, team: Team) -> None:
        super().__init__()
        self.weight = of.weight
        bias = getattr(of, "bias", None)
        self.bias: nn.Parameter | None = bias
        self.team = team


class Rowwise(_Part):
    """[1, T, K/n] -> [1, T/n, H]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = scatter_rows(F.linear(x, self.weight), self.team)
        return rows if self.bias is None else rows + self.bias


class SplitWords(_Part):
    """Ids int64[1, T] -> [1, T/n, H]: each rank looks its own words up."""

    def __init__(self, of: nn.Embedding, team: Team) -> None:
        super().__init__(of, team)
        self.words = of.weight.shape[0]
        padding = -1 if of.padding_idx is None else of.padding_idx - team.rank * self.words
        self.padding = padding if 0 <= padding < self.words else None  # it has no gradient

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.team.rank * self.words
        inside = (local >= 0) & (local < self.words)
        rows = F.embedding(torch.where(inside, local, 0), self.weight, self.padding)
        return scatter_rows(torch.where(inside[..., None], rows, 0.0), self.team)


class SplitHead(_Part):
    """[1, M, H] -> logits [1, M, V], each rank its own words'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join_logits(F.linear(x, self.weight, self.bias))

    def join_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V/n] of each rank -> [..., V]."""
        return join(logits, -1, self.team)


class Score(_Part):
    """[1, T/n, H] -> values [1, T, 1], each rank its own positions'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return join(F.linear(x, self.weight, self.bias), 1, self.team)
