"""How many planted secrets refine takes out, and how often it takes something out of what is clean.

    python -m benchmarks.bench_detection [--items 20] [--clean-mb 4]

Each kind of secret is drawn anew, put into seven kinds of text and into the arguments of a tool call, and folded by the
production stage with the production detectors. It counts as removed when its value is nowhere in the event that comes
out. Formats and rules have one author, so recall is an upper bound. Clean are numbers of programs (floats, order
numbers, ids) and the sources and documents of installed packages."""

from __future__ import annotations

import argparse
import base64
import os
import random
import string
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from millrace.infra.config import Governance
from millrace.streams.refine.detectors.guard import GuardedDetectors
from millrace.streams.refine.stage import Refine
from millrace.streams.serve import DETECTORS
from millrace.testing.events import Episode
from tests.support.folding import Bench, of

ALNUM, HEX, B64 = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_letters + string.digits + "+/"
WORDS = [
    "abandon",
    "ability",
    "able",
    "about",
    "above",
    "absent",
    "absorb",
    "abstract",
    "absurd",
    "abuse",
    "access",
    "accident",
    "account",
    "accuse",
    "achieve",
    "acid",
    "across",
    "action",
    "actor",
    "actual",
    "adapt",
    "address",
    "adjust",
    "admit",
    "adult",
    "advance",
    "advice",
    "afford",
    "again",
    "agent",
    "agree",
    "ahead",
]
Draw = Callable[[random.Random], str]


def of_(letters: str, size: int) -> Draw:
    """That many of these letters."""
    return lambda r: "".join(r.choice(letters) for _ in range(size))


def after(prefix: str, letters: str, size: int, suffix: str = "") -> Draw:
    """A fixed prefix, then letters."""
    return lambda r: prefix + of_(letters, size)(r) + suffix


def password(r: random.Random) -> str:
    """As a person or a manager of passwords makes it."""
    return (
        r.choice(("Tr0ub4dor", "Winter", "s3cure", "Blue"))
        + r.choice("-.!_")
        + of_(ALNUM, 8)(r)
        + str(r.randint(10, 99))
    )


def card(r: random.Random) -> str:
    """A Visa number in groups of four."""
    digits = "4" + of_(string.digits, 14)(r)
    total = sum(int(d) if n % 2 else (int(d) * 2 - 9 * (int(d) > 4)) for n, d in enumerate(digits))
    digits += str(-total % 10)
    return " ".join(digits[n : n + 4] for n in range(0, 16, 4))


def pem(r: random.Random, *, cut: str = "") -> str:
    """A private key, perhaps without its end or its beginning."""
    lines = [of_(B64, 64)(r) for _ in range(12)] + [of_(B64, 20)(r) + "=="]
    head, tail = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
    return "\n".join([*([] if cut == "head" else [head]), *lines, *([] if cut == "tail" else [tail])])


def b64(draw: Draw) -> Draw:
    """The same in base64."""
    return lambda r: base64.b64encode(draw(r).encode()).decode()


