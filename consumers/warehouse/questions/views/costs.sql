-- Tokens, cost and latency by day, tenant and model.
--
-- day: day of the calls, UTC
-- tenant: whose traffic it is
-- policy: the model being trained or observed
-- model: the model that the client named
-- engine: what answered
-- calls: number of calls
-- prompt_tokens: tokens that were read
-- cached_tokens: how many of them came from a cache
-- completion_tokens: tokens that were written
-- cost: what was charged, where a price is known
-- unpriced: calls without a price
-- latency_ms_sum: of all calls, for means over several rows
-- latency_ms_p50: median latency
-- latency_ms_p95: the latency that 95 of 100 calls stay below
-- first_token_ms_p50: median time to the first token
SELECT
    toDate(happened_at) AS day, tenant, policy, model, engine, count() AS calls,
    sum(c.prompt_tokens) AS prompt_tokens, sum(c.cached_tokens) AS cached_tokens,
    sum(c.completion_tokens) AS completion_tokens, sum(c.cost) AS cost, countIf(c.cost IS NULL) AS unpriced,
    sum(c.latency_ms) AS latency_ms_sum, quantile(0.5)(c.latency_ms) AS latency_ms_p50,
    quantile(0.95)(c.latency_ms) AS latency_ms_p95, quantile(0.5)(c.first_token_ms) AS first_token_ms_p50
FROM model_calls AS c
GROUP BY day, tenant, policy, model, engine
