"""Getting into child processes: launch -> agent (in the child) -> ask -> answer.

Every process that `multiprocessing` starts while `Children` is open gets an agent, a thread that sleeps until it is asked. A process that
another program starts, such as ``torchrun``, gets one through a folder on its ``PYTHONPATH``.

Every process that is started while `FollowedRanks` is open runs under the same instrument: following -> rank_session (in the child) ->
rank_traces (what it leaves, and what becomes of that).
"""
