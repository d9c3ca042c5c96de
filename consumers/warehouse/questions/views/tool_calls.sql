-- Tool calls, each with the answer that followed it.
--
-- policy: the model that asked
-- tenant: whose traffic it is
-- trajectory: id of the episode
-- trace: which agent of the episode asked
-- step: order within the trace
-- call_id: id of the call, as the agent or the gateway gave it
-- response_id: the reply that asked for it
-- tool: name of the tool
-- arguments: as they were sent
-- status: ok, error, timeout, denied or cancelled; unanswered: no result was recorded
-- result: as the tool returned it
-- tool_version: which version of the tool answered
-- latency_ms: how long it took; null: unanswered
-- asked_at: when it was asked
SELECT
    c.policy AS policy, c.tenant AS tenant, c.root AS trajectory, c.trace AS trace, c.step AS step,
    c.call_id AS call_id, c.response_id AS response_id, c.tool AS tool, c.arguments AS arguments,
    if(r.status = '', 'unanswered', r.status) AS status, r.result AS result, r.tool_version AS tool_version,
    if(r.status = '', NULL, r.latency_us / 1000) AS latency_ms, c.asked_at AS asked_at
FROM
(
    SELECT policy, tenant, root_trajectory AS root, trajectory AS trace, step, tool_call_call_id AS call_id,
        tool_call_response_id AS response_id, tool_call_name AS tool, tool_call_arguments AS arguments,
        event_time AS asked_at
    FROM millrace_log.events
    WHERE kind = 'tool_call'
) AS c
ASOF LEFT JOIN
(
    SELECT tenant, trajectory AS trace, step, tool_result_call_id AS call_id,
        toString(tool_result_status) AS status, tool_result_content AS result,
        tool_result_tool_version AS tool_version, tool_result_latency_us AS latency_us
    FROM millrace_log.events
    WHERE kind = 'tool_result'
) AS r ON r.tenant = c.tenant AND r.trace = c.trace AND r.call_id = c.call_id AND r.step >= c.step
