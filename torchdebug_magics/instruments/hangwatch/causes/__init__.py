"""Why nothing goes on: stopped (errors and ranks, then locks and queues), else what takes the time. Each cause reads the evidence alone."""
