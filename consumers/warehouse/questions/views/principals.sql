-- Keys of clients, as `millrace key` made and revoked them.
--
-- id: public name of the key
-- client: whose it is
-- tenant: whose traffic it sends; * stands for all
-- roles: what it may do
-- scopes: names for policies of a later release
-- reward_sources: reserved reward sources that it may speak for
-- made_at: when it was made
-- made_by: who made it
-- not_before: from when it may be used; null: from the start
-- expires: from when it may be used no more; null: never
-- replaces: the key of which it is the rotation
-- revoked_at: when it was revoked; null: it was not
-- revoked_by: who revoked it
-- reason: why it was revoked
-- last_used: when it was used last, up to an hour too early; null: never
-- max_in_flight: most requests at once
-- max_rate: most requests a second
-- tokens_per_minute: tokens in a minute
-- budget: money in budget_hours
-- budget_hours: hours of the budget
SELECT
    g.id AS id, g.client AS client, g.tenant AS tenant, g.roles AS roles, g.scopes AS scopes,
    g.reward_sources AS reward_sources, g.time AS made_at, g.author AS made_by, g.not_before AS not_before,
    g.expires AS expires, g.replaces AS replaces, r.at AS revoked_at, r.by AS revoked_by, r.why AS reason,
    u.at AS last_used, g.max_in_flight AS max_in_flight, g.max_rate AS max_rate,
    g.tokens_per_minute AS tokens_per_minute, g.budget AS budget, g.budget_hours AS budget_hours
FROM (SELECT * FROM millrace_log.principals WHERE act = 'grant' ORDER BY off DESC LIMIT 1 BY topic, id) AS g
LEFT JOIN (
    SELECT topic, id, toNullable(argMax(time, off)) AS at, toNullable(argMax(author, off)) AS by,
        argMax(tuple(reason), off).1 AS why
    FROM millrace_log.principals WHERE act = 'revoke' GROUP BY topic, id
) AS r ON r.topic = g.topic AND r.id = g.id
LEFT JOIN (
    SELECT topic, id, toNullable(argMax(time, off)) AS at FROM millrace_log.principals WHERE act = 'use'
    GROUP BY topic, id
) AS u ON u.topic = g.topic AND u.id = g.id
