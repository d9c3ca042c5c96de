-- Which versions learned from a trajectory, a task, a tenant or a model's replies.
--
-- Without a parameter it tells for every version how much it learned from.
--
-- policy String: the model
-- trajectory String = '': id of an episode; empty: any
-- task String = '': a task, in every epoch; empty: any
-- tenant String = '': whose traffic; empty: any
-- model String = '': a model that answered a call of the episode, as the client named it; empty: any
SELECT version, count() AS samples, uniqExact(`group`) AS `groups`, sum(s.tokens) AS tokens,
    min(s.trained_at) AS trained_at
FROM samples AS s
WHERE policy = {policy:String}
    AND ({trajectory:String} = '' OR trajectory = {trajectory:String})
    AND ({task:String} = '' OR task = {task:String})
    AND ({tenant:String} = '' OR tenant = {tenant:String})
    AND ({model:String} = '' OR trajectory IN
        (SELECT trajectory FROM model_calls WHERE policy = {policy:String} AND model = {model:String}))
GROUP BY version
ORDER BY version
