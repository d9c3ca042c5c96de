"""`millrace replay reward`: a verifier judges history again."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.apps.cli.selecting import Select, WhatIsLeft, query

Many = list[str] | None


def reward(
    context: typer.Context,
    verifier: Annotated[str, typer.Option(help="exact, math, judge, tests, or module:function")],
    rubric: Annotated[str, typer.Option(help="version of the rubric that it judges by")],
    name: Annotated[
        str, typer.Option(help="of this replay; one that was killed goes on under its name; default: the rubric")
    ] = "",
    source: Annotated[str, typer.Option(help="name under which its rewards are recorded")] = "replay",
    select: Select = "",
    version: Annotated[str, typer.Option(metavar="A..B", help="only with tokens sampled by these versions")] = "",
    task: Annotated[Many, typer.Option(help="only this task; may be repeated")] = None,
    tenant: Annotated[Many, typer.Option(help="only of this tenant; may be repeated")] = None,
    split: Annotated[str, typer.Option(help="train, evaluation or all")] = "train",
    bound: Annotated[
        Many, typer.Option("--reward", metavar="BOUND", help="only sealed with such a reward, as '>=0.5'")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that verify")] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="a verdict that takes longer is a labelled failure")] = 10,
    what_is_left: WhatIsLeft = False,
) -> None:
    """Judge sealed trajectories again, and write the rewards beside the live ones.

    Nothing that was sealed changes: the new rewards name this replay, and SQL or a branch may choose them. Each
    trajectory is judged once by a replay, however often the command is run.

    --select takes SQL over the views; evaluation traffic and content that may not train are then left out, whatever it
    gives.

    Example: millrace replay reward --verifier my_rewards:strict --rubric v2
    """
    settings = call(context).settings()
    rule = entry("millrace.formats.exports.select:from_flags")
    wanted = rule(version, "", task or [], tenant or [], split, bound or [], [], best=False)
    asked = entry("millrace.consumers.replay.rejudge:RejudgeRequest")(
        name=name or rubric,
        verifier=verifier,
        rubric=rubric,
        source=source,
        workers=workers,
        timeout_s=timeout_s,
        what_is_left=what_is_left,
    )
    with complain.status("reading the log") as status:
        found = entry("millrace.consumers.replay.rejudge:run")(
            settings, asked, wanted, lambda done, of: status.update(f"{done:,} of {of:,} judged"), query(select)
        )
    for line in entry("millrace.consumers.replay.rejudge:lines")(found):
        console.print(line, highlight=False, soft_wrap=True)
    if found.verdicts:
        console.print("refine admits them to events while it runs", highlight=False)
