"""What a further run must find as the first one did: objects, iterators, modules, figures, settings; and what it cannot."""
