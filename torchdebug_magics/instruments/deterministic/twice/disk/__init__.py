"""Files and folders: a run that is made once more finds them as the first one did, and changes none that is there."""
