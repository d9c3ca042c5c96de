"""The audit: proves from the topics alone that the history of a policy is whole, or names what broke first.

A claim is one sentence and one small visitor (`claim.Claim`); `walk.Walk` reads every topic once past all of them;
`verdict.Report` is what comes out. Nothing here trusts what a stage or learner kept for itself."""

from millrace.consumers.audit.command import run
from millrace.consumers.audit.run import CLAIMS, audit
from millrace.consumers.audit.verdict import Finding, Report, Violation

__all__ = ["CLAIMS", "Finding", "Report", "Violation", "audit", "run"]
