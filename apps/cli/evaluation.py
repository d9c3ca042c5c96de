"""The work of `millrace evaluate`: questions, answers, verdicts, and what they say of a version. Loaded late: it takes
torch."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path

import numpy as np

from millrace.apps.demo import sort_digits
from millrace.consumers import scores
from millrace.consumers.evaluation import EvaluationSubject, version_to_evaluate
from millrace.infra.config import Settings
from millrace.infra.connect import connect_now
from millrace.infra.errors import ConfigError
from millrace.infra.local_keys import workers_key
from millrace.infra.log.base import Place
from millrace.producers.evaluation import JudgedAnswer, ask, versions
from millrace.producers.rollout.agents import load_agent
from millrace.producers.tasks.source import open_tasks
from millrace.schemas import records
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.json_values import JsonObject
from millrace.streams.reward.choose import ChosenVerifier, choose
from millrace.trainers.evaluation.answering import answer, load
from millrace.trainers.evaluation.estimators import Estimate, summary
from millrace.trainers.offline.text import Encoder


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks that a name stands for, with the verifier of their own that gives an answer its reward. questions: of a
    seed, at most so many, where 0 is the set's own number."""

    questions: Callable[[int, int], list[JsonObject]]
    verify: Callable[[JsonObject, str], float]


TASK_SETS = {"sort-digits": TaskSet(sort_digits.questions, sort_digits.judge)}


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """tasks: a file, a dataset directory, or one of TASK_SETS. count: questions at most; 0: all (256 of sort-digits).
    success: the reward from which an answer is right. version: of the configured policy, where `model` is None; -1:
    the newest. gateway: ask the configured gateway's engines instead."""

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
    gateway: bool = False


@dataclass(frozen=True, slots=True)
class Answerer:
    """What answered. model: a directory, or the gateway's address. versions: all that answered; version, digest and
    ledger_hash where it was one that the ledger knows."""

    model: str
    policy: str | None = None
    version: int | None = None
    versions: Sequence[int] = ()
    digest: str | None = None
    ledger_hash: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationRun(Answerer):
    """What was evaluated, on what, and what came out. unjudged: answers on which the verifier failed; they count
    nowhere."""

    _: KW_ONLY
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
    agent: str | None
    """the agent that ran; None where the model was asked for one reply to each task"""
    estimates: dict[str, Estimate]
    scores: list[records.TaskScore]
    """what each answer to each task came to, in the order asked; in the record alone"""
    tasks_digest: str
    """sha256 hex over the tasks as JSON, in the order asked"""

    def as_values(self) -> JsonObject:
        """The same as values of JSON; what could not be estimated is null."""
        values = asdict(self)
        del values["scores"]
        for estimate in values["estimates"].values():
            estimate.update({name: None for name, value in estimate.items() if math.isnan(value)})
        return values


def evaluate(settings: Settings, options: EvaluationOptions) -> EvaluationRun:
    """Sample, judge, estimate. Raises MillraceError or TrainerError for what cannot be evaluated."""
    if not options.k or min(options.k) < 1 or max(options.k) > options.samples:
        raise ConfigError(f"pass@{max(options.k, default=0)} needs as many samples: set --samples, or another --k")
    tasks = questions(options, needs_prompts=not (options.gateway and settings.rollout.agent))
    verifier = options.tasks if options.tasks in TASK_SETS else options.verifier or settings.reward.verifier
    with Verdicts(settings, verifier, tasks) as judge:
        place, answers = (_through_gateway if options.gateway else _here)(settings, options, tasks, judge)
    rewards: list[list[float | None]] = [[] for _ in tasks]
    for one in answers:
        rewards[one.question].append(one.reward)
    verdicts = [[reward for reward in some if reward is not None] for some in rewards]
    return EvaluationRun(
        **asdict(place),
        tasks=options.tasks,
        verifier=verifier,
        questions=len(tasks),
        samples=options.samples,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        success=options.success,
        unfinished=sum(not one.finished for one in answers),
        unjudged=sum(one.reward is None for one in answers),
        agent=settings.rollout.agent if options.gateway and settings.rollout.agent else None,
        estimates=summary(verdicts, options.k, success=options.success, seed=options.seed),
        scores=[{"task_id": _name(task, at), "rewards": rewards[at]} for at, task in enumerate(tasks)],
        tasks_digest=hashlib.sha256("\n".join(map(_task_text, tasks)).encode()).hexdigest(),
    )


def record(settings: Settings, run: EvaluationRun, *, gateway: bool) -> Place:
    """Keep an evaluation in the history of the configured policy; gives its place.

    Raises BusError, within seconds, where the log does not answer or has no topic for it."""
    with connect_now(settings) as bus:
        return scores.publish(
            settings, bus, evaluation_record(run, settings.policy.name, now_micros(), gateway=gateway)
        )


def evaluation_record(run: EvaluationRun, policy: str, time: int, *, gateway: bool) -> records.Evaluation:
    """The record of an evaluation, not named yet. time: micros."""
    mean, error = scores.mean_of(run.scores)
    pass_rates = {
        name.removeprefix("pass@"): estimate.value for name, estimate in run.estimates.items() if estimate.questions
    }
    return {
        "id": "",
        "policy": policy,
        "version": run.version,
        "versions": list(run.versions),
        "digest": run.digest,
        "ledger_hash": run.ledger_hash,
        "model": run.model,
        "engine": "gateway" if gateway else "in-process",
        "agent": run.agent,
        "tasks": run.tasks,
        "tasks_digest": run.tasks_digest,
        "questions": run.questions,
        "samples": run.samples,
        "verifier": run.verifier,
        "success": run.success,
        "temperature": run.temperature,
        "max_tokens": run.max_tokens,
        "seed": run.seed,
        "mean": mean,
        "standard_error": error,
        "pass_at": {name: value for name, value in pass_rates.items() if name.isdigit()},
        "unfinished": run.unfinished,
        "unjudged": run.unjudged,
        "scores": run.scores,
        "time": time,
    }


