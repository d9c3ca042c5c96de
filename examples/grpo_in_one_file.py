"""A GRPO training from top to bottom: sample, judge, compare, step. Run it: `python examples/grpo_in_one_file.py`.

An untrained model of 228,384 parameters learns to reply in digits. No Kafka, no engine and no files: `millrace learn`
makes the same calls on what the log holds. GRPO is from arXiv:2402.03300; docs/algorithms/grpo.md has its equations.

Words: a prompt is asked GROUP times, and these replies are its group. A reward is a number for one reply. A version is
the weights after so many steps; version 0 is where the training begins.
"""

from __future__ import annotations

import torch

from millrace.apps.demo import tiny
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.sampling import sample

STEPS, PROMPTS, GROUP, LENGTH = 20, 8, 8, 6
"""steps of the training, prompts in a batch, replies to each prompt, tokens of a reply at most"""


def reward(reply: str) -> float:
    """What the model is to learn: the share of a reply's characters that are digits."""
    return sum(character.isdigit() for character in reply) / LENGTH


def experience(backend: TorchBackend, version: int, generator: torch.Generator) -> list[Sample]:
    """One batch of PROMPTS x GROUP judged replies, sampled from the weights as they are now."""
    asked = [tiny.encode(f"{10 * version + number:06d}") for number in range(PROMPTS)]  # lists of token ids
    replies = sample(backend.model, asked, n=GROUP, max_tokens=LENGTH, end=tiny.EOS, generator=generator)
    # A sample is prompt + reply, T tokens: ids int32[T], mask uint8[T] (1 where a token trains: the reply), and
    # log-probabilities float32[T] as the sampler computed them. These say how likely each token was under the weights
    # that chose it, whichever weights train on it later.
    return [
        tiny.to_sample(
            asked[reply.prompt],
            reply.tokens,
            reply.logprobs,
            reward=reward(tiny.decode(reply.tokens)),
            seq=reply.prompt,  # which group it belongs to
            name=f"{version}-{index}",
            version=version,
        )
        for index, reply in enumerate(replies)
    ]


def train(steps: int = STEPS, seed: int = 0) -> list[float]:
    """The mean reward of each step's batch, before the step learned from it."""
    # The algorithm is a loss. For token t of reply i in a group with rewards r:
    #   advantage  A_i   = (r_i - mean(r)) / std(r)               a reply is good where it beats its siblings
    #   ratio      rho_t = exp(logp_now_t - logp_sampled_t)       1 in the first minibatch, then the policy moves
    #   loss             = -mean_t min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)
    # A group whose rewards are all equal has advantage 0 and teaches nothing.
    grpo = algorithm("grpo", minibatches=2)

    # The backend holds the weights and computes gradients; the trainer cuts, packs, weighs and steps. One process here:
    # rank 0 of a world of 1.
    backend = TorchBackend(device="cpu")
    trainer = Trainer(backend, grpo, Schedule(lr=1e-3))
    backend.form(rank=0, world=1, store=None, timeout=60.0)
    trainer.load(tiny.random_state(seed))

    generator = torch.Generator().manual_seed(seed)
    half = PROMPTS // 2
    curve = []
    for version in range(steps):
        batch = experience(backend, version, generator)
        # Two minibatches, so two optimizer steps; whole groups stay together, since advantages compare within a group.
        report = trainer.train(batch, minibatches=[range(half), range(half, PROMPTS)], version=version)
        curve.append(report.metrics["reward_mean"])
        bar = "#" * round(40 * curve[-1])
        print(f"version {version:2}  mean reward {curve[-1]:.3f}  loss {report.metrics['loss']:+.4f}  {bar}")
    backend.tear_down()
    return curve


if __name__ == "__main__":
    train()
