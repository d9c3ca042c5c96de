"""Which live rewards of a whole history are chosen, by the source that they name: also those that seal refused, since
the sample was sealed, and whatever log brought them."""

from __future__ import annotations

import pytest

from millrace.consumers.replay.branch.rewards import choose
from millrace.infra.log.history.kinds import DEAD_LETTERS, EVENTS, TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.testing.events import Episode
from millrace.testing.world import World
from tests.support.whole import NAMESPACE, POLICY, whole


@pytest.mark.parametrize("seed", range(2))
def test_the_newest_live_reward_is_chosen_whatever_became_of_it(seed: int) -> None:
    sent, before = dict[tuple[str, str], float](), dict[tuple[str, str], float]()

    def later(world: World) -> None:
        world.drain()
        past = History(world.bus, NAMESPACE, POLICY)
        before.update(choose(past, "live:verifier").values)
        for number, row in enumerate(list(past.rows(TRAJECTORIES))):
            key = row["id"], row["attempt"]
            one = Episode(key[0], policy=POLICY, attempt=key[1], group=row["group"])
            for value, more in ((0.5, {"n": 7}), (float(number), {"n": 8}), (9.0, {"n": 7}), (None, {"n": 9})):
                world.send("raw", one.key, "Event", one.reward(value, **more))
            sent[key] = float(number)
        world.drain()

    made = whole(seed, later=later)
    past = History(made.bus, NAMESPACE, POLICY)
    assert choose(past, "live:verifier").values == before | sent
    refused = {tuple(row["place"].values()): row["reason"] for row in past.rows(DEAD_LETTERS)}
    fates = {
        refused.get(tuple(row.place))
        for row in past.rows(EVENTS, only=lambda r: r.headers.get("kind") == b"reward")
        if (row["trajectory"], row["attempt"]) in sent and row.body["value"] == sent[row["trajectory"], row["attempt"]]
    }
    assert "late_reward" in fates
    sealed = {(row["id"], row["attempt"]): row["reward"] for row in past.rows(TRAJECTORIES)}
    assert sum(sealed[key] != value for key, value in sent.items()) > len(sent) / 2, "no sample has changed"
    assert made.audit().clean
