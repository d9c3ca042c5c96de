"""Our own rules: a short trigger for the multi-pattern engine, and an anchored pattern that measures and verifies.

Invariants: triggers have (nearly) fixed length, since every possible end of a match costs a call and wide repeats do
not compile with start offsets; a rule without a checksum or a fixed prefix is a label, never a block on its own, unless
the name of a secret stands beside it and the value looks drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import phonenumbers

from millrace.streams.refine.detectors import values

Verify = Callable[[bytes], bool]
NEAR_BEFORE, NEAR_AFTER = 48, 24
"""bytes around a match in which `DetectorRule.near` is looked for"""
RUN = r"[A-Za-z0-9/+]{40}"
"""the trigger of rules for any run of base64: the engine only says whether there is one, since each has many ends"""


@dataclass(frozen=True, slots=True)
class DetectorRule:
    """`trigger` is for the engine, `form` is matched where the trigger began, `verify` judges what `form` matched; what
    is taken out is the group `v` of `form` where it has one, and `verify` then sees that alone."""

    kind: str
    trigger: bytes
    form: re.Pattern[bytes]
    verify: Verify | None = None
    blocks: bool = True
    caseless: bool = False
    near: re.Pattern[bytes] | None = None
    """a word that must stand beside a match; without it the match is nothing, or a label if `alone` says so"""
    alone: bool = False
    back: Callable[[bytes, int], int | None] | None = None
    """where a match really begins, from where its trigger began; None: it is no match"""

    def find(self, text: bytes, at: int) -> tuple[int, int, bytes, bool] | None:
        """(start, end, what to verify, whether it blocks) of a match whose trigger began at a place."""
        match = self.form.match(text, at)
        if match is None:
            return None
        group = "v" if "v" in self.form.groupindex else 0
        start, end = match.span(group)
        if self.back is not None:
            first = self.back(text, start)
            if first is None:
                return None
            start = first
        blocks = self.blocks
        if self.near is not None and not self.near.search(text, max(0, at - NEAR_BEFORE), end + NEAR_AFTER):
            if not self.alone:
                return None
            blocks = False
        return start, end, match.group(group), blocks


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
    rotation = account[4:] + account[:4]
    return int("".join(str(int(chr(c), 36)) for c in rotation)) % 97 == 1


def _iban(text: bytes) -> bool:
    account = text.replace(b" ", b"")
    return 15 <= len(account) <= 34 and mod97(account)


def _phone(text: bytes) -> bool:
    try:
        return bool(phonenumbers.is_valid_number(phonenumbers.parse(text.decode("ascii"), None)))
    except phonenumbers.NumberParseException:
        return False


def _ipv4(text: bytes) -> bool:
    return all(int(part) < 256 for part in text.split(b"."))


def _is_opaque(text: bytes) -> bool:
    """An opaque value: not a word, a path, a template or one repeated character."""
    value = text.rsplit(b" ", 1)[-1].strip(b"\"'")
    return len(set(value)) >= 6 and bool(re.search(rb"[0-9]", value)) and b"{" not in value and b"$" not in value


def _card(text: bytes) -> bool:
    digits = re.sub(rb"[ -]", b"", text)
    return len(set(digits)) > 1 and values.is_card_number(digits) and luhn(digits)


def _rule(
    kind: str,
    trigger: str,
    form: str,
    verify: Verify | None = None,
    blocks: bool = True,
    caseless: bool = False,
    near: str | None = None,
    alone: bool = False,
    back: Callable[[bytes, int], int | None] | None = None,
) -> DetectorRule:
    pattern = re.compile(form.encode(), re.IGNORECASE if caseless else 0)
    beside = None if near is None else re.compile(near.encode(), re.IGNORECASE)
    return DetectorRule(kind, trigger.encode(), pattern, verify, blocks, caseless, beside, alone, back)


_W = r"[A-Za-z0-9_-]"
_SECRET = (
    r"(password|passwd|passphrase|pwd|secret|token|credential|api_?key|access_?key|secret_?key|auth_?key|app_?key|"
    r"private_?key|signing_?key|encryption_?key|account_?key)"
)
"""how the name of a secret ends"""
_QUOTE = r"[\"'`]?"
_PEM_RUN = (
    # What stands in a key: lines of base64, perhaps quoted, escaped, marked as a diff or headed; then a short last one.
    r"(?:(?:[\s\"'+>|,*#]|\\[nr\"]|[A-Za-z][A-Za-z-]{2,24}: [^\n\x00]{0,100}\n)*+[A-Za-z0-9+/=]{16,}+){0,1024}+"
    r"(?:(?:[\s\"'+>|,*#]|\\[nr\"]){1,8}[A-Za-z0-9+/]{1,15}={0,2}(?=[\s\"'\\\x00]|\Z))?"
)

RULES: tuple[DetectorRule, ...] = (
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
        r"-----BEGIN [A-Z ]{0,24}PRIVATE KEY(?: BLOCK)?(?:-----)?"
        rf"(?:(?:(?!-----BEGIN )[^\x00]){{0,16384}}?-----END [A-Z ]{{0,24}}-----|{_PEM_RUN})",
    ),
    # The end of a key whose beginning was cut off.
    _rule(
        "private_key",
        r"-----END [A-Z ]{0,24}PRIVATE KEY",
        r"-----END [A-Z ]{0,24}KEY[^\n\x00]{0,12}",
        back=values.key_tail,
    ),
    _rule(
        "putty_key",
        r"PuTTY-User-Key-File-",
        r"PuTTY-User-Key-File-(?:[^\x00]{0,16384}?Private-MAC: [0-9a-fA-F]{0,64}|[^\x00]{0,4096})",
    ),
    _rule(
        "putty_key",
        r"Private-Lines: [0-9]",
        r"Private-Lines: [0-9]{1,3}\s{1,2}(?P<v>(?:[A-Za-z0-9+/=]{16,}\s{1,2})*[A-Za-z0-9+/=]{4,})",
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
    _rule("openai_key", r"\bsk-[A-Za-z0-9_-]{12}", rf"sk-(?:proj-|svcacct-|admin-)?{_W}{{20,250}}", _is_opaque),
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
    # One of `millrace key`; its id alone, which tables show, is no secret.
    _rule("millrace_key", r"\bmk_[a-z0-9]{12}_", r"mk_[a-z0-9]{12}_[0-9a-f]{64}"),
    _rule("jwt", r"\beyJ[A-Za-z0-9_-]{8}", rf"eyJ{_W}{{8,4000}}\.eyJ{_W}{{8,8000}}\.{_W}{{8,1400}}"),
    _rule(
        "bearer", r"\bbearer +[A-Za-z0-9._~+/-]{8}", r"bearer +[A-Za-z0-9._~+/-]{20,2000}=*", _is_opaque, caseless=True
    ),
    _rule("url_password", r"://[^\s/:@]{1,32}:[^\s/@]", r"://[^\s/:@]{1,32}:[^\s/@]{3,128}@[A-Za-z0-9]"),
    # name = "value", and a value laid out beside its key
    _rule(
        "password",
        rf"{_SECRET}[\"']?\s{{0,2}}[:=]\s{{0,2}}[\"']",
        r"\w{3,16}[\"']?\s{0,2}[:=]\s{0,2}[\"'][^\"'\s]{8,128}[\"']",
        _is_opaque,
        caseless=True,
    ),
    # NAME=value in a shell or an .env file
    _rule(
        "password",
        r"(PASSWORD|PASSWD|PASSPHRASE|PWD|SECRET|TOKEN|CREDENTIAL|_KEY|APIKEY)=[^\s\"'$(<{]",
        r"[A-Z_]{3,10}=(?P<v>[^\s\"'$()<>{}\[\];&|`\\\x00]{8,256})",
        values.is_drawn,
    ),
    # name=value in a query, an .ini file or a connection string
    _rule(
        "password",
        r"(password|passwd|passphrase|pwd|secret|api_?key|access_?token)=[^\s\"'$(<{]",
        r"\w{3,12}=(?P<v>[^\s\"'$()<>{}\[\],;&|`\\\x00]{8,256})",
        values.is_drawn,
        caseless=True,
    ),
    # name: value at the end of a line
    _rule(
        "password",
        rf"{_SECRET}:\s[^\s\"']",
        rf"{_SECRET}:\s{{1,3}}(?P<v>[^\s\"'#,{{}}()<>$|&*\[\]`\x00]{{8,128}})(?=[ \t]*(?:#[^\n]*)?(?:[\r\n]|\Z))",
        values.is_drawn,
        caseless=True,
    ),
    # as somebody says it
    _rule(
        "password",
        r"(password|passphrase|passcode|passwort)( is| was| ist| lautet)?:? ",
        rf"(?:password|passphrase|passcode|passwort)(?:\s(?:is|was|ist|lautet):?|:)\s{_QUOTE}"
        r"(?P<v>[^\s\"'`<>(){}\[\]\x00]{8,64})",
        values.is_drawn,
        caseless=True,
    ),
    # --password value
    _rule(
        "password",
        r"--(password|passwd|pass|token|secret|api-key)[= ][^\s-]",
        rf"--[a-z-]{{4,8}}[= ]{_QUOTE}(?P<v>[^\s\"'`<>(){{}}$\x00]{{8,256}})",
        values.is_drawn,
    ),
    _rule("password", r"\bsshpass +-p", rf"sshpass +-p *{_QUOTE}(?P<v>[^\s\"'$<\x00]{{3,128}})"),
    _rule(
        "password",
        r"\b(mysql|mysqldump|mysqladmin|mariadb)\b",
        rf"(?:mysqldump|mysqladmin|mysql|mariadb)\b[^\n;|&\x00]{{0,200}}?\s-p{_QUOTE}"
        r"(?P<v>[^\s\"'$<\x00-][^\s\"'$<\x00]{3,127})",
    ),
    _rule(
        "basic_auth",
        r"(\s-u|--user)[= ]?[^\s:]",
        rf"(?:\s-u|--user)[= ]?{_QUOTE}[^\s:\"'$@/]{{1,64}}:(?P<v>[^\s\"'$<\x00]{{3,128}})",
        near=r"\b(?:curl|wget|http)\b",
    ),
    _rule(
        "basic_auth",
        r"\bbasic +[A-Za-z0-9+/]{8}",
        r"basic +(?P<v>[A-Za-z0-9+/]{8,512}={0,2})",
        values.is_user_pass,
        caseless=True,
    ),
    _rule(
        "netrc",
        r"\bmachine\s+\S",
        r"machine\s{1,8}\S{1,253}\s{1,8}login\s{1,8}\S{1,128}\s{1,8}password\s{1,8}(?P<v>[^\s\x00]{3,128})",
    ),
    _rule(
        "password_hash",
        r"\$(1|5|6|2[abxy]?|y|gy|7|apr1|argon2(id|i|d))\$",
        r"\$(?:(?:1|apr1)\$[./A-Za-z0-9]{1,8}\$[./A-Za-z0-9]{22}"
        r"|5\$(?:rounds=[0-9]+\$)?[./A-Za-z0-9]{1,16}\$[./A-Za-z0-9]{43}"
        r"|6\$(?:rounds=[0-9]+\$)?[./A-Za-z0-9]{1,16}\$[./A-Za-z0-9]{86}|2[abxy]?\$[0-9]{2}\$[./A-Za-z0-9]{53}"
        r"|(?:y|gy|7)\$[./A-Za-z0-9]{1,32}\$[./A-Za-z0-9]{1,86}\$[./A-Za-z0-9]{43}"
        r"|argon2(?:id|i|d)\$v=[0-9]+\$[a-z0-9=,]+\$[A-Za-z0-9+/]{8,64}\$[A-Za-z0-9+/]{16,128})",
    ),
    _rule(
        "cookie",
        r"\bcookie[\"']?: ?",
        rf"cookie[\"']?:\s?{_QUOTE}(?P<v>[A-Za-z0-9_.-]{{1,64}}=[^\r\n\"'\x00]{{8,4000}})",
        values.has_drawn_value,
        caseless=True,
    ),
    _rule(
        "api_header",
        r"\b(x-api-key|x-auth-token|x-access-token|private-token|x-vault-token|api-key)[\"']?: ?",
        rf"[a-z-]{{7,14}}[\"']?:\s?{_QUOTE}(?P<v>[A-Za-z0-9._~+/=-]{{16,512}})",
        values.is_drawn,
        caseless=True,
    ),
    _rule(
        "aws_session_token",
        r"(session_?token|x-amz-security-token)[\"']?\s{0,2}[:=]",
        rf"[a-z_-]{{12,20}}[\"']?\s{{0,2}}[:=]\s{{0,2}}{_QUOTE}(?P<v>[A-Za-z0-9/+=]{{100,4000}})",
        caseless=True,
    ),
    _rule(
        "azure_sas", r"[?&;]sig=[A-Za-z0-9%+/]{8}", r"[?&;]sig=(?P<v>[A-Za-z0-9%+/]{40,120}={0,2})", values.is_digest_32
    ),
    _rule("signed_url", r"X-Amz-Signature=[0-9a-f]{8}", r"X-Amz-Signature=(?P<v>[0-9a-f]{64})"),
    _rule(
        "discord_webhook",
        r"discord(app)?\.com/api/webhooks/",
        r"discord(?:app)?\.com/api/webhooks/(?P<v>[0-9]{17,20}/[A-Za-z0-9_-]{60,80})",
    ),
    _rule(
        "discord_token",
        r"\b[MNO][A-Za-z0-9_-]{22}",
        r"[MNO][A-Za-z0-9_-]{22,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}",
        values.begins_with_digits,
    ),
    _rule("google_client_secret", r"\bGOCSPX-[A-Za-z0-9_-]{8}", rf"GOCSPX-{_W}{{28}}"),
    _rule("google_refresh_token", r"\b1//0[A-Za-z0-9_-]{8}", rf"1//0{_W}{{40,200}}"),
    _rule(
        "azure_secret",
        r"[A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{8}",
        r"[A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}",
    ),
    _rule(
        "service_key",
        r"((dd|datadog)[_-]?(api|app|application)[_-]?key|auth_?token)[\"']?\s{0,2}[:=]",
        r"[\w-]{8,24}[\"']?\s{0,2}[:=]\s{0,2}[\"']?(?P<v>[0-9a-f]{32}(?:[0-9a-f]{8})?)(?![0-9a-fA-F])",
        _is_opaque,
        caseless=True,
    ),
    _rule(
        "eth_key",
        r"\b0x[0-9a-fA-F]{64}",
        r"0x[0-9a-fA-F]{64}(?![0-9a-fA-F])",
        near=r"priv(?:ate)?[ _-]?key|secret[ _-]?key|wallet[ _-]?key",
    ),
    _rule(
        "wallet_key", r"\b[5KL][1-9A-HJ-NP-Za-km-z]{50}", r"[5KL][1-9A-HJ-NP-Za-km-z]{50,51}\b", values.is_base58check
    ),
    _rule("wallet_key", r"\bxprv[1-9A-HJ-NP-Za-km-z]{8}", r"xprv[1-9A-HJ-NP-Za-km-z]{107}\b", values.is_base58check),
    _rule(
        "seed_phrase",
        r"\b(seed|recovery|mnemonic|backup)[ _]?(phrase|words|seed)",
        r"(?:seed|recovery|mnemonic|backup)[ _]?(?:phrase|words|seed)(?:\sis)?[\"']?\s{0,2}[:=]?\s{0,2}[\"']?"
        r"(?P<v>(?:[a-z]{3,8}[ ,]{1,2}){11,23}[a-z]{3,8})(?![a-z]|[ ,]+[a-z]{3,8}\b)",
        values.is_seed_length,
        caseless=True,
    ),
    # Without its name: by what it looks like, or by the words before it.
    _rule(
        "aws_secret",
        RUN,
        r"(?<![=_.-])(?P<v>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=_-])",
        values.is_random,
        back=values.of_no_block,
    ),
    _rule(
        "aws_session_token",
        r"\b(FwoGZXIvYXdz|FQoGZXIvYXdz|IQoJb3JpZ2lu|AQoDYXdz)",
        r"[A-Za-z0-9/+=]{60,4000}",
    ),
    _rule(
        "secret",
        r"(secret|token|credential|passphrase|password|passcode|"
        r"(api|app|application|access|secret|private|account|signing|encryption|auth)[ _-]?key)"
        r"( is| was|:|,| =>| ->)? [\"'`]?[A-Za-z0-9/+_=.~-]{20}",
        r"[\w -]{3,20}?(?:\s(?:is|was|=>|->)|[:,])?\s[\"'`]?(?P<v>[A-Za-z0-9/+_=.~-]{20,4000})(?![A-Za-z0-9/+_=~-])",
        values.is_random_or_hex,
        caseless=True,
    ),
    # In the middle of a sentence no data stands.
    _rule(
        "secret",
        RUN,
        r"(?<=[a-z] )(?P<v>[A-Za-z0-9/+_-]{40,4000}={0,2})(?=[ ,.;)])",
        values.is_random,
    ),
    _rule(
        "password",
        r"\b(use|using|enter|type) [A-Za-z0-9]{1,16}[-_.!@#%^&*][A-Za-z0-9!@#%^&*]{6}",
        r"[a-z]{3,5} (?P<v>[A-Za-z0-9!@#%^&*_.-]{10,64})",
        values.is_made_up,
        caseless=True,
    ),
    _rule(
        "seed_phrase",
        r"\b([a-z]{3,8} ){11}[a-z]{3,8}\b",
        rf"(?:(?:{values.BIP39_WORDS}) ){{11,23}}(?:{values.BIP39_WORDS})\b",
        values.is_seed,
    ),
    # In groups as on the card. Not behind four hex digits and a dash: that is the inside of a UUID.
    _rule(
        "card",
        r"\b[2-6][0-9]{3}[ -][0-9]{4}",
        r"(?<![0-9a-f]{4}-)(?<![0-9][ .])(?<![\w.])"
        r"(?:[0-9]{4}[ -][0-9]{4}[ -][0-9]{4}[ -][0-9]{1,7}|[0-9]{4}[ -][0-9]{6}[ -][0-9]{4,5})(?!\w|[ .-][0-9])",
        _card,
    ),
    # In one piece it may be any number: an order, a ticket, a position. The word beside it tells.
    _rule(
        "card",
        r"\b[2-6][0-9]{12}",
        r"(?<![\w.])(?<![0-9a-f]{4}-)[0-9]{13,19}(?!\w|\.[0-9])",
        _card,
        near=r"(?<![a-z])(?:cards?|credit_?card|debit_?card|card_?num\w*|visa|master_?card|amex|cc|pan|cvv|cvc|karte|"
        r"kredit\w*|carte|tarjeta|carta)(?![a-z])",
        alone=True,
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
        r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?[0-9])",
        _ipv4,
        blocks=False,
    ),
)
"""e-mail and IPv4 are labels (half of all hits on clean text are licences, versions and object ids); a bare US social
security number is none at all without its keyword"""
