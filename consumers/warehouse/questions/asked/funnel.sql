-- What became of everything: attempts, samples, groups, judgements and refused records, by disposition.
--
-- policy String: the model
SELECT what, disposition, count
FROM
(
    SELECT 1 AS place, 'attempt' AS what, 'started' AS disposition, count() AS count
    FROM steps WHERE policy = {policy:String} AND kind = 'episode_started'
    UNION ALL
    SELECT 2, 'attempt', 'ended', count() FROM steps WHERE policy = {policy:String} AND kind = 'episode_ended'
    UNION ALL
    SELECT 3, 'sample', multiIf(
        split = 'evaluation', 'evaluation', tokens = 0, 'nothing trainable', reward IS NULL, 'no reward',
        'fit'), count()
    FROM trajectories WHERE policy = {policy:String} GROUP BY 3
    UNION ALL
    SELECT 4, 'group', outcome, count() FROM groups WHERE policy = {policy:String} GROUP BY outcome
    UNION ALL
    SELECT 5, 'sample', 'trained', count() FROM samples WHERE policy = {policy:String}
    UNION ALL
    SELECT 6, 'reward', fate, count() FROM rewards WHERE policy = {policy:String} GROUP BY fate
    UNION ALL
    SELECT 7, concat('dead letter of ', stage), reason, count()
    FROM dead_letters WHERE policy = {policy:String} OR policy IS NULL GROUP BY stage, reason
)
WHERE count > 0
ORDER BY place, what, count DESC, disposition
