"""Merges the reports of many processes into one: a rank's report -> what it is compared by -> merged -> shown above one rank's page.

`compared` holds what ranks are compared by, `disagreements` finds where ranks differ that should agree, `merging` makes one report of all,
and `transport` makes a rank's record small enough to send. All of it is plain data; how a rank is reached is in `probing/children` and
`gathering`.
"""
