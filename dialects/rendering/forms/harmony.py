"""gpt-oss: messages with a header each, which names a channel or the function that is called."""

from __future__ import annotations

from millrace.dialects.rendering.forms.base import Form

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"

HARMONY = Form("harmony", tokens=(START, CHANNEL, MESSAGE, END, CALL), channels=True)
