-- A trajectory step by step: what the agent read, wrote and was told.
--
-- Steps of sub-agents name their trace. The whole request and reply of a model call are in the view model_calls.
--
-- trajectory String: id of the episode
SELECT if(trace = trajectory, '', trace) AS sub_agent, step, kind, name, status, value, completion_tokens AS tokens,
    newest_version AS version, latency_ms, eligibility, content, happened_at
FROM steps
WHERE trajectory = {trajectory:String}
ORDER BY logged_at, part, off
