"""The work of `millrace evaluate`: questions, answers, verdicts, and what they say of a version. Loaded late: it takes
torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from consumers.evaluation import Committed, committed
from infra.config import Settings
from infra.errors import ConfigError
from producers.tasks.source import open_tasks
from streams.reward.pool import Pool
from trainers.evaluation.answering import Answer, answer, load
from trainers.evaluation.estimators import Estimate, summary
from trainers.offline.text import Encoder
from trainers.tasks import sort_digits

SORT = "sort-digits"


@dataclass(frozen=True, slots=True)
class Options:
    """tasks: a file, a dataset directory, or sort-digits. count: questions at most; 0: all (256 of sort-digits).
    success: the reward from which an answer is right. version: of the configured policy, where `model` is None; -1:
    the newest."""

    tasks: str
    model: Path | None = None
    version: int = -1
    samples: int = 1
    k: tuple[int, ...] = (1,)
    count: int = 0
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    success: float = 1.0
    verifier: str = ""
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was evaluated, on what, and what came out. digest, policy, version and ledger_hash are None where the model
    is none of a ledger's. unjudged: answers on which the verifier failed; they count nowhere."""

    model: str
    policy: str | None
    version: int | None
    digest: str | None
    ledger_hash: str | None
    tasks: str
    verifier: str
    questions: int
    samples: int
    temperature: float
    max_tokens: int
    seed: int
    success: float
    unfinished: int
    unjudged: int
    estimates: dict[str, Estimate]

    def to_json(self) -> str:
        """The same as one JSON object."""
        return json.dumps(asdict(self), indent=2)


def evaluate(settings: Settings, options: Options) -> Evaluation:
    """Sample, judge, estimate. Raises MillraceError or TrainerError for what cannot be evaluated."""
    if not options.k or min(options.k) < 1 or max(options.k) > options.samples:
        raise ConfigError(f"pass@{max(options.k, default=0)} needs as many samples: set --samples, or another --k")
    found = None if options.model else committed(settings, None if options.version < 0 else options.version)
    tasks = _tasks(options)
    path = options.model or _path(found)
    encoder = Encoder(path)
    prompts = [encoder.prompt(task.get("messages", task.get("prompt")), task.get("tools")) for task in tasks]
    model, digest = load(path, found.digest if found else None, options.device)
    answers = answer(
        model,
        encoder,
        prompts,
        n=options.samples,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    verifier = SORT if options.tasks == SORT else options.verifier or settings.reward.verifier
    verdicts = _sorted(tasks, answers) if options.tasks == SORT else _judged(settings, verifier, tasks, answers)
    rewards: list[list[float]] = [[] for _ in tasks]
    for one, verdict in zip(answers, verdicts, strict=True):
        if verdict is not None:
            rewards[one.question].append(verdict)
    return Evaluation(
        model=str(path),
        policy=found.policy if found else None,
        version=found.version if found else None,
        digest=digest,
        ledger_hash=found.ledger_hash if found else None,
        tasks=options.tasks,
        verifier=verifier,
        questions=len(tasks),
        samples=options.samples,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        success=options.success,
        unfinished=sum(not one.finished for one in answers),
        unjudged=sum(verdict is None for verdict in verdicts),
        estimates=summary(rewards, options.k, success=options.success, seed=options.seed),
    )


def _path(found: Committed | None) -> Path:
    assert found is not None, "no model was named"
    return found.path


def _tasks(options: Options) -> list[dict[str, Any]]:
    if options.tasks == SORT:
        chosen = islice(sort_digits.prompts(options.seed, evaluation=True), options.count or 256)
        return [{"messages": [{"role": "user", "content": digits}]} for digits in chosen]
    source = open_tasks(Path(options.tasks))
    tasks = [source.task(index) for index in range(min(len(source), options.count or len(source)))]
    for index, task in enumerate(tasks):
        if "messages" not in task and "prompt" not in task:
            raise ConfigError(f"{options.tasks}: task {index} has neither messages nor prompt: there is nothing to ask")
    return tasks


def _sorted(tasks: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> list[float | None]:
    digits = [task["messages"][0]["content"] for task in tasks]
    return [sort_digits.verify(digits[one.question], one.text) if one.finished else 0.0 for one in answers]


def _judged(
    settings: Settings, verifier: str, tasks: Sequence[dict[str, Any]], answers: Sequence[Answer]
) -> list[float | None]:
    pool = Pool(verifier, workers=settings.reward.workers, timeout_s=settings.reward.timeout_s)
    written = [json.dumps(task, ensure_ascii=False) for task in tasks]

    async def all_of_them() -> list[float | None]:
        verdicts = [
            pool.judge(written[a.question], a.text, _episode(settings, tasks, a, i)) for i, a in enumerate(answers)
        ]
        return [verdict.value for verdict in await asyncio.gather(*verdicts)]

    try:
        return asyncio.run(all_of_them())
    finally:
        pool.close()


def _episode(settings: Settings, tasks: Sequence[dict[str, Any]], one: Answer, number: int) -> dict[str, Any]:
    """As the reward stage tells it."""
    task_id = str(tasks[one.question].get("id", f"task-{one.question}"))
    return {
        "trajectory": f"evaluation-{number}",
        "group": f"evaluation-{one.question}",
        "task_id": task_id,
        "status": "completed" if one.finished else "truncated",
        "stop_condition": "agent" if one.finished else "length",
        "steps": 1,
        "policy": settings.policy.name,
        "attempt": f"evaluation-{number}",
    }
