-- What happened, step by step: one row an event of the governed history.
--
-- policy: the model being trained or observed
-- tenant: whose traffic it is
-- trajectory: id of the episode
-- trace: whose step it is inside the episode; a sub-agent has a trace of its own
-- parent_trace: the trace that spawned it
-- group: the group of the episode
-- attempt: which run of the sample
-- step: order within the trace, from 0; -1: a judgement, which has no place in it
-- kind: episode_started, model_call, tool_call, tool_result, reward, episode_ended and others
-- actor: who did it
-- split: train or evaluation
-- name: the task, engine, tool or reward source
-- status: how it ended: finish reason, status of the tool or of the episode, failure of the reward
-- content: the reply (its text where it is a chat completion's), arguments, result or output as text
-- value: of a reward
-- prompt_tokens: read by the model
-- completion_tokens: written by the model
-- oldest_version: oldest version that sampled a token of it
-- newest_version: newest version that sampled a token of it
-- latency_ms: of a model or tool
-- eligibility: what its content may be used for: denied, audit_only, tenant_only or aggregate
-- why: the rule that decided it
-- happened_at: when it happened, by the clock of who saw it
-- logged_at: when it came into the history
-- event: id of the event
-- part: where it lies in events
-- off: where it lies in events
WITH JSONExtractString(model_call_response, 'choices', 1, 'message', 'content') AS reply
SELECT
    policy, tenant, root_trajectory AS trajectory, e.trajectory AS trace, parent_trajectory AS parent_trace,
    `group`, attempt, step, toString(kind) AS kind, actor, split,
    multiIf(
        kind = 'episode_started', episode_started_task_id, kind = 'episode_ended', episode_ended_task_id,
        kind = 'model_call', model_call_engine, kind = 'tool_call', tool_call_name,
        kind = 'tool_result', tool_result_name, kind = 'reward', reward_source, '') AS name,
    multiIf(
        kind = 'episode_ended', toString(episode_ended_status), kind = 'model_call', model_call_finish_reason,
        kind = 'tool_result', toString(tool_result_status), kind = 'reward', ifNull(reward_failure, ''), '') AS status,
    multiIf(
        kind = 'episode_started', episode_started_task, kind = 'episode_ended', ifNull(episode_ended_output, ''),
        kind = 'model_call', if(reply = '', model_call_response, reply), kind = 'tool_call', tool_call_arguments,
        kind = 'tool_result', tool_result_content, kind = 'observation', observation_content,
        kind = 'reward', ifNull(reward_critique, ''), kind = 'gap', gap_reason, '') AS content,
    if(kind = 'reward', reward_value, NULL) AS value,
    if(kind = 'model_call', model_call_usage_prompt, NULL) AS prompt_tokens,
    if(kind = 'model_call', model_call_usage_completion, NULL) AS completion_tokens,
    if(notEmpty(model_call_output_versions), arrayMin(model_call_output_versions), NULL) AS oldest_version,
    if(notEmpty(model_call_output_versions), arrayMax(model_call_output_versions), NULL) AS newest_version,
    multiIf(
        kind = 'model_call', model_call_latency_us / 1000,
        kind = 'tool_result', tool_result_latency_us / 1000, NULL) AS latency_ms,
    toString(governance_eligibility) AS eligibility, governance_reason AS why,
    event_time AS happened_at, log_time AS logged_at, id AS event, part, off
FROM millrace_log.events AS e
