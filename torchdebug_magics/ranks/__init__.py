"""Merges the reports of many processes into one: a rank's report -> what it is compared by -> merged -> shown above one rank's page.

`compared` holds what ranks are compared by, and makes it small enough to send; `disagreements` finds where ranks differ that should agree,
and `merging` makes one report of all. A rank sends a `RankRecord`, its report and what it is compared by, in `gather`, to the session that
launched it, or to the meeting of `run`. All of that is plain data.

How a rank is reached: launching -> agent (in the child) -> ask -> answer. Every process that `multiprocessing` starts while `Children` is
open gets an agent, a thread that sleeps until it is asked; a process that another program starts, such as ``torchrun``, gets one through a
folder on its ``PYTHONPATH``. Every process that is started while `FollowedRanks` is open runs under the same instrument: launching ->
rank_session (in the child) -> rank_traces (what it leaves, and what becomes of that).
"""
