"""What one process knows of itself: each thread's wait -> who holds what it waits for -> its collectives -> the facts of the process.

Runs in every process that is asked, and does not import torch. All that it says is plain JSON, as it travels from a child to the notebook.
"""
