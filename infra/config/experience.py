"""What becomes experience, and which of it may train: `[policy]`, `[rollout]`, `[reward]`, `[governance]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from millrace.infra.config.base import Name, Positive, Scalar, Seconds, Section
from millrace.infra.config.upstreams import GatewayPrices
from millrace.infra.log.topics import NAME
from millrace.schemas import bounds


class Policy(Section):
    """The model being trained, and the rules of its admission."""

    name: Name = Field(default="policy", description="its name in topics, labels and requests")
    batch: Annotated[Positive, Field(le=bounds.BATCH)] = Field(
        default=64, description="B: groups a version is trained on"
    )
    eta: Annotated[int, Field(ge=0, le=bounds.ETA)] = Field(
        default=2, description="most versions a trained token may be behind; 0: synchronous"
    )
    group_size: Annotated[Positive, Field(le=bounds.GROUP_SIZE)] = Field(
        default=8, description="samples of one prompt, compared with each other"
    )
    release: Literal["reserve", "soft", "reject", "mask-head"] = Field(
        default="reserve",
        description="reserve never needs to drop; soft only reports; reject and mask-head drop what is stale",
    )
    unsolicited_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="share of a batch that production traffic may take; all of it where no agent runs tasks, unless 0",
    )
    short_groups: Literal["drop", "train", "top-up"] = Field(
        default="drop", description="what becomes of a group with missing samples"
    )
    dynamic_sampling: bool = Field(
        default=False, description="groups whose rewards are all equal are rejected, and others fill the batch"
    )
    lease_s: Annotated[Seconds, Field(ge=0.001, le=bounds.WAIT_MS / 1000)] = Field(
        default=300, description="log time after which a granted group that never ended expires"
    )
    reward_deadline_s: Seconds = Field(
        default=60, description="log time after which an ended episode is sealed as it is"
    )
    awaits: tuple[str, ...] = Field(default=("verifier",), description="reward sources that every rollout waits for")
    prices: GatewayPrices | None = Field(
        default=None,
        description="what a million tokens of its calls cost: { prompt = 0.1, cached = 0.02, completion = 0.4 }; "
        "unset: they have no cost",
    )
    tenant: Annotated[str, Field(pattern=f"^({NAME.pattern})?$")] = Field(
        default="",
        description="whose it is: content of this tenant that is tenant_only may train it; empty: no such content may",
    )


class Rollout(Section):
    """The workers that run your agent."""

    agent: str = Field(default="", description="module:function to run, sync or async")
    workers: Annotated[int, Field(ge=0)] = Field(default=1, description="processes")
    concurrency: Positive = Field(default=8, description="episodes at once in each process")
    timeout_s: Seconds = Field(default=120, description="an episode that takes longer ends as failed")
    tasks: str = Field(default="", description="JSONL file or Hugging Face dataset directory with the tasks")
    ahead: Positive = Field(default=64, description="unresolved prompts that the task loader keeps ahead")
    epochs: Annotated[int, Field(ge=0)] = Field(default=0, description="times to go through the tasks; 0: for ever")
    sampling: dict[str, Scalar] = Field(
        default={},
        description="defaults for the agent's calls: max_tokens, and temperature and top_p, which train at 1 only",
    )
    key: str = Field(
        default="",
        description="name of the gateway's key that workers use, which alone may take grants, and whose tenant is "
        "rollouts unless it names one; empty: the key that is made in home/keys/workers, which other machines lack",
    )


class RewardJudge(Section):
    """A model that judges by a rubric."""

    url: str = ""
    model: str = ""
    key: SecretStr = SecretStr("")
    speaks: Literal["chat", "messages", "responses"] = "chat"
    key_header: Literal["authorization", "x-api-key", "api-key"] = "authorization"
    rubric: str = ""
    independent: bool = True
    conversation: bool = False
    conversation_bytes: Positive = 400_000
    max_tokens: Positive = 1024
    tries: Positive = 3
    price_prompt: Annotated[float, Field(ge=0)] = 0.0
    price_completion: Annotated[float, Field(ge=0)] = 0.0


class RewardTests(Section):
    """Unit tests that judge a program."""

    command: tuple[str, ...] = ()
    program: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "solution.py"
    report: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$")] = ""
    memory_mb: Positive = 1024
    namespaces: bool = True


class Reward(Section):
    """Verifiers that judge ended episodes."""

    verifier: str = Field(default="exact", description="exact, math, judge, tests, or module:function")
    source: str = Field(default="verifier", description="name under which its rewards are recorded")
    rubric: str = Field(default="1", description="version of the rubric; a new one is a new reward")
    key: SecretStr = Field(
        default=SecretStr(""),
        description="secret that gateway, reward roles and refine share: refine then takes no reward that none of "
        "them signed; empty: whoever may write to the topic raw may give rewards",
    )
    timeout_s: Seconds = Field(default=10, description="a verdict that takes longer is a labelled failure")
    workers: Positive = Field(default=1, description="processes that verify")
    judge: RewardJudge = Field(
        default=RewardJudge(),
        description="of the verifier judge: url (with its /v1) of the API that speaks says (chat, messages, "
        "responses), model and key, which stands in key_header; rubric: a file; conversation: it reads all calls of "
        "the episode, of conversation_bytes together; independent: false for a model that is trained by it; prices are "
        "of a million tokens",
    )
    tests: RewardTests = Field(
        default=RewardTests(),
        description="of the verifier tests: command that tests the file program in a directory of its own; report: "
        "JUnit file that it writes there, whose share of passed tests is the value; empty: its exit status decides; "
        "namespaces: where the kernel gives them programs reach no network, no process and no file to write but theirs",
    )


class Tenant(Section):
    """What one tenant allows."""

    train: bool = Field(default=True, description="whether its traffic may train")
    eligibility: Literal["denied", "audit_only", "tenant_only", "aggregate"] = Field(
        default="aggregate", description="what its content may be used for"
    )
    classification: Literal["public", "internal", "confidential", "restricted"] = Field(
        default="internal", description="label of its content unless an event says more"
    )
    residency: str = Field(default="", description="region its content must stay in")
    redact: bool = Field(default=True, description="whether secrets and personal data are looked for")
    remove: tuple[
        Literal["address", "birth_date", "card", "email", "identity", "ipv4", "person", "personal", "telephone"],
        ...,
    ] = Field(
        default=(), description="kinds that are otherwise only labelled, and that are taken out here like secrets"
    )
    identifiers: str = Field(
        default="",
        description="sealed file, from home on, of its subjects and their names, addresses and numbers, which are "
        "taken out like secrets; `millrace registry` writes it; empty: none",
    )


class Governance(Section):
    """What may be learned from. A tenant that is not named here is recorded and never trained on."""

    tenants: dict[Name, Tenant] = Field(default={"local": Tenant()}, description="rules by tenant")
    region: str = Field(
        default="", description="where this deployment runs; content of another residency is not trained on"
    )
    name_key: SecretStr = Field(
        default=SecretStr(""),
        description="secret under which names that hold a secret become digests; refine on several machines needs the "
        "same one; empty: one under home",
    )
