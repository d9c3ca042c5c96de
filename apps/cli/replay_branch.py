"""`millrace replay branch`: a new policy from history."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.apps.cli.context import call, entry
from millrace.apps.cli.selecting import Places, Select, WhatIsLeft, query, read_places
from millrace.apps.cli.training_flags import parse_knobs, with_options
from millrace.infra.errors import ConfigError

TRAINING = (
    *("knobs", "steps", "epochs", "batch", "lr", "warmup", "decay", "floor"),
    *("weight_decay", "max_grad_norm", "seed"),
)


@with_options(
    *("name", "from_version", "algorithm", "select", "places", "rewards", "teacher", *TRAINING),
    *("save_every", "keep", "anyway", "what_is_left", "device"),
)
def branch(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the new policy")],
    from_version: Annotated[
        int | None,
        typer.Option(
            "--from-version", min=0, help="where it begins; default: the newest version when the branch is first made"
        ),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            help="sft (the best of each group), awr, grpo, rloo, decoupled, tis, icepop, m2po, dpo, ipo, "
            "distill-forward or distill-reverse"
        ),
    ] = "sft",
    select: Select = "",
    places: Places = None,
    rewards: Annotated[
        str,
        typer.Option(
            metavar="[live:]SOURCE[/RUBRIC]",
            help="take rewards that a replay gave, or the newest live ones of a source, instead of the sealed ones",
        ),
    ] = "",
    teacher: Annotated[
        Path | None, typer.Option(help="model to distill from, of the same vocabulary", exists=True, file_okay=False)
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="batches of a version")] = 10,
    keep: Annotated[int, typer.Option(min=1, help="newest versions whose files are kept, beside version 0")] = 2,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="train though too few sequences would carry the gradient")
    ] = False,
    what_is_left: WhatIsLeft = False,
    **options: Any,
) -> None:
    """Train a new policy from the configured policy's history, with no engine running.

    --select takes SQL over the views, such as "SELECT * FROM trajectories WHERE task = 'sort'"; without it every
    trajectory is asked for. Evaluation traffic and content that may not train are never learned from, whatever was
    asked, and text without exact tokens, such as a provider's, by sft alone. Methods that weigh by ratios first print
    how far the selection is from the starting weights. The same command goes on after a kill. Engines serve the new
    policy, `evaluate` scores it and `audit` proves it, with --set policy.name=NAME."""
    if select and places is not None:
        raise ConfigError("--select and --places both say what to learn from: give one of them")
    listed = None if places is None else list(read_places(places))
    sql = query(select) if select else ""
    if places is not None:
        options["selection"] = f"places of {places.name}"
    elif sql:
        options["selection"] = entry("millrace.consumers.replay.sql_selection:one")(sql)
    options["knobs"] = parse_knobs(options["knobs"])
    job = entry("millrace.consumers.replay.branch.job:BranchOptions")(
        name,
        version=from_version,
        method=algorithm,
        rewards=rewards,
        teacher=teacher,
        save_every=save_every,
        keep=keep,
        anyway=anyway,
        what_is_left=what_is_left,
        **options,
    )
    entry("millrace.consumers.replay.branch.command:branch")(call(context).settings(), job, places=listed, sql=sql)
