"""What one process knows of itself: thread_waits -> holders -> collectives -> process_facts. Runs in every process, without torch.

All that it says is plain JSON, as it travels from a child to the notebook.
"""
