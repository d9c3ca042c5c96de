-- What a version was evaluated at: by `millrace evaluate`, and by held-out traffic.
--
-- Held-out traffic counts for the newest version that sampled a token of it. What `evaluate --gateway` asks is told
-- twice: as the run, and as the traffic that it made.
--
-- policy String: the model
-- version UInt64: which version
SELECT how, tasks, questions, answers, mean, standard_error, verifier, evaluated_at
FROM
(
    SELECT 'evaluate' AS how, tasks, toUInt64(questions) AS questions, toUInt64(questions * samples) AS answers, mean,
        standard_error, verifier, evaluated_at
    FROM evaluations
    WHERE policy = {policy:String} AND has(versions, {version:UInt64})
    UNION ALL
    SELECT 'traffic', task, 1, count(), avg(reward), NULL, '', max(sealed_at)
    FROM trajectories
    WHERE policy = {policy:String} AND split = 'evaluation' AND newest_version = {version:UInt64}
    GROUP BY task
)
ORDER BY how, tasks, evaluated_at
