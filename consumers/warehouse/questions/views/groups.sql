-- What became of every group and ticket.
--
-- policy: the model
-- ticket: the grant; groups that nobody asked for get theirs when they are admitted
-- group: the group
-- task: the task, the same in every epoch; null: nobody asked for it
-- task_id: the task with its epoch
-- asked_for: whether a grant asked for it
-- outcome: ready (it trains), rejected, failed, expired, stale or declined
-- reason: the outcome in words
-- size: samples that it needs
-- samples: samples that it has
-- rewards: of each sample
-- reward: their mean
-- spread: their standard deviation; 0 teaches nothing
-- oldest_version: oldest version among its trainable tokens
-- newest_version: newest version among its trainable tokens
-- min_version: no token may come from an older version
-- deadline: last version that may learn from it
-- seq: its place in the order of learning; null: it does not train
-- version: the version that it trained; null: none yet
-- resolved_at: when its outcome was decided, in log time
-- trained_at: when its version was committed
SELECT
    r.policy AS policy, r.ticket AS ticket, r.`group` AS `group`,
    replaceRegexpOne(r.prompt_id, '@[0-9]+$', '') AS task, r.prompt_id AS task_id, r.solicited AS asked_for,
    toString(r.kind) AS outcome, r.reason AS reason, r.size AS size, length(r.rewards) AS samples,
    r.rewards AS rewards, if(empty(r.rewards), NULL, arrayAvg(r.rewards)) AS reward,
    if(empty(r.rewards), NULL, sqrt(arrayAvg(arrayMap(x -> x * x, r.rewards)) - pow(arrayAvg(r.rewards), 2))) AS spread,
    if(r.v_head < 0, NULL, r.v_head) AS oldest_version, if(r.v_tail < 0, NULL, r.v_tail) AS newest_version,
    r.min_version AS min_version, r.deadline AS deadline, r.seq AS seq,
    l.version AS version, r.time AS resolved_at, l.trained_at AS trained_at
FROM (SELECT * FROM millrace_log.resolutions WHERE kind != 'setting') AS r
LEFT JOIN
(
    SELECT policy, toNullable(version) AS version, toNullable(time) AS trained_at, arrayJoin(`groups.seq`) AS seq
    FROM millrace_log.ledger
) AS l ON l.policy = r.policy AND l.seq = r.seq
