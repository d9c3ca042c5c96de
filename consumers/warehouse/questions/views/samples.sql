-- Trajectories that trained a version, with how stale they were.
--
-- policy: the model that was trained
-- version: the version that came out
-- seq: place of its group in the order of learning; null: a branch, which has none
-- trajectory: id of the episode
-- tenant: whose traffic it is
-- group: its group
-- ticket: the grant of its group
-- sample: which sample of the group
-- task: the task, the same in every epoch
-- task_id: the task with its epoch
-- status: how the episode ended
-- reward: the reward that it was sealed with
-- tokens: tokens that may train
-- length: tokens in all of its lineages
-- sampled_from: the policy that sampled it; another one where a branch trained on it
-- oldest_version: oldest version of that policy among its trainable tokens
-- newest_version: newest version of that policy among its trainable tokens
-- staleness_sum: over its trainable tokens, how many versions older each is than the parent of the version that came out; 0: on-policy; null: another policy sampled it, whose numbers do not compare
-- staleness_mean: the same as a mean
-- sealed_at: when it was sealed
-- trained_at: when the version was committed
-- topic: where it lies
-- part: where it lies
-- off: where it lies
SELECT
    s.policy AS policy, s.version AS version, s.seq AS seq, t.id AS trajectory, t.tenant AS tenant,
    t.`group` AS `group`, t.ticket AS ticket, t.sample AS sample,
    replaceRegexpOne(t.task_id, '@[0-9]+$', '') AS task, t.task_id AS task_id, t.status AS status,
    t.reward AS reward, t.tokens AS tokens, t.length AS length, t.policy AS sampled_from,
    if(t.v_head < 0, NULL, t.v_head) AS oldest_version, if(t.v_tail < 0, NULL, t.v_tail) AS newest_version,
    if(s.policy = t.policy, t.tokens * (s.version - 1) - t.versions_sum, NULL) AS staleness_sum,
    if(t.tokens = 0, NULL, staleness_sum / t.tokens) AS staleness_mean,
    t.sealed_at AS sealed_at, s.trained_at AS trained_at, t.topic AS topic, t.part AS part, t.off AS off
FROM
(
    SELECT policy, tenant, id, `group`, ticket, sample, task_id, status, reward, tokens, length, v_head, v_tail,
        sealed_at, topic, part, off,
        arraySum(arrayMap((versions, mask) -> arraySum(arrayMap((v, m) -> v * m, versions, mask)),
            `lineages.versions`, `lineages.mask`)) AS versions_sum
    FROM millrace_log.trajectories
) AS t
INNER JOIN trained AS s ON t.topic = s.topic AND t.part = s.part AND t.off = s.off
WHERE s.lost IS NULL
