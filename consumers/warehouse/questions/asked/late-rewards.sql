-- Rewards that came after their sample was sealed, and what they would have changed.
--
-- The reward of a sample is the sum of what the awaited sources said, or of all where none is awaited. A second
-- judgement of one target by one source and rubric counts only where it names the first one as superseded.
--
-- policy String: the model
WITH arrayFilter(x -> isNotNull(x.2) AND (empty(awaits) OR has(awaits, x.1)), after) AS summed
SELECT judged_at, trajectory, task, source, rubric, value, reward,
    if(notEmpty(summed) AND (isNotNull(reward) OR hasAll(arrayMap(x -> x.1, summed), awaits)),
        arraySum(arrayMap(x -> assumeNotNull(x.2), summed)), NULL) AS would_be,
    would_be - reward AS change, group_reward,
    group_reward + change / group_samples AS group_would_be, version
FROM
(
    SELECT l.judged_at AS judged_at, l.trajectory AS trajectory, t.task AS task, l.source AS source,
        l.rubric AS rubric, l.value AS value, l.sealed_reward AS reward, a.awaits AS awaits,
        g.reward AS group_reward, g.samples AS group_samples, g.version AS version,
        arrayMap(x -> (x.source, x.value), t.rewards) AS before,
        arrayMap(x -> (x.source, x.value),
            arrayFilter(x -> x.source != l.source OR x.reward_id != ifNull(l.supersedes, ''), t.rewards)) AS kept,
        multiIf(
            arrayExists(x -> x.source = l.source AND x.reward_id = l.reward_id, t.rewards), before,
            length(kept) < length(before), arrayPushBack(kept, (l.source, l.value)),
            has(k.judged, (l.target_kind, l.target, l.source, l.rubric)), before,
            arrayPushBack(before, (l.source, l.value))) AS after
    FROM (SELECT * FROM rewards WHERE fate = 'late_reward' AND policy = {policy:String}) AS l
    INNER JOIN (SELECT * FROM trajectories WHERE policy = {policy:String}) AS t ON t.trajectory = l.trajectory
    LEFT JOIN
    (
        SELECT root_trajectory AS trajectory, any(episode_started_awaits) AS awaits FROM millrace_log.events
        WHERE kind = 'episode_started' AND policy = {policy:String} GROUP BY trajectory
    ) AS a ON a.trajectory = l.trajectory
    LEFT JOIN
    (
        SELECT trajectory, groupArray((target_kind, target, source, rubric)) AS judged FROM rewards
        WHERE policy = {policy:String} AND fate IN ('counted', 'failed') GROUP BY trajectory
    ) AS k ON k.trajectory = l.trajectory
    LEFT JOIN (SELECT * FROM groups WHERE policy = {policy:String}) AS g ON g.`group` = t.`group`
)
ORDER BY judged_at, trajectory
