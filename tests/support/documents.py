"""What README.md and docs/*.md show: fenced blocks, commands in the running text, and the order in which they are read.

Invariant: a page is read where README first links to it, at the end of the section that does; so the walk over `STEPS`
is that of a newcomer who follows every link, and no page is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^(?=## )", re.MULTILINE)
_LINK = re.compile(r"\]\((docs/\w+\.md)\)")
_SPAN = re.compile(r"`((?:millrace|make) [^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `where` is its page and its number among the blocks of that page."""

    page: str
    number: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}#{self.number}"

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, comments left out."""
        lines = (re.sub(r"\s+#.*", "", line).strip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    found = _FENCE.findall(page.read_text())
    return [Block(page.name, number, language, text) for number, (language, text) in enumerate(found)]


def all_blocks(language: str) -> list[Block]:
    """The blocks of all pages that are written in a language, README's first."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def spoken() -> set[str]:
    """Commands named in the running text."""
    return {span for page in PAGES for span in _SPAN.findall(_FENCE.sub("", page.read_text()))}


def reading() -> Iterator[Block]:
    """Every block in the order of a newcomer who follows each link once, at the end of its section."""
    own, read = iter(blocks(README)), {README}
    for section in _SECTION.split(README.read_text()):
        for _ in _FENCE.findall(section):
            yield next(own)
        for target in _LINK.findall(section):
            page = ROOT / target
            if page not in read:
                read.add(page)
                yield from blocks(page)
    assert read == set(PAGES), f"README does not lead to {', '.join(page.name for page in set(PAGES) - read)}"


HERE = "tests/docs/test_docs.py"
DEPLOYMENT = "tests/docs/test_deployment.py"
BENCHMARKS = "tests/docs/test_benchmarks.py"
FRAMEWORKS = "tests/benchmarks/test_frameworks.py"
ASYNCHRONY = "tests/benchmarks/test_study_async.py"
SETUP = "tests/docs/test_setup.py"
TUTORIAL = "tests/docs/test_tutorial.py"
TRAINING = "tests/docs/test_training.py"
REBUILD = "tests/consumers/replay/rebuild/test_command.py"
REPLAY = "tests/consumers/replay/prove/test_prover_ranks.py"
BRANCH = "tests/consumers/replay/branch/test_deployed.py"
READING = "tests/docs/test_reading.py"
IMPORT = "tests/docs/test_import.py"
IMITATE = "tests/docs/test_imitate.py"
OTLP = "tests/docs/test_otlp.py"
MCP = "tests/docs/test_mcp.py"
A2A = "tests/docs/test_a2a.py"
NAMED = "tests/apps/cli/test_session_names.py"
SQL = "tests/docs/test_sql.py"
KEYS = "tests/apps/cli/test_keys.py"
QUESTIONS = "tests/apps/cli/test_questions.py"
WAREHOUSE = "tests/consumers/warehouse/test_process.py"
CI = ".ci/run"