def _here(
    settings: Settings, options: EvaluationOptions, tasks: Sequence[JsonObject], judge: Verdicts
) -> tuple[Answerer, list[JudgedAnswer]]:
    """Answers of a model that is loaded into this process."""
    path, commit = options.model, None
    if path is None:
        commit = version_to_evaluate(settings, None if options.version < 0 else options.version)
        path = commit.path
    encoder = Encoder(path)
    prompts = [encoder.prompt(task.get("messages", task.get("prompt")), task.get("tools")) for task in tasks]
    model, digest = load(path, commit.digest if commit else None, options.device)
    answers = answer(
        model,
        encoder,
        prompts,
        n=options.samples,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )

    async def judge_all() -> list[JudgedAnswer]:
        verdicts = await asyncio.gather(*(judge(a.question, a.text, a.finished) for a in answers))
        return [JudgedAnswer(a.question, a.finished, v) for a, v in zip(answers, verdicts, strict=True)]

    place = Answerer(str(path), digest=digest) if commit is None else _place(str(path), commit)
    return place, asyncio.run(judge_all())


def _through_gateway(
    settings: Settings, options: EvaluationOptions, tasks: Sequence[JsonObject], judge: Verdicts
) -> tuple[Answerer, list[JudgedAnswer]]:
    """Answers of the engines behind the configured gateway, kept as evaluation traffic."""
    agent = load_agent(settings.rollout.agent) if settings.rollout.agent else None
    if agent is None and any("messages" not in task for task in tasks):
        raise ConfigError(f"{options.tasks}: a gateway is asked by messages, and some task has none")
    url = f"http://{settings.gateway.host}:{settings.gateway.port}/v1"
    before = versions(url, workers_key(settings))

    def sampling(question: int, sample: int) -> JsonObject:
        (word,) = np.random.SeedSequence((options.seed, question, sample)).generate_state(1)
        return {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": int(word) >> 1}

    answers = asyncio.run(
        ask(
            url,
            workers_key(settings),
            tasks,
            name=f"evaluation-{new_id()}",
            model=settings.policy.name,
            n=options.samples,
            judge=judge,
            concurrency=settings.rollout.concurrency,
            sampling=sampling,
            agent=agent,
        )
    )
    numbers = sorted(before | versions(url, workers_key(settings)))
    if len(numbers) != 1:
        return Answerer(url, policy=settings.policy.name, versions=numbers), answers
    return _place(url, version_to_evaluate(settings, numbers[0], files=False)), answers


def _place(model: str, commit: EvaluationSubject) -> Answerer:
    return Answerer(model, commit.policy, commit.version, [commit.version], commit.digest, commit.ledger_hash)


def questions(options: EvaluationOptions, *, needs_prompts: bool = True) -> list[JsonObject]:
    """The tasks that the options name. needs_prompts: the model is asked by them; else an agent asks as it likes."""
    if options.tasks in TASK_SETS:
        return TASK_SETS[options.tasks].questions(options.seed, options.count)
    source = open_tasks(Path(options.tasks))
    tasks = [source.task(index) for index in range(min(len(source), options.count or len(source)))]
    for index, task in enumerate(tasks):
        if needs_prompts and "messages" not in task and "prompt" not in task:
            raise ConfigError(f"{options.tasks}: task {index} has neither messages nor prompt: there is nothing to ask")
    return tasks


def _name(task: JsonObject, index: int) -> str:
    """The id of a task, as the reward stage knows it."""
    return str(task.get("id", f"task-{index}"))


def _task_text(task: JsonObject) -> str:
    """A task as it is judged."""
    return json.dumps(task, ensure_ascii=False)


class Verdicts:
    """Judges answers; a user's verifier in processes of their own. Use it as a context."""

    def __init__(self, settings: Settings, verifier: str, tasks: Sequence[JsonObject]) -> None:
        self._policy = settings.policy.name
        self._tasks = tasks
        self._task_texts = [_task_text(task) for task in tasks]
        self._set = TASK_SETS.get(verifier)
        self._pool: ChosenVerifier | None = None if self._set else choose(settings.reward, verifier)

    def __enter__(self) -> Verdicts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    async def __call__(self, question: int, text: str, is_finished: bool) -> float | None:
        """The reward of an answer; None where the verifier failed."""
        if self._set is not None:
            return self._set.verify(self._tasks[question], text) if is_finished else 0.0
        assert self._pool is not None, "without a set of its own a verifier has a pool"
        return (await self._pool.judge(self._task_texts[question], text, self._episode(question, is_finished))).value

    def _episode(self, question: int, is_finished: bool) -> JsonObject:
        """As the reward stage tells it."""
        return {
            "trajectory": f"evaluation-{question}",
            "group": f"evaluation-{question}",
            "task_id": _name(self._tasks[question], question),
            "status": "completed" if is_finished else "truncated",
            "stop_condition": "agent" if is_finished else "length",
            "steps": 1,
            "policy": self._policy,
            "attempt": f"evaluation-{question}",
        }
