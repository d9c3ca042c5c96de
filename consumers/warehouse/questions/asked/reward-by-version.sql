-- Reward by version: of what each version sampled, and of what it was trained on.
--
-- A trajectory counts for the newest version that sampled a token of it. Evaluation that came as traffic counts in columns of its own; runs of
-- `millrace evaluate` are what `millrace ask evaluated` shows.
--
-- policy String: the model
SELECT version,
    countIf(what = 'sampled') AS sampled, avgIf(reward, what = 'sampled') AS sampled_reward,
    countIf(what = 'trained') AS trained_on, avgIf(reward, what = 'trained') AS trained_on_reward,
    countIf(what = 'evaluated') AS evaluated, avgIf(reward, what = 'evaluated') AS evaluation_reward
FROM
(
    SELECT assumeNotNull(newest_version) AS version, reward, if(split = 'train', 'sampled', 'evaluated') AS what
    FROM trajectories
    WHERE policy = {policy:String} AND newest_version IS NOT NULL AND reward IS NOT NULL
    UNION ALL
    SELECT version, reward, 'trained' AS what FROM samples
    WHERE policy = {policy:String} AND reward IS NOT NULL
)
GROUP BY version
ORDER BY version