RUN_BY = {
    "make setup": CI,
    "make setup ENGINE=gpu": SETUP,
    "make setup ENGINE=sglang": SETUP,
    "make demo": CI,
    "make test": CI,
    "make histories": "tests/properties/test_histories.py",
    "make chaos": "tests/chaos/test_kill_points.py",
    "make audit-changes N=10000": "tests/consumers/audit/test_any_change.py",
    "make check": "Makefile",
    "make architectures": "tests/trainers/backends/models/test_architectures.py",
    "make bench": BENCHMARKS,
    "make gpu": "Makefile",
    "make conformance": "tests/conformance/test_conformance_of_backends.py",
    ".venv/bin/python -m benchmarks.bench_backends": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_codec": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_conversation": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_delays": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_delta": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_detection": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_durability": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_fleet": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_gateway": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_gateway_start": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_idle": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_audit": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_interrupt": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_killed": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_packing": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_peers": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_gpu": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_proximal": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_questions": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_recovery": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_reload": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_serving": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_stages": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_start": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_step": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_tokens": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_tree": BENCHMARKS,
    ".venv/bin/python -m benchmarks.bench_warehouse": BENCHMARKS,
    "MILLRACE_ENGINE__URL=http://10.0.0.7:8901 millrace engine join": "tests/consumers/reloader/test_join.py",
    "millrace drain NAME --undo": "tests/consumers/reloader/test_join.py",
    "millrace drain NAME --wait": "tests/consumers/reloader/test_join.py",
    "millrace warehouse take --from NAMESPACE": "tests/consumers/warehouse/store/test_owner.py",
    ".venv/bin/python -m benchmarks.frameworks": FRAMEWORKS,
    '.venv/bin/python -m benchmarks.frameworks --only LangGraph --only "Codex CLI" --cache downloads': FRAMEWORKS,
    ".venv/bin/python -m benchmarks.frameworks --here": FRAMEWORKS,
    ".venv/bin/python -m benchmarks.study_async --real runs --eta 0 1 2 4 --engines 1 2": ASYNCHRONY,
    ".venv/bin/python -m benchmarks.study_async --groups 512 --group-size 16 --generation-s 120 --longest-s 350"
    " --train-s 190": ASYNCHRONY,
    ".venv/bin/python -m benchmarks.study_async --out async.jsonl --plot async.svg": ASYNCHRONY,
    ".venv/bin/python -m benchmarks.study_branch": "tests/benchmarks/test_study_branch.py",
    ".venv/bin/python -m benchmarks.study_layouts": "tests/benchmarks/test_study_layouts.py",
    ".venv/bin/python -m benchmarks.study_algorithms": "tests/benchmarks/test_study_algorithms.py",
    ".venv/bin/python -m benchmarks.study_staleness --out runs.jsonl --plot staleness.svg": (
        "tests/benchmarks/test_study_staleness.py"
    ),
    ". .venv/bin/activate": HERE,
    "millrace init": DEPLOYMENT,
    "millrace check": TUTORIAL,
    "python -m millrace.apps.demo.tiny model": TUTORIAL,
    "millrace doctor": DEPLOYMENT,
    "millrace up": DEPLOYMENT,
    "millrace down": DEPLOYMENT,
    "millrace policy create --model path/to/model": DEPLOYMENT,
    "millrace policy create --model model": DEPLOYMENT,
    "millrace status": DEPLOYMENT,
    "millrace status --watch": DEPLOYMENT,
    "millrace config": DEPLOYMENT,
    "millrace --set policy.eta=1 config --json": DEPLOYMENT,
    "millrace topics": DEPLOYMENT,
    "millrace key": KEYS,
    "millrace key create --client support-bot --tenant support --role agent --expires 90d": KEYS,
    "millrace key list": KEYS,
    "millrace key rotate support-bot": KEYS,
    "millrace key revoke support-bot": KEYS,
    "millrace sweep": DEPLOYMENT,
    "millrace registry add acme people.csv": "tests/apps/cli/test_registry.py",
    "millrace registry list acme": "tests/apps/cli/test_registry.py",
    "millrace registry remove acme s-17": "tests/apps/cli/test_registry.py",
    "millrace archive once": DEPLOYMENT,
    "millrace archive list": DEPLOYMENT,
    "millrace archive verify": DEPLOYMENT,
    "millrace why ID": DEPLOYMENT,
    "python -m millrace.apps.demo.tiny model --target 0.2": IMITATE,
    "python -m millrace.apps.demo.sort_digits tasks.jsonl --count 600 --seed 1": IMITATE,
    "millrace replay branch student --algorithm sft --epochs 10 --batch 32 --lr 1e-3": IMITATE,
    "millrace evaluate --tasks sort-digits --count 256": IMITATE,
    "millrace --set policy.name=student evaluate --tasks sort-digits --count 256": IMITATE,
    "millrace --set policy.name=student audit --files": IMITATE,
    "millrace why 0": DEPLOYMENT,
    "millrace why case-4711": DEPLOYMENT,
    "millrace audit": DEPLOYMENT,
    "millrace audit --json": DEPLOYMENT,
    "millrace audit --files": DEPLOYMENT,
    "millrace audit --quick": DEPLOYMENT,
    "millrace report": DEPLOYMENT,
    "millrace replay prove all": REPLAY,
    "millrace replay prove 1..2": REPLAY,
    "millrace replay prove 1 --layout torch:d2": REPLAY,
    "millrace replay prove 2 --dump steps": REPLAY,
    "millrace replay prove --load steps/v2": REPLAY,
    "millrace replay branch": BRANCH,
    "millrace replay branch imitation --epochs 2 --lr 3e-4": BRANCH,
    "millrace replay branch offline --from-version 0 --algorithm grpo --steps 4"
    " --select \"SELECT * FROM trajectories WHERE split = 'train' AND newest_version < 30\"": BRANCH,
    "millrace replay branch short --algorithm awr --steps 4"
    " --select \"SELECT trajectory FROM trajectories WHERE status = 'completed' AND tokens < 500\"": BRANCH,
    "millrace replay branch strict --epochs 1 --rewards replay/v2": BRANCH,
    "millrace replay reward --verifier my_rewards:strict --rubric v2"
    ' --select "SELECT trajectory FROM trajectories WHERE reward IS NOT NULL"': BRANCH,
    'millrace sql "SELECT trajectory, sealed_reward AS old, value AS new FROM rewards'
    " WHERE replay = 'v2' ORDER BY new - old DESC LIMIT 10\"": BRANCH,
    'millrace sql "SELECT count() AS judged, avg(sealed_reward) AS old, avg(value) AS new FROM rewards'
    " WHERE replay = 'v2'\"": BRANCH,
    "millrace --set policy.name=imitation evaluate --tasks sort-digits --count 32": BRANCH,
    "millrace --set policy.name=imitation audit --files": BRANCH,
    "millrace replay rebuild": REBUILD,
    "millrace replay rebuild trajectories --out rebuilt": REBUILD,
    "millrace engine": DEPLOYMENT,
    "millrace reload": DEPLOYMENT,
    "millrace gateway": DEPLOYMENT,
    "millrace refine": DEPLOYMENT,
    "millrace reward": DEPLOYMENT,
    "millrace seal": DEPLOYMENT,
    "millrace dispatch": DEPLOYMENT,
    "millrace learn": DEPLOYMENT,
    "millrace rollout": DEPLOYMENT,
    "millrace warehouse": WAREHOUSE,
    "millrace warehouse rebuild": WAREHOUSE,
    "millrace sft --model base --data lessons.jsonl --out versions/sft --epochs 3 --lr 1e-5 --holdout 0.05": TRAINING,
    "millrace dpo --model base --data pairs.jsonl --out versions/dpo --knob beta=0.2": TRAINING,
    "millrace dpo --model base --data pairs.jsonl --out versions/ipo --algorithm ipo": TRAINING,
    "millrace dpo --model base --data rated.jsonl --out versions/kto --algorithm kto": TRAINING,
    "millrace reward-model --model base --data pairs.jsonl --out versions/judge": TRAINING,
    "millrace distill --model base --data lessons.jsonl --out versions/student --teacher big": TRAINING,
    "millrace distill --model base --data lessons.jsonl --out versions/own --teacher big --on-policy": TRAINING,
    "millrace trajectory ID": READING,
    "millrace trajectory ID --tokens": READING,
    "millrace trajectory ID --page trajectory.html": READING,
    "millrace lineage 3": READING,
    "millrace lineage ID": READING,
    "millrace lineage TASK": READING,
    "millrace export --layout hf -o history": READING,
    "millrace export --layout trl -o best.jsonl --reward '>=0.3' --best-of-group": READING,
    "millrace export --layout openai -o late.jsonl --version 2.. --status completed": READING,
    "millrace export --layout parquet -o held-out.parquet --split evaluation": READING,
    "millrace a2a": A2A,
    "millrace a2a --url http://127.0.0.1:9300 --port 9400": A2A,
    "millrace why NAME": NAMED,
    "millrace trajectory NAME": NAMED,
    "millrace mcp": MCP,
    "millrace mcp -- python my_server.py": MCP,
    "millrace mcp --url http://127.0.0.1:9000/mcp --port 9100": MCP,
    "millrace import chats.jsonl --dry-run": IMPORT,
    "millrace import chats.jsonl": IMPORT,
    "millrace import spans.jsonl --tenant acme --split evaluation": IMPORT,
    "millrace import rows.parquet --on-error skip --refused refused.jsonl": IMPORT,
    "millrace otlp": "tests/producers/intake/otlp/test_killed.py",
    "export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318": OTLP,
    "export OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20a%20long%20random%20word": OTLP,
    "export OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true": OTLP,
    "curl -sf http://127.0.0.1:4318/v1/logs -H 'authorization: Bearer a long random word' -H 'c"
    'ontent-type: application/json\' -d \'{"resourceLogs": [{"scopeLogs": [{"logRecords": [{"even'
    'tName": "gen_ai.evaluation.result", "attributes": [{"key": "gen_ai.response.id", "value": '
    '{"stringValue": "resp-1"}}, {"key": "gen_ai.evaluation.name", "value": {"stringValue": "so'
    'rted"}}, {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 1}}]}]}]}]}\'': OTLP,
    "millrace evaluate --model base --tasks held-out.jsonl --samples 8 --k 1,4,8": TRAINING,
    "millrace ask": QUESTIONS,
    "millrace ask NAME --help": QUESTIONS,
    "millrace ask compare --a 2 --b 5": SQL,
    "millrace ask costs-by-tenant": SQL,
    "millrace ask evaluated --version 4": SQL,
    "millrace ask funnel": SQL,
    'millrace sql "SELECT task, source, rubric, count() AS judged, avg(sealed_reward) AS old, avg(value) AS new,'
    " countIf(value != sealed_reward) AS differ FROM rewards JOIN trajectories USING (policy, trajectory)"
    " WHERE replay = 'replay-1' GROUP BY ALL ORDER BY task\"": SQL,
    "millrace ask late-rewards": SQL,
    "millrace ask reward-by-engine": SQL,
    "millrace ask reward-by-task": SQL,
    "millrace ask reward-by-task --show-sql": SQL,
    "millrace ask reward-by-version": SQL,
    "millrace ask seen-by --task sum --tenant globex": SQL,
    "millrace ask staleness-by-version": SQL,
    "millrace ask tool-failures": SQL,
    "millrace ask trained-by --version 3": SQL,
    "millrace ask trajectory --trajectory 681ac178-3320-5794-b22b-537737af4224": SQL,
    "millrace ask waits-by-version": SQL,
    "sed 's/^/X-ClickHouse-Key: /' .millrace/keys/warehouse | curl -s -H @- http://127.0.0.1:8902 "
    "-d \"SELECT task, count() AS samples FROM trajectories WHERE split = 'train' GROUP BY task ORDER BY task "
    'FORMAT CSVWithNames"': SQL,
    "millrace sql": SQL,
    'millrace sql "SELECT name, comment'
    " FROM system.columns WHERE database = 'millrace' AND table = 'staleness'\"": SQL,
    'millrace sql "SELECT policy, version, count() AS samples, avg(reward) AS reward'
    ' FROM samples GROUP BY ALL ORDER BY ALL"': SQL,
}
"""command of the documents -> the test, or the step of CI, that runs it or a smaller form of the same entry point"""
