-- Sealed trajectories: one row a sample that ended, of training and of evaluation.
--
-- policy: the model it was sampled from or recorded for
-- tenant: whose traffic it is
-- trajectory: id of the episode
-- group: the group it belongs to; samples of one group have one task
-- ticket: the grant that asked for it; null: nobody did
-- sample: which sample of the group
-- attempt: which run of that sample
-- task: the task, the same in every epoch
-- task_id: the task with its epoch, as it was handed out
-- split: train, or evaluation, which never trains
-- status: how the episode ended: completed, failed, truncated, aborted or abandoned
-- reward: sum of what the awaited sources said; null: a source was silent or failed
-- rewards: what it was combined from: (reward_id, source, rubric, value, failure)
-- missing: awaited sources that stayed silent
-- oldest_version: oldest version among its trainable tokens; null: it has none
-- newest_version: newest version among its trainable tokens; null: it has none
-- tokens: tokens that may train
-- length: tokens in all of its lineages
-- excluded: replies that were left out, as response:reason
-- calls: places of its model calls in events: (topic, partition, offset)
-- sealed_at: when it was sealed, in log time
-- topic: where it lies
-- part: where it lies
-- off: where it lies
SELECT
    policy, tenant, id AS trajectory, `group`, ticket, sample, attempt,
    replaceRegexpOne(task_id, '@[0-9]+$', '') AS task,
    task_id, split, status, reward,
    arrayMap((id, source, rubric, value, failure) ->
        CAST((id, source, rubric, value, failure), 'Tuple(reward_id String, source String, rubric String,
            value Nullable(Float64), failure Nullable(String))'),
        `rewards.reward_id`, `rewards.source`, `rewards.rubric_version`, `rewards.value`, `rewards.failure`) AS rewards,
    missing,
    if(v_head < 0, NULL, v_head) AS oldest_version,
    if(v_tail < 0, NULL, v_tail) AS newest_version,
    tokens, length, excluded, arrayZip(`events.topic`, `events.partition`, `events.offset`) AS calls,
    sealed_at, topic, part, off
FROM
(
    SELECT * FROM millrace_log.trajectories
    UNION ALL
    SELECT * FROM millrace_log.evaluations
)
