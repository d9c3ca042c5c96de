-- How old the tokens were that trained each version: one row a version and age.
--
-- What a branch took from another policy is left out, since the numbers of two policies do not compare.
--
-- policy: the model that was trained
-- version: the version that came out
-- age: versions between the one that sampled a token and the one that came out; 0: on-policy
-- tokens: trainable tokens of that age
SELECT policy, version, version - 1 - sampled_by AS age, sum(sampled) AS tokens
FROM
(
    SELECT s.policy AS policy, s.version AS version, t.sampled_by AS sampled_by, t.sampled AS sampled
    FROM
    (
        SELECT policy, topic, part, off, arrayJoin(arrayDistinct(trained)) AS sampled_by,
            countEqual(trained, sampled_by) AS sampled
        FROM
        (
            SELECT policy, topic, part, off, arrayFlatten(arrayMap((versions, mask) ->
                arrayFilter((v, m) -> m = 1, versions, mask), `lineages.versions`, `lineages.mask`)) AS trained
            FROM millrace_log.trajectories
        )
    ) AS t
    INNER JOIN trained AS s ON t.topic = s.topic AND t.part = s.part AND t.off = s.off
    WHERE s.lost IS NULL AND s.policy = t.policy
)
GROUP BY policy, version, age
