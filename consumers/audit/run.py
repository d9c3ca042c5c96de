"""The audit: one walk over the topics of a policy past every law."""

from __future__ import annotations

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.folds import Folds, Makers
from millrace.consumers.audit.law import AuditReport, Law
from millrace.consumers.audit.laws.agreements import Agreements
from millrace.consumers.audit.laws.consumption import ConsumedOnce, ResolvedOnce
from millrace.consumers.audit.laws.dispositions import Dispositions
from millrace.consumers.audit.laws.episodes import Episodes
from millrace.consumers.audit.laws.events import CaptureChain, Envelopes, EventsChain
from millrace.consumers.audit.laws.ledger import Figures, Leaders
from millrace.consumers.audit.laws.records import Beginnings, Places, Records, Times
from millrace.consumers.audit.laws.samples import Eligible, MinVersion, Staleness, Tokens
from millrace.consumers.audit.laws.scores import Scores
from millrace.consumers.audit.laws.settings import Settings
from millrace.consumers.audit.laws.tickets import Tickets
from millrace.consumers.audit.laws.turns import Outputs, Turns
from millrace.consumers.audit.laws.versions import LedgerChain, Tiles, Versions
from millrace.consumers.audit.laws.weights import Files, Weights
from millrace.consumers.audit.walk import Walk, Watch
from millrace.infra.errors import AuditError
from millrace.infra.log.base import Bus
from millrace.infra.log.history.rows import Resolve, as_stored

LAWS: tuple[type[Law], ...] = (
    Records,
    Beginnings,
    Versions,
    Weights,
    Tiles,
    LedgerChain,
    Figures,
    Leaders,
    Scores,
    ConsumedOnce,
    ResolvedOnce,
    Tickets,
    Agreements,
    Settings,
    Places,
    Tokens,
    Staleness,
    MinVersion,
    Eligible,
    Turns,
    Times,
    Outputs,
    EventsChain,
    CaptureChain,
    Envelopes,
    Dispositions,
    Episodes,
)


def audit(
    bus: Bus,
    namespace: str,
    policy: str,
    *,
    release: str = "reserve",
    resolve: Resolve = as_stored,
    files: bool = False,
    makers: Makers | None = None,
    root: str = "",
    watch: Watch = lambda *_: None,
) -> AuditReport:
    """Read every topic of a policy and judge every law.

    release: the policy's first release policy (later ones are in `resolutions`); resolve: reads claims of large records
    (`millrace.infra.log.blobs.ClaimStore.resolve`); files: also hash the checkpoint directories; makers: fold the turns
    of these stages again (`audit.stages`); root: where the policy's versions lie now, where the deployment was moved;
    watch: is told how far it is. Raises AuditError when there is nothing to
    audit, BusError when the log cannot be read."""
    walk = Walk(bus, namespace, policy, resolve, watch)
    facts = Facts(policy, walk.full, walk.starts, release, walk.latest, walk.has_moved, root)
    laws = [law(facts) for law in (*LAWS, *((Files,) if files else ()))]
    if makers:
        laws.append(Folds(facts, walk, makers))
    walk.run(facts, laws)
    if not any(count for kind, count in walk.counts.items() if kind != "decisions"):
        raise AuditError(
            f"there is nothing to audit: {namespace} holds no record of policy {policy} yet. Create it with"
            " `millrace policy create`, or check [policy] name and the namespace"
        )
    findings = tuple(law.finding for law in laws)
    return AuditReport(namespace, policy, release, findings, tuple(walk.notes), dict(walk.counts))
