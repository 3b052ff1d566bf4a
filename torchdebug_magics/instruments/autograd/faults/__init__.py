"""Faults that raise nothing: what is noted at each backward and update of the recorded steps -> what it means, worst first."""
