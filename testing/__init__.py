"""What users test their own stages, verifiers and detectors with; Millrace's own tests use the same.

events      builders of episodes, as a gateway writes them
verifiers   judging as the reward role judges, and the contract of a verifier
stages      the contract of a stage, checked by whole histories with deaths
detectors   the contract of a detector of secrets
world       the deployment in memory that such histories run in

Invariants: nothing of the product imports this room; a test pins the names below."""

from millrace.testing.detectors import check_detector
from millrace.testing.events import Episode, model_call, reward_body
from millrace.testing.stages import Sent, check_stage
from millrace.testing.verifiers import Attempt, check_verifier, judge
from millrace.testing.world import CALM, Chances, World

__all__ = [
    "CALM",
    "Attempt",
    "Chances",
    "Episode",
    "Sent",
    "World",
    "check_detector",
    "check_stage",
    "check_verifier",
    "judge",
    "model_call",
    "reward_body",
]
