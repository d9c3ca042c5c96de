"""`millrace replay reward` on real topics: each trajectory judged once, however often it is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.history.kinds import EVENTS, RAW, TRAJECTORIES, topics_of
from millrace.infra.log.history.reader import History
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.schemas.records import Reward
from tests.support.whole import NAMESPACE, POLICY, whole

VERIFIER = "def strict(task, output, episode):\n    return {'value': 0.25, 'label': 'second'}\n"


@pytest.mark.slow
@pytest.mark.kafka
def test_history_is_judged_again(broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "second_rewards.py").write_text(VERIFIER)
    made = whole(1)
    namespace = "r" + re.sub(r"\W", "", tmp_path.name)[-20:]
    names, lying = topics_of(namespace, POLICY), topics_of(NAMESPACE, POLICY)
    flags = ["--set", f"namespace={namespace}", "--set", f"policy.name={POLICY}"]
    flags += ["--set", f"kafka.bootstrap={broker}", "--set", "kafka.local=false"]
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(name, 2) for name in names.values()])
        with bus.publisher() as publisher:
            for kind in (EVENTS, TRAJECTORIES):
                for partition in range(made.bus.partitions(lying[kind])):
                    for r in made.bus.read(lying[kind], partition):
                        publisher.publish(Outgoing(names[kind], r.key, r.value, r.headers))
            publisher.flush(60)
        command = ["replay", "reward", "--verifier", "second_rewards:strict", "--rubric", "v2", "--split", "all"]
        said = millrace(*flags, *command)
        judged, wanted = map(int, re.findall(r"^(\d+) of (\d+) trajectories judged", said, re.MULTILINE)[0])
        assert 0 < judged <= wanted
        assert "0.250 now" in said
        again = millrace(*flags, *command)
        assert f"0 of {wanted} trajectories judged" in again
        assert f"{judged} had been judged by this replay before" in again
        rewards: list[Reward] = [row.body for row in History(bus, namespace, POLICY).rows(RAW)]
    assert len(rewards) == len({reward["reward_id"] for reward in rewards}) == judged
    assert {(r["replay"], r["source"], r["rubric_version"], r["label"]) for r in rewards} <= {
        ("v2", "replay", "v2", "second"),
        ("v2", "replay", "v2", None),
    }
    assert "there is no split" in millrace(*flags, *command, "--split", "some", code=1)


def millrace(*words: str, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return done.output
