"""Getting into child processes: launch -> agent (in the child) -> ask -> answer.

Every process that `multiprocessing` starts while `Children` is open gets an agent, a thread that sleeps until it is asked. A process that
another program starts, such as ``torchrun``, gets one through the folder `startup` on its ``PYTHONPATH``.
"""