KINDS: dict[str, tuple[str, Draw]] = {
    # kind -> (how it is called where names are given, how it is drawn)
    "GitHub token": ("GITHUB_TOKEN", after("ghp_", ALNUM, 36)),
    "GitLab token": ("GITLAB_TOKEN", after("glpat-", ALNUM, 20)),
    "Slack token": ("SLACK_TOKEN", lambda r: f"xoxb-{of_(string.digits, 12)(r)}-{of_(ALNUM, 24)(r)}"),
    "Stripe key": ("STRIPE_KEY", after("sk_live_", ALNUM, 24)),
    "OpenAI key": ("OPENAI_API_KEY", after("sk-proj-", ALNUM, 48)),
    "Anthropic key": ("ANTHROPIC_API_KEY", after("sk-ant-api03-", ALNUM, 80)),
    "Google key": ("GOOGLE_API_KEY", after("AIza", ALNUM, 35)),
    "Google client secret": ("GOOGLE_CLIENT_SECRET", after("GOCSPX-", ALNUM, 28)),
    "Google refresh token": ("REFRESH_TOKEN", after("1//0", ALNUM, 60)),
    "Hugging Face token": ("HF_TOKEN", after("hf_", string.ascii_letters, 34)),
    "npm token": ("NPM_TOKEN", after("npm_", ALNUM, 36)),
    "AWS key id": ("AWS_ACCESS_KEY_ID", after("AKIA", string.ascii_uppercase + "234567", 16)),
    "AWS secret": ("AWS_SECRET_ACCESS_KEY", of_(B64, 40)),
    "AWS session token": ("AWS_SESSION_TOKEN", of_(B64, 300)),
    "Azure storage key": ("AZURE", after("AccountKey=", B64, 86, "==")),
    "Azure client secret": ("AZURE_CLIENT_SECRET", lambda r: f"{of_(ALNUM, 3)(r)}8Q~{of_(ALNUM, 34)(r)}"),
    "Azure SAS": (
        "SAS_URL",
        lambda r: f"https://a.blob.core.windows.net/c?sv=2023-01-03&sig={base64.b64encode(r.randbytes(32)).decode()}",
    ),
    "Discord webhook": (
        "WEBHOOK",
        lambda r: f"https://discord.com/api/webhooks/{r.randint(10**17, 10**18)}/{of_(ALNUM, 68)(r)}",
    ),
    "Datadog key": ("DD_API_KEY", of_(HEX, 32)),
    "Twilio token": ("TWILIO_AUTH_TOKEN", of_(HEX, 32)),
    "JWT": ("TOKEN", lambda r: f"eyJ{of_(ALNUM, 30)(r)}.eyJ{of_(ALNUM, 60)(r)}.{of_(ALNUM, 43)(r)}"),
    "bearer": ("AUTH", after("Bearer ", ALNUM, 40)),
    "basic header": ("AUTH", lambda r: "Basic " + b64(lambda q: f"user:{password(q)}")(r)),
    "password": ("DB_PASSWORD", password),
    "URL with password": ("DATABASE_URL", lambda r: f"postgres://app:{password(r)}@db.example/x"),
    "curl -u": ("CMD", lambda r: f"curl -u admin:{password(r)} https://example.com"),
    "mysql -p": ("CMD", lambda r: f"mysql -u root -p{password(r)} shop"),
    "sshpass": ("CMD", lambda r: f"sshpass -p {password(r)} ssh host"),
    "netrc": ("NETRC", lambda r: f"machine example.com login joe password {password(r)}"),
    "cookie": ("HEADER", lambda r: f"Cookie: sid={of_(ALNUM, 32)(r)}; theme=dark"),
    "/etc/shadow": ("LINE", lambda r: f"root:$6${of_(ALNUM, 12)(r)}${of_(ALNUM + './', 86)(r)}:19000:0:99999:7:::"),
    "private key": ("KEY", pem),
    "private key, end cut off": ("KEY", lambda r: pem(r, cut="tail")),
    "private key, beginning cut off": ("KEY", lambda r: pem(r, cut="head")),
    "ETH key": ("PRIVATE_KEY", after("0x", HEX, 64)),
    "seed phrase": ("MNEMONIC_PHRASE", lambda r: " ".join(r.choice(WORDS) for _ in range(12))),
    "card": ("CARD", card),
}

CONTEXTS: dict[str, Callable[[str, str], str]] = {
    "prose": lambda name, value: f"Please use {value} for the deployment, and tell nobody.",
    "said": lambda name, value: f"The {name.lower().replace('_', ' ')} is {value}\nplease keep it.",
    "env": lambda name, value: f"export PORT=8080\nexport {name}={value}\nexport MODE=prod",
    "yaml": lambda name, value: f"service:\n  {name.lower()}: {value}\n  port: 8080",
    "python": lambda name, value: f'import app\n{name} = "{value}"\napp.run({name})',
    "diff": lambda name, value: f"@@ -1 +1 @@\n-{name}=old\n+{name}={value}",
    "log": lambda name, value: f"2026-01-02 INFO start {name.lower()}={value} pid=77",
}


def secret_in(text: str) -> str:
    """The part of what was planted that must be gone: its longest word."""
    return max(text.replace("\n", " ").replace(":", " ").split(), key=len)


