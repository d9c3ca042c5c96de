"""The elastic learner: members of one consumer group that train together and commit one version a step."""
