"""Each algorithm learns from files what it is for; a run that is killed ends with the bytes of one that is not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from millrace.apps.demo import tiny
from millrace.infra.versions import PIN
from millrace.trainers.errors import BadConfiguration, BadData
from millrace.trainers.evaluation import answering
from millrace.trainers.offline.job import Job
from millrace.trainers.offline.loop import RunObserver, RunPace, versions
from millrace.trainers.offline.run import run
from millrace.trainers.tracking.jsonl import JsonlTracker, points
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.adapter import Lora
from millrace.trainers.weights.manifest import NAME
from tests.support import lessons
from tests.support.documents import ROOT
from tests.trainers.offline.dying_offline import job as dying_job

pytestmark = pytest.mark.slow


class Heard(RunObserver):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.refusals: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def on_step(self, step: int, metrics: Any) -> None:
        self.metrics[step] = dict(metrics)

    def on_refusal(self, where: str, reason: str) -> None:
        self.refusals.append((where, reason))

    def warn(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lessons.write(tmp_path_factory.mktemp("data") / "sft.jsonl", lessons.conversations(200))


@pytest.fixture(scope="module")
def preferred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lessons.write(tmp_path_factory.mktemp("data") / "pairs.jsonl", lessons.preferences(200))


def short(algorithm: str, model: Path, data: Path, out: Path, **more: Any) -> Job:
    return Job(algorithm, model, data, out, **{"steps": 30, "batch": 32, "lr": 1e-3, "holdout": 0.1, **more})


def test_supervised_learning_lowers_the_loss_on_what_it_never_saw(model: Path, shown: Path, tmp_path: Path) -> None:
    heard = Heard()
    written = run(short("sft", model, shown, tmp_path, epochs=5, steps=0, evaluate_every=10), observer=heard)
    assert written.path.name.startswith("v30-"), "180 items in batches of 32 are 6 steps an epoch"
    held = [heard.metrics[step]["heldout_loss"] for step in (0, 10, 20, 30)]
    assert held == sorted(held, reverse=True)
    assert held[-1] < 0.8 * held[0]
    assert heard.metrics[6]["epoch"] == 1
    assert heard.metrics[30]["tokens_per_second"] > 0
    served = AutoModelForCausalLM.from_pretrained(str(written.path))
    state = checkpoint.read(written.path)
    assert state.step == 30
    assert torch.equal(served.model.embed_tokens.weight, state.weights["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(str(written.path)).chat_template == tiny.TEMPLATE


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "simpo", "orpo"])
def test_preferences_are_learned(algorithm: str, model: Path, preferred: Path, tmp_path: Path) -> None:
    heard = Heard()
    run(short(algorithm, model, preferred, tmp_path, lr=3e-4), observer=heard)
    assert heard.metrics[30]["heldout_reward_accuracy"] >= 0.9
    assert heard.metrics[30]["heldout_loss"] < heard.metrics[0]["heldout_loss"]


def test_what_is_good_and_what_is_bad_is_learned(model: Path, tmp_path: Path) -> None:
    data = lessons.write(tmp_path / "rated.jsonl", lessons.ratings(200))
    heard = Heard()
    run(short("kto", model, data, tmp_path / "out", lr=3e-4), observer=heard)
    last = heard.metrics[30]
    assert last["heldout_reward_accuracy"] >= 0.9
    assert last["heldout_loss"] < heard.metrics[0]["heldout_loss"] == pytest.approx(0.5, abs=1e-6)
    assert heard.metrics[0]["heldout_reference_kl"] == 0, "the policy is its reference still"
    assert last["samples_without_reward"] == last["samples"] / 2, "as many tell how far the policy is from it"
    lines = [row | {"label": "yes"} for row in lessons.ratings(2)]
    with pytest.raises(BadData, match="no label: it must be true, false, 1 or 0"):
        run(short("kto", model, lessons.write(tmp_path / "odd.jsonl", lines), tmp_path / "odd", strict=True))


@pytest.mark.parametrize("algorithm", ["simpo", "orpo", "sft"])
def test_a_reference_that_nothing_compares_with_is_refused(algorithm: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="compares with no other model"):
        run(short(algorithm, model, tmp_path / "none.jsonl", tmp_path / "out", reference=model))


def test_a_reward_model_is_one_that_transformers_serves(model: Path, preferred: Path, tmp_path: Path) -> None:
    heard = Heard()
    written = run(short("reward-model", model, preferred, tmp_path), observer=heard)
    assert heard.metrics[30]["heldout_correct"] >= 0.9
    served = AutoModelForSequenceClassification.from_pretrained(str(written.path), num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(str(written.path))
    row = lessons.preferences(1, seed=5)[0]
    scores = []
    for side in ("chosen", "rejected"):
        text = tokenizer.apply_chat_template(
            [*row["prompt"], {"role": "assistant", "content": row[side]}], tokenize=False
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            scores.append(float(served(input_ids=ids).logits[0, 0]))
    assert scores[0] > scores[1]


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_student_comes_near_its_teacher(
    direction: str, on_policy: bool, model: Path, shown: Path, tmp_path: Path
) -> None:
    heard = Heard()
    teacher = lessons.untrained(tmp_path / "teacher", seed=3)
    made = short(
        f"distill-{direction}", model, shown, tmp_path / "out", teacher=teacher, on_policy=on_policy, max_tokens=7
    )
    run(made, observer=heard)
    assert heard.metrics[30]["heldout_loss"] < 0.5 * heard.metrics[0]["heldout_loss"]


def test_what_is_held_out_measures_as_training_does(model: Path, shown: Path, tmp_path: Path) -> None:
    heard = Heard()
    run(short("sft", model, shown, tmp_path / "a", steps=1, batch=200, holdout=0.5), observer=heard)
    # The same items, once held out and once trained on, before anything was learned.
    other = Heard()
    run(short("sft", model, shown, tmp_path / "b", steps=1, batch=200, holdout=0.5, lr=1e-12), observer=other)
    metrics = other.metrics[1]
    assert metrics["heldout_loss"] == pytest.approx(heard.metrics[0]["heldout_loss"], rel=1e-6)
    assert metrics["heldout_entropy"] == pytest.approx(heard.metrics[0]["heldout_entropy"], rel=1e-6)
    assert metrics["loss"] == pytest.approx(heard.metrics[1]["loss"], rel=1e-6)


def test_the_same_run_gives_the_same_bytes_and_another_seed_others(model: Path, shown: Path, tmp_path: Path) -> None:
    first, again, other = (
        run(short("sft", model, shown, tmp_path / name, steps=3, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.digest == again.digest != other.digest


def test_a_finished_run_can_be_extended(model: Path, shown: Path, tmp_path: Path) -> None:
    whole = run(short("sft", model, shown, tmp_path / "whole", steps=6, warmup=4))
    made = short("sft", model, shown, tmp_path / "parts", steps=2, warmup=4)
    run(made)
    assert run(replace(made, steps=6, resume=True)).digest == whole.digest
    assert run(replace(made, steps=6, resume=True)).digest == whole.digest, "nothing is left to do"


def test_a_pinned_version_stays_beside_the_newest(model: Path, shown: Path, tmp_path: Path) -> None:
    made = short("sft", model, shown, tmp_path, steps=1, save_every=1, keep=1)
    (run(made).path / PIN).touch()
    run(replace(made, steps=4, resume=True))
    assert [number for number, _ in versions(tmp_path)] == [1, 4]


def test_a_rate_that_falls_reaches_its_floor_with_the_last_batch(model: Path, shown: Path, tmp_path: Path) -> None:
    heard = Heard()
    made = short("sft", model, shown, tmp_path, steps=5, warmup=1, decay="linear", floor=0.2)
    run(made, observer=heard)
    assert [heard.metrics[step]["lr"] for step in range(1, 6)] == pytest.approx([1e-3, 1e-3, 8e-4, 6e-4, 4e-4])
    with pytest.raises(BadConfiguration, match="decays_over"):
        run(replace(made, steps=9, resume=True))


@pytest.mark.parametrize("publish", ["merge", "adapter"])
def test_an_adapter_learns_alone_and_its_run_goes_on(
    publish: Literal["merge", "adapter"], model: Path, shown: Path, tmp_path: Path
) -> None:
    heard = Heard()
    made = short("sft", model, shown, tmp_path / "whole", steps=12, lr=1e-2, lora=Lora(4, 8, publish=publish))
    whole = run(made, observer=heard)
    assert heard.metrics[12]["heldout_loss"] < 0.9 * heard.metrics[0]["heldout_loss"]
    state = checkpoint.read(whole.path)
    assert state.adapter is not None
    assert set(state.moments["exp_avg"]) == set(state.adapter.weights)
    parts = replace(made, out=tmp_path / "parts", steps=5)
    run(parts)
    assert run(replace(parts, steps=12, resume=True)).digest == whole.digest
    served, digest = answering.load(whole.path)
    assert digest == whole.digest
    changed = dict(served.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    before = checkpoint.adopt(model).weights
    assert not torch.equal(changed, before["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(served.get_input_embeddings().weight, before["model.embed_tokens.weight"])


def test_weights_in_bfloat16_go_on_from_their_masters(model: Path, shown: Path, tmp_path: Path) -> None:
    state = checkpoint.adopt(model)
    config = state.assets["config.json"].replace(b'"float32"', b'"bfloat16"')
    checkpoint.export(tmp_path / "half", replace(state, assets={**state.assets, "config.json": config}))
    made = short("sft", tmp_path / "half", shown, tmp_path / "whole", steps=4)
    whole = run(made)
    parts = replace(made, out=tmp_path / "parts", steps=2)
    run(parts)
    assert run(replace(parts, steps=4, resume=True)).digest == whole.digest
    assert AutoModelForCausalLM.from_pretrained(str(whole.path)).dtype == torch.bfloat16


def test_a_damaged_version_costs_only_the_steps_since_the_one_before(model: Path, shown: Path, tmp_path: Path) -> None:
    whole = run(short("sft", model, shown, tmp_path / "whole", steps=4))
    made = short("sft", model, shown, tmp_path / "damaged", steps=4, save_every=2)
    broken = run(made)
    weights = broken.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    heard = Heard()
    assert run(replace(made, resume=True), observer=heard).digest == whole.digest
    assert "version 4 is left out" in heard.notes[0]
    assert sorted(heard.metrics) == [3, 4]


def test_a_kill_loses_little_without_any_setting(
    model: Path, shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions come by the clock; here it has always struck."""
    whole = run(short("sft", model, shown, tmp_path / "whole", steps=4))
    monkeypatch.setattr("millrace.trainers.offline.run.RunPace", partial(RunPace, save_after_s=0.0))
    made = short("sft", model, shown, tmp_path / "killed", steps=4)
    steps: list[str] = []

    def dies(point: str) -> None:
        steps.extend([point] if point == "offline.after_step" else [])
        if len(steps) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(made, fault=dies)
    assert [number for number, _ in versions(made.out)] == [1, 2]
    assert run(replace(made, resume=True)).digest == whole.digest


