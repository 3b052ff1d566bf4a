"""Many processes, one report: each rank's own report -> what of it is compared -> merged -> shown above the first one's page.

`compared` says what a rank tells of its report, `merging` puts ranks together, `disagreements` finds where they differ, `transport` makes a
rank small enough to travel. All of it is plain data; how a rank is reached is in `probing/children` and `gathering`.
"""
