"""Two answers to one prompt, of which one was preferred: TRL and OpenAI. A row is read as a group of two episodes; a
group is written as the highest reward over the lowest.

Invariants: both answer the same prompt, or there is no pair; equal rewards are no preference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace.dialects.dialogue import Unsayable
from millrace.dialects.rendering.base import Message
from millrace.formats.episodes.episode import ClaimedReward, Episode
from millrace.formats.episodes.messages import chat, conversation, said_or_chat, tool_list
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, number_of, time_of
from millrace.formats.layouts.base import ExportLayout, ImportLayout, RefuseSample, rest, split_of, task_of, tools_text
from millrace.formats.layouts.chat import tools_key, without_reasoning
from millrace.formats.sample import ExportedSample, prompt_and_completion
from millrace.schemas.json_values import JsonObject

_RewardedSample = tuple[float, ExportedSample, list[Message], list[Message], list[JsonObject]]

"""a reward, its sample, the prompt, the reply, the tools"""
BEST_REWARD, WORST_REWARD = 1.0, 0.0
"""rewards where a row gives no scores"""


class PreferenceReader(ImportLayout):
    """`chosen` over `rejected`, behind `prompt` or each with the prompt in it."""

    name = "trl-preference"
    help = "TRL preference (prompt, chosen, rejected), a row a group of two; rewards 1 and 0 where no scores are given"
    used: ClassVar[Collection[str]] = (
        "prompt",
        "chosen",
        "rejected",
        "tools",
        "score_chosen",
        "score_rejected",
        "split",
    )

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"chosen", "rejected"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The chosen one, then the other."""
        content = row.content
        best, worst = (said_or_chat(content.get(name), name, "assistant") for name in ("chosen", "rejected"))
        if content.get("prompt"):
            prompt = said_or_chat(content["prompt"], "prompt", "user")
        else:
            start = sum(1 for _ in _common_start(best, worst))
            prompt, best, worst = best[:start], best[start:], worst[start:]
        scores = [
            number_of(content.get(name, value), name)
            for name, value in (("score_chosen", BEST_REWARD), ("score_rejected", WORST_REWARD))
        ]
        return self._pair(content, prompt, (best, worst), scores, tool_list(content.get("tools")))

    def _pair(
        self,
        content: Content,
        prompt: list[Content],
        answers: tuple[list[Content], list[Content]],
        scores: Sequence[float],
        tools: list[Content],
    ) -> list[Episode]:
        at = time_of(content)
        return [
            Episode(
                conversation([*prompt, *answer], tools, at, len(prompt)),
                task_id=task_of(content),
                task=rest(content, self.used),
                rewards=[ClaimedReward(score, label=label)],
                split=split_of(content),
                at=at,
            )
            for answer, score, label in zip(answers, scores, ("chosen", "rejected"), strict=True)
        ]


class OpenAIPreferenceReader(PreferenceReader):
    """The same in OpenAI's words."""

    name = "openai-preference"
    help = "OpenAI preference (input, preferred_output, non_preferred_output), a row a group of two; rewards 1 and 0"
    used = ("input", "preferred_output", "non_preferred_output", "split")

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"input", "preferred_output"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        content = row.content
        question = content.get("input")
        if not isinstance(question, Mapping):
            raise BadRow("no_messages", "input is no object with messages")
        prompt = chat(question.get("messages"), "input.messages")
        best, worst = (chat(content.get(name), name) for name in ("preferred_output", "non_preferred_output"))
        return self._pair(content, prompt, (best, worst), (BEST_REWARD, WORST_REWARD), tool_list(question.get("tools")))


def _common_start(first: list[Content], second: list[Content]) -> Iterator[Content]:
    """The messages with which both begin."""
    for message, counterpart in zip(first, second, strict=False):
        if message != counterpart:
            return
        yield message


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """What was asked, and the two ways in which it went on."""

    best: ExportedSample
    worst: ExportedSample
    prompt: list[Message]
    best_reply: list[Message]
    worst_reply: list[Message]
    tools: list[JsonObject]


def pair_of(samples: Sequence[ExportedSample], refuse: RefuseSample) -> PreferencePair | None:
    """The pair of a group; None where there is none, and then every sample of it is refused. Those between the best and
    the worst are refused as `not_in_pair`."""
    members: list[_RewardedSample] = []
    for sample in samples:
        try:
            value, (_, calls) = sample.finite_reward(), sample.only_lineage()
            members.append((value, sample, *prompt_and_completion(calls), calls[-1].tools))
        except Unsayable as error:
            refuse(sample, error)
    best, worst = max(members, key=_reward, default=None), min(members, key=_reward, default=None)
    if best is None or worst is None or best[0] == worst[0]:
        reason = Unsayable("no_pair", "its group holds no two different rewards")
    elif best[2] != worst[2]:
        reason = Unsayable("other_prompt", "the best and the worst of its group were asked otherwise")
    else:
        for _, sample, *_ in members:
            if sample is not best[1] and sample is not worst[1]:
                refuse(sample, Unsayable("not_in_pair", "it is neither the best nor the worst of its group"))
        return PreferencePair(best[1], worst[1], best[2], best[3], worst[3], best[4])
    for _, sample, *_ in members:
        refuse(sample, reason)
    return None


def _reward(one: _RewardedSample) -> float:
    return one[0]


class PreferenceWriter(ExportLayout):
    """One row a group: the reply with the highest reward over the one with the lowest."""

    name = "trl-preference"
    help = "TRL preference (prompt, chosen, rejected), a group a row: best over worst, for DPOTrainer"

    def group(
        self, samples: Sequence[ExportedSample], refuse: RefuseSample
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """The group's pair."""
        pair = pair_of(samples, refuse)
        if pair is None:
            return
        try:
            row = self.row(pair)
        except Unsayable as error:
            refuse(pair.best, error)
            refuse(pair.worst, error)
        else:
            yield [pair.best, pair.worst], [row]

    def row(self, pair: PreferencePair) -> Content:
        """The row of a pair. Raises Unsayable where the layout has no place for it."""
        row = {"prompt": pair.prompt, "chosen": pair.best_reply, "rejected": pair.worst_reply}
        scores = {"score_chosen": pair.best.finite_reward(), "score_rejected": pair.worst.finite_reward()}
        return row | scores | {"tools": tools_text(pair.tools)}


class OpenAIPreferenceWriter(PreferenceWriter):
    """The same in OpenAI's words, where both outputs are one message of the assistant, as the platform wants them."""

    name = "openai-preference"
    help = "OpenAI preference fine-tuning, a group a row: best over worst; one reply each"

    def row(self, pair: PreferencePair) -> Content:
        if len(pair.best_reply) > 1 or len(pair.worst_reply) > 1:
            raise Unsayable("several_replies", "an output here is one message")
        return {
            "input": {"messages": without_reasoning(pair.prompt), **tools_key(pair.tools), "parallel_tool_calls": True},
            "preferred_output": without_reasoning(pair.best_reply),
            "non_preferred_output": without_reasoning(pair.worst_reply),
        }
