-- Where groups wait on their way into a version, in seconds: the largest column is the bottleneck.
--
-- policy String: the model
-- since UInt64 = 0: first version to show
SELECT version, count() AS `groups`, avg(w.start_s) AS start_s, avg(w.rollout_s) AS rollout_s,
    avg(w.reward_s) AS reward_s,
    avg(w.order_s) AS order_s, avg(w.train_s) AS train_s, avg(w.total_s) AS total_s, max(w.total_s) AS longest_s
FROM waits AS w
WHERE policy = {policy:String} AND version >= {since:UInt64}
GROUP BY version
ORDER BY version
