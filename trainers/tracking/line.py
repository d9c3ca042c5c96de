"""The numbers of a step as one line for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping

COLUMNS = (
    ("loss", "loss {:.4f}"),
    ("heldout_loss", "held out {:.4f}"),
    ("reward_mean", "reward {:.3f}"),
    ("reward_accuracy", "accuracy {:.1%}"),
    ("correct", "accuracy {:.1%}"),
    ("heldout_reward_accuracy", "held out {:.1%}"),
    ("heldout_correct", "held out {:.1%}"),
    ("staleness_mean", "staleness {:.2f}"),
    ("entropy", "entropy {:.3f}"),
    ("kl", "KL {:.4f}"),
    ("reference_kl", "KL to reference {:.4f}"),
    ("clipped", "clipped {:.1%}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("mfu", "MFU {:.1%}"),
)
"""What a line says of each number that is there, in this order."""


def line(metrics: Mapping[str, float], *, without: frozenset[str] = frozenset()) -> str:
    """The known ones of `metrics`, but those that mean nothing where it is shown."""
    return "  ".join(form.format(metrics[name]) for name, form in COLUMNS if name in metrics and name not in without)
