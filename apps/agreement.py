"""What sections of the settings must agree on, where no section can see the other's meaning."""

from __future__ import annotations

from millrace.infra.config import Settings
from millrace.infra.errors import ConfigError
from millrace.trainers.algorithms.names import check_group_size
from millrace.trainers.errors import TrainerError


def check_agreement(settings: Settings) -> None:
    """Raises ConfigError for an algorithm of pairs whose policy grants groups of another size: every batch of them
    would end the learner."""
    try:
        check_group_size(settings.learner.algorithm, settings.policy.group_size)
    except TrainerError as error:
        raise ConfigError(f"[learner] algorithm: {error}") from error
