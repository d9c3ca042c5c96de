"""The audit: proves from the topics alone that the history of a policy is whole, or names what broke first.

A law is one sentence and one small visitor (`law.Law`); `walk.Walk` reads every topic once past all of them;
`law.AuditReport` is what comes out. Nothing here trusts what a stage or learner remembers."""

from millrace.consumers.audit.command import run
from millrace.consumers.audit.law import AuditReport, LawFinding, Violation
from millrace.consumers.audit.run import LAWS, audit

__all__ = ["LAWS", "AuditReport", "LawFinding", "Violation", "audit", "run"]
