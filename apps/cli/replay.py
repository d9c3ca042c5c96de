"""Commands that run history again: `replay prove`, `replay branch`, `replay reward`, `replay rebuild`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.apps.cli.selecting import AcceptGaps, Places, Select, query, read_places
from millrace.apps.cli.training_flags import parse_knobs, with_options
from millrace.infra.errors import ConfigError

TRAINING = (
    *("knobs", "steps", "epochs", "batch", "lr", "warmup", "decay", "floor"),
    *("weight_decay", "max_grad_norm", "seed"),
)

replay = typer.Typer(
    no_args_is_help=True,
    help="Run history again: prove how versions came to be, train from it, judge it anew, make topics again.",
)


@replay.command("branch")
@with_options(
    *("name", "from_version", "algorithm", "select", "places", "rewards", "teacher", *TRAINING),
    *("save_every", "keep", "anyway", "accept_gaps", "device"),
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
            help="sft (the best of each group), awr, grpo, rloo, decoupled, tis, icepop, m2po, dpo, ipo, simpo, "
            "orpo, distill-forward or distill-reverse"
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
    accept_gaps: AcceptGaps = False,
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
    place_list = None if places is None else list(read_places(places))
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
        accept_gaps=accept_gaps,
        **options,
    )
    entry("millrace.consumers.replay.branch.command:branch")(call(context).settings(), job, places=place_list, sql=sql)


Many = list[str] | None


@replay.command("reward")
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
    limit: Annotated[
        Many, typer.Option("--reward", metavar="BOUND", help="only sealed with such a reward, as '>=0.5'")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes that verify")] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="a verdict that takes longer is a labelled failure")] = 10,
    accept_gaps: AcceptGaps = False,
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
    selection = rule(version, "", task or [], tenant or [], split, limit or [], [], best=False)
    request = entry("millrace.consumers.replay.rejudge:RejudgeRequest")(
        name=name or rubric,
        verifier=verifier,
        rubric=rubric,
        source=source,
        workers=workers,
        timeout_s=timeout_s,
        accept_gaps=accept_gaps,
    )
    with complain.status("reading the log") as status:
        outcome = entry("millrace.consumers.replay.rejudge:run")(
            settings, request, selection, lambda done, of: status.update(f"{done:,} of {of:,} judged"), query(select)
        )
    for line in entry("millrace.consumers.replay.rejudge:lines")(outcome):
        console.print(line, highlight=False, soft_wrap=True)
    if outcome.verdicts:
        console.print("refine admits them to events while it runs", highlight=False)


@replay.command("rebuild")
def rebuild(
    context: typer.Context,
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]...",
            help="events, trajectories, evaluations, completions, grants, resolutions or dead-letters; all without one",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="write the rebuilt topics there, as segments of an archive", file_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs; lists the differences")] = False,
) -> None:
    """Make topics that stages wrote again from what the stages read, and compare them record by record.

    It reads topics and archive, joins no group and writes nothing to the log. Exit code 1 when a record differs, is
    missing or additional, or cannot be compared."""
    run = entry("millrace.consumers.replay.rebuild.command:run")
    raise typer.Exit(run(call(context).settings(), topics or [], out, as_json=as_json))


@replay.command("prove")
def prove(
    context: typer.Context,
    versions: Annotated[str, typer.Argument(metavar="VERSIONS", help="one (12), a range (10..20) or all")] = "",
    from_ledger: Annotated[
        bool,
        typer.Option("--recorded", help="take the learner's configuration from the ledger instead of the settings"),
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="train though code, configuration, libraries or machine differ, and compare within the tolerance of "
            "one step",
        ),
    ] = False,
    layout: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT", help="also train each step alone in this layout (torch:d2) and compare within tolerance"
        ),
    ] = "",
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write the exact tensors of each step there", file_okay=False)
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="train a step that --dump wrote (DIR/v12), without Kafka",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Train versions again from the log and compare them bit for bit with what is on record.

    It begins at the nearest version whose files are kept, needs no engine, joins no group and writes nothing to the
    log. Exit code 1 when a version differs; then the first file or tensor that differs is named."""
    if (load is None) == (not versions):
        raise ConfigError("name the versions to prove (12, 10..20 or all), or a dumped step with --load DIR")
    settings = call(context).settings()
    if load is not None:
        if from_ledger or layout or dump is not None:
            raise ConfigError("--load trains one dumped step: of the other options it takes --anyway and --json alone")
        raise typer.Exit(
            entry("millrace.consumers.replay.prove.command:train_dump")(settings, load, anyway=anyway, as_json=as_json)
        )
    options = entry("millrace.consumers.replay.prove.command:ReplayOptions")(
        versions=versions, from_ledger=from_ledger, anyway=anyway, layout=layout, dump=dump
    )
    raise typer.Exit(entry("millrace.consumers.replay.prove.command:prove")(settings, options, as_json=as_json))
