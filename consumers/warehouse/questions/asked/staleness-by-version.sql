-- How stale the tokens were that trained each version.
--
-- A version of a branch has none: what it was trained on, another policy sampled.
--
-- policy String: the model
-- since UInt64 = 0: first version to show
SELECT version, sum(s.tokens) AS tokens, sum(age * s.tokens) / sum(s.tokens) AS mean, max(age) AS most,
    sumIf(s.tokens, age = 0) / sum(s.tokens) AS fresh_share
FROM staleness AS s
WHERE policy = {policy:String} AND version >= {since:UInt64}
GROUP BY version
ORDER BY version
