-- What trained a version: its samples, in the order of learning.
--
-- Oldest and newest version are of the policy in sampled_from. What a branch took from another one has no staleness,
-- since the numbers of two policies do not compare.
--
-- policy String: the model
-- version UInt64: which version
SELECT seq, `group`, sample, trajectory, tenant, task, reward, tokens, sampled_from, oldest_version,
    newest_version, staleness_mean, part, off
FROM samples
WHERE policy = {policy:String} AND version = {version:UInt64}
    -- what the join decides is looked up by two numbers first, which costs half of a look-up with the topic's name
    AND (part, off) IN
        (SELECT part, off FROM trained WHERE policy = {policy:String} AND version = {version:UInt64})
ORDER BY seq, sample, part, off
