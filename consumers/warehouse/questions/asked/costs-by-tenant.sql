-- Tokens, cost and latency by policy, tenant and model.
--
-- policy String = '': the model being trained or observed; empty: every one
-- tenant String = '': whose traffic; empty: everybody's
-- days UInt32 = 0: how many days back; 0: all of them
SELECT policy, tenant, model, engine, count() AS calls, sum(c.prompt_tokens) AS prompt_tokens,
    sum(c.cached_tokens) AS cached_tokens, sum(c.completion_tokens) AS completion_tokens, sum(c.cost) AS cost,
    quantileExact(0.5)(c.latency_ms) AS latency_ms_p50, quantileExact(0.95)(c.latency_ms) AS latency_ms_p95
FROM model_calls AS c
WHERE ({policy:String} = '' OR policy = {policy:String})
    AND ({tenant:String} = '' OR tenant = {tenant:String})
    AND ({days:UInt32} = 0 OR happened_at >= now() - toIntervalDay({days:UInt32}))
GROUP BY policy, tenant, model, engine
ORDER BY policy, tenant, model, engine
