"""Rules for layers of torch's and the functions behind them: facts -> sentence and edits."""
