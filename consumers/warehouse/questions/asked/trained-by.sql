-- What trained a version: its samples, in the order of learning.
--
-- policy String: the model
-- version UInt64: which version
SELECT seq, `group`, sample, trajectory, tenant, task, reward, tokens, oldest_version, newest_version, staleness_mean,
    part, off
FROM samples
WHERE policy = {policy:String} AND version = {version:UInt64}
    AND (topic, part, off) IN
        (SELECT topic, part, off FROM trained WHERE policy = {policy:String} AND version = {version:UInt64})
ORDER BY seq, sample, part, off
