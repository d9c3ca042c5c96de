"""The algorithm by configuration: any preset by name, any knob over it, and what no trainer can do refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.apps.demo import tiny
from millrace.consumers.learner.build import build_trainer, warm_up
from millrace.consumers.learner.version.collect import collect
from millrace.consumers.policy_names import topics as policy_topics
from millrace.consumers.policy_names import weights_root
from millrace.consumers.reloader.directory import check
from millrace.consumers.reloader.shell import base_of
from millrace.infra.config import load
from millrace.infra.errors import ConfigError
from millrace.schemas import codec
from millrace.trainers.algorithms.registry import algorithm, names, policy
from millrace.trainers.algorithms.repair import Rejection
from millrace.trainers.backends.deepspeed.engine import Zero
from millrace.trainers.backends.models.build import SCORE, with_scalar_head
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.schedule import Schedule
from millrace.trainers.weights import checkpoint
from tests.support.feed import feed, settings_for
from tests.support.learners import entries

Make = Callable[..., Any]


def built(folder: Path, **flags: Any) -> Any:
    made = {name.replace("__", "."): value for name, value in flags.items()}
    return build_trainer(settings_for(folder, "127.0.0.1:1", "t", **made)[0])


def test_the_default_is_grpo(tmp_path: Path) -> None:
    assert build_trainer(load(None, {"home": str(tmp_path)})).algorithm == policy("grpo", minibatches=2)


@pytest.mark.parametrize("name", names())
def test_every_algorithm_by_name(tmp_path: Path, name: str) -> None:
    made = built(tmp_path, learner__algorithm=name, learner__reference="here", learner__teacher="there")
    assert made.algorithm == algorithm(name, minibatches=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch", "TorchBackend"),
        pytest.param("deepspeed", "DeepSpeedBackend", marks=pytest.mark.slow),
        pytest.param("megatron", "MegatronBackend", marks=pytest.mark.slow),
    ],
)
def test_one_line_takes_another_backend(tmp_path: Path, name: str, kind: str) -> None:
    backend = built(tmp_path, learner__backend=name, learner__weight_decay=0.5).backend
    assert (type(backend).__name__, backend.adam.weight_decay) == (kind, 0.5)


@pytest.mark.slow
def test_one_line_takes_a_layout_and_its_options(tmp_path: Path) -> None:
    lean = {"learner__reshard": True, "learner__pipeline_schedule": "gpipe", "learner__precision": "bf16"}
    torch = built(tmp_path / "torch", learner__backend="torch:t2p2", **lean).backend
    assert (str(torch.parallel), torch.compute.bf16) == ("torch:d1t2p2", True)
    assert (torch._reshard, torch._schedule) == (True, "gpipe")
    zero = {"learner__zero_stage": 3, "learner__zero_offload": True, "learner__precision": "bf16"}
    sharded = built(tmp_path / "zero", learner__backend="deepspeed", **zero).backend
    assert sharded.zero == Zero(stage=3, offload=True, bf16=True)
    megatron = built(tmp_path / "megatron", learner__backend="megatron:t2p2").backend
    assert str(megatron.parallel) == "megatron:d1t2p2"


def test_one_line_gives_roles_ranks_of_their_own(tmp_path: Path) -> None:
    roles = {"learner__algorithm": "ppo", "learner__knobs": '{"kl_coef": 0.1}', "learner__reference": "here"}
    apart = "torch[actor]:t2+torch[critic]:d1|torch[reference]:d1"
    backend = built(tmp_path / "apart", learner__backend=apart, learner__offload='["reference"]', **roles).backend
    assert str(backend.parallel) == "torch:d1t2"
    assert [backend.apart(role) for role in ("actor", "critic", "reference")] == [False, True, True]
    together = "torch[actor]:d2|torch[critic]:d2"
    assert type(built(tmp_path / "together", learner__backend=together, **roles).backend).__name__ == "TorchBackend"


@pytest.mark.parametrize("failures", [1, 100])
def test_a_warm_up_that_runs_out_of_memory_takes_shorter_rows_until_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    trainer = built(tmp_path, learner__tokens_per_pack="auto")
    version = checkpoint.write(tmp_path, 0, tiny.random_state(0))
    weights: Any = {"uri": str(version.path), "digest": version.digest, "version": 0}
    attempts, step = [], trainer.backend.step

    def fail_at_first(micros: Any, *arguments: Any) -> Any:
        attempts.append(trainer.budget)
        if len(attempts) <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(micros, *arguments)

    monkeypatch.setattr(trainer.backend, "step", fail_at_first)
    if failures == 1:
        warm_up(trainer, weights)
    else:
        with pytest.raises(BadConfiguration, match=r"a sample of 8 tokens does not fit .*activation_checkpointing"):
            warm_up(trainer, weights)
    assert attempts == [8192, 8]


def test_knobs_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = settings_for(tmp_path, "127.0.0.1:1", "t")[1]
    knobs = "knobs = { clip_high = 0.5, rejection = { upper = 3.0 }, reward_norm = 'group/none', dual_clip = 'none' }"
    file.write_text(file.read_text().replace("[learner]", f"[learner]\nalgorithm = 'decoupled'\n{knobs}"))
    made = build_trainer(load(file)).algorithm.knobs
    assert (made.clip_high, made.rejection, made.dual_clip) == (0.5, Rejection(upper=3.0), None)
    assert made.reward_norm.std_level is None
    monkeypatch.setenv("MILLRACE_LEARNER__KNOBS", json.dumps({"eps_clip": 0.1}))
    assert build_trainer(load(file)).algorithm.knobs.clip_low == 0.1


def test_the_learning_rate_and_how_passes_are_computed(tmp_path: Path) -> None:
    plain = built(tmp_path / "plain")
    assert (plain.schedule.decay, plain.backend.compute) == ("constant", Compute())
    falling = {"learner__decay": "cosine", "learner__decay_steps": 50, "learner__lr_floor": 0.1, "learner__warmup": 5}
    lean = {"learner__precision": "bf16", "learner__activation_checkpointing": True}
    assert built(tmp_path / "away", learner__offload='["reference"]').backend.offload == {"reference"}
    packed = {"learner__packing": "kk", "learner__prefix_sharing": True}
    made = built(tmp_path / "other", **falling, **lean, **packed)
    assert (plain.packing, plain.prefix_sharing, made.packing, made.prefix_sharing) == ("sequential", False, "kk", True)
    assert made.schedule == Schedule(made.schedule.lr, 5, "cosine", 50, 0.1)
    assert made.backend.compute == Compute(bf16=True, checkpointing=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learner__decay": "linear"}, r"\[learner\] a linear schedule over 0 steps"),
        ({"learner__algorithm": "grop"}, r"\[learner\] no algorithm 'grop'; did you mean 'grpo'"),
        ({"learner__knobs": '{"clip_hi": 1.0}'}, "did you mean 'clip_high'"),
        ({"learner__knobs": '{"minibatches": 4}'}, "a setting of its own"),
        ({"learner__knobs": '{"temperature": 0.7}'}, "only tokens that were drawn at 1"),
        ({"learner__knobs": '{"behave_imp_weight_cap": 5}'}, "no longer exists"),
        ({"learner__backend": "megatron", "learner__precision": "bf16"}, r"\[learner\] precision: backend megatron"),
        ({"learner__backend": "deepspeed", "learner__activation_checkpointing": True}, "only torch"),
        ({"learner__backend": "deepspeed", "learner__precision": "bf16"}, "bf16 needs ZeRO 2 or 3"),
        ({"learner__backend": "deepspeed", "learner__zero_stage": 0, "learner__zero_offload": True}, "ZeRO 0 keeps"),
        ({"learner__zero_stage": 3}, r"\[learner\] zero_stage: backend torch has no such option, only deepspeed"),
        ({"learner__zero_offload": True}, "only deepspeed"),
        ({"learner__optimizer_offload": True}, r"\[learner\] optimizer_offload: .*set precision = \"bf16\""),
        (
            {"learner__optimizer_offload": True, "learner__precision": "bf16", "learner__learners": 2},
            r"optimizer_offload: .*learners = 1",
        ),
        ({"learner__backend": "megatron:p2", "learner__pipeline_schedule": "gpipe"}, "only torch"),
        (
            {"learner__backend": "megatron", "learner__offload": '["reference"]'},
            r"offload: backend megatron has no such",
        ),
        ({"learner__backend": "deepspeed:d2t2"}, "deepspeed has no dimension t"),
        ({"learner__backend": "torch:t"}, r"\[learner\] backend: torch:t: t is no list of sizes"),
        (
            {"learner__backend": "torch[actor]:d1+torch[critic]:d1"},
            "names a critic, and grpo .* none, only actor: leave",
        ),
        ({"learner__backend": "torch[actor]:d1|torch[teacher]:d1"}, "names a teacher, and grpo as configured has none"),
        ({"learner__backend": "torch[actor]:d1+torch[judge]:d1"}, r"backend: torch\[judge\]:d1: no role judge: choose"),
        ({"learner__backend": "torch[critic]:d2"}, r"backend: torch\[critic\]:d2: nobody is the actor"),
        ({"learner__backend": "torch[actor]:d1+deepspeed[critic]:d1"}, "run on torch, not on deepspeed"),
        ({"learner__backend": "megatron[actor]:d1+megatron[critic]:d1"}, "run on torch, not on megatron"),
        ({"learner__backend": "torch[actor]:d1+vllm[rollout]:d1"}, "engines are processes of their own; leave it out"),
        ({"learner__algorithm": "ppo", "learner__backend": "torch[actor]:t2+torch[critic]:d3"}, "with 5 learners, and"),
        (
            {"learner__backend": "torch[actor]:d1+torch[critic]:d1", "learner__lora": '{"rank": 4}'},
            "all roles on the same",
        ),
        (
            {
                "learner__algorithm": "distill-forward",
                "learner__teacher": "there",
                "learner__backend": "torch[actor]:d1+torch[teacher]:d1",
            },
            "too much to send",
        ),
        ({"learner__backend": "torch:t8"}, r"trains with 8 learners, and \[topics\] shards = 4"),
        ({"learner__backend": "torch:t2", "learner__lora": '{"rank": 4}'}, "an adapter trains with data parallelism"),
        ({"learner__algorithm": "reinforce++"}, "name the model to hold as reference"),
        ({"policy__group_size": 1}, "erases what a group of one earns"),
        ({"learner__algorithm": "dapo", "rollout__sampling": '{"max_tokens": 512}'}, "make them equal"),
    ],
)
def test_what_no_trainer_can_do_is_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(tmp_path, **flags)


def test_a_model_that_does_not_divide_is_refused_before_anybody_is_met(place: Make) -> None:
    it = place(**{"learner.backend": "torch:t2"})
    with pytest.raises(ConfigError, match="torch:d1t2: 3 attention heads do not divide over t2"):
        it.learn(1)
    assert not it.bus.groups


def test_a_model_of_a_role_that_does_not_divide_is_refused_too(place: Make, tmp_path: Path) -> None:
    checkpoint.export(tmp_path / "judge", with_scalar_head(tiny.random_state(1)))
    flags = {
        "learner.backend": "torch[actor]:d1+torch[reward_model]:t2",
        "learner.reward_model": str(tmp_path / "judge"),
        "learner.knobs": json.dumps({"reward_model_coef": 0.5}),
    }
    it = place(**flags)
    with pytest.raises(ConfigError, match="torch:d1t2: 3 attention heads do not divide over t2"):
        it.learn(1)
    assert not it.bus.groups


@pytest.mark.slow
def test_a_learner_keeps_its_critic_from_start_to_start(place: Make) -> None:
    """Three versions in one go, and one after the other by learners that start anew: the same bytes."""
    one, two = (place(**{"learner.algorithm": "ppo"}) for _ in range(2))
    for it in (one, two):
        feed(it.bus, it.settings, range(12))
    one.learn(3)
    for versions in (1, 2, 3):
        two.learn(versions)
    digests = [[row["digest"] for row in entries(it.bus, it.settings)] for it in (one, two)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4
    last = entries(two.bus, two.settings)[-1]
    assert last["metrics"]["value_loss"] > 0
    names_ = [path.name for path in checkpoint_of(two, last["digest"]).iterdir()]
    assert "critic.tensors" in names_


def test_the_ledger_shows_what_a_reward_model_said(place: Make, tmp_path: Path) -> None:
    """Held by configuration, away from the device between its uses, beside the rewards that were recorded."""
    scalar = with_scalar_head(tiny.random_state(1))
    head = torch.randn(scalar.weights[SCORE].shape, generator=torch.Generator().manual_seed(1))
    checkpoint.export(tmp_path / "judge", replace(scalar, weights={**scalar.weights, SCORE: head}))
    knobs = json.dumps({"reward_model_coef": 0.5})
    away = {"learner.reward_model": str(tmp_path / "judge"), "learner.offload": '["reward_model"]'}
    it = place(**{"learner.knobs": knobs, **away})
    feed(it.bus, it.settings, range(8))
    it.learn(2)
    for row in entries(it.bus, it.settings)[1:]:
        found = row["metrics"]
        assert found["samples_without_reward"] == found["samples_without_score"] == 0
        assert found["reward_model_mean"] != 0
        assert found["reward_used_mean"] == pytest.approx(found["reward_mean"] + 0.5 * found["reward_model_mean"])


def checkpoint_of(it: Any, digest: str) -> Path:
    (path,) = weights_root(it.settings).glob(f"v3-{digest[:12]}")
    state = checkpoint.read(path, digest=digest)
    assert state.critic is not None
    assert state.critic.step == state.step == 3
    return path


@pytest.mark.slow
def test_a_learner_keeps_its_adapter_from_start_to_start(place: Make) -> None:
    """Merged versions go on with the adapter that they were merged from, whatever process trains them."""
    one, two = (place(**{"learner.lora": '{"rank": 4, "targets": ["q_proj", "v_proj"]}'}) for _ in range(2))
    for it in (one, two):
        feed(it.bus, it.settings, range(12))
    one.learn(3)
    for versions in (1, 2, 3):
        two.learn(versions)
    digests = [[row["digest"] for row in entries(it.bus, it.settings)] for it in (one, two)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4
    (path,) = weights_root(two.settings).glob(f"v3-{digests[1][3][:12]}")
    state = checkpoint.read(path, digest=digests[1][3])
    assert state.adapter is not None
    assert (state.adapter.lora.rank, state.adapter.lora.targets) == (4, ("q_proj", "v_proj"))
    assert state.adapter.base.name.startswith("v0-")
    assert (path / "model.safetensors").is_file(), "engines load it as they load any other"
    assert collect(weights_root(two.settings), dict(enumerate(digests[1])), keep=1, serving=())
    assert state.adapter.base.is_dir()


def test_versions_may_be_adapters(place: Make) -> None:
    """The event says so, a reloader's checks pass, and a learner that starts anew goes on from one."""
    it = place(**{"learner.lora": '{"rank": 4, "publish": "adapter"}'})
    feed(it.bus, it.settings, range(12))
    it.learn(1)
    it.learn(3)
    records = it.bus.read(policy_topics(it.settings)["weights"], 0)
    events = [codec.decode_as("WeightVersion", record.value or b"") for record in records]
    assert [event["mode"] for event in events] == ["full", "adapter", "adapter", "adapter"]
    for event in events[1:]:
        folder, _ = check(event, None)
        assert base_of(folder).folder == Path(events[0]["uri"])
        assert "model.safetensors" not in event["files"]
    assert checkpoint.read(Path(events[3]["uri"]), digest=events[3]["digest"]).step == 3
    assert events[3]["full_bytes"] < (events[0]["full_bytes"] or 0) / 4
