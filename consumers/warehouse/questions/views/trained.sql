-- What trained each version, by place: one row a sample, as the ledger names it.
--
-- policy: the model that was trained
-- version: the version that came out
-- seq: place of its group in the order of learning; null: a branch, which has none
-- ticket: the grant of its group
-- group: its group
-- lost: why its group could not be read, so that it was consumed without training; null: it was read
-- trained_at: when the version was committed
-- topic: where the trajectory lies
-- part: where the trajectory lies
-- off: where the trajectory lies
SELECT
    policy, version, if(place.1 < 0, NULL, place.1) AS seq, place.2 AS ticket, place.3 AS `group`, place.4 AS lost,
    time AS trained_at, place.5.1 AS topic, place.5.2 AS part, place.5.3 AS off
FROM
(
    SELECT policy, version, time,
        arrayJoin(arrayFlatten(arrayMap(
            (seq, ticket, name, lost, places) -> arrayMap(place -> (seq, ticket, name, lost, place), places),
            `groups.seq`, `groups.ticket`, `groups.group`, `groups.lost`, `groups.trajectories`))) AS place
    FROM millrace_log.ledger
)
