"""In whose hands it is: ``block -> path of the holder -> line that keeps it -> what to write instead``, and what that frees."""
