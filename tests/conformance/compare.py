"""How far an outcome is from a single process's, and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.conformance.cases import Case, Tolerance
from tests.conformance.run import CLIP, Outcome


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest over the steps: absolute and relative error of the loss, relative of the gradient norm, absolute of any
    weight at the end."""

    loss: float
    relative_loss: float
    norm: float
    weight: float


def errors(ours: Outcome, reference: Outcome) -> Errors:
    """Of an outcome of rank 0."""
    assert ours.state is not None
    assert reference.state is not None
    assert all(norm > 2 * CLIP for norm in reference.norms), "the clip is at work"
    assert ours.state.weights.keys() == reference.state.weights.keys()
    assert ours.state.step == reference.state.step
    weight = 0.0
    for name, theirs in reference.state.weights.items():
        assert ours.state.weights[name].shape == theirs.shape, name
        weight = max(weight, float((ours.state.weights[name] - theirs).abs().max()))
    losses = [(abs(a - b), abs(b)) for a, b in zip(ours.losses, reference.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(ours.norms, reference.norms, strict=True)]
    return Errors(max(e for e, _ in losses), max(e / size for e, size in losses), max(norms), weight)


def check(found: Errors, allowed: Tolerance) -> None:
    """Fails where an error is above what is allowed."""
    assert found.loss <= allowed.loss, found
    assert found.norm <= allowed.norm, found
    assert found.weight <= allowed.weight, found


def row(case: Case, found: Errors | str) -> str:
    """Of a table in Markdown: layout and model against the errors, or the message of a layout that cannot run."""
    name = str(case).rpartition("-")[0].replace("|", "\\|")
    if isinstance(found, str):
        return f"| {name} | {case.model} | cannot run on a CPU: {found} | | |"
    return (
        f"| {name} | {case.model} | {found.relative_loss:.1e} ({found.loss:.1e}) | {found.norm:.1e} | "
        f"{found.weight:.1e} |"
    )
