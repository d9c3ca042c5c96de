"""From settings to the parts of a learner process, warmed up before it joins anybody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from millrace.consumers import policy_names
from millrace.consumers.learner.group import layouts
from millrace.consumers.learner.group.agreement import client_id
from millrace.consumers.learner.group.identity import identify
from millrace.consumers.learner.group.membership import Membership
from millrace.consumers.learner.group.rendezvous import STORE_TIMEOUT_S
from millrace.consumers.learner.step.parts import Parts
from millrace.consumers.learner.version.collect import newer
from millrace.consumers.learner.version.sender import WeightSender
from millrace.infra import config
from millrace.infra.config import Settings
from millrace.infra.errors import ConfigError, PolicyError
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history import newest
from millrace.infra.log.history.places import PlaceReader
from millrace.infra.log.topics import full_name
from millrace.infra.versions import locate
from millrace.schemas.records import WeightVersion
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.factory import check_model
from millrace.trainers.backends.group import open_store
from millrace.trainers.backends.layout import ACTOR, CRITIC, FROZEN, Layout
from millrace.trainers.backends.models.build import random_state
from millrace.trainers.backends.places import RolePlace
from millrace.trainers.batches.sample import Sample
from millrace.trainers.compatibility import suits
from millrace.trainers.errors import BadConfiguration, CheckpointError, OutOfMemory
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.adapter import Lora

log = logging.getLogger(__name__)

REHEARSAL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""A config.json of a model that any backend trains in milliseconds."""


def build(
    settings: Settings,
    bus: Bus,
    *,
    stopping: Callable[[], bool],
) -> Parts:
    """The parts of a learner of an existing policy, its rendezvous store listening. Raises PolicyError without one."""
    names = policy_names.topics(settings)
    head = newest.head(bus, names["weights"], names["ledger"])
    if head is None:
        raise PolicyError(
            f"policy {settings.policy.name} does not exist: `millrace policy create --model DIR` writes version 0"
        )
    trainer = build_trainer(settings)
    need = layouts.need_of(settings.learner)
    root = policy_names.weights_root(settings)
    while True:
        try:
            if need.fewest == 1:
                warm_up(trainer, locate(head.weights, root))
            else:
                rehearse(settings.learner, locate(head.weights, root))
            break
        except (CheckpointError, OSError):
            if (later := newer(bus, names, head, root)) is None:
                raise
            head = later
    host, group, identity = settings.learner.host, policy_names.group(settings), identify(settings)
    store = open_store(host, STORE_TIMEOUT_S)
    name = client_id(f"learner/{identity.tag}", host, store.port)
    return Parts(
        settings=settings,
        bus=bus,
        group=group,
        url=f"tcp://{host}:{store.port}",
        topics=names,
        workers_topic=full_name(settings.namespace, "workers"),
        transactional_id=policy_names.transactional_id(settings),
        root=root,
        identity=identity,
        membership=Membership(
            bus,
            group,
            names["trajectories"],
            name,
            settings.learner.session_timeout_s,
            need,
        ),
        reader=PlaceReader(bus, ClaimStore(settings.claims)),
        store=store,
        trainer=trainer,
        timeout_s=settings.learner.collective_timeout_s,
        stopping=stopping,
        sender=WeightSender(host, settings.learner.collective_timeout_s)
        if settings.engine.weights == "broadcast"
        else None,
    )


def build_trainer(settings: Settings) -> Trainer:
    """The trainer that `[learner]` describes. Raises ConfigError for what no trainer can do."""
    learner = settings.learner
    if "minibatches" in learner.knobs or "ppo_n_minibatches" in learner.knobs:
        raise ConfigError("[learner] knobs: minibatches has a setting of its own, [learner] minibatches")
    models = {role: path for role in FROZEN if (path := getattr(learner, role))}
    try:
        learning = algorithm(learner.algorithm, minibatches=learner.minibatches, **learner.knobs)
        if learning.temperature != 1:
            raise BadConfiguration("knobs: temperature: only tokens that were drawn at 1 reach a learner; leave it out")
        limit = settings.rollout.sampling.get("max_tokens")
        suits(learning, settings.policy.group_size, int(limit) if limit else None)
        places = layouts.check(learner, settings.topics.shards)
        critic = [CRITIC] if learning.critic is not None else []
        layouts.suits(places, [ACTOR, *critic, *learning.holds], learning.name)
        return Trainer(
            layouts.make(learner, places, _adam(learner)),
            learning,
            Schedule(learner.lr, learner.warmup, learner.decay, learner.decay_steps, learner.lr_floor),
            budget=None if learner.tokens_per_pack == "auto" else learner.tokens_per_pack,
            held={role: partial(checkpoint.adopt, Path(path)) for role, path in models.items()},
            critic_lr=learner.critic_lr or None,
            packing=learner.packing,
            prefix_sharing=learner.prefix_sharing,
            lora=_lora(learner.lora) if learner.lora.rank else None,
        )
    except BadConfiguration as error:
        raise ConfigError(f"[learner] {error}") from None


def _adam(learner: config.Learner) -> Adam:
    return Adam(weight_decay=learner.weight_decay, clip=learner.max_grad_norm)


def warm_up(trainer: Trainer, weights: WeightVersion) -> None:
    """Load a version and train a step that is thrown away, so that joining costs the others no first-time work."""
    backend = trainer.backend
    state = checkpoint.read(Path(weights["uri"]), digest=weights["digest"])
    samples = [_sample(reward) for reward in (0.0, 1.0)]
    is_done = False
    while not is_done:
        backend.form(0, 1, None, 60.0)
        trainer.load(state)
        try:
            trainer.train(samples, minibatches=[[0]], version=weights["version"])
            is_done = True
        except OutOfMemory as error:  # until it fits or is refused: each time rows are shorter
            log.warning("%s", error)
        backend.tear_down()


def rehearse(learner: config.Learner, weights: WeightVersion) -> None:
    """The same for a layout that needs peers, whose cells may be all that holds the model: a tiny one, alone. Raises
    ConfigError where a model does not divide as its layout says."""
    actor, *more = layouts.role_places(learner)
    try:
        for place in (actor, *more):
            for role in place.roles:
                model = getattr(learner, role) if role in FROZEN else weights["uri"]
                configuration = Path(model) / "config.json"
                files = {configuration.name: configuration.read_bytes()} if configuration.is_file() else {}
                check_model(place.layout, files)
    except BadConfiguration as error:
        raise ConfigError(f"[learner] backend: {error}") from None
    alone = layouts.make(learner, [RolePlace((ACTOR,), Layout(actor.layout.backend))], _adam(learner))
    alone.form(0, 1, None, 60.0)
    trainer = Trainer(alone, algorithm("grpo", minibatches=1), Schedule(learner.lr))
    trainer.load(random_state(REHEARSAL))
    trainer.train([_sample(reward) for reward in (0.0, 1.0)], minibatches=[[0]], version=0)
    alone.tear_down()


def _lora(settings: config.Lora) -> Lora:
    return Lora(settings.rank, settings.alpha, settings.targets, settings.publish)


def _sample(reward: float) -> Sample:
    return Sample(
        tokens=np.zeros(8, np.int32),
        mask=np.array([0] * 4 + [1] * 4, np.uint8),
        logprobs=np.full(8, -1.0, np.float32),
        versions=np.array([-1] * 4 + [0] * 4, np.int32),
        reward=reward,
        seq=0,
        group="warm-up",
        trajectory=f"warm-up-{reward}",
    )
