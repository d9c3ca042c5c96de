"""The bus in memory."""
