"""Whether what the settings name of the user's can work: agent, tasks, verifier, algorithm, and who answers calls.

Invariants: nothing is started that stays, and no broker, engine or gateway is asked; whatever the user's code raises is
an answer with the file and line where it happened."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from millrace.apps.agreement import check_agreement
from millrace.apps.answers import Answer
from millrace.infra.config import Settings
from millrace.infra.errors import ConfigError, MillraceError, RewardError
from millrace.infra.process.loaders import load_function
from millrace.producers.tasks.source import TaskSource, open_tasks
from millrace.schemas.json_values import JsonObject
from millrace.streams.reward.choose import JUDGE, SETTINGS_VERIFIERS, TESTS, choose
from millrace.streams.reward.running import weak
from millrace.streams.reward.verifiers import BUILT_IN, load

TAKES_AGENT = "(task, base_url, api_key)"
TAKES_VERIFIER = "(task, output, episode)"
EPISODE: JsonObject = {
    "trajectory": "check",
    "group": "check",
    "task_id": "check",
    "status": "completed",
    "stop_condition": "agent",
    "steps": 1,
    "policy": "check",
    "attempt": "check",
}
"""of an episode that never happened, as verifiers are told of one"""


def check(settings: Settings) -> Iterator[Answer]:
    """Every answer, in the order in which a newcomer should mend things."""
    rollout = settings.rollout
    if rollout.agent:
        yield _ask("agent", lambda: _agent(rollout.agent))
    elif rollout.tasks:
        yield Answer("agent", "warning", "[rollout] tasks is set and [rollout] agent is not: nobody works on the tasks")
    else:
        yield Answer("agent", "ok", "none is configured: what trains is the traffic of agents in production")
    if rollout.tasks:
        yield _ask("tasks", lambda: _tasks(Path(rollout.tasks)))
    elif rollout.agent:
        yield Answer("tasks", "warning", "[rollout] agent is set and [rollout] tasks is not: it has nothing to do")
    yield _apart(settings, _ask("verifier", lambda: _verifier(settings)))
    yield _ask("algorithm", lambda: _algorithm(settings))
    if warning := settings.unbound:
        yield Answer("budgets", "warning", warning)
    if settings.gateway.upstreams:
        yield _ask("upstreams", lambda: _upstreams(settings))
    if renderers := _renderers(settings):
        yield _ask("renderers", lambda: _check_renderers(renderers))


def _ask(question: str, find: Callable[[], str]) -> Answer:
    try:
        return Answer(question, "ok", find())
    except (MillraceError, OSError) as error:
        return Answer(question, "bad", str(error))
    except Exception as error:  # the user's module raises what it likes while it is imported
        return Answer(question, "bad", f"{type(error).__name__}: {error}{_where(error)}")


def _where(error: BaseException) -> str:
    """File and line of an error, the innermost; empty where there is none."""
    if isinstance(error, SyntaxError):
        return ""  # its text says so
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _agent(name: str) -> str:
    function = load_function(name, "[rollout] agent", "my_agents.sort:agent")
    _takes_three(function, f"[rollout] agent {name!r}", TAKES_AGENT, ConfigError)
    kind = "async" if inspect.iscoroutinefunction(function) else "sync, run in threads"
    return f"{name} takes {TAKES_AGENT} ({kind})"


def _tasks(path: Path) -> str:
    source = open_tasks(path)
    return f"{len(source)} in {path}; the first has {', '.join(sorted(source.task(0)))}"


def _verifier(settings: Settings) -> str:
    """Loads it, and lets it judge an empty output of the first task, as the reward role would."""
    name = settings.reward.verifier
    if name == JUDGE:
        choose(settings.reward).close()  # its model is not asked: that would cost money
        return f"{settings.reward.judge.model} judges by {settings.reward.judge.rubric}"
    function = None if name in SETTINGS_VERIFIERS else load(name)
    if function is not None and name not in BUILT_IN:
        _takes_three(function, f"verifier {name!r}", TAKES_VERIFIER, RewardError)
    source = _first(settings)
    if source is None:
        return f"{name} can be loaded"
    pool = choose(settings.reward, workers=1)
    try:
        task = source.task(0)
        result = asyncio.run(pool.judge(orjson.dumps(task).decode(), "", dict(EPISODE)))
    finally:
        pool.close()
    if result.failure:
        raise RewardError(
            f"{name} failed on the first task and an empty output ({result.failure}): every such episode would have no "
            f"reward. The task has {', '.join(sorted(task))}."
        )
    return f"{name} gives {result.value:g} to an empty output of the first task"


def _apart(settings: Settings, answer: Answer) -> Answer:
    """The answer, and a warning where programs that are tested could reach more than their own directory."""
    if settings.reward.verifier != TESTS or answer.word != "ok":
        return answer
    why = weak(settings.reward.tests)
    return Answer(answer.question, "warning", f"{answer.said}; {why}") if why else answer


def _first(settings: Settings) -> TaskSource | None:
    """The tasks, None where there are none or their own answer says what is wrong."""
    try:
        return open_tasks(Path(settings.rollout.tasks)) if settings.rollout.tasks else None
    except (MillraceError, OSError):
        return None


def _algorithm(settings: Settings) -> str:
    from millrace.trainers.algorithms.registry import algorithm
    from millrace.trainers.errors import TrainerError

    learner = settings.learner
    try:
        algorithm(learner.algorithm, minibatches=learner.minibatches, **learner.knobs)
    except TrainerError as error:
        raise ConfigError(f"[learner] algorithm: {error}") from error
    check_agreement(settings)
    return f"{learner.algorithm}, {learner.minibatches} minibatches"


def _upstreams(settings: Settings) -> str:
    from millrace.producers.gateway.upstreams.upstreams import check_apis

    check_apis(settings)
    return "; ".join(f"{name} speaks {', '.join(of.speaks)}" for name, of in settings.gateway.upstreams.items())


def _renderers(settings: Settings) -> dict[str, str]:
    """The renderers that the settings choose, by the section that does."""
    names = {"[gateway]": settings.gateway.renderer}
    names |= {f"[gateway.policies.{name}]": policy.renderer for name, policy in settings.gateway.policies.items()}
    return {where: name for where, name in names.items() if name != "auto"}


def _check_renderers(renderers: dict[str, str]) -> str:
    from millrace.dialects.rendering.choose import check as check_renderer

    for where, name in renderers.items():
        check_renderer(name, where)
    return ", ".join(f"{name} in {where}" for where, name in renderers.items())


def _takes_three(function: Callable[..., object], name: str, takes: str, error: type[MillraceError]) -> None:
    """Raises `error` for a function that cannot be called with three values."""
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        raise error(f"{name} must take {takes}; it takes {inspect.signature(function)}") from None
    except ValueError:
        return  # one that is written in C does not say what it takes
