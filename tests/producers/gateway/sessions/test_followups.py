"""What a message says of the reply before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.sessions.followups import weigh

ASKED = "How many people live in Oslo today?"


def conversation(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)]


@pytest.mark.parametrize(
    ("next", "label"),
    [
        ("No, that is Bergen.", "corrected"),
        ("That\u2019s wrong", "corrected"),
        ("I meant the city alone", "corrected"),
        ("that's not what I asked", "corrected"),
        ("Incorrect: it is a million", "corrected"),
        ("How many people live in Oslo today?", "repeated"),
        ("how many people live in Oslo today", "repeated"),
        ("Thank you!", None),
        ("No problem, thanks", None),
        ("Nothing else", None),
        ("How many people live in Rome and Paris today?", None),
        ("And in 2020?", None),
        ("", None),
        ("x " * 5000, None),
    ],
)
def test_few_messages_say_something(next: str, label: str | None) -> None:
    found = weigh(conversation(ASKED, "700 thousand.", next))
    assert (found and found.label) == label
    assert found is None or (found.value == -1 and found.confidence <= 0.3)


def test_another_number_is_another_question() -> None:
    assert weigh(conversation("what is the answer to 3 plus 4", "7", "what is the answer to 3 plus 5")) is None


@pytest.mark.parametrize(
    "roles", [["user"], ["user", "user"], ["user", "assistant", "tool"], ["user", "assistant"], ["assistant", "system"]]
)
def test_only_a_user_that_follows_a_reply_says_something(roles: list[str]) -> None:
    assert weigh([{"role": role, "content": "No, wrong. No, wrong."} for role in roles]) is None


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.none() | st.text()), max_size=5))
def test_what_it_says_follows_from_the_last_messages_alone(said: list[tuple[str, str | None]]) -> None:
    messages = [{"role": role, "content": text} for role, text in said]
    before = [{"role": "user", "content": "something else"}, {"role": "assistant", "content": "yes"}]
    found = weigh(messages)
    if any(role == "user" for role, _ in said[:-2]):
        assert weigh([*before, *messages]) == found
