"""Cells that write to disk or reach the outside world, under every magic that runs something again.

writer (a row) -> writers (the table) -> forms (a row as the cell of a magic) -> outcome (run in a child) -> judge (against one plain run)
"""