class Folding:
    """The production stage with its detectors, one event at a time."""

    def __init__(self) -> None:
        self.detectors = GuardedDetectors(DETECTORS)
        self.number = 0

    def event(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """What an event became."""
        self.number += 1
        bench, episode = Bench(Refine(Governance(), [self.detectors], slots=1), clock=1), Episode(f"r{self.number}")
        (event,) = of(bench.record("raw", episode.key, "Event", episode.event(kind, body)), "Event")
        return dict(event)

    def text(self, text: str) -> dict[str, Any]:
        """What a tool's answer became."""
        body = {"call_id": "c", "name": "sh", "status": "ok", "content": text, "tool_version": None, "latency_us": 1}
        return self.event("tool_result", body)

    def arguments(self, arguments: dict[str, str]) -> dict[str, Any]:
        """What the arguments of a call became."""
        body = {"call_id": "c", "name": "sh", "arguments": orjson.dumps(arguments).decode(), "response_id": None}
        return self.event("tool_call", body)


def recall(folding: Folding, items: int) -> dict[str, dict[str, float]]:
    """Kind -> context -> share that was removed."""
    r = random.Random(1)
    table: dict[str, dict[str, float]] = {}
    for kind, (name, draw) in KINDS.items():
        row = dict.fromkeys([*CONTEXTS, "arguments"], 0.0)
        for _ in range(items):
            value = draw(r)
            lines = secret_in(value)
            for context, lay in CONTEXTS.items():
                row[context] += lines.encode() not in folding.text(lay(name, value))["body"]
            row["arguments"] += lines.encode() not in folding.arguments({name.lower(): value})["body"]
        table[kind] = {context: 100 * count / items for context, count in row.items()}
    return table


CLEAN: dict[str, Callable[[random.Random], str]] = {
    "a random float": lambda r: repr(r.random()),
    "a list of 20 floats": lambda r: f"values: {[r.random() for _ in range(20)]}",
    "a list of 100 floats": lambda r: f"values: {[r.random() for _ in range(100)]}",
    "a 16-digit order number": lambda r: f"order {r.randint(10**15, 10**16 - 1)} was shipped",
    "an 18-digit id": lambda r: f"id {r.randint(10**17, 10**18 - 1)} was seen",
    "a 19-digit id": lambda r: f"id {r.randint(10**18, 9 * 10**18)} was seen",
}


def sources(megabytes: float) -> Iterator[str]:
    """Files of installed packages, in pieces of 16 KB."""
    left = int(megabytes * 1e6)
    packages = Path(sysconfig.get_paths()["purelib"])
    for path in sorted(packages.rglob("*.[pmr][ydst]*")):
        name = str(path.relative_to(packages))
        if path.suffix not in (".py", ".md", ".rst") or "test" in name or "kingfisher" in name:
            continue
        text = path.read_text(errors="replace")[:65_536]
        for at in range(0, len(text), 16_384):
            yield text[at : at + 16_384]
            left -= 16_384
            if left < 0:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20, help="secrets of each kind")
    parser.add_argument("--clean-mb", type=float, default=4.0, help="megabytes of clean sources")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("KF_RULE_CACHE_DIR", cache)
        folding = Folding()
        try:
            report(folding, arguments.items, arguments.clean_mb)
        finally:
            folding.detectors.close()


def report(folding: Folding, items: int, megabytes: float) -> None:
    """Print both tables."""
    table = recall(folding, items)
    names = [*CONTEXTS, "arguments"]
    print(f"removed, in percent of {items}\n{'':32}" + "".join(f"{name:>10}" for name in names))
    for kind, row in table.items():
        print(f"{kind:32}" + "".join(f"{row[name]:>10.0f}" for name in names))
    means = {name: sum(row[name] for row in table.values()) / len(table) for name in names}
    print(f"{'all':32}" + "".join(f"{means[name]:>10.1f}" for name in names))
    r = random.Random(2)
    print("\nclean texts of which something is taken out, in percent")
    for what, draw in CLEAN.items():
        count = max(20, items * 50)
        hit = sum(folding.text(draw(r))["governance"]["redaction"] != "none_needed" for _ in range(count))
        print(f"{what:32}{100 * hit / count:>10.2f}")
    taken: list[str] = []
    size = 0
    for text in sources(megabytes):
        size += len(text)
        governance = folding.text(text)["governance"]
        if governance["redaction"] != "none_needed":
            taken += sorted(governance["counts"])
    per_mb = len(taken) / (size / 1e6)
    print(f"\n{per_mb:.2f} kinds taken out per MB of sources ({size / 1e6:.1f} MB): {sorted(set(taken))}")


if __name__ == "__main__":
    main()
