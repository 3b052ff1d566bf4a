"""The error that ended the cell: its message -> kind -> where it began, from the graph, the tape and the traceback's frames."""
