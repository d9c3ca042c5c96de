-- Tool failures: how often each tool works, fails, runs out of time or never answers.
--
-- policy String = '': the model that asked; empty: every one
-- tool String = '': one tool; empty: every tool
SELECT policy, tool, count() AS calls, countIf(status = 'ok') AS ok, countIf(status = 'error') AS error,
    countIf(status = 'timeout') AS timeout, countIf(status IN ('denied', 'cancelled')) AS refused,
    countIf(status = 'unanswered') AS unanswered, 1 - ok / calls AS failure_share,
    quantileExact(0.5)(latency_ms) AS latency_ms_p50, max(latency_ms) AS latency_ms_max
FROM tool_calls
WHERE ({policy:String} = '' OR policy = {policy:String})
    AND ({tool:String} = '' OR tool = {tool:String})
GROUP BY policy, tool
ORDER BY failure_share DESC, policy, tool
