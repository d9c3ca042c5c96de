-- Weight versions, with what the learner said when it made them.
--
-- policy: the model
-- version: dense from 0
-- parent: the version that it was trained from
-- parent_policy: the policy of its parent, where that is another: version 0 of a branch
-- selection: of a branch, the query that chose what it was trained on
-- reward_source: of a branch, whose rewards it was trained on; null: those that were sealed
-- reward_rubric: of a branch, the rubric of these rewards
-- text_replies: of a branch, how many replies it was trained on as text, without exact tokens; null: none
-- text_form: of a branch, the renderer that wrote them
-- made_at: when it was committed
-- groups: groups that trained it
-- samples: trajectories that trained it
-- tokens: trainable tokens in its batch
-- reward: mean reward of its batch
-- staleness: mean over its trainable tokens of how many versions older they are than its parent
-- loss: of the step
-- eta: bound of staleness that was in force
-- seq_lo: first group of its batch, in the order of learning
-- seq_hi: one past the last
-- unchanged: why its bytes are its parent's; null: it was trained
-- masked_tokens: tokens that were masked because they were too old
-- layout: how the learner was laid out over ranks
-- ranks: number of ranks
-- leader: group member that led
-- metrics: everything that the step measured
-- config_hash: digest of the learner's configuration
-- code_hash: digest of the learner's code
-- libraries: versions of the libraries that matter
-- config: the learner's configuration as JSON, where it is known
-- models: digest of each model that the step read beside its own, by role
-- device: what rank 0 computed on
-- threads: of rank 0; 0: unknown
-- kernels: what rank 0 computed with, by what it is for: attention, fusion, optimizer, repeatable, tokens_per_pack
-- mode: what engines read: full, delta or adapter
-- uri: where its files are, as long as they are kept
-- digest: sha256 of its manifest
-- bytes: size of its weight files; null: unknown
SELECT
    w.policy AS policy, w.version AS version, w.parent AS parent, w.parent_policy AS parent_policy,
    w.selection AS selection, w.reward_source AS reward_source, w.reward_rubric AS reward_rubric,
    w.text_replies AS text_replies, w.text_form AS text_form, w.time AS made_at,
    length(l.`groups.seq`) AS `groups`, l.metrics['samples'] AS samples, l.metrics['tokens_trainable'] AS tokens,
    l.metrics['reward_mean'] AS reward, l.metrics['staleness_mean'] AS staleness, l.metrics['loss'] AS loss,
    l.eta AS eta, w.seq_lo AS seq_lo, w.seq_hi AS seq_hi, l.unchanged AS unchanged,
    l.masked_tokens AS masked_tokens, l.layout AS layout, length(l.`ranks.rank`) AS ranks, l.leader AS leader,
    l.metrics AS metrics, l.config_hash AS config_hash, l.code_hash AS code_hash, l.libraries AS libraries,
    l.config AS config, l.models AS models, l.device AS device, l.threads AS threads,
    l.kernels AS kernels,
    w.mode AS mode, w.uri AS uri, w.digest AS digest, w.full_bytes AS bytes
FROM millrace_log.weights AS w
LEFT JOIN millrace_log.ledger AS l ON l.policy = w.policy AND l.version = w.version
