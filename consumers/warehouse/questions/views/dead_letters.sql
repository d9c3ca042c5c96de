-- What could not be processed or did not count, and why: references, never content.
--
-- policy: whose it is, where it could be read
-- tenant: whose traffic it is, where it could be read
-- stage: who refused it
-- reason: the code; docs/dispositions.md explains each
-- detail: in words
-- about: the topic where the refused record lies
-- part: its partition
-- off: its offset
-- event: id of the refused event, where it could be read
-- group: its group, where it could be read
-- trajectory: its trajectory, where it could be read
-- refused_at: when it was refused, in log time
SELECT policy, tenant, stage, reason, detail, place_topic AS about, place_partition AS part, place_offset AS off,
    event_id AS event, `group`, trajectory, time AS refused_at
FROM millrace_log.dead_letters
