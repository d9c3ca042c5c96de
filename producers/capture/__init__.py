"""What was captured, durable before the client has its reply: the local log and the forwarder that sends it on."""
