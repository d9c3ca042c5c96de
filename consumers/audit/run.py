"""The audit: one walk over the topics of a policy past every claim."""

from __future__ import annotations

from consumers.audit.chains import CaptureChain, EventsChain
from consumers.audit.claim import Claim
from consumers.audit.dispositions import Dispositions
from consumers.audit.facts import Facts
from consumers.audit.files import Files
from consumers.audit.groups import ConsumedOnce, ResolvedOnce, Tickets
from consumers.audit.outputs import Outputs
from consumers.audit.places import Places
from consumers.audit.records import Records
from consumers.audit.samples import Eligible, MinVersion, Staleness, Tokens
from consumers.audit.settings import Settings as SettingsClaim
from consumers.audit.turns import Turns
from consumers.audit.verdict import Report
from consumers.audit.versions import LedgerChain, Tiles, Versions
from consumers.audit.walk import Resolve, Walk
from infra.bus.base import Bus

CLAIMS: tuple[type[Claim], ...] = (
    Records,
    Versions,
    Tiles,
    LedgerChain,
    ConsumedOnce,
    ResolvedOnce,
    Tickets,
    SettingsClaim,
    Places,
    Tokens,
    Staleness,
    MinVersion,
    Eligible,
    Turns,
    Outputs,
    EventsChain,
    CaptureChain,
    Dispositions,
)


def audit(
    bus: Bus,
    namespace: str,
    policy: str,
    *,
    release: str = "reserve",
    resolve: Resolve = lambda record: record,
    files: bool = False,
) -> Report:
    """Read every topic of a policy and judge every claim.

    release: the policy's first release policy (later ones are in `resolutions`); resolve: reads claims of large records
    (`infra.claims.ClaimStore.resolve`); files: also hash the checkpoint directories. Raises AuditError when there is
    nothing to audit, BusError when the log cannot be read."""
    walk = Walk(bus, namespace, policy, resolve)
    facts = Facts(policy, walk.full, walk.starts, release, walk.latest)
    claims = [claim(facts) for claim in (*CLAIMS, *((Files,) if files else ()))]
    walk.run(facts, claims)
    findings = tuple(claim.finding for claim in claims)
    return Report(namespace, policy, release, findings, tuple(walk.notes), dict(walk.counts))
