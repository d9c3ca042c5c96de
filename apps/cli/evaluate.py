"""The command evaluate: how good a version is on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.infra.config import Settings
from millrace.infra.errors import BusError, ClaimError, ConfigError
from millrace.infra.terminal import RowTable, put_json

if TYPE_CHECKING:
    from millrace.apps.cli.evaluation import EvaluationRun


def evaluate(
    context: typer.Context,
    tasks: Annotated[str, typer.Option(help="JSONL file or dataset directory of tasks, or sort-digits")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="version or Hugging Face directory; default: a version of the policy", exists=True, file_okay=False
        ),
    ] = None,
    version: Annotated[int, typer.Option(min=-1, help="of the configured policy, by its ledger; -1: the newest")] = -1,
    gateway: Annotated[
        bool,
        typer.Option(
            "--gateway",
            help="ask the configured gateway, through the agent of the rollout settings if there is one; its answers "
            "are kept as evaluation traffic",
        ),
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="answers to each prompt")] = 1,
    k: Annotated[str, typer.Option(metavar="K,K,...", help="pass@k for each of these")] = "1",
    count: Annotated[int, typer.Option(min=0, help="prompts at most; 0: all, of sort-digits 256")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token")] = 1.0,
    success: Annotated[float, typer.Option(help="reward from which an answer is right")] = 1.0,
    verifier: Annotated[
        str, typer.Option(help="exact, math, judge, tests or module:function; default: that of the reward settings")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="of every random choice")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    no_record: Annotated[
        bool, typer.Option("--no-record", help="leave the result out of the policy's history, and print it alone")
    ] = False,
) -> None:
    """Score a version on held-out prompts: mean reward and pass@k with 95 % intervals, tied to its digest and ledger
    entry. The result, with the rewards of every task, is kept in the topic of scores of the configured policy; where
    no broker answers it is printed all the same."""
    if (model is not None) + (version >= 0) + gateway > 1:
        raise ConfigError("--model, --version and --gateway name different things to evaluate; keep one of them")
    try:
        ks = tuple(sorted({int(part) for part in k.split(",")}))
    except ValueError:
        raise ConfigError(f"--k {k}: write numbers, such as 1,4,8") from None
    options = entry("millrace.apps.cli.evaluation:EvaluationOptions")(
        tasks=tasks,
        model=model,
        version=version,
        gateway=gateway,
        samples=samples,
        k=ks,
        count=count,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        success=success,
        verifier=verifier,
        device=device,
    )
    settings = call(context).settings()
    run = entry("millrace.apps.cli.evaluation:evaluate")(settings, options)
    if as_json:
        put_json(run.as_values())
    else:
        console.print(_table(run))
    if not no_record:
        _keep(settings, run, gateway)
    if settings.rollout.agent and run.agent is None:
        complain.print(
            f"The agent {settings.rollout.agent} did not run: the model was asked for one reply to each task. "
            "To score the agent, bring the deployment up and add --gateway.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _keep(settings: Settings, run: EvaluationRun, gateway: bool) -> None:
    """Record the result; says so where it cannot be."""
    try:
        entry("millrace.apps.cli.evaluation:record")(settings, run, gateway=gateway)
    except (BusError, ClaimError) as error:
        complain.print(f"The result is not recorded: {error}", markup=False, highlight=False, soft_wrap=True)


def _table(run: EvaluationRun) -> RowTable:
    table = RowTable(box=None, show_header=False, pad_edge=False)
    if run.version is not None:
        table.add_row("version", f"{run.version} of {run.policy}")
    else:
        table.add_row("model", run.model)
    if len(run.versions) > 1:
        table.add_row("versions", f"{min(run.versions)} to {max(run.versions)}: they changed meanwhile")
    for name, value in (("digest", run.digest), ("ledger hash", run.ledger_hash)):
        if value is not None:
            table.add_row(name, value)
    table.add_row("asked", f"{run.questions} prompts of {run.tasks}, {run.samples} answers each")
    if run.agent is not None:
        table.add_row("agent", run.agent)
    for name, estimate in run.estimates.items():
        over = "" if estimate.questions == run.questions else f"  over {estimate.questions} prompts"
        table.add_row(
            name, f"{estimate.value:.4f}  [{estimate.low:.4f}, {estimate.high:.4f}]".replace("[", r"\[") + over
        )
    for count, fate in ((run.unfinished, "were cut off"), (run.unjudged, "could not be judged and count nowhere")):
        if count:
            table.add_row("", f"{count} answers {fate}")
    return table
