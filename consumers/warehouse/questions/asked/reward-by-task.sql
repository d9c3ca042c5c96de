-- Reward by task: which tasks are learned, which are too easy and which too hard.
--
-- policy String: the model
-- split String = 'train': train or evaluation
SELECT task, count() AS samples, countIf(reward IS NULL) AS without_reward, avg(reward) AS mean,
    stddevPop(reward) AS spread, argMinIf(reward, (newest_version, sealed_at), reward IS NOT NULL) AS first_reward,
    argMaxIf(reward, (newest_version, sealed_at), reward IS NOT NULL) AS last_reward
FROM trajectories
WHERE policy = {policy:String} AND split = {split:String} AND tokens > 0
GROUP BY task
ORDER BY mean, task
