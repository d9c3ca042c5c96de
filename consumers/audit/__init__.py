"""The audit: proves from the topics alone that the history of a policy is whole, or names what broke first.

A law is one sentence and one small visitor (`law.Law`); `walk.Walk` reads every topic once past all of them;
`verdict.AuditReport` is what comes out. Nothing here trusts what a stage or learner kept for itself."""

from millrace.consumers.audit.command import run
from millrace.consumers.audit.run import LAWS, audit
from millrace.consumers.audit.verdict import AuditReport, LawFinding, Violation

__all__ = ["LAWS", "AuditReport", "LawFinding", "Violation", "audit", "run"]
