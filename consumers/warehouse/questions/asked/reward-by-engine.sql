-- Reward by engine: whether one engine's samples come to less than another's.
--
-- A trajectory counts for every engine that answered one of its calls.
--
-- policy String: the model
SELECT engine, engine_start, count() AS samples, avg(reward) AS mean, sum(calls) AS calls
FROM
(
    SELECT c.engine AS engine, c.engine_start AS engine_start, t.part AS part, t.off AS off, any(t.reward) AS reward,
        count() AS calls
    FROM
    (
        SELECT part, off, reward, arrayJoin(calls) AS call FROM trajectories
        WHERE split = 'train' AND policy = {policy:String} AND reward IS NOT NULL
    ) AS t
    INNER JOIN (SELECT part, off, engine, engine_start FROM model_calls WHERE policy = {policy:String}) AS c
        ON c.part = t.call.2 AND c.off = t.call.3
    GROUP BY engine, engine_start, part, off
)
GROUP BY engine, engine_start
ORDER BY engine, engine_start
