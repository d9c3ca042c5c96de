-- What versions, and other models, came to on held-out tasks: one row a run of `millrace evaluate`.
--
-- policy: in whose history it is kept
-- version: the one version that answered; null: another model, or several versions
-- versions: all versions that answered
-- tasks: name of the tasks
-- mean: over tasks of the mean reward; null: nothing was judged
-- standard_error: of the mean over tasks; null: fewer than two tasks
-- pass_at: pass@k by k
-- questions: tasks that were asked
-- samples: answers to each
-- unfinished: answers that were cut off
-- unjudged: answers on which the verifier failed
-- verifier: what judged
-- success: reward from which an answer is right
-- model: the directory, or the gateway, that answered
-- digest: of the weight directory
-- engine: what sampled
-- agent: the agent that ran; null: one reply to each task
-- temperature: of sampling
-- max_tokens: of an answer
-- seed: of every random choice
-- tasks_digest: the same for the same tasks
-- task_ids: each task
-- task_rewards: of each task, the reward of each answer
-- evaluation: id of the run
-- evaluated_at: when it was done
SELECT policy, version, versions, tasks, mean, standard_error, pass_at, questions, samples, unfinished,
    unjudged, verifier, success, model, digest, engine, agent, temperature, max_tokens, seed, tasks_digest,
    `scores.task_id` AS task_ids, `scores.rewards` AS task_rewards, id AS evaluation, time AS evaluated_at
FROM millrace_log.scores