def test_another_run_is_refused(model: Path, shown: Path, preferred: Path, tmp_path: Path) -> None:
    made = short("sft", model, shown, tmp_path / "out", steps=1)
    run(made)
    with pytest.raises(BadConfiguration, match="--resume"):
        run(made)
    with pytest.raises(BadConfiguration, match=r"other settings \(batch, lr\)"):
        run(replace(made, resume=True, lr=1.0, batch=3))
    less = lessons.write(tmp_path / "less.jsonl", lessons.conversations(100))
    with pytest.raises(BadConfiguration, match=r"other settings \(data\)"):
        run(replace(made, resume=True, data=less))


def test_what_cannot_be_trained_says_so(model: Path, shown: Path, preferred: Path, tmp_path: Path) -> None:
    for job, error, reason in (
        (short("grpo", model, shown, tmp_path), BadConfiguration, "does not learn from files"),
        (short("sft", model, shown, tmp_path, on_policy=True), BadConfiguration, "leave on_policy out"),
        (short("reward-model", model, preferred, tmp_path, lora=Lora()), BadConfiguration, "leave lora out"),
        (short("distill-forward", model, shown, tmp_path), BadConfiguration, "teacher"),
        (short("sft", model, shown, tmp_path, knobs={"beta": 1.0}), BadConfiguration, "no knob 'beta'"),
        (short("sft", model, preferred, tmp_path), BadData, "no row to learn from"),
        (short("sft", model, shown, tmp_path, max_length=3), BadData, "too long"),
        (short("sft", model, shown, tmp_path, epochs=0), BadConfiguration, "epochs"),
    ):
        with pytest.raises(error, match=reason):
            run(job)
    assert not versions(tmp_path)


