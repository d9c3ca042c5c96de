-- Model calls: one row a call, by engines of this deployment, by outside providers, and out of imported files.
--
-- policy: the model being trained or observed
-- tenant: whose traffic it is
-- trajectory: id of the episode
-- trace: which agent of the episode asked
-- group: the group of the episode
-- split: train or evaluation
-- step: order within the trace
-- turn: which turn of the conversation
-- call_id: the engine's request
-- response_id: what the client got; rewards may name it
-- model: the model that the client named
-- engine: vllm or inprocess; openai, an outside provider; import, a file of another tool
-- engine_version: its version, or its address
-- engine_start: which start of which engine answered; empty: an outside provider or a file
-- prompt_tokens: tokens that were read, as billed
-- cached_tokens: how many of them came from a cache
-- completion_tokens: tokens that were written, as billed
-- cost: in units of the provider's currency; null: unknown
-- latency_ms: from the request to the last token
-- first_token_ms: from the request to the first token
-- finish_reason: stop, length, tool_calls or abort
-- temperature: of sampling; 0 is greedy
-- exact: whether the exact tokens are known
-- oldest_version: oldest version that sampled a token of it; null: unknown
-- newest_version: newest version that sampled a token of it; null: unknown
-- trainable: whether its tokens may train, as far as the gateway knows
-- why_not: why they may not
-- eligibility: what its content may be used for, as refine decided
-- request: the request as it was received, without what an earlier call of the trace said
-- request_base: event of the call that said it; null: the request is whole
-- request_kept: how many leading items of which list of it that call said; -1: the whole value
-- response: the reply as it was sent
-- prompt_ids: exact prompt tokens behind the kept prefix
-- output_ids: exact sampled tokens
-- output_logprobs: log-probability of each sampled token when it was sampled
-- output_versions: version that sampled each token
-- event: id of its event
-- happened_at: when it happened, by the gateway's clock
-- logged_at: when it came into the history
-- part: where it lies in events
-- off: where it lies in events
SELECT
    policy, tenant, root_trajectory AS trajectory, e.trajectory AS trace, `group`, split, step,
    model_call_turn AS turn, model_call_call_id AS call_id, model_call_response_id AS response_id,
    JSONExtractString(model_call_request, 'model') AS model,
    model_call_engine AS engine, model_call_engine_version AS engine_version,
    model_call_engine_incarnation AS engine_start,
    model_call_usage_prompt AS prompt_tokens, model_call_usage_cached AS cached_tokens,
    model_call_usage_completion AS completion_tokens, model_call_cost AS cost,
    model_call_latency_us / 1000 AS latency_ms, model_call_ttft_us / 1000 AS first_token_ms,
    model_call_finish_reason AS finish_reason, model_call_sampling_temperature AS temperature,
    notEmpty(model_call_output_ids) AS exact,
    if(notEmpty(model_call_output_versions), arrayMin(model_call_output_versions), NULL) AS oldest_version,
    if(notEmpty(model_call_output_versions), arrayMax(model_call_output_versions), NULL) AS newest_version,
    model_call_trainable AS trainable, model_call_untrainable_reason AS why_not,
    toString(governance_eligibility) AS eligibility,
    model_call_request AS request, model_call_request_base AS request_base, model_call_request_kept AS request_kept,
    model_call_response AS response,
    model_call_prompt_ids AS prompt_ids, model_call_output_ids AS output_ids,
    model_call_output_logprobs AS output_logprobs, model_call_output_versions AS output_versions,
    id AS event, event_time AS happened_at, log_time AS logged_at, part, off
FROM millrace_log.events AS e
WHERE kind = 'model_call'
