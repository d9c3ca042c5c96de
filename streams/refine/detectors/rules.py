"""Our own rules: a short trigger for the multi-pattern engine, and an anchored pattern that measures and verifies.

Invariants: triggers have (nearly) fixed length, since every possible end of a match costs a call and wide repeats do
not compile with start offsets; a rule without a checksum or a fixed prefix is a label, never a block on its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import phonenumbers

Verify = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """`trigger` is for the engine, `full` is matched where the trigger began, `verify` judges what `full` matched."""

    kind: str
    trigger: bytes
    full: re.Pattern[bytes]
    verify: Verify | None = None
    blocks: bool = True
    caseless: bool = False


def luhn(digits: bytes) -> bool:
    """The checksum of payment cards over ASCII digits."""
    total = 0
    for n, digit in enumerate(reversed(digits)):
        value = digit - 48
        if n % 2:
            value = value * 2 - 9 * (value > 4)
        total += value
    return total % 10 == 0


def mod97(account: bytes) -> bool:
    """The checksum of IBANs over ASCII letters and digits."""
    turned = account[4:] + account[:4]
    return int("".join(str(int(chr(c), 36)) for c in turned)) % 97 == 1


def _card(found: bytes) -> bool:
    digits = re.sub(rb"[ -]", b"", found)
    return len(set(digits)) > 1 and luhn(digits)


def _iban(found: bytes) -> bool:
    account = found.replace(b" ", b"")
    return 15 <= len(account) <= 34 and mod97(account)


def _phone(found: bytes) -> bool:
    try:
        return bool(phonenumbers.is_valid_number(phonenumbers.parse(found.decode("ascii"), None)))
    except phonenumbers.NumberParseException:
        return False


def _ipv4(found: bytes) -> bool:
    return all(int(part) < 256 for part in found.split(b"."))


def _mixed(found: bytes) -> bool:
    """An opaque value: not a word, a path, a template or one repeated character."""
    value = found.rsplit(b" ", 1)[-1].strip(b"\"'")
    return len(set(value)) >= 6 and bool(re.search(rb"[0-9]", value)) and b"{" not in value and b"$" not in value


def _rule(
    kind: str, trigger: str, full: str, verify: Verify | None = None, blocks: bool = True, caseless: bool = False
) -> Rule:
    flags = re.IGNORECASE if caseless else 0
    return Rule(kind, trigger.encode(), re.compile(full.encode(), flags), verify, blocks, caseless)


_W = r"[A-Za-z0-9_-]"

RULES: tuple[Rule, ...] = (
    _rule("aws_key", r"\b(AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b", r"[A-Z0-9]{20}"),
    _rule(
        "aws_secret",
        r"aws_?(secret|sk)",
        r"aws_?(?:secret|sk)\w{0,20}[\"']?\s{0,3}[:=]\s{0,3}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
        caseless=True,
    ),
    _rule(
        "private_key",
        r"-----BEGIN [A-Z ]{0,24}PRIVATE KEY",
        r"-----BEGIN [A-Z ]{0,24}PRIVATE KEY(?: BLOCK)?-----(?:(?s:.){0,16384}?-----END [A-Z ]{0,24}-----|[^\n]*)?",
    ),
    _rule("github_token", r"\bgh[pousr]_[A-Za-z0-9]{8}", r"gh[pousr]_[A-Za-z0-9]{36,255}"),
    _rule("github_token", r"\bgithub_pat_[A-Za-z0-9]{8}", r"github_pat_[A-Za-z0-9_]{40,255}"),
    _rule("gitlab_token", r"\bgl(pat|ptt|rt|dt|cbt|soat)-[A-Za-z0-9_-]{8}", rf"gl[a-z]{{2,4}}-{_W}{{20,64}}"),
    _rule("slack_token", r"\bxox[abeoprs]-[A-Za-z0-9]{4}", r"xox[abeoprs]-[A-Za-z0-9-]{10,250}"),
    _rule(
        "slack_webhook",
        r"hooks\.slack\.com/(services|workflows)/",
        r"hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9+/]{40,80}",
    ),
    _rule("stripe_key", r"\b[rs]k_(live|test)_[A-Za-z0-9]{4}", r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,247}"),
    _rule("anthropic_key", r"\bsk-ant-[a-z0-9]{3}", rf"sk-ant-[a-z0-9]{{3,8}}-{_W}{{20,200}}"),
    _rule("openai_key", r"\bsk-[A-Za-z0-9_-]{12}", rf"sk-(?:proj-|svcacct-|admin-)?{_W}{{20,250}}", _mixed),
    _rule("google_key", r"\bAIza[A-Za-z0-9_-]{8}", rf"AIza{_W}{{35}}"),
    _rule("google_oauth", r"\bya29\.[A-Za-z0-9_-]{8}", rf"ya29\.{_W}{{20,250}}"),
    _rule("huggingface_token", r"\bhf_[A-Za-z]{8}", r"hf_[A-Za-z]{34}\b"),
    _rule("npm_token", r"\bnpm_[A-Za-z0-9]{8}", r"npm_[A-Za-z0-9]{36}\b"),
    _rule("pypi_token", r"\bpypi-AgEIcHlwaS5vcmc", rf"pypi-AgEIcHlwaS5vcmc{_W}{{50,}}"),
    _rule("sendgrid_key", r"\bSG\.[A-Za-z0-9_-]{8}", rf"SG\.{_W}{{20,24}}\.{_W}{{39,50}}"),
    _rule("twilio_key", r"\b(SK|AC)[0-9a-f]{32}\b", r"(?:SK|AC)[0-9a-f]{32}\b"),
    _rule("telegram_token", r"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{4}", rf"[0-9]{{8,10}}:AA{_W}{{32,34}}"),
    _rule("azure_storage", r"AccountKey=[A-Za-z0-9+/]{8}", r"AccountKey=[A-Za-z0-9+/]{86}=="),
    _rule("digitalocean_token", r"\bdo[opr]_v1_[a-f0-9]{8}", r"do[opr]_v1_[a-f0-9]{64}"),
    # A session's own key, as the gateway makes it: an id and its signature.
    _rule(
        "millrace_key", r"\bmr-[0-9a-f]{8}-[0-9a-f]{4}", r"mr-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9a-f]{32}"
    ),
    _rule("jwt", r"\beyJ[A-Za-z0-9_-]{8}", rf"eyJ{_W}{{8,4000}}\.eyJ{_W}{{8,8000}}\.{_W}{{8,1400}}"),
    _rule("bearer", r"\bbearer +[A-Za-z0-9._~+/-]{8}", r"bearer +[A-Za-z0-9._~+/-]{20,2000}=*", _mixed, caseless=True),
    _rule("url_password", r"://[^\s/:@]{1,32}:[^\s/@]", r"://[^\s/:@]{1,32}:[^\s/@]{3,128}@[A-Za-z0-9]"),
    _rule(
        "password",
        r"(password|passwd|pwd|secret|token|api_?key)[\"']?\s{0,2}[:=]\s{0,2}[\"']",
        r"\w{3,16}[\"']?\s{0,2}[:=]\s{0,2}[\"'][^\"'\s]{8,128}[\"']",
        _mixed,
        caseless=True,
    ),
    _rule(
        "card",
        r"\b[3-6][0-9]{3}[ -]?[0-9]{4}",
        # Not behind four hex digits and a dash: that is the inside of a UUID.
        r"(?<![0-9a-f]{4}-)"
        r"(?:[0-9]{4}[ -][0-9]{4}[ -][0-9]{4}[ -][0-9]{1,7}|[0-9]{4}[ -][0-9]{6}[ -][0-9]{4,5}|[0-9]{13,19})(?![0-9])",
        _card,
    ),
    _rule(
        "iban",
        r"\b[A-Z]{2}[0-9]{2} ?[A-Z0-9]{4}",
        r"[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
        _iban,
    ),
    _rule("phone", r"\+[1-9][0-9 ().-]{5}", r"\+[1-9][0-9 ().-]{5,20}[0-9]", _phone),
    _rule(
        "ssn",
        r"\b(ssn|social security)",
        r"(?:ssn|social security)[^0-9\n]{0,24}[0-9]{3}-[0-9]{2}-[0-9]{4}\b",
        caseless=True,
    ),
    _rule(
        "email",
        r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]",
        r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}",
        blocks=False,
    ),
    _rule(
        "ipv4",
        r"\b[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]",
        r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9.])",
        _ipv4,
        blocks=False,
    ),
)
"""e-mail and IPv4 are labels (half of all hits on clean text are licences, versions and object ids); a bare US social
security number is none at all without its keyword"""
