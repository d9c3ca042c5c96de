-- Which versions, of every policy, learned from a trajectory, a task, a tenant or a model's replies.
--
-- Without a parameter it tells for every version how much it learned from. A branch learned from what another policy
-- sampled, so a trajectory may have been seen by both.
--
-- policy String = '': the policy that learned; empty: every one
-- trajectory String = '': id of an episode; empty: any
-- task String = '': a task, in every epoch; empty: any
-- tenant String = '': whose traffic; empty: any
-- model String = '': a model that answered a call of the episode, as the client named it; empty: any
SELECT policy, version, count() AS samples, uniqExact(`group`) AS `groups`, sum(s.tokens) AS tokens,
    min(s.trained_at) AS trained_at
FROM samples AS s
WHERE ({policy:String} = '' OR policy = {policy:String})
    AND ({trajectory:String} = '' OR trajectory = {trajectory:String})
    AND ({task:String} = '' OR task = {task:String})
    AND ({tenant:String} = '' OR tenant = {tenant:String})
    AND ({model:String} = '' OR (sampled_from, trajectory) IN
        (SELECT policy, trajectory FROM model_calls WHERE model = {model:String}))
GROUP BY policy, version
ORDER BY policy, version
