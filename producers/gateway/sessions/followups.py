"""What a user's next message says of the reply before it: a weak signal, since nobody was asked.

Invariants: what it says follows from the messages alone; it speaks of one reply, the last before the last message, and
once; most messages say nothing. The words are English."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from millrace.producers.gateway.sessions.session import GatewaySession, RewardKey
from millrace.schemas import bounds
from millrace.schemas.ids import now_micros
from millrace.schemas.records import Reward

SOURCE, VERSION = "followup", "1"
LONGEST = 4000
"""characters of a message that are read; a longer one says nothing"""
ALIKE = 0.8
"""share of words that two messages have in common, from which on one repeats the other"""
FEWEST = 3
"""words of a message that can be a repetition"""
_WORDS = re.compile(r"\w+")
_CORRECTS = re.compile(
    r"(?:no[,.!]|wrong\b|incorrect\b|that(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct|what i))|"
    r"this is (?:wrong|incorrect|not (?:right|correct|what i))|not what i (?:asked|meant|wanted)|"
    r"i (?:meant|said|asked for)\b|you (?:misunderstood|got (?:it|that) wrong))"
)


class Weak(NamedTuple):
    """What a message says of the reply before it: `label`, `value` (-1) and how sure that is, 0 to 1."""

    label: Literal["repeated", "corrected"]
    value: float
    confidence: float


def weigh(messages: Sequence[Mapping[str, object]]) -> Weak | None:
    """What the last message says of the reply before it, None where it says nothing.

    messages: of a conversation, each with `role` and `content`; the last is the user's and follows a reply."""
    if len(messages) < 2 or messages[-1]["role"] != "user" or messages[-2]["role"] != "assistant":
        return None
    text = _text(messages[-1])
    before = next((_text(one) for one in reversed(messages[:-2]) if one["role"] == "user"), None)
    if text is None:
        return None
    if _CORRECTS.match(text):
        return Weak("corrected", -1.0, 0.3)
    if before is not None and _repeats(before, text):
        return Weak("repeated", -1.0, 0.2)
    return None


def followup(
    session: GatewaySession, messages: Sequence[Mapping[str, object]], digests: Sequence[bytes]
) -> Reward | None:
    """The reward that the last message of a call is to the newest reply of its session, None where it says nothing,
    follows another reply, or was recorded before.

    digests: of the conversation before and after each message."""
    weak = weigh(messages)
    if weak is None or session.newest_reply is None:
        return None
    response, with_reply = session.newest_reply
    if digests[-2] != with_reply:
        return None
    id = f"{SOURCE}:{response}"
    if RewardKey(SOURCE, id) in session.rewards or _is_full(session):
        return None
    return {
        "reward_id": id,
        "target_kind": "turn",
        "target": response,
        "span_start": None,
        "span_end": None,
        "source": SOURCE,
        "source_version": VERSION,
        "rubric_version": "",
        "value": weak.value,
        "components": {},
        "label": weak.label,
        "failure": None,
        "critique": None,
        "supersedes": None,
        "independent": True,
        "observed_at": now_micros(),
        "signal": "user_feedback",
        "confidence": weak.confidence,
        "replay": None,
    }


def _is_full(session: GatewaySession) -> bool:
    """Whether an episode has as many rewards of sources that it does not await as it keeps."""
    awaits = session.start["awaits"]
    return sum(key.source not in awaits for key in session.rewards) >= bounds.REWARDS


def _text(message: Mapping[str, object]) -> str | None:
    """The words of a message, in lower case; None where there are none, or too many."""
    content = message.get("content")
    if not isinstance(content, str) or len(content) > LONGEST:
        return None
    return content.strip().casefold().replace("\u2019", "'")


def _repeats(before: str, text: str) -> bool:
    earlier_words, later_words = set(_WORDS.findall(before)), set(_WORDS.findall(text))
    # A number that differs is another question, however many words are the same.
    if len(later_words) < FEWEST or _numbers(earlier_words) != _numbers(later_words):
        return False
    return len(earlier_words & later_words) >= ALIKE * len(earlier_words | later_words)


def _numbers(words: set[str]) -> set[str]:
    return {word for word in words if any(letter.isdigit() for letter in word)}
