-- Where groups wait, from the grant to the version: one row a group that a grant asked for.
--
-- policy: the model
-- ticket: the grant
-- group: the group
-- task: the task, the same in every epoch
-- outcome: what became of it; null: not resolved yet
-- version: the version that it trained; null: none
-- granted_at: when it was granted
-- started_at: when its first attempt began
-- ended_at: when its last attempt ended
-- completed_at: when its last sample was sealed
-- resolved_at: when its outcome was decided
-- trained_at: when its version was committed
-- start_s: from the grant until an agent began: too few rollout workers
-- rollout_s: from the first start to the last end: the agents and their models
-- reward_s: from the last end until it was complete: judges
-- order_s: from complete to its outcome: groups before it in the order of learning. A little below 0 where one slot
--     was ahead of the slowest, whose time is dispatch's
-- train_s: from ready to trained: the rest of its batch, and the learner
-- total_s: from the grant to the version
SELECT
    g.policy AS policy, g.ticket AS ticket, e.name AS `group`,
    replaceRegexpOne(g.task_id, '@[0-9]+$', '') AS task, r.outcome AS outcome, r.version AS version,
    g.granted_at AS granted_at, e.started_at AS started_at, e.ended_at AS ended_at, c.completed_at AS completed_at,
    r.resolved_at AS resolved_at, r.trained_at AS trained_at,
    dateDiff('microsecond', granted_at, started_at) / 1e6 AS start_s,
    dateDiff('microsecond', started_at, ended_at) / 1e6 AS rollout_s,
    dateDiff('microsecond', ended_at, completed_at) / 1e6 AS reward_s,
    dateDiff('microsecond', completed_at, resolved_at) / 1e6 AS order_s,
    dateDiff('microsecond', resolved_at, trained_at) / 1e6 AS train_s,
    dateDiff('microsecond', granted_at, trained_at) / 1e6 AS total_s
FROM
(
    SELECT policy, ticket, any(prompt_id) AS task_id, min(time) AS granted_at FROM millrace_log.grants
    GROUP BY policy, ticket
) AS g
LEFT JOIN
(
    SELECT policy, `group` AS name, max(episode_started_ticket) AS ticket,
        minOrNullIf(log_time, kind = 'episode_started') AS started_at,
        maxOrNullIf(log_time, kind = 'episode_ended') AS ended_at
    FROM millrace_log.events
    WHERE kind IN ('episode_started', 'episode_ended')
    GROUP BY policy, name
    HAVING ticket IS NOT NULL
) AS e ON e.policy = g.policy AND e.ticket = g.ticket
LEFT JOIN
(
    SELECT policy, ticket, maxOrNull(time) AS completed_at FROM millrace_log.completions
    WHERE kind IN ('complete', 'short')
    GROUP BY policy, ticket
) AS c ON c.policy = g.policy AND c.ticket = g.ticket
LEFT JOIN
(
    SELECT policy, ticket, toNullable(outcome) AS outcome, version, toNullable(resolved_at) AS resolved_at, trained_at
    FROM groups
) AS r ON r.policy = g.policy AND r.ticket = g.ticket