def test_a_killed_run_ends_with_the_bytes_of_an_unbroken_one(model: Path, shown: Path, tmp_path: Path) -> None:
    whole = run(dying_job(model, shown, tmp_path / "whole"), trackers=[JsonlTracker(tmp_path / "whole")])
    out = tmp_path / "killed"
    for point, count in (("checkpoint.between_files", 4), ("offline.after_step", 5)):
        died = subprocess.run(
            [sys.executable, "-m", "tests.trainers.offline.dying_offline", model, shown, out, point, str(count)],
            cwd=ROOT,
        )
        assert died.returncode == -9, point
    ended = run(dying_job(model, shown, out), trackers=[JsonlTracker(out)])
    assert ended.digest == whole.digest
    assert (ended.path / NAME).read_bytes() == (whole.path / NAME).read_bytes()
    assert [path.name for _, path in versions(out)] == [whole.path.name], "temporary directories are gone too"
    assert not list(out.glob(".tmp*"))

    def told(directory: Path) -> list[dict[str, float]]:
        return [
            {k: v for k, v in point.items() if not k.startswith(("timings_", "tokens_per_second"))}
            for point in points(directory)
        ]

    assert [point["step"] for point in points(out)] == list(range(11))
    assert told(out) == told(tmp_path / "whole")
