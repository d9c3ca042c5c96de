"""Every error that Millrace raises on purpose, as one tree.

    MillraceError
    ├── SchemaError              the codec cannot read or write a record
    │   ├── UnknownSchema        the fingerprint belongs to no schema of this release or its history
    │   ├── CorruptRecord        the bytes do not decode, or the record does not fit its schema
    │   │   └── UnknownKey       a record that is encoded has a key that its schema does not have
    │   └── BeyondBounds         a field of the record is beyond its bound
    ├── ConfigError              a setting is missing, unknown or wrong
    ├── BusError                 the log refused or could not answer
    │   ├── UnreachableError     no broker answered in time; whatever was in flight has an unknown outcome
    │   ├── AccessError          the brokers answered and do not let us in, or do not let us do this
    │   ├── TopicError           a topic is missing or differs from its specification
    │   ├── FencedError          another owner opened the same transactional id; this transactor is dead
    │   ├── RefusedError         the group moved on since the records were polled; the transaction was aborted
    │   ├── BadRecordError       the brokers take no such record, however often it is sent
    │   │   └── TooLargeError    a record is larger than its topic or the client allows
    │   └── ArchiveError         archived records are damaged, missing, or of another topic of the same name
    ├── StageError               a stage broke the contract of `millrace.infra.stages.base`
    ├── ReplayError              a recorded turn cannot be folded again or differs from what was recorded
    │   └── InputGone            a turn, or what it folded, is not in the log any more
    ├── HistoryGone              a part of the history that was asked for is nowhere any more
    ├── ProofError               a version cannot be trained again here: something is gone, or differs from its record
    ├── ClaimError               the bytes behind a claim are missing or are not the ones that were claimed
    │   └── StorageError         their storage does not answer; another try may work
    ├── EngineError              an inference engine refused or failed
    │   ├── EngineUnavailable    it does not answer, or failed while answering; another try may work
    │   │   └── NoReply          nothing of a reply came, or it takes none now: safe to send again
    │   │       └── EngineAbsent nothing listens there: it is starting, or gone
    │   ├── EngineTimeout        no byte came for too long
    │   └── EngineRejected       it refused the request as such; the same request will be refused again
    ├── GatewayError             the capture gateway refused or failed
    │   ├── ApiError             it refuses a request, with its HTTP status
    │   ├── RenderError          the chat template refuses the messages
    │   │   └── PromptTooLong    they are certain to be longer than the model's context
    │   ├── LogFull              the local log can take no more
    │   ├── GatewayUnreachable   the client got no answer
    │   └── GatewayRefused       the client was refused
    ├── RolloutError             a rollout worker could not do its part
    ├── DetectorError            a detector of secrets failed; what it was given must not be learned from
    ├── RewardError              a verifier could not be loaded or run
    ├── LearnerError             a learner cannot go on
    │   ├── RefusedMember        this learner differs from the others in configuration, code or libraries
    │   └── RegroupError         this step is abandoned; the group forms again and trains the same batch
    ├── LedgerError              the ledger or the weights topic contradicts itself
    ├── PolicyError              a policy cannot be created, or does not exist
    │   └── BranchError          a branch cannot be made of this history, or not go on
    ├── ReloadError              an engine could not be brought to a weight version
    ├── WarehouseError           the warehouse refused rows or a query, or cannot be reached
    │   ├── QueryError           it refused a query, or the query failed; in ClickHouse's own words
    │   ├── QuestionError        no such question, another parameter is needed, or a query selects nothing
    │   ├── WarehouseHeld        another process holds its directory
    │   └── WarehouseTaken       another process has taken over the partition of these rows; none of them came in
    ├── ServiceError             a local process (broker, engine, supervisor) did not come up or go down
    ├── AuditError               the topics cannot be audited at all
    ├── ExportError              nothing can be exported so: what is asked for, or where to, makes no sense
    ├── ImportRefused            a file, or rows of it, cannot be imported
    ├── LookError                nothing in the log is what was asked for, or several things are
    └── TrainerError             training cannot go on as it is asked to
        ├── BadSample            a trajectory that cannot be trained on; the rest of its batch can
        ├── BadConfiguration     a knob or a layout that cannot work
        ├── OutOfMemory          a step did not fit in the card; its rows are shorter when it is done again
        ├── BadData              a row of a data set that cannot be trained on, or a set without one that can
        ├── NotFormed            a backend was used before `form` and `load`, or after `tear_down`
        └── CheckpointError      a checkpoint that cannot be written or read
            └── CorruptCheckpoint    its bytes are not what its manifest says

The root and what the codec raises are defined in `schemas.errors`, what training raises in `trainers.errors`, what only
the gateway and its client raise beside them, in `producers`, and QueryError beside the warehouse's endpoint.

Every message says what to do next. An error that is not of this tree is a bug and propagates.
"""

from __future__ import annotations

from millrace.schemas import errors as of_records

MillraceError = of_records.MillraceError
SchemaError = of_records.SchemaError
UnknownSchema = of_records.UnknownSchema
CorruptRecord = of_records.CorruptRecord
UnknownKey = of_records.UnknownKey
BeyondBounds = of_records.BeyondBounds


