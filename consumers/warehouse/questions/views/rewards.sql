-- Every judgement in the history, with what became of it.
--
-- policy: the model that was judged
-- tenant: whose traffic it is
-- group: the group of the episode
-- trajectory: id of the episode
-- reward_id: the judgement
-- target_kind: what was judged: trajectory, step, turn, token_span, tool_call or group
-- target: id of what was judged
-- source: who judged
-- source_version: which version of it
-- rubric: which version of its rubric
-- value: the judgement; null: the source failed, which is no zero
-- failure: how the source failed
-- supersedes: the judgement that it corrects
-- signal: what kind of source it is
-- replay: the replay that judged it anew from history; null: it was judged live
-- fate: counted, failed (it counts as a labelled failure), late_reward, superseded_reward, duplicate_reward,
--     superseded or failed_sample (its attempt did not count), not_sealed,
--     replayed (it was judged anew and changes no sample), or another reason of seal's dead letters
-- detail: the fate in words
-- sealed_reward: the reward that its sample was sealed with
-- sealed_at: when its sample was sealed; null: it is not
-- judged_at: when the judgement came into the history
-- part: where it lies in events
-- off: where it lies in events
SELECT
    e.policy AS policy, e.tenant AS tenant, e.`group` AS `group`, e.root AS trajectory, e.reward_id AS reward_id,
    e.target_kind AS target_kind, e.target AS target, e.source AS source, e.source_version AS source_version,
    e.rubric AS rubric, e.value AS value, e.failure AS failure, e.supersedes AS supersedes, e.signal AS signal,
    e.replay AS replay,
    multiIf(
        isNotNull(e.replay), 'replayed',
        d.reason != '', d.reason,
        t.trajectory = '' AND a.reason != '', a.reason,
        t.trajectory = '', 'not_sealed',
        NOT has(t.counted, (e.reward_id, e.source)), 'not_counted',
        e.value IS NULL, 'failed',
        'counted') AS fate,
    if(d.reason = '' AND t.trajectory = '', a.detail, d.detail) AS detail,
    t.reward AS sealed_reward,
    if(t.trajectory = '', NULL, t.sealed_at) AS sealed_at, e.judged_at AS judged_at, e.part AS part, e.off AS off
FROM
(
    SELECT policy, tenant, `group`, root_trajectory AS root, reward_reward_id AS reward_id,
        toString(reward_target_kind) AS target_kind, reward_target AS target, reward_source AS source,
        reward_source_version AS source_version, reward_rubric_version AS rubric, reward_value AS value,
        reward_failure AS failure, reward_supersedes AS supersedes, reward_signal AS signal, reward_replay AS replay,
        log_time AS judged_at,
        topic, part, off
    FROM millrace_log.events
    WHERE kind = 'reward'
) AS e
LEFT JOIN
(
    SELECT place_topic, place_partition, place_offset, reason, detail FROM millrace_log.dead_letters
    WHERE stage = 'seal'
) AS d ON d.place_topic = e.topic AND d.place_partition = e.part AND d.place_offset = e.off
LEFT JOIN
(
    SELECT policy, id AS trajectory, reward, sealed_at,
        arrayZip(`rewards.reward_id`, `rewards.source`) AS counted
    FROM millrace_log.trajectories
    UNION ALL
    SELECT policy, id AS trajectory, reward, sealed_at,
        arrayZip(`rewards.reward_id`, `rewards.source`) AS counted
    FROM millrace_log.evaluations
) AS t ON t.policy = e.policy AND t.trajectory = e.root
LEFT JOIN
(
    SELECT policy, trajectory, any(l.reason) AS reason, any(l.detail) AS detail FROM millrace_log.dead_letters AS l
    WHERE l.stage = 'seal' AND l.reason IN ('superseded', 'failed_sample', 'unfoldable')
    GROUP BY policy, trajectory
) AS a ON a.policy = e.policy AND a.trajectory = e.root
