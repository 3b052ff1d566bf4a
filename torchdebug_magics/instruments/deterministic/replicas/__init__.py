"""Records what ranks need to compare their replicas of a model: collectives -> replicas -> digests at checkpoints -> record.

Only what is meant to be equal is noted: models under DistributedDataParallel, and parameters that a manual loop averages or broadcasts. No
collective is issued: the digests are compared when the ranks' reports come together.
"""
