"""Where each algorithm was published, by its name. The equations here are this code's own reading of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Publication(NamedTuple):
    """A paper, or the page of authors who wrote none."""

    title: str
    url: str


def _arxiv(title: str, number: str) -> Publication:
    return Publication(title, f"https://arxiv.org/abs/{number}")


GRPO = _arxiv("DeepSeekMath", "2402.03300")
PPO = _arxiv("Proximal Policy Optimization Algorithms", "1707.06347")
GAE = _arxiv("Generalized Advantage Estimation", "1506.02438")
REINFORCE = _arxiv("REINFORCE++", "2501.03262")
DECOUPLED = _arxiv("Batch size-invariance for policy optimization", "2110.00641")
AREAL = _arxiv("AReaL", "2505.24298")
ON_POLICY = _arxiv("On-Policy Distillation of Language Models", "2306.13649")

SOURCES: Mapping[str, tuple[Publication, ...]] = {
    "grpo": (GRPO,),
    "ppo": (PPO, GAE),
    "drgrpo": (_arxiv("Understanding R1-Zero-Like Training", "2503.20783"),),
    "rloo": (_arxiv("Back to Basics", "2402.14740"),),
    "reinforce++": (REINFORCE,),
    "reinforce++-baseline": (REINFORCE,),
    "liteppo": (_arxiv("Part I: Tricks or Traps?", "2508.08221"),),
    "dapo": (_arxiv("DAPO", "2503.14476"),),
    "gspo": (_arxiv("Group Sequence Policy Optimization", "2507.18071"),),
    "sapo": (_arxiv("Soft Adaptive Policy Optimization", "2511.20347"),),
    "cispo": (_arxiv("MiniMax-M1", "2506.13585"),),
    "gmpo": (_arxiv("Geometric-Mean Policy Optimization", "2507.20673"),),
    "m2po": (_arxiv("Prosperity before Collapse", "2510.01161"),),
    "decoupled": (DECOUPLED, AREAL),
    "decoupled-loglinear": (_arxiv("A-3PO", "2512.06547"), DECOUPLED),
    "tis": (
        Publication(
            "Your Efficient RL Framework Secretly Brings You Off-Policy", "https://fengyao.notion.site/off-policy-rl"
        ),
    ),
    "icepop": (_arxiv("Every Step Evolves", "2510.18855"),),
    "kpop": (Publication("KPop", "https://ringtech.notion.site/kpop"),),
    "sft": (_arxiv("Training language models to follow instructions with human feedback", "2203.02155"),),
    "awr": (_arxiv("Advantage-Weighted Regression", "1910.00177"),),
    "dpo": (_arxiv("Direct Preference Optimization", "2305.18290"),),
    "ipo": (_arxiv("A General Theoretical Paradigm to Understand Learning from Human Preferences", "2310.12036"),),
    "simpo": (_arxiv("SimPO", "2405.14734"),),
    "orpo": (_arxiv("ORPO", "2403.07691"),),
    "kto": (_arxiv("KTO: Model Alignment as Prospect Theoretic Optimization", "2402.01306"),),
    "reward-model": (_arxiv("Training language models to follow instructions with human feedback", "2203.02155"),),
    "distill-forward": (_arxiv("Distilling the Knowledge in a Neural Network", "1503.02531"),),
    "distill-reverse": (_arxiv("MiniLLM", "2306.08543"),),
    "distill-on-policy": (ON_POLICY,),
}


def sources(name: str) -> list[str]:
    """The lines of an algorithm's page; none for one without a publication."""
    found = SOURCES.get(name, ())
    return ["Source: " + ", ".join(f"[{source.title}]({source.url})" for source in found), ""] if found else []