class ConfigError(MillraceError):
    """A setting is missing, unknown or wrong."""


class BusError(MillraceError):
    """The log refused or could not answer."""


class UnreachableError(BusError):
    """No broker answered in time. What was in flight has an unknown outcome: fence again, then read what is there."""


class AccessError(BusError):
    """The brokers answered and refused: wrong credentials, an untrusted certificate, or a user that may not do this."""


class TopicError(BusError):
    """A topic is missing or differs from its specification."""


class FencedError(BusError):
    """Another owner opened the same transactional id. Fatal for this transactor: drop it and open a new one."""


class RefusedError(BusError):
    """The consumer group moved on since the records were polled. The transaction was aborted: poll again."""


class BadRecordError(BusError):
    """The brokers refuse a record as such: the same record will be refused again."""


class TooLargeError(BadRecordError):
    """A record is larger than its topic or the client allows: store it as a claim."""


class ArchiveError(BusError):
    """What was archived cannot be read, or belongs to another topic of the same name: restore it, or name another
    directory."""


class StageError(MillraceError):
    """A stage broke the contract of `millrace.infra.stages.base`."""


class ReplayError(MillraceError):
    """A recorded turn cannot be folded again or differs from what was recorded."""


class InputGone(ReplayError):
    """A turn, or a record that it folded, is not in the log any more: taken by retention, or by somebody."""


class HistoryGone(MillraceError):
    """A part of the history that was asked for is neither in a topic nor in the archive any more."""


class ProofError(MillraceError):
    """A version cannot be trained again here: what it was trained on is gone, or something differs from its record."""


class ClaimError(MillraceError):
    """The bytes behind a claim are missing or are not the ones that were claimed."""


class StorageError(ClaimError):
    """The storage of claims does not answer. Nothing is known about the bytes: try again."""


class EngineError(MillraceError):
    """An inference engine refused or failed."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or failed while answering. Try again, or another engine.

    `status` is what it answered by HTTP, None where it answered nothing; `retry_after_s` when it wants to be asked
    again, where it says so; `received`: bytes of an answer that cannot be used; `words`: the error that it answered in
    place of a reply, or ended one with."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: int | None = None,
        received: int = 0,
        words: str = "",
    ) -> None:
        super().__init__(f"{message}: {words}" if words else message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.received = received
        self.words = words


class EngineTimeout(EngineError):
    """No byte came from the engine for too long. Nothing is known about the request; raise the limit if it is busy.

    `received`: bytes of an answer that came before and cannot be used."""

    def __init__(self, message: str, *, received: int = 0) -> None:
        super().__init__(message)
        self.received = received


class EngineRejected(EngineError):
    """The engine refused the request as such. `status` is its HTTP status: change the request, not the time."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class GatewayError(MillraceError):
    """The capture gateway refused or failed."""


class RolloutError(MillraceError):
    """A rollout worker could not do its part."""


class DetectorError(MillraceError):
    """A detector failed, died or did not answer. What it was given must not be learned from."""


class RewardError(MillraceError):
    """A verifier could not be loaded or run."""


class LearnerError(MillraceError):
    """A learner cannot go on."""


class RefusedMember(LearnerError):
    """This learner differs from the others in configuration, code or libraries: make it equal, then start it again."""


class RegroupError(LearnerError):
    """This step is abandoned: form the group again and train the same batch. Nothing is lost."""


class LedgerError(MillraceError):
    """The ledger or the weights topic contradicts itself: run `millrace audit` before anything trains on it."""


class PolicyError(MillraceError):
    """A policy cannot be created, or does not exist."""


class BranchError(PolicyError):
    """A branch cannot be made of this history, or cannot go on: change what the message names, or its name."""


class ReloadError(MillraceError):
    """An engine could not be brought to a weight version."""


class WarehouseError(MillraceError):
    """The warehouse refused rows or a query, or cannot be reached. `code` is ClickHouse's, if any, else 0."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class QuestionError(WarehouseError):
    """There is no such question, a parameter of it is missing, unknown or of another kind, or a query that should
    select trajectories does not say where they lie."""


class WarehouseTaken(WarehouseError):
    """Another process has taken over the partition of these rows, of which none came in. Ask again what is to do."""


class WarehouseHeld(WarehouseError):
    """Another process holds the directory. `pid` is its id, `url` where it answers, empty where it does not: ask there,
    or end it first."""

    def __init__(self, message: str, pid: int, url: str) -> None:
        super().__init__(message)
        self.pid = pid
        self.url = url


class ServiceError(MillraceError):
    """A local process did not come up or go down."""


class AuditError(MillraceError):
    """The topics cannot be audited at all."""


class ExportError(MillraceError):
    """What should be exported, or where to, makes no sense. Nothing was written."""


class ImportRefused(MillraceError):
    """A file, or rows of it, cannot be imported: the message names each and says why."""


class LookError(MillraceError):
    """Nothing in the log is what was asked for, or several things are: the message names them."""
