"""OTLP over HTTP: spans and log records of GenAI, as an OpenTelemetry SDK or collector sends them, into episodes.

protobuf  requests of OTLP in protobuf, as spans
request   one body: uncompressed, measured, read, each span judged by itself
records   what the receiver's own log holds
agents    which spans are a sub-agent's
made      a conversation as events without numbers
assembler records in, events out: pure
receiver  the two logs, and when a conversation is over
app       the routes
serve     the process
"""
