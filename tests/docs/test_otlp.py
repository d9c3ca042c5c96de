"""docs/otlp.md, typed from top to bottom against a receiver: what its program and its judgement become."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millrace.infra.config import load
from millrace.schemas import codec
from tests.producers.intake.otlp.test_app import Running
from tests.support.documents import OTLP, ROOT, RUN_BY, blocks

PAGE = ROOT / "docs" / "otlp.md"


def test_the_page_leads_to_an_episode_with_a_reward(tmp_path: Path) -> None:
    shell = [block for block in blocks(PAGE) if block.language == "sh"]
    assert {command for block in shell[1:] for command in block.commands} == {
        command for command, runner in RUN_BY.items() if runner == OTLP
    }
    (program,) = [block for block in blocks(PAGE) if block.language == "python"]
    (told,) = [block for block in blocks(PAGE) if block.language == "toml"]
    (tmp_path / "millrace.toml").write_text(told.text)
    given = load(tmp_path / "millrace.toml")
    assert (given.otlp.enabled, given.otlp.port) == (True, 4318)
    (tmp_path / "program.py").write_text(program.text)
    keys = {key.key.get_secret_value(): key.tenant for key in given.gateway.keys.values()}
    running = Running(tmp_path / "receiver", keys=keys)
    try:
        exports, judged = ("\n".join(block.commands) for block in shell[1:])
        script = f"set -e\n{exports}\n{sys.executable} program.py\n{judged}\n"
        here = script.replace("127.0.0.1:4318", f"127.0.0.1:{running.port}")
        done = subprocess.run(["bash", "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "{}"), done.stderr
        events = running.ended()
    finally:
        running.close()
    assert [one["kind"] for one in events] == ["episode_started", "model_call", "reward", "episode_ended"]
    assert {one["tenant"] for one in events} == {"acme"}
    bodies = {one["kind"]: dict(codec.decode_body(one["kind"], one["body"])) for one in events}
    assert bodies["reward"]["target"] == bodies["model_call"]["response_id"]
    assert (bodies["reward"]["source"], bodies["reward"]["value"]) == ("otlp:sorted", 1.0)
    assert bodies["model_call"]["untrainable_reason"] == "observed"
