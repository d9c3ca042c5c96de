-- Two versions on the same tasks: reward of what each sampled.
--
-- A trajectory counts for the newest version that sampled a token of it. Tasks that only one of them met are left out.
--
-- policy String: the model
-- a UInt64: the version behind samples_a and reward_a
-- b UInt64: the version behind samples_b and reward_b
SELECT task, split,
    countIf(newest_version = {a:UInt64}) AS samples_a, avgIf(reward, newest_version = {a:UInt64}) AS reward_a,
    countIf(newest_version = {b:UInt64}) AS samples_b, avgIf(reward, newest_version = {b:UInt64}) AS reward_b,
    reward_b - reward_a AS difference
FROM trajectories
WHERE policy = {policy:String} AND newest_version IN ({a:UInt64}, {b:UInt64}) AND reward IS NOT NULL
GROUP BY task, split
HAVING samples_a > 0 AND samples_b > 0
ORDER BY task, split
