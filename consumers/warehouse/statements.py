"""Several statements in one text, as a file or a prompt holds them. Pure."""

from __future__ import annotations

import re

_PART = re.compile(
    r"(?P<quiet>--[^\n]*|\#[ !][^\n]*|/\*.*?(?:\*/|\Z))"
    r"|(?P<kept>'(?:[^'\\]|\\.|'')*(?:'|\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\Z)|`(?:[^`\\]|\\.)*(?:`|\Z)"
    r"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)"
    r"|(?P<end>;)"
    r"|(?P<other>.)",
    re.DOTALL,
)


def split(text: str) -> tuple[list[str], str]:
    """The statements that a semicolon ends, and what comes after the last one; empty ones and those of comments alone
    are left out. A semicolon in a string, a quoted name or a comment ends nothing."""
    out: list[str] = []
    now, has_text = "", False
    for match in _PART.finditer(text):
        kind = match.lastgroup
        if kind == "end":
            if has_text:
                out.append(now.strip())
            now, has_text = "", False
            continue
        now += match[0]
        has_text = has_text or (kind != "quiet" and bool(match[0].strip()))
    return out, now.strip() if has_text else ""
