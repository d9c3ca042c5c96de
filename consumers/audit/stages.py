"""The production stages, as they must be made to fold a history again.

A stage's settings come from where they are recorded: dispatch's from the settings that it wrote as the policy began and
from its first grant, seal's from `decisions`. Refine's rules and detectors are those configured here; the audit says so
where a history was governed by others."""

from __future__ import annotations

from contextlib import ExitStack

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.folds import Makers
from millrace.infra.config import Settings
from millrace.infra.connect import claims
from millrace.infra.errors import ReplayError
from millrace.infra.stages.base import Stage
from millrace.streams.dispatch.stage import Dispatch, Terms
from millrace.streams.refine.detectors.guard import Guarded
from millrace.streams.refine.detectors.rule_cache import keep_rules
from millrace.streams.refine.names import FILE
from millrace.streams.serve import DETECTORS, dispatch_terms, refine_of, seal_of


def production(settings: Settings, held: ExitStack) -> Makers:
    """Makers of the three stages. The detectors run in a process of their own, which ends with `held`."""

    def refine(facts: Facts) -> Stage:
        if not facts.begins_at_zero("raw"):
            raise ReplayError("retention has taken the beginning of raw")
        if not settings.governance.name_key.get_secret_value() and not (settings.home / FILE).exists():
            raise ReplayError(
                f"the key under which names are replaced is not in {settings.home}: audit where refine runs, or set"
                " [governance] name_key"
            )
        keep_rules(settings.home)
        detectors = Guarded(DETECTORS)
        held.callback(detectors.close)
        return refine_of(settings, detectors, claims(settings))

    return {
        "refine": refine,
        "seal": lambda facts: seal_of(settings, claims(settings)),
        "dispatch": lambda facts: dispatch(settings, facts),
    }


def dispatch(settings: Settings, facts: Facts) -> Dispatch:
    """The dispatch stage under the terms that it began with, as far as the log says them."""
    began, terms = facts.began, dispatch_terms(settings)
    terms = Terms(
        release=began.get("release", terms.release),
        unsolicited_share=began.get("unsolicited_share", terms.unsolicited_share),
        lease=began["lease_ms"] * 1000 if "lease_ms" in began else terms.lease,
        reward_deadline_ms=next(iter(facts.waits), terms.reward_deadline_ms),
        awaits=next(iter(facts.awaited), terms.awaits),
        max_running=began.get("max_running", terms.max_running),
        dynamic_sampling=began.get("dynamic_sampling", terms.dynamic_sampling),
    )
    return Dispatch(facts.policy, len(facts.starts["grants"]), terms, claims(settings))
